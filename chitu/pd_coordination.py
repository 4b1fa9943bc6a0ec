"""Membership of the cluster: which instances are alive, in which incarnation, until when.

The pure core: messages and a clock in, replies and changes of the view out. `cluster/membership.py` is its shell on the
router's loop thread, and its only caller.

Invariants: at most one live incarnation of an instance (role, engine_rank). A process that joins for the first time
replaces another one, unless it yields. A replaced one is refused from then on, as is one that returns to find its place
taken; one that changed its role is told another place. All live P and D can exchange pages (`compatibility.py`). An
instance is in the view exactly while its lease runs, or until its death is known sooner (by its pid on this machine,
from its launcher on another). A lost instance is reported once through `on_lost`, after it left the view. The view
calls an instance dead only if all its processes are known to have ended; silence and a Leave of its own prove nothing.
An instance that changes its role drains as what it was, then joins as what it becomes, under a new incarnation. That
join takes the old one out of the same view, and never takes a place that belongs to another process. A change of role
that this router asked for is taken back if nothing serves without that instance any more. The members of a group live
and die together: a lost one takes the others along, whatever signs of life they give, and so does one that drains or
changes its role. Nothing here depends on requests, and the work of a join or a heartbeat does not depend on the number
of members.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import (
    BadFrame,
    Capacity,
    ChituError,
    ConfigError,
    IncompatibleLayout,
    LastInstance,
    RankTaken,
    RoleRefused,
)
from chitu.net.sockets import check_address
from chitu.net.view_feed import ViewSender
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    CoordinationReply,
    GroupPlace,
    Heartbeat,
    InstanceInfo,
    Join,
    JoinReply,
    Leave,
    LoadReport,
    LostInstance,
    MemberMessage,
    ViewChange,
)
from chitu.protocol.weights import WeightsOrder, WeightsReport
from chitu.router.candidates import Candidates
from chitu.router.compatibility import MemberKinds
from chitu.router.metrics import CoordinationMetrics
from chitu.router.weights import ClusterWeights
from chitu.types import Role, instance_name, place_of, place_text

logger = logging.getLogger(__name__)

MAX_TICK_GAP_S = 0.5
"""A longer gap between two ticks is a stall of the router; instances are not blamed for it."""
LINGER_S = 2.0
"""Delay from the end of an instance's processes until it is called dead: its kernel may still be sending what they
wrote, as it does over TCP."""
KEPT_DOOMED = 1024
"""Lost members of groups whose own end is awaited."""
KEPT_REPLACED = 16_384
"""Replaced incarnations that are remembered, to be refused: several for each instance of a large cluster."""


@dataclass(slots=True)
class _Member:
    info: InstanceInfo
    lease_end_s: float
    identity: bytes
    """ZMQ identity of the connection that it joined through; a Drain is sent there."""
    joined_s: float
    heard_s: float
    """Time of its last heartbeat."""
    load: LoadReport = field(default_factory=LoadReport)
    routers: tuple[int, ...] = ()
    """As in its last heartbeat."""
    weights: WeightsReport = field(default_factory=WeightsReport)


class MembershipListener(Protocol):
    """Owner of the sockets and of the requests, which follow the membership."""

    def on_joined(self, instance: InstanceInfo) -> None:
        """Connect to an instance that joins. If this raises, it is not admitted."""

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        """Handle the loss of an instance, which is no member any more; the next view lacks it. `has_died`: its process
        is known to have ended, or that of a member of its group, so it was not only silent, and did not leave by
        itself."""

    def on_change(self) -> None:
        """Call `next_change` soon, once for any number of changes."""


def places_in(join: Join) -> list[tuple[Role, int] | None]:
    """Return the places `home` and `becomes` of a join, role and rank each. Raises ConfigError for another protocol
    version, BadFrame for numbers that are out of range."""
    if not OLDEST_VERSION <= join.protocol_version <= PROTOCOL_VERSION:
        raise ConfigError(
            f"protocol version {join.protocol_version}; this router speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}: "
            "run the same release everywhere, or two that follow each other"
        )
    info = join.instance
    check_address(info.host, info.port)
    if info.engine_rank < 0 or not all(0 <= port <= 65535 for port in (info.control_port, info.image_port)):
        ports = f"control_port {info.control_port}, image_port {info.image_port}"
        raise BadFrame(f"engine_rank {info.engine_rank}, {ports}: out of range")
    if info.group is not None and not 0 <= info.group.rank < info.group.size:
        raise BadFrame(f"data rank {info.group.rank} in a group of {info.group.size}: out of range")
    try:
        return [place_of(text) if text else None for text in (info.home, info.becomes)]
    except ValueError as error:
        raise BadFrame(f"home {info.home!r}, becomes {info.becomes!r}: not role and rank") from error


class PDCoordination:
    def __init__(
        self,
        clock: Clock,
        deadlines: DeadlineConfig,
        router_incarnation: int,
        listener: MembershipListener,
        places: Iterable[tuple[Role, int]] = (),
        index: int = 0,
        num_routers: int = 1,
    ) -> None:
        """`places`: those of the topology. `index`: that of this router in `router.hosts`, which has `num_routers`."""
        self._index = index
        self._clock = clock
        self._deadlines = deadlines
        self._listener = listener
        self._members: dict[tuple[Role, int], _Member] = {}
        self._last: dict[tuple[Role, int], InstanceInfo] = {}
        """Incarnation that joined last as this instance, member or not."""
        self._owned = set(places)
        """Places (role and rank) of the topology, and of each process where it joined first. A change of role leads to
        another one, or back to its own."""
        self._groups: dict[int, dict[int, _Member]] = {}
        """Members of each group that are here, by its id and by data rank."""
        self._doomed: dict[int, InstanceInfo] = {}
        """Lost members of a group of which a process has died, by incarnation: it is not known yet that they ended,
        too. They will, so they do not join again."""
        self._moved: dict[tuple[Role, int], _Member] = {}
        """Members that changed their role, by the place in which they were started."""
        self._reserved: dict[tuple[Role, int], int] = {}
        """Places that draining members get, with their incarnations."""
        self._asked: dict[int, bool] = {}
        """Incarnations of members that change their role because this router asked for it, and whether it takes that
        back if nothing serves without them."""
        self._kinds = MemberKinds()
        self.weights = ClusterWeights(index, num_routers)
        """Whoever calls its methods calls `publish_weights` then."""
        self._order = WeightsOrder()
        self._replaced: dict[int, None] = {}
        """Incarnations that are refused, in the order in which they were replaced."""
        self._ended: list[tuple[float, int]] = []
        """Incarnations without a process, each after the time from which it may be called dead; in this order."""
        self._last_tick_s = clock.monotonic()
        self._feed = ViewSender(router_incarnation)
        self._metrics = CoordinationMetrics()

    @property
    def view(self) -> ClusterView:
        """The view of the last `next_change`."""
        return self._feed.view

    @property
    def routed_view(self) -> ClusterView:
        """The same as requests are routed by it. New ones also wait if another router has them wait, as the members
        report, or if nothing serves until members have changed their weights."""
        view = self._feed.view
        if view.weights.holds or not (self.weights.are_held or self._lacks_weights(view)):
            return view
        return msgspec.structs.replace(view, weights=msgspec.structs.replace(view.weights, holds=True))

    def _lacks_weights(self, view: ClusterView) -> bool:
        if self.weights.is_uniform or Candidates.in_view(view).usable:
            return False
        able = [i for i in view.instances if not self.weights.cannot_read(i.role, i.engine_rank)]
        return Candidates.among(able).usable

    @property
    def has_change(self) -> bool:
        """Whether something has changed since the last `next_change`."""
        return self._feed.is_changed

    def next_change(self) -> ViewChange:
        """Return what has changed since the last call, which `view` includes from now on; see `ViewSender`."""
        return self._feed.next_change()

    def on_message(self, message: MemberMessage, identity: bytes = b"") -> CoordinationReply | None:
        """Handle one message of an instance; return the reply, if it has one."""
        if isinstance(message, Join):
            if self.is_doomed(message.instance.incarnation):
                logger.info("%s does not join again: a process of its group has ended", message.instance.name)
                return None
            try:
                self._join(message, identity)
            except Capacity as error:  # this process has no socket left; the instance asks again
                logger.warning("%s cannot join now: %s", message.instance.name, error)
                return None
            except ChituError as error:
                logger.warning("refused %s: %s", message.instance.name, error)
                reply = JoinReply(message.instance.incarnation, code=error.code, message=error.message)
                if isinstance(error, RankTaken) and message.instance.former:
                    free = self._free_rank(message.instance.role, message.instance.home)
                    reply = msgspec.structs.replace(reply, free_rank=free)
                return reply
            return JoinReply(message.instance.incarnation, lease_s=self._deadlines.lease_s)
        member = self._live(message.role, message.engine_rank, message.incarnation)
        info = self._doomed.get(message.incarnation) if member is None else member.info
        if isinstance(message, Leave) and info is not None and _proves_death(message, info):
            self._add_ended(info)
        if member is None:
            return None
        if isinstance(message, Leave):
            reason = f"it left ({message.reason})" if message.reason else "it left"
            has_died = bool(message.dead_pids)  # its launcher says that, at times before the router itself sees it
            if has_died:
                self._metrics.deaths[member.info.name] += 1
            self._lose(member, reason, has_died)
        else:
            self._drain(member)
        return None

    def on_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Renew a lease. Return False, and do nothing else, for an incarnation that is not a member: it will join
        again."""
        member = self._live(heartbeat.role, heartbeat.engine_rank, heartbeat.incarnation)
        if member is None:
            self._metrics.unknown_heartbeats += 1
            return False
        member.heard_s = self._clock.monotonic()
        member.lease_end_s = member.heard_s + self._deadlines.lease_s
        member.load, member.routers = heartbeat.load, heartbeat.routers
        if heartbeat.weights != member.weights:
            member.weights = heartbeat.weights
            if heartbeat.weights.serves != member.info.weights:
                self._set_info(member, msgspec.structs.replace(member.info, weights=heartbeat.weights.serves))
                self.weights.on_info(member.info)
            self.weights.on_report(member.info, heartbeat.weights)
            self.publish_weights()
            self._listener.on_change()  # `routed_view` may be another one
        return True

    def publish_weights(self) -> None:
        """Publish what the instances have to do about weights, if it is something else now."""
        if (order := self.weights.order) != self._order:
            self._order = order
            self._feed.set_weights(order)
            self._listener.on_change()

    def tick(self, read_until_s: float = math.inf) -> None:
        """End the leases that ran out before `read_until_s`, the time until which the heartbeats that arrived were
        read: a router that is behind with them blames no instance. Call it at least every `MAX_TICK_GAP_S`."""
        now_s = self._clock.monotonic()
        stall_s, self._last_tick_s = now_s - self._last_tick_s, now_s
        if stall_s > MAX_TICK_GAP_S:
            logger.warning("the router was suspended for %.1f s; leases are extended by that time", stall_s)
            for member in self._members.values():
                member.lease_end_s += stall_s
        read_until_s = min(now_s, read_until_s)
        for member in [m for m in self._members.values() if m.lease_end_s <= read_until_s]:
            if self._is_here(member):  # else another one of its group took it along
                self._metrics.expired_leases[member.info.name] += 1
                self._lose(member, f"no heartbeat for {self._deadlines.lease_s:g} s")
        if self._ended and self._ended[0][0] <= now_s:
            dead = [incarnation for due_s, incarnation in self._ended if due_s <= now_s]
            del self._ended[: len(dead)]
            self._feed.note_dead(dead)
            self._listener.on_change()

    def on_death(self, role: Role, engine_rank: int, incarnation: int) -> None:
        """Remove an instance whose process has ended, and its group, without waiting for a lease."""
        member = self._live(role, engine_rank, incarnation)
        info = self._doomed.get(incarnation) if member is None else member.info
        if info is not None and not info.follower_pids:  # followers write, too, and end a little later
            self._add_ended(info)
        if member is not None:
            self._metrics.deaths[member.info.name] += 1
            self._lose(member, f"its process (pid {member.info.pid}) has ended", has_died=True)

    def is_doomed(self, incarnation: int) -> bool:
        """Return whether it is a lost member of a group of which a process has died, so that its own ends, too."""
        return incarnation in self._doomed

    def metrics(self) -> CoordinationMetrics:
        """Return the counts since the start, and the ages of members and of their heartbeats."""
        now_s = self._clock.monotonic()
        return msgspec.structs.replace(
            self._metrics,
            ages_s={m.info.name: now_s - m.joined_s for m in self._members.values()},
            heartbeat_ages_s={m.info.name: now_s - m.heard_s for m in self._members.values()},
        )

    def flush_caches(self, number: int) -> None:
        """Publish a flush: every instance that sees a view with this number drops its cache; views repeat
        it."""
        self._feed.set_cache_flush(number)
        self._listener.on_change()

    def loads(self) -> dict[tuple[Role, int], LoadReport]:
        """Return the last report of each member."""
        return {key: member.load for key, member in self._members.items()}

    @property
    def routers(self) -> list[int]:
        """Indices, in order, of the routers that a member is joined to and hears: the first does what one router does
        for all."""
        return sorted({index for member in self._members.values() for index in member.routers})

    @property
    def first_router(self) -> int:
        """The first of `routers`; the first of the list while no member has reported."""
        return next(iter(self.routers), 0)

    def require_others(self, role: Role, engine_rank: int, command: str) -> None:
        """Raise LastInstance if requests can be served now but not without this member. Others count if they take new
        requests and every router has them. `command` does it nevertheless."""
        member = self._members[role, engine_rank]
        if member.info.draining or not self._serving(self._members.values()).usable:
            return
        routers = {*self.routers} - {self._index}
        others = [m for m in self._members.values() if m is not member and routers <= {*m.routers}]
        left = self._serving(others)
        if not left.usable:
            names = " and ".join(each.info.name for each in self._group_of(member))
            raise LastInstance(
                f"without {names} nothing could be served ({left.why_unusable()}): start another one first, "
                f"or force it (`{command} --force`)"
            )

    @property
    def are_everywhere(self) -> bool:
        """Whether every router has every member, as far as the members have reported."""
        routers = {*self.routers} - {self._index}
        return all(routers <= {*member.routers} for member in self._members.values())

    def _serving(self, members: Iterable[_Member]) -> Candidates:
        weights = self.view.weights
        return Candidates.among([m.info for m in members], None if weights.holds else weights.serve)

    def find(self, name: str) -> InstanceInfo | None:
        """Return the record of a member, as it is now."""
        return next((m.info for m in self._members.values() if m.info.name == name), None)

    def connection(self, info: InstanceInfo) -> bytes:
        """Return the connection of a member."""
        return self._members[info.role, info.engine_rank].identity

    def drain(self, role: Role, engine_rank: int) -> tuple[bytes, InstanceInfo] | None:
        """Stop new requests to an instance, and to its group; the view asks them to finish and leave. Return its
        connection and record, or None if it is not a member. Idempotent."""
        member = self._members.get((role, engine_rank))
        if member is None:
            return None
        self._drain(member)
        return member.identity, member.info

    def change_role(self, role: Role, engine_rank: int, wanted: Role, *, is_revocable: bool = False) -> InstanceInfo:
        """Stop new requests to a member, and to its group; the view asks them to finish, or give back, their requests
        and to join again as another role, with the lowest ranks that are free. Return its record. Raises RoleRefused.
        `is_revocable`: they stay what they are if nothing serves without them any more before the first has
        changed."""
        member = self._members[role, engine_rank]
        group = self._group_of(member)
        if member.info.group is not None and len(group) < member.info.group.size:
            raise RoleRefused(f"the group of {member.info.name} is not complete: a group changes its role as a whole")
        new: list[InstanceInfo] = []
        for each in group:
            _require_change(each.info, wanted)
            rank = self._free_rank(wanted, each.info.home, {(wanted, other.engine_rank) for other in new})
            new.append(msgspec.structs.replace(each.info, role=wanted, engine_rank=rank))
            if reason := self._kinds.why_incompatible(new[-1]):
                raise RoleRefused(reason)
        for each, then in zip(group, new, strict=True):
            logger.info("%s will become %s", each.info.name, then.name)
            becomes = place_text(wanted, then.engine_rank)
            self._put_info(each, msgspec.structs.replace(each.info, draining=True, becomes=becomes))
        self._on_change()
        self._asked |= {each.info.incarnation: is_revocable for each in group}
        return member.info

    def _on_change(self) -> None:
        """Tell the listener that members have changed. Before that, take back changes of role if nothing serves any
        more and an instance that is about to change would."""
        asked = [m for m in self._members.values() if self._asked.get(m.info.incarnation)] if self._asked else []
        # A group of which a member has changed already cannot stay.
        changing = [m for m in asked if all(self._asked.get(each.info.incarnation) for each in self._group_of(m))]
        if changing and not Candidates.among(m.info for m in self._members.values()).usable:
            stays = {m.info.incarnation: msgspec.structs.replace(m.info, draining=False, becomes="") for m in changing}
            if Candidates.among(stays.get(m.info.incarnation, m.info) for m in self._members.values()).usable:
                for each in self._group_of(changing[0]):
                    logger.warning("%s stays what it is: nothing else is left that serves", each.info.name)
                    del self._asked[each.info.incarnation]
                    self._put_info(each, stays[each.info.incarnation])
                self._on_change()  # which may take back more
                return
        self._listener.on_change()

    def _free_rank(self, role: Role, home: str, others: Set[tuple[Role, int]] = frozenset()) -> int:
        """Return the rank that an instance gets which changes to `role`: that of its home, if it has this role, else
        the lowest one that belongs to no process and that no other one gets, such as these `others`."""
        taken = self._members.keys() | self._reserved.keys() | others
        if home and place_of(home)[0] is role and place_of(home) not in taken:
            return place_of(home)[1]
        return next(rank for rank in count() if (role, rank) not in taken | self._owned)

    def knows(self, role: Role, engine_rank: int, incarnation: int) -> bool:
        """Return whether this process is the one that joined as this instance last; it may have left since."""
        last = self._last.get((role, engine_rank))
        return last is not None and incarnation in (last.incarnation, *last.former)

    def _live(self, role: Role, engine_rank: int, incarnation: int) -> _Member | None:
        member = self._members.get((role, engine_rank))
        return member if member is not None and member.info.incarnation == incarnation else None

    def _is_here(self, member: _Member) -> bool:
        return self._members.get((member.info.role, member.info.engine_rank)) is member

    def _group_of(self, member: _Member) -> list[_Member]:
        """Return the members of its group that are here, itself included, by data rank."""
        group = member.info.group
        return [member] if group is None else [each for _, each in sorted(self._groups[group.id].items())]

    def _drain(self, member: _Member) -> None:
        for each in self._group_of(member):
            if not each.info.draining or each.info.becomes:
                logger.info("%s drains", each.info.name)
                self._asked.pop(each.info.incarnation, None)
                self._set_info(each, msgspec.structs.replace(each.info, draining=True, becomes=""))

    def _join(self, join: Join, identity: bytes) -> None:
        info, (home, becomes) = join.instance, places_in(join)
        key = (info.role, info.engine_rank)
        now_s = self._clock.monotonic()
        lease_end_s = now_s + self._deadlines.lease_s
        present, last = self._members.get(key), self._last.get(key, info)
        is_other = last.incarnation != info.incarnation
        if is_other and (info.returns or info.incarnation in self._replaced):
            raise RankTaken(
                f"{info.name} is another process by now (incarnation {last.incarnation}, pid {last.pid}): "
                "end one of the two, or give it another rank"
            )
        if is_other and (info.yields or info.former) and present is not None:
            raise RankTaken(
                f"{info.name} is in the cluster (pid {present.info.pid} on {present.info.host}): drain it first, or "
                "give another --rank"
            )
        if info.yields and self._reserved.get(key) not in (None, *info.former):
            raise RankTaken(f"an instance that changes its role becomes {info.name}: give another --rank")
        moved = self._moved.get(key)
        if info.yields and moved is not None and moved.info.incarnation not in info.former:
            raise RankTaken(f"{moved.info.name} was started as {info.name}: give another --rank")
        if present is not None and not is_other:
            # Peers that see it for the first time must learn that it was new to this router.
            info = msgspec.structs.replace(info, first_view=present.info.first_view)
        is_repetition = present is not None and present.info == info
        if not is_repetition and (reason := self._kinds.why_incompatible(info)):
            raise IncompatibleLayout(reason)
        if reason := self.weights.why_unable(info):
            raise IncompatibleLayout(reason)
        if present is not None and not is_other:
            present.identity = identity
            present.lease_end_s = lease_end_s
            # One that drains is told so by this router, or by another one, which alone may take it back.
            is_free = not present.info.draining or (present.info.becomes and info.incarnation not in self._asked)
            if not is_repetition and is_free:
                self._set_info(present, info)
                self.weights.on_info(info)
                self.publish_weights()
            return
        if present is not None:
            self._lose(present, "a newer process took its place", has_died=True)
        if moved is not None and not info.former and self._is_here(moved):
            self._lose(moved, f"its process was started again as {info.name}", has_died=True)
        self._listener.on_joined(info)  # raises if it gets no socket: then it is no member
        former = [m for m in self._members.values() if m.info.incarnation in info.former] if info.former else []
        for member in former:
            if member.info.draining and not member.info.becomes:  # it was asked to leave meanwhile
                info = msgspec.structs.replace(info, draining=True)
            self._remove([member], f"it became {info.name}")
            self._last[member.info.role, member.info.engine_rank] = info
        for incarnation in (*([last.incarnation] if is_other else []), *info.former):
            self._replaced[incarnation] = None
        while len(self._replaced) > KEPT_REPLACED:
            del self._replaced[next(iter(self._replaced))]
        self._last[key] = info
        self._owned.add(home or key)
        self._members[key] = member = _Member(info, lease_end_s, identity, now_s, now_s)
        if home is not None:
            self._moved[home] = member
        if info.group is not None:
            self._groups.setdefault(info.group.id, {})[info.group.rank] = member
        self._kinds.add(info)
        if becomes is not None:
            self._reserved[becomes] = info.incarnation
        logger.info("%s joined (pid %d, incarnation %d)", info.name, info.pid, info.incarnation)
        if info.layout.is_fake:
            logger.warning("%s is FAKE: it computes no model (chitu serve --fake)", info.name)
        self._feed.put(info)
        self.weights.on_info(info)
        self.publish_weights()
        self._listener.on_change()
        if any(each.info.draining and not each.info.becomes for each in self._group_of(member)):
            self._drain(member)  # its group was asked to leave before it joined

    def _set_info(self, member: _Member, info: InstanceInfo) -> None:
        self._put_info(member, info)
        self._on_change()

    def _put_info(self, member: _Member, info: InstanceInfo) -> None:
        self._kinds.remove(member.info)
        self._kinds.add(info)
        self._release_place(member.info)
        if info.becomes:
            self._reserved[place_of(info.becomes)] = info.incarnation
        member.info = info
        self._feed.put(info)

    def _release_place(self, info: InstanceInfo) -> None:
        """Free the place that this member was going to get."""
        if info.becomes and self._reserved.get(place := place_of(info.becomes)) == info.incarnation:
            del self._reserved[place]

    def _add_ended(self, info: InstanceInfo) -> None:
        self._doomed.pop(info.incarnation, None)
        self._ended.append((self._clock.monotonic() + LINGER_S, info.incarnation))

    def _lose(self, member: _Member, reason: str, has_died: bool = False) -> None:
        """Remove a member, and with it the others of its group, which do not serve without it."""
        others = [each for each in self._group_of(member) if each is not member]
        if has_died:
            self._doomed |= {each.info.incarnation: each.info for each in others}
            while len(self._doomed) > KEPT_DOOMED:
                del self._doomed[next(iter(self._doomed))]
        self._remove([member, *others], reason, has_died)

    def _remove(self, members: list[_Member], reason: str, has_died: bool = False) -> None:
        """Remove these at once. `reason`: that of the first, which is the reason of the others."""
        reasons = [reason, *(f"{members[0].info.name} of its group is gone: {reason}" for _ in members[1:])]
        for member, why in zip(members, reasons, strict=True):
            info = member.info
            del self._members[info.role, info.engine_rank]
            self._kinds.remove(info)
            self._release_place(info)
            if info.home:
                self._moved.pop(place_of(info.home), None)
            if info.group is not None:
                self._leave_group(info.group)
            logger.warning("%s is gone: %s", info.name, why)
            self._feed.remove(info, LostInstance(info.incarnation, why, has_died))
            self._asked.pop(info.incarnation, None)
            self.weights.on_lost(info)
        self.publish_weights()
        self._on_change()
        for member, why in zip(members, reasons, strict=True):
            self._listener.on_lost(member.info, why, has_died)

    def _leave_group(self, place: GroupPlace) -> None:
        group = self._groups[place.id]
        group.pop(place.rank, None)
        if not group:
            del self._groups[place.id]


def _require_change(info: InstanceInfo, wanted: Role) -> None:
    """Raise RoleRefused if an instance cannot become a `wanted` one now."""
    if info.draining:
        doing = f"becomes {instance_name(*place_of(info.becomes))}" if info.becomes else "drains"
        raise RoleRefused(f"{info.name} {doing} already")
    if wanted is info.role:
        raise RoleRefused(f"{info.name} is a {info.role} instance already")
    if Role.ENCODE in (info.role, wanted):
        raise RoleRefused(
            f"{info.name} cannot become a {wanted} instance: an E has the vision tower alone, and no other instance "
            f"becomes one; start one as `chitu join {wanted}`, then `chitu drain {info.name}`"
        )
    if wanted not in info.roles:
        raise RoleRefused(
            f"{info.name} cannot become a {wanted} instance, as its log says at its start: start one as `chitu join "
            f"{wanted}`, then `chitu drain {info.name}`"
        )


def _proves_death(leave: Leave, info: InstanceInfo) -> bool:
    """Return whether a launcher has seen all processes of the instance end. It must mean the same ones: pids of another
    machine or container prove nothing."""
    is_same_place = bool(info.pid_namespace) and leave.pid_namespace == info.pid_namespace
    return is_same_place and info.pid > 0 and {info.pid, *info.follower_pids} <= set(leave.dead_pids)
