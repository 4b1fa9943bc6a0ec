"""Whole P and D and the network between them, driven by a script of faults."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from cluster_process import CONFIG, DEADLINES, Process, Writes, WriteWatch
from pd_node import PAGE_BYTES, mixed
from pd_world import Frame
from support.clock import FakeClock
from support.fake_transport import FakeFabric, Fault, FaultKind

from chitu.net.view_feed import ViewSender
from chitu.protocol import (
    ClusterView,
    Drain,
    Heartbeat,
    InstanceInfo,
    Join,
    Leave,
    LostInstance,
    RequestFailed,
    RequestPortMessage,
    SchedulerMessage,
)
from chitu.simulation.process import SimulatedProcess
from chitu.types import Role, instance_name, place_of, place_text

# ----------------------------------------------------------------------------------------------------------------------
# Commands of a script of faults: what an `Op` does to a `Cluster`. Commands of the router are methods of the world.


@dataclass(frozen=True)
class Op:
    """One line of a script; `a` and `b` select among existing objects, whatever their size."""

    kind: str
    a: int = 0
    b: int = 0


def play(world: Cluster, script: list[Op]) -> None:
    for op in script:
        if op.kind in OPS:
            OPS[op.kind](world, op.a, op.b)
        else:
            getattr(world, f"op_{op.kind}")(op.a, op.b)
        world.check()


# ------------------------------------------------------------------------------------------------------------ time


def run(world: Cluster, a: int, b: int) -> None:
    world.turns(1 + a % 8)


def pass_time(world: Cluster, a: int, b: int) -> None:
    """Advance the clock without a turn for any process."""
    world.advance((0.1, 0.3, 1.0, 3.1)[a % 4])


# --------------------------------------------------------------------------------- the network between P and D


def lose(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.pop(a % len(world.frames))


def double(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.insert(b % (len(world.frames) + 1), world.frames[a % len(world.frames)])


def delay(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.frames.append(world.frames.pop(a % len(world.frames)))


def hasten(world: Cluster, a: int, b: int) -> None:
    if world.frames:
        world.deliver(a % len(world.frames))


def fault(world: Cluster, a: int, b: int) -> None:
    world.fabric.inject(Fault((FaultKind.LATE, FaultKind.DROP)[a % 2]))


def flip(world: Cluster, a: int, b: int) -> None:
    """Flip a bit of a write, if all KV is verified."""
    if world.writes.verify_kv == "all":
        world.num_flips += 1
        world.fabric.inject(Fault(FaultKind.CORRUPT, byte=b % PAGE_BYTES))


def interrupt(world: Cluster, a: int, b: int) -> None:
    """Make the next write, gather or scatter take long, and cancel a request meanwhile."""
    world.interruptions.append(a)


def land(world: Cluster, a: int, b: int) -> None:
    world.fabric.release_late_writes()


# --------------------------------------------------------------------------------------------------- processes


def kill(world: Cluster, a: int, b: int) -> None:
    if len(world.processes) > 2:
        world.kill(_one_of(world, a))


def start(world: Cluster, a: int, b: int) -> None:
    if world.missing:
        world.start(a % len(world.missing))


def replace(world: Cluster, a: int, b: int) -> None:
    """Kill a process and start it again before the death is noticed."""
    world.kill(_one_of(world, a))
    world.start(len(world.missing) - 1)


def tell(world: Cluster, a: int, b: int) -> None:
    """Let launchers report to the router which processes have ended."""
    world.tell_deaths()


def freeze(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_frozen = not process.is_frozen


def slow(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_slow = not process.is_slow


def deafen(world: Cluster, a: int, b: int) -> None:
    process = _one_of(world, a)
    process.is_deaf = not process.is_deaf


def change(world: Cluster, a: int, b: int) -> None:
    """Ask a process to change its role, as the router does: not the last one of its role, and not to a place of
    another one. Staged transfers allow no change."""
    process = _one_of(world, a)
    others = [other for other in world.of(process.role) if other is not process and not world.is_changing(other)]
    if not world.is_changing(process) and others and world.writes.way == "direct":
        world.change_role(process)


def _one_of(world: Cluster, a: int) -> Process:
    return world.processes[a % len(world.processes)]


OPS: dict[str, Callable[[Cluster, int, int], None]] = {
    "run": run,
    "pass": pass_time,
    "lose": lose,
    "double": double,
    "delay": delay,
    "hasten": hasten,
    "fault": fault,
    "flip": flip,
    "interrupt": interrupt,
    "land": land,
    "kill": kill,
    "start": start,
    "replace": replace,
    "tell": tell,
    "freeze": freeze,
    "slow": slow,
    "deafen": deafen,
    "change": change,
}


# ----------------------------------------------------------------------------------------------------------------------
# Whole P and D and the network between them, in one thread and fake time, driven by a script of faults. A script is a
# list of `Op`. The same script gives the same run, so hypothesis can shrink it and print it;
# nothing else is random. P<->D frames may be lost, duplicated, delayed and reordered. Processes are killed, restarted,
# stopped, slow or deaf. Views are lost. Writes fail, complete late and land at any time (`cluster_process.py`). The
# router cancels, dies and comes back. `settle_down` ends all faults: then everything must end within the deadlines, and
# every page must be released. `Cluster` has no router: a world adds one, a plain one with every answer known, or
# the real one (`cluster_world.py`).


FIRST_ROUTER = 1
"""Incarnation of the first router."""
TURN_S = 0.01
MAX_LIVE_REQUESTS = 12
ANSWER_S = 0.5
"""Time in which peers answer once all faults have ended."""


class Cluster(ABC):
    process_type = Process
    config = CONFIG
    num_routers = 1
    returns_home = True
    """Whether processes that changed their role change it back when all faults end."""

    def __init__(self, num_prefill: int = 2, num_decode: int = 2, writes: Writes | None = None) -> None:
        self.clock = FakeClock(100.0)
        self.fabric = FakeFabric()
        self.watch = WriteWatch(self)
        self.fabric.on_write, self.fabric.on_land = self.watch.on_write, self.watch.on_land
        self.writes = writes or Writes()
        self.num_prefill = num_prefill
        self.num_flips = 0
        """Number of bits flipped in transfers."""
        self.interruptions: deque[int] = deque()
        """Requests to cancel, each in the middle of the next write, gather or scatter."""
        self.writing = b""
        self.stepping: list[Process] = []
        """Processes whose step thread is in the middle of a step."""
        self.frames: list[Frame] = []
        self.orders: deque[tuple[int, RequestPortMessage]] = deque()
        """Messages from the router to instances, by incarnation."""
        self.reports: deque[Callable[[], None]] = deque()
        """Messages from instances to the router, in order; they wait while it is away."""
        self.is_router_alive = True
        self.router_incarnation = FIRST_ROUTER
        self._sender = ViewSender(FIRST_ROUTER)
        self.told_dead: tuple[int, ...] = ()
        """Deaths that launchers reported to the current router."""
        self.joined: dict[int, InstanceInfo] = {}
        """Joins that the current router has, by incarnation."""
        self.members: dict[int, InstanceInfo] = {}
        """Instances of its view."""
        self._changing: dict[int, str] = {}
        """Places that processes are asked to take, by incarnation."""
        self._asking: list[Process] = []
        """Those that ask for a whole view."""
        self._incarnations = 0
        self._dead_pids: set[int] = set()
        """Pids of dead processes. An incarnation is its pid here."""
        self.missing: list[tuple[Role, int]] = []
        self.processes: list[Process] = [self.process_type(self, Role.PREFILL, k) for k in range(num_prefill)]
        self.processes += [self.process_type(self, Role.DECODE, m) for m in range(num_decode)]
        self.publish()
        self.turns(6)

    # -------------------------------------------------------------------------------------------- the router's part

    def publish(self) -> None:
        """Handle leases and deadlines and publish the view; every turn of the clock, as the real router repeats it. A
        plain membership: what the real one adds is in `test_fleet.py`."""
        if not self.is_router_alive:
            return
        now_s = self.clock.monotonic()
        living = {process.incarnation: process for process in self.processes}
        present = {
            incarnation: self._record(info)
            for incarnation, info in self.joined.items()
            if incarnation in living and now_s - living[incarnation].beat_s < DEADLINES.lease_s
        }
        if present != self.members:
            lost = [info for incarnation, info in self.members.items() if incarnation not in present]
            new = [info for incarnation, info in present.items() if incarnation not in self.members]
            self.members = present
            self.on_members(new, lost)
        self.router_tick()
        self.show(self.view())

    def _record(self, info: InstanceInfo) -> InstanceInfo:
        becomes = self._changing.get(info.incarnation)
        return info if becomes is None else msgspec.structs.replace(info, draining=True, becomes=becomes)

    def view(self) -> ClusterView:
        return ClusterView(self.router_incarnation, 0, tuple(self.members.values()), dead=self.told_dead)

    @abstractmethod
    def on_members(self, new: list[InstanceInfo], lost: list[InstanceInfo]) -> None:
        """Handle that instances joined or were lost; `members` has changed."""

    @abstractmethod
    def router_tick(self) -> None:
        """Apply the router's deadlines."""

    def end_router(self) -> None:
        """Forget what the router knew of instances."""
        self.joined, self.members, self._changing, self.told_dead = {}, {}, {}, ()

    def hand_over(self, process: Process, message: RequestPortMessage) -> None:
        """Handle the arrival of a router's message at a process."""
        process.receive([message])

    @abstractmethod
    def take_tokens(self, frame: bytes) -> None:
        """Handle a token message of a process."""

    @abstractmethod
    def take_failure(self, failed: RequestFailed) -> None:
        """Handle that a process gives a room up."""

    @abstractmethod
    def take_heartbeat(self, beat: Heartbeat) -> None:
        """Handle a heartbeat."""

    @abstractmethod
    def on_submit(self, process: Process, message: SchedulerMessage) -> None:
        """Handle that a request, or its cancellation, has arrived."""

    @abstractmethod
    def op_cancel(self, a: int, b: int) -> None:
        """Let a client leave."""

    @abstractmethod
    def op_router(self, a: int, b: int) -> None:
        """Let the router die, or come back."""

    @abstractmethod
    def open_requests(self) -> list[str]:
        """Describe the requests that have not ended."""

    # ------------------------------------------------------------------------------------------ what processes call

    def new_incarnation(self) -> int:
        """Return a small incarnation (ports are made from it), never twice, and in no order."""
        self._incarnations += 1
        return mixed(self._incarnations)

    @property
    def num_started(self) -> int:
        return self._incarnations

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def to_peer(self, source: SimulatedProcess, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.link(host, port, room, payload)

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.frames.append(Frame(port, room, payload))

    def to_token_port(self, source: SimulatedProcess, router: int, frame: bytes) -> bool:
        self.take_tokens(frame)
        return True

    def to_stats_port(self, source: SimulatedProcess, router: int, message: Heartbeat | RequestFailed) -> None:
        if isinstance(message, RequestFailed):
            self.take_failure(message)
        else:
            self.take_heartbeat(message)

    def to_coordination_port(self, source: SimulatedProcess, router: int, message: Join | Drain | Leave) -> None:
        assert isinstance(message, Join), "no process leaves by itself here"
        if self.is_router_alive:
            self.joined[source.incarnation] = message.instance
            for former in message.instance.former:
                self.joined.pop(former, None)

    def ask_for_view(self, source: SimulatedProcess, router: int) -> None:
        assert isinstance(source, Process)
        self._asking.append(source)

    def on_gone(self, process: SimulatedProcess) -> None:
        """Handle that a process ends, as it has to if a peer does not answer while its role changes."""
        assert isinstance(process, Process)
        self.kill(process)

    @property
    def num_changes(self) -> int:
        """Changes of role that are done."""
        return sum(process.num_changes for process in self.processes)

    def meanwhile(self) -> None:
        """Let the comm and transfer threads run between two layers of a step."""
        self.deliver(0)
        for process in self.processes:
            if not process.is_frozen:
                process.write()

    def wait_turn(self) -> None:
        """Let the comm threads and those of D run while a transfer thread of P waits for its peer."""
        for _ in range(len(self.frames)):
            self.deliver(0)
        for process in self.of(Role.DECODE):
            if not process.is_frozen:
                process.write()

    # --------------------------------------------------------------------------------------------------- processes

    def of(self, role: Role) -> list[Process]:
        return [process for process in self.processes if process.role is role]

    def kill(self, process: Process) -> None:
        self._dead_pids.add(process.pid)
        self.fabric.kill(process.session)
        self.processes.remove(process)
        self.missing.append(process.home)

    def change_role(self, process: Process) -> None:
        """Ask a process to take the other role: at home, or with the lowest rank that belongs to no process."""
        role = Role.DECODE if process.role is Role.PREFILL else Role.PREFILL
        taken = {*self.missing, *((p.role, p.rank) for p in self.processes)}
        taken |= {place_of(becomes) for becomes in self._changing.values()}
        taken |= {p.home for p in self.processes if p is not process}
        ranks = (rank for rank in itertools.count() if (role, rank) not in taken)
        place = process.home if process.home[0] is role else (role, next(ranks))
        self._changing[process.incarnation] = place_text(*place)
        self.publish()

    def is_changing(self, process: Process) -> bool:
        """Return whether a process is asked to change its role."""
        return process.has_order or process.incarnation in self._changing

    def start(self, index: int) -> Process:
        role, rank = self.missing.pop(index)
        self.processes.append(self.process_type(self, role, rank))
        self.publish()
        return self.processes[-1]

    def show(self, view: ClusterView) -> None:
        """Send the view to every process that hears it, as the router does: as changes, and whole to one that connects
        to a new router, or missed a change while it was frozen or deaf."""
        if self._sender.view.router_incarnation != view.router_incarnation:
            self._sender = ViewSender(view.router_incarnation)
        sender, known = self._sender, {(i.role, i.engine_rank): i for i in self._sender.view.instances}
        for info in view.instances:
            if known.pop((info.role, info.engine_rank), None) != info:
                sender.put(info)
        for info in known.values():
            sender.remove(info, LostInstance(info.incarnation, "it left", False))
        if new := [incarnation for incarnation in view.dead if incarnation not in sender.view.dead]:
            sender.note_dead(new)
        change = sender.next_change()
        asking, self._asking = self._asking, []
        for process in self.processes:
            if process.is_frozen or process.is_deaf:
                continue
            is_connecting = process.feed.view.router_incarnation != view.router_incarnation
            process.take_view(0, sender.view if is_connecting or process in asking else change)

    def tell_deaths(self) -> None:
        if self.is_router_alive and self.told_dead != tuple(sorted(self._dead_pids)):
            self.told_dead = tuple(sorted(self._dead_pids))

    # ------------------------------------------------------------------------------------------ time and the network

    def play(self, script: list[Op]) -> None:
        play(self, script)

    def turns(self, count: int) -> bool:
        """Give every part a turn, `count` times. Return False if no part had anything to do."""
        worked = False
        for _ in range(count):
            worked = bool(self.frames or self.orders or self.reports)
            for _ in range(min(3, len(self.orders))):
                self.deliver_order()
            for _ in range(min(3, len(self.frames))):
                self.deliver(0)
            for process in list(self.processes):
                if not process.is_frozen:
                    worked |= process.write()
                    worked |= not process.is_slow and self.step(process)
            self._hear()
            self.advance(TURN_S)
        return worked

    def _hear(self) -> None:
        """Let the router read the reports of instances."""
        while self.reports and self.is_router_alive:
            self.reports.popleft()()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now_s = self.clock.monotonic()
        for process in self.processes:
            if not process.is_frozen:
                process.beat_s = now_s
        self.publish()
        for process in self.processes:
            if not process.is_frozen:
                process.tick()

    def step(self, process: Process) -> bool:
        self.stepping.append(process)
        worked = process.step()
        self.stepping.remove(process)
        return worked

    def deliver(self, index: int) -> None:
        """Deliver one of the frames between P and D."""
        if not self.frames:
            return
        frame = self.frames.pop(index)
        process = next((p for p in self.processes if p.port == frame.port), None)
        if process is not None and process.is_frozen:
            self.frames.append(frame)
        elif process is not None:
            process.on_frame(frame.room, frame.payload)

    def deliver_order(self) -> bool:
        """Deliver the oldest message whose receiver reads; those of a stopped process wait in order."""
        living = {process.incarnation: process for process in self.processes}
        for at, (incarnation, message) in enumerate(self.orders):
            process = living.get(incarnation)
            if process is None or not process.is_frozen:
                del self.orders[at]
                if process is not None:
                    self.hand_over(process, message)
                return True
        return False

    # ----------------------------------------------------------------------------------------------------------- ends

    def check(self) -> None:
        for process in self.processes:
            process.check()

    def settle_down(self, limit_s: float = 30.0) -> None:
        """End all faults and revive all processes: every request must end, and everything must be released."""
        if not self.is_router_alive:
            self.op_router(0, 0)
        self._start_missing()
        for process in self.processes:
            process.is_frozen = process.is_slow = process.is_deaf = False
        self.fabric._faults.clear()
        self.interruptions.clear()
        born = {process.first_view[0] for process in self.processes} - {0, self.router_incarnation}
        if not all(born <= process.routers for process in self.processes if len(process.table)):
            # A process with rooms may have missed the router in whose view a peer first appeared: then no view tells it
            # when that peer's life began.
            self.tell_deaths()
        self.turns(3)  # every process joins again
        self.publish()  # which shows those that were frozen or deaf that they missed a change
        start_s = self.clock.monotonic()
        while self.leftovers():
            assert self.clock.monotonic() - start_s < limit_s, f"not quiet after {limit_s} s: {self.leftovers()}"
            self.fabric.release_late_writes()
            if self.missing:  # the wait of one that had to end was nearly over when the faults ended
                assert self.clock.monotonic() - start_s < ANSWER_S, f"{self.missing} ended although peers answer"
                self._start_missing()
            for process in self.processes:  # those that were started again are home: there might be no P, or no D
                if self.returns_home and not self.is_changing(process) and not process.is_home:
                    self.change_role(process)
            if not self.turns(3):
                self.advance(0.2)
            self._hear()  # otherwise a heartbeat would always be in flight, or the answer to one
            while self.deliver_order():
                pass
            self.check()
        for process in self.processes:
            process.check_empty()

    def _start_missing(self) -> None:
        """Start again what is gone, as a launcher does."""
        while self.missing:
            self.start(0)

    def leftovers(self) -> list[str]:
        left = self.open_requests() + [f"{instance_name(*home)} is gone" for home in self.missing]
        for process in self.processes:
            if self.is_changing(process) or (self.returns_home and not process.is_home):
                left.append(f"{process.session} has not become {process.becomes or process.home}")
            if self.is_router_alive and process.incarnation not in self.members:
                left.append(f"{process.session} has not joined")
            if not process.scheduler.is_idle:
                left.append(f"{process.session} has {[s.state.name for s in process.sequences().values()]}")
            if len(process.table):
                left.append(f"{process.session} keeps {[entry.state.name for _, entry in process.table.items()]}")
            if not process.feed.is_current:
                left.append(f"{process.session} missed a change of the view and has not asked for a whole one yet")
        return left or (["messages"] if self.frames or self.orders or self.reports else [])
