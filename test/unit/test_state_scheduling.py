"""Requests of models with recurrent state: who holds a state row, from when to when, and that no token is computed from
a wrong one. The executor checks each row whenever it is read."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from scheduler_world import INFO, DSide, Instance, PSide, Wire, continued, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import CopyState, PrefillChunk, Restore, StepResult
from chitu.errors import Internal
from chitu.fake.executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.instance.sequences import Sequence
from chitu.kv_cache.state_row import StateSlots
from chitu.protocol import CancelRequest, Fork, SamplingParams, pack_i32

POISON = 999


def sequences_of(instance: Instance) -> list[Sequence]:
    return list(instance.scheduler._sequences._all.values())


def check_rows(instance: Instance) -> None:
    """Check that free rows, used rows and those of snapshots are all rows, and that no two requests have one."""
    held = [s.holds.state_slot for s in sequences_of(instance) if s.holds.state_slot >= 0]
    states, load = instance.states, instance.scheduler.load
    assert len(held) == len(set(held)) and sorted(held) == sorted(states._used)
    assert states.num_free + len(held) == states.num_slots == load.states_total
    assert sorted([*states._free, *held, *states._snapshots]) == list(range(states.num_slots))
    assert 0 <= load.states_free <= load.states_total


def run(*instances: Instance, wire: Wire | None = None, seed: int = 0, limit: int = 3000) -> None:
    rng = random.Random(seed)
    for _ in range(limit):
        for instance in instances:
            instance.scheduler.step()
            check_rows(instance)
        if wire is not None:
            wire.deliver(rng)
        if all(instance.scheduler.is_idle for instance in instances):
            break
    else:
        raise AssertionError([instance.scheduler.load for instance in instances])
    for instance in instances:
        instance.scheduler.step()
        instance.check_empty()


def pair(
    num_pages: int = 40, p_states: int = 4, d_states: int = 6, **options: object
) -> tuple[Wire, Instance, Instance]:
    wire = Wire()
    wire.prefill = Instance(num_pages, sender=PSide(wire), state_slots=p_states, **options)  # type: ignore[arg-type]
    wire.decode = Instance(num_pages, receiver=DSide(wire), state_slots=d_states, **options)  # type: ignore[arg-type]
    return wire, wire.prefill, wire.decode


def ask(prefill: Instance, decode: Instance, index: int, length: int, max_tokens: int) -> list[int]:
    """Send both halves of a request, and return its tokens to come."""
    prompt = prompt_of(index, length)
    sampling = SamplingParams(max_tokens, temperature=0.0)
    decode.scheduler.submit(decode_request(room_of(index), "r", pack_i32(prompt), sampling, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(index), "r", pack_i32(prompt), 0, 1))
    return expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [18, 60], ids=["retracted", "roomy"])
def test_a_unified_instance_gives_every_request_its_tokens(num_pages: int, overlap: bool) -> None:
    instance = Instance(num_pages, state_slots=6, overlap=overlap)
    expected = {}
    for index in range(12):
        token_ids, sampling, num_emitted, tokens = continued(index, 5 + 3 * index % 30, 20, index)
        expected[room_of(index)] = tokens
        instance.scheduler.submit(unified_request(room_of(index), "r", token_ids, sampling, num_emitted))
    run(instance)
    assert instance.tokens == expected
    assert (instance.scheduler.load.retractions > 0) == (num_pages == 18)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_p_and_d_give_every_request_its_tokens(seed: int, overlap: bool) -> None:
    """Pages and rows run short on both sides."""
    rng = random.Random(seed)
    wire, prefill, decode = pair(rng.choice([18, 40]), rng.randint(1, 3), rng.randint(1, 4), overlap=overlap)
    expected = {room_of(n): ask(prefill, decode, n, rng.randint(1, 40), rng.randint(1, 20)) for n in range(10)}
    run(prefill, decode, wire=wire, seed=seed)
    assert decode.tokens == expected


@pytest.mark.parametrize("seed", range(10))
def test_rows_add_up_after_every_step_whatever_fails_or_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    wire, prefill, decode = pair(rng.randint(17, 40), rng.randint(1, 3), rng.randint(1, 4))
    for index in range(10):
        ask(prefill, decode, index, rng.randint(1, 40), rng.randint(1, 20))
        if rng.random() < 0.3:
            wire.failing.add(room_of(index))
        for _ in range(rng.randint(0, 6)):
            if rng.random() < 0.2:
                room = room_of(rng.randrange(10))
                for side in (prefill, decode):
                    side.scheduler.submit(CancelRequest(room))
            for side in (prefill, decode):
                side.scheduler.step()
                check_rows(side)
            wire.deliver(rng)
    run(prefill, decode, wire=wire, seed=seed)


def test_one_row_on_each_side_is_enough() -> None:
    wire, prefill, decode = pair(p_states=1, d_states=1)
    expected = {room_of(n): ask(prefill, decode, n, 6 + n, 5) for n in range(5)}
    run(prefill, decode, wire=wire)
    assert decode.tokens == expected


def test_p_computes_nothing_before_d_has_a_row_for_it() -> None:
    wire, prefill, decode = pair(p_states=4, d_states=1)
    for index in range(3):
        ask(prefill, decode, index, 6, 4)
    decode.scheduler.step()
    for _ in range(5):
        prefill.scheduler.step()
    assert [s.room for s in sequences_of(prefill) if s.holds.state_slot >= 0] == [room_of(0)]
    run(prefill, decode, wire=wire)


def test_a_request_for_one_token_takes_no_row_on_d() -> None:
    wire, prefill, decode = pair(d_states=1)
    expected = {room_of(0): ask(prefill, decode, 0, 9, 1), room_of(1): ask(prefill, decode, 1, 5, 1)}
    decode.scheduler.step()
    assert decode.states.num_free == 1 and wire.stamps[room_of(0)][0] == -1
    run(prefill, decode, wire=wire)
    assert decode.tokens == expected


# ---------------------------------------------------------------------------------------------------------------- forks


def with_forks(index: int, length: int, count: int) -> tuple[list[int], SamplingParams, tuple[Fork, ...]]:
    forks = tuple(Fork(room_of(100 * index + n), "r", 7 * n) for n in range(1, count + 1))
    return prompt_of(index, length), SamplingParams(8, temperature=1.0, seed=0), forks


def tokens_of_forks(prompt: list[int], forks: tuple[Fork, ...]) -> dict[bytes, list[int]]:
    drawn = {fork.room: SamplingParams(8, temperature=1.0, seed=fork.seed) for fork in forks}
    return {room: expected_tokens(prompt, 8, INFO.vocab_size, sampling) for room, sampling in drawn.items()}


@pytest.mark.parametrize("length", [8, 9], ids=["whole pages", "a part of a page"])
def test_each_choice_continues_its_own_copy_of_the_state(length: int) -> None:
    prompt, sampling, forks = with_forks(1, length, 4)
    unified = Instance(40, state_slots=5)
    unified.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=forks))
    run(unified)
    assert unified.tokens == tokens_of_forks(prompt, forks)
    wire, prefill, decode = pair(d_states=5)
    decode.scheduler.submit(decode_request(room_of(1), "r", pack_i32(prompt), sampling, 0, 1, forks=forks))
    prefill.scheduler.submit(prefill_request(room_of(1), "r", pack_i32(prompt), 0, 1))
    run(prefill, decode, wire=wire)
    assert decode.tokens == tokens_of_forks(prompt, forks)


def test_more_choices_than_rows_are_refused_at_once() -> None:
    prompt, sampling, forks = with_forks(1, 6, 4)
    instance = Instance(40, state_slots=4)
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=forks))
    run(instance)
    assert {end.code for end in instance.finishes.values()} == {"capacity"}
    assert "need 5 state rows, this instance has 4 (cache.num_state_slots)" in instance.finishes[forks[0].room].message


class ForgetsCopies(FakeExecutor):
    """Planted: forks that begin with whatever is in their rows."""

    def _copy_state(self, copy: CopyState) -> None: ...


class ForgetsRestore(FakeExecutor):
    """Planted: retracted requests that continue with whatever is in their rows."""

    def _restore(self, restore: Restore) -> None:
        row = self._slots[restore.slot].state_slot
        before = self._state_rows[row].copy()
        super()._restore(restore)
        self._state_rows[row] = before


class ForgetsZeroing(FakeExecutor):
    """Planted: prompts that begin with the state of the row's last owner."""

    def _take_state(self, slot, state, admit) -> None:  # type: ignore[no-untyped-def]
        before = self._state_rows[admit.state_slot].copy()
        super()._take_state(slot, state, admit)
        self._state_rows[admit.state_slot] = before


def test_a_fork_without_the_state_of_its_prompt_is_found() -> None:
    prompt, sampling, forks = with_forks(1, 9, 2)
    instance = Instance(40, state_slots=4, executor=ForgetsCopies)
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=forks))
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        run(instance)


@pytest.mark.parametrize("executor", [ForgetsRestore, ForgetsZeroing])
def test_a_row_that_keeps_what_its_last_owner_left_is_found(executor: type[FakeExecutor]) -> None:
    instance = Instance(18, state_slots=6, executor=executor)
    for index in range(8):
        prompt = pack_i32(prompt_of(index, 12))
        instance.scheduler.submit(unified_request(room_of(index), "r", prompt, SamplingParams(20, temperature=0.0)))
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        run(instance)


def test_a_state_that_does_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: D decodes without P's state. (The transfer layer finds that before.)"""
    wire, prefill, decode = pair()
    wire._deliver_state = lambda room: None  # type: ignore[method-assign]
    ask(prefill, decode, 0, 9, 4)
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        run(prefill, decode, wire=wire)


# ---------------------------------------------------------------------------------------------------- what is off by it


def test_d_caches_nothing_and_has_all_sent() -> None:
    wire, prefill, decode = pair()
    expected = {}
    for index in range(3):  # the same prompt, one after the other
        prompt, sampling = pack_i32(prompt_of(5, 30)), SamplingParams(3, temperature=0.0)
        expected[room_of(index)] = expected_tokens(prompt_of(5, 30), 3, INFO.vocab_size)
        decode.scheduler.submit(decode_request(room_of(index), "r", prompt, sampling, 0, 1))
        prefill.scheduler.submit(prefill_request(room_of(index), "r", prompt, 0, 1))
        run(prefill, decode, wire=wire)
    assert decode.tokens == expected and set(wire.prefix_pages.values()) == {0}
    assert decode.cache.hit_tokens == 0 and decode.scheduler.load.pages_cached == 0


def test_a_slot_is_given_back_once() -> None:
    states = StateSlots(1)
    slot = states.take()
    with pytest.raises(Internal, match="none is"):
        states.take()
    with pytest.raises(Internal, match="1 state rows in use"):
        states.check_idle()
    states.free(slot)
    with pytest.raises(Internal, match="free already"):
        states.free(slot)
    states.check_idle()


# -------------------------------------------------------------------------------------------------- steps that raise


class Poisoned(FakeExecutor):
    """An executor that raises at `place` for a request with the poison token, with all before it in the plan done: the
    states before it have moved on."""

    place: ClassVar[str] = ""
    raised = 0

    def _raise_at(self, place: str, slot: int) -> None:
        if place == self.place and POISON in self._slots[slot].tokens:
            self.raised += 1
            raise IndexError("index 999 is out of bounds")

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        super()._prefill(chunk, result)
        self._raise_at("prefill", chunk.slot)

    def _decode(self, slot: int, result: StepResult) -> None:
        super()._decode(slot, result)
        self._raise_at("decode", slot)


@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "forks"])
def test_no_token_is_taken_into_a_state_twice_when_a_step_is_repeated(place: str, forks: bool) -> None:
    poisoned = type("PoisonedThere", (Poisoned,), {"place": place})
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=7, reserved_decode_tokens=4)
    instance = Instance(64, executor=poisoned, config=config, state_slots=10)
    expected = {}
    if forks:
        prompt, sampling, choices = with_forks(1, 9, 3)
        expected |= tokens_of_forks(prompt, choices)
        instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling, forks=choices))
    else:
        for index in range(5):
            token_ids, sampling, num_emitted, tokens = continued(index, 5 + 6 * index, 12, index)
            expected[room_of(index)] = tokens
            instance.scheduler.submit(unified_request(room_of(index), "r", token_ids, sampling, num_emitted))
    for _ in range(3):
        instance.scheduler.step()
    bad = unified_request(room_of(99), "bad", pack_i32([*prompt_of(7, 4), POISON]), SamplingParams(9, temperature=0.0))
    instance.scheduler.submit(bad)
    run(instance)
    executor = instance.executor
    assert isinstance(executor, Poisoned) and executor.raised > 1
    assert instance.finishes.pop(room_of(99)).code == "step_failed"
    assert {room: instance.tokens[room] for room in expected} == expected


def test_a_repeat_without_a_new_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the step is repeated with the states that it had moved on."""
    monkeypatch.setattr("chitu.instance.step_faults.StepFaults._rebuild_state", lambda self, part, plan: None)
    poisoned = type("PoisonedThere", (Poisoned,), {"place": "decode"})
    instance = Instance(64, executor=poisoned, state_slots=10)
    for index, tokens in enumerate(([1, 2, 3], [4, 5, POISON])):
        request = unified_request(room_of(index), "r", pack_i32(tokens), SamplingParams(9, temperature=0.0))
        instance.scheduler.submit(request)
    with pytest.raises(InvariantViolation, match="the state of other tokens"):
        run(instance)


class Damaged(FakeExecutor):
    """An executor whose numbers behind the poison token are not finite."""

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        super()._prefill(chunk, result)
        if POISON in self._slots[chunk.slot].tokens:
            result.tokens[-1] = -1


def test_the_prompts_that_try_the_device_have_a_row_of_their_own() -> None:
    """With one row they wait until it is free."""
    instance = Instance(40, executor=Damaged, state_slots=1)
    expected = {}
    for index, prompt in enumerate(([1, 2, POISON], [4, 5, 6])):
        request = unified_request(room_of(index), "r", pack_i32(prompt), SamplingParams(5, temperature=0.0))
        expected[room_of(index)] = expected_tokens(prompt, 5, INFO.vocab_size)
        instance.scheduler.submit(request)
    run(instance)
    assert instance.finishes[room_of(0)].code == "step_failed"
    assert instance.tokens == {room_of(1): expected[room_of(1)]}


def test_one_token_before_and_behind_a_repeat_are_those_of_one_step() -> None:
    """A request that decodes, one that computes its prompt, and one that is retracted: none sees the repeat."""
    poisoned = type("PoisonedThere", (Poisoned,), {"place": "prefill"})
    instance = Instance(17, executor=poisoned, state_slots=8)
    expected = {}
    for index in range(6):
        token_ids, sampling, num_emitted, tokens = continued(index, 8, 20, 0)
        expected[room_of(index)] = tokens
        instance.scheduler.submit(unified_request(room_of(index), "r", token_ids, sampling, num_emitted))
        if index % 2:
            bad = unified_request(room_of(50 + index), "b", pack_i32([index, POISON]), SamplingParams(2))
            instance.scheduler.submit(bad)
        for _ in range(4):
            instance.scheduler.step()
            check_rows(instance)
    run(instance)
    assert instance.scheduler.load.retractions > 0
    assert {room: instance.tokens[room] for room in expected} == expected


@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_a_repeat_on_p_or_on_d_changes_no_token(place: str) -> None:
    """On D the poison comes as the prompt's last token, so that its first decode raises."""
    poisoned = type("PoisonedThere", (Poisoned,), {"place": place})
    wire, prefill, decode = pair(60, 6, 6, executor=poisoned)
    expected = {room_of(n): ask(prefill, decode, n, 9 + 5 * n, 12) for n in range(3)}
    for _ in range(2):
        prefill.scheduler.step()
        decode.scheduler.step()
        wire.deliver(random.Random(1))
    prompt, sampling = pack_i32([*prompt_of(9, 11), POISON]), SamplingParams(4, temperature=0.0)
    decode.scheduler.submit(decode_request(room_of(9), "bad", prompt, sampling, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(9), "bad", prompt, 0, 1))
    for _ in range(12):
        for side in (prefill, decode):
            side.scheduler.step()
            check_rows(side)
        wire.deliver(random.Random(2))
    if place == "prefill":
        assert prefill.failures[room_of(9)].code == "step_failed"
        decode.scheduler.submit(CancelRequest(room_of(9)))
    run(prefill, decode, wire=wire)
    if place == "decode":
        assert decode.finishes[room_of(9)].code == "step_failed"
    assert {room: decode.tokens[room] for room in expected} == expected
