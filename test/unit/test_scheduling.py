"""Which sequences a step computes: their states, budgets, ageing, and shares of tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import DSide, Instance, PSide, Wire, make_aux, room_of
from support.clock import FakeClock
from support.requests import decode_request, prefill_request, unified_request

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import ExecutorInfo, StepPlan
from chitu.fake.executor import FakeExecutor
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.decode import GrowthReserve, may_admit, victims_for_growth
from chitu.instance.early import victims_for_announced
from chitu.instance.prefill import select_chunks
from chitu.instance.requests import PRIORITY_SHARE
from chitu.instance.roles import DecodeRole
from chitu.instance.sequences import (
    AT_PEER_STATES,
    OPEN_STATES,
    SEQUENCE_TRANSITIONS,
    PromptProgress,
    Resources,
    Sequence,
    Sequences,
    SequenceState,
    SequenceTimes,
    queue_order,
)
from chitu.instance.sequences import SequenceEvent as E
from chitu.instance.sequences import SequenceState as S
from chitu.instance.token_manager import TokenManager
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.net.fair_share import NoPlace, Places, Turns
from chitu.protocol import MAX_PRIORITY, CancelRequest, RequestHead, SamplingParams, pack_i32

# ----------------------------------------------------------------------------------------------------------------------
# The states of a request on its instance, checked as a graph; and its queue is always that of its state.


ROADS: dict[S, tuple[E, ...]] = {
    S.WAITING: (),
    S.COMPUTING: (E.ADMIT,),
    S.INFLIGHT: (E.ADMIT, E.COMPUTED),
    S.TRANSFER: (E.ANNOUNCE,),
    S.LOGITS: (E.ANNOUNCE, E.ROW_HERE),
    S.STARTED: (E.ANNOUNCE, E.ROW_HERE, E.START),
    S.LANDED: (E.ANNOUNCE, E.ROW_HERE, E.KV_HERE),
    S.RUNNING: (E.ANNOUNCE, E.ROW_HERE, E.START, E.KV_HERE),
    S.RETRACTED: (E.ADMIT, E.START, E.RETRACT),
    S.FORK_WAITING: (),
    S.FORK_HELD: (E.HOLD,),
    S.CLOSING: (E.ANNOUNCE, E.END),
    S.LEAVING: (E.ANNOUNCE, E.END, E.FREE),
}


def one(number: int, forks: int = 0) -> Sequence:
    room = number.to_bytes(16, "big")
    sequence = Sequence(
        RequestHead(room, f"r{number}", pack_i32(range(6))), number, SequenceTimes(0.0), SamplingParams(4)
    )
    sequence.forks = [one(number * 100 + fork) for fork in range(1, forks + 1)]
    for fork in sequence.forks:
        fork.source = sequence
    return sequence


def in_state(state: S) -> tuple[Sequences, Sequence]:
    sequences = Sequences(Resources(PagedKVCacheManager(8, 4), 4, make_aux(0)))
    is_fork = state in (S.FORK_WAITING, S.FORK_HELD)
    first = one(1, forks=int(is_fork))
    sequences.add(first)
    sequence = first.forks[0] if is_fork else first
    for event in ROADS[state]:
        assert sequences.take(sequence, event)
    assert sequence.state is state
    return sequences, sequence


@pytest.mark.parametrize("event", E, ids=lambda event: event.name)
@pytest.mark.parametrize("state", S, ids=lambda state: state.name)
def test_every_event_in_every_state_is_a_pair_of_the_table_or_absorbed(state: S, event: E) -> None:
    sequences, sequence = in_state(state)
    target = SEQUENCE_TRANSITIONS.get((state, event))
    assert sequences.take(sequence, event) is (target is not None)
    assert sequence.state is (target or state)
    for each in S:
        assert (sequence.room in sequences.of(each)) == (each is sequence.state)
    assert sequences.get(sequence.room) is sequence
    assert (sequences.find(sequence.room) is sequence) == (sequence.state in OPEN_STATES)


def test_a_request_ends_once_from_every_state_and_is_freed_once() -> None:
    after_end = {target for (_, event), target in SEQUENCE_TRANSITIONS.items() if event is E.END}
    assert after_end == {S.CLOSING} and {s for s, event in SEQUENCE_TRANSITIONS if event is E.END} == OPEN_STATES
    assert [pair for pair in SEQUENCE_TRANSITIONS if pair[0] is S.CLOSING] == [(S.CLOSING, E.FREE)]
    assert not [pair for pair in SEQUENCE_TRANSITIONS if pair[0] is S.LEAVING]


def test_p_may_write_from_the_announcement_until_its_kv_is_here() -> None:
    entered = {target for (_, event), target in SEQUENCE_TRANSITIONS.items() if event is E.ANNOUNCE}
    border = entered
    while border:
        border = {
            target
            for (state, event), target in SEQUENCE_TRANSITIONS.items()
            if state in border and event not in (E.KV_HERE, E.END)
        } - entered
        entered |= border
    assert entered == AT_PEER_STATES


@pytest.mark.parametrize("state", [s for s in S if s in OPEN_STATES], ids=lambda state: state.name)
def test_what_is_closed_and_freed_is_gone_and_holds_nothing(state: S) -> None:
    sequences, sequence = in_state(state)
    sequences.resources.slots.take(sequence)
    sequences.resources.cache.reserve(sequence.room, 6)
    assert sequences.close(sequence) and not sequences.close(sequence)
    assert sequences.resources.slots.num_free == 4
    assert sequences.take_dropped_keys() == ([sequence.holds.offload_key] if state is S.RETRACTED else [])
    sequences.free(sequence)
    sequences.free(sequence)
    assert sequence.room not in sequences and sequences.resources.cache.allocator.num_free == 8
    assert not any(sequence.room in sequences.of(each) for each in S)


def test_while_a_step_is_unread_what_is_freed_is_still_here() -> None:
    sequences, sequence = in_state(S.RUNNING)
    sequences.resources.launched()
    sequences.close(sequence)
    sequences.free(sequence)
    assert sequence.state is S.LEAVING and sequence.room in sequences and not sequences.open
    sequences.resources.read()
    assert sequence.room not in sequences and not len(sequences)


def test_forks_are_counted_one_by_one_and_a_prompt_with_forks_is_not_open_itself() -> None:
    sequences = Sequences(Resources(PagedKVCacheManager(8, 4), 4, make_aux(0)))
    source = one(1, forks=3)
    sequences.add(source)
    sequences.add(one(2))
    assert sequences.num_choices(S.WAITING) == 4
    assert sequences.open == [*source.forks, *sequences.queue(S.WAITING)[1:]]


# ----------------------------------------------------------------------------------------------------------------------
# The pure batch policies: which requests compute, which grow, which are retracted.


def sequence(
    order: int, prompt_len: int = 10, max_tokens: int = 6, kv_len: int = 0, announced: bool = True
) -> Sequence:
    return Sequence(
        RequestHead(order.to_bytes(16, "big"), f"r{order}", pack_i32(range(prompt_len))),
        order,
        SequenceTimes(0.0),
        SamplingParams(max_tokens),
        kv_len=kv_len,
        prompt=PromptProgress(announced=announced),
    )


def test_chunks_follow_arrival_and_share_the_budget() -> None:
    a, b, c = sequence(1, 10), sequence(2, 10, kv_len=7), sequence(3, 10)
    chunks = select_chunks([c, b, a], max_batched_tokens=9, chunk_size=4)
    assert [(x.sequence, x.start, x.length) for x in chunks] == [(a, 0, 4), (b, 7, 3), (c, 0, 2)]
    assert [x.is_last for x in chunks] == [False, True, False]


def test_announced_requests_are_computed_before_early_ones() -> None:
    early, late = sequence(1, announced=False), sequence(2)
    assert [c.sequence for c in select_chunks([early, late], 10, 10)] == [late]


def test_early_requests_give_way_youngest_first_and_only_when_that_helps() -> None:
    old, young, promised = sequence(1, announced=False), sequence(2, announced=False), sequence(3)
    held = {s.room: 3 for s in (old, young, promised)}
    assert victims_for_announced([old, young, promised], held.__getitem__, pages_wanted=2, aux_wanted=0) == [young]
    assert victims_for_announced([old, young, promised], held.__getitem__, pages_wanted=4, aux_wanted=0) == [young, old]
    assert victims_for_announced([old, young, promised], held.__getitem__, pages_wanted=7, aux_wanted=0) == []


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
    num_free = num_slots = 1 << 20

    def allocate(self) -> int:
        return 0

    def free(self, slot: int) -> None: ...


class Announced:
    """A transfer layer of D that accepts everything."""

    def announce(self, *arguments: object) -> None: ...


def test_the_admissions_of_a_turn_look_at_each_request_a_few_times_however_many_there_are() -> None:
    count = 400
    cache = CountedCache(8 * count, 4)
    executor = FakeExecutor(ExecutorInfo(2 * count, 64, 1000, 1, ()), 8 * count, 4)
    core = InstanceCore(
        SchedulerSettings(SchedulerConfig(), DeadlineConfig()),
        LoadedEngine(executor, cache, Aux()),  # type: ignore[arg-type]
        TokenManager(1, lambda frame: True),
        lambda room, error: None,
        FakeClock(),
    )
    sequences, role = core.sequences, DecodeRole(core, Announced())  # type: ignore[arg-type]
    for turn in range(2):
        for index in range(count):
            waiting = sequence(turn * count + index, 10, 2)
            waiting.prompt.peer = 0, 1
            sequences.add(waiting)
        cache.looks = 0
        role.schedule(StepPlan())
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


# ----------------------------------------------------------------------------------------------------------------------
# Priorities move requests by a bounded time, so that none waits for ever: on P, on D, and in retraction.


QUEUE_S = DeadlineConfig().queue_s
MOST_S = PRIORITY_SHARE * QUEUE_S
STEP_S = 0.25
CLIENTS = 12
priorities = st.integers(-MAX_PRIORITY, MAX_PRIORITY) | st.integers(-3, 3)


@given(st.floats(0, 1e6), st.floats(0, 1e3), priorities, priorities)
def test_nothing_overtakes_a_request_that_came_long_before_it(
    arrival_s: float, later_s: float, first: int, second: int
) -> None:
    older = queue_order(arrival_s, 1, first, MOST_S)
    newer = queue_order(arrival_s + 2 * MOST_S + later_s, 2, second, MOST_S)
    assert older < newer


@given(st.floats(0, 1e6), priorities, priorities)
def test_of_requests_that_come_together_the_lowest_priority_is_first(arrival_s: float, one: int, other: int) -> None:
    low, high = sorted((one, other))
    first, second = queue_order(arrival_s, 1, low, MOST_S), queue_order(arrival_s, 2, high, MOST_S)
    assert first < second
    if abs(low) < 1000 > abs(high) and low < high:
        assert queue_order(arrival_s, 2, low, MOST_S) < queue_order(arrival_s, 1, high, MOST_S)


def test_a_priority_of_one_is_worth_half_of_the_longest_shift() -> None:
    places = [queue_order(100.0, 0, priority, 8.0)[0] for priority in (-MAX_PRIORITY, -1, 0, 1, 3, MAX_PRIORITY)]
    assert places == pytest.approx([92.0, 96.0, 100.0, 104.0, 106.0, 108.0])


class Clients:
    """`CLIENTS` that each send their next request when the last one is over, beside one that sends a single request
    behind their first ones. A step takes `STEP_S`."""

    def __init__(self, role: str) -> None:
        config = SchedulerConfig(max_running_requests=4, max_batched_tokens=16, chunk_size=8, reserved_decode_tokens=4)
        self.role, self.clock, self.wire = role, FakeClock(), Wire()
        side: dict[str, Any] = {"prefill": {"sender": PSide(self.wire)}, "decode": {"receiver": DSide(self.wire)}}
        self.instance = Instance(100, config=config, aux_slots=4, clock=self.clock, **side.get(role, {}))
        self.began_s: dict[bytes, float] = {}
        """When D announced a room, or P computed it; of a unified instance, the end of the request."""
        self.count = 0

    def send(self, priority: int) -> bytes:
        self.count += 1
        room, prompt, sampling = room_of(self.count), pack_i32(range(16)), SamplingParams(12, ignore_eos=True)
        self.instance.scheduler.submit(
            prefill_request(room, "r", prompt, 0, 1, priority=priority)
            if self.role == "prefill"
            else decode_request(room, "r", prompt, sampling, 0, 1, priority=priority)
            if self.role == "decode"
            else unified_request(room, "r", prompt, sampling, priority=priority)
        )
        return room

    def step(self) -> None:
        self.clock.advance(STEP_S)
        self.instance.scheduler.step()
        wire, now_s = self.wire, self.clock.monotonic()
        for room in {"prefill": wire.computed, "decode": wire.announced}.get(self.role, self.instance.finishes):
            self.began_s.setdefault(room, now_s)
        if self.role != "unified":  # its transfer, or its tokens, take three seconds
            for room in [r for r, began_s in self.began_s.items() if began_s + 3.0 <= now_s and r not in wire.dead]:
                wire.dead.add(room)
                if self.role == "prefill":
                    wire.events_p.append(TransferEvent(TransferEventKind.SUCCESS, room))
                else:
                    self.instance.scheduler.submit(CancelRequest(room))

    def wait_of_one(self, priority: int, of_others: int) -> float:
        """Return how long the one request waits among those of the others."""
        others = [self.send(of_others) for _ in range(CLIENTS)]
        one, sent_s = self.send(priority), self.clock.monotonic()
        while one not in self.began_s and one not in self.instance.failures:
            assert self.clock.monotonic() - sent_s < 10 * QUEUE_S
            self.step()
            over = self.wire.dead if self.role != "unified" else self.instance.finishes
            others = [self.send(of_others) if room in over else room for room in others]
        failed = self.instance.failures.get(one) or self.instance.finishes.get(one)
        assert getattr(failed, "code", "") == "", failed
        return self.began_s[one] - sent_s


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
@pytest.mark.parametrize(
    ("priority", "of_others"), [(0, -1), (0, -MAX_PRIORITY), (MAX_PRIORITY, 0), (MAX_PRIORITY, -5)]
)
def test_a_dozen_clients_ahead_of_another_do_not_starve_it(role: str, priority: int, of_others: int) -> None:
    in_turn_s = Clients(role).wait_of_one(0, 0)
    assert in_turn_s > 4.0, "there is a queue"
    waited_s = Clients(role).wait_of_one(priority, of_others)
    assert in_turn_s < waited_s <= in_turn_s + 2 * MOST_S + STEP_S * CLIENTS < QUEUE_S
    assert Clients(role).wait_of_one(of_others, priority) < in_turn_s, "a priority is worth something"


def test_the_youngest_is_retracted_first_unless_a_priority_decides_and_an_old_one_is_not_for_urgent_ones() -> None:
    def running(number: int, arrival_s: float, priority: int) -> Sequence:
        order = queue_order(arrival_s, number, priority, MOST_S)
        return Sequence(
            RequestHead(room_of(number), "r", pack_i32([1])), order, SequenceTimes(arrival_s), SamplingParams(4)
        )

    old, young, urgent = running(1, 0.0, 0), running(2, 3 * MOST_S, 0), running(3, 3 * MOST_S, -MAX_PRIORITY)
    for needy, available in ((3, 0), (3, 1), (3, 2)):
        victims = victims_for_growth([old, young, urgent], {old, young, urgent}, available, lambda room: 1)
        assert victims == [young, urgent, old][: {0: 2, 1: 1, 2: 1}[available]], needy


# ----------------------------------------------------------------------------------------------------------------------
# Places and turns that clients share: nobody is locked out, nobody waits for all tasks of another.


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 70)), max_size=30))
def test_whatever_fifteen_clients_take_the_next_one_finds_a_place(takers: list[tuple[int, int]]) -> None:
    places: Places[int] = Places(256)
    with ExitStack() as held:
        counts: Counter[int] = Counter()
        for client in [client for client, count in takers for _ in range(count)]:
            with contextlib.suppress(NoPlace):
                held.enter_context(places.place(client))
                counts[client] += 1
        assert places.num_free == 256 - counts.total() > 0
        assert max(counts.values(), default=0) <= 64, "a quarter"
        with places.place(99):
            pass
    assert places.num_free == 256


def test_one_client_has_a_quarter_of_the_places_and_gets_them_back() -> None:
    places: Places[str] = Places(8)
    for _ in range(2):
        with places.place("a"), places.place("a"):
            with pytest.raises(NoPlace), places.place("a"):
                pass
            with places.place("b"):
                pass


def test_clients_alternate_and_tasks_of_one_client_keep_their_order() -> None:
    done: list[str] = []

    async def main() -> None:
        turns: Turns[str] = Turns(100)

        async def task(name: str) -> None:
            async with turns.turn(name[0]):
                await asyncio.sleep(0)
                done.append(name)

        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        await asyncio.gather(*map(task, names))

    asyncio.run(main())
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12), st.integers(0, 3))
def test_a_task_that_is_cancelled_leaves_its_turn_to_the_next(tasks: list[tuple[str, bool]], num_steps: int) -> None:
    """Whenever tasks are cancelled, every other task gets its turn, one at a time."""
    done: list[int] = []

    async def main() -> None:
        turns: Turns[str] = Turns(100)
        num_in_turn = 0

        async def run(index: int, client: str) -> None:
            nonlocal num_in_turn
            async with turns.turn(client):
                num_in_turn += 1
                assert num_in_turn == 1
                try:
                    await asyncio.sleep(0)
                finally:
                    num_in_turn -= 1
                done.append(index)

        running = [asyncio.ensure_future(run(index, client)) for index, (client, _) in enumerate(tasks)]
        for _ in range(num_steps):
            await asyncio.sleep(0)
        for task, (_, is_unwanted) in zip(running, tasks, strict=True):
            if is_unwanted:
                task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        async with turns.turn("d"):  # free again
            pass

    asyncio.run(asyncio.wait_for(main(), 10))
    wanted = {index for index, (_, is_unwanted) in enumerate(tasks) if not is_unwanted}
    assert wanted <= set(done)


def test_a_client_that_has_its_share_of_waiting_tasks_is_refused() -> None:
    async def main() -> None:
        turns: Turns[str] = Turns(8)

        async def task(client: str) -> str:
            async with turns.turn(client):
                await asyncio.sleep(0)
                return client

        found = await asyncio.gather(*map(task, "aaab"), return_exceptions=True)
        assert found[:2] == ["a", "a"] and isinstance(found[2], NoPlace) and found[3] == "b"

    asyncio.run(main())


def test_a_client_that_comes_later_gets_as_many_turns_as_the_one_that_had_all_of_them() -> None:
    """Work whose turn is taken back begins anew later; the oldest is never taken back."""

    async def main() -> None:
        turns: Turns[str] = Turns(None, 8)
        running: list[str] = []
        ends = asyncio.Event()

        async def work(name: str) -> str:
            running.append(name)
            try:
                await ends.wait()
            finally:
                running.remove(name)
            return name

        def begin(client: str, count: int) -> list[asyncio.Task[str]]:
            names = [f"{client}{i}" for i in range(count)]
            return [asyncio.ensure_future(turns.do(client, partial(work, name))) for name in names]

        async def shares() -> Counter[str]:
            for _ in range(20):
                await asyncio.sleep(0)
            return Counter(name[0] for name in running)

        tasks = begin("a", 20)
        assert await shares() == {"a": 8}
        tasks += begin("b", 20)
        assert await shares() == {"a": 4, "b": 4}
        tasks += begin("c", 1)
        assert await shares() in ({"a": 4, "b": 3, "c": 1}, {"a": 3, "b": 4, "c": 1})
        assert {"a0", "a1", "a2", "b0", "b1", "b2", "c0"} <= set(running)
        tasks[-1].cancel()
        assert await shares() == {"a": 4, "b": 4}
        ends.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:-1] == [f"{client}{i}" for client in "ab" for i in range(20)]
        assert isinstance(results[-1], asyncio.CancelledError) and not running

    asyncio.run(asyncio.wait_for(main(), 10))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=16), st.integers(1, 4))
def test_turns_that_are_taken_back_are_never_lost(tasks: list[tuple[str, int, bool]], count: int) -> None:
    async def main() -> None:
        turns: Turns[str] = Turns(None, count)
        num_running = 0

        async def work(num_steps: int) -> int:
            nonlocal num_running
            num_running += 1
            assert num_running <= count
            try:
                for _ in range(num_steps):
                    await asyncio.sleep(0)
            finally:
                num_running -= 1
            return num_steps

        running: list[asyncio.Task[int]] = []
        for client, num_steps, is_unwanted in tasks:
            running.append(asyncio.ensure_future(turns.do(client, partial(work, num_steps))))
            await asyncio.sleep(0)
            if is_unwanted:
                running[len(running) // 2].cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(
            isinstance(result, asyncio.CancelledError) or result == num_steps
            for result, (_, num_steps, _) in zip(results, tasks, strict=True)
        )
        assert await asyncio.gather(*(turns.do("d", partial(work, 1)) for _ in range(count))) == [1] * count

    asyncio.run(asyncio.wait_for(main(), 10))
