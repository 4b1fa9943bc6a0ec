"""The prefix index against a model that keeps whole prompts and looks through all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import Internal
from chitu.kv_cache.prefix_index import (
    KEY_BYTES,
    PROTECTED,
    PageKeys,
    PrefixIndex,
    lasting_fingerprint,
    layout_fingerprint,
)
from chitu.protocol import KVLayout, pack_i32

NUM_PAGES = 12
LAYOUT = KVLayout.uniform("hash", 2, 2, 8, 4, "float32", 100)


@dataclass
class Model:
    """A model of the index, with prompts of one token a page. `pages` can be found. No request uses those in `others`
    and `protected`, oldest first."""

    pages: dict[tuple[int, ...], int] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)
    others: list[tuple[int, ...]] = field(default_factory=list)
    protected: list[tuple[int, ...]] = field(default_factory=list)
    came_again: set[tuple[int, ...]] = field(default_factory=set)
    evicted: list[tuple[int, ...]] = field(default_factory=list)

    def find(self, prompt: tuple[int, ...]) -> list[int]:
        found = []
        while (page := self.pages.get(prompt[: len(found) + 1])) is not None and len(found) < len(prompt):
            found.append(page)
        return found

    def pin(self, prompt: tuple[int, ...], page: int) -> None:
        """Note that the page was found and is in use."""
        self.pins[page] += 1
        self.came_again.add(prompt)
        for idle in (self.others, self.protected):
            if prompt in idle:
                idle.remove(prompt)

    def add(self, prompt: tuple[int, ...], page: int) -> None:
        self.pages[prompt], self.pins[page] = page, 1
        self.came_again.discard(prompt)
        if prompt in self.evicted:
            self.evicted.remove(prompt)
            self.came_again.add(prompt)

    def rest(self, prompt: tuple[int, ...]) -> None:
        """Note that no request uses the page any more."""
        before = {prompt[: n + 1] for n in range(len(prompt))}
        (self.protected if before <= self.came_again else self.others).append(prompt)
        if len(self.protected) > NUM_PAGES // PROTECTED:
            self.others.append(self.protected.pop(0))
            self.came_again.remove(self.others[-1])

    def evict_one(self) -> int | None:
        idle = self.others or self.protected
        if not idle:
            return None
        prompt = idle.pop(0)
        assert not any(other[:-1] == prompt for other in self.pages), "a chain was cut"
        self.evicted = [*self.evicted, prompt][-NUM_PAGES:]
        return self.pages.pop(prompt)


class Pair:
    """Index and model side by side; requests hold pages of both."""

    def __init__(self) -> None:
        self.index, self.model = PrefixIndex(NUM_PAGES), Model()
        self.free = list(range(NUM_PAGES))
        self.requests: list[list[int]] = []
        """Pages that each request has pinned."""

    def request(self, prompt: tuple[int, ...]) -> None:
        """Find and pin what is cached, and compute the rest while there are pages."""
        keys = [repr(prompt[: i + 1]).encode() for i in range(len(prompt))]
        pinned = self.index.find(keys)
        assert pinned == self.model.find(prompt)
        self.index.pin(pinned)
        for i, page in enumerate(pinned):
            self.model.pin(prompt[: i + 1], page)
        for i in range(len(pinned), len(prompt)):
            if not self.free and not self.evict(1):
                break
            page = self.free.pop()
            known = self.index.add(keys[i], page)
            assert known == page
            self.model.add(prompt[: i + 1], page)
            pinned.append(page)
        self.requests.append(pinned)

    def release(self, number: int) -> None:
        if not self.requests:
            return
        pinned = self.requests.pop(number % len(self.requests))
        idle, dropped = self.index.unpin(pinned)
        prompts, expected_dropped = {page: prompt for prompt, page in self.model.pages.items()}, []
        for page in reversed(pinned):
            self.model.pins[page] -= 1
            if not self.model.pins[page]:
                if page in prompts:
                    self.model.rest(prompts[page])
                else:
                    expected_dropped.append(page)
        assert sorted(dropped) == sorted(expected_dropped)
        assert sorted(idle) == sorted(p for p in pinned if not self.model.pins[p] and p not in dropped)
        self.free += dropped

    def evict(self, count: int) -> list[int]:
        evicted = self.index.evict(count)
        expected = [page for _ in range(count) if (page := self.model.evict_one()) is not None]
        assert evicted == expected
        self.free += evicted
        return evicted

    def flush(self) -> None:
        dropped = self.index.flush()
        assert sorted(dropped) == sorted(p for p in self.model.pages.values() if not self.model.pins[p])
        for known in (self.model.pages, self.model.others, self.model.protected, self.model.came_again):
            known.clear()
        self.model.evicted.clear()
        self.free += dropped

    def check(self) -> None:
        model = self.model
        assert len(self.index) == len(model.pages)
        assert self.index.num_idle == sum(not model.pins[page] for page in model.pages.values())
        held = {page for pinned in self.requests for page in pinned}
        assert {page for page in range(NUM_PAGES) if self.index.num_pins(page)} == held
        assert self.index.num_shared_pins == sum(len(pinned) for pinned in self.requests) - len(held)
        assert len(self.free) + len(held) + self.index.num_idle == NUM_PAGES


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("request"), PROMPTS),
    st.tuples(st.just("release"), st.integers(0, 7)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("flush"), st.none()),
)


@given(st.lists(STEPS, max_size=60))
def test_it_finds_pins_evicts_and_flushes_as_the_model_does(steps: list[tuple[str, object]]) -> None:
    pair = Pair()
    for what, argument in steps:
        getattr(pair, what)(*([] if argument is None else [argument]))
        pair.check()
    while pair.requests:
        pair.release(0)
    pair.check()
    pair.evict(NUM_PAGES)
    assert sorted(pair.free) == list(range(NUM_PAGES))
    pair.index.check_unused(0)


def test_the_page_of_whoever_was_faster_stays_in_the_index() -> None:
    index = PrefixIndex(4)
    assert index.add(b"a", 0) == 0
    assert index.add(b"a", 1) == 0
    assert index.num_pins(1) == 0 and index.find([b"a"]) == [0]


def use(index: PrefixIndex, keys: str, pages: list[int]) -> None:
    """Begin and end a request of this chain, with `pages` for what is not found."""
    chain = [keys[: n + 1].encode() for n in range(len(keys))]
    found = index.find(chain)
    index.pin(found)
    for key, page in zip(chain[len(found) :], pages, strict=True):
        index.add(key, page)
    index.unpin(found + pages)


def test_what_came_again_outlives_what_came_once() -> None:
    index = PrefixIndex(6)
    use(index, "ab", [0, 1])
    use(index, "a", [])
    use(index, "xyz", [2, 3, 4])
    assert index.evict(5) == [1, 4, 3, 2, 0], "the end of the first chain is oldest; its beginning came again"


def test_what_was_evicted_and_comes_again_is_protected_and_no_more_than_a_third_is() -> None:
    index = PrefixIndex(6)
    use(index, "abc", [0, 1, 2])
    assert index.evict(3) == [2, 1, 0]
    use(index, "abc", [0, 1, 2])
    use(index, "xyz", [3, 4, 5])
    assert index.evict(6) == [2, 5, 4, 3, 1, 0], "its end is more than a third, and older than the others"


def test_mistakes_are_loud() -> None:
    index = PrefixIndex(2)
    index.add(b"a", 0)
    with pytest.raises(Internal, match="already"):
        index.add(b"b", 0)
    with pytest.raises(Internal, match="1 of them pinned"):
        index.check_unused(1)
    index.unpin([0])
    with pytest.raises(Internal, match="does not use it"):
        index.unpin([0])
    with pytest.raises(Internal, match="0 are cached"):
        index.check_unused(0)


# ----------------------------------------------------------------------------------------------------------------- keys


def keys_of(tokens: list[int], salt: str = "", layout: KVLayout = LAYOUT) -> list[bytes]:
    num_pages = len(tokens) // layout.page_size
    return PageKeys.of(layout_fingerprint(layout), layout.page_size, salt).upto(num_pages, pack_i32(tokens))


def test_keys_agree_exactly_as_far_as_the_tokens_do() -> None:
    first, second = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), keys_of([1, 2, 3, 4, 5, 6, 7, 9])
    assert len(first) == len(second) == 2
    assert first[0] == second[0] and first[1] != second[1]
    assert keys_of([5, 6, 7, 8])[0] not in first, "the same tokens behind others are another page"
    assert all(len(key) == KEY_BYTES for key in first)


def test_what_outlives_a_process_is_of_these_weights_this_version_and_these_settings() -> None:
    known = (b"layout", b"weights", "1.0", ("auto", None))
    others = [(b"other", *known[1:]), (b"layout", b"other", *known[2:]), (*known[:2], "1.1", known[3])]
    prints = {lasting_fingerprint(*each) for each in (known, *others, (*known[:3], ("auto", 1024)))}
    assert len(prints) == 5 and lasting_fingerprint(*known) in prints and b"layout" not in prints


def test_keys_grow_with_the_output_and_do_not_change() -> None:
    keys = PageKeys.of(b"fingerprint", 2)
    tokens = pack_i32(range(8))
    assert keys.upto(1, tokens[:8]) == keys.upto(4, tokens)[:1] == PageKeys.of(b"fingerprint", 2).upto(1, tokens)
    assert keys.upto(3, tokens) == PageKeys.of(b"fingerprint", 2).upto(3, tokens)


def test_salt_model_dtype_and_page_size_make_other_keys_and_tensor_parallelism_does_not() -> None:
    tokens = list(range(16))
    seen = {keys_of(tokens)[0], keys_of(tokens, "mine")[0], keys_of(tokens, "Mine")[0]}
    others = [("model_hash", "other"), ("dtype", "bfloat16"), ("page_size", 2), ("groups", LAYOUT.groups * 2)]
    for name, value in others:
        changed = msgspec.structs.replace(LAYOUT, **{name: value})
        seen.add(keys_of(tokens, layout=changed)[0])
    assert len(seen) == 3 + len(others)
    sliced = msgspec.structs.replace(LAYOUT, tp_size=2)
    assert keys_of(tokens, layout=sliced) == keys_of(tokens)
