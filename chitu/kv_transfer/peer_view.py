"""Which incarnations of the other role are alive, lost (not in the cluster view) or are known dead. Pure except for
pids.

Owned by `PrefillSender` (about D) and `DecodeReceiver` (about P), called under their lock. The difference between lost
and dead is what keeps memory safe: a lost process may only be frozen and can still write when it thaws; a dead one
cannot. Incarnations have no order of their own. The newest view says which incarnation is the instance now; an
incarnation that gave its rank to another one is lost. Dead is whom the router calls so (it knows it from its own
machine or from the launcher there). Of a process on this machine, which we once saw alive, its pids tell, and nothing
else (they must mean the same here: `InstanceInfo.pid_namespace`). Of others: one whose rank was given to a process that
was just started, since a launcher ends an instance before it starts its next life (`_is_next_life`). A process that
returns says in which view it was new, so this holds too where that view was missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from chitu.net.process_deaths import pid_namespace
from chitu.protocol import ClusterView, InstanceInfo
from chitu.types import Role

PidAlive = Callable[[int], bool]
KEPT_ABSENT = 256
"""Incarnations that are remembered beside those in the newest view: far more lives than rooms wait for."""
KEPT_ROUTERS = 256
"""Routers whose order is remembered."""


def pid_alive(pid: int) -> bool:
    """Whether a process of this host (and pid namespace) exists and is more than an exit code that nobody has read."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        # The first thread of a process is a zombie as soon as it has ended; others may still run.
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (OSError, IndexError):
        return True


@dataclass(slots=True)
class _Peer:
    """One incarnation."""

    rank: int
    instance: InstanceInfo | None = None
    """None: it spoke to us, but no view had it so far."""
    last_view: tuple[int, int] = (0, -1)
    """That had it: place of its router in the order of routers, version."""
    is_present: bool = False
    was_alive_here: bool = False
    has_ended: bool = False
    """We saw its main process alive and then gone."""
    is_displaced: bool = False
    """Its rank is another one's now."""
    is_replaced: bool = False
    """And that one was started after its end."""
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
        """Incarnation -> place, from 1, in the order in which they were first heard."""
        self._peers: dict[int, _Peer] = {}
        """By incarnation; the longest known first."""
        self._holders: dict[int, int] = {}
        """Rank -> the incarnation that a view had last."""
        self._dead: frozenset[int] = frozenset()
        """Of the last view."""

    def update(self, view: ClusterView) -> bool:
        """Take a view; False where the same router sent a newer one before. Views come in the order in which routers
        speak: a connection brings none of an earlier router behind one of a later."""
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
                self._take(instance)
        self._dead = frozenset(view.dead)
        for incarnation in self._dead & self._peers.keys():
            self._peers[incarnation].is_called_dead = True
        absent = [incarnation for incarnation, peer in self._peers.items() if not peer.is_present]
        for incarnation in absent[:-KEPT_ABSENT]:
            del self._peers[incarnation]
        return True

    def _take(self, instance: InstanceInfo) -> None:
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
        peer.is_present = not peer.has_ended  # the router may not know yet

    def _is_next_life(self, instance: InstanceInfo, former: _Peer) -> bool:
        """Whether a process in the present view was started after one of its rank that views had before."""
        if former.instance is None:
            return False
        # A router gives a rank to no process that it knows to be older; one that was in no view before is younger, and
        # says later in which view it was new; on one machine (not booted since) the times since the boot tell.
        is_here = instance.pid_namespace != "" and instance.pid_namespace == former.instance.pid_namespace
        is_younger = is_here and instance.start_ticks > former.instance.start_ticks
        first_view = instance.first_view if instance.returns else (self._router_incarnation, self._version)
        return is_younger or self._place(*first_view) > former.last_view

    def _place(self, router_incarnation: int, version: int) -> tuple[int, int]:
        """Of a view in the order of all; before all others where its router was never heard."""
        return self._routers.get(router_incarnation, 0), version

    def _shares_pids(self, instance: InstanceInfo) -> bool:
        """Whether its pid is the same process for us. One that does not say where its pid counts is judged by its
        address."""
        if instance.pid_namespace:
            return instance.pid_namespace == self._pid_namespace
        return instance.host == self._host

    def find_ended(self) -> bool:
        """Look for members whose main process has ended: they are lost at once, also while no router says so. True
        where there is a new one. Only of those that say in which pid namespace they live, and live in ours."""
        found = False
        for peer in self._peers.values():
            instance = peer.instance
            if instance is None or not (peer.was_alive_here and instance.pid_namespace) or peer.has_ended:
                continue
            if not self._is_pid_alive(instance.pid):
                peer.has_ended, peer.is_present, found = True, False, True
        return found

    def note(self, rank: int, incarnation: int) -> None:
        """An incarnation spoke to us, perhaps before a view has it. Others that no view
        has had are lost: a process that fails ahead of its joining must not keep what we opened for it."""
        if incarnation in self._peers:
            return
        for peer in self._peers.values():
            peer.is_displaced |= peer.rank == rank and peer.instance is None
        self._peers[incarnation] = _Peer(rank)

    def present(self) -> list[InstanceInfo]:
        return [peer.instance for peer in self._peers.values() if peer.is_present and peer.instance is not None]

    def is_present(self, rank: int, incarnation: int) -> bool:
        """Whether the newest view has it."""
        peer = self._peer(rank, incarnation)
        return peer is not None and peer.is_present

    def is_replaced(self, rank: int, incarnation: int) -> bool:
        """Whether a process that was started after it has its rank."""
        peer = self._peer(rank, incarnation)
        return peer is not None and peer.is_replaced

    def is_lost(self, rank: int, incarnation: int) -> bool:
        """It was in a view of this router and is not any more, or its rank is another one's, or it has ended."""
        peer = self._peer(rank, incarnation)
        if peer is None:
            return incarnation in self._dead
        has_joined = peer.instance is not None and peer.last_view[0] == self._routers.get(self._router_incarnation)
        gone = has_joined and not peer.is_present
        return gone or peer.is_displaced or peer.has_ended or peer.is_called_dead

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Nothing of it can write to anybody any more."""
        peer = self._peer(rank, incarnation)
        if peer is None:
            return incarnation in self._dead
        if peer.is_called_dead or peer.is_present or peer.instance is None or not peer.was_alive_here:
            return peer.is_called_dead or peer.is_replaced
        # The number of a process that we saw end may be another one's by now.
        pids = peer.instance.follower_pids if peer.has_ended else _pids(peer.instance)
        return not any(self._is_pid_alive(pid) for pid in pids)

    def _peer(self, rank: int, incarnation: int) -> _Peer | None:
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.rank == rank else None


def _pids(instance: InstanceInfo) -> tuple[int, ...]:
    """Of every process that can write: the main rank and its TP followers."""
    return (instance.pid, *instance.follower_pids)
