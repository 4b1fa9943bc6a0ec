"""What the scheduler does about too much work: a bound on its queue, and the rate at which the queue moves."""

from __future__ import annotations

import random

import pytest
from scheduler_world import DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.config.schema import SchedulerConfig
from chitu.instance.load import BacklogMeter
from chitu.kv_transfer.transfer_table import TransferEvent, TransferEventKind
from chitu.protocol import DecodeRequest, LoadReport, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.clock import FakeClock
from chitu.types import Role

BOUND = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=16, max_waiting_requests=3)

WIDE = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=16)


def test_a_full_queue_refuses_the_next_request_before_it_takes_anything() -> None:
    wire = Wire()
    sides = {"P": Instance(8, sender=PSide(wire), config=BOUND), "D": Instance(8, receiver=DSide(wire), config=BOUND)}
    unified = Instance(8, config=BOUND)
    prompt = pack_i32(prompt_of(1, 20))
    for number in range(5):
        room = room_of(number)
        sides["P"].scheduler.submit(PrefillRequest(room, "r", prompt, 0, 1))
        sides["D"].scheduler.submit(DecodeRequest(room, "r", prompt, SamplingParams(4), 0, 1))
        unified.scheduler.submit(UnifiedRequest(room, "r", prompt, SamplingParams(4)))
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
            message = PrefillRequest(room_of(number), "r", pack_i32(prompt_of(number, 8)), 0, 1)
            instance.scheduler.submit(message)

    for number in range(5):
        add(number, 1)  # 8 of 16 tokens a step: nothing waits
        steps(2, 1.0)
    assert (instance.scheduler.load.backlog_s, instance.scheduler.load.backlog_work) == (0.0, 0)
    instance.scheduler.submit(PrefillRequest(room_of(99), "r", pack_i32(prompt_of(99, 40)), 0, 1))
    steps(4, 0.5)  # 16, 16, 8: two full steps
    assert (instance.scheduler.load.backlog_s, instance.scheduler.load.backlog_work) == (1.0, 32)


def submit(instance: Instance, number: int, prompt: list[int], max_tokens: int = 4) -> None:
    room, token_ids = room_of(number), pack_i32(prompt)
    if instance.scheduler._parts.role is Role.PREFILL:
        instance.scheduler.submit(PrefillRequest(room, "r", token_ids, 0, 1))
    else:
        instance.scheduler.submit(UnifiedRequest(room, "r", token_ids, SamplingParams(max_tokens)))


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
        wire.prefill.scheduler.submit(PrefillRequest(room, "r", prompt, 0, 1))
        wire.decode.scheduler.submit(DecodeRequest(room, "r", prompt, SamplingParams(9), 0, 1))
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
        message = DecodeRequest(room_of(number), "r", pack_i32(prompt_of(number, 8)), SamplingParams(4), 0, 1)
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
        instance.scheduler.submit(PrefillRequest(room_of(number), "r", pack_i32(prompt_of(number, length)), 0, 1))
    assert (instance.scheduler.load.waiting, instance.scheduler.load.waiting_tokens) == (2, 17)
    instance.scheduler.step()
    assert (instance.scheduler.load.waiting, instance.scheduler.load.waiting_tokens) == (0, 1)
