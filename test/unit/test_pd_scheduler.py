"""The step loop with an executor that checks every plan: tokens are right and nothing leaks under any load."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, check_prompt, continued, loads, prompt_of, room_of
from support.clock import FakeClock
from support.requests import decode_request, prefill_request, unified_request

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.errors import StepFailed
from chitu.fake.executor import FakeExecutor, expected_tokens
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.drafts import source_of
from chitu.instance.load import BacklogMeter
from chitu.instance.requests import wrong_sampling
from chitu.instance.roles import DecodeRole, PrefillRole
from chitu.instance.token_manager import TokenManager
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    CancelRequest,
    LoadReport,
    SamplingParams,
    pack_i32,
)


@given(loads, st.integers(17, 60), st.integers(1, 16))
def test_unified_tokens_are_right_and_every_page_comes_back(
    load: list[tuple[int, int, int]], num_pages: int, chunk: int
) -> None:
    instance = Instance(num_pages, chunk=chunk)
    for index, one in enumerate(load):
        token_ids, sampling, num_emitted, _ = continued(index, *one)
        group = 1 if index % 3 else (1, 2, 16)[index // 3 % 3]
        whole = unified_request(room_of(index), f"r{index}", token_ids, sampling, num_emitted, token_group=group)
        instance.scheduler.submit(whole)
    instance.run()
    for index, one in enumerate(load):
        assert instance.tokens[room_of(index)] == continued(index, *one)[3]
        assert instance.finishes[room_of(index)].reason == "length"
        assert instance.has_logprobs[room_of(index)] == (index % 3 > 0)
        check_prompt(instance, index, one)
    instance.check_empty()


@given(loads, st.integers(17, 50), st.integers(17, 50), st.integers(1, 4), st.randoms(use_true_random=False))
def test_pd_tokens_are_right_with_cancels_and_failures_and_nothing_leaks(
    load: list[tuple[int, int, int]], pages_p: int, pages_d: int, aux_slots: int, rng: random.Random
) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(pages_p, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(pages_d, receiver=DSide(wire), aux_slots=aux_slots, tpot_s=1.0)
    cancelled: set[bytes] = set()
    pending = list(enumerate(load))
    for _ in range(4000):
        if pending and rng.random() < 0.7:
            index, one = pending.pop(0)
            prompt, sampling, num_emitted, _ = continued(index, *one)
            common = dict(num_emitted=num_emitted, token_group=1 if index % 3 else 16)
            if rng.random() < 0.4:
                decode.scheduler.submit(unified_request(room_of(index), f"r{index}", prompt, sampling, **common))
                continue
            decode.scheduler.submit(decode_request(room_of(index), f"r{index}", prompt, sampling, 0, 1, **common))
            more = dict(num_emitted=num_emitted, output=sampling.prompt_output)
            prefill.scheduler.submit(prefill_request(room_of(index), f"r{index}", prompt, 0, 1, **more))
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


def test_tokens_that_nobody_reads_singly_come_in_the_same_few_messages_and_the_first_and_last_ones_at_once() -> None:
    instance, most = Instance(64), 8
    messages: list[int] = []
    take = instance._take
    instance.scheduler._tokens._batches[0].send = lambda frame: messages.append(len(frame)) is None and take(frame)
    lengths = {1: 30, 2: 25, 3: 1, 4: 2}
    for index, length in lengths.items():
        sampling = SamplingParams(length, temperature=0.0)
        tokens = pack_i32(prompt_of(index, 4))
        instance.scheduler.submit(unified_request(room_of(index), "r", tokens, sampling, token_group=most))
    instance.scheduler.step()
    assert [instance.groups[room_of(index)] for index in lengths] == [[1]] * 4, "a first token waits for others"
    instance.run()
    for index, length in lengths.items():
        sizes = instance.groups[room_of(index)]
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(index, 4), length, INFO.vocab_size)
        assert instance.finishes[room_of(index)].reason == "length" and max(sizes) <= most
    assert len(messages) <= 2 + 30 // most + len(lengths)
    instance.check_empty()


@pytest.mark.parametrize("ends", ["error", "cancel"])
def test_tokens_that_waited_come_before_an_error_and_not_at_all_after_a_cancellation(ends: str) -> None:
    instance = Instance(64)
    request = unified_request(room_of(1), "r", pack_i32(prompt_of(1, 4)), SamplingParams(30), token_group=16)
    instance.scheduler.submit(request)
    for _ in range(6):
        instance.scheduler.step()
    sequence = instance.scheduler._sequences.get(room_of(1))
    assert (
        sequence is not None
        and len(sequence.emitted) > 3
        and instance.tokens[room_of(1)] == sequence.emitted[:1].tolist()
    )
    if ends == "error":
        instance.scheduler._ends.fail(sequence, StepFailed("for a test"))
    else:
        instance.scheduler.submit(CancelRequest(room_of(1)))
    emitted = sequence.emitted.tolist()
    instance.run()
    assert instance.tokens[room_of(1)] == (emitted if ends == "error" else emitted[:1])
    assert instance.finishes[room_of(1)].reason == "error" if ends == "error" else room_of(1) not in instance.finishes
    instance.check_empty()


def test_a_stop_id_ends_a_request_at_once_and_ignore_eos_overrides_only_eos() -> None:
    prompt = prompt_of(1, 6)
    tokens = expected_tokens(prompt, 10, INFO.vocab_size)
    instance = Instance(32)
    sampling = SamplingParams(10, temperature=0.0, stop_token_ids=(tokens[3],))
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32(prompt), sampling))
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
            instance.scheduler.submit(decode_request(room_of(index), "r", prompt, SamplingParams(12), 0, 1))
        else:
            instance.scheduler.submit(unified_request(room_of(index), "r", prompt, SamplingParams(12)))
    instance.scheduler.step()
    clock.advance(30.5)
    instance.scheduler.step()
    assert instance.finishes[room_of(2)].code == "queue_timeout"
    assert room_of(1) not in instance.finishes


def test_a_new_router_ends_everything_of_the_old_one() -> None:
    instance = Instance(32)
    for index in range(5):
        prompt = pack_i32(prompt_of(index, 9))
        instance.scheduler.submit(unified_request(room_of(index), "r", prompt, SamplingParams(50)))
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
            prefill_request(room_of(i), "r", prompt, 0, 1, priority=priority)
            if role == "prefill"
            else decode_request(room_of(i), "r", prompt, sampling, 0, 1, priority=priority)
            if role == "decode"
            else unified_request(room_of(i), "r", prompt, sampling, priority=priority)
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
        instance.scheduler.submit(unified_request(room_of(index), "r", prompt, sampling))
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
    prefill.scheduler.submit(prefill_request(room_of(1), "speculative", pack_i32(speculative), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(1) in wire.computed
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(prefill_request(room_of(2), "promised", pack_i32(promised), 0, 1))
    for _ in range(8):
        prefill.scheduler.step()
    assert room_of(2) in wire.computed
    assert room_of(1) not in wire.computed, "its pages went to the announced request; it waits to be computed again"
    assert prefill.scheduler.load.waiting == 1


# ----------------------------------------------------------------------------------------------------------------------
# What the scheduler does about too much work: a bound on its queue, and the rate at which the queue moves.


BOUND = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=16, max_waiting_requests=3)

WIDE = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=16)


def test_a_full_queue_refuses_the_next_request_before_it_takes_anything() -> None:
    wire = Wire()
    sides = {"P": Instance(8, sender=PSide(wire), config=BOUND), "D": Instance(8, receiver=DSide(wire), config=BOUND)}
    unified = Instance(8, config=BOUND)
    prompt = pack_i32(prompt_of(1, 20))
    for number in range(5):
        room = room_of(number)
        sides["P"].scheduler.submit(prefill_request(room, "r", prompt, 0, 1))
        sides["D"].scheduler.submit(decode_request(room, "r", prompt, SamplingParams(4), 0, 1))
        unified.scheduler.submit(unified_request(room, "r", prompt, SamplingParams(4)))
    for instance in (*sides.values(), unified):
        instance.scheduler.step()
    assert {room: error.code for room, error in sides["P"].failures.items()} == {
        room_of(3): "capacity",
        room_of(4): "capacity",
    }
    assert [sides["D"].finishes[room_of(n)].code for n in (3, 4)] == ["capacity", "capacity"]
    unified.run()
    assert [unified.finishes[room_of(n)].reason for n in range(5)] == ["length"] * 3 + ["error"] * 2
    unified.check_empty()


def test_only_time_in_which_something_waits_counts() -> None:
    meter = BacklogMeter(100.0)
    meter.update(110.0, total_work=50, waits=False)
    meter.update(120.0, total_work=60, waits=True)
    assert (meter.seconds, meter.work) == (0.0, 0)
    meter.update(123.0, total_work=90, waits=True)
    meter.update(125.0, total_work=110, waits=False)
    meter.update(200.0, total_work=500, waits=False)
    assert (meter.seconds, meter.work) == (5.0, 50)


def test_an_instance_reports_the_rate_of_its_full_steps_and_not_of_its_lonely_requests() -> None:
    clock = FakeClock()
    instance = Instance(400, sender=PSide(Wire()), clock=clock, config=BOUND, aux_slots=50)

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            instance.scheduler.step()
            clock.advance(seconds)

    def add(first: int, count: int) -> None:
        for number in range(first, first + count):
            message = prefill_request(room_of(number), "r", pack_i32(prompt_of(number, 8)), 0, 1)
            instance.scheduler.submit(message)

    for number in range(5):
        add(number, 1)  # 8 of 16 tokens a step: nothing waits
        steps(2, 1.0)
    assert (instance.scheduler.load.backlog_s, instance.scheduler.load.backlog_work) == (0.0, 0)
    instance.scheduler.submit(prefill_request(room_of(99), "r", pack_i32(prompt_of(99, 40)), 0, 1))
    steps(4, 0.5)  # 16, 16, 8: two full steps
    assert (instance.scheduler.load.backlog_s, instance.scheduler.load.backlog_work) == (1.0, 32)


def submit(instance: Instance, number: int, prompt: list[int], max_tokens: int = 4) -> None:
    room, token_ids = room_of(number), pack_i32(prompt)
    if isinstance(instance.role, PrefillRole):
        instance.scheduler.submit(prefill_request(room, "r", token_ids, 0, 1))
    else:
        instance.scheduler.submit(unified_request(room, "r", token_ids, SamplingParams(max_tokens)))


def turns(instance: Instance, clock: FakeClock, count: int) -> LoadReport:
    for _ in range(count):
        instance.scheduler.step()
        clock.advance(1.0)
    return instance.scheduler.load


@pytest.mark.parametrize("is_announced", [False, True], ids=["D has no room", "what D has announced is on its way"])
def test_a_prompt_that_waits_for_pages_is_a_backlog_of_p_unless_d_holds_them(is_announced: bool) -> None:
    clock, wire = FakeClock(), Wire()
    instance = Instance(8, sender=PSide(wire), clock=clock, config=BOUND)
    for number in range(2):  # 5 pages each, and P keeps those of the first until D has them
        submit(instance, number, prompt_of(number, 20))
    turns(instance, clock, 2)  # a full step and the rest of the first prompt
    if is_announced:
        wire.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room_of(0)))
    before, load = instance.scheduler.load, turns(instance, clock, 4)
    assert (load.waiting, load.backlog_work, load.joinable_tokens) == (1, 20, 0)
    assert load.backlog_s - before.backlog_s == (4.0 if is_announced else 1.0), "once the first was computed"


def test_cached_tokens_are_neither_work_to_do_nor_work_done() -> None:
    clock = FakeClock()
    instance = Instance(400, clock=clock, config=WIDE)
    prompt = prompt_of(1, 60)
    submit(instance, 0, prompt)
    assert instance.scheduler.load.waiting_tokens == 60
    instance.run()
    before = instance.scheduler.load
    for number in range(1, 31):
        submit(instance, number, [*prompt, number], max_tokens=20)
    assert before.cached_share == 0 and instance.scheduler.load.waiting_tokens == 30 * 61, "nothing is known yet"
    load = turns(instance, clock, 1)
    assert load.waiting == 22 and load.waiting_tokens == 22, "each has its last token to compute"
    assert load.backlog_work == before.backlog_work
    submit(instance, 99, [*prompt, 99])
    load = instance.scheduler.load
    assert load.cached_share > 0.8 and 22 < load.waiting_tokens < 22 + 61 / 5, "a message that was not looked at"


def test_prompts_that_wait_are_judged_again_as_what_they_begin_with_is_cached() -> None:
    clock = FakeClock()
    instance = Instance(400, sender=PSide(Wire()), clock=clock, config=WIDE, aux_slots=1)
    prompt = prompt_of(1, 48)
    for number in range(2):  # the second waits for the aux slot of the first
        submit(instance, number, [*prompt, number])
    seen = [turns(instance, clock, 1).waiting_tokens for _ in range(5)]
    assert instance.scheduler.load.waiting == 1
    assert seen == [33 + 49, 17 + 49 - 16, 1 + 49 - 32, 49 - 48, 49 - 48]


def test_a_unified_instance_counts_what_waits_for_decoding_apart() -> None:
    clock = FakeClock()
    instance = Instance(400, clock=clock, config=WIDE)
    for number in range(9):
        submit(instance, number, prompt_of(number, 2), max_tokens=30)
    load = turns(instance, clock, 10)  # eight slots, all of which decode: one waits
    assert load.waiting == 1 and (load.backlog_s, load.backlog_work) == (1.0, 16), "the one full step"
    assert 8.0 <= load.decode_backlog_s <= 9.0 and load.held_by_prefill == 0
    load = turns(instance, clock, 25)
    assert load.decode_backlog_work == 1 and load.waiting == 0


def test_decode_says_which_requests_wait_for_prompts() -> None:
    wire = Wire()
    wire.prefill = Instance(400, sender=PSide(wire), config=WIDE)
    wire.decode = Instance(400, receiver=DSide(wire), config=WIDE, aux_slots=2)
    for number in range(3):
        room, prompt = room_of(number), pack_i32(prompt_of(number, 8))
        wire.prefill.scheduler.submit(prefill_request(room, "r", prompt, 0, 1))
        wire.decode.scheduler.submit(decode_request(room, "r", prompt, SamplingParams(9), 0, 1))
    seen = []
    for _ in range(30):  # two aux slots: one request waits for the prompts of the others
        wire.decode.scheduler.step()
        load = wire.decode.scheduler.load
        seen.append((load.waiting, load.held_by_prefill, load.running))
        wire.prefill.scheduler.step()
        wire.deliver(random.Random(1))
    assert seen[0] == (1, 1, 0)
    assert all(held == 0 for waiting, held, running in seen if running), "not for those that decode"


def test_decode_reports_how_many_requests_its_queue_admits() -> None:
    clock = FakeClock()
    wire = Wire()
    instance = Instance(400, receiver=DSide(wire), clock=clock, aux_slots=2)
    for number in range(5):
        message = decode_request(room_of(number), "r", pack_i32(prompt_of(number, 8)), SamplingParams(4), 0, 1)
        instance.scheduler.submit(message)
    instance.scheduler.step()  # two aux slots: three wait
    assert (instance.scheduler.load.waiting, instance.scheduler.load.backlog_work) == (3, 0)
    clock.advance(2.0)
    instance.aux.free(0)  # as if a request had ended
    instance.scheduler.step()
    load = instance.scheduler.load
    assert (load.waiting, load.backlog_s, load.backlog_work) == (2, 2.0, 1)


def test_what_came_in_during_a_step_is_in_the_report_before_the_next_one() -> None:
    instance = Instance(8, sender=PSide(Wire()), config=BOUND)
    for number, length in enumerate((8, 9)):
        instance.scheduler.submit(prefill_request(room_of(number), "r", pack_i32(prompt_of(number, length)), 0, 1))
    assert (instance.scheduler.load.waiting, instance.scheduler.load.waiting_tokens) == (2, 17)
    instance.scheduler.step()
    assert (instance.scheduler.load.waiting, instance.scheduler.load.waiting_tokens) == (0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# What an instance refuses before it computes: impossible requests, token ids, sampling, messages for another role.


def test_an_impossible_request_is_refused_and_the_next_one_served() -> None:
    instance = Instance(8)
    instance.scheduler.submit(unified_request(room_of(1), "big", pack_i32(prompt_of(1, 30)), SamplingParams(10)))
    instance.scheduler.submit(unified_request(room_of(2), "empty", b"", SamplingParams(10)))
    instance.scheduler.submit(unified_request(room_of(3), "long", pack_i32(prompt_of(1, 300)), SamplingParams(10)))
    instance.scheduler.submit(unified_request(room_of(4), "ok", pack_i32(prompt_of(1, 3)), SamplingParams(2)))
    for room, num_emitted in ((5, 3), (6, 4), (7, 2)):  # nothing but output; more than the tokens; max_tokens reached
        prompt = pack_i32(prompt_of(1, 3))
        instance.scheduler.submit(unified_request(room_of(room), "bad", prompt, SamplingParams(2), num_emitted))
    instance.run()
    codes = [instance.finishes[room_of(n)].code for n in range(1, 8)]
    assert codes == ["capacity", "invalid_request", "invalid_request", "", *["invalid_request"] * 3]


VOCAB = INFO.vocab_size
WRONG_SAMPLING = [
    SamplingParams(4, logit_bias={VOCAB: 1.0}),
    SamplingParams(4, logit_bias={-1: 1.0}),
    SamplingParams(4, logit_bias={1: float("nan")}),
    SamplingParams(4, logit_bias={token: 1.0 for token in range(MAX_LOGIT_BIAS + 1)}),
    SamplingParams(4, stop_token_ids=(1, VOCAB)),
    SamplingParams(4, stop_token_ids=(-1,)),
    SamplingParams(4, stop_token_ids=(1 << 63,)),
    SamplingParams(4, stop_token_ids=(3,) * (MAX_STOP_TOKEN_IDS + 1)),
    SamplingParams(4, allowed_token_ids=(1, VOCAB)),
    SamplingParams(4, allowed_token_ids=(3,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
    SamplingParams(4, bad_words=((1, 2), (-1,))),
    SamplingParams(4, bad_words=((1, 2), ())),
    SamplingParams(4, bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
    SamplingParams(4, bad_words=((1,),) * (MAX_BAD_WORDS + 1)),
    SamplingParams(4, temperature=float("inf")),
    SamplingParams(4, presence_penalty=float("nan")),
    SamplingParams(4, logprobs=MAX_LOGPROBS + 1),
    SamplingParams(4, logprobs=-1),
    SamplingParams(4, prompt_logprobs=MAX_LOGPROBS + 1),
]


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
@pytest.mark.parametrize("token", [VOCAB, -1, 2**31 - 1, -(2**31)])
def test_a_token_id_beyond_the_vocabulary_is_refused_wherever_it_stands(role: str, token: int) -> None:
    wire = Wire()
    side: dict[str, Wire] = {"prefill": {"sender": PSide(wire)}, "decode": {"receiver": DSide(wire)}}.get(role, {})
    instance = Instance(8, **side)  # type: ignore[arg-type]
    for place in range(3):  # the last one counts as output of another instance
        ids, sampling = [1, VOCAB - 1, 0], SamplingParams(8)
        ids[place] = token
        room, prompt = room_of(place), pack_i32(ids)
        instance.scheduler.submit(
            prefill_request(room, "r", prompt, 0, 1)
            if role == "prefill"
            else decode_request(room, "r", prompt, sampling, 0, 1, num_emitted=1)
            if role == "decode"
            else unified_request(room, "r", prompt, sampling, num_emitted=1)
        )
    instance.scheduler.step()
    ends = instance.failures if role == "prefill" else instance.finishes
    assert [ends[room_of(place)].code for place in range(3)] == ["invalid_request"] * 3
    assert f"{token} is no token id" in ends[room_of(0)].message
    assert instance.scheduler.is_idle


@pytest.mark.parametrize("sampling", WRONG_SAMPLING, ids=range(len(WRONG_SAMPLING)))
def test_sampling_that_a_step_could_not_take_is_refused(sampling: SamplingParams) -> None:
    instance = Instance(8)
    instance.scheduler.submit(unified_request(room_of(1), "r", pack_i32([1, 2]), sampling))
    instance.run()
    assert instance.finishes[room_of(1)].code == "invalid_request"


@pytest.mark.parametrize(
    ("prediction", "code"),
    [
        (b"", ""),
        (pack_i32([VOCAB, -1]), ""),
        (bytes(4 * INFO.max_model_len), ""),
        (b"123", "invalid_request"),
        (bytes(4 * INFO.max_model_len + 4), "invalid_request"),
    ],
    ids=["none", "strange", "longest", "no tokens", "too long"],
)
def test_a_prediction_may_be_wrong_but_not_of_another_form(prediction: bytes, code: str) -> None:
    instance = Instance(8, info=msgspec.structs.replace(INFO, most_drafts=4), draft_source=source_of)
    request = unified_request(room_of(1), "r", pack_i32([1, 2]), SamplingParams(3))
    instance.scheduler.submit(msgspec.structs.replace(request, prediction=prediction))
    instance.run()
    assert instance.finishes[room_of(1)].code == code


def test_lists_at_their_bounds_are_taken() -> None:
    bias = {token: 1.0 for token in range(MAX_LOGIT_BIAS)}
    assert not wrong_sampling(SamplingParams(4, logit_bias=bias), MAX_LOGIT_BIAS)
    assert not wrong_sampling(SamplingParams(4, stop_token_ids=(2,) * MAX_STOP_TOKEN_IDS), 3)
    assert not wrong_sampling(SamplingParams(4, allowed_token_ids=(2,) * MAX_ALLOWED_TOKEN_IDS), 3)
    assert not wrong_sampling(SamplingParams(4, bad_words=((2,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS), 3)
    assert not wrong_sampling(SamplingParams(4, logprobs=MAX_LOGPROBS), 3)


def test_half_requests_on_the_wrong_role_are_refused() -> None:
    wire = Wire()
    prefill, unified = Instance(8, sender=PSide(wire)), Instance(8)
    prompt = pack_i32(array("i", [1, 2]))
    unified.scheduler.submit(prefill_request(room_of(1), "r", prompt, 0, 1))
    unified.scheduler.submit(decode_request(room_of(2), "r", prompt, SamplingParams(1), 0, 1))
    prefill.scheduler.submit(unified_request(room_of(3), "r", prompt, SamplingParams(1)))
    unified.run()
    prefill.run()
    assert unified.failures[room_of(1)].code == "role_changed"
    assert unified.finishes[room_of(2)].code == "role_changed"
    assert prefill.finishes[room_of(3)].code == "role_changed"


# ----------------------------------------------------------------------------------------------------------------------
# What an instance reports of itself at every step of its requests' lives.


def check(load: LoadReport) -> None:
    assert load.pages_free + load.pages_used + load.pages_quarantined + load.pages_cached == load.pages_total
    assert 0 <= load.unannounced <= load.waiting
    assert 0 <= load.landed <= load.transferring
    assert 0 <= load.aux_free <= load.aux_total
    numbers = set(load.__struct_fields__) - {"suspended", "paths", "rates", "drafts", "image_load"}
    assert min(getattr(load, name) for name in numbers) >= 0


@pytest.mark.parametrize("seed", range(60))
def test_pages_add_up_after_every_step_whatever_fails_or_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    count, num_pages, aux_slots = rng.randint(2, 12), rng.randint(17, 40), rng.randint(1, 4)
    wire = Wire()
    prefill = wire.prefill = Instance(num_pages, sender=PSide(wire), aux_slots=aux_slots)
    decode = wire.decode = Instance(num_pages, receiver=DSide(wire), aux_slots=aux_slots)
    pending = list(range(count))
    sides = (prefill, decode)
    while pending or not all(side.scheduler.is_idle for side in sides):
        if pending and rng.random() < 0.5:
            room, prompt = room_of(pending[0]), pack_i32(prompt_of(pending[0], rng.randint(1, 40)))
            decode.scheduler.submit(decode_request(room, "r", prompt, SamplingParams(rng.randint(1, 20)), 0, 1))
            prefill.scheduler.submit(prefill_request(room, "r", prompt, 0, 1))
            if rng.random() < 0.2:
                wire.failing.add(room)
            pending.pop(0)
        if rng.random() < 0.1:
            room = room_of(rng.randrange(count))
            for side in sides:
                side.scheduler.submit(CancelRequest(room))
        for side in sides:
            side.scheduler.step()
            check(side.scheduler.load)
        wire.deliver(rng)
    for side in sides:
        side.scheduler.step()
        load = side.scheduler.load
        assert (load.pages_free + load.pages_cached, load.closing, load.unannounced, load.landed) == (
            load.pages_total,
            0,
            0,
            0,
        )


def test_the_parts_of_the_queues_follow_a_request_through_p_and_d() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(8, sender=PSide(wire))
    decode = wire.decode = Instance(8, receiver=DSide(wire))
    room, prompt = room_of(1), pack_i32(prompt_of(1, 20))
    too_long = pack_i32(prompt_of(2, 30))

    def p() -> LoadReport:
        prefill.scheduler.step()
        return prefill.scheduler.load

    def d() -> LoadReport:
        decode.scheduler.step()
        return decode.scheduler.load

    prefill.scheduler.submit(prefill_request(room, "first", prompt, 0, 1))
    p()
    prefill.scheduler.submit(prefill_request(room_of(2), "second", too_long, 0, 1))
    load = p()
    assert (load.waiting, load.unannounced) == (1, 1), "no pages, and no D has announced it"
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(CancelRequest(room_of(2)))
    while prefill.scheduler.load.running:
        p()
    assert (prefill.scheduler.load.transferring, prefill.scheduler.load.waiting) == (1, 0)
    decode.scheduler.submit(decode_request(room, "first", prompt, SamplingParams(4), 0, 1))
    load = d()
    assert (load.transferring, load.landed, load.waiting) == (1, 0, 0)
    # The logits come before the KV, so the request has its first token and waits for its KV.
    rng = random.Random(3)
    while room in wire.computed:
        wire.deliver(rng)
    rest = [event for event in wire.events_d if event.kind.name != "LOGITS_READY"]
    wire.events_d[:] = [event for event in wire.events_d if event not in rest]
    load = d()
    assert (load.transferring, load.landed, load.running, load.tokens) == (1, 0, 0, 1)
    wire.events_d.extend(rest)
    load = d()
    assert (load.transferring, load.landed, load.running) == (0, 0, 1)
    assert p().closing == 0


def test_tokens_that_the_router_does_not_take_are_counted() -> None:
    taken: list[bytes] = []

    def take(frame: bytes) -> bool:
        taken.append(frame)
        return len(taken) <= 2

    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=64)
    core = InstanceCore(
        SchedulerSettings(config, DeadlineConfig()),
        LoadedEngine(FakeExecutor(INFO, 8, 4), PagedKVCacheManager(8, 4)),
        TokenManager(1, take),
        lambda room, error: None,
        FakeClock(),
    )
    scheduler = PDScheduler(core, DecodeRole(core))
    for index in (1, 2):
        prompt = pack_i32(prompt_of(index, 5))
        scheduler.submit(unified_request(room_of(index), "r", prompt, SamplingParams(5, temperature=0.0)))
    while not scheduler.is_idle:
        scheduler.step()
    assert (scheduler.load.tokens, scheduler.load.tokens_dropped) == (10, 6)
