"""The half of the router that keeps the cluster's membership: coordination, stats, metadata sync, bootstrap.

The shell of `PDCoordination`: its sockets (ROUTER coordination, PUB metadata sync, PULL stats), the bootstrap server,
the time, and the processes of members on this machine, whose deaths it reports to the core. Owned by the process that
was started as the router, on its loop thread. It reports events to the request router of the same process; other API
processes (`router.workers`) read them from the metadata port. It has no part in the HTTP API or in requests. Invariant:
every message is decoded and checked before the core sees it; bad ones are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from chitu.clock import RealClock
from chitu.config.schema import RouterConfig
from chitu.errors import BadFrame, ConfigError
from chitu.http.server import HTTPServer, listen
from chitu.kv_transfer.bootstrap import BootstrapServer
from chitu.net.aio import FrameReader
from chitu.net.curve import ClusterSecrets
from chitu.net.process_deaths import ProcessDeaths, ProcessName
from chitu.net.sockets import MAX_SMALL_FRAME_BYTES, bind
from chitu.pd_coordination import CoordinationEvents, PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    STATS_TOPIC,
    VIEW_TOPIC,
    ClusterView,
    CoordinationReply,
    Drain,
    InstanceInfo,
    ReplicaHeartbeat,
    RequestFailed,
    TraceLines,
    coordination_codec,
    encode,
    stats_codec,
)
from chitu.router.metrics import CoordinationMetrics
from chitu.types import Role, new_incarnation

log = logging.getLogger(__name__)


class Membership:
    """The membership of one cluster. Binds at construction (port 0: OS-picked; ConfigError if that fails). Call
    `start`, then `tick` about every 50 ms."""

    def __init__(
        self,
        config: RouterConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        router: PDRequestRouter,
        secrets: ClusterSecrets | None,
        on_replica: Callable[[ReplicaHeartbeat], None] | None,
        on_trace: Callable[[TraceLines], None],
    ) -> None:
        """Call on the running loop. `on_replica`: None if the router is one process."""
        pd = config.pd_disaggregation
        self._interval_s = pd.deadlines.heartbeat_interval_s
        self._clock = clock = RealClock()
        self._router = router
        self._on_replica = on_replica
        self._on_trace = on_trace
        self._loop = asyncio.get_running_loop()
        events = CoordinationEvents(
            on_joined=router.on_joined,
            on_lost=router.on_lost,
            on_change=self._on_view,
            on_heartbeat=router.on_heartbeat,
        )
        self.coordination = core = PDCoordination(clock, pd.deadlines, new_incarnation(), events)

        def open_port(kind: int, port: int) -> tuple[zmq.Socket[bytes], int]:
            return bind(context, kind, config.host, port, MAX_SMALL_FRAME_BYTES)

        try:
            self._socket, self._coordination_port = open_port(zmq.ROUTER, pd.coordination_port)
            self._pub, self._metadata_sync_port = open_port(zmq.PUB, pd.metadata_sync_port)
            self._stats, self._stats_port = open_port(zmq.PULL, config.stats_port)
        except zmq.ZMQError as error:
            raise ConfigError(f"dp_config.router: cannot listen on {error}") from error
        self._bootstrap_http = HTTPServer(
            BootstrapServer(lambda: core.view, secrets).app,
            listen(config.host, pd.bootstrap_port, "dp_config.router.pd_disaggregation.bootstrap_port"),
        )
        self._readers: list[FrameReader] = []
        self._deaths: ProcessDeaths[tuple[Role, int, int]] = ProcessDeaths(
            self._loop, lambda instance: core.on_death(*instance)
        )
        self._next_publish_s = 0.0

    async def start(self) -> None:
        """Return once every port accepts connections."""
        self._readers = [
            FrameReader(self._loop, self._socket, self._on_coordination),
            FrameReader(self._loop, self._stats, self._on_stats),
        ]
        await self._bootstrap_http.start()

    def port_table(self) -> dict[str, int]:
        return {
            "stats_port": self._stats_port,
            "coordination_port": self._coordination_port,
            "metadata_sync_port": self._metadata_sync_port,
            "bootstrap_port": self._bootstrap_http.port,
        }

    def tick(self) -> None:
        """Check the leases, and repeat the view when it is due."""
        self.coordination.tick()
        if self._clock.monotonic() >= self._next_publish_s:
            self._publish(self.coordination.view)

    def metrics(self) -> CoordinationMetrics:
        """Return the core's metrics, with the counts of messages that could not be decoded."""
        bad_frames = {name: r.bad_messages for name, r in zip(("coordination", "stats"), self._readers, strict=True)}
        return msgspec.structs.replace(self.coordination.metrics(), bad_frames=bad_frames)

    def request_drain(self, role: Role, engine_rank: int) -> None:
        """Send an instance no new requests, and ask it to finish what it runs and leave. Does nothing if it is not a
        member. The message is only faster than the view, which repeats the same until the instance has left.
        """
        found = self.coordination.drain(role, engine_rank)
        if found is not None:
            identity, info = found
            self._send(identity, Drain(role, engine_rank, info.incarnation))
            self._readers[0].poke()

    async def stop(self, timeout_s: float) -> None:
        await self._bootstrap_http.stop(timeout_s)
        self._deaths.close()
        for reader in self._readers:
            reader.close()
        for socket in (self._socket, self._pub, self._stats):
            socket.close(linger=0)

    def _publish(self, view: ClusterView) -> None:
        """Publish the view, and watch the processes of its members. Do nothing after `stop`: the router's timer runs
        until the process ends."""
        self._next_publish_s = self._clock.monotonic() + self._interval_s
        if not self._pub.closed:
            self._deaths.follow({(i.role, i.engine_rank, i.incarnation): _process(i) for i in view.instances})
            self._pub.send_multipart([VIEW_TOPIC, encode(view)], zmq.NOBLOCK)

    def _on_view(self, view: ClusterView) -> None:
        self._router.on_view(view)
        self._publish(view)

    def _on_coordination(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise BadFrame(f"a coordination message of {len(frames)} frames; two are expected (identity, payload)")
        reply = self.coordination.on_message(coordination_codec.decode(frames[1]), frames[0])
        if reply is not None:
            self._send(frames[0], reply)

    def _send(self, identity: bytes, reply: CoordinationReply) -> None:
        try:
            self._socket.send_multipart([identity, encode(reply)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("cannot queue the reply to a joining instance: its socket is full; it will retry")

    def _on_stats(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise BadFrame(f"a stats message of {len(frames)} frames; one is expected")
        message = stats_codec.decode(frames[0])
        if isinstance(message, ReplicaHeartbeat):
            if self._on_replica is not None:
                self._on_replica(message)
            return
        if isinstance(message, TraceLines):
            if self.coordination.knows(message.role, message.engine_rank, message.incarnation):
                self._on_trace(message)
            return
        if isinstance(message, RequestFailed):
            self._router.on_request_failed(message)
        elif not self.coordination.on_heartbeat(message):
            return
        if self._on_replica is not None:  # each process knows its own rooms, and what it received of their requests
            self._pub.send_multipart([STATS_TOPIC, frames[0]], zmq.NOBLOCK)


def _process(info: InstanceInfo) -> ProcessName:
    return ProcessName(info.pid_namespace, info.pid, info.start_ticks)
