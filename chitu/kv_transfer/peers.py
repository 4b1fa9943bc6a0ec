"""Who the instances of the other role are: which of them live, which D registered with us, and where we are registered.

**`PeerView`** (both sides, under their lock; pure except for pids) tells which incarnations are alive, lost (not in the
cluster view) or known dead. The difference between lost and dead keeps memory safe: a lost process may only be frozen
and can still write when it thaws; a dead one cannot. Incarnations have no order of their own. The newest view defines
which incarnation the instance is now; an incarnation whose rank went to another one is lost. An incarnation is dead if
the router reports it dead, which takes 2 s and a router, or if a member had it before it changed its role. A process on
this machine that was once seen alive is judged by its pids, and nothing else (pids must mean the same here:
`InstanceInfo.pid_namespace`). Any other incarnation is dead if its rank was given to a process that was just started,
since a launcher ends an instance before it starts the next one (`_is_next_life`). A process that returns reports in
which view it was new, so this holds even if that view was missed.

All of this is so for the views of one router and of those that replaced it (`_RouterView`), whose numbers have an
order. Those of several routers have none, so `PeerView` only joins what they show: a peer is present if one of them
lists it, and dead if one of them proves it. What a silent router lists is not counted while another one is heard.

**`DecodePeers`** (P, comm thread) is the table of registered D: checked addresses, and an open connection for writes.
`answer` and `reconnect` may open connections and are called without the sender's lock (they only read the view, which
on P no other thread changes), `add` and `detach_idle` under it. Invariants: a registration is used only after all of it
was checked; one entry per incarnation; a message of a replaced incarnation is dropped.

**`PrefillDirectory`** (D's machine; pure) has D's registrations with P: one incarnation per rank, the one that a view
had last. A registration is repeated until P accepts it, and not repeated to an incarnation that refused it: P refuses a
version or a layout, and says "not yet" of a memory that it cannot reach (`PeerUnreachable`). P answers each
at once, so it also serves to probe a P that rooms wait for: a P that does not answer is silent until a frame of it
comes. Methods return what is to be sent.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from chitu import log
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import BadFrame, ChituError, IncompatibleLayout, PeerUnreachable, from_code
from chitu.kv_cache.state_row import StateRow
from chitu.kv_transfer.both_sides import KVManagerConfig, Line, OwnMemory, Send
from chitu.kv_transfer.layout import PagedMemory, check_compatible, check_rank_memory, page_bytes_of
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.shard_writer import DecodeWriter, ShardWriter, open_shards
from chitu.net.process_deaths import PidAlive, pid_alive, pid_namespace
from chitu.net.sockets import check_address
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    InstanceInfo,
    KVArgsRegisterInfo,
    KVLayout,
    RankMemory,
    RegisterReply,
    TransferInfo,
    encode_for,
    unpack_i32,
)
from chitu.types import REGISTRATION_ROOM, Role, instance_name, place_text

logger = logging.getLogger(__name__)

KEPT_ABSENT = 2048
"""Incarnations that are remembered beside those in the newest view: far more than rooms wait for."""
KEPT_ROUTERS = 256
"""Number of routers whose order is remembered."""
UNREACHABLE_INTERVAL_S = 5.0
"""Time until the next registration with a P that cannot reach our memory yet. Its attempt takes up to 3 s."""
MAX_UNANSWERED = 2
"""Unanswered registrations, `retry_interval_s` apart, at which a P counts as silent."""


@dataclass(slots=True)
class _Peer:
    """One incarnation of the other role."""

    rank: int
    instance: InstanceInfo | None = None
    """None if it sent us a message but no view has contained it so far."""
    last_view: tuple[int, int] = (0, -1)
    """(router order, view version) of the last view that listed this peer."""
    is_present: bool = False
    was_alive_here: bool = False
    has_ended: bool = False
    """True if we saw its main process alive and then gone."""
    is_displaced: bool = False
    """True if another incarnation has its rank now."""
    is_replaced: bool = False
    """True if that other incarnation was started after the end of this one."""
    is_called_dead: bool = False


class _RouterView:
    def __init__(self, roles: Collection[Role], host: str, is_pid_alive: PidAlive = pid_alive) -> None:
        self._roles = roles
        self._host = host
        self._is_pid_alive = is_pid_alive
        self._pid_namespace = pid_namespace()
        self._router_incarnation = 0
        self._version = -1
        self._routers: dict[int, int] = {}
        """Router incarnation -> place, from 1, in the order in which their first views came."""
        self._peers: dict[int, _Peer] = {}
        """Peers by incarnation; the longest known first."""
        self._holders: dict[tuple[Role, int], int] = {}
        """Role and rank -> the incarnation that had it in the last view that contained it."""
        self._dead: frozenset[int] = frozenset()
        """Incarnations that the last view reports dead, or as former ones of its members."""
        self.is_silent = False

    def update(self, view: ClusterView) -> bool:
        """Take a view. Return False if the same router sent it or a newer one before, and was heard since. Views come
        in the order of their routers: no connection delivers a view of an earlier router after one of a later
        router."""
        was_silent, self.is_silent = self.is_silent, False
        if view.router_incarnation == self._router_incarnation and view.version <= self._version:
            return was_silent
        self._router_incarnation, self._version = view.router_incarnation, view.version
        self._routers.setdefault(view.router_incarnation, max(self._routers.values(), default=0) + 1)
        if len(self._routers) > KEPT_ROUTERS:
            del self._routers[next(iter(self._routers))]
        for peer in self._peers.values():
            peer.is_present = False
        for instance in view.instances:
            if instance.role in self._roles:
                self._add(instance)
        moved = {
            p.instance.home: p for p in self._peers.values() if p.instance and p.instance.home and not p.is_present
        }
        for instance in view.instances if moved else ():
            gone = moved.get(place_text(instance.role, instance.engine_rank))
            if gone is not None and self._is_next_life(instance, gone):  # its process was started again
                gone.is_displaced = gone.is_replaced = True
        self._dead = frozenset(view.dead).union(*[each.former for each in view.instances if each.former])
        for incarnation in self._dead & self._peers.keys():
            self._peers[incarnation].is_called_dead = True
        absent = [incarnation for incarnation, peer in self._peers.items() if not peer.is_present]
        for incarnation in absent[:-KEPT_ABSENT]:
            del self._peers[incarnation]
        return True

    def _add(self, instance: InstanceInfo) -> None:
        rank, incarnation = instance.engine_rank, instance.incarnation
        place = instance.role, rank
        if self._holders.get(place, incarnation) != incarnation:
            for other in self._peers.values():
                if other.rank == rank and (other.instance is None or other.instance.role is instance.role):
                    other.is_displaced = True
                    other.is_replaced |= self._is_next_life(instance, other)
        self._holders[place] = incarnation
        peer = self._peers.setdefault(incarnation, _Peer(rank))
        if not peer.was_alive_here and instance.pid > 0 and self._shares_pids(instance):
            peer.was_alive_here = all(self._is_pid_alive(pid) for pid in _pids(instance))
        peer.instance = instance
        peer.last_view = self._place(self._router_incarnation, self._version)
        peer.is_displaced = peer.is_replaced = False
        peer.is_present = not peer.has_ended  # the router may not have noticed yet

    def _is_next_life(self, instance: InstanceInfo, former: _Peer) -> bool:
        """Return whether `instance`, of the present view, was started after `former`, which had its rank before."""
        if former.instance is None or instance.former:  # one that changed its role may be older than others of its rank
            return False
        # The router never reassigns a rank to an older process, so an incarnation that no earlier view listed is newer;
        # it later reports the first view that did. On one machine (not rebooted since) the start times decide.
        is_here = instance.pid_namespace != "" and instance.pid_namespace == former.instance.pid_namespace
        is_younger = is_here and instance.start_ticks > former.instance.start_ticks
        first_view = instance.first_view if instance.returns else (self._router_incarnation, self._version)
        return is_younger or self._place(*first_view) > former.last_view

    def _place(self, router_incarnation: int, version: int) -> tuple[int, int]:
        """Return a view's place in the order of all views; a view of an unknown router comes before all others."""
        return self._routers.get(router_incarnation, 0), version

    def _shares_pids(self, instance: InstanceInfo) -> bool:
        """Return whether its pid means the same process here. Without a pid namespace, its address decides."""
        if instance.pid_namespace:
            return instance.pid_namespace == self._pid_namespace
        return instance.host == self._host

    def find_ended(self) -> bool:
        """Find members whose main process has ended: they are lost at once, even before a router reports it. Return
        whether there is a new one. Only covers instances that report a pid namespace and share ours."""
        found = False
        for peer in self._peers.values():
            instance = peer.instance
            if instance is None or not (peer.was_alive_here and instance.pid_namespace) or peer.has_ended:
                continue
            if not self._is_pid_alive(instance.pid):
                peer.has_ended, peer.is_present, found = True, False, True
        return found

    def note(self, rank: int, incarnation: int) -> None:
        """Record an incarnation that sent us a message, perhaps before a view contains it. Other incarnations of its
        rank that no view has contained are lost: what we opened for a process that fails before it joins must not
        stay."""
        if incarnation in self._peers:
            return
        for peer in self._peers.values():
            peer.is_displaced |= peer.rank == rank and peer.instance is None
        self._peers[incarnation] = _Peer(rank)

    def present(self) -> list[InstanceInfo]:
        return [peer.instance for peer in self._peers.values() if peer.is_present and peer.instance is not None]

    def is_present(self, rank: int, incarnation: int) -> bool:
        """Return whether the newest view contains it and it was not seen to end."""
        peer = self._peer(rank, incarnation)
        return peer is not None and peer.is_present

    def is_replaced(self, rank: int, incarnation: int) -> bool:
        """Return whether a process that was started after it has its rank."""
        peer = self._peer(rank, incarnation)
        return peer is not None and peer.is_replaced

    def has_left(self, rank: int, incarnation: int) -> bool:
        """Return whether this router's view had it, and has it no more."""
        peer = self._peer(rank, incarnation)
        if peer is None or peer.instance is None or peer.is_present:
            return False
        return peer.last_view[0] == self._routers.get(self._router_incarnation)

    def is_over(self, rank: int, incarnation: int) -> bool:
        """Return whether it lost its rank to another one, has ended, or is reported dead."""
        peer = self._peer(rank, incarnation)
        if peer is None:
            return incarnation in self._dead
        return peer.is_displaced or peer.has_ended or peer.is_called_dead

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Return whether none of its processes can write any more."""
        peer = self._peer(rank, incarnation)
        if peer is None:
            return incarnation in self._dead
        if peer.is_called_dead or peer.is_present or peer.instance is None or not peer.was_alive_here:
            return peer.is_called_dead or peer.is_replaced
        # The pid of a process that we saw end may be reused by now.
        pids = peer.instance.follower_pids if peer.has_ended else _pids(peer.instance)
        return not any(self._is_pid_alive(pid) for pid in pids)

    def _peer(self, rank: int, incarnation: int) -> _Peer | None:
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.rank == rank else None


class PeerView:
    """The peers of the other role in the views of all routers."""

    def __init__(
        self, role: Role, host: str, is_pid_alive: PidAlive = pid_alive, other_roles: Collection[Role] = ()
    ) -> None:
        """`other_roles`: more roles of peers."""
        self._make = partial(_RouterView, (role, *other_roles), host, is_pid_alive)
        self._views: dict[int, _RouterView] = {0: self._make()}
        """By index of the router in the list."""

    def update(self, view: ClusterView, router: int = 0) -> bool:
        """Take a view of a router. Return False if it is no news."""
        if router not in self._views:
            self._views[router] = self._make()
        return self._views[router].update(view)

    def note_silence(self, router: int) -> None:
        """Note that nothing is heard of a router."""
        if router in self._views:
            self._views[router].is_silent = True

    @property
    def _heard(self) -> list[_RouterView]:
        """The views that count for who is present: all of them while no router is heard."""
        return [view for view in self._views.values() if not view.is_silent] or list(self._views.values())

    def find_ended(self) -> bool:
        """Find members whose main process has ended: they are lost at once, even before a router reports it. Return
        whether there is a new one. Only covers instances that report a pid namespace and share ours."""
        return any([view.find_ended() for view in self._views.values()])

    def note(self, rank: int, incarnation: int) -> None:
        """Record an incarnation that sent us a message, perhaps before a view contains it. Other incarnations of its
        rank that no view has contained are lost: what we opened for a process that fails before it joins must not
        stay."""
        for view in self._views.values():
            view.note(rank, incarnation)

    def present(self) -> list[InstanceInfo]:
        """Return the peers that a view contains and that were not seen to end."""
        views = self._heard
        if len(views) == 1:
            return views[0].present()
        return list({info.incarnation: info for view in views for info in view.present()}.values())

    def is_present(self, rank: int, incarnation: int) -> bool:
        """Return whether a newest view contains it and it was not seen to end."""
        return any(view.is_present(rank, incarnation) for view in self._heard)

    def is_replaced(self, rank: int, incarnation: int) -> bool:
        """Return whether a process that was started after it has its rank."""
        return any(view.is_replaced(rank, incarnation) for view in self._views.values())

    def is_lost(self, rank: int, incarnation: int) -> bool:
        """Return whether it left the views of all routers that had it, lost its rank to another one, has ended, or is
        reported dead."""
        if any(view.is_over(rank, incarnation) for view in self._views.values()):
            return True
        heard = self._heard
        return any(view.has_left(rank, incarnation) for view in heard) and not self.is_present(rank, incarnation)

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Return whether none of its processes can write any more: one router's views, or its pids, prove it."""
        return any(view.is_dead(rank, incarnation) for view in self._views.values())


def _pids(instance: InstanceInfo) -> tuple[int, ...]:
    """Return the pids of every process that can write: the main rank and its TP followers."""
    return (instance.pid, *instance.follower_pids)


@dataclass(slots=True)
class DecodePeer:
    """A D that registered. `writer` is None while nothing may be written to it."""

    info: KVArgsRegisterInfo
    memory: RankMemory
    """Memory of its main rank; the other ranks have as many pages."""
    writer: DecodeWriter | None
    unfenced: set[bytes] = field(default_factory=set)
    """Rooms with a write to this D that failed and may still land: no new write starts before a fence succeeded."""
    fence_due_s: float = 0.0
    """Time of the next fence attempt, for any of these rooms."""
    page_rooms: dict[int, bytes] = field(default_factory=dict)
    """The last room that each page was announced for, over or not; at most one entry per page."""
    aux_rooms: dict[int, bytes] = field(default_factory=dict)
    """The last room that each aux slot was announced for."""
    state_rooms: dict[int, bytes] = field(default_factory=dict)
    """The last room that each state slot was announced for."""
    role: Role = Role.DECODE

    @property
    def is_suspended(self) -> bool:
        return bool(self.unfenced)

    @property
    def name(self) -> str:
        return f"{instance_name(self.role, self.info.engine_rank)} at {self.info.endpoint}:{self.info.dst_port}"


class DecodePeers:
    def __init__(self, config: KVManagerConfig, memory: OwnMemory, fan_out: FanOut | None, view: PeerView) -> None:
        self._config = config
        self._memory = memory
        self._fan_out = fan_out
        self._view = view
        self.table: dict[int, DecodePeer] = {}
        """Registered D, by incarnation."""

    def answer(self, info: KVArgsRegisterInfo) -> tuple[RegisterReply, DecodePeer | None] | None:
        """Return the reply to D, and the peer to `add` if it is new. Return None if D was replaced by now.

        Raises BadFrame if not even a refusal could be sent back.
        """
        check_return_address(info)
        if self._view.is_replaced(info.engine_rank, info.incarnation):
            return None
        name = instance_name(self._config.reader, info.engine_rank)
        peer: DecodePeer | None = None
        refusal: ChituError | None = None
        known = self.table.get(info.incarnation)
        if known is None:
            try:
                memory = check_registration(info, self._config.layout, self._memory.pool)
                peer = DecodePeer(info, memory, self._open(info), role=self._config.reader)
            except ChituError as error:
                refusal = error
        elif known.info != info and not is_same_registration(known.info, info):
            refusal = BadFrame(f"{name} registered twice with different memory")
        if refusal is not None:
            is_final = not isinstance(refusal, PeerUnreachable)
            level, what = (logging.ERROR, "refused") if is_final else (logging.WARNING, "cannot write yet to")
            logger.log(level, "%s %s (%s): %s", what, name, info.endpoint, refusal.message)
        reply = RegisterReply(
            engine_rank=self._config.engine_rank,
            incarnation=self._config.incarnation,
            peer_incarnation=info.incarnation,
            code=refusal.code if refusal is not None else "",
            message=refusal.message if refusal is not None else "",
        )
        return reply, peer

    def add(self, peer: DecodePeer) -> None:
        """Add a registered D. The cluster view need not contain it yet."""
        self.table[peer.info.incarnation] = peer
        self._view.note(peer.info.engine_rank, peer.info.incarnation)

    def reconnect(self, peer: DecodePeer) -> ChituError | None:
        """Open the connection of a D that was lost and came back. Return the error if that failed."""
        if peer.writer is not None or self._view.is_lost(peer.info.engine_rank, peer.info.incarnation):
            return None
        try:
            peer.writer = self._open(peer.info)
        except ChituError as error:
            return error
        return None

    def detach_idle(self, in_use: Iterable[DecodePeer | None]) -> list[DecodeWriter]:
        """Return the writers of lost D that no room uses, for the caller to close. Drop replaced registrations."""
        used = {peer.info.incarnation for peer in in_use if peer is not None}
        idle: list[DecodeWriter] = []
        for incarnation, peer in list(self.table.items()):
            rank = peer.info.engine_rank
            if incarnation in used or not self._view.is_lost(rank, incarnation):
                continue
            if peer.writer is not None:
                idle.append(peer.writer)
                peer.writer = None
            if self._view.is_replaced(rank, incarnation) or self._view.is_dead(rank, incarnation):
                del self.table[incarnation]
        return idle

    def _open(self, info: KVArgsRegisterInfo) -> DecodeWriter:
        """Connect all our ranks to those of a D. Raises TransferFailed."""
        own, fan_out = self._memory, self._fan_out

        def open_own() -> ShardWriter:
            return open_shards(info, self._config.layout, MAIN_RANK, own.pool, own.transports)

        return open_own() if fan_out is None else fan_out.open(info, open_own)


def is_same_registration(one: KVArgsRegisterInfo, other: KVArgsRegisterInfo) -> bool:
    """Return whether two registrations differ in the version of the wire alone: a D that has not heard yet of P's
    version uses the oldest one."""
    oldest = min(one.protocol_version, other.protocol_version)
    return encode_for(oldest, one) == encode_for(oldest, other)


def check_return_address(info: KVArgsRegisterInfo) -> None:
    """Raise BadFrame if not even a refusal could be sent back."""
    check_address(info.endpoint, info.dst_port)
    if info.engine_rank < 0:
        raise BadFrame(f"a registration of D{info.engine_rank}")


def check_registration(info: KVArgsRegisterInfo, layout: KVLayout, memory: PagedMemory) -> RankMemory:
    """Check a registration and return the memory of D's main rank. Raises IncompatibleLayout or BadFrame."""
    if not OLDEST_VERSION <= info.protocol_version <= PROTOCOL_VERSION:
        here = f"{OLDEST_VERSION} to {PROTOCOL_VERSION} here"
        raise IncompatibleLayout(f"protocol version {info.protocol_version} there, {here}")
    check_compatible(layout, info.layout)
    tp_size = info.layout.tp_size
    if len(info.ranks) != tp_size or {rank.tp_rank for rank in info.ranks} != set(range(tp_size)):
        raise BadFrame(f"{len(info.ranks)} ranks of memory for tp_size {tp_size}")
    page_bytes = page_bytes_of(info.layout, layout, memory.page_bytes)
    state_row_bytes = StateRow.of(info.layout).row_bytes
    for rank in info.ranks:
        check_rank_memory(rank, memory, tp_size, page_bytes, state_row_bytes)
    if len({rank.num_pages for rank in info.ranks}) > 1:
        raise BadFrame(f"the ranks have {sorted({rank.num_pages for rank in info.ranks})} pages, not as many each")
    if len({rank.num_state_slots for rank in info.ranks}) > 1:
        raise BadFrame(f"the ranks have {sorted({rank.num_state_slots for rank in info.ranks})} state slots")
    return next(rank for rank in info.ranks if rank.tp_rank == MAIN_RANK)


def check_announcement(info: TransferInfo, memory: RankMemory, config: KVManagerConfig) -> array[int]:
    """Return the destination pages, each a page of D (`memory`), or none if D wants the logits row only. Raises
    BadFrame if the announcement is invalid."""
    pages = unpack_i32(info.dst_kv_indices)
    if info.num_tokens < 1 or len(pages) not in (0, config.num_pages(info.num_tokens)):
        raise BadFrame(f"{len(pages)} pages announced for {info.num_tokens} tokens")
    if pages and (min(pages) < 0 or max(pages) >= memory.num_pages):
        raise BadFrame(f"pages {min(pages)} to {max(pages)} announced of {memory.num_pages}")
    if len(set(pages)) != len(pages):
        raise BadFrame("a page is announced twice")
    if not 0 <= info.dst_aux_index < memory.num_aux_slots:
        raise BadFrame(f"aux slot {info.dst_aux_index} announced of {memory.num_aux_slots}")
    slots = range(memory.num_state_slots) if config.has_state(len(pages)) else range(-1, 0)
    if info.dst_state_index not in slots:
        raise BadFrame(f"state slot {info.dst_state_index} announced of {memory.num_state_slots}")
    num_full = min(len(pages), info.num_tokens // config.layout.page_size)
    if config.layout.state:
        num_full = 0  # no prefix has its state
    if not 0 <= info.prefix_pages <= num_full:
        raise BadFrame(f"{info.prefix_pages} prefix pages of {num_full} full ones")
    return pages


class RegistrationState(Enum):
    """State of D's registration with an incarnation of P."""

    ASKED = auto()
    """The registration was sent, and is repeated until P accepts or refuses it."""
    ACCEPTED = auto()
    REFUSED = auto()
    """P refused for good: it will not change its answer within this incarnation."""


class RegistrationEvent(Enum):
    ACCEPT = auto()
    REFUSE = auto()
    LOST = auto()
    """P left the view, or has another address now: it may have forgotten D."""


REGISTRATION_TRANSITIONS: Final[Mapping[tuple[RegistrationState, RegistrationEvent], RegistrationState]] = {
    (RegistrationState.ASKED, RegistrationEvent.ACCEPT): RegistrationState.ACCEPTED,
    (RegistrationState.ASKED, RegistrationEvent.REFUSE): RegistrationState.REFUSED,
    (RegistrationState.ACCEPTED, RegistrationEvent.LOST): RegistrationState.ASKED,
}


@dataclass(slots=True)
class PrefillPeer:
    """The incarnation of one P rank."""

    incarnation: int
    host: str
    port: int
    state: RegistrationState = RegistrationState.ASKED
    refusal: ChituError | None = None
    repeat_due_s: float = 0.0
    """Earliest time of the next registration, be it a repeat or a probe."""
    unanswered: int = 0
    """Number of registrations sent since its last frame."""
    is_unreachable: bool = False
    """Its last reply was that it cannot reach our memory yet."""

    def apply(self, event: RegistrationEvent) -> bool:
        """Apply an event. Return False if it is absorbed."""
        before, self.state = self.state, REGISTRATION_TRANSITIONS.get((self.state, event), self.state)
        return self.state is not before


class PrefillDirectory:
    """Every known P, one per engine rank. `registration`: what this instance sends to each."""

    def __init__(
        self,
        registration: KVArgsRegisterInfo,
        retry_interval_s: float,
        view: PeerView,
        role: Role = Role.PREFILL,
    ) -> None:
        """`role`: of the peers, in log lines."""
        self.registration = registration
        self._letter = role.letter
        self._retry_interval_s = retry_interval_s
        self._view = view
        self._peers: dict[int, PrefillPeer] = {}
        """Peers by engine_rank."""

    # --------------------------------------------------------------------------------------------------------- look-ups

    def peer(self, rank: int, incarnation: int) -> PrefillPeer | None:
        """Return the peer, or None if this incarnation was not found yet or another one has its rank."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def address_of(self, incarnation: int) -> tuple[str, int] | None:
        rank = self.rank_of(incarnation)
        return (self._peers[rank].host, self._peers[rank].port) if rank is not None else None

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of an incarnation, or None if it has none, or no longer."""
        return next((rank for rank, peer in self._peers.items() if peer.incarnation == incarnation), None)

    def registered(self) -> dict[int, int]:
        """Return engine_rank -> incarnation of every P that accepted our registration."""
        peers = self._peers.items()
        return {rank: peer.incarnation for rank, peer in peers if peer.state is RegistrationState.ACCEPTED}

    def silent(self) -> tuple[int, ...]:
        """Return the incarnations of P in the cluster that do not answer (messages are lost, one way or both) or do not
        reach our memory."""
        return tuple(
            peer.incarnation
            for rank, peer in self._peers.items()
            if (peer.unanswered >= MAX_UNANSWERED or peer.is_unreachable)
            and not self._view.is_lost(rank, peer.incarnation)
        )

    # ----------------------------------------------------------------------------------------------------- registration

    def on_view(self, now_s: float) -> list[Send | Line]:
        """Register with each P that is new in the view, and again with each that returns after it was lost."""
        found: list[Send | Line] = []
        for instance in self._view.present():
            if instance.control_port:
                address = instance.host, instance.control_port
                found += self._found(instance.engine_rank, instance.incarnation, *address, now_s)
        for rank, peer in self._peers.items():
            if self._view.is_lost(rank, peer.incarnation):
                peer.apply(RegistrationEvent.LOST)
                peer.repeat_due_s, peer.unanswered = 0.0, 0
        return found

    def _found(self, rank: int, incarnation: int, host: str, port: int, now_s: float) -> list[Send | Line]:
        """Register with a P once per incarnation, and again if its address changed."""
        peer = self.peer(rank, incarnation)
        if peer is None:
            peer = self._peers[rank] = PrefillPeer(incarnation, host, port)
        elif (peer.host, peer.port) != (host, port):
            peer.host, peer.port = host, port
            peer.apply(RegistrationEvent.LOST)
        return self._register(peer, now_s) if peer.state is RegistrationState.ASKED else []

    def tick(self, now_s: float) -> list[Send | Line]:
        asked: list[Send | Line] = []
        for rank, peer in self._peers.items():
            is_owing = peer.unanswered or peer.state is RegistrationState.ASKED
            if is_owing and not self._view.is_lost(rank, peer.incarnation):
                asked += self._register(peer, now_s)
        return asked

    def probe(self, rank: int, incarnation: int, now_s: float) -> list[Send | Line]:
        """Probe a P for which a room has waited `retry_interval_s`, unless a frame of it just came."""
        peer = self.peer(rank, incarnation)
        return self._register(peer, now_s) if peer is not None else []

    def on_frame(self, incarnation: int, now_s: float) -> None:
        """Record that a frame of this P came."""
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                peer.unanswered, peer.repeat_due_s = 0, now_s + self._retry_interval_s

    def on_reply(self, peer: PrefillPeer, message: RegisterReply, now_s: float) -> list[Send | Line]:
        """Take P's answer to the registration, perhaps not its first."""
        rank, text = message.engine_rank, message.message
        was_unreachable, peer.is_unreachable = peer.is_unreachable, message.code == PeerUnreachable.code
        if peer.is_unreachable:
            peer.repeat_due_s = now_s + UNREACHABLE_INTERVAL_S
            news = Line(logging.WARNING, "%s%d cannot reach this instance yet: %s", (self._letter, rank, text), "")
            return [] if was_unreachable else [news]
        if not message.code and peer.apply(RegistrationEvent.ACCEPT):
            return [Line(logging.INFO, *self._registered_line(rank), "")]
        if message.code and peer.apply(RegistrationEvent.REFUSE):
            peer.refusal = from_code(message.code, text)
            return [Line(logging.ERROR, "%s%d refused this instance: %s", (self._letter, rank, text), "")]
        return []

    def _registered_line(self, rank: int) -> tuple[str, tuple[object, ...]]:
        if self._letter == Role.PREFILL.letter:
            return log.DECODE_REGISTERED, (rank,)
        return "registered with %s%d", (self._letter, rank)

    def _register(self, peer: PrefillPeer, now_s: float) -> list[Send | Line]:
        """Send the registration, unless it is not due or P refused it: a refusal is final within this incarnation."""
        if peer.repeat_due_s > now_s or peer.state is RegistrationState.REFUSED:
            return []
        peer.unanswered += 1
        peer.repeat_due_s = now_s + self._retry_interval_s
        return [Send(peer.host, peer.port, REGISTRATION_ROOM, self.registration)]
