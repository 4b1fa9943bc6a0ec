"""Admission in front of a real scheduler whose steps take simulated time: admitted requests are served in time,
rejected ones would have waited too long, and the instance never idles because of a rejection."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from scheduler_world import Instance, prompt_of, room_of

from chitu.config.schema import AdmissionConfig, RouterConfig, SchedulerConfig
from chitu.errors import Overloaded
from chitu.protocol import ClusterView, InstanceInfo, KVLayout, SamplingParams, UnifiedRequest, pack_i32
from chitu.router.admission import Admission
from chitu.router.policies import Candidates, instance_key
from chitu.testing.clock import FakeClock
from chitu.types import Role

MAX_QUEUE_S = 8.0
HEARTBEAT_S = 0.5
UNIFIED = InstanceInfo(Role.UNIFIED, 0, 1, "h", 1, 0, KVLayout("h", 2, 2, 16, 16, "float32", 100), 200)


@dataclass(slots=True)
class Outcome:
    arrived_s: float
    first_token_s: float | None = None
    """Time of the first token; None if the request was rejected."""

    @property
    def wait_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrived_s


@dataclass(slots=True, frozen=True)
class Result:
    admitted: list[Outcome]
    rejected: list[Outcome]
    busy: float
    """Share of the offered time during which the instance computed."""


def simulate(rate: Callable[[float], float], seconds: float, step_s: float, token_s: float, seed: int) -> Result:
    """Simulate prompts of 5 to 40 tokens with one output token each, `rate(time)` of them a second. A step has at most
    64 prompt tokens and takes `step_s` plus 64 times `token_s`."""
    rng, clock = random.Random(seed), FakeClock()
    scheduler = SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=32)
    instance = Instance(200, chunk=32, clock=clock, config=scheduler)
    admission = Admission(RouterConfig(admission=AdmissionConfig(max_queue_s=MAX_QUEUE_S)), clock)
    admission.on_view(Candidates.of(ClusterView(1, 1, (UNIFIED,))))
    key = instance_key(UNIFIED)
    outcomes: dict[bytes, Outcome] = {}
    rejected: list[Outcome] = []
    due_s = beat_s = busy_s = 0.0
    count = 0
    while due_s < seconds or not instance.scheduler.is_idle:
        while due_s <= clock.monotonic() and due_s < seconds:
            prompt = prompt_of(count, rng.randint(5, 40))
            outcome = Outcome(due_s)
            count += 1
            due_s += rng.expovariate(rate(due_s))
            try:
                admission.require()
            except Overloaded:
                rejected.append(outcome)
                continue
            outcomes[room_of(count)] = outcome
            admission.on_sent(key, len(prompt))
            message = UnifiedRequest(room_of(count), "r", pack_i32(prompt), SamplingParams(1, temperature=0.0))
            instance.scheduler.submit(message)
        served = len(instance.finishes)  # its only token is the first one
        worked = instance.scheduler.step()
        took_s = step_s + 64 * token_s if worked else 0.01
        clock.advance(took_s)
        busy_s += took_s if worked and clock.monotonic() < seconds else 0.0
        for room in itertools.islice(instance.finishes, served, None):
            outcomes[room].first_token_s = clock.monotonic()
        if clock.monotonic() >= beat_s:
            beat_s = clock.monotonic() + HEARTBEAT_S
            admission.on_report(key, instance.scheduler.load)
    assert not any(finish.code for finish in instance.finishes.values())
    return Result(list(outcomes.values()), rejected, busy_s / seconds)


@pytest.mark.parametrize(("step_s", "token_s"), [(0.05, 0.003), (0.5, 0.02)], ids=["264 tokens/s", "36 tokens/s"])
@pytest.mark.parametrize("seed", [1, 2])
def test_under_three_times_the_load_everybody_who_is_let_in_is_served_in_time(
    step_s: float, token_s: float, seed: int
) -> None:
    capacity = 64 / (step_s + 64 * token_s) / 22.5  # requests a second
    result = simulate(lambda _: 3 * capacity, 120.0, step_s, token_s, seed)
    late_s = 2 * (step_s + 64 * token_s) + HEARTBEAT_S
    # Every request is admitted before the first report with a queue in it, which is the first report with a full step.
    learned_s = 2 * HEARTBEAT_S + 4 * (step_s + 64 * token_s)
    waits = [outcome.wait_s for outcome in result.admitted if outcome.arrived_s > learned_s]
    assert max(waits) < 1.25 * MAX_QUEUE_S + late_s
    assert result.busy > 0.97, "requests were turned away from an instance without work"
    assert len(result.rejected) > len(result.admitted)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_rejected_who_would_have_been_served_in_time(seed: int) -> None:
    step_s, token_s = 0.05, 0.003
    capacity = 64 / (step_s + 64 * token_s) / 22.5
    result = simulate(lambda _: 1.1 * capacity, 120.0, step_s, token_s, seed)
    for rejected in result.rejected:
        # First come, first served: this one would have waited as long as the last one admitted before it.
        neighbour = [outcome for outcome in result.admitted if outcome.arrived_s <= rejected.arrived_s][-1]
        assert neighbour.wait_s > 0.75 * MAX_QUEUE_S
    calm = simulate(lambda _: 0.7 * capacity, 120.0, step_s, token_s, seed)
    assert calm.rejected == []
    burst = simulate(lambda now_s: 2 * capacity if now_s > 60 else 0.2, 66.0, step_s, token_s, seed)
    assert burst.rejected == [], "a minute of lonely requests was taken for a slow instance"
