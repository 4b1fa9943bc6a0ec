"""`SimulatedCluster`: a whole cluster in virtual time, with the real router, schedulers and transfer machines.

The router is `PDRequestRouter` (selector, admission, members, attempts); instances are `SimulatedInstance`. Between
them is a network that loses nothing and delivers in order, after a constant time. One heap of events orders everything;
equal times keep the order in which they were planned, so a run is a function of its inputs. Nothing here sleeps, and
nothing is random but what the caller draws.

    cluster = SimulatedCluster(profile, prefill=2, decode=2)
    request = cluster.submit(at_s=0.5, prompt=1000, max_tokens=100)
    cluster.run()
    request.ttft_s, request.tpot_s, request.end_s, request.error, request.pair
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from chitu.config.schema import RouterConfig, SchedulerConfig, TraceConfig
from chitu.errors import ChituError, ConfigError
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import ClusterView, Heartbeat, InstanceInfo, LoadReport, RequestFailed, SamplingParams
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.generation import GenerateRequest, Generation
from chitu.tools.size.engine import WorldClock
from chitu.tools.size.instance import SimulatedInstance
from chitu.tools.size.profile import EngineProfile
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role

ROUTER = 1
"""Incarnation of the router."""
TICK_S = 0.5
"""Between two looks at deadlines."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and what became of it. Times are virtual seconds; NaN until known."""

    at_s: float
    prompt_tokens: int
    max_tokens: int
    first_s: float = math.nan
    end_s: float = math.nan
    num_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Code of the error that it ended with; empty: it has all of its tokens, or runs."""
    is_rejected: bool = False
    """Whether the router refused it on arrival."""
    pair: str = ""
    """Instances that its last attempt used: `P0-D1`, `U0`."""
    num_attempts: int = 0
    generation: Generation | None = None

    @property
    def is_over(self) -> bool:
        return not math.isnan(self.end_s)

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its tokens."""
        return self.is_over and not self.error

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Seconds from token to token, the mean of the request; 0 for one token."""
        return (self.end_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        """Return whether it has all of its tokens, within these bounds."""
        return self.is_whole and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class Arrival(msgspec.Struct, frozen=True):
    """A request of a workload."""

    at_s: float
    prompt: bytes | int
    """Tokens (int32 LE), or how many there are of a prompt that shares nothing with others."""
    max_tokens: int


@dataclass(slots=True)
class _Connection:
    """The router's connection to an instance (`PeerSocket`)."""

    cluster: SimulatedCluster
    instance: SimulatedInstance

    def send(self, frame: bytes) -> bool:
        cluster = self.cluster
        cluster.at(cluster.clock.now_s + cluster.message_s, self.instance.receive, frame)
        return True

    def close(self, linger_ms: int = 0) -> None: ...


@dataclass(slots=True)
class _Connections:
    cluster: SimulatedCluster

    def open(self, info: InstanceInfo) -> _Connection:
        return _Connection(self.cluster, self.cluster.instances[info.incarnation])


@dataclass(slots=True)
class _Leaving:
    """An instance that finishes what it has; then `role` follows, or nothing."""

    instance: SimulatedInstance
    role: Role | None
    pause_s: float
    profile: EngineProfile | None = None


@dataclass(slots=True)
class _Events:
    """A heap of events in the order of their times, then of their planning."""

    heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def put(self, when_s: float, act: Callable[..., None], values: tuple[object, ...]) -> None:
        heapq.heappush(self.heap, (when_s, next(self.numbers), act, values))


class SimulatedCluster:
    def __init__(
        self,
        profile: EngineProfile | dict[Role, EngineProfile],
        prefill: int = 0,
        decode: int = 0,
        unified: int = 0,
        config: RouterConfig | None = None,
        scheduler: SchedulerConfig | dict[Role, SchedulerConfig] | None = None,
        on_end: Callable[[SimulatedRequest], None] | None = None,
    ) -> None:
        """Make a cluster of so many instances, which have joined at time 0. `profile` and `scheduler`: of all
        instances, or by role. `on_end` is called with each request that is over."""
        self.clock = WorldClock()
        self.config = config or RouterConfig()
        self.deadlines = self.config.pd_disaggregation.deadlines
        self._profiles = profile if isinstance(profile, dict) else dict.fromkeys(Role, profile)
        scheduler = scheduler or SchedulerConfig()
        self._schedulers = scheduler if isinstance(scheduler, dict) else dict.fromkeys(Role, scheduler)
        self.message_s = max(known.link.message_s for known in self._profiles.values())
        self._on_end = on_end
        self._events = _Events()
        self.instances: dict[int, SimulatedInstance] = {}
        """Instances by incarnation, those that leave included."""
        self._by_port: dict[int, SimulatedInstance] = {}
        self._incarnations = itertools.count(1)
        self._version = 0
        self._leaving: list[_Leaving] = []
        self._loads: dict[str, LoadReport] = {}
        self.open: dict[SimulatedRequest, None] = {}
        """Requests that have arrived and are not over, in the order of their arrival."""
        self.is_stopped = False
        self._num_due = 0
        """Requests that have not arrived."""
        self._prompts = itertools.count(1 << 30)
        """First tokens of the prompts that share nothing."""
        self._is_ticking = False
        self.num_events = 0
        trace = RouterTrace(TraceConfig(), cast(Any, None), "router", self.clock)  # nothing is traced
        self.router = PDRequestRouter(cast(Any, _Connections(self)), self.clock, self.config, trace)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.UNIFIED, unified)):
            for _ in range(count):
                self._start(role)
        self._publish()

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, at_s: float, prompt: bytes | int, max_tokens: int) -> SimulatedRequest:
        """Let a request arrive at a time. `prompt`: its tokens (int32 LE), or how many there are."""
        request = SimulatedRequest(at_s, prompt if isinstance(prompt, int) else len(prompt) // 4, max_tokens)
        self._num_due += 1
        self.at(at_s, self._arrive, request, prompt)
        return request

    def feed(self, arrivals: Iterable[Arrival]) -> None:
        """Let requests arrive, ascending by time, each made when the one before arrives: for a million of them."""
        rest = iter(arrivals)

        def follow() -> None:
            arrival = next(rest, None)
            self._num_due -= 1
            if arrival is not None:
                self.submit(arrival.at_s, arrival.prompt, arrival.max_tokens)
                self._num_due += 1
                self.at(arrival.at_s, follow)

        self._num_due += 1
        follow()

    def _arrive(self, request: SimulatedRequest, prompt: bytes | int) -> None:
        self._num_due -= 1
        self.open[request] = None
        self._keep_ticking()
        token_ids = self._own_prompt(prompt) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        asked = GenerateRequest("", token_ids, request.prompt_tokens, sampling, wake_per_token=False)
        try:
            request.generation = self.router.add_request(asked, partial(self._look, request))
        except ChituError as error:
            request.error, request.is_rejected = error.code, True
            self._over(request)

    def _own_prompt(self, num_tokens: int) -> bytes:
        return struct.pack("<i", next(self._prompts)) + bytes(4 * (num_tokens - 1))

    def _look(self, request: SimulatedRequest) -> None:
        """Read a generation that is over."""
        generation = request.generation
        if generation is None or not generation.done:
            return
        request.num_tokens, request.cached_tokens = generation.num_emitted, generation.cached_tokens
        if generation.first_token_s is not None:
            request.first_s = generation.first_token_s
        if generation.error is not None:
            request.error = generation.error.code
        request.num_attempts = len(generation.ended)
        if generation.ended:
            last = generation.ended[-1]
            request.pair = "-".join(name for name in (last.prefill, last.decode) if name)
        request.generation = None
        self._over(request)

    def _over(self, request: SimulatedRequest) -> None:
        request.end_s = self.clock.now_s
        del self.open[request]
        if self._on_end is not None:
            self._on_end(request)

    # ----------------------------------------------------------------------------------------------------------- time

    def at(self, when_s: float, act: Callable[..., None], *values: object) -> None:
        """Call `act` with the values at a virtual moment; in the past means now."""
        self._events.put(when_s, act, values)

    def stop(self) -> None:
        """Let `run` return after this event: enough is known."""
        self.is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Run until all requests are over, or until a virtual moment."""
        heap, clock = self._events.heap, self.clock
        while heap and not self.is_stopped and (self.open or self._num_due or self._leaving or until_s < math.inf):
            when_s, _, act, values = heap[0]
            if when_s > until_s:
                break
            heapq.heappop(heap)
            if when_s > clock.now_s:
                clock.now_s = when_s
            act(*values)
            self.num_events += 1
        if until_s < math.inf:
            clock.now_s = max(clock.now_s, until_s)

    def _keep_ticking(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self.at(self.clock.now_s + TICK_S, self._tick)
            for instance in self.instances.values():
                self.at(self.clock.now_s + self._beat_s(instance), self._beat, instance)

    def _tick(self) -> None:
        self.router.tick()
        for leaving in list(self._leaving):
            if leaving.instance.scheduler.is_idle:
                self._leave(leaving)
        if self.open or self._num_due or self._leaving:
            self.at(self.clock.now_s + TICK_S, self._tick)
        else:
            self._is_ticking = False

    def _beat_s(self, instance: SimulatedInstance) -> float:
        """Return when its first heartbeat comes: those of different instances are spread."""
        interval_s = self.deadlines.heartbeat_interval_s
        return interval_s * (0.5 + instance.incarnation * 0.381966 % 1.0)

    def _beat(self, instance: SimulatedInstance) -> None:
        if instance.is_gone or not self._is_ticking:
            return
        instance.tick()
        if (beat := instance.heartbeat()) is not None:
            self.at(self.clock.now_s + self.message_s, self._on_beat, beat, instance)
        self.at(self.clock.now_s + self.deadlines.heartbeat_interval_s, self._beat, instance)

    def _on_beat(self, beat: Heartbeat, instance: SimulatedInstance) -> None:
        self._loads[instance.name] = beat.load
        self.router.on_heartbeat(beat)

    # ---------------------------------------------------------------------------------------------------- the network

    def send_peer(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        target = self._by_port.get(port)
        if target is not None:
            self.at(self.clock.now_s + self.message_s, target.on_frame, room, payload)

    def send_tokens(self, frame: bytes, now_s: float) -> None:
        self.at(now_s + self.message_s, self.router.on_token_frames, [frame])

    def send_failed(self, failed: RequestFailed, now_s: float) -> None:
        self.at(now_s + self.message_s, self.router.on_request_failed, failed)

    def receiver_of(self, incarnation: int) -> SimulatedInstance | None:
        return self.instances.get(incarnation)

    # ----------------------------------------------------------------------------------------------------- membership

    @property
    def members(self) -> list[SimulatedInstance]:
        """The instances of the view, by role and rank."""
        return sorted(self.instances.values(), key=lambda i: (list(Role).index(i.role), i.rank))

    def loads(self) -> dict[str, LoadReport]:
        """Return the newest report of each instance as the router has it, by name."""
        present = {instance.name for instance in self.instances.values()}
        return {name: load for name, load in self._loads.items() if name in present}

    def find(self, name: str) -> SimulatedInstance:
        """Return the instance of a name such as `P0`. Raises ConfigError if there is none."""
        for instance in self.instances.values():
            if instance.name == name:
                return instance
        raise ConfigError(f"{name} is none of {', '.join(i.name for i in self.members)}")

    def add(self, role: Role) -> str:
        """Let an instance join now, and return its name."""
        instance = self._start(role)
        self._publish()
        return instance.name

    def drain(self, name: str) -> None:
        """Let an instance finish what it has, and leave."""
        self._drain(_Leaving(self.find(name), None, 0.0))

    def change_role(self, name: str, role: Role, pause_s: float = 0.0) -> None:
        """Let an instance finish what it has, and join again in another role, with its pages, `pause_s` after that."""
        self._drain(_Leaving(self.find(name), role, pause_s))

    def _drain(self, leaving: _Leaving) -> None:
        instance = leaving.instance
        instance.info = msgspec.structs.replace(instance.info, draining=True)
        self._leaving.append(leaving)
        self._publish()
        self._keep_ticking()

    def _leave(self, leaving: _Leaving) -> None:
        self._leaving.remove(leaving)
        instance = leaving.instance
        instance.is_gone = True
        del self.instances[instance.incarnation]
        self._by_port.pop(instance.port, None)
        self._publish()
        self.router.on_lost(instance.info, "drained", has_died=False)
        if leaving.role is not None:
            self.at(self.clock.now_s + leaving.pause_s, self._return, leaving.role, instance)

    def _return(self, role: Role, former: SimulatedInstance) -> None:
        self._start(role, former)
        self._publish()

    def _start(self, role: Role, former: SimulatedInstance | None = None) -> SimulatedInstance:
        taken = {instance.rank for instance in self.instances.values() if instance.role is role}
        rank = next(rank for rank in itertools.count() if rank not in taken)
        instance = SimulatedInstance(
            self,
            role,
            rank,
            next(self._incarnations),
            self._profiles[role] if former is None else former.profile,
            self._schedulers[role],
            self.config.pd_disaggregation.transfer_threads,
            None if former is None else former.cache,
        )
        self.instances[instance.incarnation] = instance
        if instance.port:
            self._by_port[instance.port] = instance
        self.router.on_joined(instance.info)
        if self._is_ticking:
            self.at(self.clock.now_s + self._beat_s(instance), self._beat, instance)
        return instance

    def _publish(self) -> None:
        self._version += 1
        view = ClusterView(ROUTER, self._version, tuple(instance.info for instance in self.members))
        self.router.on_view(view)
        for instance in self.instances.values():
            instance.side.on_view(view)

    def key_of(self, name: str) -> InstanceKey:
        """Return the router's key of an instance."""
        return instance_key(self.find(name).info)
