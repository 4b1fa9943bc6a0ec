"""Which incarnations of the other role are alive, lost (not in the cluster view) or are known dead. Pure but for pids.

Owned by `PrefillSender` (about D) and `DecodeReceiver` (about P), called under their lock. The difference between lost
and dead is what keeps memory safe: a lost process may only be frozen and can still write when it thaws; a dead one
cannot. Dead is: replaced by a newer incarnation of its rank, or called dead by the router (which knows it from its own
machine or from the launcher there), or gone from the view while its process on this machine, which we once saw alive,
does not exist any more (its pid must mean the same here: `InstanceInfo.pid_namespace`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from chitu.messages import ClusterView, InstanceInfo
from chitu.net.process_deaths import pid_namespace
from chitu.types import Role

PidAlive = Callable[[int], bool]


def pid_alive(pid: int) -> bool:
    """Whether a process of this host (and pid namespace) exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(slots=True)
class _Member:
    instance: InstanceInfo
    router_incarnation: int
    """Of the router in whose view it was last."""
    is_present: bool
    was_alive_here: bool


class PeerView:
    def __init__(self, role: Role, host: str, is_pid_alive: PidAlive = pid_alive) -> None:
        self._role = role
        self._host = host
        self._is_pid_alive = is_pid_alive
        self._pid_namespace = pid_namespace()
        self._router_incarnation = 0
        self._version = -1
        self._members: dict[int, _Member] = {}
        self._newest: dict[int, int] = {}
        self._ended: set[int] = set()
        """Incarnations whose main process we saw alive and then gone."""
        self._dead: set[int] = set()
        """Incarnations that the router called dead, as far as we know them or its last view has them."""

    def update(self, view: ClusterView) -> bool:
        """Take a view; False where it is older than the last one."""
        if view.router_incarnation < self._router_incarnation:
            return False
        if view.router_incarnation == self._router_incarnation and view.version <= self._version:
            return False
        self._router_incarnation, self._version = view.router_incarnation, view.version
        for member in self._members.values():
            member.is_present = False
        for instance in view.instances:
            if instance.role is self._role:
                self._take(instance)
        known = {member.instance.incarnation for member in self._members.values()}
        self._dead = (self._dead & known) | set(view.dead)
        return True

    def _take(self, instance: InstanceInfo) -> None:
        rank = instance.engine_rank
        if self.is_replaced(rank, instance.incarnation):
            return
        self.note(rank, instance.incarnation)
        old = self._members.get(rank)
        was_alive = old is not None and old.instance.incarnation == instance.incarnation and old.was_alive_here
        if not was_alive and instance.pid > 0 and self._shares_pids(instance):
            was_alive = all(self._is_pid_alive(pid) for pid in _pids(instance))
        is_present = instance.incarnation not in self._ended  # the router may not know yet
        self._members[rank] = _Member(instance, self._router_incarnation, is_present, was_alive)

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
        for member in self._members.values():
            instance = member.instance
            if not (member.was_alive_here and instance.pid_namespace) or instance.incarnation in self._ended:
                continue
            if not self._is_pid_alive(instance.pid):
                self._ended.add(instance.incarnation)
                member.is_present, found = False, True
        return found

    def note(self, rank: int, incarnation: int) -> None:
        """An incarnation spoke to us or was found in the directory: older ones of its rank are dead."""
        self._newest[rank] = max(incarnation, self._newest.get(rank, 0))

    def present(self) -> list[InstanceInfo]:
        return [member.instance for member in self._members.values() if member.is_present]

    def is_replaced(self, rank: int, incarnation: int) -> bool:
        return self._newest.get(rank, 0) > incarnation

    def is_lost(self, rank: int, incarnation: int) -> bool:
        """It was in a view of this router and is not any more, or it was replaced, or its process has ended."""
        member = self._member(rank, incarnation)
        gone = member is not None and not member.is_present and member.router_incarnation == self._router_incarnation
        is_over = incarnation in self._ended or incarnation in self._dead
        return gone or is_over or self.is_replaced(rank, incarnation)

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Nothing of it can write to anybody any more."""
        if self.is_replaced(rank, incarnation) or incarnation in self._dead:
            return True
        member = self._member(rank, incarnation)
        if member is None or member.is_present or not member.was_alive_here:
            return False
        return not any(self._is_pid_alive(pid) for pid in _pids(member.instance))

    def _member(self, rank: int, incarnation: int) -> _Member | None:
        member = self._members.get(rank)
        return member if member is not None and member.instance.incarnation == incarnation else None


def _pids(instance: InstanceInfo) -> tuple[int, ...]:
    """Of every process that can write: the main rank and its TP followers."""
    return (instance.pid, *instance.follower_pids)
