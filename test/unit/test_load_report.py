"""What an instance reports of itself at every step of its requests' lives."""

from __future__ import annotations

import random

import pytest
from scheduler_world import INFO, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.instance.token_manager import TokenManager
from chitu.pd_scheduler import PDScheduler, PDSchedulerParts
from chitu.protocol import (
    CancelRequest,
    DecodeRequest,
    LoadReport,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)
from chitu.testing.clock import FakeClock
from chitu.testing.fake_executor import FakeExecutor


def check(load: LoadReport) -> None:
    assert load.pages_free + load.pages_used + load.pages_quarantined + load.pages_cached == load.pages_total
    assert 0 <= load.unannounced <= load.waiting
    assert 0 <= load.landed <= load.transferring
    assert 0 <= load.aux_free <= load.aux_total
    assert min(getattr(load, name) for name in load.__struct_fields__ if name != "suspended") >= 0


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
            decode.scheduler.submit(DecodeRequest(room, "r", prompt, SamplingParams(rng.randint(1, 20)), 0, 1))
            prefill.scheduler.submit(PrefillRequest(room, "r", prompt, 0, 1))
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

    prefill.scheduler.submit(PrefillRequest(room, "first", prompt, 0, 1))
    p()
    prefill.scheduler.submit(PrefillRequest(room_of(2), "second", too_long, 0, 1))
    load = p()
    assert (load.waiting, load.unannounced) == (1, 1), "no pages, and no D has announced it"
    wire.announced[room_of(2)] = 0
    prefill.scheduler.submit(CancelRequest(room_of(2)))
    while prefill.scheduler.load.running:
        p()
    assert (prefill.scheduler.load.transferring, prefill.scheduler.load.waiting) == (1, 0)
    decode.scheduler.submit(DecodeRequest(room, "first", prompt, SamplingParams(4), 0, 1))
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

    scheduler = PDScheduler(
        PDSchedulerParts(
            config=SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=64),
            deadlines=DeadlineConfig(),
            executor=FakeExecutor(INFO, 8, 4),
            cache=PagedKVCacheManager(8, 4),
            tokens=TokenManager(1, take),
            report_failure=lambda room, error: None,
            clock=FakeClock(),
        )
    )
    for index in (1, 2):
        prompt = pack_i32(prompt_of(index, 5))
        scheduler.submit(UnifiedRequest(room_of(index), "r", prompt, SamplingParams(5, temperature=0.0)))
    while not scheduler.is_idle:
        scheduler.step()
    assert (scheduler.load.tokens, scheduler.load.tokens_dropped) == (10, 6)
