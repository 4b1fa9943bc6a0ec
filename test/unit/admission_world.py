"""A replay of a cluster in front of which admission decides: the real router and real schedulers, whose steps take
simulated time. Everything happens in the order of one clock, so a replay is the same each time."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scheduler_world import DSide, Instance, PSide, Wire

from chitu.config.schema import AdmissionConfig, PolicyName, RouterConfig, SchedulerConfig
from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.errors import Overloaded
from chitu.kv_transfer.transfer_table import TransferEvent, TransferEventKind
from chitu.net.link import LinkReceivers
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    ClusterView,
    Heartbeat,
    InstanceInfo,
    KVLayout,
    LinkAck,
    PrefillTimes,
    SamplingParams,
    scheduler_codec,
)
from chitu.router.policies import InstanceKey, instance_key
from chitu.router.request import GenerateRequest, Generation
from chitu.router.selector import make_selector
from chitu.testing.clock import FakeClock
from chitu.testing.fake_executor import FakeExecutor
from chitu.tracing.router_trace import RouterTrace
from chitu.types import Role

PAGE_SIZE = 16
HEARTBEAT_S = 0.5
LAYOUT = KVLayout("hash", 2, 2, 16, PAGE_SIZE, "float32", 1000)
SLOTS = 4
"""Requests that decode at once."""
STEP_S, TOKEN_S, DECODE_S = 0.005, 0.0005, 0.02
"""Time of a step, of each prompt token in it, and of the tokens that it decodes: 2000 prompt tokens a second."""
SHORTEST_S = 0.25
"""Shorter waits count as this long when a prediction is compared: it is what a step and a half take."""


class TimedExecutor(FakeExecutor):
    """Fake executor that says how long the newest step took. It computes no checksums of prompts, which take long."""

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
            since_s = sequence.computing_since_s
            times = PrefillTimes(since_s - sequence.arrival_s, self.prefill.clock.monotonic() - since_s)
            self.decode.executor.aux_row(target)[:] = self.prefill.executor.aux_row(source)
            cached_tokens = sequence.cached_tokens
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
        stages = self.generation.attempts()[-1].stages
        assert stages is not None
        return max(stages.admission_s, stages.prefill.queue_s)


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
        self.router = PDRequestRouter(make_selector(config), outbox, self.clock, config, trace)
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

    def open(self, key: InstanceKey, host: str, port: int) -> None: ...

    def send(self, key: InstanceKey, frame: bytes) -> bool:
        instance, message = self.instances[key], scheduler_codec.decode(frame)
        if isinstance(message, LinkAck):
            instance.scheduler._tokens.take_ack(message)
        elif instance.received.take(message.link, message.number, message.num_kept):
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
        waits_s = self.router._admission.predicted_waits_s(attempts.num_waiting, attempts.num_new_tokens)
        ask = Ask(self.clock.monotonic(), max(waits_s))
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
            queues = [queue for queues in self.router._admission._queues.values() for queue in queues]
            has_queue = any(instance.has_queue for instance in self.instances.values())
            ask.was_free = not has_queue and not any(queue.reported for queue in queues)
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
