"""A page never has two owners, and neighbouring pages are kept together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import Capacity, Internal
from chitu.kv_cache.page_allocator import PageAllocator


def test_a_reservation_is_one_run_where_a_run_is_free() -> None:
    allocator = PageAllocator(16)
    assert allocator.reserve(4) == [0, 1, 2, 3]
    assert allocator.reserve(2) == [4, 5]
    allocator.release([1, 2])
    assert allocator.reserve(2) == [1, 2], "the shortest run that fits is taken first"


def test_a_table_grows_into_its_neighbour_when_that_is_free() -> None:
    allocator = PageAllocator(16)
    first = allocator.reserve(2)
    allocator.reserve(1)
    assert allocator.reserve(1, after=2) == [3]
    assert allocator.reserve(1, after=first[-1]) != [2], "page 2 is taken"


def test_scattered_pages_serve_when_no_run_is_long_enough() -> None:
    allocator = PageAllocator(8)
    pages = allocator.reserve(8)
    allocator.release(pages[::2])
    assert sorted(allocator.reserve(4)) == pages[::2]


def test_too_many_pages_raise_capacity_and_take_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.reserve(3)
    with pytest.raises(Capacity, match="2 pages wanted, 1 of 4"):
        allocator.reserve(2)
    assert allocator.num_free == 1


def test_quarantined_pages_are_not_given_out_until_released() -> None:
    allocator = PageAllocator(4)
    pages = allocator.reserve(4)
    allocator.quarantine(pages[:2])
    assert (allocator.num_used, allocator.num_quarantined, allocator.num_free) == (2, 2, 0)
    allocator.release(pages)
    assert allocator.num_free == 4


@pytest.mark.parametrize("mistake", ["release twice", "release one page twice in a call", "quarantine a free page"])
def test_mistakes_are_loud(mistake: str) -> None:
    allocator = PageAllocator(4)
    pages = allocator.reserve(2)
    with pytest.raises(Internal):
        if mistake == "release one page twice in a call":
            allocator.release([pages[0], pages[0]])
        else:
            allocator.release(pages)
            (allocator.release if mistake == "release twice" else allocator.quarantine)(pages)


@given(st.lists(st.tuples(st.sampled_from(["reserve", "release", "quarantine"]), st.integers(1, 9)), max_size=60))
def test_no_page_is_ever_in_two_hands(actions: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(24)
    held: list[list[int]] = []
    quarantined: list[list[int]] = []
    for action, number in actions:
        if action == "reserve" and number <= allocator.num_free:
            pages = allocator.reserve(number, after=held[-1][-1] if held else -1)
            assert len(set(pages)) == number
            assert not set(pages) & {page for other in held + quarantined for page in other}
            held.append(pages)
        elif action == "release" and held:
            allocator.release(held.pop(number % len(held)))
        elif action == "quarantine" and held:
            quarantined.append(held.pop(number % len(held)))
            allocator.quarantine(quarantined[-1])
        in_use = sum(map(len, held))
        set_aside = sum(map(len, quarantined))
        assert (allocator.num_used, allocator.num_quarantined) == (in_use, set_aside)
        assert allocator.num_free == 24 - in_use - set_aside
