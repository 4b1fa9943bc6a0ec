"""Priorities move requests by a bounded time, so that none waits for ever: on P, on D, and in retraction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import DSide, Instance, PSide, Wire, room_of

from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.instance.decode import victims_for_growth
from chitu.instance.requests import PRIORITY_SHARE
from chitu.instance.sequences import Sequence, queue_order
from chitu.kv_transfer.transfer_table import TransferEvent, TransferEventKind
from chitu.protocol import (
    MAX_PRIORITY,
    CancelRequest,
    DecodeRequest,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)
from chitu.testing.clock import FakeClock

QUEUE_S = DeadlineConfig().queue_s
MOST_S = PRIORITY_SHARE * QUEUE_S
STEP_S = 0.25
CLIENTS = 12
priorities = st.integers(-MAX_PRIORITY, MAX_PRIORITY) | st.integers(-3, 3)


@given(st.floats(0, 1e6), st.floats(0, 1e3), priorities, priorities)
def test_nothing_overtakes_a_request_that_came_long_before_it(
    arrival_s: float, later_s: float, first: int, second: int
) -> None:
    older = queue_order(arrival_s, 1, first, MOST_S)
    newer = queue_order(arrival_s + 2 * MOST_S + later_s, 2, second, MOST_S)
    assert older < newer


@given(st.floats(0, 1e6), priorities, priorities)
def test_of_requests_that_come_together_the_lowest_priority_is_first(arrival_s: float, one: int, other: int) -> None:
    low, high = sorted((one, other))
    first, second = queue_order(arrival_s, 1, low, MOST_S), queue_order(arrival_s, 2, high, MOST_S)
    assert first < second
    if abs(low) < 1000 > abs(high) and low < high:
        assert queue_order(arrival_s, 2, low, MOST_S) < queue_order(arrival_s, 1, high, MOST_S)


def test_a_priority_of_one_is_worth_half_of_the_longest_shift() -> None:
    places = [queue_order(100.0, 0, priority, 8.0)[0] for priority in (-MAX_PRIORITY, -1, 0, 1, 3, MAX_PRIORITY)]
    assert places == pytest.approx([92.0, 96.0, 100.0, 104.0, 106.0, 108.0])


class Clients:
    """`CLIENTS` that each send their next request when the last one is over, beside one that sends a single request
    behind their first ones. A step takes `STEP_S`."""

    def __init__(self, role: str) -> None:
        config = SchedulerConfig(max_running_requests=4, max_batched_tokens=16, chunk_size=8, reserved_decode_tokens=4)
        self.role, self.clock, self.wire = role, FakeClock(), Wire()
        side: dict[str, Any] = {"prefill": {"sender": PSide(self.wire)}, "decode": {"receiver": DSide(self.wire)}}
        self.instance = Instance(100, config=config, aux_slots=4, clock=self.clock, **side.get(role, {}))
        self.began_s: dict[bytes, float] = {}
        """When D announced a room, or P computed it; of a unified instance, the end of the request."""
        self.count = 0

    def send(self, priority: int) -> bytes:
        self.count += 1
        room, prompt, sampling = room_of(self.count), pack_i32(range(16)), SamplingParams(12, ignore_eos=True)
        self.instance.scheduler.submit(
            PrefillRequest(room, "r", prompt, 0, 1, priority=priority)
            if self.role == "prefill"
            else DecodeRequest(room, "r", prompt, sampling, 0, 1, priority=priority)
            if self.role == "decode"
            else UnifiedRequest(room, "r", prompt, sampling, priority=priority)
        )
        return room

    def step(self) -> None:
        self.clock.advance(STEP_S)
        self.instance.scheduler.step()
        wire, now_s = self.wire, self.clock.monotonic()
        for room in {"prefill": wire.computed, "decode": wire.announced}.get(self.role, self.instance.finishes):
            self.began_s.setdefault(room, now_s)
        if self.role != "unified":  # its transfer, or its tokens, take three seconds
            for room in [r for r, began_s in self.began_s.items() if began_s + 3.0 <= now_s and r not in wire.dead]:
                wire.dead.add(room)
                if self.role == "prefill":
                    wire.events_p.append(TransferEvent(TransferEventKind.SUCCESS, room))
                else:
                    self.instance.scheduler.submit(CancelRequest(room))

    def wait_of_one(self, priority: int, of_others: int) -> float:
        """Return how long the one request waits among those of the others."""
        others = [self.send(of_others) for _ in range(CLIENTS)]
        one, sent_s = self.send(priority), self.clock.monotonic()
        while one not in self.began_s and one not in self.instance.failures:
            assert self.clock.monotonic() - sent_s < 10 * QUEUE_S
            self.step()
            over = self.wire.dead if self.role != "unified" else self.instance.finishes
            others = [self.send(of_others) if room in over else room for room in others]
        failed = self.instance.failures.get(one) or self.instance.finishes.get(one)
        assert getattr(failed, "code", "") == "", failed
        return self.began_s[one] - sent_s


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
@pytest.mark.parametrize(
    ("priority", "of_others"), [(0, -1), (0, -MAX_PRIORITY), (MAX_PRIORITY, 0), (MAX_PRIORITY, -5)]
)
def test_a_dozen_clients_ahead_of_another_do_not_starve_it(role: str, priority: int, of_others: int) -> None:
    in_turn_s = Clients(role).wait_of_one(0, 0)
    assert in_turn_s > 4.0, "there is a queue"
    waited_s = Clients(role).wait_of_one(priority, of_others)
    assert in_turn_s < waited_s <= in_turn_s + 2 * MOST_S + STEP_S * CLIENTS < QUEUE_S
    assert Clients(role).wait_of_one(of_others, priority) < in_turn_s, "a priority is worth something"


def test_the_youngest_is_retracted_first_unless_a_priority_decides_and_an_old_one_is_not_for_urgent_ones() -> None:
    def running(number: int, arrival_s: float, priority: int) -> Sequence:
        order = queue_order(arrival_s, number, priority, MOST_S)
        return Sequence(room_of(number), "r", order, arrival_s, pack_i32([1]), SamplingParams(4))

    old, young, urgent = running(1, 0.0, 0), running(2, 3 * MOST_S, 0), running(3, 3 * MOST_S, -MAX_PRIORITY)
    for needy, available in ((3, 0), (3, 1), (3, 2)):
        victims = victims_for_growth([old, young, urgent], {old, young, urgent}, available, lambda room: 1)
        assert victims == [young, urgent, old][: {0: 2, 1: 1, 2: 1}[available]], needy
