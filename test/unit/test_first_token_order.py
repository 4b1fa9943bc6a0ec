"""What leaves first: a token before the next launch, a row and tokens before pages are cached, frames before lines."""

from __future__ import annotations

import logging
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, continued, loads, prompt_of, room_of
from support.clock import FakeClock
from support.executors import LateStep
from support.requests import decode_request, prefill_request, unified_request

from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan
from chitu.fake.executor import FakeExecutor, expected_tokens
from chitu.kv_transfer.both_sides import (
    Line,
    Send,
    TransferContext,
    TransferEvent,
    TransferEventKind,
    TransferOutbox,
)
from chitu.protocol import AbortAck, SamplingParams, pack_i32

PROMPT = prompt_of(1, 12)
GREEDY = SamplingParams(6, temperature=0.0)
TOKENS = expected_tokens(PROMPT, 6, INFO.vocab_size)


class AtOnce(random.Random):
    """Delivers whatever there is."""

    def random(self) -> float:
        return 1.0


def noted_launches(instance: Instance) -> list[tuple[StepPlan, int]]:
    """Return a list that gets each plan with the number of tokens that had left when it was launched."""
    launches: list[tuple[StepPlan, int]] = []
    launch = instance.late.launch

    def noted(plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        launches.append((plan, len(instance.tokens.get(room_of(1), []))))
        return launch(plan, on_layer)

    instance.late.launch = noted  # type: ignore[method-assign]
    return launches


@pytest.mark.parametrize("is_early", [True, False], ids=["the device is done", "the device still computes"])
def test_token_1_of_d_leaves_before_the_next_launch_if_the_device_has_drawn_it(is_early: bool) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(32, sender=PSide(wire), chunk=16)
    decode = wire.decode = Instance(32, receiver=DSide(wire), overlap=True)
    launches, at_once = noted_launches(decode), AtOnce()
    decode.scheduler.submit(decode_request(room_of(1), "r", pack_i32(PROMPT), GREEDY, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(1), "r", pack_i32(PROMPT), 0, 1))
    for _ in range(60):
        prefill.scheduler.step()
        wire.deliver(at_once)
        if is_early:
            decode.late.run_next()
        decode.scheduler.step()
        if decode.scheduler.is_idle:
            break
    assert decode.tokens[room_of(1)] == TOKENS
    first = next(place for place, (plan, _) in enumerate(launches) if plan.first_tokens)
    sent = [sent for plan, sent in launches[first:] if plan.decode or plan.first_tokens]
    assert sent == ([0, 1, 1, 2, 3, 4] if is_early else [0, 0, 1, 2, 3, 4]), "steady decodes are launched ahead as ever"


def test_token_1_of_a_unified_instance_leaves_before_the_next_launch_too() -> None:
    instance = Instance(32, chunk=16, overlap=True)
    launches = noted_launches(instance)
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(PROMPT), GREEDY))
    while not instance.scheduler.is_idle:
        instance.late.run_next()
        instance.scheduler.step()
    assert [sent for plan, sent in launches if plan.prefill or plan.decode] == [0, 1, 1, 2, 3, 4]


def noted_commits(instance: Instance, order: list[str]) -> None:
    commit = instance.cache.commit

    def noted(*args: Any, **more: Any) -> None:
        order.append("commit")
        commit(*args, **more)

    instance.cache.commit = noted  # type: ignore[method-assign]


def test_p_hands_its_row_over_before_it_caches_the_prompt() -> None:
    order: list[str] = []

    class Side(PSide):
        def send_rows(self, room: bytes, aux_slot: int, *more: Any) -> None:
            order.append("row")
            super().send_rows(room, aux_slot, *more)

    prefill = Instance(32, sender=Side(Wire()), chunk=16)
    noted_commits(prefill, order)
    prefill.scheduler.submit(prefill_request(room_of(1), "r", pack_i32(PROMPT), 0, 1))
    for _ in range(4):
        prefill.scheduler.step()
    assert order == ["row", "commit"]
    assert prefill.scheduler.load.pages_cached == 0, "it still holds them for D"


def test_a_unified_instance_sends_token_1_before_it_caches_the_prompt_and_later_prompts_find_it() -> None:
    order: list[str] = []
    instance = Instance(32, chunk=16)
    noted_commits(instance, order)
    flush = instance.scheduler._tokens.flush

    def noted(now_s: float) -> None:
        before = len(instance.tokens.get(room_of(1), []))
        flush(now_s)
        if len(instance.tokens.get(room_of(1), [])) > before:
            order.append("token")

    instance.scheduler._tokens.flush = noted  # type: ignore[method-assign]
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(PROMPT), GREEDY))
    instance.run()
    assert order[:2] == ["token", "commit"]
    instance.scheduler.submit(unified_request(room_of(2), "r", pack_i32(PROMPT), GREEDY))
    instance.run()
    assert instance.cached == {room_of(2): 8} and instance.tokens[room_of(2)] == TOKENS


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_prompt_that_ends_with_its_first_token_is_cached_as_well(max_tokens: int) -> None:
    instance = Instance(32, chunk=16)
    sampling = SamplingParams(max_tokens, temperature=0.0)
    for index in (1, 2):
        instance.scheduler.submit(unified_request(room_of(index), "r", pack_i32(PROMPT), sampling))
        instance.run()
    assert instance.cached == {room_of(2): 8}


def test_frames_leave_and_the_step_thread_wakes_before_a_line_is_written() -> None:
    order: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            order.append(record.getMessage())

    logger = logging.Logger("outbox")
    logger.addHandler(Noted())
    context = TransferContext(
        lambda host, port, room, frame: order.append(f"frame to {port}"), lambda: order.append("wake"), FakeClock()
    )
    out = TransferOutbox(context, logger)
    room = room_of(1)
    out.put(Line(logging.INFO, "line %d", (1,), "r"))
    out.put(Send("h", 1, room, AbortAck(1)))
    out.put(TransferEvent(TransferEventKind.SUCCESS, room))
    out.put(Line(logging.INFO, "line %d", (2,), "r"))
    out.put(Send("h", 2, room, AbortAck(1)))
    out.leave(out.drain())
    assert order == ["frame to 1", "frame to 2", "wake", "line 1", "line 2"]


class Checks(FakeExecutor):
    """A device whose steps check the rows that they draw from."""

    def __init__(self, info: ExecutorInfo, *more: Any) -> None:
        super().__init__(msgspec.structs.replace(info, checks_rows=True), *more)


@given(loads, st.integers(17, 50), st.sets(st.integers(0, 19)), st.booleans(), st.integers(0, 1 << 32))
def test_a_row_that_its_step_finds_damaged_gives_no_token_and_costs_its_own_request_alone(
    load: list[tuple[int, int, int]], num_pages: int, damaged: set[int], overlap: bool, seed: int
) -> None:
    wire, rng = Wire(), random.Random(seed)
    prefill = wire.prefill = Instance(60, sender=PSide(wire), aux_slots=4)
    decode = wire.decode = Instance(num_pages, receiver=DSide(wire), aux_slots=4, overlap=overlap, executor=Checks)
    for index, one in enumerate(load):
        token_ids, sampling, num_emitted, _ = continued(index, *one)
        half = decode_request(room_of(index), f"r{index}", token_ids, sampling, 0, 1, num_emitted)
        decode.scheduler.submit(half)
        prefill.scheduler.submit(prefill_request(room_of(index), f"r{index}", token_ids, 0, 1, num_emitted=num_emitted))
    asked = [continued(index, *one) for index, one in enumerate(load)]
    # Other rows are checked before they are ready, which the wire does not do.
    by_steps = [one.max_tokens - num_emitted > 1 and one.prompt_logprobs is None for _, one, num_emitted, _ in asked]
    wire.damaged = {room_of(index) for index in damaged if index < len(load) and by_steps[index]}
    for _ in range(4000):
        for instance in (prefill, decode):
            decode.late.run_next()
            instance.scheduler.step()
        wire.deliver(rng)
        if prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, (_, _, _, tokens) in enumerate(asked):
        room = room_of(index)
        if room in wire.damaged:
            assert decode.finishes[room].code == "integrity" and room not in decode.tokens
        else:
            assert decode.tokens.get(room, []) == tokens and decode.finishes[room].reason == "length"
    assert not wire.unchecked - wire.dead
    prefill.check_empty()
    decode.check_empty()


def test_what_p_had_cached_is_told_with_the_first_token_though_only_the_step_reads_it() -> None:
    wire = Wire()
    wire.cached_tokens = 4
    prefill = wire.prefill = Instance(32, sender=PSide(wire), chunk=16)
    decode = wire.decode = Instance(32, receiver=DSide(wire), overlap=True, executor=Checks)
    decode.scheduler.submit(decode_request(room_of(1), "r", pack_i32(PROMPT), GREEDY, 0, 1))
    prefill.scheduler.submit(prefill_request(room_of(1), "r", pack_i32(PROMPT), 0, 1))
    for _ in range(40):
        prefill.scheduler.step()
        decode.late.run_next()
        decode.scheduler.step()
        wire.deliver(AtOnce())
    assert decode.cached == {room_of(1): 4} and decode.tokens[room_of(1)] == TOKENS
