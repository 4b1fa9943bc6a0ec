"""The comm thread of a P, D or unified process: every socket except the token and heartbeat ones, and no policy.

It owns the request port (PULL), the P<->D control port (PULL), one PUSH per peer and, for each router that the instance
joins (`RouterContact`), a coordination DEALER, a view SUB and a stats PUSH. Other threads pass it frames through queues
and an eventfd. It gives messages to its owner and to the transfer, whose methods return at once. A bad frame is counted
and has no other effect. `SilenceWatch` is the heartbeat thread's.

Invariant: routers know nothing of each other, and nothing here that one of them does touches another one's requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec
import zmq

from chitu.clock import Clock, Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import BadFrame, Capacity, Internal, RankTaken, UnknownKind
from chitu.kv_transfer.kv_manager import TransferSide
from chitu.net.curve import ClusterSecrets, make_context
from chitu.net.link import LinkReceivers
from chitu.net.sockets import PushSocket, bind, connect
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
from chitu.types import place_text

logger = logging.getLogger(__name__)

ABANDONED = 20
"""An added instance has lost its cluster after so many times `router_s`: after 10 minutes with the default."""
POLL_MS = 50
"""Longest time between two checks of the deadlines."""
MAX_MESSAGES_PER_TURN = 1000
"""Messages read from one socket before the next one is served, so a flood on one cannot starve the rest."""


class SilenceWatch:
    """Detector of routers that are gone for good, and of a step thread that hangs while heartbeats continue."""

    def __init__(self, deadlines: DeadlineConfig, num_routers: int = 1) -> None:
        self._deadlines = deadlines
        self._routers = [Silence(deadlines.heartbeat_interval_s) for _ in range(num_routers)]
        self._step = Silence(deadlines.heartbeat_interval_s)
        self._silences_s = [0.0] * num_routers

    def look(self, num_views: Sequence[int], step_turns: int) -> list[tuple[int, float]]:
        """Return the routers (by index) whose silence has reached `router_s`, once per silence, with the seconds
        without a view. Raise Internal for a step of `step_s`, which ends the process. Called every
        `heartbeat_interval_s`."""
        step_s = self._step.seconds(step_turns)
        if step_s >= self._deadlines.step_s:
            raise Internal(f"the step thread has made no progress for {step_s:.1f} s (deadlines.step_s)")
        before_s = self._silences_s
        self._silences_s = [silence.seconds(n) for silence, n in zip(self._routers, num_views, strict=True)]
        return [
            (index, now_s)
            for index, (was_s, now_s) in enumerate(zip(before_s, self._silences_s, strict=True))
            if was_s < self._deadlines.router_s <= now_s
        ]

    @property
    def silence_s(self) -> float:
        """For how long all routers have been silent."""
        return min(self._silences_s)

    @property
    def is_abandoned(self) -> bool:
        """Whether the cluster has probably ended: a router that is started again is back sooner."""
        return self.silence_s >= ABANDONED * self._deadlines.router_s


@dataclass(slots=True, frozen=True)
class RouterAddress:
    """The router's host and its TCP ports."""

    host: str
    stats_port: int
    coordination_port: int
    metadata_sync_port: int
    token_port: int = 0


class RouterContact:
    """One router of the list, as the comm thread knows it: its sockets, its newest view, and when to join it. Other
    threads only read `joined`, `is_silent` and `num_views`."""

    def __init__(
        self, index: int, address: RouterAddress, context: zmq.Context[zmq.Socket[bytes]], now_s: float
    ) -> None:
        self.index = index
        self.address = address
        self._context = context
        self.coordination = connect(
            context, zmq.DEALER, address.host, address.coordination_port, queues_unconnected=False
        )
        self.stats = connect(context, zmq.PUSH, address.host, address.stats_port)
        self.feed = ViewReceiver(now_s)
        self.view = self._open_view()
        self.incarnation = 0
        self.version = -1
        self.first_view = (0, 0)
        """First view of this router, or of one that it replaced, that listed this instance."""
        self.known_at_birth = 0
        """Incarnation whose views came before any router listed this instance."""
        self.joined = False
        """Whether the newest view lists this instance."""
        self.knows_drain = False
        """Whether it lists this instance as draining, or not, as it is."""
        self.taken_back = ""
        """Change of role that it learnt from this instance, and does not know yet to be taken back."""
        self.num_views = 0
        """How often the router has shown that the view here is its newest."""
        self.is_silent = False
        """Whether no view came for a lease: what its newest one says of other instances may be long past."""
        self.silence: Silence | None = None
        self.next_join_s = 0.0

    def _open_view(self) -> zmq.Socket[bytes]:
        socket = connect(self._context, zmq.SUB, self.address.host, self.address.metadata_sync_port)
        for topic in (VIEW_TOPIC, self.feed.topic):
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

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


class HeartbeatSocket:
    """What heartbeats to one router leave through. Heartbeat thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: RouterAddress, clock: Clock) -> None:
        self._address = address.host, address.stats_port
        # Only the newest state is worth sending: a router that was away needs no history.
        self._socket = PushSocket(context, *self._address, most_queued=10, queues_unconnected=False)
        self._clock = clock
        self._sent_s = clock.monotonic()
        self._is_away = False

    def send(self, frame: bytes, lease_s: float) -> None:
        """Send a heartbeat, if the router is there. Log once that none has reached it for a lease."""
        now_s = self._clock.monotonic()
        if self._socket.send(frame):
            if self._is_away:
                logger.info("heartbeats reach the router again")
            self._sent_s, self._is_away = now_s, False
        elif not self._is_away and now_s >= self._sent_s + lease_s:
            self._is_away = True
            text = "no heartbeat reaches the router at %s:%d: it is down, it hangs, or the address is wrong"
            logger.warning(text, *self._address)

    def close(self) -> None:
        self._socket.close(linger_ms=0)


class CommOwner(Protocol):
    """The owner of a `CommLoop`, which calls these methods on the comm thread. Each returns at once. `router` is the
    index of a router in the list."""

    def on_request(self, message: SchedulerMessage, /) -> None: ...

    def on_link_ack(self, ack: LinkAck) -> None:
        """Take the router's acknowledgement of tokens."""

    def on_view(self, view: ClusterView, router: int) -> None: ...

    def on_new_router(self, router: int) -> None:
        """Drop all requests: a router with another incarnation appeared, and nothing reads tokens of the old one's."""

    def on_refused(self, code: str, message: str) -> None:
        """End: the router refuses this instance for good."""

    def on_drain(self, becomes: str) -> None:
        """Finish the running requests and leave, or change the role (`InstanceInfo.becomes`): the routers send no more.
        Called once, and again with "" if it is to leave after all."""

    def on_stay(self) -> None:
        """Stay what it is, if that is possible still: the router takes its change of role back."""

    def on_silence(self, router: int) -> None:
        """Count no more what this router wants of the cluster: it was silent for a lease."""

    def on_missing(self) -> None:
        """Send the next heartbeat, which reports that a request was lost in transit, without delay."""


class CommLoop:
    """Sockets and loop of the comm thread. The main thread builds and binds it; the comm thread alone runs it."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        routers: Sequence[RouterAddress],
        clock: Clock,
        secrets: ClusterSecrets | None = None,
    ) -> None:
        """`routers`: all that the instance joins, in the order of the configuration."""
        self._clock = clock
        self.context = make_context(secrets)
        self._requests, self.port = bind(self.context, zmq.PULL, bind_host, port)
        self._control, self.control_port = bind(self.context, zmq.PULL, bind_host, 0)
        now_s = clock.monotonic()
        self.routers = [RouterContact(i, address, self.context, now_s) for i, address in enumerate(routers)]
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._to_peers: deque[tuple[str, int, bytes, bytes]] = deque()
        """Frames for peers: host, port, room, message."""
        self._to_stats: deque[bytes] = deque()
        self._leave: bytes | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not when `run` ends: other threads may write later
        self._stopping = False
        self._is_draining = False
        self._becomes = ""
        """What a router has asked this instance to become, while it drains for that."""
        self._asked_by = 0
        """Index of that router."""
        self._gets_other_rank = False
        """Whether this incarnation joins no more, as its rank was taken: the next one has another rank."""
        self._next: tuple[InstanceInfo, TransferSide] | None = None
        self._has_changed = threading.Event()
        self._first_view = (0, 0)
        """First view of any router that listed this instance."""
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
        """Queue a message to the stats ports of all routers."""
        self._to_stats.append(encode(message))
        os.eventfd_write(self._wake_fd, 1)

    def drain(self) -> None:
        """Tell all routers, until they know it, that this instance takes no new requests."""
        self._is_draining, self._becomes = True, ""
        self._tell()

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
        self._leave = encode(message)
        self.stop()

    def stop(self) -> None:
        """End `run` once every queued message is handed to its socket."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    @property
    def joined(self) -> bool:
        """Whether the newest view of a router lists this instance."""
        return any(router.joined for router in self.routers)

    @property
    def joined_routers(self) -> tuple[int, ...]:
        """Indices of the routers that list this instance and are heard."""
        return tuple(router.index for router in self.routers if router.joined and not router.is_silent)

    @property
    def num_views(self) -> tuple[int, ...]:
        """For each router, how often it has shown that the view here is its newest."""
        return tuple(router.num_views for router in self.routers)

    # ----------------------------------------------------------------------------------------------------- comm thread

    def run(
        self,
        instance: InstanceInfo,
        transfer: TransferSide,
        owner: CommOwner,
        deadlines: DeadlineConfig,
    ) -> None:
        """Serve the sockets until `stop`; send Join to each router whose newest view lacks this instance.

        After `lease_s` without a view a router may have removed this instance, and the view without it may be lost on a
        half-open connection, so the view socket is replaced. Join waits for a new view even then. If it came before a
        new router's first view, requests sent ahead of that view would be dropped as its predecessor's."""
        poller = zmq.Poller()
        views = [router.view for router in self.routers]
        for socket in (self._requests, self._control, *(router.coordination for router in self.routers), *views):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping or self._to_peers or self._to_stats:
            if self._next is not None:
                (instance, transfer), self._next = self._next, None
                self._start_again()
            now_s = self._clock.monotonic()
            for router in self.routers:
                if now_s >= router.next_join_s and not self._stopping:
                    self._keep_in_touch(router, instance, transfer, owner, deadlines, poller)
            ready = dict(poller.poll(POLL_MS))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._flush()
            if self._requests not in ready or self._drain_requests(owner):
                self.num_reads += 1
            if self._control in ready:
                self._drain_control(transfer)
            for router in self.routers:
                if router.coordination in ready:
                    self._drain_coordination(router, instance, owner)
                if router.view in ready:
                    self._drain_views(router, instance, transfer, owner)
            transfer.tick(self._clock.monotonic())
            self._flush()
        self._close()

    def _start_again(self) -> None:
        """Forget what the routers know of the former incarnation. The new side learns of its peers by the view that
        lists it, in which its former self is no peer of it."""
        self._is_draining, self._becomes, self._first_view, self._gets_other_rank = False, "", (0, 0), False
        for router in self.routers:
            router.joined, router.taken_back = False, ""
            router.first_view, router.known_at_birth = (0, 0), 0
        self._tell()
        self._has_changed.set()

    def _tell(self) -> None:
        """Tell all routers soon what they do not know."""
        for router in self.routers:
            router.knows_drain, router.next_join_s = False, 0.0
        os.eventfd_write(self._wake_fd, 1)

    def _keep_in_touch(
        self,
        router: RouterContact,
        instance: InstanceInfo,
        transfer: TransferSide,
        owner: CommOwner,
        deadlines: DeadlineConfig,
        poller: zmq.Poller,
    ) -> None:
        """Repeat what a router does not know yet, and notice its silence. Called every `retry_interval_s`."""
        router.next_join_s = self._clock.monotonic() + deadlines.retry_interval_s
        if router.silence is None:
            router.silence = Silence(deadlines.retry_interval_s)
        if router.silence.seconds(router.num_views) >= deadlines.lease_s:
            router.silence = Silence(deadlines.retry_interval_s)
            router.renew_view(poller)
            if not router.is_silent:
                router.is_silent = True
                transfer.on_silence(router.index)
                owner.on_silence(router.index)
        if router.joined:
            if not router.knows_drain and (self._is_draining or router.taken_back):
                (self._send_drain if self._is_draining and not self._becomes else self._join)(router, instance)
        elif self._may_join(router, instance):
            self._join(router, instance)

    def _may_join(self, router: RouterContact, instance: InstanceInfo) -> bool:
        """Return whether it is this router's turn. All that are up have to be heard before the first membership, which
        tells the routers that this process is newer than what they list from those that came later. Of two instances
        that are added or change their roles, with one rank, the first router takes one, and the other routers then the
        same."""
        if self._gets_other_rank:
            return False
        is_new = len(self.routers) > 1 and self._first_view == (0, 0)
        if is_new and not all(other.num_views or other.is_silent for other in self.routers):
            return False
        before = self.routers[: router.index] if instance.yields or instance.former else ()
        return all(other.joined or other.is_silent for other in before)

    def _join(self, router: RouterContact, instance: InstanceInfo) -> None:
        first_view = router.first_view
        if first_view == (0, 0) and router.feed.view.router_incarnation != router.known_at_birth:
            first_view = self._first_view  # it started later than this process, which may be older than others there
        instance = msgspec.structs.replace(
            instance,
            weights=self.weights,
            first_view=first_view,
            draining=self._is_draining,
            becomes=self._becomes,
        )
        with contextlib.suppress(zmq.Again):  # not connected; Join is sent again
            router.coordination.send(encode(Join(PROTOCOL_VERSION, instance)), zmq.NOBLOCK)

    def _send_drain(self, router: RouterContact, instance: InstanceInfo) -> None:
        message = Drain(instance.role, instance.engine_rank, instance.incarnation)
        with contextlib.suppress(zmq.Again):  # it is sent again
            router.coordination.send(encode(message), zmq.NOBLOCK)

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
            frame = self._to_stats.popleft()
            for router in self.routers:
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

    def _drain_control(self, transfer: TransferSide) -> None:
        for frame in _received(self._control):
            if len(frame) != 2 or len(frame[0]) != 16:
                self.bad_frames += 1
                logger.warning("control port: bad frame of %d parts", len(frame))
                continue
            if self.tracer is not None and self.tracer.rooms:
                self.tracer.frame(frame[0], "received", "control", frame[1])
            transfer.on_frame(frame[0], frame[1])

    def _drain_coordination(self, router: RouterContact, instance: InstanceInfo, owner: CommOwner) -> None:
        """Take Drain and refusals."""
        for frame in _received(router.coordination):
            try:
                reply = coordination_reply_codec.decode(frame[-1])
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("coordination: bad frame: %s", error)
                continue
            if isinstance(reply, JoinReply) and reply.code and reply.incarnation == instance.incarnation:
                if reply.code == RankTaken.code and reply.free_rank >= 0:
                    self._take_rank(router, instance, reply, owner)
                else:
                    owner.on_refused(reply.code, reply.message)
            elif isinstance(reply, Drain) and reply.incarnation == instance.incarnation:
                self._take_drain(owner, "", router)

    def _take_rank(self, router: RouterContact, instance: InstanceInfo, refusal: JoinReply, owner: CommOwner) -> None:
        """Begin anew with another rank, as this one was taken while the role changed. If a router before this one has
        the instance, the other one is on its way to another rank: Join is sent again."""
        logger.warning("a router refused %s: %s", instance.name, refusal.message)
        if self._gets_other_rank or self._is_draining or any(each.joined for each in self.routers[: router.index]):
            return
        self._gets_other_rank = True
        self._take_drain(owner, place_text(instance.role, refusal.free_rank), router)

    def _drain_views(
        self, router: RouterContact, instance: InstanceInfo, transfer: TransferSide, owner: CommOwner
    ) -> None:
        is_sign = False
        for frame in _received(router.view):
            try:
                is_sign |= router.feed.take(view_codec.decode(frame[-1]))
            except (BadFrame, UnknownKind) as error:
                self.bad_frames += 1
                logger.warning("view: bad frame: %s", error)
        if router.feed.should_ask(self._clock.monotonic()):
            ask_for_whole(router.view, router.feed.topic)
        if not is_sign:
            return
        router.num_views += 1
        view, was_silent, router.is_silent = router.feed.view, router.is_silent, False
        if (view.router_incarnation, view.version) == (router.incarnation, router.version) and not was_silent:
            return
        own = next((member for member in view.instances if member.incarnation == instance.incarnation), None)
        if router.joined and own is None:
            router.next_join_s = 0.0
        router.joined = own is not None
        if own is not None and router.first_view == (0, 0):
            router.first_view = view.router_incarnation, view.version
            if self._first_view == (0, 0):
                self._first_view = router.first_view
                for each in self.routers:
                    each.known_at_birth = each.feed.view.router_incarnation
        if own is not None:
            self._take_order(router, own, owner)
        if view.router_incarnation != router.incarnation:
            if router.incarnation:
                logger.warning("a new router took over")
                owner.on_new_router(router.index)
            router.incarnation = view.router_incarnation
        router.version = view.version
        self._forget_peers()
        transfer.on_view(view, router.index)
        owner.on_view(view, router.index)

    def _take_order(self, router: RouterContact, own: InstanceInfo, owner: CommOwner) -> None:
        """Drain, or stay after all, as the record of this instance in a new view says."""
        if not (own.draining and own.becomes and own.becomes == router.taken_back):
            router.taken_back = ""
            if own.draining:
                self._take_drain(owner, own.becomes, router)
            elif self._becomes and router.index == self._asked_by and not self._gets_other_rank:
                for other in self.routers:
                    other.taken_back = self._becomes if other is not router else ""
                self._is_draining, self._becomes = False, ""
                self._tell()
                owner.on_stay()
        router.knows_drain = (own.draining, own.becomes) == (self._is_draining, self._becomes)

    def _take_drain(self, owner: CommOwner, becomes: str, router: RouterContact) -> None:
        """Note that this instance drains; call `on_drain` once. The other routers learn it from the instance, and one
        that restarts meanwhile by Join. To leave wins over a change of role."""
        if not self._is_draining or (self._becomes and not becomes):
            self._is_draining, self._becomes, self._asked_by = True, becomes, router.index
            self._tell()
            owner.on_drain(becomes)

    def _forget_peers(self) -> None:
        """Close sockets to control ports that no member has any longer."""
        members = [member for router in self.routers for member in router.feed.view.instances]
        for address in self._peers.keys() - {(member.host, member.control_port) for member in members}:
            self._peers.pop(address).close()

    def _close(self) -> None:
        for socket in (*self._peers.values(), self._requests, self._control):
            socket.close(0)
        for router in self.routers:
            if self._leave is not None:
                with contextlib.suppress(zmq.Again):  # it is of no use to a router that is down
                    router.coordination.send(self._leave, zmq.NOBLOCK)
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
