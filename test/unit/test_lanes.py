"""Chunks compute in the lane of prompts while decode steps go on, on a late device: tokens and ends stay the same, and
nothing of a step that is unread in either lane is free, promised or used by another one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, Instance, loads, prompt_of, room_of
from support.executors import LateExecutor, LateStep
from support.requests import unified_request
from test_step_overlap import run_unified, stops, turn, unified

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.fake.executor import FakeExecutor, expected_tokens
from chitu.instance.sequences import Resources
from chitu.protocol import CancelRequest, Fork, SamplingParams, pack_i32

GREEDY = SamplingParams(12, temperature=0.0)


@pytest.mark.parametrize("overlap", [False, True])
@given(
    load=loads,
    num_pages=st.integers(17, 60),
    chunk=st.integers(1, 16),
    stop_at=st.lists(stops, min_size=20, max_size=20),
    rng=st.randoms(),
)
def test_tokens_ends_and_pages_are_those_of_one_lane(
    overlap: bool,
    load: list[tuple[int, int, int]],
    num_pages: int,
    chunk: int,
    stop_at: list[int],
    rng: random.Random,
) -> None:
    run_unified(Instance(num_pages, chunk=chunk, overlap=overlap, lanes=2), load, stop_at, rng)


def beside_a_stream(
    instance: Instance, sampling: SamplingParams = GREEDY, prompt_len: int = 40
) -> tuple[LateStep, list[int]]:
    """Start a stream, and a prompt in the lane of prompts. Return its first chunk, and the tokens of the stream."""
    instance.scheduler.submit(unified(0, 3, SamplingParams(60, temperature=0.0)))
    while room_of(0) not in instance.tokens:
        instance.scheduler.step()
    instance.scheduler.submit(unified(1, prompt_len, sampling))
    while instance.late.beside is None:
        instance.scheduler.step()
    return instance.late.beside, instance.tokens[room_of(0)]


def test_a_stream_goes_on_while_a_chunk_computes() -> None:
    instance = Instance(64, chunk=16, lanes=2)
    step, stream = beside_a_stream(instance)
    before = len(stream)
    for _ in range(10):
        instance.scheduler.step()
    assert len(stream) == before + 10, "a token a turn"
    assert instance.late.beside is step and step.plan.prefill and not step.is_done()
    sequence = instance.scheduler._sequences.find(room_of(1))
    assert sequence is not None and sequence.kv_len == 0, "a chunk counts when it is read"
    instance.run()
    assert instance.tokens[room_of(1)] == expected_tokens(prompt_of(1, 40), 12, INFO.vocab_size)
    instance.check_empty()


def test_a_prompt_alone_computes_in_the_step_with_all_cores() -> None:
    instance = Instance(64, chunk=16, lanes=2)
    instance.scheduler.submit(unified(1, 40, GREEDY))
    for _ in range(3):
        instance.scheduler.step()
        assert instance.late.beside is None
    assert instance.tokens[room_of(1)]


def test_what_a_cancelled_prompt_holds_is_free_once_its_chunk_is_read() -> None:
    instance = Instance(64, chunk=16, lanes=2)
    step, _ = beside_a_stream(instance)
    instance.scheduler.submit(CancelRequest(room_of(1)))
    for _ in range(4):
        instance.scheduler.step()
        held = {page for room in instance.cache._rooms.values() for page in room.table}
        assert step.pages <= held and not step.slots & set(instance.scheduler._resources.slots._free)
    instance.late.run_beside()
    instance.scheduler.step()
    held = {page for room in instance.cache._rooms.values() for page in room.table}
    assert not step.pages & held
    instance.run()
    instance.check_empty()


def test_a_planted_release_that_waits_for_one_lane_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Resources, is_beside: bool = False) -> None:
        self._num_read += not is_beside
        self._beside_read += is_beside
        while self._leaving and self._leaving[0][0] <= self._num_read:
            self._leaving.popleft()[2]()

    monkeypatch.setattr(Resources, "read", read)
    instance = Instance(64, chunk=16, lanes=2)
    beside_a_stream(instance)
    instance.scheduler.submit(CancelRequest(room_of(1)))
    with pytest.raises(AssertionError, match="is free while a launched"):
        for _ in range(4):
            turn(instance, NEVER)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_first_token_leaves_before_its_prompt_is_cached_and_before_the_next_launch(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance(64, chunk=16, overlap=overlap, lanes=2)
    beside_a_stream(instance, prompt_len=9)
    order: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any) -> Any:
            before = room_of(1) in instance.tokens
            result = inner(*args)
            if name != "flush" or (not before and room_of(1) in instance.tokens):
                order.append(what)
            return result

        monkeypatch.setattr(owner, name, noted)

    note(instance.cache, "commit", "cached")
    note(instance.late, "launch", "launched")
    note(instance.scheduler._tokens, "flush", "sent")
    instance.late.run_beside()
    instance.scheduler.step()
    assert order == ["sent", "cached", "launched"]
    instance.run()
    instance.check_empty()


class _Never(random.Random):
    """Chance that lets no step run by itself."""

    def random(self) -> float:
        return 0.99

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 0


NEVER = _Never()


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_reads_both_lanes_first_and_loses_no_token(overlap: bool) -> None:
    instance = Instance(17, chunk=4, overlap=overlap, lanes=2)
    for index in range(6):
        instance.scheduler.submit(unified(index, 7, SamplingParams(40, temperature=0.0)))
    rng = random.Random(1)
    while not instance.scheduler.is_idle:
        turn(instance, rng)
    assert instance.scheduler.load.retractions > 0
    for index in range(6):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 7), 40, INFO.vocab_size)
    instance.check_empty()


def test_a_prompt_with_forks_leaves_its_row_in_the_lane() -> None:
    instance = Instance(64, chunk=16, lanes=2)
    instance.scheduler.submit(unified(0, 3, SamplingParams(60, temperature=0.0)))
    while room_of(0) not in instance.tokens:
        instance.scheduler.step()
    forks = tuple(Fork(room_of(10 + index), "r", index) for index in range(3))
    sampling = SamplingParams(6, temperature=1.0)
    instance.scheduler.submit(unified_request(room_of(1), "r1", pack_i32(prompt_of(1, 21)), sampling, forks=forks))
    instance.run()
    for index, fork in enumerate(forks):
        own = SamplingParams(6, temperature=1.0, seed=index)
        assert instance.tokens[fork.room] == expected_tokens(prompt_of(1, 21), 6, INFO.vocab_size, own)
    instance.check_empty()


class RaisingExecutor(FakeExecutor):
    """Executor that raises for chunks, or for decodes, of one prompt."""

    poison = prompt_of(1, 40)[:1]
    at = "prefill"

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        result = super().execute(plan, on_layer)
        slots = plan.decode if self.at == "decode" else [chunk.slot for chunk in plan.prefill]
        if any(self._slots[slot].tokens[:1] == self.poison for slot in slots):
            raise RuntimeError("a tensor that does not fit")
        return result


class RaisingLate(LateExecutor):
    """Device whose lane raises when its step is read, as a thread does."""

    def run_beside(self) -> bool:
        try:
            return super().run_beside()
        except RuntimeError:
            self.is_running, self.beside = False, None
            raise

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        step = super().launch(plan, on_layer)
        try:
            step.synchronize()
        except RuntimeError:
            self.is_running = False
            self.unread.pop()
            raise
        return step


@pytest.mark.parametrize("seed", range(6))
def test_chunks_that_raise_fail_their_request_alone(seed: int) -> None:
    instance = Instance(64, chunk=16, lanes=2, executor=RaisingExecutor, late=RaisingLate)
    beside_a_stream(instance)
    instance.scheduler.submit(unified(2, 9, GREEDY))
    for _ in range(seed):
        instance.scheduler.step()
    instance.run()
    assert instance.finishes[room_of(1)].reason == "error" and room_of(1) not in instance.tokens
    for index, (length, count) in ((0, (3, 60)), (2, (9, 12))):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, length), count, INFO.vocab_size)
    instance.check_empty()


def test_one_prompt_lane_and_one_chunk_step_at_a_time() -> None:
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=8, chunk_size=4, reserved_decode_tokens=4)
    instance = Instance(64, config=config, lanes=2)
    beside_a_stream(instance, prompt_len=9)
    for index in range(2, 6):
        instance.scheduler.submit(unified(index, 20, GREEDY))
    instance.run()
    for index in range(2, 6):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 20), 12, INFO.vocab_size)
    instance.check_empty()
