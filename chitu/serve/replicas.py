"""The router's other API processes (`router.workers` above 1), and what runs in each of them. Loop threads.

A replica (`python -m chitu.serve.replicas CONFIG INDEX INCARNATION CREATED_S TOKEN_PORT SOCKET`) is another copy of the
router's HTTP half, with a token port and a `PDRequestRouter` of its own. It learns about the cluster from the metadata
port, which carries the view and the instances' reports of loads and failures. Like an instance, it sends heartbeats to
the stats port. It ends on SIGTERM or SIGINT, or with the process that started it.

`ReplicaSet` belongs to `RouterProcess`. The `Supervisor` that launchers use starts, restarts and ends the replicas as
its children. Each has its own socket on the API's port; the kernel spreads connections over these sockets
(SO_REUSEPORT). This process made all of them and keeps them open. It accepts in place of a replica that is starting,
silent or dead, so no connection waits for a missing replica. Invariant: the cluster view names exactly the replicas
that live and have sent a heartbeat; one that leaves it is dead.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop
import zmq

from chitu.clock import Clock, RealClock
from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of
from chitu.config.load import dump_topology, load_topology
from chitu.config.schema import Topology
from chitu.config.topology import router_ports, with_router_ports
from chitu.errors import BadFrame, ChituError
from chitu.http.cluster_snapshot import Draining, Loads, RoleChange, RouterRecord, WeightsState, WorkerReport, report_of
from chitu.http.limits import HTTPLimits
from chitu.http.served_model import ServedModel
from chitu.http.server import HTTPServer, Listener, listen
from chitu.log import setup_logging
from chitu.net.aio import LINGER_MS, FrameReader
from chitu.net.curve import derive, make_context
from chitu.net.sockets import connect
from chitu.net.threads import end_process
from chitu.net.view_feed import ViewReceiver, ask_for_whole
from chitu.pd_request_router import PDRequestRouter
from chitu.process.child import ChildProcess, ProcessSpec
from chitu.process.progress import ProgressWriter
from chitu.process.supervisor import StartFailed, Supervisor
from chitu.protocol import (
    STATS_TOPIC,
    VIEW_TOPIC,
    ApiProcess,
    ClusterView,
    Heartbeat,
    InstanceInfo,
    LoadReport,
    ReplicaHeartbeat,
    RequestFailed,
    encode,
    stats_codec,
    view_codec,
)
from chitu.router.metrics import RouterMetrics
from chitu.router.policies import InstanceKey, instance_key
from chitu.router.weights import Pause
from chitu.serve.api_endpoint import ApiEndpoint, Ending, freeze_gc, keep_ticking, with_share
from chitu.serve.siblings import HOST, Siblings
from chitu.types import Role, new_incarnation

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5


class ReplicaCluster:
    """`ClusterSource` of a replica. `on_frames` takes messages of the metadata port. Any of them may be lost: what
    `feed` misses is asked for, and heartbeats and reports of failures are repeated."""

    def __init__(
        self,
        router: PDRequestRouter,
        index: int,
        siblings: Siblings,
        ports: Mapping[str, int],
        ask: Callable[[bytes], None] = lambda topic: None,
        clock: Clock = RealClock(),
    ) -> None:
        """`ports`: the router's ports by short key name. `ask` asks for a whole view, as `ask_for_whole` does."""
        self._router = router
        self._index = index
        self._siblings = siblings
        self._ports = ports
        self._ask = ask
        self._clock = clock
        self.feed = ViewReceiver(clock.monotonic())
        self._members: dict[InstanceKey, InstanceInfo] = {}
        self._loads: dict[InstanceKey, LoadReport] = {}
        self._is_behind = False
        """Whether the connection to an instance of the newest view failed."""
        self.view = self.feed.view

    def loads(self) -> Loads:
        return {key[:2]: self._loads.get(key, LoadReport()) for key in self._members}

    def ports(self) -> Mapping[str, int]:
        return self._ports

    def own_report(self) -> WorkerReport:
        return report_of(self._router, self._index, self.view)

    async def record(self) -> RouterRecord:
        others = await self._siblings.reports(self.view)
        return RouterRecord(tuple(sorted((self.own_report(), *others), key=lambda report: report.index)))

    async def drain(self, instance: str, force: bool) -> Draining:
        asked = msgspec.json.encode({"instance": instance, "force": force})
        reply = msgspec.json.decode(await self._siblings.ask_first("/admin/drain", asked))
        return Draining(reply["instance"], int(reply["incarnation"]))

    async def change_role(self, instance: str, role: Role, force: bool = False) -> RoleChange:
        asked = msgspec.json.encode({"instance": instance, "role": role, "force": force})
        reply = msgspec.json.decode(await self._siblings.ask_first("/admin/role", asked))
        return RoleChange(reply["instance"], int(reply["incarnation"]), reply["becomes"])

    async def change_weights(self, path: str, is_mixed: bool, timeout_s: float) -> WeightsState:
        asked = {"path": path, "mixed": is_mixed, "timeout_s": timeout_s}
        return await self._weights("/admin/weights", asked, timeout_s)

    async def pause(self, mode: Pause, timeout_s: float) -> WeightsState:
        asked = {"mode": mode, "timeout_s": timeout_s} if mode else {}
        return await self._weights("/admin/pause" if mode else "/admin/resume", asked, timeout_s)

    async def _weights(self, path: str, asked: Mapping[str, object], timeout_s: float) -> WeightsState:
        reply = await self._siblings.ask_first(path, msgspec.json.encode(asked), timeout_s)
        return msgspec.json.decode(reply, type=WeightsState)

    async def flush_caches(self) -> None:
        await self._siblings.ask_first("/admin/cache/flush", b"")

    def on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise BadFrame(f"a message of {len(frames)} frames on the metadata port; two are expected")
        if frames[0] != STATS_TOPIC:
            if self.feed.take(view_codec.decode(frames[1])):
                self.on_view(self.feed.view)
            elif self.feed.should_ask(self._clock.monotonic()):
                self._ask(self.feed.topic)
            return
        message = stats_codec.decode(frames[1])
        if isinstance(message, Heartbeat):
            key = InstanceKey(message.role, message.engine_rank, message.incarnation)
            if key in self._members:
                self._loads[key] = message.load
                self._router.on_heartbeat(message)
        elif isinstance(message, RequestFailed):
            self._router.on_request_failed(message)

    def on_view(self, view: ClusterView) -> None:
        if view is self.view and not self._is_behind:
            return
        self.view, self._is_behind = view, False
        self._siblings.on_view(view)
        before, self._members = self._members, {instance_key(instance): instance for instance in view.instances}
        for key in [key for key in self._members if key not in before]:
            try:
                self._router.on_joined(self._members[key])
            except ChituError as error:
                log.warning("no connection to %s: %s", key.name, error)
                del self._members[key]
                self._is_behind = True
        self._router.on_view(view)
        gone = [key for key in before if key not in self._members]
        why = {lost.incarnation: lost for lost in view.lost} if gone else {}
        for key in gone:
            lost = why.get(key.incarnation)
            reason, has_died = (lost.reason, lost.has_died) if lost else ("it left the cluster", False)
            self._loads.pop(key, None)
            self._router.on_lost(before[key], reason, has_died)


class ReplicaProcess:
    """The replica: everything that its process holds, on its loop."""

    def __init__(self, topology: Topology, numbers: Sequence[int], flush_log: Callable[[], None]) -> None:
        """`numbers`: as on the command line. Raises ConfigError."""
        index, self._incarnation, created_s, token_port, descriptor = numbers
        config = topology.dp_config.router
        self._deadlines = config.pd_disaggregation.deadlines
        self._flush_log = flush_log
        self._loop = asyncio.get_running_loop()
        secrets = derive(cluster_key_of(topology))
        self._context = context = make_context(secrets)
        ports = {key.rpartition(".")[2]: port for key, port in router_ports(config).items()}

        def cluster_of(router: PDRequestRouter, siblings: Siblings) -> ReplicaCluster:
            self.cluster = ReplicaCluster(router, index, siblings, ports, self._ask_for_whole)
            return self.cluster

        model = ServedModel.load(topology.model, created_s)
        topology = with_router_ports(with_share(topology, index), {"token_port": token_port})
        me = (index, self._incarnation)
        self._api = ApiEndpoint(topology, model, context, cluster_of, me, secrets)
        limits = HTTPLimits.of(topology.dp_config.router)
        shared = socket.socket(fileno=descriptor)
        self._http = HTTPServer(self._api.app, shared, [("x-chitu-worker", str(index))], limits)
        self._own = Listener(self._loop, listen(HOST, 0, "an API process"), self._http.adopt)
        self._view = connect(context, zmq.SUB, config.host, config.pd_disaggregation.metadata_sync_port)
        for topic in (VIEW_TOPIC, STATS_TOPIC, self.cluster.feed.topic):
            self._view.setsockopt(zmq.SUBSCRIBE, topic)
        self._stats = connect(context, zmq.PUSH, config.host, config.stats_port)
        self._ending = Ending()
        self._accepts = False
        self._next_beat_s = 0.0

    async def run(self) -> None:
        """Serve until a signal; then drain and close."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._api.start()
        reader = FrameReader(self._loop, self._view, self.cluster.on_frames)
        keep_ticking(self._api.tick, self._beat, self._flush_log)
        # Instances must know it before it has a request for them, and it must know them.
        while not any(process.incarnation == self._incarnation for process in self.cluster.view.workers):
            await asyncio.sleep(0.01)
        await self._http.start()
        self._own.resume()
        self._say(accepts=True)
        freeze_gc()
        ProgressWriter().ready(self._incarnation)
        await self._ending.is_due.wait()
        self._http.stop_accepting()
        # A client that connected a moment ago cannot know that this process ends; its siblings may go on.
        await self._api.drain(self._deadlines.drain_s, self._ending, refuses=False)
        self._own.close()
        await self._http.stop(1.0)
        self._api.close()
        reader.close()
        self._context.destroy(linger=LINGER_MS)
        self._flush_log()

    def _ask_for_whole(self, topic: bytes) -> None:
        ask_for_whole(self._view, topic)

    def _on_signal(self) -> None:
        self._ending.ask()
        self._say(accepts=False)

    def _say(self, *, accepts: bool) -> None:
        self._accepts, self._next_beat_s = accepts, 0.0

    def _beat(self) -> None:
        now_s = self._loop.time()
        if now_s < self._next_beat_s or self._stats.closed:
            return
        self._next_beat_s = now_s + HEARTBEAT_INTERVAL_S
        counted = msgspec.msgpack.encode(self._api.router.metrics())
        heartbeat = ReplicaHeartbeat(self._incarnation, self._own.port, counted, self._accepts)
        self._stats.send(encode(heartbeat), zmq.NOBLOCK)


async def _serve(topology: Topology, numbers: Sequence[int], flush_log: Callable[[], None]) -> None:
    await ReplicaProcess(topology, numbers, flush_log).run()
    end_process(0)  # uvloop would wait for the threads that read and write files


def main(argv: Sequence[str] | None = None) -> int:
    config, *rest = sys.argv[1:] if argv is None else argv
    numbers = [int(word) for word in rest]
    try:
        topology = load_topology(config)
        level = topology.log
        handler = setup_logging(f"router.{numbers[0]}", level.level, level.modules, level.format, deferred=True)
        uvloop.run(_serve(topology, numbers, handler.flush))
    except ChituError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


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
        """Make all replicas finish their requests, within `drain_s` or until `ending` is hurried, and end."""
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
        argv = (sys.executable, "-m", "chitu.serve.replicas", str(topology_file), *map(str, numbers))
        return ProcessSpec(name, self.topology.dp_config.router.host, argv, descriptors=(replica.socket.fileno(),))


if __name__ == "__main__":
    sys.exit(main())
