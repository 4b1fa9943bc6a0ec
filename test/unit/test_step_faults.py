"""A step that raises for one request: only that one fails, the rest have the tokens that they would have without it."""

from __future__ import annotations

import random
from typing import ClassVar

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, continued, loads, prompt_of, room_of
from support.executors import LateExecutor, LateStep
from support.requests import decode_request, prefill_request, unified_request
from test_step_overlap import check

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import (
    Admit,
    DoneStep,
    FirstToken,
    LayerCallback,
    Offload,
    PrefillChunk,
    Restore,
    Shapes,
    StepPlan,
    StepResult,
    run_warmup,
)
from chitu.engine.step_tokens import Checks, StepTokens
from chitu.errors import ConfigError, Internal
from chitu.fake.executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.instance.step_faults import MAX_UNSOUND_IN_A_ROW
from chitu.ops.sampling_numbers import NO_TOKEN
from chitu.protocol import CancelRequest, Fork, SamplingParams, pack_i32

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
        instance.scheduler.submit(unified_request(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    for _ in range(3):
        instance.scheduler.step()
    bad = pack_i32([*prompt_of(7, 4), POISON])
    instance.scheduler.submit(unified_request(room_of(7), "bad", bad, SamplingParams(9, temperature=0.0)))
    instance.run()
    assert {room: instance.tokens[room] for room in expected} == expected
    assert all(instance.finishes[room].reason == "length" for room in expected)
    assert (instance.finishes[room_of(7)].code, instance.finishes[room_of(7)].reason) == ("step_failed", "error")
    assert "(IndexError)" in instance.finishes[room_of(7)].message
    instance.check_empty()
    prompt = prompt_of(3, 9)
    instance.scheduler.submit(unified_request(room_of(8), "next", pack_i32(prompt), SamplingParams(4, temperature=0.0)))
    instance.run()
    assert instance.tokens[room_of(8)] == expected_tokens(prompt, 4, INFO.vocab_size)


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
        instance.scheduler.submit(unified_request(room, f"r{index}", token_ids, sampling, num_emitted))
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
        decode.scheduler.submit(decode_request(room, f"r{index}", token_ids, sampling, 0, 1, num_emitted=num_emitted))
        prefill.scheduler.submit(prefill_request(room, f"r{index}", token_ids, 0, 1, num_emitted=num_emitted))
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
        instance.scheduler.submit(unified_request(room_of(index), f"r{index}", prompt, SamplingParams(9)))
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
        instance.scheduler.submit(unified_request(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
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
        instance.scheduler.submit(unified_request(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    instance.run()
    lost = [room for room, finish in instance.finishes.items() if finish.code == "decode_lost"]
    assert len(lost) == 1
    for room, tokens in expected.items():
        assert instance.tokens[room] == tokens[: len(instance.tokens[room])]
        assert room in lost or len(instance.tokens[room]) == len(tokens)
    instance.check_empty()


# ----------------------------------------------------------------------------------------------------------------------
# A request whose logits are not finite fails by name, alone, and none of its pages is cached; a device whose every
# request is so ends its process.


BAD = 999
"""A token whose K, V and logits are not finite, nor are those of all tokens behind it."""
GREEDY = SamplingParams(6, temperature=0.0)
NEXT_TOKENS = expected_tokens(prompt_of(1, 21), 6, INFO.vocab_size)


class Unsound(FakeExecutor):
    """An executor with a token that damages what follows it."""

    bad = frozenset({BAD})

    def _is_bad(self, slot: int) -> bool:
        state = self._slots[slot]
        return not self.bad.isdisjoint(state.tokens[: state.kv_len])

    def _mark(self, slot: int, result: StepResult) -> None:
        if self._is_bad(slot):
            result.tokens[-1] = NO_TOKEN

    def _first_token(self, first: FirstToken, result: StepResult) -> None:
        super()._first_token(first, result)
        self._mark(first.slot, result)

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        super()._prefill(chunk, result)
        if chunk.sample:
            self._mark(chunk.slot, result)
        elif self._is_bad(chunk.slot):
            result.unsound.append(chunk.slot)

    def _decode(self, slot: int, result: StepResult) -> None:
        super()._decode(slot, result)
        self._mark(slot, result)


class Hopeless(Unsound):
    """An executor that computes nothing finite."""

    def _is_bad(self, slot: int) -> bool:
        return True


class Overflowing(Unsound):
    """An executor that can compute short prompts only."""

    def _is_bad(self, slot: int) -> bool:
        return self._slots[slot].prompt_len > 3


class BadZero(Unsound):
    """An executor whose token 0 is damaged, too."""

    bad = frozenset({BAD, 0})


def ask(instance: Instance, index: int, prompt: list[int]) -> None:
    message = unified_request(room_of(index), f"r{index}", pack_i32(prompt), GREEDY)
    instance.scheduler.submit(message)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", [2, 12, 20])
def test_a_prompt_fails_alone_and_its_pages_are_not_cached(place: int, overlap: bool) -> None:
    instance = Instance(64, executor=Unsound, overlap=overlap)
    prompt = prompt_of(1, 21)
    bad = [*prompt[:place], BAD, *prompt[place + 1 :]]
    ask(instance, 0, bad)
    ask(instance, 1, prompt_of(2, 9))
    instance.run()
    finish = instance.finishes[room_of(0)]
    assert (finish.code, room_of(0) in instance.tokens) == ("step_failed", False) and "not finite" in finish.message
    assert instance.tokens[room_of(1)] == expected_tokens(prompt_of(2, 9), 6, INFO.vocab_size)
    assert instance.scheduler.load.unsound == 1
    instance.check_empty()
    instance.executor.bad = frozenset()  # type: ignore[attr-defined]
    ask(instance, 2, bad)
    instance.run()
    sound = place // 5 * 5  # tokens of the chunks before the one with the bad token
    assert instance.cached.get(room_of(2), 0) == sound // PAGE_SIZE * PAGE_SIZE
    assert instance.tokens[room_of(2)] == expected_tokens(bad, 6, INFO.vocab_size)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_that_becomes_unsound_keeps_its_tokens_and_fails(overlap: bool) -> None:
    instance = Instance(64, executor=Unsound, overlap=overlap)
    prompt = prompt_of(1, 21)
    instance.executor.bad = frozenset({NEXT_TOKENS[2]})  # type: ignore[attr-defined]
    ask(instance, 0, prompt)
    instance.run()
    assert instance.tokens[room_of(0)] == NEXT_TOKENS[:3]
    assert instance.finishes[room_of(0)].code == "step_failed"
    instance.check_empty()
    ask(instance, 1, [*prompt, *NEXT_TOKENS[:4]])
    instance.executor.bad = frozenset()  # type: ignore[attr-defined]
    instance.run()
    assert instance.cached[room_of(1)] == 20, "the pages of the prompt were sound"


def test_p_fails_it_by_name_and_neither_end_caches_a_page() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(64, sender=PSide(wire), executor=Unsound)
    decode = wire.decode = Instance(64, receiver=DSide(wire), executor=Unsound)
    prompt = [BAD, *prompt_of(1, 20)]
    decode.scheduler.submit(decode_request(room_of(0), "r", pack_i32(prompt), GREEDY, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(0), "r", pack_i32(prompt), 0, 1))
    for _ in range(20):
        prefill.scheduler.step()
        decode.scheduler.step()
    assert prefill.failures[room_of(0)].code == "step_failed" and not prefill.failures[room_of(0)].retryable
    assert room_of(0) not in wire.computed, "its logits were not sent"
    assert prefill.scheduler.load.pages_cached == decode.scheduler.load.pages_cached == 0
    prefill.check_empty()


def test_d_fails_it_by_name_if_p_has_not() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(64, sender=PSide(wire))
    decode = wire.decode = Instance(64, receiver=DSide(wire), executor=Unsound)
    prompt = [*prompt_of(1, 20), BAD]
    decode.scheduler.submit(decode_request(room_of(0), "r", pack_i32(prompt), GREEDY, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(0), "r", pack_i32(prompt), 0, 1))
    rng = random.Random(1)
    while room_of(0) not in decode.finishes:
        prefill.scheduler.step()
        decode.scheduler.step()
        wire.deliver(rng)
    assert decode.finishes[room_of(0)].code == "step_failed" and room_of(0) not in decode.tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_an_instance_that_computes_nothing_finite_ends(is_prefill: bool, overlap: bool) -> None:
    wire = Wire()
    instance = Instance(64, sender=PSide(wire) if is_prefill else None, executor=Hopeless, overlap=overlap)
    wire.prefill = instance
    if is_prefill:
        instance.scheduler.submit(prefill_request(room_of(0), "r", pack_i32([1, 2, 3]), 0, 1))
        wire.announced[room_of(0)] = 0
        wire.requested.add(room_of(0))
    else:
        ask(instance, 0, [1, 2, 3])
    with pytest.raises(Internal, match="no finite logits any more"):
        for _ in range(10):
            instance.scheduler.step()


def prefill_on_p(wire: Wire, index: int, prompt: list[int]) -> None:
    assert wire.prefill is not None
    wire.prefill.scheduler.submit(prefill_request(room_of(index), f"r{index}", pack_i32(prompt), 0, 1))
    wire.announced[room_of(index)] = 0
    wire.requested.add(room_of(index))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_an_instance_that_fails_each_request_ends_unless_one_between_is_sound(is_prefill: bool, overlap: bool) -> None:
    """Short prompts are finite, as if an overflow needs more tokens."""
    wire = Wire()
    instance = Instance(64, sender=PSide(wire) if is_prefill else None, executor=Overflowing, overlap=overlap)
    wire.prefill = instance

    def serve(index: int, prompt: list[int]) -> None:
        if is_prefill:
            prefill_on_p(wire, index, prompt)
        else:
            ask(instance, index, prompt)
        for _ in range(12):
            instance.scheduler.step()

    last = MAX_UNSOUND_IN_A_ROW - 1
    for index in range(2 * last + 1):
        serve(index, [1] if index == last else prompt_of(1, 9))
    ended = instance.failures if is_prefill else instance.finishes
    with pytest.raises(Internal, match=f"for {MAX_UNSOUND_IN_A_ROW} requests in a row"):
        serve(2 * last + 1, prompt_of(1, 9))
    assert ended[room_of(2 * last + 1)].code == "step_failed", "its client hears of it before"


def test_clients_whose_prompts_have_a_damaged_token_end_no_instance() -> None:
    instance = Instance(64, executor=Unsound)
    for index in range(3 * MAX_UNSOUND_IN_A_ROW):
        ask(instance, index, [BAD, 1, 2])
        instance.run()
        assert instance.finishes[room_of(index)].code == "step_failed"
    instance.check_empty()


def test_choices_of_one_prompt_count_once() -> None:
    slots = 2 * MAX_UNSOUND_IN_A_ROW
    info, config = msgspec.structs.replace(INFO, num_slots=slots), SchedulerConfig(max_running_requests=slots)
    instance = Instance(200, executor=Unsound, info=info, config=config)
    instance.executor.bad = frozenset({NEXT_TOKENS[0]})  # type: ignore[attr-defined]
    forks = tuple(Fork(room_of(1 + index), "r", index) for index in range(MAX_UNSOUND_IN_A_ROW + 1))
    instance.scheduler.submit(unified_request(room_of(0), "r", pack_i32(prompt_of(1, 21)), GREEDY, forks=forks))
    instance.run()
    assert {instance.finishes[fork.room].code for fork in forks} == {"step_failed"}
    assert instance.scheduler.load.unsound == len(forks)


def test_d_does_not_end_over_the_logits_of_p() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(64, sender=PSide(wire))
    decode = wire.decode = Instance(64, receiver=DSide(wire), executor=Unsound)
    rng = random.Random(1)
    for index in range(MAX_UNSOUND_IN_A_ROW + 1):
        prompt = [*prompt_of(1, 20), BAD]
        decode.scheduler.submit(decode_request(room_of(index), f"r{index}", pack_i32(prompt), GREEDY, 0, 1))
        prefill.scheduler.submit(prefill_request(room_of(index), f"r{index}", pack_i32(prompt), 0, 1))
        while room_of(index) not in decode.finishes:
            prefill.scheduler.step()
            decode.scheduler.step()
            wire.deliver(rng)
        assert decode.finishes[room_of(index)].code == "step_failed"
    decode.scheduler.step()


def test_one_damaged_token_more_does_not_end_it_and_a_full_instance_is_tried_later() -> None:
    instance = Instance(12, executor=BadZero)
    for index in range(3):
        ask(instance, index, [BAD, 1, 2] if index else prompt_of(1, 20))
    instance.run()
    assert [instance.finishes[room_of(index)].code for index in range(3)] == ["", "step_failed", "step_failed"]
    instance.check_empty()


def test_what_a_step_found_reaches_the_host_behind_its_tokens() -> None:
    tokens = torch.tensor([7, NO_TOKEN])
    checks = [Checks([3], torch.tensor([True])), Checks([4, 5], torch.tensor([False, True]))]
    for made in (tokens, None):
        slots = [] if made is None else [1, 2]
        found = StepTokens(8, None).launched(slots, made, checks=checks).result()
        assert (found.tokens, found.unsound) == ([] if made is None else [7, NO_TOKEN], [4])


class Damaged:
    """An `Executor`, as far as the warm-up needs one, that finds nothing finite behind some tokens."""

    def __init__(self, bad: set[int]) -> None:
        self.info, self._bad = INFO, bad
        self._slots: dict[int, bool] = {}

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        for admit in plan.admit:
            self._slots[admit.slot] = not self._bad.isdisjoint(memoryview(admit.token_ids).cast("i"))
        samples = [chunk.slot for chunk in plan.prefill if chunk.sample]
        unsound = [chunk.slot for chunk in plan.prefill if not chunk.sample and self._slots[chunk.slot]]
        return DoneStep(StepResult(samples, [-1 if self._slots[slot] else 5 for slot in samples], unsound=unsound))


@pytest.mark.parametrize("samples", [False, True])
def test_a_model_without_finite_logits_does_not_start(samples: bool) -> None:
    shapes = Shapes(100, 4, samples, num_aux_slots=4)
    run_warmup(Damaged({0}), shapes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not finite"):
        run_warmup(Damaged({0, INFO.vocab_size // 2}), shapes)  # type: ignore[arg-type]
