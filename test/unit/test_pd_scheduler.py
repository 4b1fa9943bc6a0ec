"""The step loop with an executor that checks every plan: tokens are right and nothing leaks under any load."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, check_prompt, continued, loads, prompt_of, room_of

from chitu.config.schema import SchedulerConfig
from chitu.protocol import (
    CancelRequest,
    DecodeRequest,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)
from chitu.testing.clock import FakeClock
from chitu.testing.fake_executor import expected_tokens


@settings(max_examples=150, deadline=None)
@given(loads, st.integers(17, 60), st.integers(1, 16))
def test_unified_tokens_are_right_and_every_page_comes_back(
    load: list[tuple[int, int, int]], num_pages: int, chunk: int
) -> None:
    instance = Instance(num_pages, chunk=chunk)
    for index, one in enumerate(load):
        token_ids, sampling, num_emitted, _ = continued(index, *one)
        instance.scheduler.submit(UnifiedRequest(room_of(index), f"r{index}", token_ids, sampling, num_emitted))
    instance.run()
    for index, one in enumerate(load):
        assert instance.tokens[room_of(index)] == continued(index, *one)[3]
        assert instance.finishes[room_of(index)].reason == "length"
        assert instance.has_logprobs[room_of(index)] == (index % 3 > 0)
        check_prompt(instance, index, one)
    instance.check_empty()


@settings(max_examples=150, deadline=None)
@given(loads, st.integers(17, 50), st.integers(17, 50), st.integers(1, 4), st.randoms(use_true_random=False))
def test_pd_tokens_are_right_with_cancels_and_failures_and_nothing_leaks(
    load: list[tuple[int, int, int]], pages_p: int, pages_d: int, aux_slots: int, rng: random.Random
) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), aux_slots=aux_slots)
    cancelled: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.7:
            index, one = pending.pop(0)
            prompt, sampling, num_emitted, _ = continued(index, *one)
            decode.scheduler.submit(DecodeRequest(room_of(index), f"r{index}", prompt, sampling, 0, 1, num_emitted))
            asked = None if num_emitted else sampling.prompt_logprobs
            half = PrefillRequest(room_of(index), f"r{index}", prompt, 0, 1, prompt_logprobs=asked)
            prefill.scheduler.submit(half)
            fate = rng.random()
            if fate < 0.15:
                wire.failing.add(room_of(index))
        if rng.random() < 0.05 and len(pending) < len(load):
            room = room_of(rng.randrange(len(load) - len(pending)))
            if room not in decode.finishes:
                cancelled.add(room)
                prefill.scheduler.submit(CancelRequest(room))
                decode.scheduler.submit(CancelRequest(room))
        for instance in (prefill, decode) if rng.random() < 0.5 else (decode, prefill):
            if rng.random() < 0.8:
                instance.scheduler.step()
        wire.deliver(rng)
        if not pending and prefill.scheduler.is_idle and decode.scheduler.is_idle:
            break
    prefill.run()
    decode.run()
    for index, one in enumerate(load):
        room = room_of(index)
        expected = continued(index, *one)[3]
        tokens = decode.tokens.get(room, [])
        if room in cancelled or (room in wire.failing and decode.finishes[room].reason == "error"):
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert decode.finishes[room].reason == "length"
            check_prompt(decode, index, one)
    prefill.check_empty()
    decode.check_empty()
    assert not prefill.tokens, "P never samples"


def test_a_stop_id_ends_a_request_at_once_and_ignore_eos_overrides_only_eos() -> None:
    prompt = prompt_of(1, 6)
    tokens = expected_tokens(prompt, 10, INFO.vocab_size)
    instance = Instance(32)
    sampling = SamplingParams(10, temperature=0.0, stop_token_ids=(tokens[3],))
    instance.scheduler.submit(UnifiedRequest(room_of(1), "r", pack_i32(prompt), sampling))
    instance.run()
    end = tokens.index(tokens[3]) + 1
    assert instance.tokens[room_of(1)] == tokens[:end]
    assert instance.finishes[room_of(1)].reason == "stop"


@pytest.mark.parametrize("role", ["decode", "unified"])
def test_waiting_for_pages_has_a_deadline(role: str) -> None:
    wire = Wire()
    clock = FakeClock()
    instance = Instance(8, receiver=DSide(wire) if role == "decode" else None, clock=clock)
    prompt = pack_i32(prompt_of(1, 20))
    for index in (1, 2):
        if role == "decode":
            instance.scheduler.submit(DecodeRequest(room_of(index), "r", prompt, SamplingParams(12), 0, 1))
        else:
            instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, SamplingParams(12)))
    instance.scheduler.step()
    clock.advance(30.5)
    instance.scheduler.step()
    assert instance.finishes[room_of(2)].code == "queue_timeout"
    assert room_of(1) not in instance.finishes


def test_a_new_router_ends_everything_of_the_old_one() -> None:
    instance = Instance(32)
    for index in range(5):
        prompt = pack_i32(prompt_of(index, 9))
        instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, SamplingParams(50)))
    for _ in range(3):
        instance.scheduler.step()
    instance.scheduler.cancel_all()
    instance.scheduler.step()
    instance.run()
    assert not instance.finishes
    instance.check_empty()


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_who_waits_with_the_lowest_priority_is_first_and_of_equals_who_came_first(role: str) -> None:
    one_at_once = SchedulerConfig(max_running_requests=1, max_batched_tokens=16, chunk_size=8, reserved_decode_tokens=4)
    priorities = [0, 7, -3, 0, -(1 << 31) + 1, (1 << 31) - 1, 7]
    expected = sorted(range(len(priorities)), key=lambda i: (priorities[i], i))
    prompt, sampling = pack_i32(range(16)), SamplingParams(3)
    wire = Wire()
    side: dict[str, Any] = {"prefill": {"sender": PSide(wire)}, "decode": {"receiver": DSide(wire)}}.get(role, {})
    instance = Instance(40, config=one_at_once, aux_slots=len(priorities), **side)
    for i, priority in enumerate(priorities):
        instance.scheduler.submit(
            PrefillRequest(room_of(i), "r", prompt, 0, 1, priority=priority)
            if role == "prefill"
            else DecodeRequest(room_of(i), "r", prompt, sampling, 0, 1, priority=priority)
            if role == "decode"
            else UnifiedRequest(room_of(i), "r", prompt, sampling, priority=priority)
        )
    for _ in range(50 * len(priorities)):
        instance.scheduler.step()
        if role == "decode":  # nothing delivers: each is given up as soon as it was announced
            for room in wire.announced:
                if room not in wire.dead:
                    instance.scheduler.submit(CancelRequest(room))
    order = {"prefill": wire.computed, "decode": wire.announced, "unified": instance.finishes}[role]
    assert list(order) == [room_of(i) for i in expected]


def test_retraction_really_happens_and_loses_no_token() -> None:
    instance = Instance(num_pages=17)
    for index in range(6):
        prompt = pack_i32(prompt_of(index, 7))
        sampling = SamplingParams(40, temperature=0.0, logprobs=1)
        instance.scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, sampling))
    instance.run()
    assert len(instance.has_logprobs) == 6 and all(instance.has_logprobs.values())
    assert instance.scheduler.load.retractions > 0
    for index in range(6):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 7), 40, INFO.vocab_size)
    instance.check_empty()


def test_speculative_prompts_give_their_pages_to_announced_ones() -> None:
    wire = Wire()
    prefill = Instance(num_pages=8, sender=PSide(wire))
    speculative, promised = prompt_of(1, 30), prompt_of(2, 20)
    prefill.scheduler.submit(PrefillRequest(room_of(1), "speculative", pack_i32(speculative), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(1) in wire.computed
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(PrefillRequest(room_of(2), "promised", pack_i32(promised), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(2) in wire.computed
    assert room_of(1) not in wire.computed, "its pages went to the announced request; it waits to be computed again"
    assert prefill.scheduler.load.waiting == 1
