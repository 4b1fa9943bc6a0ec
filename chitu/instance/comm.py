"""The comm thread of a P, D or unified process: every socket except the token and heartbeat ones, and no policy.

It owns the request port (PULL), the P<->D control port (PULL), the coordination DEALER, the view SUB, the stats PUSH
and one PUSH per peer. Other threads pass it frames through queues and an eventfd. It gives messages to its owner and to
the transfer, whose methods return at once. A bad frame is counted and has no other effect. `SilenceWatch` is the
heartbeat thread's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from chitu.clock import Clock, Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import BadFrame, Capacity, Internal, UnknownKind
from chitu.kv_transfer.kv_manager import TransferSide
from chitu.net.curve import ClusterSecrets, make_context
from chitu.net.link import LinkReceivers
from chitu.net.sockets import bind, connect
from chitu.net.view_feed import ViewReceiver, ask_for_whole
from chitu.protocol import (
    PROTOCOL_VERSION,
    VIEW_TOPIC,
    CancelRequest,
    ClusterView,
    Drain,
    InstanceInfo,
    Join,
    JoinReply,
    Leave,
    LinkAck,
    SchedulerMessage,
    Wire,
    coordination_reply_codec,
    encode,
    scheduler_codec,
    view_codec,
)
from chitu.protocol.weights import Weights
from chitu.tracing.tracer import Tracer

ABANDONED = 20
"""An added instance has lost its cluster after so many times `router_s`: after 10 minutes with the default."""


class SilenceWatch:
    """Detector of a router that is gone for good, and of a step thread that hangs while heartbeats continue."""

    def __init__(self, deadlines: DeadlineConfig) -> None:
        self._deadlines = deadlines
        self._router = Silence(deadlines.heartbeat_interval_s)
        self._step = Silence(deadlines.heartbeat_interval_s)
        self.silence_s = 0.0
        """How long the router has been silent."""

    def look(self, num_views: int, step_turns: int) -> float:
        """Return the seconds without a view once per silence, when they reach `router_s`; else 0. Raise Internal for a
        step of `step_s`, which ends the process. Called every `heartbeat_interval_s`."""
        step_s = self._step.seconds(step_turns)
        if step_s >= self._deadlines.step_s:
            raise Internal(f"the step thread has made no progress for {step_s:.1f} s (deadlines.step_s)")
        was_s, self.silence_s = self.silence_s, self._router.seconds(num_views)
        return self.silence_s if was_s < self._deadlines.router_s <= self.silence_s else 0.0

    @property
    def is_abandoned(self) -> bool:
        """Whether the cluster has probably ended: a router that is started again is back sooner."""
        return self.silence_s >= ABANDONED * self._deadlines.router_s


logger = logging.getLogger(__name__)

POLL_MS = 50
"""Longest time between two checks of the deadlines."""
MAX_MESSAGES_PER_TURN = 1000
"""Messages read from one socket before the next one is served, so a flood on one cannot starve the rest."""


@dataclass(slots=True, frozen=True)
class RouterAddress:
    """The router's host and its TCP ports."""

    host: str
    stats_port: int
    coordination_port: int
    metadata_sync_port: int
    token_port: int = 0
    """0 on P, which sends no tokens, and if the router is several processes: each names its port in its requests."""


class CommOwner(Protocol):
    """The owner of a `CommLoop`, which calls these methods on the comm thread. Each returns at once."""

    def on_request(self, message: SchedulerMessage, /) -> None: ...

    def on_link_ack(self, ack: LinkAck) -> None:
        """Take the router's acknowledgement of tokens."""

    def on_view(self, view: ClusterView) -> None: ...

    def on_new_router(self) -> None:
        """Drop all requests: a router with another incarnation appeared, and nothing reads tokens of the old one's."""

    def on_worker_gone(self, incarnation: int) -> None:
        """Drop the requests of an API process that left the view."""

    def on_refused(self, code: str, message: str) -> None:
        """End: the router refuses this instance for good."""

    def on_drain(self) -> None:
        """Finish the running requests and leave: the router sends no more. Called once."""

    def on_missing(self) -> None:
        """Send the next heartbeat, which reports that a request was lost in transit, without delay."""


class CommLoop:
    """Sockets and loop of the comm thread. The main thread builds and binds it; the comm thread alone runs it."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        router: RouterAddress,
        clock: Clock,
        secrets: ClusterSecrets | None = None,
    ) -> None:
        self.router = router
        self._clock = clock
        self.context = make_context(secrets)
        self._requests, self.port = bind(self.context, zmq.PULL, bind_host, port)
        self._control, self.control_port = bind(self.context, zmq.PULL, bind_host, 0)
        self._coordination = connect(
            self.context, zmq.DEALER, router.host, router.coordination_port, queues_unconnected=False
        )
        self._feed = ViewReceiver(clock.monotonic())
        self._view = self._open_view()
        self._stats = connect(self.context, zmq.PUSH, router.host, router.stats_port)
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._to_peers: deque[tuple[str, int, bytes, bytes]] = deque()
        """Frames for peers: host, port, room, message."""
        self._to_stats: deque[bytes] = deque()
        self._to_coordination: deque[bytes] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not when `run` ends: other threads may write later
        self._stopping = False
        self._router_incarnation = 0
        self._view_version = -1
        self._workers: set[int] = set()
        """Incarnations of the API processes in the newest view."""
        self.joined = False
        """Whether the router's newest view lists this instance."""
        self._next_join_s = 0.0
        self.num_views = 0
        """How often the router has shown that the view here is its newest; any thread may read it."""
        self.weights = Weights()
        """Weights that serve here; the step thread sets them."""
        self.tracer: Tracer | None = None
        """Tracer of requests, if any; set before `run`."""
        self.received = LinkReceivers()
        """Sequence numbers of the requests received, by link; heartbeats report them."""
        self.num_reads = 0
        """How often the request port was read until empty; any thread may read it."""
        self.bad_frames = 0
        self.unknown_frames = 0

    # ------------------------------------------------------------------------------------------------------ any thread

    def send_peer(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        """Queue a P<->D control message (`SendFrame`)."""
        self._to_peers.append((host, port, room, payload))
        os.eventfd_write(self._wake_fd, 1)

    def send_stats(self, message: Wire) -> None:
        """Queue a message to the router's stats port."""
        self._to_stats.append(encode(message))
        os.eventfd_write(self._wake_fd, 1)

    def send_coordination(self, message: Drain | Leave) -> None:
        """Queue a message to the router's coordination port."""
        self._to_coordination.append(encode(message))
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End `run` once every queued message is handed to its socket."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    # ----------------------------------------------------------------------------------------------------- comm thread

    def run(
        self,
        instance: InstanceInfo,
        transfer: TransferSide,
        owner: CommOwner,
        deadlines: DeadlineConfig,
    ) -> None:
        """Serve the sockets until `stop`; send Join while the newest view lacks this instance.

        After `lease_s` without a view the router may have removed this instance, and the view without it may be lost on
        a half-open connection, so the view socket is replaced. Join waits for a new view even then. If it came before a
        new router's first view, requests sent ahead of that view would be dropped as its predecessor's."""
        join_interval_s = deadlines.retry_interval_s
        silence = Silence(join_interval_s)
        poller = zmq.Poller()
        for socket in (self._requests, self._control, self._coordination, self._view):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping or self._to_peers or self._to_stats or self._to_coordination:
            now_s = self._clock.monotonic()
            if now_s >= self._next_join_s and not self._stopping:
                self._next_join_s = now_s + join_interval_s
                if silence.seconds(self.num_views) >= deadlines.lease_s:
                    silence = Silence(join_interval_s)
                    self._renew_view(poller)
                if not self.joined:
                    self._join(instance)
            ready = dict(poller.poll(POLL_MS))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._flush()
            if self._requests not in ready or self._drain_requests(owner):
                self.num_reads += 1
            if self._control in ready:
                self._drain_control(transfer)
            if self._coordination in ready:
                instance = self._drain_coordination(instance, owner)
            if self._view in ready:
                instance = self._drain_views(instance, transfer, owner)
            transfer.tick(self._clock.monotonic())
            self._flush()
        self._close()

    def _open_view(self) -> zmq.Socket[bytes]:
        socket = connect(self.context, zmq.SUB, self.router.host, self.router.metadata_sync_port)
        for topic in (VIEW_TOPIC, self._feed.topic):
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

    def _renew_view(self, poller: zmq.Poller) -> None:
        try:
            socket = self._open_view()
        except Capacity as error:  # no file descriptor is left; the old socket may still recover
            logger.warning("no cluster view from the router, and cannot reconnect: %s", error.message)
            return
        poller.unregister(self._view)
        self._view.close(0)
        self._view = socket
        poller.register(socket, zmq.POLLIN)

    def _join(self, instance: InstanceInfo) -> None:
        instance = msgspec.structs.replace(instance, weights=self.weights)
        with contextlib.suppress(zmq.Again):  # not connected; Join is sent again
            self._coordination.send(encode(Join(PROTOCOL_VERSION, instance)), zmq.NOBLOCK)

    def _flush(self) -> None:
        """Hand what is queued to its sockets. A full one drops a message: protocol messages are retransmitted until
        they are answered, so such a peer has left 100,000 messages unread."""
        while self._to_peers:
            host, port, room, payload = self._to_peers.popleft()
            if self.tracer is not None and self.tracer.rooms:
                self.tracer.frame(room, "sent", "control", payload)
            try:
                self._peer(host, port).send_multipart((room, payload), zmq.NOBLOCK)
            except BadFrame as error:  # the address came in a message
                self.bad_frames += 1
                logger.warning("cannot connect to a peer: %s", error)
            except Capacity as error:
                logger.warning("message dropped: %s", error)
            except zmq.Again:
                logger.warning("dropped a message to %s:%d: the socket is full", host, port)
        while self._to_stats:
            try:
                self._stats.send(self._to_stats.popleft(), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("dropped a message to the router's stats port: the socket is full")
        while self._to_coordination:
            try:
                self._coordination.send(self._to_coordination.popleft(), zmq.NOBLOCK)
            except zmq.Again:  # such messages are of no use to a router that is down
                logger.info("not connected to the router's coordination port: dropped a message")

    def _peer(self, host: str, port: int) -> zmq.Socket[bytes]:
        socket = self._peers.get((host, port))
        if socket is None:
            socket = self._peers[host, port] = connect(self.context, zmq.PUSH, host, port)
        return socket

    def _drain_requests(self, owner: CommOwner) -> bool:
        """Take the requests that are ready; return False if more may wait. A frame that cannot be decoded has no
        sequence number, so it counts as lost."""
        frames = _received(self._requests)
        for frame in frames:
            try:
                if len(frame) != 1:
                    raise BadFrame(f"{len(frame)} frames instead of 1")
                message = scheduler_codec.decode(frame[0])
                if isinstance(message, LinkAck):
                    owner.on_link_ack(message)
                elif self.received.take(message.link, message.number, message.num_kept):
                    if self.tracer is not None:
                        self._trace_request(self.tracer, message, frame[0])
                    owner.on_request(message)
            except UnknownKind as error:
                self.unknown_frames += 1
                logger.warning("request port: ignored: %s", error)
            except BadFrame as error:
                self.bad_frames += 1
                logger.warning("request port: bad frame: %s", error)
        if len(frames) == MAX_MESSAGES_PER_TURN:
            return False
        if self.received.take_alarm():
            owner.on_missing()
        return True

    def _trace_request(self, tracer: Tracer, message: SchedulerMessage, frame: bytes) -> None:
        if not isinstance(message, CancelRequest):
            if message.trace:
                tracer.begin(message, frame)
        elif tracer.rooms:
            tracer.frame(message.room, "received", "request", frame)

    def _drain_control(self, transfer: TransferSide) -> None:
        for frame in _received(self._control):
            if len(frame) != 2 or len(frame[0]) != 16:
                self.bad_frames += 1
                logger.warning("control port: bad frame of %d parts", len(frame))
                continue
            if self.tracer is not None and self.tracer.rooms:
                self.tracer.frame(frame[0], "received", "control", frame[1])
            transfer.on_frame(frame[0], frame[1])

    def _drain_coordination(self, instance: InstanceInfo, owner: CommOwner) -> InstanceInfo:
        """Take Drain and refusals; return this instance's info from now on, as `_drain_views` does."""
        for frame in _received(self._coordination):
            try:
                reply = coordination_reply_codec.decode(frame[-1])
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("coordination: bad frame: %s", error)
                continue
            if isinstance(reply, JoinReply) and reply.code and reply.incarnation == instance.incarnation:
                owner.on_refused(reply.code, reply.message)
            elif isinstance(reply, Drain) and reply.incarnation == instance.incarnation:
                instance = _draining(instance, owner)
        return instance

    def _drain_views(self, instance: InstanceInfo, transfer: TransferSide, owner: CommOwner) -> InstanceInfo:
        is_sign = False
        for frame in _received(self._view):
            try:
                is_sign |= self._feed.take(view_codec.decode(frame[-1]))
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("view: bad frame: %s", error)
        if self._feed.should_ask(self._clock.monotonic()):
            ask_for_whole(self._view, self._feed.topic)
        if not is_sign:
            return instance
        self.num_views += 1
        view = self._feed.view
        if (view.router_incarnation, view.version) == (self._router_incarnation, self._view_version):
            return instance
        own = next((member for member in view.instances if member.incarnation == instance.incarnation), None)
        if self.joined and own is None:
            self._next_join_s = 0.0
        self.joined = own is not None
        if own is not None and not instance.returns:
            instance = msgspec.structs.replace(instance, first_view=(view.router_incarnation, view.version))
        if own is not None and own.draining:
            instance = _draining(instance, owner)
        if view.router_incarnation != self._router_incarnation:
            if self._router_incarnation:
                logger.warning("a new router took over")
                owner.on_new_router()
            self._router_incarnation = view.router_incarnation
        self._view_version = view.version
        workers = {process.incarnation for process in view.workers}
        for worker in self._workers - workers:
            logger.warning("an API process of the router is gone")
            owner.on_worker_gone(worker)
        self._workers = workers
        self._forget_peers(view)
        transfer.on_view(view)
        owner.on_view(view)
        return instance

    def _forget_peers(self, view: ClusterView) -> None:
        """Close sockets to control ports that no member has any longer."""
        present = {(member.host, member.control_port) for member in view.instances}
        for address in self._peers.keys() - present:
            self._peers.pop(address).close()

    def _close(self) -> None:
        # A short linger: the Leave queued last should reach the router.
        for socket in (*self._peers.values(), self._requests, self._control, self._view):
            socket.close(0)
        for socket in (self._stats, self._coordination):
            socket.close(200)


def _draining(instance: InstanceInfo, owner: CommOwner) -> InstanceInfo:
    """Return the info marked as draining; call `on_drain` once. A router that restarts meanwhile learns it by Join."""
    if not instance.draining:
        owner.on_drain()
    return msgspec.structs.replace(instance, draining=True)


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return the messages that are ready, at most `MAX_MESSAGES_PER_TURN`, so that one poll serves a burst."""
    messages: list[list[bytes]] = []
    while len(messages) < MAX_MESSAGES_PER_TURN:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
