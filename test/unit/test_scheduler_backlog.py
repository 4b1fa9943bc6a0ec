"""What the scheduler does about too much work: a bound on its queue, and the rate at which the queue moves."""

from __future__ import annotations

from scheduler_world import DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.config.schema import SchedulerConfig
from chitu.instance.scheduling.backlog import BacklogMeter
from chitu.protocol import DecodeRequest, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.clock import FakeClock

BOUND = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=16, max_waiting_requests=3)


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


def test_a_prompt_that_waits_for_pages_is_a_backlog_too() -> None:
    clock = FakeClock()
    instance = Instance(8, sender=PSide(Wire()), clock=clock, config=BOUND)
    for number in range(2):  # 5 pages each, and P keeps those of the first until D has them
        message = PrefillRequest(room_of(number), "r", pack_i32(prompt_of(number, 20)), 0, 1)
        instance.scheduler.submit(message)
    for _ in range(4):
        instance.scheduler.step()
        clock.advance(1.0)
    load = instance.scheduler.load
    assert (load.waiting, load.backlog_s, load.backlog_work) == (1, 3.0, 20)


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
