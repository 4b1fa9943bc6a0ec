"""The comm thread of a P, D or unified process: every socket except the token and heartbeat ones, and no policy.

It owns the request port (PULL), the P<->D control port (PULL), one PUSH per peer and, for each router that the instance
joins, a coordination DEALER, a view SUB and a stats PUSH. What it tells the routers is decided in `contacts.py`. Other
threads pass it frames through queues and an eventfd. It gives messages to its owner and to the transfer, whose methods
return at once.

Invariant: a bad frame is counted, and has no other effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import zmq

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import BadFrame, Capacity, UnknownKind
from chitu.instance.contacts import CommOwner, Contacts, RouterContact
from chitu.kv_transfer.kv_manager import TransferSide
from chitu.net.curve import ClusterSecrets, make_context
from chitu.net.link import LinkReceivers
from chitu.net.sockets import bind, connect
from chitu.net.view_feed import ask_for_whole
from chitu.protocol import (
    OLDEST_VERSION,
    CancelRequest,
    Drain,
    InstanceInfo,
    Join,
    Leave,
    LinkAck,
    SchedulerMessage,
    Wire,
    coordination_reply_codec,
    encode_for,
    scheduler_codec,
    view_codec,
)
from chitu.protocol.profile import ProfileOrder
from chitu.tracing.tracer import Tracer

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


class RouterSockets:
    """The sockets of one router of the list, on the comm thread."""

    def __init__(self, address: RouterAddress, contact: RouterContact, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.address = address
        self._context = context
        self.contact = contact
        self.coordination = connect(
            context, zmq.DEALER, address.host, address.coordination_port, queues_unconnected=False
        )
        self.stats = connect(context, zmq.PUSH, address.host, address.stats_port)
        self.view = self._open_view()

    def _open_view(self) -> zmq.Socket[bytes]:
        socket = connect(self._context, zmq.SUB, self.address.host, self.address.metadata_sync_port)
        self._topics = self.contact.feed.topics
        for topic in self._topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

    def ask_views(self) -> None:
        """Subscribe to the topics of the feed in place of the last ones."""
        for topic in self._topics:
            self.view.setsockopt(zmq.UNSUBSCRIBE, topic)
        self._topics = self.contact.feed.topics
        for topic in self._topics:
            self.view.setsockopt(zmq.SUBSCRIBE, topic)

    def renew_view(self, poller: zmq.Poller) -> None:
        try:
            socket = self._open_view()
        except Capacity as error:  # no file descriptor is left; the old socket may still recover
            logger.warning("no cluster view from the router, and cannot reconnect: %s", error.message)
            return
        poller.unregister(self.view)
        self.view.close(0)
        self.view = socket
        poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        self.view.close(0)
        for socket in (self.stats, self.coordination):
            socket.close(200)  # the Leave queued last should reach the router


class CommLoop:
    """Sockets and loop of the comm thread. The main thread builds and binds it; the comm thread alone runs it."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        routers: Sequence[RouterAddress],
        clock: Clock,
        secrets: ClusterSecrets | None = None,
        takes_features: bool = False,
    ) -> None:
        """`routers`: all that the instance joins, in the order of the configuration. `takes_features`: have a control
        port for features of images, too."""
        self._clock = clock
        self.context = make_context(secrets)
        self._requests, self.port = bind(self.context, zmq.PULL, bind_host, port)
        self._control, self.control_port = bind(self.context, zmq.PULL, bind_host, 0)
        self._ports = [self._requests, self._control]
        self._images: zmq.Socket[bytes] | None = None
        self.image_port = 0
        if takes_features:
            self._images, self.image_port = bind(self.context, zmq.PULL, bind_host, 0)
            self._ports.append(self._images)
        self.contacts = Contacts(self, len(routers), clock.monotonic())
        """What the routers know. Other threads use what it offers to any thread."""
        self.routers = [
            RouterSockets(address, contact, self.context)
            for address, contact in zip(routers, self.contacts.routers, strict=True)
        ]
        self._poller = zmq.Poller()
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._to_peers: deque[tuple[str, int, bytes, bytes]] = deque()
        """Frames for peers: host, port, room, message."""
        self._to_stats: deque[Wire] = deque()
        self._versions: dict[tuple[str, int], int] = {}
        """Versions of the wire that peers read, by their control ports."""
        self._leave: Leave | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not when `run` ends: other threads may write later
        self._stopping = False
        self._next: tuple[InstanceInfo, TransferSide] | None = None
        self._has_changed = threading.Event()
        self.tracer: Tracer | None = None
        self.on_profile: Callable[[ProfileOrder], None] = lambda order: None
        """Takes an order to record what is computed; set before `run`. By default there is nothing to record."""
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
        """Queue a message to the stats ports of all routers."""
        self._to_stats.append(message)
        os.eventfd_write(self._wake_fd, 1)

    def version_of(self, host: str, port: int) -> int:
        """Return the version of the wire that a peer with this control port reads, as far as a router has told it."""
        return self._versions.get((host, port), OLDEST_VERSION)

    def frames_for_routers(self, message: Wire) -> list[bytes]:
        """Return a message as each router reads it."""
        return [encode_for(contact.protocol, message) for contact in self.contacts.routers]

    def change(self, instance: InstanceInfo, transfer: TransferSide, timeout_s: float) -> bool:
        """Go on as another incarnation, with another side, and join with it. Return once the comm thread uses neither
        of the old ones; False if it does not within `timeout_s`. The old incarnation has nothing left to do."""
        self._has_changed.clear()
        self._next = instance, transfer
        os.eventfd_write(self._wake_fd, 1)
        return self._has_changed.wait(timeout_s)

    def leave(self, message: Leave) -> None:
        """Send all routers what ends the membership, and end `run` once every queued message is handed to its
        socket."""
        self._leave = message
        self.stop()

    def stop(self) -> None:
        """End `run` once every queued message is handed to its socket."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def call_soon(self) -> None:
        """Begin the next turn of the comm thread now (`ContactShell`)."""
        os.eventfd_write(self._wake_fd, 1)

    # ----------------------------------------------------------------------------------------------------- comm thread

    def run(
        self,
        instance: InstanceInfo,
        transfer: TransferSide,
        owner: CommOwner,
        deadlines: DeadlineConfig,
    ) -> None:
        """Serve the sockets until `stop`, and keep in touch with the routers."""
        poller, contacts = self._poller, self.contacts
        contacts.begin(instance, transfer, owner, deadlines)
        of_routers = [socket for router in self.routers for socket in (router.coordination, router.view)]
        for socket in (*self._ports, *of_routers):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping or self._to_peers or self._to_stats:
            if self._next is not None:
                (instance, transfer), self._next = self._next, None
                contacts.start_again(instance, transfer)
                self._has_changed.set()
            if not self._stopping:
                contacts.keep_in_touch(self._clock.monotonic())
            ready = dict(poller.poll(POLL_MS))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._flush()
            if self._requests not in ready or self._drain_requests(owner):
                self.num_reads += 1
            if self._control in ready:
                self._drain_control(self._control, transfer.on_frame)
            if self._images is not None and self._images in ready:
                self._drain_control(self._images, transfer.on_image_frame)
            for index, router in enumerate(self.routers):
                if router.coordination in ready:
                    self._drain_coordination(index, router)
                if router.view in ready:
                    self._drain_views(index, router)
            transfer.tick(self._clock.monotonic())
            self._flush()
        self._close()

    def send_coordination(self, router: int, message: Join | Drain) -> None:
        """Send a message to a coordination port, or lose it (`ContactShell`)."""
        with contextlib.suppress(zmq.Again):  # not connected, or full
            version = self.contacts.routers[router].protocol
            self.routers[router].coordination.send(encode_for(version, message), zmq.NOBLOCK)

    def ask_views(self, router: int) -> None:
        """Ask for views in another version of the wire (`ContactShell`)."""
        self.routers[router].ask_views()

    def renew_view(self, router: int) -> None:
        """Replace the socket on which views come (`ContactShell`)."""
        self.routers[router].renew_view(self._poller)

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
            frames = self.frames_for_routers(self._to_stats.popleft())
            for router, frame in zip(self.routers, frames, strict=True):
                try:
                    router.stats.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    logger.warning("dropped a message to the router's stats port: the socket is full")

    def _peer(self, host: str, port: int) -> zmq.Socket[bytes]:
        socket = self._peers.get((host, port))
        if socket is None:
            socket = self._peers[host, port] = connect(self.context, zmq.PUSH, host, port)
        return socket

    def _drain_requests(self, owner: CommOwner) -> bool:
        """Take the requests that are ready; return False if more may wait. A frame that cannot be decoded has no
        sequence number, so it counts as lost."""
        messages = _received(self._requests)
        for frame in chain.from_iterable(messages):
            try:
                message = scheduler_codec.decode(frame)
                if isinstance(message, LinkAck):
                    owner.on_link_ack(message)
                elif self.received.take(message.stamp):
                    if self.tracer is not None:
                        self._trace_request(self.tracer, message, frame)
                    owner.on_request(message)
            except UnknownKind as error:
                self.unknown_frames += 1
                logger.warning("request port: ignored: %s", error)
            except BadFrame as error:
                self.bad_frames += 1
                logger.warning("request port: bad frame: %s", error)
        if len(messages) == MAX_MESSAGES_PER_TURN:
            return False
        if self.received.take_alarm():
            owner.on_missing()
        return True

    def _trace_request(self, tracer: Tracer, message: SchedulerMessage, frame: bytes) -> None:
        if not isinstance(message, CancelRequest):
            if message.head.options.trace:
                tracer.begin(message, frame)
        elif tracer.rooms:
            tracer.frame(message.room, "received", "request", frame)

    def _drain_control(self, socket: zmq.Socket[bytes], take: Callable[[bytes, bytes], None]) -> None:
        for frame in _received(socket):
            if len(frame) != 2 or len(frame[0]) != 16:
                self.bad_frames += 1
                logger.warning("control port: bad frame of %d parts", len(frame))
                continue
            if self.tracer is not None and self.tracer.rooms:
                self.tracer.frame(frame[0], "received", "control", frame[1])
            take(frame[0], frame[1])

    def _drain_coordination(self, index: int, router: RouterSockets) -> None:
        """Take Drain and refusals."""
        for frame in _received(router.coordination):
            try:
                reply = coordination_reply_codec.decode(frame[-1])
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("coordination: bad frame: %s", error)
                continue
            if isinstance(reply, ProfileOrder):
                self.on_profile(reply)
            else:
                self.contacts.take_reply(index, reply)

    def _drain_views(self, index: int, router: RouterSockets) -> None:
        is_sign, feed = False, self.contacts.routers[index].feed
        for frame in _received(router.view):
            if frame[0] not in feed.topics:
                continue  # it was asked for in another version of the wire
            try:
                is_sign |= feed.take(view_codec.decode(frame[-1]))
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("view: bad frame: %s", error)
        if feed.should_ask(self._clock.monotonic()):
            ask_for_whole(router.view, feed.topic)
        if is_sign:
            self._note_versions()  # first, since what follows sends registrations
            self.contacts.take_view(index)
            self._forget_peers()

    def _note_versions(self) -> None:
        members = [member for router in self.contacts.routers for member in router.feed.view.instances]
        self._versions = {
            (member.host, port): member.protocol
            for member in members
            for port in (member.control_port, member.image_port)
        }

    def _forget_peers(self) -> None:
        """Close sockets to control ports that no member has any longer."""
        for address in self._peers.keys() - self._versions.keys():
            self._peers.pop(address).close()

    def _close(self) -> None:
        for socket in (*self._peers.values(), *self._ports):
            socket.close(0)
        for router in self.routers:
            if self._leave is not None:
                with contextlib.suppress(zmq.Again):  # it is of no use to a router that is down
                    router.coordination.send(encode_for(router.contact.protocol, self._leave), zmq.NOBLOCK)
            router.close()


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return the messages that are ready, at most `MAX_MESSAGES_PER_TURN`, so that one poll serves a burst."""
    messages: list[list[bytes]] = []
    while len(messages) < MAX_MESSAGES_PER_TURN:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
