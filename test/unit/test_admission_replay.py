"""A replay of a cluster in front of which admission decides: the real router and real schedulers, whose steps take
simulated time. Everything happens in the order of one clock, so a replay is the same each time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from router_world import RecordingOutbox
from scheduler_world import DSide, Instance, PSide, Wire, prompt_of, room_of
from support.clock import FakeClock
from support.keyed_peer import KeyedPeer
from support.requests import unified_request

from chitu.config.schema import AdmissionConfig, PolicyName, RouterConfig, SchedulerConfig
from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.errors import NoInstance, Overloaded
from chitu.fake.executor import FakeExecutor
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.net.link import LinkReceivers
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    ClusterView,
    Heartbeat,
    InstanceInfo,
    KVLayout,
    LinkAck,
    SamplingParams,
    pack_i32,
    scheduler_codec,
)
from chitu.protocol.account import PrefillTimes
from chitu.router.admission import Admission
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.generation import GenerateRequest, Generation
from chitu.router.members import Members
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role

PAGE_SIZE = 16
HEARTBEAT_S = 0.5
LAYOUT = KVLayout.uniform("hash", 2, 2, 16, PAGE_SIZE, "float32", 1000)
SLOTS = 4
"""Requests that decode at once."""
STEP_S, TOKEN_S, DECODE_S = 0.005, 0.0005, 0.02
"""Time of a step, of each prompt token in it, and of the tokens that it decodes: 2000 prompt tokens a second."""
SHORTEST_S = 0.25
"""Shorter waits count as this long when a prediction is compared: it is what a step and a half take."""


class TimedExecutor(FakeExecutor):
    """Fake executor that says how long the newest step took."""

    took_s = 0.0

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        num_tokens = sum(chunk.length for chunk in plan.prefill)
        self.took_s = STEP_S + TOKEN_S * num_tokens + (DECODE_S if plan.decode else 0.0)
        return super().execute(plan, on_layer)


class TimedWire(Wire):
    """Wire that delivers at once what is computed and announced, with P's times."""

    def deliver(self, rng: random.Random | None = None) -> None:
        assert self.prefill and self.decode
        for room in [room for room in self.computed if room in self.announced and room not in self.dead]:
            source, target = self.computed.pop(room), self.announced[room]
            sequence = self.prefill.scheduler._sequences.get(room)
            assert sequence is not None
            since_s = sequence.times.computing_since_s
            times = PrefillTimes(since_s - sequence.times.arrival_s, self.prefill.clock.monotonic() - since_s)
            self.decode.executor.aux_row(target)[:] = self.prefill.executor.aux_row(source)
            cached_tokens = sequence.prompt.cached_tokens
            self.events_d.append(TransferEvent(TransferEventKind.LOGITS_READY, room, cached_tokens=cached_tokens))
            self.events_d.append(TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100, times=times))
            self.events_p.append(TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=100))


class TimedInstance(Instance):
    """An instance that keeps its token messages until the step that made them is over."""

    def __init__(self, info: InstanceInfo, **more: Any) -> None:
        self.info = info
        self.frames: list[bytes] = []
        self.received = LinkReceivers()
        self.reads = 0
        self.is_turning = False
        limits = ExecutorInfo(SLOTS, 8192, vocab_size=1000, num_layers=2, eos_token_ids=(2,))
        config = SchedulerConfig(max_running_requests=SLOTS, max_batched_tokens=512, chunk_size=256)
        super().__init__(
            *(info.num_pages,), aux_slots=2 * SLOTS, config=config, executor=TimedExecutor, info=limits,
            page_size=PAGE_SIZE, **more,
        )  # fmt: skip

    def _take(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return True

    @property
    def has_queue(self) -> bool:
        """Whether something waits here, or the newest step was full."""
        load = self.scheduler.load
        return load.waiting > 0 or load.waiting_tokens > load.joinable_tokens


@dataclass(slots=True)
class Ask:
    """A request, what was predicted for it, and what became of it."""

    at_s: float
    predicted_s: float
    generation: Generation | None = None
    """None if it was refused."""
    was_free: bool = False
    """Whether it was refused while nothing waited, neither now nor when the instances reported."""

    @property
    def prefill(self) -> str:
        """Name of its P."""
        assert self.generation is not None
        return self.generation.attempts()[-1].prefill or ""

    @property
    def wait_s(self) -> float:
        """Time until its prompt began to compute, and D had pages for it."""
        assert self.generation is not None and self.generation.error is None, self.generation
        assert self.generation.finish is not None
        report = self.generation.finish.stages
        return max(report.admission_s, report.prefill.queue_s)


class ReplayWorld:
    """A 1P1D, or one unified instance. More instances can only be sent requests: the wire joins one P and one D."""

    def __init__(self, *roles: Role, policy: PolicyName = "prefix_affinity", max_queue_s: float | None = None) -> None:
        self.clock = FakeClock(1000.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wire = TimedWire()
        self.instances: dict[InstanceKey, TimedInstance] = {}
        config = RouterConfig(policy=policy, admission=AdmissionConfig(max_queue_s=max_queue_s), max_in_flight=10_000)
        trace = RouterTrace(None, None, "router", self.clock)  # type: ignore[arg-type]  # nothing is traced
        outbox: Any = self
        self.router = PDRequestRouter(outbox, self.clock, config, trace)
        for place, role in enumerate(roles):
            rank = roles[:place].count(role)
            info = InstanceInfo(role, rank, 1 + place, "h", 1, 2, LAYOUT, 8192, num_slots=SLOTS, num_pages=4000)
            sides = {Role.PREFILL: {"sender": PSide(self._wire)}, Role.DECODE: {"receiver": DSide(self._wire)}}
            instance = TimedInstance(info, clock=self.clock, **sides.get(role, {}))
            self.instances[instance_key(info)] = instance
            if role is not Role.UNIFIED:
                setattr(self._wire, role.value, instance)
            self.router.on_joined(info)
            self._beat(instance)
        self.router.on_view(ClusterView(1, 1, tuple(i.info for i in self.instances.values())))
        self.asks: list[Ask] = []

    # --------------------------------------------------------------------------------------- as the router's outbox

    def open(self, instance: InstanceInfo) -> KeyedPeer:
        return KeyedPeer(self, instance_key(instance))

    def send(self, key: InstanceKey, frame: bytes) -> bool:
        instance, message = self.instances[key], scheduler_codec.decode(frame)
        if isinstance(message, LinkAck):
            instance.scheduler._tokens.take_ack(message)
        elif instance.received.take(message.stamp):
            instance.scheduler.submit(message)
            self._wake(instance)
        return True

    # -------------------------------------------------------------------------------------------------------- the clock

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        """Let this much time pass."""
        end_s = self.clock.monotonic() + seconds
        while self._events and self._events[0][0] <= end_s:
            at_s, _, action = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at_s - self.clock.monotonic()))
            action()
            self.router.flush()
        self.clock.advance(end_s - self.clock.monotonic())

    def run_until_idle(self) -> None:
        for _ in range(10_000):
            if not self.router.in_flight:
                return
            self.run(1.0)
        raise AssertionError("requests do not end")

    def _beat(self, instance: TimedInstance) -> None:
        info, instance.reads = instance.info, instance.reads + 1
        beat = Heartbeat(
            *(info.role, info.engine_rank, info.incarnation, instance.scheduler.load),
            acks=instance.received.acks(),
            reads=instance.reads,
        )
        self.router.on_heartbeat(beat)
        self.router.tick()
        self.at(self.clock.monotonic() + HEARTBEAT_S, lambda: self._beat(instance))

    def _wake(self, instance: TimedInstance) -> None:
        if not instance.is_turning:
            instance.is_turning = True
            self.at(self.clock.monotonic(), lambda: self._turn(instance))

    def _turn(self, instance: TimedInstance) -> None:
        """Deliver what the step before has computed, and begin the next one."""
        frames, instance.frames = instance.frames, []
        self.router.on_token_frames(frames)
        if instance.info.role is not Role.UNIFIED:
            self._wire.deliver()
        executor: Any = instance.executor
        worked = instance.scheduler.step()
        took_s = executor.took_s if worked else 0.0
        instance.is_turning = worked or bool(instance.frames)
        if instance.is_turning:
            self.at(self.clock.monotonic() + took_s, lambda: self._turn(instance))
        if instance.info.role is Role.DECODE:
            self._wire.deliver()  # what P had computed before D announced it
        for other in self.instances.values():
            if (other.info.role is Role.PREFILL and self._wire.events_p) or (
                other.info.role is Role.DECODE and self._wire.events_d
            ):
                self._wake(other)

    # ------------------------------------------------------------------------------------------------------ the clients

    def ask(
        self, prompt: Sequence[int], max_tokens: int, then: Callable[[], None] = lambda: None, choices: int = 1
    ) -> Ask:
        """Send a request. `then` is called when it is over, or was refused."""
        attempts = self.router._attempts
        ask = Ask(self.clock.monotonic(), max(attempts.predicted_waits_s()))
        self.asks.append(ask)
        token_ids = np.array(prompt, np.int32).tobytes()
        sampling = SamplingParams(max_tokens, temperature=0.0)
        requests = [
            GenerateRequest("r", token_ids, len(prompt), sampling, wake_per_token=False) for _ in range(choices)
        ]
        try:
            while requests:
                sent = self.router.add_choices(requests, lambda: self._is_over(ask, then))
                ask.generation = ask.generation or sent[0]
                requests = requests[len(sent) :]
        except Overloaded as error:
            assert error.retry_after_s is not None and error.retry_after_s > 0
            loads = [member.load for member in self.router._members.by_link.values()]
            has_queue = any(instance.has_queue for instance in self.instances.values())
            ask.was_free = not has_queue and not any(
                load.newest.waiting > load.newest.unread + load.newest.held_by_prefill
                or load.newest.waiting_tokens > load.newest.joinable_tokens
                for load in loads
            )
            self.at(self.clock.monotonic() + max(1.0, error.retry_after_s), then)  # as `Retry-After` rounds it
        return ask

    def ask_one(self, make: Callable[[], tuple[list[int], int]]) -> None:
        self.ask(*make())

    def _is_over(self, ask: Ask, then: Callable[[], None]) -> None:
        if ask.generation is not None and ask.generation.done:
            self.at(self.clock.monotonic(), then)

    def closed_loop(self, clients: int, seconds: float, make: Callable[[], tuple[list[int], int]]) -> list[Ask]:
        """Run clients that each send the next request when theirs is over. Return the requests, all of them ended."""
        begin, end_s = len(self.asks), self.clock.monotonic() + seconds

        def go_on() -> None:
            if self.clock.monotonic() < end_s:
                self.ask(*make(), go_on)

        for _ in range(clients):
            go_on()
        self.run(seconds)
        self.run_until_idle()
        return self.asks[begin:]

    def burst(self, count: int, gap_s: float, make: Callable[[], tuple[list[int], int]]) -> list[Ask]:
        """Send some requests at short intervals. Return them, all of them ended."""
        begin = len(self.asks)
        for _ in range(count):
            self.ask(*make())
            self.run(gap_s)
        self.run_until_idle()
        return self.asks[begin:]

    def open_loop(
        self, rate: float, seconds: float, rng: random.Random, make: Callable[[], tuple[list[int], int]]
    ) -> list[Ask]:
        """Let `rate` requests a second arrive. Return them, all of them ended."""
        begin, due_s = len(self.asks), rng.expovariate(rate)
        while due_s < seconds:
            self.at(self.clock.monotonic() + due_s, lambda: self.ask_one(make))
            due_s += rng.expovariate(rate)
        self.run(seconds)
        self.run_until_idle()
        return self.asks[begin:]


def ratio(asks: Iterable[Ask]) -> float:
    """Return the median of predicted over real waits of the requests that were admitted."""
    admitted = [ask for ask in asks if ask.generation is not None]
    return statistics.median(max(ask.predicted_s, SHORTEST_S) / max(ask.wait_s, SHORTEST_S) for ask in admitted)


# ----------------------------------------------------------------------------------------------------------------------
# Admission in front of a cluster of real schedulers, through the phases of a day: what the router predicts is what
# requests then wait, and nothing is refused while nothing waits.


PAIR, UNIFIED = (Role.PREFILL, Role.DECODE), (Role.UNIFIED,)
Make = Callable[[], tuple[list[int], int]]


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(20, 900), k=num_tokens)


def refused(asks: list[Ask]) -> list[Ask]:
    return [ask for ask in asks if ask.generation is None]


@pytest.mark.parametrize(
    ("roles", "policy"),
    [
        (PAIR, "prefix_affinity"),
        pytest.param(PAIR, "round_robin", marks=pytest.mark.by_hand),
        (UNIFIED, "prefix_affinity"),
    ],
)
def test_predicted_waits_are_the_real_ones_in_every_phase(roles: tuple[Role, ...], policy: PolicyName) -> None:
    rng = random.Random(3)
    world = ReplayWorld(*roles, policy=policy)
    shared = prompt(rng, 1500)

    def warm() -> tuple[list[int], int]:
        return shared + prompt(rng, 10), 40

    def cold() -> tuple[list[int], int]:
        return prompt(rng, rng.randrange(500, 1500)), 4

    def short() -> tuple[list[int], int]:
        return prompt(rng, 5), 50

    def long() -> tuple[list[int], int]:
        return prompt(rng, 1900), 4

    phases: list[tuple[str, Callable[[], list[Ask]], bool]] = [
        ("cold", partial(world.closed_loop, 16, 30.0, lambda: (prompt(rng, 1000), 4)), True),
        ("warm", partial(world.closed_loop, 16, 20.0, warm), True),
        ("warm, more clients", partial(world.closed_loop, 24, 20.0, warm), True),
        ("D-bound", partial(world.closed_loop, 40, 25.0, short), True),
        ("idle", partial(world.burst, 3, 0.05, long), True),
        ("idle for long", partial(world.burst, 3, 0.05, long), True),
        ("three times too much", partial(world.open_loop, 6.0, 45.0, rng, cold), False),
    ]
    for name, run, fits in phases:
        if name.startswith("idle"):
            world.run(5.0 if name == "idle" else 60.0)
        asks = run()
        assert not any(ask.was_free for ask in asks), name
        assert 0.5 < ratio(asks) < 2.0, name
        assert bool(refused(asks)) != fits, name
    admitted = [ask for ask in asks if ask.generation is not None]
    assert max(ask.wait_s for ask in admitted) < 1.25 * 20.0, "who is let in is served in time"


def seeds(in_ci: int, count: int) -> pytest.MarkDecorator:
    """Return so many draws, the first of them in CI."""
    drawn = [seed if seed < in_ci else pytest.param(seed, marks=pytest.mark.by_hand) for seed in range(count)]
    return pytest.mark.parametrize("seed", drawn)


@seeds(4, 6)
def test_nothing_is_refused_while_nothing_waits(seed: int) -> None:
    """Any mixture of prompts, shared or not, of answers, and of clients that come and go."""
    rng = random.Random(seed)
    roles = PAIR if seed % 3 else UNIFIED
    policy: PolicyName = rng.choice(["prefix_affinity", "round_robin", "least_loaded"])
    world = ReplayWorld(*roles, policy=policy, max_queue_s=rng.choice([1.0, 2.0, None]))
    for _ in range(4):
        shared, own = prompt(rng, rng.choice([0, 100, 600, 2000])), rng.choice([5, 50, 400, 1900])
        make = partial(_request, rng, shared, own, rng.choice([1, 4, 20]))
        if rng.random() < 0.5:
            world.closed_loop(rng.choice([1, 6, 24]), rng.choice([2.0, 5.0]), make)
        else:
            world.open_loop(rng.choice([1.0, 8.0, 40.0]), rng.choice([1.0, 2.0]), rng, make)
        world.run(rng.choice([0.0, 0.3, 3.0, 40.0]))
    assert not any(ask.was_free for ask in world.asks)
    world.run(1.0)
    begin = len(world.asks)
    world.burst(2, 0.05, partial(_request, rng, [], 1900, 4))
    assert not refused(world.asks[begin:]), "the cluster is idle"


def _request(rng: random.Random, shared: list[int], own: int, max_tokens: int) -> tuple[list[int], int]:
    return shared + prompt(rng, rng.randrange(1, own + 1)), max_tokens


@pytest.mark.parametrize("roles", [PAIR, UNIFIED], ids=["pair", "unified"])
def test_choices_count_their_prompt_once_and_themselves_each(roles: tuple[Role, ...]) -> None:
    rng = random.Random(5)
    world = ReplayWorld(*roles)
    world.closed_loop(12, 20.0, lambda: (prompt(rng, 600), 20))
    begin = len(world.asks)
    for _ in range(6):
        world.ask(prompt(rng, 600), 20, choices=3)
        world.run(1.0)
    world.run_until_idle()
    asks = world.asks[begin:]
    assert not refused(asks) and 0.5 < ratio(asks) < 2.0


def test_requests_of_a_warm_prefix_all_go_to_the_instance_that_has_it() -> None:
    """None of them is answered before the last is sent, and all of them are little work."""
    world = ReplayWorld(Role.PREFILL, Role.PREFILL, Role.DECODE)
    rng = random.Random(2)
    shared = prompt(rng, 3000)
    owner = world.ask(shared + prompt(rng, 10), 4).prefill
    world.router.fail_all(NoInstance("for a test"))
    asks = [world.ask(shared + prompt(rng, 10), 4) for _ in range(24)]
    assert {ask.prefill for ask in asks} == {owner}
    assert world.ask(prompt(rng, 3000), 4).prefill != owner, "what it does not have goes to the one that is idle"


# ----------------------------------------------------------------------------------------------------------------------
# Admission in front of a real scheduler whose steps take simulated time: admitted requests are served in time, rejected
# ones would have waited too long, and the instance never idles because of a rejection.


MAX_QUEUE_S = 8.0
UNIFIED_INFO = InstanceInfo(Role.UNIFIED, 0, 1, "h", 1, 0, KVLayout.uniform("h", 2, 2, 16, 16, "float32", 100), 200)


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
    config = RouterConfig(admission=AdmissionConfig(max_queue_s=MAX_QUEUE_S))
    members = Members(config, RecordingOutbox())
    members.add(UNIFIED_INFO)
    members.on_view(ClusterView(1, 1, (UNIFIED_INFO,)))
    admission, member = Admission(config, members, clock), members[instance_key(UNIFIED_INFO)]
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
            member.load.on_sent(len(prompt), clock.monotonic())
            message = unified_request(room_of(count), "r", pack_i32(prompt), SamplingParams(1, temperature=0.0))
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
            members.on_report(member, instance.scheduler.load, clock.monotonic())
    assert not any(finish.code for finish in instance.finishes.values())
    return Result(list(outcomes.values()), rejected, busy_s / seconds)


@pytest.mark.parametrize(("step_s", "token_s"), [(0.05, 0.003), (0.5, 0.02)], ids=["264 tokens/s", "36 tokens/s"])
@seeds(1, 3)
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


@seeds(1, 3)
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
