"""Tells which incarnations of the other role are alive, lost (not in the cluster view) or known dead. Pure except for
pids.

Owned by `PrefillSender` (about D) and `DecodeReceiver` (about P), called under their lock. The difference between lost
and dead keeps memory safe: a lost process may only be frozen and can still write when it thaws; a dead one cannot.
Incarnations have no order of their own. The newest view defines which incarnation the instance is now; an incarnation
whose rank went to another one is lost. An incarnation is dead if the router reports it dead (the router sees that on
its own machine or learns it from the launcher there). A process on this machine that was once seen alive is judged by
its pids, and nothing else (pids must mean the same here: `InstanceInfo.pid_namespace`). Any other incarnation is dead
if its rank was given to a process that was just started, since a launcher ends an instance before it starts the next
one (`_is_next_life`). A process that returns reports in which view it was new, so this holds even if that view was
missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from chitu.net.process_deaths import pid_namespace
from chitu.protocol import ClusterView, InstanceInfo
from chitu.types import Role

PidAlive = Callable[[int], bool]
KEPT_ABSENT = 2048
"""Incarnations that are remembered beside those in the newest view: far more than rooms wait for."""
KEPT_ROUTERS = 256
"""Number of routers whose order is remembered."""


def pid_alive(pid: int) -> bool:
    """Return whether a process of this host (and pid namespace) exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        # The first thread of a process is a zombie as soon as it has ended; other threads may still run.
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (OSError, IndexError):
        return True


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


class PeerView:
    def __init__(self, role: Role, host: str, is_pid_alive: PidAlive = pid_alive) -> None:
        self._role = role
        self._host = host
        self._is_pid_alive = is_pid_alive
        self._pid_namespace = pid_namespace()
        self._router_incarnation = 0
        self._version = -1
        self._routers: dict[int, int] = {}
        """Router incarnation -> place, from 1, in the order in which their first views came."""
        self._peers: dict[int, _Peer] = {}
        """Peers by incarnation; the longest known first."""
        self._holders: dict[int, int] = {}
        """Rank -> the incarnation that had it in the last view that contained the rank."""
        self._dead: frozenset[int] = frozenset()
        """Incarnations that the last view reports dead."""

    def update(self, view: ClusterView) -> bool:
        """Take a view. Return False if the same router sent it or a newer one before. Views come in the order of their
        routers: no connection delivers a view of an earlier router after one of a later router."""
        if view.router_incarnation == self._router_incarnation and view.version <= self._version:
            return False
        self._router_incarnation, self._version = view.router_incarnation, view.version
        self._routers.setdefault(view.router_incarnation, max(self._routers.values(), default=0) + 1)
        if len(self._routers) > KEPT_ROUTERS:
            del self._routers[next(iter(self._routers))]
        for peer in self._peers.values():
            peer.is_present = False
        for instance in view.instances:
            if instance.role is self._role:
                self._add(instance)
        self._dead = frozenset(view.dead)
        for incarnation in self._dead & self._peers.keys():
            self._peers[incarnation].is_called_dead = True
        absent = [incarnation for incarnation, peer in self._peers.items() if not peer.is_present]
        for incarnation in absent[:-KEPT_ABSENT]:
            del self._peers[incarnation]
        return True

    def _add(self, instance: InstanceInfo) -> None:
        rank, incarnation = instance.engine_rank, instance.incarnation
        if self._holders.get(rank, incarnation) != incarnation:
            for other in self._peers.values():
                if other.rank == rank:
                    other.is_displaced = True
                    other.is_replaced |= self._is_next_life(instance, other)
        self._holders[rank] = incarnation
        peer = self._peers.setdefault(incarnation, _Peer(rank))
        if not peer.was_alive_here and instance.pid > 0 and self._shares_pids(instance):
            peer.was_alive_here = all(self._is_pid_alive(pid) for pid in _pids(instance))
        peer.instance = instance
        peer.last_view = self._place(self._router_incarnation, self._version)
        peer.is_displaced = peer.is_replaced = False
        peer.is_present = not peer.has_ended  # the router may not have noticed yet

    def _is_next_life(self, instance: InstanceInfo, former: _Peer) -> bool:
        """Return whether `instance`, of the present view, was started after `former`, which had its rank before."""
        if former.instance is None:
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

    def is_lost(self, rank: int, incarnation: int) -> bool:
        """Return whether it left this router's view, lost its rank to another one, has ended, or is reported dead."""
        peer = self._peer(rank, incarnation)
        if peer is None:
            return incarnation in self._dead
        has_joined = peer.instance is not None and peer.last_view[0] == self._routers.get(self._router_incarnation)
        gone = has_joined and not peer.is_present
        return gone or peer.is_displaced or peer.has_ended or peer.is_called_dead

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


def _pids(instance: InstanceInfo) -> tuple[int, ...]:
    """Return the pids of every process that can write: the main rank and its TP followers."""
    return (instance.pid, *instance.follower_pids)
