"""A step is launched before the tokens of the previous one are read, on a late device: tokens and ends stay the same,
and nothing of a launched, unread step is free, promised to a peer or computed beyond a limit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, continued, loads, prompt_of, room_of
from support.clock import FakeClock
from support.executors import LateExecutor
from support.requests import decode_request, prefill_request, unified_request

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.errors import Internal
from chitu.fake.executor import FakeExecutor, expected_tokens, fake_logprobs
from chitu.instance.contacts import SilenceWatch
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.sequences import SequenceState
from chitu.instance.token_manager import TokenManager
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import MAX_FORKS, CancelRequest, Fork, PromptOutput, SamplingParams, UnifiedRequest, pack_i32

stops = st.integers(0, 11)
"""Index of the output token that is a request's stop id; from 8 on there is none."""


def check(instance: Instance) -> None:
    """Check the invariants between two turns."""
    late, cache = instance.late, instance.cache
    held = {page for room in cache._rooms.values() for page in room.table}
    slots = instance.scheduler._resources.slots
    assert len(late.unread) <= 1
    for step in (*late.unread, *([late.beside] if late.beside is not None else [])):
        assert step.pages <= held, "a page is free while a launched, unread step has its slot"
        assert not step.slots & set(slots._free), "a slot is free while a launched step has it"
        assert not step.aux_slots & set(instance.aux._free), "an aux slot is free while a launched step has it"
    if not late.unread:
        for sequence in instance.scheduler._sequences.queue(SequenceState.RUNNING):
            assert sequence.kv_len == sequence.prompt_len + len(sequence.emitted) - 1
            assert sequence.launched == len(sequence.emitted)
    load = instance.scheduler.load
    pinned = {page for room in cache._rooms.values() for page in room.pinned}
    assert load.pages_free + load.pages_cached == load.pages_total - len(held | pinned)


def turn(instance: Instance, rng: random.Random) -> None:
    for _ in range(rng.randrange(3)):
        instance.late.run_next()
    if rng.random() < 0.3:
        instance.late.run_beside()
    instance.scheduler.step()
    check(instance)


def stopped(index: int, one: tuple[int, int, int], stop: int) -> tuple[bytes, SamplingParams, int, list[int], str]:
    """Return what `continued` does and the finish reason; the request ends at the first token that equals that at
    `stop`."""
    token_ids, sampling, num_emitted, tokens = continued(index, *one)
    if stop >= min(8, len(tokens)):
        return token_ids, sampling, num_emitted, tokens, "length"
    sampling = SamplingParams(
        sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed, stop_token_ids=(tokens[stop],)
    )
    return token_ids, sampling, num_emitted, tokens[: tokens.index(tokens[stop]) + 1], "stop"


@given(loads, st.integers(17, 60), st.integers(1, 16), st.lists(stops, min_size=20, max_size=20), st.randoms())
def test_unified_tokens_ends_and_pages_are_those_without_overlap(
    load: list[tuple[int, int, int]], num_pages: int, chunk: int, stop_at: list[int], rng: random.Random
) -> None:
    run_unified(Instance(num_pages, chunk=chunk, overlap=True), load, stop_at, rng)


def run_unified(instance: Instance, load: list[tuple[int, int, int]], stop_at: list[int], rng: random.Random) -> None:
    """Run these requests, some of which are cancelled, and check their tokens, ends and pages."""
    cancelled: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.5:
            index, one = pending.pop(0)
            token_ids, sampling, num_emitted, _, _ = stopped(index, one, stop_at[index])
            instance.scheduler.submit(unified_request(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
        if rng.random() < 0.04 and len(pending) < len(load):
            room = room_of(rng.randrange(len(load) - len(pending)))
            if room not in instance.finishes:
                cancelled.add(room)
                instance.scheduler.submit(CancelRequest(room))
        turn(instance, rng)
        if not pending and instance.scheduler.is_idle:
            break
    instance.run()
    for index, one in enumerate(load):
        room = room_of(index)
        expected, reason = stopped(index, one, stop_at[index])[3:]
        tokens = instance.tokens.get(room, [])
        if room in instance.finishes:
            assert (tokens, instance.finishes[room].reason) == (expected, reason)
        else:
            assert room in cancelled and tokens == expected[: len(tokens)]
    instance.check_empty()
    assert not instance.late.unread and instance.late.beside is None


@given(
    loads,
    st.integers(17, 50),
    st.integers(17, 50),
    st.integers(1, 4),
    st.lists(stops, min_size=20, max_size=20),
    st.randoms(),
)
def test_pd_tokens_ends_and_pages_are_those_without_overlap(
    load: list[tuple[int, int, int]],
    pages_p: int,
    pages_d: int,
    aux_slots: int,
    stop_at: list[int],
    rng: random.Random,
) -> None:
    """Some requests are cancelled and some transfers fail; no launched step holds what is announced to P."""

    class Watched(DSide):
        def announce(self, room: bytes, request_id: str, pages: list[int], aux_slot: int, *rest: int) -> None:
            _num_tokens, _rank, _incarnation, prefix_pages, *_ = rest
            for step in decode.late.unread:
                is_promised = step.pages & set(pages[prefix_pages:])
                assert not is_promised, "a page is promised to a peer while a launched step has it"
                assert aux_slot not in step.aux_slots
            super().announce(room, request_id, pages, aux_slot, *rest)

    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots, overlap=True)
    decode = wire.decode = Instance(pages_d, receiver=Watched(wire), aux_slots=aux_slots, overlap=True)
    run_pd(wire, prefill, decode, load, stop_at, rng)


def run_pd(
    wire: Wire,
    prefill: Instance,
    decode: Instance,
    load: list[tuple[int, int, int]],
    stop_at: list[int],
    rng: random.Random,
) -> None:
    """Run the same on a pair, some of whose transfers fail, too."""
    cancelled: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.6:
            index, one = pending.pop(0)
            room = room_of(index)
            prompt, sampling, num_emitted, _, _ = stopped(index, one, stop_at[index])
            decode.scheduler.submit(decode_request(room, f"r{index}", prompt, sampling, 0, 1, num_emitted))
            prefill.scheduler.submit(prefill_request(room, f"r{index}", prompt, 0, 1, num_emitted=num_emitted))
            if rng.random() < 0.15:
                wire.failing.add(room)
        if rng.random() < 0.05 and len(pending) < len(load):
            room = room_of(rng.randrange(len(load) - len(pending)))
            if room not in decode.finishes:
                cancelled.add(room)
                prefill.scheduler.submit(CancelRequest(room))
                decode.scheduler.submit(CancelRequest(room))
        for instance in (prefill, decode) if rng.random() < 0.5 else (decode, prefill):
            if rng.random() < 0.8:
                turn(instance, rng)
        wire.deliver(rng)
        if not pending and prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, one in enumerate(load):
        room = room_of(index)
        expected, reason = stopped(index, one, stop_at[index])[3:]
        tokens = decode.tokens.get(room, [])
        finish = decode.finishes.get(room)
        if finish is None or finish.reason == "error":
            assert room in cancelled or room in wire.failing
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, finish.reason) == (expected, reason)
    prefill.check_empty()
    decode.check_empty()


def unified(index: int, prompt_len: int, sampling: SamplingParams) -> UnifiedRequest:
    return unified_request(room_of(index), f"r{index}", pack_i32(prompt_of(index, prompt_len)), sampling)


def test_a_step_is_launched_while_the_one_before_runs_and_a_request_loses_no_step_by_it() -> None:
    instance = Instance(32, overlap=True)
    instance.scheduler.submit(unified(1, 4, SamplingParams(4, temperature=0.0)))
    out = []
    for _ in range(6):
        assert instance.scheduler.step()
        out.append(len(instance.tokens.get(room_of(1), [])))
    # Prefill; then each turn launches a decode and reads the previous step; 4 tokens are out after the fifth turn.
    assert out == [0, 1, 2, 3, 4, 4]
    instance.run()
    assert instance.executor.steps == 5, "a prefill, three decodes, a release: no surplus row for an end by length"
    assert instance.tokens[room_of(1)] == expected_tokens(prompt_of(1, 4), 4, INFO.vocab_size)


def test_an_end_that_the_host_sees_late_costs_one_surplus_row_whose_token_is_dropped() -> None:
    """The request's pages and slot are freed only when that row has been read."""
    prompt = prompt_of(1, 3)
    tokens = expected_tokens(prompt, 9, INFO.vocab_size)
    instance = Instance(8, overlap=True)
    instance.scheduler.submit(unified(1, 3, SamplingParams(9, temperature=0.0, stop_token_ids=(tokens[1],))))
    while room_of(1) not in instance.finishes:
        instance.scheduler.step()
    (surplus,) = instance.late.unread
    assert surplus.plan.decode == [0] and surplus.pages
    load = instance.scheduler.load
    assert (load.closing, load.pages_free) == (1, 8 - len(surplus.pages))
    assert not instance.scheduler.is_idle
    instance.scheduler.step()
    assert instance.scheduler.load.pages_free + instance.scheduler.load.pages_cached == 8
    instance.run()
    assert instance.tokens[room_of(1)] == tokens[:2]
    instance.check_empty()


def test_the_same_slot_in_other_hands_does_not_get_the_surplus_token() -> None:
    """There is one slot, and requests that end by a stop id one after the other."""
    config = SchedulerConfig(max_running_requests=1, max_batched_tokens=16, chunk_size=16, reserved_decode_tokens=4)
    instance = Instance(6, overlap=True, config=config)
    ends = {}
    for index in range(6):
        tokens = expected_tokens(prompt_of(index, 5), 8, INFO.vocab_size)
        ends[index] = tokens[: tokens.index(tokens[index]) + 1]
        sampling = SamplingParams(8, temperature=0.0, stop_token_ids=(tokens[index],))
        instance.scheduler.submit(unified(index, 5, sampling))
    instance.run()
    assert {index: instance.tokens[room_of(index)] for index in ends} == ends
    instance.check_empty()


def test_retraction_reads_the_step_in_flight_first_and_loses_no_token() -> None:
    instance = Instance(num_pages=17, overlap=True)
    for index in range(6):
        instance.scheduler.submit(unified(index, 7, SamplingParams(40, temperature=0.0)))
    rng = random.Random(1)
    while not instance.scheduler.is_idle:
        turn(instance, rng)
    assert instance.scheduler.load.retractions > 0
    for index in range(6):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 7), 40, INFO.vocab_size)
    instance.run()
    instance.check_empty()


@pytest.mark.parametrize("prompt_len", [1, 4, 190])
def test_the_last_token_that_the_context_holds_is_the_last_step(prompt_len: int) -> None:
    """The fake executor refuses a row beyond max_tokens, the context or the pages."""
    instance = Instance(60, overlap=True)
    count = 10 if prompt_len == 190 else 1
    instance.scheduler.submit(unified(1, prompt_len, SamplingParams(count, temperature=0.0)))
    instance.run()
    assert instance.finishes[room_of(1)].reason == "length"
    assert len(instance.tokens[room_of(1)]) == count


def test_a_cancel_does_not_wait_and_the_token_in_flight_is_dropped() -> None:
    instance = Instance(32, overlap=True)
    instance.scheduler.submit(unified(1, 4, SamplingParams(40, temperature=0.0)))
    for _ in range(4):
        instance.scheduler.step()
    known = list(instance.tokens[room_of(1)])
    (step,) = instance.late.unread
    instance.scheduler.submit(CancelRequest(room_of(1)))
    instance.scheduler.step()
    assert instance.tokens[room_of(1)] == known and step.tokens is not None
    instance.run()
    instance.check_empty()


def test_a_drained_instance_reads_what_is_in_flight_before_it_ends() -> None:
    instance = Instance(32, overlap=True)
    instance.scheduler.submit(unified(1, 4, SamplingParams(3, temperature=0.0)))
    for _ in range(3):
        instance.scheduler.step()
    assert instance.late.unread and not instance.scheduler.is_idle
    instance.scheduler.close()
    assert not instance.late.unread
    assert instance.tokens[room_of(1)] == expected_tokens(prompt_of(1, 4), 3, INFO.vocab_size)


@pytest.mark.parametrize("ending", ["cancel_all", "end_all", "request_timeout"])
def test_ends_from_outside_come_at_once_and_leave_nothing_in_flight(ending: str) -> None:
    clock = FakeClock()
    instance = Instance(32, overlap=True, clock=clock, request_timeout_s=60.0)
    for index in range(3):
        instance.scheduler.submit(unified(index, 6, SamplingParams(40, temperature=0.0)))
    for _ in range(4):
        instance.scheduler.step()
    if ending == "cancel_all":
        instance.scheduler.cancel_all()
    elif ending == "end_all":
        instance.scheduler.end_all(60.0)
    else:
        clock.advance(61.0)
    instance.scheduler.step()
    check(instance)
    expected = {"cancel_all": set(), "end_all": {"decode_lost"}, "request_timeout": {"request_timeout"}}[ending]
    assert {finish.code for finish in instance.finishes.values()} == expected
    instance.run()
    instance.check_empty()


class BrokenDevice(FakeExecutor):
    """A device whose third step fails; the host learns it when it reads the step."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if self.steps == 2:
            raise Internal("an illegal memory access")
        return super().execute(plan, on_layer)


def scheduler_on(device: FakeExecutor) -> PDScheduler:
    core = InstanceCore(
        SchedulerSettings(SchedulerConfig(max_running_requests=8), DeadlineConfig(), overlap=True),
        LoadedEngine(LateExecutor(device), PagedKVCacheManager(32, PAGE_SIZE)),
        TokenManager(1, lambda frame: True),
        lambda room, error: None,
        FakeClock(),
    )
    return PDScheduler(core, DecodeRole(core))


def test_an_error_of_the_device_ends_the_step_loop_when_the_step_is_read() -> None:
    scheduler = scheduler_on(BrokenDevice(INFO, 32, PAGE_SIZE))
    scheduler.submit(unified(1, 4, SamplingParams(9)))
    for _ in range(3):
        scheduler.step()
    with pytest.raises(Internal, match="illegal memory access"):
        scheduler.step()


class HangingDevice(FakeExecutor):
    """A device whose third step never ends, while the heartbeat thread watches."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        while self.steps == 2:
            self.views += 1
            self.watch.look([self.views], self.scheduler.turns)
        return super().execute(plan, on_layer)

    views = 0
    watch = SilenceWatch(DeadlineConfig())
    scheduler: PDScheduler


def test_a_step_in_flight_that_hangs_is_seen_by_the_watchdog() -> None:
    device = HangingDevice(INFO, 32, PAGE_SIZE)
    scheduler = device.scheduler = scheduler_on(device)
    scheduler.submit(unified(1, 4, SamplingParams(9)))
    for _ in range(3):
        assert scheduler.step()
    with pytest.raises(Internal, match=r"the step thread has made no progress for .*step_s"):
        scheduler.step()


def test_p_hands_layers_over_at_the_launch_and_logits_when_they_are_there() -> None:
    """The layers of a finished step leave while the next step is being launched."""
    handed: list[str] = []

    class Side(PSide):
        def begin_step(self, chunks: object) -> None:
            handed.append("begin")

        def layer_done(self, layer: int, ready: object = None, first_layer: int | None = None) -> None:
            handed.append(f"layer {layer}")
            assert ready is prefill.late.unread[-1]
            if handed.count("begin") == 2:
                prefill.late.run_next()  # the device is faster than the launching thread

        def end_step(self) -> None:
            handed.append("end")

        def send_rows(self, room: bytes, aux_slot: int, *more: Any) -> None:
            handed.append(f"logits of {room[-1]}")
            assert prefill.executor.aux_row(aux_slot)[64:68] == b"FAKE"
            super().send_rows(room, aux_slot, *more)

    prefill = Instance(32, sender=Side(Wire()), chunk=16, overlap=True)
    for index in (1, 2):
        prefill.scheduler.submit(prefill_request(room_of(index), "r", pack_i32(prompt_of(index, 16)), 0, 1))
    prefill.scheduler.step()
    step = ["begin", "layer 0", "layer 1", "end"]
    assert handed == step
    prefill.scheduler.step()
    assert handed == [*step, "begin", "layer 0", "logits of 1", "layer 1", "end"]
    sequence = prefill.scheduler._sequences.of(SequenceState.INFLIGHT)[room_of(2)]
    assert sequence.state is SequenceState.INFLIGHT and sequence.slot >= 0, "its step is not read yet"
    prefill.scheduler.step()
    assert handed[-1] == "logits of 2" and sequence.slot < 0


def test_pages_of_a_speculative_prompt_in_flight_are_read_before_they_are_taken_back() -> None:
    wire = Wire()
    prefill = Instance(num_pages=8, sender=PSide(wire), overlap=True)
    prefill.scheduler.submit(prefill_request(room_of(1), "speculative", pack_i32(prompt_of(1, 30)), 0, 1))
    rng = random.Random(3)
    turn(prefill, rng)
    turn(prefill, rng)
    assert prefill.late.unread, "its second chunk"
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(prefill_request(room_of(2), "promised", pack_i32(prompt_of(2, 20)), 0, 1))
    for _ in range(8):
        turn(prefill, rng)
    assert room_of(2) in wire.computed and room_of(1) not in wire.computed
    assert prefill.scheduler.load.waiting == 1


# ----------------------------------------------------------------------------------------------------------------------
# Several choices of one prompt on an instance: one prefill, one transfer, then one request for each choice.


groups = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 6), st.booleans()), min_size=1, max_size=8
)
"""Prompt length, max_tokens, number of choices, and whether pages may be cached."""


def prompt_room(index: int) -> bytes:
    return room_of(1000 + index)


def choice_room(index: int, choice: int) -> bytes:
    return room_of(index * 10 + choice)


def sampling_of(index: int, max_tokens: int) -> SamplingParams:
    asked = {"logprobs": (None, 0, 2)[index % 3], "prompt_logprobs": 1 if index % 3 == 1 else None}
    return SamplingParams(max_tokens, temperature=1.0, seed=100 * index, **asked)


def forks_of(index: int, count: int) -> tuple[Fork, ...]:
    return tuple(Fork(choice_room(index, i), f"r{index}-{i}", 100 * index + i) for i in range(count))


def expected(index: int, prompt: list[int], max_tokens: int, choice: int) -> list[int]:
    sampling = SamplingParams(max_tokens, temperature=1.0, seed=100 * index + choice)
    return expected_tokens(prompt, max_tokens, INFO.vocab_size, sampling)


def check_group(instance: Instance, index: int, group: tuple[int, int, int, bool], over: set[bytes]) -> None:
    """Check that each choice has the tokens of a request with its seed, or the first of them if it is in `over`."""
    length, max_tokens, count, _ = group
    prompt = prompt_of(index, length)
    for choice in range(count):
        room = choice_room(index, choice)
        tokens, wanted = instance.tokens.get(room, []), expected(index, prompt, max_tokens, choice)
        if room in over:
            assert tokens == wanted[: len(tokens)]
        else:
            assert tokens == wanted, f"choice {choice} of request {index}"
            assert instance.finishes[room].reason == "length"
    sampling = sampling_of(index, max_tokens)
    lines = instance.prompts.get(prompt_room(index))
    if sampling.prompt_logprobs is None:
        assert lines is None
    elif not all(choice_room(index, choice) in over for choice in range(count)):
        assert lines == b"".join([fake_logprobs(token, 1) for token in prompt[1:]])


@given(groups, st.integers(24, 70), st.integers(1, 16), st.booleans(), st.randoms(use_true_random=False))
def test_choices_on_a_unified_instance_are_those_of_single_requests(
    load: list[tuple[int, int, int, bool]], num_pages: int, chunk: int, overlap: bool, rng: random.Random
) -> None:
    instance = Instance(num_pages, chunk=chunk, overlap=overlap, lanes=rng.randint(1, 2))
    over: set[bytes] = set()
    for index, (length, max_tokens, count, is_cached) in enumerate(load):
        message = unified_request(
            *(prompt_room(index), f"r{index}", pack_i32(prompt_of(index, length)), sampling_of(index, max_tokens)),
            cache_salt="" if is_cached else None,
            forks=forks_of(index, count),
        )
        instance.scheduler.submit(message)
        for _ in range(rng.randrange(4)):
            instance.scheduler.step()
        if rng.random() < 0.4:
            gone = [choice_room(index, choice) for choice in range(count) if rng.random() < 0.6]
            over.update(gone)
            for room in gone:
                instance.scheduler.submit(CancelRequest(room))
    instance.run()
    for index, group in enumerate(load):
        check_group(instance, index, group, over)
    instance.check_empty()
    assert instance.aux.num_free == 4


@given(
    groups, st.integers(17, 50), st.integers(24, 60), st.integers(1, 4), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_choices_between_p_and_d_are_those_of_single_requests_whatever_ends_some_of_them(
    load: list[tuple[int, int, int, bool]],
    pages_p: int,
    pages_d: int,
    aux_slots: int,
    overlap: bool,
    rng: random.Random,
) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), aux_slots=aux_slots, overlap=overlap)
    over: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.7:
            index, (length, max_tokens, count, is_cached) = pending.pop(0)
            prompt, sampling = pack_i32(prompt_of(index, length)), sampling_of(index, max_tokens)
            room, salt = prompt_room(index), "" if is_cached else None
            half = decode_request(
                room, f"r{index}", prompt, sampling, 0, 1, cache_salt=salt, forks=forks_of(index, count)
            )
            decode.scheduler.submit(half)
            asked = sampling.prompt_logprobs
            prefill.scheduler.submit(prefill_request(room, f"r{index}", prompt, 0, 1, output=PromptOutput(asked)))
            if rng.random() < 0.15:
                wire.failing.add(room)
        if rng.random() < 0.1 and len(pending) < len(load):
            index = rng.randrange(len(load) - len(pending))
            count = load[index][2]
            for choice in range(count) if rng.random() < 0.3 else (rng.randrange(count),):
                if choice_room(index, choice) not in decode.finishes:
                    over.add(choice_room(index, choice))
                    decode.scheduler.submit(CancelRequest(choice_room(index, choice)))
            if all(choice_room(index, choice) in over for choice in range(count)):
                prefill.scheduler.submit(CancelRequest(prompt_room(index)))
        for instance in (prefill, decode) if rng.random() < 0.5 else (decode, prefill):
            if rng.random() < 0.8:
                instance.scheduler.step()
        wire.deliver(rng)
        if not pending and prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, group in enumerate(load):
        rooms = [choice_room(index, choice) for choice in range(group[2])]
        over |= {room for room in rooms if room in decode.finishes and decode.finishes[room].code == "transfer_failed"}
        check_group(decode, index, group, over)
    prefill.check_empty()
    decode.check_empty()
    assert decode.aux.num_free == prefill.aux.num_free == aux_slots


def test_a_group_that_can_never_start_together_is_refused_and_one_that_can_waits_for_all_its_slots() -> None:
    prompt, sampling = pack_i32(prompt_of(1, 9)), SamplingParams(4, temperature=1.0)
    num_pages = 3 + INFO.num_slots  # the prompt's pages, and for each choice its own copy of the last one
    for count, pages, code in (
        (INFO.num_slots, num_pages, ""),
        (INFO.num_slots, num_pages - 1, "capacity"),
        (INFO.num_slots + 1, 60, "capacity"),
        (MAX_FORKS + 1, 60, "invalid_request"),
    ):
        instance = Instance(pages)
        first = unified_request(room_of(1), "first", pack_i32(prompt_of(2, 5)), SamplingParams(3, temperature=0.0))
        forks = tuple(Fork(room_of(2000 + i), "r", i) for i in range(count))
        instance.scheduler.submit(first)
        instance.scheduler.submit(unified_request(room_of(2), "r", prompt, sampling, forks=forks))
        instance.run()
        assert instance.finishes[room_of(1)].reason == "length"
        assert {instance.finishes[fork.room].code for fork in forks} == {code}, (count, pages)
        instance.check_empty()
    behind_output = unified_request(room_of(3), "r", prompt, sampling, 2, forks=forks_of(1, 2))
    instance.scheduler.submit(behind_output)
    instance.run()
    assert instance.finishes[choice_room(1, 0)].code == "invalid_request"


def test_a_page_is_copied_only_where_the_prompt_ends_within_it() -> None:
    for length, num_pages in ((2 * PAGE_SIZE, 2), (2 * PAGE_SIZE + 1, 2 + 3), (PAGE_SIZE - 1, 3)):
        instance = Instance(40)
        prompt = pack_i32(prompt_of(1, length))
        sampling = SamplingParams(20, temperature=1.0)
        instance.scheduler.submit(unified_request(room_of(1), "r", prompt, sampling, forks=forks_of(1, 3)))
        while not instance.tokens:
            instance.scheduler.step()
        tables = [set(instance.cache.get_page_indices(choice_room(1, choice))) for choice in range(3)]
        assert len(set.union(*tables)) == num_pages, length
        assert len(set.intersection(*tables)) == length // PAGE_SIZE, "full pages are shared"
        instance.run()
        instance.check_empty()
