"""What an API process can know of the whole router: the cluster view, the loads, and every API process's own record.

`ClusterSource` is what the routes that show or change the cluster are made with. `OwnCluster` is the one of a router
that is one process: everything is at hand. With `router.workers` it is `worker.RemoteCluster`, which asks the process
that coordinates; that one asks all others, so an answer is as new as the question, whoever gives it. Loop thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from chitu.errors import LastInstance, UnknownInstance
from chitu.messages import ClusterView, InstanceInfo, LoadReport, Wire
from chitu.metrics import CoordinationMetrics, RouterMetrics
from chitu.pd_request_router import PDRequestRouter
from chitu.request_journal import RequestSnapshot
from chitu.routing import Candidates
from chitu.serve.membership import Membership
from chitu.types import Role, instance_name

Loads = Mapping[tuple[Role, int], LoadReport]


class WorkerReport(Wire, frozen=True, tag="worker_report"):
    """One API process as it is now."""

    index: int
    """0, 1, ...; -1: of all those that have ended."""
    pid: int
    in_flight: int
    version: int
    """Of its journal: grows with every start, first token and end of a request."""
    running: tuple[RequestSnapshot, ...]
    ended: tuple[RequestSnapshot, ...]
    """The last ones, oldest first."""
    metrics: RouterMetrics
    number: int = 0
    """Of the question that it answers; 0: sent unasked."""


@dataclass(slots=True, frozen=True)
class RouterRecord:
    """The router as a whole: what its API processes know together, and what the membership counts."""

    workers: tuple[WorkerReport, ...]
    coordination: CoordinationMetrics

    @property
    def num_workers(self) -> int:
        return sum(worker.index >= 0 for worker in self.workers)

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers)


@dataclass(slots=True, frozen=True)
class Draining:
    """An instance that was told to finish and leave."""

    name: str
    incarnation: int


class ClusterSource(Protocol):
    @property
    def view(self) -> ClusterView: ...

    def loads(self) -> Loads:
        """The last report of each member."""

    def ports(self) -> Mapping[str, int]:
        """Those of the membership, by short key name."""

    async def version(self) -> int:
        """Grows with whatever happens to any request."""

    async def record(self) -> RouterRecord: ...

    async def drain(self, instance: str, force: bool) -> Draining:
        """See `drain_instance`."""

    async def flush_caches(self) -> None:
        """Every instance forgets the prefixes that it has cached, within a heartbeat or so."""


def report_of(router: PDRequestRouter, index: int, number: int = 0) -> WorkerReport:
    """What this process knows of its own requests."""
    return WorkerReport(
        index=index,
        pid=os.getpid(),
        in_flight=router.in_flight,
        version=router.journal.version,
        running=tuple(router.running()),
        ended=tuple(router.journal.ended),
        metrics=router.metrics(),
        number=number,
    )


class OwnCluster:
    """`ClusterSource` of a router that is one process."""

    def __init__(self, router: PDRequestRouter, membership: Membership) -> None:
        self._router = router
        self._membership = membership

    @property
    def view(self) -> ClusterView:
        return self._membership.coordination.view

    def loads(self) -> Loads:
        return self._membership.coordination.loads()

    def ports(self) -> Mapping[str, int]:
        return self._membership.port_table()

    async def version(self) -> int:
        return self._router.journal.version

    async def record(self) -> RouterRecord:
        return RouterRecord((report_of(self._router, 0),), self._membership.metrics())

    async def drain(self, instance: str, force: bool) -> Draining:
        return drain_instance(self._membership, instance, force)

    async def flush_caches(self) -> None:
        flush_caches(self._membership)


def flush_caches(membership: Membership) -> None:
    membership.coordination.flush_caches(1 + secrets.randbits(62))


def drain_instance(membership: Membership, name: str, force: bool) -> Draining:
    """Send an instance nothing new; it finishes what it runs and leaves. Idempotent.

    UnknownInstance; without `force` LastInstance where requests can be served now, and could not without it.
    """
    view = membership.coordination.view
    info = _find(view, name)
    if not force:
        _require_others(view, info)
    membership.ports.request_drain(info.role, info.engine_rank)
    return Draining(_name(info), info.incarnation)


def _find(view: ClusterView, name: str) -> InstanceInfo:
    for info in view.instances:
        if _name(info) == name.upper():
            return info
    names = ", ".join(_name(info) for role in Role for info in view.instances if info.role is role) or "none"
    raise UnknownInstance(f"there is no instance {name!r} in the cluster; it has {names}")


def _require_others(view: ClusterView, info: InstanceInfo) -> None:
    if info.draining or not Candidates.of(view).usable:
        return
    others = tuple(other for other in view.instances if other is not info)
    left = Candidates.of(msgspec.structs.replace(view, instances=others))
    if not left.usable:
        raise LastInstance(
            f"without {_name(info)} nothing could be served ({left.why_unusable()}): start another one first, "
            "or use force"
        )


def _name(info: InstanceInfo) -> str:
    return instance_name(info.role, info.engine_rank)
