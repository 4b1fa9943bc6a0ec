"""`Heartbeats`: the thread by which an instance of any role renews its lease, reports its load to each router, and
notices routers that are gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import zmq

from chitu.clock import Clock, RealClock
from chitu.config.schema import DeadlineConfig
from chitu.instance.comm import CommLoop, RouterAddress
from chitu.instance.contacts import SilenceWatch
from chitu.instance.weights import WeightsKeeper
from chitu.net.sockets import PushSocket
from chitu.net.threads import ServiceThread, Waker
from chitu.protocol import Heartbeat, InstanceInfo, LoadReport

logger = logging.getLogger(__name__)

SHORTEST_BEAT_S = 0.05
"""Shortest time between two heartbeats, however much there is to report."""

OnMember = Callable[[InstanceInfo, bool], None]


class InstanceReport(NamedTuple):
    """What an instance says of itself now, beside what its comm thread has read."""

    info: InstanceInfo
    load: LoadReport
    weights: WeightsKeeper
    """Asked behind all else, as the newest."""
    silent: tuple[int, ...] = ()
    """`Heartbeat.silent`."""


class HeartbeatOwner(Protocol):
    """The service of the process. Called on the heartbeat thread."""

    def report(self) -> InstanceReport: ...

    def num_turns(self) -> int:
        """Return how many turns the step thread has made."""
        ...

    def on_interval(self) -> None:
        """Do what is due every `heartbeat_interval_s`."""
        ...

    def on_silent_router(self, router: int, silence_s: float) -> None:
        """Take a router for lost: nothing was received from it for `router_s`. Called once per silence."""
        ...

    def is_leaving(self) -> bool:
        """Return whether `run` ends, or the role changes: then the instance is no member that takes requests."""
        ...

    def on_abandoned(self) -> None:
        """End: the cluster that this added instance joined has probably ended."""
        ...


class _HeartbeatSocket:
    """What heartbeats to one router leave through."""

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


class Heartbeats:
    def __init__(self, comm: CommLoop, deadlines: DeadlineConfig, owner: HeartbeatOwner) -> None:
        self._comm, self._deadlines, self._owner = comm, deadlines, owner
        self._wake, self._end = Waker(), threading.Event()
        self._thread: ServiceThread | None = None

    def start(self, on_member: OnMember) -> None:
        """`on_member` is called, on this thread, when the instance has become a member that takes requests, and when
        it is none any more, with its record."""
        self._thread = ServiceThread("heartbeat", lambda: self._run(on_member))
        self._thread.start()

    def soon(self) -> None:
        """Send the next heartbeat at once. Safe on any thread."""
        self._wake.wake()

    def end(self) -> None:
        self._end.set()
        self._wake.wake()

    def join(self, timeout: float) -> None:
        assert self._thread is not None, "it was not started"
        self._thread.join(timeout)

    def _run(self, on_member: OnMember) -> None:
        clock, interval_s, owner = RealClock(), self._deadlines.heartbeat_interval_s, self._owner
        comm = self._comm
        sockets = [_HeartbeatSocket(comm.context, router.address, clock) for router in comm.routers]
        watch = SilenceWatch(self._deadlines, len(sockets))
        was_member = False
        due_s = clock.monotonic() + interval_s
        while not self._end.wait(SHORTEST_BEAT_S):
            self._wake.wait(max(0.0, due_s - clock.monotonic()))
            if self._end.is_set():
                break
            if clock.monotonic() >= due_s:
                due_s = clock.monotonic() + interval_s
                self._look(watch)
                owner.on_interval()
            report = owner.report()
            info = report.info
            if (is_member := comm.contacts.joined and not owner.is_leaving()) != was_member:
                was_member = is_member
                on_member(info, is_member)
            message = Heartbeat(
                info.role,
                info.engine_rank,
                info.incarnation,
                report.load,
                # Evaluated in this order: `acks` covers all messages that those reads took.
                reads=comm.num_reads,
                acks=comm.received.acks(),
                silent=report.silent,
                weights=report.weights.report,
                routers=comm.contacts.joined_routers,
            )
            for socket, frame in zip(sockets, comm.frames_for_routers(message), strict=True):
                socket.send(frame, self._deadlines.lease_s)
        for socket in sockets:
            socket.close()

    def _look(self, watch: SilenceWatch) -> None:
        owner = self._owner
        for router, silence_s in watch.look(self._comm.contacts.num_views, owner.num_turns()):
            owner.on_silent_router(router, silence_s)
        if owner.report().info.yields and watch.is_abandoned and not owner.is_leaving():
            logger.error("nothing received from the router for %.0f s: this added instance ends", watch.silence_s)
            owner.on_abandoned()
