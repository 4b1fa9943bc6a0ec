"""`SimulatedCluster`: a whole cluster in virtual time, of real routers, schedulers and transfer machines.

Instances join by messages, hold their places by heartbeats, learn of each other by views, and change their roles as
they do over sockets (`process.py`, `router.py`). Between all of them is a `Network`. Everything may fail: a message is
lost, an end is cut off, frozen, slow or killed, a router ends and comes back. One heap of events orders everything, and
nothing is random but what the caller draws, so a run is a function of its inputs.

    cluster = SimulatedCluster(profile, prefill=2, decode=2)
    request = cluster.submit(at_s=0.5, prompt=1000, max_tokens=100)
    cluster.at(3.0, cluster.kill, "P1")
    cluster.run()
    request.ttft_s, request.tpot_s, request.end_s, request.error, request.pair
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from chitu.config.schema import RouterConfig, SchedulerConfig
from chitu.errors import ChituError, ConfigError, NoInstance
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    Drain,
    Heartbeat,
    ImagePart,
    InstanceInfo,
    Join,
    Leave,
    LoadReport,
    RequestFailed,
    SamplingParams,
    ViewMessage,
    image_key,
    scheduler_codec,
)
from chitu.router.candidates import InstanceKey
from chitu.router.generation import GenerateRequest, Generation
from chitu.simulation.encoders import SimulatedEncoder
from chitu.simulation.events import Events
from chitu.simulation.group import SimulatedGroup
from chitu.simulation.instance import SimulatedInstance
from chitu.simulation.network import Network
from chitu.simulation.process import SimulatedProcess
from chitu.simulation.profile import EngineProfile
from chitu.simulation.router import SimulatedRouter
from chitu.types import Role

TICK_S = 0.5
"""Between two looks of an instance or a router at its deadlines. Real ones look every 50 ms; where deadlines matter,
pass that."""
DEATH_S = 0.05
"""Time until a router learns of a death from the machine where it happened."""
ROLES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)

Delivery = tuple[Callable[..., object], tuple[object, ...]]
"""A call that hands a message over, and its values."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and what became of it. Times are virtual seconds; NaN until known."""

    at_s: float
    prompt_tokens: int
    max_tokens: int
    first_s: float = math.nan
    end_s: float = math.nan
    num_tokens: int = 0
    is_right: bool = True
    """Whether each of its tokens is the one of its place (`TimedExecutor`)."""
    cached_tokens: int = 0
    error: str = ""
    """Code of the error that it ended with; empty: it has all of its tokens, or runs."""
    is_rejected: bool = False
    """Whether the router refused it on arrival."""
    pair: str = ""
    """Instances that its last attempt used: `P0-D1`, `U0`."""
    num_attempts: int = 0
    router: int = 0
    """Index of the router that has it."""
    images: tuple[ImagePart, ...] = ()
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
    image_rows: tuple[int, ...] = ()
    """Feature rows of its images, which nobody has seen before: the last tokens of the prompt but one."""


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
        *,
        routers: int = 1,
        tick_s: float = TICK_S,
        encode: int = 0,
    ) -> None:
        """Make a cluster of so many instances, each of as many members as its profile says, which have joined all
        `routers` by the moment 0. `profile` and `scheduler`: of all instances, or by role. `on_end` is called with each
        request that is over. `encode`: number of E."""
        self.events = Events()
        self.clock = self.events.clock
        self.at = self.events.at
        """`at(when_s, act, *values)`: call `act` with the values at a virtual moment; in the past means now."""
        self.config = config or RouterConfig()
        self.deadlines = self.config.pd_disaggregation.deadlines
        self._profiles = profile if isinstance(profile, dict) else dict.fromkeys(Role, profile)
        scheduler = scheduler or SchedulerConfig()
        self._schedulers = scheduler if isinstance(scheduler, dict) else dict.fromkeys(Role, scheduler)
        self.message_s = max(known.link.message_s for known in self._profiles.values())
        self.network = Network(self.events)
        self._tick_s = tick_s
        self._on_end = on_end
        self._incarnations = itertools.count(1)
        self.processes: list[SimulatedInstance] = []
        """Those that run."""
        self._by_incarnation: dict[int, SimulatedInstance] = {}
        self._frozen: dict[SimulatedProcess | SimulatedRouter, list[Delivery]] = {}
        """Ends whose threads are stopped, and what has reached them since."""
        self._dead_pids: set[int] = set()
        self.open: dict[SimulatedRequest, None] = {}
        """Requests that have arrived and are not over, in the order of their arrival."""
        self._held: list[tuple[SimulatedRequest, bytes]] = []
        """Those of them that wait until a change of weights lets them begin."""
        self.is_stopped = False
        self._num_due = 0
        """Requests that have not arrived."""
        self._prompts = itertools.count(1 << 30)
        """First tokens of the prompts that share nothing."""
        counts = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.UNIFIED, unified))
        sizes = {role: self._profiles[role].dp_size for role in self._profiles}
        self._places = [(role, rank) for role, count in counts for rank in range(count * sizes.get(role, 1))]
        self.num_routers = routers
        self.routers: list[SimulatedRouter | None] = [None] * routers
        """By index; None: it has ended."""
        for index in range(routers):
            self.start_router(index)
        self.encoders: list[SimulatedEncoder] = []
        self._num_images = itertools.count()
        beat_s = self.deadlines.heartbeat_interval_s
        for rank in range(encode):
            known = self._profiles[Role.ENCODE]
            self.encoders.append(SimulatedEncoder(self, rank, self.new_incarnation(), known, beat_s))
        for role, rank in list(self._places):
            if rank % sizes[role] == 0:
                self.start(role, rank)
        self._let_join()

    def _let_join(self) -> None:
        """Let all that was started be members at this moment, as if messages took no time."""
        self.events.run(lambda: True, self.clock.now_s)
        for process in self.processes:
            process.keep_in_touch()
        self.events.run(lambda: True, self.clock.now_s)
        self.network.message_s = self.message_s

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(
        self, at_s: float, prompt: bytes | int, max_tokens: int, router: int = 0, image_rows: tuple[int, ...] = ()
    ) -> SimulatedRequest:
        """Let a request arrive at a router at a time. `prompt`: its tokens (int32 LE), or how many there are, with
        those of its images (`Arrival.image_rows`)."""
        num_tokens = prompt if isinstance(prompt, int) else len(prompt) // 4
        images = self._images(num_tokens, image_rows) if image_rows else ()
        request = SimulatedRequest(at_s, num_tokens, max_tokens, router=router, images=images)
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
                self.submit(arrival.at_s, arrival.prompt, arrival.max_tokens, image_rows=arrival.image_rows)
                self._num_due += 1
                self.at(arrival.at_s, follow)

        self._num_due += 1
        follow()

    def _arrive(self, request: SimulatedRequest, prompt: bytes | int) -> None:
        self._num_due -= 1
        self.open[request] = None
        self._send(request, self._own_prompt(prompt) if isinstance(prompt, int) else prompt)

    def _send(self, request: SimulatedRequest, token_ids: bytes) -> None:
        router = self.routers[request.router]
        if router is None:
            self._refuse(request, NoInstance("the router has ended"))
            return
        if router.requests.is_held:
            self._held.append((request, token_ids))
            return
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        asked = GenerateRequest("", token_ids, request.prompt_tokens, sampling, wake_per_token=False)
        asked.images = request.images
        try:
            request.generation = router.requests.add_request(asked, partial(self._look, request))
        except ChituError as error:
            self._refuse(request, error)

    def _refuse(self, request: SimulatedRequest, error: ChituError) -> None:
        request.error, request.is_rejected = error.code, True
        self._over(request)

    def _images(self, num_tokens: int, image_rows: tuple[int, ...]) -> tuple[ImagePart, ...]:
        """Return new images at the end of a prompt."""
        images, start = [], num_tokens - sum(image_rows) - 1
        for rows in image_rows:
            key = image_key(next(self._num_images).to_bytes(8, "little"), b"simulated")
            images.append(ImagePart(key, ((start, rows, 0),)))
            start += rows
        return tuple(images)

    @property
    def asked_encoders(self) -> SimulatedCluster | None:
        """This, if there are E that a P may ask (`TimedWorld`)."""
        return self if self.encoders else None

    def tell_routers(self, message: Join | Heartbeat) -> None:
        """Take what an E says (`EncoderWorld`)."""
        for router in filter(None, self.routers):
            take = router.take_stats if isinstance(message, Heartbeat) else router.take_coordination
            self.at(self.clock.now_s + self.network.message_s, take, message)

    def _own_prompt(self, num_tokens: int) -> bytes:
        return struct.pack("<i", next(self._prompts)) + bytes(4 * (num_tokens - 1))

    def cancel(self, request: SimulatedRequest) -> None:
        """Let the client of a request leave, if it is not over."""
        router = self.routers[request.router]
        if router is not None and request.generation is not None:
            router.requests.cancel(request.generation)
            self._look(request)

    def _look(self, request: SimulatedRequest) -> None:
        """Read a generation that is over."""
        generation = request.generation
        if generation is None or not generation.done:
            return
        request.num_tokens, request.cached_tokens = generation.num_emitted, generation.cached_tokens
        first = request.prompt_tokens
        request.is_right = generation.take() == list(range(first, first + generation.num_emitted))
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

    def stop(self) -> None:
        """Let `run` return after this event: enough is known."""
        self.is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Run until all requests are over and nobody changes its role or leaves, or until a virtual moment."""
        self.events.run(self._goes_on if until_s == math.inf else lambda: not self.is_stopped, until_s)

    def _goes_on(self) -> bool:
        return not self.is_stopped and bool(self.open or self._num_due or any(one.has_order for one in self.processes))

    def soon(self, act: Callable[[], None]) -> None:
        """Call `act` once what runs now is over (`RouterWorld`)."""
        self.at(self.clock.now_s, act)

    def _tick(self, end: SimulatedInstance | SimulatedRouter, is_alive: Callable[[], bool]) -> None:
        if not is_alive():
            return
        if end not in self._frozen:
            if isinstance(end, SimulatedRouter):
                end.tick()
                end.wake_for(sum(request.router == end.index for request, _ in self._held))
                self._release(end)
            else:
                end.keep_in_touch()
                end.look_at_life()
        self.at(self.clock.now_s + self._tick_s, self._tick, end, is_alive)

    def _release(self, router: SimulatedRouter) -> None:
        """Let those begin that have waited, if they need not any more."""
        if self._held and not router.requests.is_held:
            waiting = [(request, ids) for request, ids in self._held if request.router == router.index]
            self._held = [(request, ids) for request, ids in self._held if request.router != router.index]
            for request, ids in waiting:
                self._send(request, ids)

    # ---------------------------------------------------------------------------------------------------- the network

    def _deliver(self, end: SimulatedProcess | SimulatedRouter, act: Callable[..., object], *values: object) -> None:
        """Call `act` with the values, once the threads of this end run."""
        if end in self._frozen:
            self._frozen[end].append((act, values))
        else:
            act(*values)

    def _to(
        self,
        source: SimulatedProcess | SimulatedRouter,
        target: SimulatedProcess | SimulatedRouter | None,
        act: Callable[..., object],
        *values: object,
    ) -> None:
        if target is not None:
            ahead_s = source.clock.monotonic() - self.clock.now_s if isinstance(source, SimulatedProcess) else 0.0
            self.network.send(source, target, self._deliver, target, act, *values, ahead_s=ahead_s)

    def to_peer(self, source: SimulatedProcess, host: str, port: int, room: bytes, payload: bytes) -> None:
        target = next((one for one in self.processes if one.port == port), None)
        if target is not None:
            self._to(source, target, target.on_frame, room, payload)

    def to_token_port(self, source: SimulatedProcess, router: int, frame: bytes) -> bool:
        if (target := self.routers[router]) is not None:
            self._to(source, target, target.take_tokens, frame)
        return True

    def to_stats_port(self, source: SimulatedProcess, router: int, message: Heartbeat | RequestFailed) -> None:
        if (target := self.routers[router]) is not None:
            self._to(source, target, target.take_stats, message)

    def to_coordination_port(self, source: SimulatedProcess, router: int, message: Join | Drain | Leave) -> None:
        target = self.routers[router]
        if target is not None:
            self._to(source, target, self._coordinate, target, source, message)

    def _coordinate(self, router: SimulatedRouter, source: SimulatedProcess, message: Join | Drain | Leave) -> None:
        reply = router.take_coordination(message)
        if reply is not None and not source.is_gone:
            self._to(router, source, source.take_reply, router.index, reply)

    def to_request_port(self, source: SimulatedRouter, target: InstanceKey, frame: bytes) -> bool:
        process = self._by_incarnation.get(target.incarnation)
        if process is not None and not process.is_gone:
            self._to(source, process, self._receive, process, target.incarnation, frame)
        return True

    def _receive(self, process: SimulatedInstance, incarnation: int, frame: bytes) -> None:
        process.receive([scheduler_codec.decode(frame)])

    def to_views(self, source: SimulatedRouter, message: ViewMessage) -> None:
        for process in self.processes:
            if not process.is_deaf:
                self._to(source, process, process.take_view, source.index, message)

    def ask_for_view(self, source: SimulatedProcess, router: int) -> None:
        target = self.routers[router]
        if target is not None and not source.is_deaf:
            self._to(source, target, self._show, target, source)

    def _show(self, router: SimulatedRouter, process: SimulatedProcess) -> None:
        self._to(router, process, process.take_view, router.index, router.coordination.view)

    def receiver_of(self, incarnation: int) -> SimulatedInstance | None:
        process = self._by_incarnation.get(incarnation)
        return None if process is None or process.is_gone else process

    def rate_to(self, source: int, target: int) -> float:
        return self.network.rate(self._by_incarnation[source], self._by_incarnation[target])

    # ----------------------------------------------------------------------------------------------------- membership

    @property
    def router(self) -> PDRequestRouter:
        """The requests of the first router that runs."""
        return self.first_router.requests

    @property
    def first_router(self) -> SimulatedRouter:
        """The router that an operator asks: the first one that runs."""
        return next(router for router in self.routers if router is not None)

    @property
    def members(self) -> list[SimulatedInstance]:
        """The instances that run, by role and rank."""
        return sorted(self.processes, key=lambda one: (ROLES.index(one.role), one.rank))

    def loads(self) -> dict[str, LoadReport]:
        """Return the newest report of each instance as the first router has it, by name."""
        loads = self.first_router.coordination.loads()
        return {one.name: loads[one.role, one.rank] for one in self.processes if (one.role, one.rank) in loads}

    def find(self, name: str) -> SimulatedInstance:
        """Return the instance of a name such as `P0`. Raises ConfigError if there is none."""
        for instance in self.processes:
            if instance.name == name:
                return instance
        raise ConfigError(f"{name} is none of {', '.join(i.name for i in self.members)}")

    def new_incarnation(self) -> int:
        return next(self._incarnations)

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def start(self, role: Role, rank: int | None = None, *, is_here: bool = True) -> SimulatedInstance:
        """Start an instance, which joins soon, with all members of its profile; return the first. `rank`: of that one,
        by default the lowest that no process was started with or has. `is_here`: it runs on the routers' machine, which
        sees its death."""
        size = self._profiles[role].dp_size
        if rank is None:
            taken = {*self._places, *((one.role, one.rank) for one in self.processes)}
            rank = next(rank for rank in itertools.count(step=size) if (role, rank) not in taken)
        group = SimulatedGroup(self, self._profiles[role]) if size > 1 else None
        members = [self._start(role, rank + place, group, is_here) for place in range(size)]
        return members[0]

    def _start(self, role: Role, rank: int, group: SimulatedGroup | None, is_here: bool) -> SimulatedInstance:
        if (role, rank) not in self._places:
            self._places.append((role, rank))
        profile, scheduler = self._profiles[role], self._schedulers[role]
        process = SimulatedInstance(self, role, rank, profile, scheduler, is_here=is_here, group=group)
        self.processes.append(process)
        self.note_life(process)
        for index, router in enumerate(self.routers):
            if router is not None:
                self.ask_for_view(process, index)
        # Those of different processes are spread.
        self.at(
            self.clock.now_s + self._tick_s * (process.incarnation * 0.381966 % 1.0),
            *(self._tick, process, lambda: not process.is_gone),
        )
        return process

    def note_life(self, process: SimulatedProcess) -> None:
        """Note the incarnation of a process that has begun a life."""
        assert isinstance(process, SimulatedInstance)
        self._by_incarnation[process.incarnation] = process

    def add(self, role: Role) -> str:
        """Start an instance of a role, and return its name."""
        return self.start(role).name

    def start_router(self, index: int) -> SimulatedRouter:
        """Start the router of an index, in place of one that has ended."""
        router = self.routers[index] = SimulatedRouter(self, index, self._places)
        self.at(self.clock.now_s, self._tick, router, lambda: self.routers[index] is router)
        return router

    def decider(self, asked: int = 0) -> SimulatedRouter:
        """Return the router that decides who may leave, if the operator asks the router `asked`: the first living one
        that it knows of."""
        router = self.routers[asked] or self.first_router
        return self.routers[router.coordination.first_router] or router

    def drain(self, name: str, asked: int = 0) -> None:
        """Let an instance finish what it has, and leave. Raises LastInstance. `asked`: the router that is asked."""
        instance = self.find(name)
        self.decider(asked).drain(instance.role, instance.rank)

    def change_role(self, name: str, role: Role, asked: int = 0) -> InstanceInfo:
        """Let an instance finish what it has, and go on in another role, with its pages. Raises RoleRefused and
        LastInstance."""
        instance = self.find(name)
        return self.decider(asked).change_role(instance.role, instance.rank, role)

    # ---------------------------------------------------------------------------------------------------------- faults

    def on_gone(self, process: SimulatedProcess) -> None:
        self.processes = [one for one in self.processes if one is not process]
        self._dead_pids.add(process.info.pid)

    def kill(self, name: str) -> SimulatedInstance:
        """End an instance at once, without a word, and with it the members of its group. Where it runs, its death is
        seen."""
        process = self.find(name)
        group = process.group
        for member in [process] if group is None else [one for one in self.processes if one.group is group]:
            self._kill(member)
        return process

    def _kill(self, process: SimulatedInstance) -> None:
        info = process.info
        process.end()
        if info.pid_namespace:
            for router in filter(None, self.routers):
                self.at(
                    self.clock.now_s + DEATH_S,
                    *(router.coordination.on_death, info.role, info.engine_rank, info.incarnation),
                )

    def kill_router(self, index: int) -> None:
        """End a router. Its clients lose their requests; instances notice by its silence, or by the next one."""
        self.routers[index] = None
        for request in [one for one in self.open if one.router == index]:
            request.error, request.generation = "router_gone", None
            self._over(request)
        self._held = [(request, ids) for request, ids in self._held if request.router != index]

    def freeze(self, end: SimulatedInstance | SimulatedRouter) -> None:
        """Stop all threads of an instance or a router, as SIGSTOP does. What reaches it waits."""
        self._frozen.setdefault(end, [])
        end.is_frozen = True

    def thaw(self, end: SimulatedInstance | SimulatedRouter) -> None:
        """Let the threads go on."""
        end.is_frozen = False
        for act, values in self._frozen.pop(end, []):
            self._deliver(end, act, *values)
        if isinstance(end, SimulatedInstance):
            end.wake()
            end.beat_soon()
