"""The router's other API processes (`router.workers` above 1), as the process that keeps the membership sees them.

Owned by `RouterProcess`, on its loop thread. The `Supervisor` that launchers use starts, restarts and ends them as its
children. Each is a replica of the API (`replica.py`) with its own socket on the API's port; the kernel spreads
connections over these sockets (SO_REUSEPORT). This process made all of them and keeps them open. It accepts in place of
a replica that is starting, silent or dead, so no connection waits for a missing replica.

Invariant: the cluster view names exactly the replicas that live and have sent a heartbeat; one that leaves it is dead.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of
from chitu.config.load import dump_topology
from chitu.config.schema import Topology
from chitu.http.server import Listener, listen
from chitu.process.child import ChildProcess, ProcessSpec
from chitu.process.supervisor import StartFailed, Supervisor
from chitu.protocol import ApiProcess, ReplicaHeartbeat
from chitu.router.metrics import RouterMetrics
from chitu.serve.lifetime import Ending
from chitu.serve.siblings import HOST
from chitu.types import new_incarnation

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 2.0
"""This process accepts the connections of a replica that sent no heartbeat for this long (it sends one every 0.5 s)."""
KILL_TIMEOUT_S = 20.0
"""A replica that sent no heartbeat for this long is killed."""
START_S = 60.0
"""A replica that is not ready this long after its start is killed."""
END_S = 2.0
"""Time that replicas may take to end beyond `drain_s`."""
MAX_STALL_S = 1.0
"""A longer gap between two ticks is a stall of this process and does not count as a replica's silence."""

_decode_metrics = msgspec.msgpack.Decoder(RouterMetrics).decode


@dataclass(slots=True)
class _Replica:
    """One API process over all its restarts. `child` and the fields below it are those of the current one."""

    index: int
    socket: socket.socket
    listener: Listener
    child: ChildProcess | None = None
    incarnation: int = 0
    heard_s: float = 0.0
    heartbeat: ReplicaHeartbeat | None = None
    """Newest heartbeat; None while the replica starts."""
    is_silent: bool = False

    @property
    def name(self) -> str:
        return f"router.{self.index}"


@dataclass(slots=True)
class ReplicaSet:
    topology: Topology
    """Topology with the router's actual ports."""
    incarnation: int
    """Incarnation of this process."""
    token_port: int
    """Token port as configured. Process i gets this port plus i, or any free one if it is 0."""
    created_s: int
    on_change: Callable[[tuple[ApiProcess, ...]], None]
    """Called with the live processes when they change; process 0 is the first."""
    on_ended: Callable[[RouterMetrics], None]
    """Called with the metrics of a process that died."""
    _replicas: list[_Replica] = field(default_factory=list)
    _own: Listener = field(init=False)
    """Listener on the port of this process alone, from `start` on."""
    _supervisor: Supervisor | None = None
    _failure: StartFailed | None = None
    _last_tick_s: float = field(default_factory=time.monotonic)

    async def start(self, sockets: Sequence[socket.socket], adopt: Callable[[socket.socket], None]) -> None:
        """Start one replica for each socket. Return once all are ready; StartFailed if one ends before. `adopt` gets
        the connections that are accepted in their place."""
        loop = asyncio.get_running_loop()
        self._own = Listener(loop, listen(HOST, 0, "an API process"), adopt)
        self._own.resume()
        self._replicas = [_Replica(i, sock, Listener(loop, sock, adopt)) for i, sock in enumerate(sockets, 1)]
        supervisor = self._supervisor = Supervisor(
            [replica.name for replica in self._replicas],
            lambda name: self._spec(name, supervisor.run_dir.path / "topology.yaml"),
            None,
            restart=True,
            on_event=lambda text: log.warning("%s", text),
            env={ENVIRONMENT_KEY: cluster_key_of(self.topology)},
        )
        supervisor.run_dir.keep("topology.yaml", dump_topology(self.topology))
        try:
            for replica in self._replicas:
                supervisor.start(replica.name)
            while not all(r.heartbeat is not None and r.heartbeat.accepts for r in self._replicas):
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(0.01)
        except BaseException:
            supervisor.stop(0.0)
            raise

    def on_heartbeat(self, heartbeat: ReplicaHeartbeat) -> None:
        for replica in self._replicas:
            if replica.incarnation == heartbeat.incarnation and replica.child is not None:
                is_news = replica.heartbeat is None
                replica.heartbeat, replica.heard_s = heartbeat, time.monotonic()
                if is_news:
                    log.info("%s is ready (pid %d)", replica.name, replica.child.pid)
                    self._tell()

    def tick(self) -> None:
        """Check all replicas. Call it often: what waits for a dead replica ends only when this notices the death."""
        if self._supervisor is None or self._failure is not None:
            return
        now_s = time.monotonic()
        stall_s, self._last_tick_s = now_s - self._last_tick_s, now_s
        try:
            self._supervisor.poll()
        except StartFailed as error:
            self._failure = error
            return
        for replica in self._replicas:
            child = self._supervisor.members[replica.name].child
            if child is not replica.child:
                self._begin_life(replica, child, now_s)
            if child is not None:
                self._watch(replica, child, now_s, stall_s)
            if replica.heartbeat is not None and replica.heartbeat.accepts and not replica.is_silent:
                replica.listener.pause()
            else:
                replica.listener.resume()

    async def end(self, drain_s: float, ending: Ending) -> None:
        """Make all replicas finish what they run, within `drain_s` or until `ending` is hurried, and end."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        children = [member.child for member in supervisor.members.values() if member.child is not None]
        for replica in self._replicas:
            replica.listener.close()
        for child in children:
            child.terminate()
        end_s, was_hurried = time.monotonic() + drain_s + END_S, False
        while any(child.exit_code() is None for child in children) and time.monotonic() < end_s:
            if ending.is_hurried.is_set() and not was_hurried:
                was_hurried = True
                for child in children:
                    child.terminate()
            await asyncio.sleep(0.02)
        supervisor.stop(0.0)
        self._own.close()

    def _begin_life(self, replica: _Replica, child: ChildProcess | None, now_s: float) -> None:
        last, replica.heartbeat, replica.child = replica.heartbeat, None, child
        replica.heard_s, replica.is_silent = now_s, False
        if last is not None:
            self._tell()
            self.on_ended(_decode_metrics(last.metrics))

    def _watch(self, replica: _Replica, child: ChildProcess, now_s: float, stall_s: float) -> None:
        if stall_s > MAX_STALL_S:
            replica.heard_s += stall_s
        silent_s = now_s - replica.heard_s
        is_ready = replica.heartbeat is not None
        if is_ready and (silent_s > HEARTBEAT_TIMEOUT_S) != replica.is_silent:
            replica.is_silent = silent_s > HEARTBEAT_TIMEOUT_S
            if replica.is_silent:
                log.warning(
                    "%s (pid %d): no heartbeat for %g s; process 0 accepts for it",
                    replica.name,
                    child.pid,
                    HEARTBEAT_TIMEOUT_S,
                )
        if silent_s > (KILL_TIMEOUT_S if is_ready else START_S):
            log.error("%s (pid %d) hangs: no heartbeat for %.0f s; killing it", replica.name, child.pid, silent_s)
            child.kill_tree()

    def _tell(self) -> None:
        """Publish all ready replicas. Instances learn of a replica before it has a request to send them."""
        ready = [(r.index, r.incarnation, r.heartbeat.port) for r in self._replicas if r.heartbeat is not None]
        first = ApiProcess(0, self.incarnation, self._own.port)
        self.on_change((first, *(ApiProcess(*process) for process in ready)))

    def _spec(self, name: str, topology_file: Path) -> ProcessSpec:
        replica = next(replica for replica in self._replicas if replica.name == name)
        replica.incarnation = new_incarnation()
        token_port = self.token_port + replica.index if self.token_port else 0
        numbers = (replica.index, replica.incarnation, self.created_s, token_port, replica.socket.fileno())
        argv = (sys.executable, "-m", "chitu.serve.replica", str(topology_file), *map(str, numbers))
        return ProcessSpec(name, self.topology.dp_config.router.host, argv, descriptors=(replica.socket.fileno(),))
