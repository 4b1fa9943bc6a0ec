"""Another API process of the router: `python -m chitu.serve.replica CONFIG INDEX INCARNATION CREATED_S TOKEN_PORT
SOCKET`.

Only `ReplicaSet` starts it, with an inherited socket on the API's port. It is another copy of the router's HTTP half,
with a token port and a `PDRequestRouter` of its own. It learns about the cluster from the metadata port, which carries
the view and the instances' reports of loads and failures. Like an instance, it sends heartbeats to the stats port. It
ends on SIGTERM or SIGINT, or with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
import uvloop
import zmq

from chitu.clock import Clock, RealClock
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import router_ports, with_router_ports
from chitu.errors import BadFrame, ChituError
from chitu.http.cluster_snapshot import Draining, Loads, RouterRecord, WorkerReport, report_of
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
from chitu.process.progress import ProgressWriter
from chitu.protocol import (
    STATS_TOPIC,
    VIEW_TOPIC,
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
from chitu.router.policies import InstanceKey, instance_key
from chitu.serve.api_endpoint import ApiEndpoint, freeze_gc, with_share
from chitu.serve.lifetime import Ending, keep_ticking
from chitu.serve.siblings import HOST, Siblings

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


if __name__ == "__main__":
    sys.exit(main())
