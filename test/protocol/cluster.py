"""Whole P and D and the network between them, in one thread and fake time, driven by a script of faults.

A script is a list of `Op` (`cluster_script.py`); the same script gives the same run, so hypothesis can shrink it and
print it. Nothing else is random. P<->D frames may be lost, doubled, delayed and reordered; processes are killed,
started anew, stopped, slow or deaf; views are lost; writes fail, come late and land whenever (`cluster_writes.py`); the
router cancels, dies and comes back. `settle_down` ends all faults: then everything must end within the deadlines, and
every page come back.

`Cluster` has no router: a world adds one, a plain one with every answer known (`cluster_world.py`), or the real one
(`routed_world.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from cluster_process import Process
from cluster_script import Op, play
from cluster_writes import Writes, WriteWatch
from pd_node import mixed
from pd_world import Frame

from chitu.errors import ChituError
from chitu.protocol import RequestPortMessage
from chitu.testing.clock import FakeClock
from chitu.testing.fake_transport import FakeFabric
from chitu.types import Role

FIRST_ROUTER = 1
"""Its incarnation."""
TURN_S = 0.01
MAX_LIVE_REQUESTS = 12


class Cluster(ABC):
    process_type = Process

    def __init__(self, num_prefill: int = 2, num_decode: int = 2, writes: Writes | None = None) -> None:
        self.clock = FakeClock(100.0)
        self.fabric = FakeFabric()
        self.watch = WriteWatch(self)
        self.fabric.on_write, self.fabric.on_land = self.watch.on_write, self.watch.on_land
        self.writes = writes or Writes()
        self.num_prefill = num_prefill
        self.num_flips = 0
        """Bits that were flipped on the way."""
        self.interruptions: deque[int] = deque()
        """Each cancels a request in the middle of the next write, gather or scatter."""
        self.writing = b""
        self.stepping: list[Process] = []
        """Whose step thread is in the middle of a step."""
        self.frames: list[Frame] = []
        self.orders: deque[tuple[int, RequestPortMessage]] = deque()
        """Router -> instances, by incarnation."""
        self.reports: deque[Callable[[], None]] = deque()
        """Instances -> router, in order; they wait while it is away."""
        self.is_router_alive = True
        self.router_incarnation = FIRST_ROUTER
        self.view_version = 0
        self.told_dead: tuple[int, ...] = ()
        """What launchers told the present router."""
        self._incarnations = 0
        self._dead_pids: set[int] = set()
        """An incarnation is its pid here."""
        self.missing: list[tuple[Role, int]] = []
        self.processes: list[Process] = [self.process_type(self, Role.PREFILL, k) for k in range(num_prefill)]
        self.processes += [self.process_type(self, Role.DECODE, m) for m in range(num_decode)]
        self.publish()
        self.turns(6)

    # -------------------------------------------------------------------------------------------- the router's part

    @abstractmethod
    def publish(self) -> None:
        """Leases, deadlines and the view; every turn of the clock, as the real one repeats it."""

    @abstractmethod
    def hand_over(self, process: Process, message: RequestPortMessage) -> None:
        """A message of the router has come to a process."""

    @abstractmethod
    def take_tokens(self, frame: bytes) -> bool:
        """A process sends a token message."""

    @abstractmethod
    def take_failure(self, process: Process, room: bytes, error: ChituError) -> None:
        """A process gives a room up."""

    @abstractmethod
    def op_cancel(self, a: int, b: int) -> None:
        """A client is gone."""

    @abstractmethod
    def op_router(self, a: int, b: int) -> None:
        """It dies, or comes back."""

    @abstractmethod
    def open_requests(self) -> list[str]:
        """Requests that have not ended, in words."""

    # ------------------------------------------------------------------------------------------ what processes call

    def next_incarnation(self) -> int:
        """Small (ports are made of them), never twice, and in no order."""
        self._incarnations += 1
        return mixed(self._incarnations)

    @property
    def num_started(self) -> int:
        return self._incarnations

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.frames.append(Frame(port, room, payload))

    def meanwhile(self) -> None:
        """Between two layers of a step: the comm and transfer threads go on."""
        self.deliver(0)
        for process in self.processes:
            if not process.is_frozen:
                process.write()

    def wait_turn(self) -> None:
        """A transfer thread of P waits for its peer: the comm threads and those of D go on."""
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
        self.missing.append((process.role, process.rank))

    def start(self, index: int) -> Process:
        role, rank = self.missing.pop(index)
        self.processes.append(self.process_type(self, role, rank))
        self.publish()
        return self.processes[-1]

    def tell_deaths(self) -> None:
        if self.is_router_alive and self.told_dead != tuple(sorted(self._dead_pids)):
            self.told_dead = tuple(sorted(self._dead_pids))
            self.view_version += 1

    # ------------------------------------------------------------------------------------------ time and the network

    def play(self, script: list[Op]) -> None:
        play(self, script)

    def turns(self, count: int) -> bool:
        """Everybody does something; False where nobody had anything to do."""
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
        """The router reads what instances told it."""
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
                process.tick(now_s)

    def step(self, process: Process) -> bool:
        self.stepping.append(process)
        worked = process.step()
        self.stepping.remove(process)
        return worked

    def deliver(self, index: int) -> None:
        """One of the frames between P and D."""
        if not self.frames:
            return
        frame = self.frames.pop(index)
        process = next((p for p in self.processes if p.port == frame.port), None)
        if process is not None and process.is_frozen:
            self.frames.append(frame)
        elif process is not None:
            process.on_frame(frame.room, frame.payload)

    def deliver_order(self) -> bool:
        """The oldest one of a process that reads; those of one that is stopped wait in their order."""
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
        """No more faults, all alive: every request must end, and everything come back."""
        if not self.is_router_alive:
            self.op_router(0, 0)
        while self.missing:
            self.start(0)
        for process in self.processes:
            process.is_frozen = process.is_slow = process.is_deaf = False
        self.fabric._faults.clear()
        self.interruptions.clear()
        born = {process.first_view[0] for process in self.processes} - {0, self.router_incarnation}
        if not all(born <= process.routers for process in self.processes if len(process.table)):
            # Of a life that was new to a router which one with rooms never heard no view says when it began.
            self.tell_deaths()
        self.turns(3)  # all join again
        start_s = self.clock.monotonic()
        while self.leftovers():
            assert self.clock.monotonic() - start_s < limit_s, f"not quiet after {limit_s} s: {self.leftovers()}"
            self.fabric.release_late_writes()
            if not self.turns(3):
                self.advance(0.2)
            self._hear()  # or a heartbeat would always be on its way
            self.check()
        for process in self.processes:
            process.check_empty()

    def leftovers(self) -> list[str]:
        left = self.open_requests()
        for process in self.processes:
            if not process.scheduler.is_idle:
                left.append(f"{process.session} has {[s.state.name for s in process.sequences().values()]}")
            if len(process.table):
                left.append(f"{process.session} keeps {[entry.state.name for _, entry in process.table.items()]}")
        return left or (["messages"] if self.frames or self.orders or self.reports else [])
