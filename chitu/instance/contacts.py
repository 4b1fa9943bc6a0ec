"""What an instance knows of each router, and what it tells it: when it joins, drains, or changes its role. Sans IO.

The comm thread's, which gives it the views and replies that arrived and calls `keep_in_touch`; what is to be sent goes
to its `ContactShell`, decisions go to the `CommOwner`. `SilenceWatch` is the heartbeat thread's.

Invariants: routers know nothing of each other, and nothing here that one of them does touches another one's requests.
An instance joins a router whose newest view lacks it, and repeats what a router does not know yet. To leave wins over a
change of role. A change that a router asked for is taken back by that router alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from chitu import __version__
from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import Internal, RankTaken
from chitu.kv_transfer.kv_manager import TransferSide
from chitu.net.view_feed import ASK_S, ViewReceiver
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    CoordinationReply,
    Drain,
    InstanceInfo,
    Join,
    JoinReply,
    LinkAck,
    SchedulerMessage,
)
from chitu.protocol.weights import Weights
from chitu.types import place_text

logger = logging.getLogger(__name__)

ABANDONED = 20
"""An added instance has lost its cluster after so many times `router_s`: after 10 minutes with the default."""


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


class ContactShell(Protocol):
    """What reaches the routers."""

    def send_coordination(self, router: int, message: Join | Drain) -> None:
        """Send a message to the coordination port. It may be lost: it is sent again."""

    def ask_views(self, router: int) -> None:
        """Subscribe to the topics of this router's feed, which are others now, in place of the last ones."""

    def renew_view(self, router: int) -> None:
        """Replace the connection on which views come: the old one may be half open."""

    def call_soon(self) -> None:
        """Call `keep_in_touch` soon."""


class RouterContact:
    """One router of the list."""

    def __init__(self, index: int, now_s: float) -> None:
        self.index = index
        self.feed = ViewReceiver(now_s)
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
        self.is_heard = False
        """Whether a view has come in the version of the wire in which it is asked for them, `feed.protocol`."""
        self.heard_incarnation = 0
        self.newest_heard = 0
        """Newest version in which this incarnation of it has sent views."""
        self.asked_s: float | None = None
        """Since when it is asked so; None: since a moment ago."""

    @property
    def protocol(self) -> int:
        """Version of the wire for what is sent to it. Any thread."""
        return self.feed.protocol


class Contacts:
    def __init__(self, shell: ContactShell, count: int, now_s: float) -> None:
        """`count`: routers that the instance joins, in the order of the configuration. Call `begin` before anything
        else."""
        self._shell = shell
        self.routers = [RouterContact(index, now_s) for index in range(count)]
        self._owner: CommOwner
        self._deadlines: DeadlineConfig
        self.instance: InstanceInfo
        self.transfer: TransferSide
        self._is_draining = False
        self._becomes = ""
        """What a router has asked this instance to become, while it drains for that."""
        self._asked_by = 0
        """Index of that router."""
        self._gets_other_rank = False
        """Whether this incarnation joins no more, as its rank was taken: the next one has another rank."""
        self._first_view = (0, 0)
        """First view of any router that listed this instance."""
        self.weights = Weights()
        """Weights that serve here; the step thread sets them."""

    def begin(
        self, instance: InstanceInfo, transfer: TransferSide, owner: CommOwner, deadlines: DeadlineConfig
    ) -> None:
        """Begin as this instance, which has no router yet."""
        self.instance, self.transfer, self._owner, self._deadlines = instance, transfer, owner, deadlines

    def start_again(self, instance: InstanceInfo, transfer: TransferSide) -> None:
        """Go on as another incarnation, with another side. Forget what the routers know of the former one. The new side
        learns of its peers by the view that lists it, in which its former self is no peer of it."""
        self.instance, self.transfer = instance, transfer
        self._is_draining, self._becomes, self._first_view, self._gets_other_rank = False, "", (0, 0), False
        for router in self.routers:
            router.joined, router.taken_back = False, ""
            router.first_view, router.known_at_birth = (0, 0), 0
        self._tell()

    # ------------------------------------------------------------------------------------------------------ any thread

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

    def drain(self) -> None:
        """Tell all routers, until they know it, that this instance takes no new requests."""
        self._is_draining, self._becomes = True, ""
        self._tell()

    def _tell(self) -> None:
        """Tell all routers soon what they do not know."""
        for router in self.routers:
            router.knows_drain, router.next_join_s = False, 0.0
        self._shell.call_soon()

    # ----------------------------------------------------------------------------------------------------- comm thread

    def keep_in_touch(self, now_s: float) -> None:
        """Repeat what the routers do not know yet, and notice their silence: each every `retry_interval_s`. Call it at
        least that often.

        After `lease_s` without a view a router may have removed this instance, and the view without it may be lost on a
        half-open connection, so the connection is renewed. Join waits for a new view even then. If it came before a new
        router's first view, requests sent ahead of that view would be dropped as its predecessor's."""
        for router in self.routers:
            if now_s >= router.next_join_s:
                self._keep_in_touch(router, now_s)

    def _keep_in_touch(self, router: RouterContact, now_s: float) -> None:
        deadlines = self._deadlines
        router.next_join_s = now_s + deadlines.retry_interval_s
        if router.asked_s is None or router.is_heard:
            router.asked_s = now_s
        elif now_s >= router.asked_s + self._patience_s(router):
            older = router.protocol - 1
            self._ask_views(router, older if older >= OLDEST_VERSION else PROTOCOL_VERSION)
        if router.silence is None:
            router.silence = Silence(deadlines.retry_interval_s)
        if router.silence.seconds(router.num_views) >= deadlines.lease_s:
            router.silence, router.is_heard = Silence(deadlines.retry_interval_s), False
            self._shell.renew_view(router.index)
            if not router.is_silent:
                router.is_silent = True
                self.transfer.on_silence(router.index)
                self._owner.on_silence(router.index)
        if router.joined:
            if not router.knows_drain and (self._is_draining or router.taken_back):
                (self._send_drain if self._is_draining and not self._becomes else self._join)(router)
        elif router.is_heard and self._may_join(router):
            self._join(router)

    def _patience_s(self, router: RouterContact) -> float:
        """Return for how long to wait for views in a version. A router that was heard in an older one is there: it gets
        the time that a slow machine may take before it falls back for good."""
        is_known = router.heard_incarnation and router.protocol == PROTOCOL_VERSION
        return max(ASK_S, self._deadlines.lease_s / 2) if is_known else ASK_S

    def _ask_views(self, router: RouterContact, protocol: int) -> None:
        """Ask a router for views in a version of the wire: in one after the other, until it answers."""
        router.feed.protocol, router.is_heard, router.asked_s = protocol, False, None
        self._shell.ask_views(router.index)

    def _may_join(self, router: RouterContact) -> bool:
        """Return whether it is this router's turn. All that are up have to be heard before the first membership, which
        tells the routers that this process is newer than what they list from those that came later. Of two instances
        that are added or change their roles, with one rank, the first router takes one, and the other routers then the
        same."""
        if self._gets_other_rank:
            return False
        is_new = len(self.routers) > 1 and self._first_view == (0, 0)
        if is_new and not all(other.num_views or other.is_silent for other in self.routers):
            return False
        instance = self.instance
        before = self.routers[: router.index] if instance.yields or instance.former else ()
        return all(other.joined or other.is_silent for other in before)

    def _join(self, router: RouterContact) -> None:
        first_view = router.first_view
        if first_view == (0, 0) and router.feed.view.router_incarnation != router.known_at_birth:
            first_view = self._first_view  # it started later than this process, which may be older than others there
        instance = msgspec.structs.replace(
            self.instance,
            weights=self.weights,
            first_view=first_view,
            draining=self._is_draining,
            becomes=self._becomes,
            protocol=PROTOCOL_VERSION,
            release=__version__,
        )
        self._shell.send_coordination(router.index, Join(router.protocol, instance))

    def _send_drain(self, router: RouterContact) -> None:
        instance = self.instance
        self._shell.send_coordination(router.index, Drain(instance.role, instance.engine_rank, instance.incarnation))

    def take_reply(self, index: int, reply: CoordinationReply) -> None:
        """Take what came from a coordination port: a Drain, or the answer to a Join."""
        router, instance = self.routers[index], self.instance
        if isinstance(reply, JoinReply) and reply.code and reply.incarnation == instance.incarnation:
            if reply.code == RankTaken.code and reply.free_rank >= 0:
                self._take_rank(router, reply)
            else:
                self._owner.on_refused(reply.code, reply.message)
        elif isinstance(reply, Drain) and reply.incarnation == instance.incarnation:
            self._take_drain("", router)

    def _take_rank(self, router: RouterContact, refusal: JoinReply) -> None:
        """Begin anew with another rank, as this one was taken while the role changed. If a router before this one has
        the instance, the other one is on its way to another rank: Join is sent again."""
        instance = self.instance
        logger.warning("a router refused %s: %s", instance.name, refusal.message)
        if self._gets_other_rank or self._is_draining or any(each.joined for each in self.routers[: router.index]):
            return
        self._gets_other_rank = True
        self._take_drain(place_text(instance.role, refusal.free_rank), router)

    def take_view(self, index: int) -> None:
        """Handle that the router has shown the view in its feed to be its newest."""
        router = self.routers[index]
        router.num_views += 1
        if not router.is_heard or router.feed.view.router_incarnation != router.heard_incarnation:
            self._note_heard(router)
        view, was_silent, router.is_silent = router.feed.view, router.is_silent, False
        if (view.router_incarnation, view.version) == (router.incarnation, router.version) and not was_silent:
            return
        incarnation = self.instance.incarnation
        own = next((member for member in view.instances if member.incarnation == incarnation), None)
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
            self._take_order(router, own)
        if view.router_incarnation != router.incarnation:
            if router.incarnation:
                logger.warning("a new router took over")
                self._owner.on_new_router(router.index)
            router.incarnation = view.router_incarnation
        router.version = view.version
        self.transfer.on_view(view, router.index)
        self._owner.on_view(view, router.index)

    def _note_heard(self, router: RouterContact) -> None:
        """Note that a router has answered in the version in which it was asked. A new one may have begun to answer only
        now: the newest version is tried again then. So is one in which it has answered before."""
        is_new = router.feed.view.router_incarnation != router.heard_incarnation
        router.heard_incarnation = router.feed.view.router_incarnation
        if is_new:
            router.newest_heard = 0
        newest = PROTOCOL_VERSION if is_new else router.newest_heard
        router.newest_heard = max(router.newest_heard, router.protocol)
        if router.protocol < newest:
            self._ask_views(router, newest)
        else:
            router.is_heard, router.next_join_s = True, 0.0

    def _take_order(self, router: RouterContact, own: InstanceInfo) -> None:
        """Drain, or stay after all, as the record of this instance in a new view says."""
        if not (own.draining and own.becomes and own.becomes == router.taken_back):
            router.taken_back = ""
            if own.draining:
                self._take_drain(own.becomes, router)
            elif self._becomes and router.index == self._asked_by and not self._gets_other_rank:
                for other in self.routers:
                    other.taken_back = self._becomes if other is not router else ""
                self._is_draining, self._becomes = False, ""
                self._tell()
                self._owner.on_stay()
        router.knows_drain = (own.draining, own.becomes) == (self._is_draining, self._becomes)

    def _take_drain(self, becomes: str, router: RouterContact) -> None:
        """Note that this instance drains; call `on_drain` once. The other routers learn it from the instance, and one
        that restarts meanwhile by Join. To leave wins over a change of role."""
        if not self._is_draining or (self._becomes and not becomes):
            self._is_draining, self._becomes, self._asked_by = True, becomes, router.index
            self._tell()
            self._owner.on_drain(becomes)


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
