"""The page tables of an instance."""

import pytest

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import Capacity, Internal

ROOM, OTHER = b"a" * 16, b"b" * 16


def test_a_table_grows_only_when_its_pages_are_full() -> None:
    cache = PagedKVCacheManager(8, page_size=4)
    assert len(cache.reserve(ROOM, 5)) == 2
    assert cache.reserve(ROOM, 8) == []
    assert len(cache.reserve(ROOM, 9)) == 1
    assert len(cache.get_page_indices(ROOM)) == 3


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    cache = PagedKVCacheManager(2, page_size=4)
    cache.reserve(ROOM, 4)
    with pytest.raises(Capacity):
        cache.reserve(OTHER, 8)
    assert cache.allocator.num_free == 1
    assert not cache.get_page_indices(OTHER)
    cache.remove_task(OTHER)


def test_transferred_pages_become_the_rooms_own_once() -> None:
    cache = PagedKVCacheManager(8, page_size=4)
    pages = cache.reserve_for_transfer(ROOM, 6)
    with pytest.raises(Internal, match="pages other than"):
        cache.insert_kv_cache_from_transfer(ROOM, [pages[1], pages[0]], 6)
    cache.insert_kv_cache_from_transfer(ROOM, pages, 6)
    with pytest.raises(Internal, match="expects none"):
        cache.insert_kv_cache_from_transfer(ROOM, pages, 6)


def test_quarantined_pages_come_back_with_remove_task_and_twice_is_harmless() -> None:
    cache = PagedKVCacheManager(8, page_size=4)
    cache.reserve_for_transfer(ROOM, 6)
    cache.quarantine(ROOM)
    assert (cache.allocator.num_free, cache.allocator.num_quarantined) == (6, 2)
    with pytest.raises(Internal, match="1 page tables left"):
        cache.check_idle()
    cache.remove_task(ROOM)
    cache.remove_task(ROOM)
    cache.check_idle()
