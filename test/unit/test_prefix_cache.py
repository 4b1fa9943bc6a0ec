"""The page account with a prefix cache: whichever requests come and go, a prompt begins with pages that hold its own
tokens, and every page has one owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import Capacity, Internal
from chitu.kv_cache.page_allocator import PageAllocator
from chitu.kv_cache.prefix_index import PageKeys
from chitu.protocol import pack_i32

NUM_PAGES, PAGE_SIZE = 10, 2
Content = tuple[str, tuple[int, ...]]
"""Salt, and all tokens up to a page's end."""


@dataclass
class Room:
    salt: str
    tokens: list[int]
    keys: PageKeys | None
    num_written: int = 0


class Saltless(PagedKVCacheManager):
    """A cache manager whose keys leave out the salt."""

    def page_keys(self, cache_salt: str) -> PageKeys | None:
        return super().page_keys("")


class Pool:
    """A pool that notes what a page should hold where a real instance writes K and V, and checks it before a use."""

    def __init__(self, cache: type[PagedKVCacheManager] = PagedKVCacheManager) -> None:
        self.cache = cache(NUM_PAGES, PAGE_SIZE, fingerprint=b"model")
        self.content: dict[int, Content] = {}
        self.rooms: dict[bytes, Room] = {}
        self.receiving: set[bytes] = set()
        self.quarantined: set[bytes] = set()
        self.count = 0

    def begin(self, argument: tuple[str, list[int]]) -> None:
        self._begin(argument, to_compute=1)

    def receive(self, argument: tuple[str, list[int]]) -> None:
        """Begin a request as D does: a peer writes the pages that are not cached."""
        room = self._begin(argument, to_compute=0)
        if room is not None:
            self.receiving.add(room)

    def _begin(self, argument: tuple[str, list[int]], to_compute: int) -> bytes | None:
        salt, tokens = argument
        keys = self.cache.page_keys(salt)
        prompt = pack_i32(tokens)
        self.count += 1
        room = self.count.to_bytes(16, "little")
        wanted = self.cache.pages_wanted(keys, prompt, to_compute)
        if wanted > self.cache.num_available_pages:
            assert self.cache.num_available_pages < self.cache.pages_for(len(tokens))
            return None
        cached = self.cache.begin(room, keys, prompt, to_compute)
        assert cached <= len(tokens) - to_compute and cached % PAGE_SIZE == 0
        (self.cache.reserve if to_compute else self.cache.reserve_for_transfer)(room, len(tokens))
        self.rooms[room] = Room(salt, list(tokens), keys, cached)
        self._check_content(room)
        return room

    def compute(self, number: int) -> None:
        """Compute the rest of the prompt (on D: note that it has landed), or one more token."""
        room = self._pick(number)
        if room is None:
            return
        record = self.rooms[room]
        if room in self.receiving:
            self._refuse_commit(room)
            self.receiving.remove(room)
            self.cache.insert_kv_cache_from_transfer(room, self.cache.get_page_indices(room), len(record.tokens))
        elif record.num_written == len(record.tokens):
            record.tokens.append(number % 3)
            try:
                self.cache.reserve(room, len(record.tokens))
            except Capacity:
                record.tokens.pop()
                return
        table = self.cache.get_page_indices(room)
        for position in range(record.num_written // PAGE_SIZE, self.cache.pages_for(len(record.tokens))):
            for other in self.rooms:
                assert other == room or table[position] not in self.cache.get_page_indices(other), "a shared page"
            self.content[table[position]] = (record.salt, tuple(record.tokens[: (position + 1) * PAGE_SIZE]))
        record.num_written = len(record.tokens)
        self.cache.commit(room, record.keys, pack_i32(record.tokens), record.num_written)
        self._check_content(room)

    def _refuse_commit(self, room: bytes) -> None:
        """Check that pages of a room that a peer may still write to are not committed."""
        record, before = self.rooms[room], len(self.cache._index)
        self.cache.commit(room, record.keys, pack_i32(record.tokens), len(record.tokens))
        assert len(self.cache._index) == before

    def end(self, number: int) -> None:
        room = self._pick(number)
        if room is not None:
            self._remove(room)

    def quarantine(self, number: int) -> None:
        room = self._pick(number)
        if room is not None:
            self.cache.quarantine(room)
            self._refuse_commit(room)
            del self.rooms[room]
            self.receiving.discard(room)
            self.quarantined.add(room)

    def settle(self, _number: int) -> None:
        for room in self.quarantined:
            self.cache.remove_task(room)
        self.quarantined.clear()

    def flush(self, _number: int) -> None:
        self.cache.flush()
        assert not self.cache.allocator.num_cached
        assert self.cache.pages_wanted(self.cache.page_keys(""), pack_i32([0, 0, 0])) == 2

    def check(self) -> None:
        cache, of = self.cache, self.cache.allocator
        counts = (of.num_free, of.num_used, of.num_quarantined, of.num_cached)
        assert sum(counts) == NUM_PAGES and min(counts) >= 0
        for room in self.rooms:
            self._check_content(room)
        coming_back = cache.pages_coming_back()
        coming = sum(coming_back(room) for room in (*self.rooms, *self.quarantined))
        assert coming + cache.num_available_pages == NUM_PAGES
        entries = sum(len(cache.get_page_indices(room)) for room in (*self.rooms, *self.quarantined))
        assert entries - cache.num_shared_pages <= of.num_used + of.num_quarantined

    def _pick(self, number: int) -> bytes | None:
        return list(self.rooms)[number % len(self.rooms)] if self.rooms else None

    def _remove(self, room: bytes) -> None:
        del self.rooms[room]
        self.receiving.discard(room)
        before, (coming,) = self.cache.num_available_pages, map(self.cache.pages_coming_back(), [room])
        self.cache.remove_task(room)
        assert self.cache.num_available_pages == before + coming

    def _check_content(self, room: bytes) -> None:
        record, table = self.rooms[room], self.cache.get_page_indices(room)
        for position in range(record.num_written // PAGE_SIZE):
            right = (record.salt, tuple(record.tokens[: (position + 1) * PAGE_SIZE]))
            assert self.content[table[position]] == right, "a page of another prompt"


PROMPTS = st.tuples(st.sampled_from(["", "mine"]), st.lists(st.integers(0, 1), min_size=1, max_size=9))
NUMBERS = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["begin", "receive"]), PROMPTS),
    *(st.tuples(st.just(name), NUMBERS) for name in ("compute", "compute", "end", "quarantine", "settle", "flush")),
)
Steps = list[tuple[str, object]]


def play(steps: Steps, cache: type[PagedKVCacheManager] = PagedKVCacheManager) -> Pool:
    pool = Pool(cache)
    for what, argument in steps:
        getattr(pool, what)(argument)
        pool.check()
    while pool.rooms:
        pool.end(0)
    pool.settle(0)
    pool.cache.check_idle()
    return pool


@given(st.lists(STEPS, max_size=50))
def test_prompts_begin_with_their_own_tokens_and_no_page_is_lost(steps: Steps) -> None:
    play(steps)


TWO_TENANTS: Steps = [("begin", ("", [1, 1, 1])), ("compute", 0), ("begin", ("mine", [1, 1, 1]))]


def test_a_key_without_the_salt_would_be_noticed() -> None:
    play(TWO_TENANTS)
    with pytest.raises(AssertionError, match="another prompt"):
        play(TWO_TENANTS, Saltless)


def test_a_whole_prompt_that_is_cached_still_has_a_page_to_compute() -> None:
    pool = play([("begin", ("", [1, 2, 3, 4])), ("compute", 0)])
    keys = pool.cache.page_keys("")
    assert pool.cache.begin(b"next", keys, pack_i32([1, 2, 3, 4])) == 2
    assert pool.cache.begin(b"longer", keys, pack_i32([1, 2, 3, 4, 5])) == 4
    assert pool.cache.hit_tokens == 6


def test_cached_pages_are_given_out_when_free_ones_run_short_and_not_before() -> None:
    pool = play([("begin", ("", [1] * 8)), ("compute", 0)])
    cache = pool.cache
    cache.reserve(b"new", 12)
    assert (cache.allocator.num_free, cache.allocator.num_cached, cache.evictions) == (0, 4, 0)
    cache.reserve(b"newer", 6)
    assert (cache.allocator.num_free, cache.allocator.num_cached, cache.evictions) == (0, 1, 3)
    with pytest.raises(Capacity, match="2 pages wanted, 1 of 10"):
        cache.reserve(b"newest", 4)


def test_without_a_fingerprint_nothing_is_kept() -> None:
    cache = PagedKVCacheManager(NUM_PAGES, PAGE_SIZE)
    keys = cache.page_keys("")
    cache.reserve(b"room", 4)
    cache.commit(b"room", keys, pack_i32([1, 2, 3, 4]), 4)
    cache.remove_task(b"room")
    assert cache.begin(b"next", keys, pack_i32([1, 2, 3, 4])) == 0
    assert cache.allocator.num_free == NUM_PAGES


def test_what_a_room_computed_before_a_flush_is_not_found_behind_it() -> None:
    pool = Pool()
    pool.begin(("", [1] * 6))
    pool.compute(0)
    pool.cache.flush()
    pool.compute(0)
    pool.compute(0)
    assert pool.rooms[next(iter(pool.rooms))].num_written == 8
    assert pool.cache.pages_wanted(pool.cache.page_keys(""), pack_i32([1] * 6)) == 3
    pool.end(0)
    assert pool.cache.allocator.num_free == NUM_PAGES


def test_under_keys_of_before_a_flush_nothing_is_found_or_cached() -> None:
    """Not even by a room that used no cached page, or while another room has cached the same prompt anew."""
    cache, prompt = PagedKVCacheManager(NUM_PAGES, PAGE_SIZE, fingerprint=b"model"), pack_i32([1] * 6)
    old = cache.page_keys("")
    assert old is not None
    cache.reserve(ROOM, 6)
    cache.flush()
    for keys in (old, old.copy()):
        cache.commit(ROOM, keys, prompt, 6)
    new = cache.page_keys("")
    assert cache.known_tokens(new, prompt) == 0
    cache.reserve(OTHER, 6)
    cache.commit(OTHER, new, prompt, 6)
    assert (cache.known_tokens(new, prompt), cache.known_tokens(old, prompt)) == (4, 0)
    for room in (ROOM, OTHER):
        cache.remove_task(room)
    cache.check_idle()


# ----------------------------------------------------------------------------------------------------------------------
# A page never has two owners, and neighbouring pages are kept together.


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


# ----------------------------------------------------------------------------------------------------------------------
# The page tables of an instance.


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
