"""Steps that are measured, and prompts that D computes beside its streams under a bound of their time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, room_of
from support.clock import FakeClock
from support.requests import decode_request, prefill_request, unified_request

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan, StepResult, StepSizes
from chitu.fake.executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.instance.pace import StepPace, StepWork
from chitu.kv_cache.prefix_index import PageKeys
from chitu.protocol import (
    LEAST_PROMPT_TOKENS,
    SLO_SHARE,
    Fork,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)

STEP_S, ROW_S, TOKEN_S = 0.010, 0.0005, 0.0001
LONG = ExecutorInfo(num_slots=8, max_model_len=4000, vocab_size=1000, num_layers=2, eos_token_ids=(2,))
LARGE = SchedulerConfig(max_running_requests=8, max_batched_tokens=2048, chunk_size=512)


class TimedExecutor(FakeExecutor):
    """Executor whose steps take a time, by a fake clock, and which notes them."""

    clock: FakeClock
    timings: list[tuple[int, int, float]]
    """Prompt tokens, requests that decode, and seconds of each step."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        tokens, rows = sum(chunk.length for chunk in plan.prefill), len(plan.decode)
        seconds = (STEP_S + ROW_S * rows if rows else 0.0) + TOKEN_S * tokens
        self.clock.advance(seconds)
        self.timings.append((tokens, rows, seconds))
        return super().execute(plan, on_layer)


def timed(wire: Wire | None, tpot_s: float, overlap: bool = False) -> Instance:
    clock = FakeClock()
    executor = type("Timed", (TimedExecutor,), {"clock": clock, "timings": []})
    receiver = None if wire is None else DSide(wire)
    return Instance(
        1200, receiver=receiver, clock=clock, config=LARGE, executor=executor, info=LONG, tpot_s=tpot_s, overlap=overlap
    )


def whole(index: int, prompt: list[int], max_tokens: int) -> UnifiedRequest:
    return unified_request(room_of(index), f"r{index}", pack_i32(prompt), SamplingParams(max_tokens, temperature=0.0))


def prompt_of_length(length: int, first: int = 5) -> list[int]:
    return [first, *(20 + place * 7 % 900 for place in range(length - 1))]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_beside_streams_takes_no_more_of_a_step_than_the_slo_leaves(overlap: bool) -> None:
    wire = Wire()
    for instance, tpot_s in ((timed(wire, 0.030, overlap), 0.030), (timed(None, 0.030, overlap), 0.030)):
        streams = [prompt_of_length(20, first=30 + n) for n in range(4)]
        for index, prompt in enumerate(streams):
            instance.scheduler.submit(whole(index, prompt, 400))
        while instance.scheduler.load.running < 4 or instance.scheduler.load.computing:
            instance.scheduler.step()
        for _ in range(40):
            instance.scheduler.step()
        steps = instance.executor.timings
        before, prompt = len(steps), prompt_of_length(3000)
        instance.scheduler.submit(whole(9, prompt, 2))
        while room_of(9) not in instance.finishes:
            instance.scheduler.step()
        beside = [step for step in steps[before:] if step[0] and step[1]]
        assert sum(tokens for tokens, _, _ in beside) == 3000
        assert all(rows >= 4 for _, rows, _ in beside), "streams get a token in each step"
        cap = (SLO_SHARE * tpot_s - STEP_S - 4 * ROW_S) / TOKEN_S
        assert 0.9 * cap <= max(tokens for tokens, _, _ in beside) <= 1.02 * cap
        assert max(seconds for _, _, seconds in beside) <= 0.95 * tpot_s
        assert len(beside) <= 3000 / cap + 8, "as few steps as the bound allows, but for the first"
        assert instance.tokens[room_of(9)] == expected_tokens(prompt, 2, INFO.vocab_size)
        rates = instance.scheduler.load.rates
        assert rates.prompt_token_s == pytest.approx(TOKEN_S, rel=0.05)
        assert rates.step_s(4, 4 * 200) == pytest.approx(STEP_S + 4 * ROW_S, rel=0.05)
        instance.run()
        for index, prompt in enumerate(streams):
            assert instance.tokens[room_of(index)] == expected_tokens(prompt, 400, INFO.vocab_size)
        instance.check_empty()


def test_streams_that_are_slower_than_the_slo_starve_no_prompt_and_without_streams_nothing_is_bounded() -> None:
    instance = timed(Wire(), 0.005)
    instance.scheduler.submit(whole(1, prompt_of_length(1000), 300))
    instance.scheduler.step()
    assert instance.executor.timings == [(512, 0, pytest.approx(0.0512))]
    while len(instance.executor.timings) < 20:
        instance.scheduler.step()
    before = len(instance.executor.timings)
    instance.scheduler.submit(whole(2, prompt_of_length(800, 7), 1))
    while room_of(2) not in instance.finishes:
        instance.scheduler.step()
    sizes = [tokens for tokens, _, _ in instance.executor.timings[before:]]
    assert sizes == [LEAST_PROMPT_TOKENS] * (800 // LEAST_PROMPT_TOKENS)
    instance.run()


def test_a_second_turn_on_d_computes_only_what_neither_turn_left_there_and_moves_nothing() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(60, sender=PSide(wire))
    decode = wire.decode = Instance(60, receiver=DSide(wire), tpot_s=1.0)
    first, sampling = prompt_of_length(18), SamplingParams(11, temperature=0.0)
    decode.scheduler.submit(decode_request(room_of(1), "r1", pack_i32(first), sampling, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(1), "r1", pack_i32(first), 0, 1))
    rng = random.Random(1)
    while room_of(1) not in decode.finishes:
        for instance in (prefill, decode):
            instance.scheduler.step()
        wire.deliver(rng)
    second = [*first, *decode.tokens[room_of(1)], 77, 78, 79]
    moved, computed = decode.scheduler.load.bytes_moved, prefill.scheduler.load.tokens
    decode.scheduler.submit(whole(2, second, 6))
    decode.run()
    settled = len(first) + 11 - 1
    assert decode.cached[room_of(2)] == settled // PAGE_SIZE * PAGE_SIZE
    assert decode.tokens[room_of(2)] == expected_tokens(second, 6, INFO.vocab_size)
    assert decode.finishes[room_of(2)].kv_bytes == 0
    assert (decode.scheduler.load.bytes_moved, prefill.scheduler.load.tokens) == (moved, computed)
    decode.check_empty()


class OnePageTooMany(PagedKVCacheManager):
    """A cache that takes one page more for cached than it holds."""

    def begin(self, room: bytes, keys: PageKeys | None, prompt: bytes, to_compute: int = 1) -> int:
        found = super().begin(room, keys, prompt, to_compute)
        return found + self.page_size if found else 0


def test_a_wrong_cached_length_is_found() -> None:
    decode = Instance(60, receiver=DSide(Wire()), tpot_s=1.0)
    decode.cache.__class__ = OnePageTooMany
    decode.scheduler.submit(whole(1, prompt_of_length(18), 11))
    decode.run()
    decode.scheduler.submit(whole(2, prompt_of_length(18), 6))
    with pytest.raises(InvariantViolation):
        decode.run()


def test_choices_of_a_prompt_that_d_computes_share_it() -> None:
    decode = Instance(60, receiver=DSide(Wire()), tpot_s=1.0)
    prompt = prompt_of_length(13)
    forks = tuple(Fork(room_of(10 + n), f"r{n}", n) for n in range(3))
    sampling = SamplingParams(5, temperature=1.0)
    decode.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=forks))
    decode.run()
    for n in range(3):
        seeded = SamplingParams(5, temperature=1.0, seed=n)
        assert decode.tokens[room_of(10 + n)] == expected_tokens(prompt, 5, INFO.vocab_size, seeded)
    assert decode.scheduler._load.prompt_tokens == 13
    decode.check_empty()


def test_a_d_without_a_bound_refuses_whole_requests_by_name() -> None:
    decode = Instance(8, receiver=DSide(Wire()))
    decode.scheduler.submit(whole(1, [5, 6], 1))
    decode.run()
    assert decode.finishes[room_of(1)].code == "role_changed"
    assert "unified requests" in decode.finishes[room_of(1)].message


def test_the_line_finds_costs_that_no_single_step_shows() -> None:
    pace, rng = StepPace(), random.Random(3)

    def seconds(work: StepWork) -> float:
        tokens, pairs, rows, context, _ = work
        beside = (0.004 + 0.0002 * rows + 1e-7 * context) if rows else 0.0
        return beside + (0.002 + 3e-5 * tokens + 2e-9 * pairs if tokens else 0.0)

    for _ in range(200):
        rows = rng.randint(1, 64)
        decode = StepWork(0, 0, rows, rows * rng.randint(100, 4000))
        tokens, start = rng.choice([(64, 0), (512, 0), (512, 8000), (2048, 30000)])
        prompt = StepWork(tokens, tokens * start + tokens * tokens // 2, rows, rows * 500)
        for work in (decode, prompt):
            pace.note(work, seconds(work) * rng.uniform(0.95, 1.05))
    for rows, context, tokens, start in ((8, 8 * 300, 0, 0), (60, 60 * 3000, 256, 1000), (1, 100, 2000, 20000)):
        work = StepWork(tokens, tokens * start + tokens * tokens // 2, rows, context)
        found = pace.rates.step_s(rows, context) + pace.rates.prompt_s(tokens, start)
        assert found == pytest.approx(seconds(work), rel=0.1)
    assert all(value >= 0 for value in (pace.rates.row_s, pace.rates.prompt_step_s, pace.rates.prompt_pair_s))


class NeighbourBlind(StepPace):
    """Planted: takes the time of a step of the group for that of its own rows."""

    def note(self, own: StepWork, seconds: float, others: Sequence[StepSizes] = ()) -> None:
        super().note(own, seconds)


def group_step_s(sizes: Sequence[StepSizes], pairs: int) -> float:
    """Return the seconds of a step of a group: as long as its largest chunk, beside the rows of all."""
    rows, chunk = sum(each.decode_rows for each in sizes), max(each.prompt_rows for each in sizes)
    return (0.004 + 0.0002 * rows if rows else 0.0) + (0.002 + 3e-5 * chunk + 2e-9 * pairs if chunk else 0.0)


def learn(pace: StepPace) -> tuple[float, float]:
    """Let a member learn from random steps of its group. Return its worst relative errors, of steps that decode and of
    chunks."""
    rng = random.Random(5)
    for _ in range(400):
        sizes = [StepSizes(rng.choice([0, 0, 64, 512, 2048]), rng.randint(1, 40)) for _ in range(4)]
        starts = [rng.choice([0, 8000]) for _ in sizes]
        pairs = max((each.prompt_rows, each.prompt_rows * start) for each, start in zip(sizes, starts, strict=True))[1]
        own = StepWork(sizes[0].prompt_rows, sizes[0].prompt_rows * starts[0], sizes[0].decode_rows, 0)
        pace.note(own, group_step_s(sizes, pairs), sizes[1:])
    rates, alone = pace.rates, StepSizes(0, 0)
    decodes = [rates.step_s(rows, 0) / group_step_s([StepSizes(0, rows), alone], 0) for rows in (20, 80, 140)]
    chunks = [
        rates.prompt_s(length, start - length / 2) / group_step_s([StepSizes(length, 0), alone], length * start)
        for length, start in ((64, 0), (512, 8000), (2048, 8000))
    ]
    return max(abs(ratio - 1) for ratio in decodes), max(abs(ratio - 1) for ratio in chunks)


def test_a_member_of_a_group_learns_what_steps_cost_and_not_what_its_neighbours_happen_to_do() -> None:
    assert max(learn(StepPace())) < 0.1
    decode, chunk = learn(NeighbourBlind())
    assert decode > 0.5, "a rate that is learned from a neighbour's chunk was not found"
    assert chunk > 0.2, "a rate that is learned beside a neighbour's chunk was not found"


def test_a_step_in_which_a_neighbour_has_the_larger_chunk_is_not_measured_and_the_next_one_is_in_its_place() -> None:
    pace = StepPace()
    neighbour = [StepSizes(512, 3), StepSizes(0, 2)]
    pace.note(StepWork(100, 5050, 0, 0), 0.1, neighbour)
    assert pace.rates.prompt_steps == 0
    pace.note(StepWork(512, 131_328, 0, 0), 0.1, neighbour)
    assert pace.rates.prompt_steps == 1
    pace.note(StepWork(0, 0, 4, 400), 0.1, neighbour)
    assert pace.rates.decode_steps == 0
    decoding: list[Any] = [SimpleNamespace(kv_len=10)]
    assert pace.work_of([], decoding) is not None
    pace.note(StepWork(0, 0, 4, 400), 0.1, [StepSizes(0, 8)])
    assert pace.rates.decode_steps == 1


def test_a_chunk_is_bounded_beside_the_streams_of_all_members_of_the_group() -> None:
    pace, decoding = StepPace(0.030, 2048), [SimpleNamespace(kv_len=0)]
    for rows in range(1, 40):
        pace.note(StepWork(0, 0, rows, 0), STEP_S + ROW_S * rows)
        pace.note(StepWork(2048, 0, 0, 0), TOKEN_S * 2048)
    own: list[Any] = [*decoding] * 4

    def cap(rows: int) -> float:
        return (SLO_SHARE * 0.030 - STEP_S - rows * ROW_S) / TOKEN_S

    assert pace.most_prompt_tokens(own, 0) == pytest.approx(cap(4), rel=0.05)
    assert pace.most_prompt_tokens(own, 0, others=[StepSizes(0, 6), StepSizes(7, 10)]) == pytest.approx(
        cap(20), rel=0.05
    )
    assert pace.most_prompt_tokens([], 0, others=[StepSizes(0, 9)]) == pytest.approx(cap(9), rel=0.05)
    assert pace.most_prompt_tokens([], 0, others=[StepSizes(512, 0)]) == 2048, "no stream waits anywhere"
