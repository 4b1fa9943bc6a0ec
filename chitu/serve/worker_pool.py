"""The API processes of a router (`router.workers`), as the process that coordinates them sees them.

Owned by `Coordinator`, on its loop thread: start, greet, watch, start again, end. Nothing here waits for an API
process: what is sent to it is buffered, and one that hangs is first given no connections and later killed. An API
process over its lives is a slot (an index); each life is a `Worker` with an incarnation of its own.

Invariant: `incarnations` are those of the live ones that were ever ready; whoever leaves it is dead, or as good as.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chitu.config.schema import Topology
from chitu.errors import ConfigError
from chitu.http.cluster_source import WorkerReport
from chitu.launch.process import describe_exit
from chitu.protocol import Wire
from chitu.serve.connection_handover import ConnectionGate, give
from chitu.serve.worker_feed import (
    ConnectionsClosed,
    EndWorkers,
    Feed,
    ToCoordinator,
    Welcome,
    WorkerReady,
    WorkerStartFailed,
    packed,
    to_coordinator_codec,
)
from chitu.types import new_incarnation

log = logging.getLogger(__name__)

SILENT_S = 2.0
"""One that said nothing for so long (it reports every 0.5 s) gets no connections while another does better."""
HUNG_S = 20.0
"""And after so long it is killed."""
LAST_WORDS_S = 0.5
"""Without its feed it can do nothing any more, but end with an exit code of its own."""
START_S = 60.0
"""A start that takes longer has failed."""
STABLE_S = 60.0
"""After so long a life the next start is immediate again."""
MAX_STALL_S = 1.0
"""A longer gap between two ticks is a stall of this process, and nobody else's silence."""


@dataclass(slots=True, eq=False)
class Worker:
    """One life of an API process."""

    index: int
    incarnation: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    """Connections go through it."""
    started_s: float
    heard_s: float
    feed: Feed[ToCoordinator] | None = None
    is_ready: bool = False
    is_silent: bool = False
    num_open: int = 0
    report: WorkerReport | None = None
    """The newest."""

    def give(self, connection: socket.socket) -> bool:
        is_given = give(self.channel, connection)
        self.num_open += is_given
        return is_given

    def send(self, message: Wire) -> None:
        if self.feed is not None:
            self.feed.send(message)


@dataclass(slots=True)
class PoolEvents:
    """What the pool tells and asks its owner."""

    greeting: Callable[[], list[Wire]]
    """The cluster as it is, for a process that begins."""
    on_incarnations: Callable[[tuple[int, ...]], None]
    """Who lives has changed."""
    on_message: Callable[[Worker, ToCoordinator], None]
    on_ended: Callable[[Worker], None]


@dataclass(slots=True)
class _WorkerSlot:
    worker: Worker | None = None
    failures: int = 0
    restart_at_s: float | None = None


@dataclass(slots=True)
class WorkerPool:
    topology: Topology
    created_s: int
    gate: ConnectionGate
    events: PoolEvents
    _slots: list[_WorkerSlot] = field(default_factory=list)
    _corpses: list[Worker] = field(default_factory=list)
    """Killed or ended, to be waited for."""
    _starts: set[asyncio.Task[None]] = field(default_factory=set)
    _failed_start: str = ""
    _has_started: bool = False
    _is_ending: bool = False
    _last_tick_s: float = field(default_factory=time.monotonic)

    # ------------------------------------------------------------------------------------------------------- lives

    async def start(self) -> None:
        """Returns once all are ready. ConfigError where one ends before."""
        self._slots = [_WorkerSlot() for _ in range(self.topology.dp_config.router.workers)]
        await asyncio.gather(*(self._start(index) for index in range(len(self._slots))))
        while not all(slot.worker is not None and slot.worker.is_ready for slot in self._slots):
            if self._failed_start:
                self.kill()
                raise ConfigError(self._failed_start)
            await asyncio.sleep(0.01)
        self._has_started = True

    def end(self) -> None:
        """Ask all to drain and exit; the second time, not to wait."""
        self._is_ending = True
        self.broadcast(EndWorkers())

    @property
    def has_ended(self) -> bool:
        return not self._corpses and all(slot.worker is None for slot in self._slots)

    def kill(self) -> None:
        """Whatever is left."""
        self._is_ending = True
        for worker in [slot.worker for slot in self._slots if slot.worker is not None] + self._corpses:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            worker.process.wait()

    def tick(self) -> None:
        """Look after all of them."""
        now_s = time.monotonic()
        stall_s, self._last_tick_s = now_s - self._last_tick_s, now_s
        for worker in self._live():
            if stall_s > MAX_STALL_S:
                worker.heard_s += stall_s
            silent_s = now_s - worker.heard_s
            if worker.process.poll() is not None:
                self._on_gone(worker)
            elif silent_s > (HUNG_S if worker.is_ready else START_S):
                log.error("%s hangs: it said nothing for %.0f s and is killed", _name(worker), silent_s)
                worker.process.kill()
        for corpse in list(self._corpses):
            if corpse.process.poll() is not None:
                self._corpses.remove(corpse)
                self._bury(corpse)
            elif not self._is_ending and now_s - corpse.heard_s > LAST_WORDS_S:
                corpse.process.kill()
        for index, slot in enumerate(self._slots):
            if slot.restart_at_s is not None and now_s >= slot.restart_at_s and not self._is_ending:
                slot.restart_at_s = None
                task = asyncio.ensure_future(self._start(index))
                self._starts.add(task)
                task.add_done_callback(self._starts.discard)
        self._choose_takers(now_s)

    async def _start(self, index: int) -> None:
        slot = self._slots[index]
        try:
            process, feed_here, channel_here = _spawn()
        except OSError as error:
            if not self._has_started:
                raise ConfigError(f"API process {index} cannot be started: {error}") from error
            log.error("API process %d cannot be started (%s); it is tried again", index, error)
            self._start_later(slot)
            return
        now_s = time.monotonic()
        incarnation = new_incarnation()
        worker = slot.worker = Worker(index, incarnation, process, channel_here, now_s, now_s)
        worker.feed = await Feed.open(
            feed_here,
            to_coordinator_codec,
            lambda message: self._on_message(worker, message),
            lambda: self._on_gone(worker),
        )
        for message in (Welcome(self.topology, index, incarnation, self.created_s), *self.events.greeting()):
            worker.send(message)
        if self._is_ending:
            worker.send(EndWorkers())

    def _on_gone(self, worker: Worker) -> None:
        """Its feed or its process has ended: nothing of it is left but its exit code."""
        slot = self._slots[worker.index]
        if slot.worker is not worker:
            return
        slot.worker = None
        self._corpses.append(worker)
        worker.heard_s = time.monotonic()
        worker.channel.close()
        if worker.feed is not None:
            worker.feed.close()
        if time.monotonic() - worker.started_s > STABLE_S:
            slot.failures = 0
        self._start_later(slot)
        self._choose_takers(time.monotonic())
        if worker.is_ready:
            self.events.on_incarnations(self.incarnations)
        self.events.on_ended(worker)

    def _start_later(self, slot: _WorkerSlot) -> None:
        slot.failures += 1
        if not self._is_ending:
            slot.restart_at_s = time.monotonic() + min(10.0, 0.25 * 2 ** (slot.failures - 1))

    def _bury(self, worker: Worker) -> None:
        code = worker.process.returncode
        if self._is_ending and code == 0:
            return
        text = f"{_name(worker)} ended ({describe_exit(code)})"
        if not self._has_started and not self._failed_start:
            self._failed_start = f"{text} while it started"
        log.warning("%s", text)

    # ------------------------------------------------------------------------------------------------------- messages

    @property
    def incarnations(self) -> tuple[int, ...]:
        return tuple(worker.incarnation for worker in self.ready())

    def ready(self) -> list[Worker]:
        return [worker for worker in self._live() if worker.is_ready]

    def broadcast(self, message: Wire) -> None:
        self.send_to(self._live(), message)

    def send_to(self, workers: Iterable[Worker], message: Wire) -> None:
        frame = packed(message)
        for worker in workers:
            if worker.feed is not None:
                worker.feed.send_packed(frame)

    def _live(self) -> list[Worker]:
        return [slot.worker for slot in self._slots if slot.worker is not None]

    def _on_message(self, worker: Worker, message: ToCoordinator) -> None:
        worker.heard_s = time.monotonic()
        if isinstance(message, WorkerReady):
            log.info("%s is ready (token port %d)", _name(worker), message.token_port)
            worker.is_ready = True
            # The instances are told of it before it gets a request that it could send them.
            self.events.on_incarnations(self.incarnations)
            self._choose_takers(worker.heard_s)
        elif isinstance(message, WorkerStartFailed):
            log.error("%s: %s", _name(worker), message.message)
            if not self._has_started:
                self._failed_start = message.message
        elif isinstance(message, ConnectionsClosed):
            worker.num_open -= message.count
        else:
            if isinstance(message, WorkerReport):
                worker.report = message
            self.events.on_message(worker, message)

    def _choose_takers(self, now_s: float) -> None:
        ready = [] if self._is_ending else self.ready()
        for worker in ready:
            is_silent = now_s - worker.heard_s > SILENT_S
            if is_silent and not worker.is_silent:
                log.warning("%s said nothing for %g s; others get the new connections", _name(worker), SILENT_S)
            worker.is_silent = is_silent
        self.gate.set_takers([worker for worker in ready if not worker.is_silent] or ready)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """A new API process, and this side of its feed and its channel. OSError where the system gives no process or
    descriptor; nothing of it is left then."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        feed_here, feed_there = socket.socketpair()
        ours.enter_context(feed_here)
        theirs.enter_context(feed_there)
        channel_here, channel_there = socket.socketpair()
        ours.enter_context(channel_here)
        theirs.enter_context(channel_there)
        descriptors = (feed_there.fileno(), channel_there.fileno())
        argv = [sys.executable, "-m", "chitu.serve.worker", str(os.getpid()), *map(str, descriptors)]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        channel_here.setblocking(False)
        ours.pop_all()
        return process, feed_here, channel_here


def _name(worker: Worker) -> str:
    return f"API process {worker.index} (pid {worker.process.pid})"
