"""A request whose logits are not finite fails by name, alone, and none of its pages is cached; a device whose every
request is so ends its process."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import DoneStep, FirstToken, LayerCallback, PrefillChunk, StepPlan, StepResult
from chitu.engine.step_tokens import Checks, StepTokens
from chitu.engine.warmup import Shapes, run_warmup
from chitu.errors import ConfigError, Internal
from chitu.instance.step_faults import MAX_UNSOUND_IN_A_ROW
from chitu.ops.sampling_numbers import NO_TOKEN
from chitu.protocol import DecodeRequest, Fork, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.fake_executor import FakeExecutor, expected_tokens

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
    message = UnifiedRequest(room_of(index), f"r{index}", pack_i32(prompt), GREEDY)
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
    decode.scheduler.submit(DecodeRequest(room_of(0), "r", pack_i32(prompt), GREEDY, 0, 1))
    prefill.scheduler.submit(PrefillRequest(room_of(0), "r", pack_i32(prompt), 0, 1))
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
    decode.scheduler.submit(DecodeRequest(room_of(0), "r", pack_i32(prompt), GREEDY, 0, 1))
    prefill.scheduler.submit(PrefillRequest(room_of(0), "r", pack_i32(prompt), 0, 1))
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
        instance.scheduler.submit(PrefillRequest(room_of(0), "r", pack_i32([1, 2, 3]), 0, 1))
        wire.announced[room_of(0)] = 0
        wire.requested.add(room_of(0))
    else:
        ask(instance, 0, [1, 2, 3])
    with pytest.raises(Internal, match="no finite logits any more"):
        for _ in range(10):
            instance.scheduler.step()


def prefill_on_p(wire: Wire, index: int, prompt: list[int]) -> None:
    assert wire.prefill is not None
    wire.prefill.scheduler.submit(PrefillRequest(room_of(index), f"r{index}", pack_i32(prompt), 0, 1))
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
    instance.scheduler.submit(UnifiedRequest(room_of(0), "r", pack_i32(prompt_of(1, 21)), GREEDY, forks=forks))
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
        decode.scheduler.submit(DecodeRequest(room_of(index), f"r{index}", pack_i32(prompt), GREEDY, 0, 1))
        prefill.scheduler.submit(PrefillRequest(room_of(index), f"r{index}", pack_i32(prompt), 0, 1))
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
