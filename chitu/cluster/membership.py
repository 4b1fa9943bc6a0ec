"""The half of the router that keeps the cluster's membership: coordination, stats, metadata sync.

The shell of `PDCoordination`: its sockets (ROUTER coordination, XPUB metadata sync, PULL stats), the time, and the
processes of members on this machine, whose deaths it reports to the core. Owned by the router process, on its loop
thread. It reports events to the request router, and writes the trace records that instances send. It has no part in
requests, but that it sends instances the files of their images; the HTTP API asks it through `Cluster`.

Invariants: every message is decoded and checked before the core sees it; bad ones are counted. Changes of the view are
published at most every `GATHER_S`, together, and routed by from then on; a loss counts at once. Nothing here but a
whole view for a reader that asks has the size of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from itertools import islice

import msgspec
import zmq

from chitu.clock import RealClock
from chitu.config.schema import RouterConfig
from chitu.config.topology import places, router_hosts
from chitu.errors import BadFrame, ConfigError
from chitu.net.aio import FrameReader
from chitu.net.process_deaths import ProcessDeaths, ProcessName
from chitu.net.sockets import MAX_SMALL_FRAME_BYTES, bind
from chitu.net.view_feed import Readers
from chitu.pd_coordination import PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    CoordinationReply,
    Drain,
    FetchImage,
    ImageFile,
    InstanceInfo,
    RequestFailed,
    TraceLines,
    coordination_codec,
    encode,
    encode_for,
    stats_codec,
    view_topic,
)
from chitu.protocol.profile import ProfileOrder
from chitu.router.metrics import CoordinationMetrics
from chitu.tracing.trace_files import TraceFiles
from chitu.types import Role, instance_name, new_incarnation

logger = logging.getLogger(__name__)

GATHER_S = 0.02
"""Shortest time between two changes of the view. A lone one is published at once."""
MAX_WHOLES = 32
"""Whole views sent in that time, so that the many readers that ask after a broken network delay nothing else: 0.6 GB/s
to 2,000 instances."""


class Membership:
    """The membership of one cluster. Binds at construction (port 0: OS-picked; ConfigError if that fails). Call
    `start`, then `tick` about every 50 ms."""

    def __init__(
        self,
        config: RouterConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        router: PDRequestRouter,
        traces: TraceFiles,
        index: int = 0,
        find_file: Callable[[bytes], bytes | None] = lambda key: None,
    ) -> None:
        """Call on the running loop. `index`: that of this router in `router.hosts`. `find_file` returns the file of an
        image of a running request."""
        pd = config.pd_disaggregation
        self.interval_s = pd.deadlines.heartbeat_interval_s
        self._clock = clock = RealClock()
        self._router = router
        self._traces = traces
        self._find_file = find_file
        self._suffix = f".{index}" if index else ""  # several routers may share the folder
        self._loop = asyncio.get_running_loop()
        self.coordination = PDCoordination(
            clock,
            pd.deadlines,
            new_incarnation(),
            self,
            places(config),
            index,
            len(router_hosts(config)),
        )

        def open_port(kind: int, port: int) -> tuple[zmq.Socket[bytes], int]:
            return bind(context, kind, config.host, port, MAX_SMALL_FRAME_BYTES)

        try:
            self._socket, self._coordination_port = open_port(zmq.ROUTER, pd.coordination_port)
            self._pub, self._metadata_sync_port = open_port(zmq.XPUB, pd.metadata_sync_port)
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # a reader's new connection asks although its old one is open
            self._stats, self._stats_port = open_port(zmq.PULL, config.stats_port)
        except zmq.ZMQError as error:
            raise ConfigError(f"dp_config.router: cannot listen on {error}") from error
        self._readers: dict[str, FrameReader] = {}
        self._deaths: ProcessDeaths[tuple[Role, int, int]] = ProcessDeaths(self._loop, self._on_death)
        self._asked = Readers()
        self._published_s = self._next_beat_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start reading."""
        self._readers = {
            "coordination": FrameReader(self._loop, self._socket, self._on_coordination),
            "stats": FrameReader(self._loop, self._stats, self._on_stats),
            "metadata_sync": FrameReader(self._loop, self._pub, self._on_subscription),
        }

    def port_table(self) -> dict[str, int]:
        return {
            "stats_port": self._stats_port,
            "coordination_port": self._coordination_port,
            "metadata_sync_port": self._metadata_sync_port,
        }

    def tick(self) -> None:
        """Check the leases, and repeat the number of the view when it is due."""
        if self._readers and not self._pub.closed:
            self.coordination.tick(self._readers["stats"].read_until_s())
            self._readers["metadata_sync"].poke()  # what was published may have swallowed a wake-up
        if self._clock.monotonic() >= self._next_beat_s:
            self._publish()

    def metrics(self) -> CoordinationMetrics:
        """Return the core's metrics, with the counts of messages that could not be decoded."""
        bad_frames = {name: self._readers[name].bad_messages for name in ("coordination", "stats")}
        return msgspec.structs.replace(self.coordination.metrics(), bad_frames=bad_frames)

    def request_drain(self, role: Role, engine_rank: int) -> None:
        """Send an instance no new requests, and ask it to finish its requests and leave. Does nothing if it is not a
        member. The message is only faster than the view, which repeats the same until the instance has left.
        """
        found = self.coordination.drain(role, engine_rank)
        if found is not None:
            identity, info = found
            self._send(identity, Drain(role, engine_rank, info.incarnation))
            self._readers["coordination"].poke()
            self._publish()

    def request_profile(self, info: InstanceInfo, order: ProfileOrder) -> None:
        """Ask a member to record what it computes."""
        self._send(self.coordination.connection(info), order)
        self._readers["coordination"].poke()

    def change_role(self, role: Role, engine_rank: int, wanted: Role, force: bool) -> InstanceInfo:
        """Have a member change its role, as `PDCoordination.change_role` does. The view alone tells it."""
        info = self.coordination.change_role(role, engine_rank, wanted, is_revocable=not force)
        self._publish()
        return info

    def close(self) -> None:
        self._deaths.close()
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._readers.values():
            reader.close()
        for socket in (self._socket, self._pub, self._stats):
            socket.close(linger=0)

    def on_change(self) -> None:
        """Publish changes, and requested whole views, once the last time is `GATHER_S` ago."""
        if self._timer is None and not self._pub.closed:
            wait_s = self._published_s + GATHER_S - self._clock.monotonic()
            self._timer = self._loop.call_later(max(0.0, wait_s), self._publish)

    def _publish(self) -> None:
        """Do nothing after `close`: the router's timer runs until the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pub.closed:
            return
        self._published_s, core = self._clock.monotonic(), self.coordination
        had_change = core.has_change
        if had_change or self._published_s >= self._next_beat_s:
            self._next_beat_s = self._published_s + self.interval_s
            change = core.next_change()
            for version in self._asked.versions:
                self._pub.send_multipart([view_topic(version), encode_for(version, change)], zmq.NOBLOCK)
        view = core.routed_view
        if had_change or view.weights.holds != self._router.is_held:
            self._router.on_view(view)
        waiting, wholes = self._asked.waiting, dict[int, zmq.Frame]()
        for topic in list(islice(waiting, MAX_WHOLES)):
            version = waiting.pop(topic)
            if version not in wholes:
                wholes[version] = zmq.Frame(encode_for(version, core.view), copy=True)  # one copy for all who get it
            self._pub.send(topic, zmq.NOBLOCK | zmq.SNDMORE)
            self._pub.send(wholes[version], zmq.NOBLOCK, copy=False)
        if waiting:
            self.on_change()

    def _on_subscription(self, frames: list[bytes]) -> None:
        if self._asked.take(frames[0]):
            self.on_change()

    def on_joined(self, instance: InstanceInfo) -> None:
        self._router.on_joined(instance)
        process = ProcessName(instance.pid_namespace, instance.pid, instance.start_ticks)
        self._deaths.follow((instance.role, instance.engine_rank, instance.incarnation), process)

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        if not self.coordination.is_doomed(instance.incarnation):
            self._deaths.forget((instance.role, instance.engine_rank, instance.incarnation))
        self._router.on_lost(instance, reason, has_died)

    def _on_death(self, process: tuple[Role, int, int]) -> None:
        self.coordination.on_death(*process)
        self._deaths.forget(process)

    def _on_coordination(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise BadFrame(f"a coordination message of {len(frames)} frames; two are expected (identity, payload)")
        message = coordination_codec.decode(frames[1])
        if isinstance(message, FetchImage):
            self._send_file(frames[0], message)
            return
        reply = self.coordination.on_message(message, frames[0])
        if reply is not None:
            self._send(frames[0], reply)

    def _send_file(self, identity: bytes, wanted: FetchImage) -> None:
        """Answer with the file of an image of a running request, or a part of it. It is queued without a copy; one that
        cannot be queued is asked for again."""
        key, start = wanted.key, wanted.start
        if start < 0 or wanted.most_bytes < 0:
            raise BadFrame(f"{wanted.most_bytes} bytes of a file are asked for, from {start} on")
        data = self._find_file(key)
        if data is None:
            answer = ImageFile(key, is_here=False)
        elif not wanted.most_bytes:
            answer = ImageFile(key, data)
        else:
            answer = ImageFile(key, data[start : start + wanted.most_bytes], start=start, num_bytes=len(data))
        with contextlib.suppress(zmq.Again):
            self._socket.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(encode(answer), zmq.NOBLOCK, copy=False)

    def _send(self, identity: bytes, reply: CoordinationReply) -> None:
        try:
            self._socket.send_multipart([identity, encode(reply)], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("cannot queue the reply to a joining instance: its socket is full; it will retry")

    def _on_stats(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise BadFrame(f"a stats message of {len(frames)} frames; one is expected")
        message = stats_codec.decode(frames[0])
        if isinstance(message, TraceLines):
            if self.coordination.knows(message.role, message.engine_rank, message.incarnation):
                name = instance_name(message.role, message.engine_rank) + self._suffix
                self._traces.write(name, message.lines, message.num_dropped)
            return
        if isinstance(message, RequestFailed):
            self._router.on_request_failed(message)
        elif self.coordination.on_heartbeat(message):
            self._router.on_heartbeat(message)
