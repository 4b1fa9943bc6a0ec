"""The pure batch policies: which requests compute, which grow, which are retracted."""

from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import StepPlan
from chitu.instance.decode import DecodeManager, GrowthReserve, may_admit, victims_for_growth
from chitu.instance.prefill import select_chunks, speculation_to_undo
from chitu.instance.sequences import Resources, Sequence, Sequences, SequenceState
from chitu.protocol import SamplingParams, pack_i32
from chitu.testing.clock import FakeClock


def sequence(
    order: int, prompt_len: int = 10, max_tokens: int = 6, kv_len: int = 0, announced: bool = True
) -> Sequence:
    return Sequence(
        order.to_bytes(16, "big"),
        f"r{order}",
        order,
        0.0,
        pack_i32(range(prompt_len)),
        SamplingParams(max_tokens),
        kv_len=kv_len,
        announced=announced,
    )


def test_chunks_follow_arrival_and_share_the_budget() -> None:
    a, b, c = sequence(1, 10), sequence(2, 10, kv_len=7), sequence(3, 10)
    chunks = select_chunks([c, b, a], max_batched_tokens=9, chunk_size=4)
    assert [(x.sequence, x.start, x.length) for x in chunks] == [(a, 0, 4), (b, 7, 3), (c, 0, 2)]
    assert [x.is_last for x in chunks] == [False, True, False]


def test_announced_requests_are_computed_before_speculation() -> None:
    early, late = sequence(1, announced=False), sequence(2)
    assert [c.sequence for c in select_chunks([early, late], 10, 10)] == [late]


def test_speculation_gives_way_youngest_first_and_only_when_that_helps() -> None:
    old, young, promised = sequence(1, announced=False), sequence(2, announced=False), sequence(3)
    held = {s.room: 3 for s in (old, young, promised)}
    assert speculation_to_undo([old, young, promised], held.__getitem__, pages_wanted=2, aux_wanted=0) == [young]
    assert speculation_to_undo([old, young, promised], held.__getitem__, pages_wanted=4, aux_wanted=0) == [young, old]
    assert speculation_to_undo([old, young, promised], held.__getitem__, pages_wanted=7, aux_wanted=0) == []


def test_the_growth_reserve_lets_everybody_grow_soon_and_one_to_its_end() -> None:
    a = sequence(1, prompt_len=8, max_tokens=100, kv_len=8)
    b = sequence(2, prompt_len=8, max_tokens=4, kv_len=8)
    # a: 8 + 16 tokens soon = 6 pages, 4 more than it has; b: 12 tokens at most = 3 pages, 1 more.
    # a to its end: 108 tokens = 27 pages, 25 more, of which retracting b returns 2.
    reserve = GrowthReserve(4, reserved_decode_tokens=16)
    assert reserve.is_empty and reserve.pages == 0
    reserve.add(b, 2)
    assert reserve.pages == 1
    reserve.add(a, 2)
    assert reserve.pages == 23 and not reserve.is_empty


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 80), st.integers(0, 20)), max_size=8),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_the_growth_reserve_is_what_it_says(
    load: list[tuple[int, int, int, int]], page_size: int, reserved: int
) -> None:
    reserve = GrowthReserve(page_size, reserved)
    active = [sequence(n, prompt_len, tokens, kv_len) for n, (prompt_len, tokens, kv_len, _) in enumerate(load)]
    held = [pages for *_, pages in load]
    for one, pages in zip(active, held, strict=True):
        reserve.add(one, pages)
    soon, neediest = 0, 0
    for one, pages in zip(active, held, strict=True):
        soon += max(0, -(-min(one.final_len, one.kv_len + reserved) // page_size) - pages)
        to_the_end = max(0, -(-one.final_len // page_size) - pages)
        neediest = max(neediest, to_the_end - (sum(held) - pages))
    assert reserve.pages == max(soon, neediest)


class CountedCache(PagedKVCacheManager):
    looks = 0

    def get_page_indices(self, room: bytes) -> Collection[int]:  # type: ignore[override]
        self.looks += 1
        return super().get_page_indices(room)


class Aux:
    num_free = 1 << 20

    def allocate(self) -> int:
        return 0

    def free(self, slot: int) -> None: ...


class Announced:
    """A transfer layer of D that accepts everything."""

    def announce(self, *arguments: object) -> None: ...


def test_the_admissions_of_a_turn_look_at_each_request_a_few_times_however_many_there_are() -> None:
    count = 400
    cache = CountedCache(8 * count, 4)
    resources = Resources(cache, 2 * count, Aux())  # type: ignore[arg-type]
    sequences = Sequences(resources)
    manager = DecodeManager(SchedulerConfig(), sequences, FakeClock(), Announced())  # type: ignore[arg-type]
    for turn in range(2):
        for index in range(count):
            sequences.add(sequence(turn * count + index, 10, 2))
        cache.looks = 0
        manager.schedule(StepPlan())
        assert len(sequences.of(SequenceState.TRANSFER)) == (turn + 1) * count
        assert cache.looks < 5 * count, "for every admission, each that runs is looked at again"


def test_admission_keeps_the_reserve_unless_nobody_is_there_to_keep_it_for() -> None:
    assert may_admit(10, 6, 4, nothing_active=False)
    assert not may_admit(10, 7, 4, nothing_active=False)
    assert may_admit(10, 10, 4, nothing_active=True)


def test_the_youngest_are_retracted_until_the_rest_can_step() -> None:
    a, b, c = (sequence(n) for n in (1, 2, 3))
    held = {s.room: 2 for s in (a, b, c)}
    assert victims_for_growth([c, a, b], {a, b, c}, free_pages=3, coming_back=held.__getitem__) == []
    assert victims_for_growth([c, a, b], {a, b, c}, free_pages=0, coming_back=held.__getitem__) == [c]
    assert victims_for_growth([a], {a}, free_pages=0, coming_back=held.__getitem__) == [a], (
        "alone and stuck: it waits in host memory"
    )
