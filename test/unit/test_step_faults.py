"""A step that raises for one request: only that one fails, the rest have the tokens that they would have without it."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, continued, loads, prompt_of, room_of
from test_step_overlap import check

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import (
    Admit,
    FirstToken,
    LayerCallback,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
    StepResult,
)
from chitu.protocol import CancelRequest, DecodeRequest, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.fake_executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.testing.late_executor import LateExecutor, LateStep

POISON = 999
"""A token id that no other prompt or answer has."""
PLACES = ["admit", "prefill", "sample", "decode", "restore"]


class Poisoned(FakeExecutor):
    """An executor that raises at `place` for a request with the poison token, with all before it in the plan done."""

    place: ClassVar[str] = "prefill"
    raised = 0

    def _raise_at(self, place: str, slot: int) -> None:
        state = self._slots.get(slot)
        if place == self.place and state is not None and POISON in state.tokens:
            self.raised += 1
            raise IndexError("index 999 is out of bounds")

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        self._raise_at("admit", admit.slot)

    def _restore(self, restore: Restore) -> None:
        super()._restore(restore)
        self._raise_at("restore", restore.slot)

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        super()._prefill(chunk, result)
        self._raise_at("prefill", chunk.slot)

    def _first_token(self, first: FirstToken, result: StepResult) -> None:
        super()._first_token(first, result)
        self._raise_at("sample", first.slot)

    def _decode(self, slot: int, result: StepResult) -> None:
        super()._decode(slot, result)
        self._raise_at("decode", slot)


def poisoned_at(where: str) -> type[Poisoned]:
    return type("PoisonedThere", (Poisoned,), {"place": where})


class PoisonedLate(LateExecutor):
    """A late device that raises within the launch."""

    _poisoned: frozenset[int] = frozenset()

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        now = {admit.slot for admit in plan.admit}
        bad = {admit.slot for admit in plan.admit if POISON in memoryview(admit.token_ids).cast("i")}
        poisoned = (self._poisoned - now) | bad
        if not poisoned.isdisjoint({*plan.decode, *(chunk.slot for chunk in plan.prefill)}):
            raise IndexError("index 999 is out of bounds")
        self._poisoned = poisoned
        return super().launch(plan, on_layer)


def has_poison(load: list[tuple[int, int, int]]) -> bool:
    """Return whether a load has the poison token by chance: in what is sent, with its output so far, or in what is to
    come."""
    asked = [continued(index, *one) for index, one in enumerate(load)]
    return any(POISON in memoryview(sent).cast("i") or POISON in left for sent, _, _, left in asked)


@pytest.mark.parametrize("where", ["admit", "prefill", "decode", "late"])
def test_one_poisonous_request_among_eight_fails_alone(where: str) -> None:
    """Its neighbours are in the middle of prompts and answers, seeded, some continued from another instance."""
    instance = Instance(
        64,
        executor=FakeExecutor if where == "late" else poisoned_at(where),
        late=PoisonedLate,
        overlap=where == "late",
        config=SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=7, reserved_decode_tokens=4),
    )
    expected = {}
    for index in range(7):
        token_ids, sampling, num_emitted, tokens = continued(index, 5 + 6 * index, 12, index)
        expected[room_of(index)] = tokens
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    for _ in range(3):
        instance.scheduler.step()
    bad = pack_i32([*prompt_of(7, 4), POISON])
    instance.scheduler.submit(UnifiedRequest(room_of(7), "bad", bad, SamplingParams(9, temperature=0.0)))
    instance.run()
    assert {room: instance.tokens[room] for room in expected} == expected
    assert all(instance.finishes[room].reason == "length" for room in expected)
    assert (instance.finishes[room_of(7)].code, instance.finishes[room_of(7)].reason) == ("step_failed", "error")
    assert "(IndexError)" in instance.finishes[room_of(7)].message
    instance.check_empty()
    prompt = prompt_of(3, 9)
    instance.scheduler.submit(UnifiedRequest(room_of(8), "next", pack_i32(prompt), SamplingParams(4, temperature=0.0)))
    instance.run()
    assert instance.tokens[room_of(8)] == expected_tokens(prompt, 4, INFO.vocab_size)


@settings(max_examples=60, deadline=None)
@given(
    loads,
    st.integers(17, 60),
    st.integers(1, 16),
    st.sampled_from([*PLACES, "late"]),
    st.sets(st.integers(0, 19)),
    st.integers(0, 1 << 30),
)
def test_any_number_of_poisonous_requests_fail_with_retractions_and_cancels(
    load: list[tuple[int, int, int]], num_pages: int, chunk: int, where: str, poisoned: set[int], seed: int
) -> None:
    instance = Instance(
        num_pages,
        chunk=chunk,
        executor=FakeExecutor if where == "late" else poisoned_at(where),
        late=PoisonedLate,
        overlap=where == "late",
    )
    expected: dict[bytes, list[int]] = {}
    cancelled = set()
    assume(not has_poison(load))
    rng = random.Random(seed)
    for index, one in enumerate(load):
        room = room_of(index)
        token_ids, sampling, num_emitted, tokens = continued(index, *one)
        if index in poisoned:
            token_ids = pack_i32([POISON]) + token_ids[4:]
        else:
            expected[room] = tokens
        instance.scheduler.submit(UnifiedRequest(room, f"r{index}", token_ids, sampling, num_emitted))
        for _ in range(rng.randrange(4)):
            instance.scheduler.step()
            check(instance)
        if rng.random() < 0.1 and room not in instance.finishes:
            cancelled.add(room)
            instance.scheduler.submit(CancelRequest(room))
    instance.run()
    for room, tokens in expected.items():
        got = instance.tokens.get(room, [])
        if room in cancelled:
            assert got == tokens[: len(got)]
        else:
            assert (got, instance.finishes[room].reason) == (tokens, "length")
    for index in poisoned:
        room = room_of(index)
        if index < len(load) and room not in cancelled and where in ("admit", "prefill", "late"):
            assert instance.finishes[room].code == "step_failed"
    instance.check_empty()


@settings(max_examples=40, deadline=None)
@given(
    loads,
    st.integers(17, 50),
    st.integers(17, 50),
    st.tuples(st.sampled_from(["", "admit", "prefill"]), st.sampled_from(["", "admit", "sample", "decode", "restore"])),
    st.sets(st.integers(0, 19)),
    st.integers(0, 1 << 30),
)
def test_p_and_d_fail_the_poisonous_halves_alone(
    load: list[tuple[int, int, int]],
    pages_p: int,
    pages_d: int,
    where: tuple[str, str],
    poisoned: set[int],
    seed: int,
) -> None:
    assume(not has_poison(load))
    rng = random.Random(seed)
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), executor=poisoned_at(where[0]))
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), executor=poisoned_at(where[1]))
    expected = {}
    for index, one in enumerate(load):
        room = room_of(index)
        token_ids, sampling, num_emitted, tokens = continued(index, *one)
        if index in poisoned:
            token_ids = pack_i32([POISON]) + token_ids[4:]
        else:
            expected[room] = tokens
        decode.scheduler.submit(DecodeRequest(room, f"r{index}", token_ids, sampling, 0, 1, num_emitted=num_emitted))
        prefill.scheduler.submit(PrefillRequest(room, f"r{index}", token_ids, 0, 1))
    for _ in range(3000):
        for instance in rng.sample([prefill, decode], 2):
            instance.scheduler.step()
        wire.deliver(rng)
        for room in prefill.failures:  # the router cancels on D
            if room not in decode.finishes:
                decode.scheduler.submit(CancelRequest(room))
        if prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    assert {room: decode.tokens[room] for room in expected} == expected
    assert all(decode.finishes[room].reason == "length" for room in expected)
    failed = set(prefill.failures) | {room for room, finish in decode.finishes.items() if finish.code == "step_failed"}
    assert failed <= {room_of(index) for index in poisoned}
    for instance in (prefill, decode):
        instance.scheduler.step()
        instance.check_empty()


class Broken(FakeExecutor):
    """An executor that cannot compute anything from its fourth step on."""

    error: ClassVar[Exception] = RuntimeError("CUDA error: an illegal memory access was encountered")

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if self.steps >= 3:
            raise self.error
        return super().execute(plan, on_layer)


@pytest.mark.parametrize("error", [RuntimeError("a broken device"), InvariantViolation("an impossible plan")])
@pytest.mark.parametrize("count", [1, 5])
def test_an_executor_that_always_raises_ends_the_step_loop(error: Exception, count: int) -> None:
    instance = Instance(32, executor=type("BrokenSo", (Broken,), {"error": error}))
    for index in range(count):
        prompt = pack_i32(prompt_of(index, 3))
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", prompt, SamplingParams(9)))
    with pytest.raises(type(error)) as raised:
        instance.run()
    assert raised.value is error
    assert not instance.finishes


class Forgetful(FakeExecutor):
    """An executor that raises now and then in the middle of a step, caused by no request."""

    def _decode(self, slot: int, result: StepResult) -> None:
        super()._decode(slot, result)
        if self.steps % 7 == 3 and len(result.slots) > 2:
            raise MemoryError("cannot allocate")


def test_a_step_that_raises_for_nobody_alone_is_repeated_and_nobody_notices() -> None:
    instance = Instance(64, executor=Forgetful)
    expected = {}
    for index in range(8):
        token_ids, sampling, num_emitted, tokens = continued(index, 4, 24, 0)
        expected[room_of(index)] = tokens
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    instance.run()
    assert instance.tokens == expected
    assert all(finish.reason == "length" for finish in instance.finishes.values())


class NoHostMemory(FakeExecutor):
    """An executor whose second retraction finds no memory."""

    offloads = 0

    def _offload(self, offload: Offload) -> None:
        self.offloads += 1
        if self.offloads == 2:
            raise MemoryError("cannot allocate")
        super()._offload(offload)


def test_kv_that_cannot_be_saved_ends_its_request_which_may_go_on_elsewhere() -> None:
    instance = Instance(17, executor=NoHostMemory)
    expected = {}
    for index in range(6):
        token_ids, sampling, num_emitted, tokens = continued(index, 8, 24, 0)
        expected[room_of(index)] = tokens
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    instance.run()
    lost = [room for room, finish in instance.finishes.items() if finish.code == "decode_lost"]
    assert len(lost) == 1
    for room, tokens in expected.items():
        assert instance.tokens[room] == tokens[: len(instance.tokens[room])]
        assert room in lost or len(instance.tokens[room]) == len(tokens)
    instance.check_empty()
