"""The sockets of membership around `PDCoordination`: ROUTER coordination, PUB metadata sync, PULL stats.

Owned by `Membership`, on the router's loop thread. Also watches the processes of members on this machine and reports
their deaths to the core. Invariant: every message is decoded and checked before the core sees it; bad ones are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from chitu.errors import BadFrame
from chitu.net.aio import FrameReader
from chitu.net.process_deaths import ProcessDeaths, ProcessName
from chitu.net.sockets import MAX_SMALL_FRAME_BYTES, bind
from chitu.pd_coordination import PDCoordination
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
from chitu.types import Role

log = logging.getLogger(__name__)


def _process(info: InstanceInfo) -> ProcessName:
    return ProcessName(info.pid_namespace, info.pid, info.start_ticks)


class CoordinationPorts:
    """The three sockets of membership. Binds at construction (port 0: OS-picked); zmq.ZMQError if that fails."""

    def __init__(
        self,
        core: PDCoordination,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        ports: tuple[int, int, int],
        on_request_failed: Callable[[RequestFailed], None],
        on_replica: Callable[[ReplicaHeartbeat], None] | None,
        on_trace: Callable[[TraceLines], None],
    ) -> None:
        """Call on the running loop. `ports`: coordination, metadata sync, stats. `on_replica`: None if the router is
        one process."""
        self._on_request_failed = on_request_failed
        self._on_replica = on_replica
        self._on_trace = on_trace
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._router, self.coordination_port = bind(context, zmq.ROUTER, host, ports[0], MAX_SMALL_FRAME_BYTES)
        self._pub, self.metadata_sync_port = bind(context, zmq.PUB, host, ports[1], MAX_SMALL_FRAME_BYTES)
        self._stats, self.stats_port = bind(context, zmq.PULL, host, ports[2], MAX_SMALL_FRAME_BYTES)
        self._readers: list[FrameReader] = []
        self._deaths: ProcessDeaths[tuple[Role, int, int]] = ProcessDeaths(
            self._loop, lambda instance: core.on_death(*instance)
        )

    def start(self) -> None:
        """Start passing messages to `core`."""
        self._readers = [
            FrameReader(self._loop, self._router, self._on_coordination),
            FrameReader(self._loop, self._stats, self._on_stats),
        ]

    def publish(self, view: ClusterView) -> None:
        """Publish the view, and watch the processes of its members. Do nothing after `close`: the router's timer runs
        until the process ends."""
        if self._pub.closed:
            return
        self._deaths.follow({(i.role, i.engine_rank, i.incarnation): _process(i) for i in view.instances})
        self._pub.send_multipart([VIEW_TOPIC, encode(view)], zmq.NOBLOCK)

    def request_drain(self, role: Role, engine_rank: int) -> bool:
        """Send an instance no new requests, and ask it to finish what it runs and leave. False if it is not a member.

        The message is only faster than the view, which repeats the same until the instance has left.
        """
        found = self._core.drain(role, engine_rank)
        if found is None:
            return False
        identity, info = found
        self._send(identity, Drain(role, engine_rank, info.incarnation))
        self._readers[0].poke()
        return True

    def metrics(self) -> CoordinationMetrics:
        """Return the core's metrics, with the counts of messages that could not be decoded."""
        bad_frames = {name: r.bad_messages for name, r in zip(("coordination", "stats"), self._readers, strict=True)}
        return msgspec.structs.replace(self._core.metrics(), bad_frames=bad_frames)

    def close(self) -> None:
        self._deaths.close()
        for reader in self._readers:
            reader.close()
        for socket in (self._router, self._pub, self._stats):
            socket.close(linger=0)

    def _on_coordination(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise BadFrame(f"a coordination message of {len(frames)} frames; two are expected (identity, payload)")
        reply = self._core.on_message(coordination_codec.decode(frames[1]), frames[0])
        if reply is not None:
            self._send(frames[0], reply)

    def _send(self, identity: bytes, reply: CoordinationReply) -> None:
        try:
            self._router.send_multipart([identity, encode(reply)], zmq.NOBLOCK)
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
            if self._core.knows(message.role, message.engine_rank, message.incarnation):
                self._on_trace(message)
            return
        if isinstance(message, RequestFailed):
            self._on_request_failed(message)
        elif not self._core.on_heartbeat(message):
            return
        if self._on_replica is not None:  # each process knows its own rooms, and what it received of their requests
            self._pub.send_multipart([STATS_TOPIC, frames[0]], zmq.NOBLOCK)
