"""The comm thread of a P, D or unified process: every socket but the token and heartbeat ones, and no policy.

It owns the request port (PULL), the P<->D control port (PULL), the coordination DEALER, the view SUB, the stats PUSH
and one PUSH per peer. Other threads hand it frames through a queue and an eventfd; it hands messages on by callbacks
that return at once. A bad frame is counted and costs nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from chitu.clock import Clock, Silence
from chitu.errors import BadFrame, Capacity, UnknownKind
from chitu.kv_transfer.events import CommSide
from chitu.net.curve import ClusterSecrets, make_context
from chitu.net.link import LinkReceivers
from chitu.net.sockets import bind, connect
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
    LinkWord,
    SchedulerMessage,
    Wire,
    coordination_reply_codec,
    encode,
    scheduler_codec,
    view_codec,
)
from chitu.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

POLL_MS = 50
"""Upper bound between two ticks of the deadlines."""
MAX_MESSAGES_PER_TURN = 1000
"""Of one socket, so that a flood there does not keep the others waiting."""


@dataclass(slots=True, frozen=True)
class RouterAddress:
    """Where the router listens (all TCP)."""

    host: str
    stats_port: int
    coordination_port: int
    metadata_sync_port: int


@dataclass(slots=True)
class CommCallbacks:
    """All are called on the comm thread and return at once."""

    on_request: Callable[[SchedulerMessage], None]
    on_link_word: Callable[[LinkWord], None]
    """What came of the tokens."""
    on_view: Callable[[ClusterView], None]
    on_new_router: Callable[[], None]
    """A router with another incarnation speaks: the requests of the old one are nobody's."""
    on_refused: Callable[[str, str], None]
    """The router will never take this instance: its code and message."""
    on_drain: Callable[[], None]
    """The router sends nothing new: finish what runs and leave. Called once."""
    on_worker_gone: Callable[[int], None]
    """An API process of the router (by incarnation) is in the view no more: its requests are nobody's."""
    on_missing: Callable[[], None]
    """A request was lost on the way: the next heartbeat says so, and should not wait."""


class CommLoop:
    """Built (and bound) by the main thread, then run by the comm thread alone."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        router: RouterAddress,
        clock: Clock,
        secrets: ClusterSecrets | None = None,
    ) -> None:
        self._router = router
        self._clock = clock
        self._context = make_context(secrets)
        self._requests, self.port = bind(self._context, zmq.PULL, bind_host, port)
        self._control, self.control_port = bind(self._context, zmq.PULL, bind_host, 0)
        self._coordination = connect(
            self._context, zmq.DEALER, router.host, router.coordination_port, queues_unconnected=False
        )
        self._view = self._open_view()
        self._stats = connect(self._context, zmq.PUSH, router.host, router.stats_port)
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._outbox: deque[tuple[str, int, tuple[bytes, ...]]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not when `run` ends: other threads may write to it after that
        self._stopping = False
        self._router_incarnation = 0
        self._view_version = -1
        self._workers: set[int] = set()
        """Of the newest view."""
        self._joined = False
        self._next_join_s = 0.0
        self.num_views = 0
        """Views of the router so far, repeated ones too; any thread may read it."""
        self.tracer: Tracer | None = None
        """Set before `run`."""
        self.received = LinkReceivers()
        """What came of the requests; the heartbeats say it."""
        self.num_reads = 0
        """How often the request port was found empty; any thread may read it."""
        self.bad_frames = 0
        self.unknown_frames = 0

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._context

    @property
    def joined(self) -> bool:
        """Whether the newest view of the router has this instance in it."""
        return self._joined

    # ------------------------------------------------------------------------------------------------------ any thread

    def send_peer(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        """Queue a P<->D control message (`PeerLink`)."""
        self._outbox.append((host, port, (room, payload)))
        os.eventfd_write(self._wake_fd, 1)

    def send_stats(self, message: Wire) -> None:
        """Queue a message to the router's stats port."""
        self._outbox.append(("stats", 0, (encode(message),)))
        os.eventfd_write(self._wake_fd, 1)

    def send_coordination(self, message: Drain | Leave) -> None:
        """Queue a message to the router's coordination port."""
        self._outbox.append(("coordination", 0, (encode(message),)))
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End `run` after what is queued was handed to the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    # ----------------------------------------------------------------------------------------------------- comm thread

    def run(
        self,
        instance: InstanceInfo,
        kv: CommSide | None,
        callbacks: CommCallbacks,
        join_interval_s: float,
        lease_s: float,
    ) -> None:
        """Joins while the newest view has not this instance. Where no view came for `lease_s` the router may have given
        it up, and its word of it be lost on a connection that has only this end: then views come by a new one. Their
        word is waited for: a router that is joined before its first view would lose what it sent ahead of that, as the
        requests of its predecessor."""
        silence = Silence(join_interval_s)
        poller = zmq.Poller()
        for socket in (self._requests, self._control, self._coordination, self._view):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping or self._outbox:
            now_s = self._clock.monotonic()
            if now_s >= self._next_join_s and not self._stopping:
                self._next_join_s = now_s + join_interval_s
                if silence.seconds(self.num_views) >= lease_s:
                    silence = Silence(join_interval_s)
                    self._renew_view(poller)
                if not self._joined:
                    self._join(instance)
            ready = dict(poller.poll(POLL_MS))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._flush_outbox()
            if self._requests not in ready or self._drain_requests(callbacks):
                self.num_reads += 1
            if self._control in ready:
                self._drain_control(kv)
            if self._coordination in ready:
                instance = self._drain_coordination(instance, callbacks)
            if self._view in ready:
                instance = self._drain_views(instance, kv, callbacks)
            if kv is not None:
                kv.tick(self._clock.monotonic())
                self._flush_outbox()
        self._close()

    def _open_view(self) -> zmq.Socket[bytes]:
        socket = connect(self._context, zmq.SUB, self._router.host, self._router.metadata_sync_port)
        socket.setsockopt(zmq.SUBSCRIBE, VIEW_TOPIC)
        return socket

    def _renew_view(self, poller: zmq.Poller) -> None:
        try:
            socket = self._open_view()
        except Capacity as error:  # no descriptor is left; the old one may still come back by itself
            logger.warning("no cluster view from the router, and cannot reconnect: %s", error.message)
            return
        poller.unregister(self._view)
        self._view.close(0)
        self._view = socket
        poller.register(socket, zmq.POLLIN)

    def _join(self, instance: InstanceInfo) -> None:
        with contextlib.suppress(zmq.Again):  # there is no connection; it is sent again
            self._coordination.send(encode(Join(PROTOCOL_VERSION, instance)), zmq.NOBLOCK)

    def _flush_outbox(self) -> None:
        while self._outbox:
            host, port, frames = self._outbox.popleft()
            try:
                if port:
                    if self.tracer is not None and self.tracer.rooms:
                        self.tracer.frame(frames[0], "sent", "control", frames[1])
                    socket = self._peer(host, port)
                else:
                    socket = self._stats if host == "stats" else self._coordination
                socket.send_multipart(frames, zmq.NOBLOCK)
            except BadFrame as error:  # the address came in a message
                self.bad_frames += 1
                logger.warning("cannot connect to a peer: %s", error)
            except Capacity as error:
                logger.warning("message dropped: %s", error)  # it is repeated until it is answered
            except zmq.Again:
                # Protocol messages are repeated until answered: this peer has not read for 100,000 messages. What goes
                # to the coordination port is not for a router that is not there.
                if host == "coordination":
                    logger.info("not connected to the router's coordination port: dropped a message")
                else:
                    logger.warning("dropped a message to %s:%d: the socket is full", host, port)

    def _peer(self, host: str, port: int) -> zmq.Socket[bytes]:
        socket = self._peers.get((host, port))
        if socket is None:
            socket = self._peers[host, port] = connect(self._context, zmq.PUSH, host, port)
        return socket

    def _drain_requests(self, callbacks: CommCallbacks) -> bool:
        """False where more lies ready. A frame that cannot be read has lost its number: it counts as lost."""
        frames = _received(self._requests)
        for frame in frames:
            try:
                if len(frame) != 1:
                    raise BadFrame(f"{len(frame)} frames instead of 1")
                message = scheduler_codec.decode(frame[0])
                if isinstance(message, LinkWord):
                    callbacks.on_link_word(message)
                elif self.received.take(message.link, message.number, message.num_kept):
                    if self.tracer is not None:
                        self._trace_request(self.tracer, message, frame[0])
                    callbacks.on_request(message)
            except UnknownKind as error:
                self.unknown_frames += 1
                logger.warning("request port: ignored: %s", error)
            except BadFrame as error:
                self.bad_frames += 1
                logger.warning("request port: bad frame: %s", error)
        if len(frames) == MAX_MESSAGES_PER_TURN:
            return False
        if self.received.take_alarm():
            callbacks.on_missing()
        return True

    def _trace_request(self, tracer: Tracer, message: SchedulerMessage, frame: bytes) -> None:
        if not isinstance(message, CancelRequest):
            if message.trace:
                tracer.begin(message, frame)
        elif tracer.rooms:
            tracer.frame(message.room, "received", "request", frame)

    def _drain_control(self, kv: CommSide | None) -> None:
        for frame in _received(self._control):
            if len(frame) != 2 or len(frame[0]) != 16 or kv is None:
                self.bad_frames += 1
                logger.warning("control port: bad frame of %d parts", len(frame))
                continue
            if self.tracer is not None and self.tracer.rooms:
                self.tracer.frame(frame[0], "received", "control", frame[1])
            kv.on_frame(frame[0], frame[1])

    def _drain_coordination(self, instance: InstanceInfo, callbacks: CommCallbacks) -> InstanceInfo:
        """Returns what this instance says of itself from now on; so does `_drain_views`."""
        for frame in _received(self._coordination):
            try:
                reply = coordination_reply_codec.decode(frame[-1])
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("coordination: bad frame: %s", error)
                continue
            if isinstance(reply, JoinReply) and reply.code and reply.incarnation == instance.incarnation:
                callbacks.on_refused(reply.code, reply.message)
            elif isinstance(reply, Drain) and reply.incarnation == instance.incarnation:
                instance = _draining(instance, callbacks)
        return instance

    def _drain_views(self, instance: InstanceInfo, kv: CommSide | None, callbacks: CommCallbacks) -> InstanceInfo:
        view: ClusterView | None = None
        for frame in _received(self._view):
            try:
                view = view_codec.decode(frame[-1])
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("view: bad frame: %s", error)
        if view is None:
            return instance
        self.num_views += 1
        own = next((member for member in view.instances if member.incarnation == instance.incarnation), None)
        if self._joined and own is None:
            self._next_join_s = 0.0
        self._joined = own is not None
        if own is not None and not instance.returns:
            instance = msgspec.structs.replace(instance, first_view=(view.router_incarnation, view.version))
        if own is not None and own.draining:
            instance = _draining(instance, callbacks)
        if view.router_incarnation != self._router_incarnation:
            if self._router_incarnation:
                logger.warning("a new router took over")
                callbacks.on_new_router()
            self._router_incarnation = view.router_incarnation
            self._view_version = -1
        if view.version == self._view_version:
            return instance
        self._view_version = view.version
        workers = {process.incarnation for process in view.workers}
        for worker in self._workers - workers:
            logger.warning("an API process of the router is gone")
            callbacks.on_worker_gone(worker)
        self._workers = workers
        self._forget_peers(view)
        if kv is not None:
            kv.on_view(view)
        callbacks.on_view(view)
        return instance

    def _forget_peers(self, view: ClusterView) -> None:
        """Close sockets to control ports that no member has any more."""
        present = {(member.host, member.control_port) for member in view.instances}
        for address in self._peers.keys() - present:
            self._peers.pop(address).close()

    def _close(self) -> None:
        # Linger is short but not 0: the Leave that was queued last should reach the router.
        for socket in (*self._peers.values(), self._requests, self._control, self._view):
            socket.close(0)
        for socket in (self._stats, self._coordination):
            socket.close(200)


def _draining(instance: InstanceInfo, callbacks: CommCallbacks) -> InstanceInfo:
    """It leaves; `on_drain` is called once. A router that starts anew meanwhile learns it from the Join."""
    if not instance.draining:
        callbacks.on_drain()
    return msgspec.structs.replace(instance, draining=True)


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages that lie ready, so that one poll serves a burst."""
    messages: list[list[bytes]] = []
    while len(messages) < MAX_MESSAGES_PER_TURN:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
