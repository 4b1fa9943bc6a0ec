"""`ClusterSource` of the process that keeps the membership, and its operations on an instance. Loop thread."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from chitu.errors import LastInstance, UnknownInstance
from chitu.http.cluster_snapshot import Draining, Loads, RouterRecord, WorkerReport, report_of
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import ClusterView, InstanceInfo
from chitu.router.metrics import RouterMetrics, add_up
from chitu.router.policies import Candidates
from chitu.serve.membership import Membership
from chitu.serve.siblings import Siblings
from chitu.types import Role


class OwnCluster:
    """`ClusterSource` of the process that keeps the membership."""

    def __init__(self, router: PDRequestRouter, membership: Membership, siblings: Siblings) -> None:
        self._router = router
        self._membership = membership
        self._siblings = siblings
        self._ended: RouterMetrics | None = None
        """Sum of the metrics of API processes that have ended, if any."""
        self.is_ending = False

    @property
    def view(self) -> ClusterView:
        return self._membership.coordination.view

    def loads(self) -> Loads:
        return self._membership.coordination.loads()

    def ports(self) -> Mapping[str, int]:
        return self._membership.port_table()

    def note_ended(self, metrics: RouterMetrics) -> None:
        """Add the metrics of an API process that died: its counters, which must not fall, but not its gauges."""
        self._ended = add_up([metrics] if self._ended is None else [self._ended, metrics])
        self._ended.in_flight, self._ended.breakers = {}, {}

    def own_report(self) -> WorkerReport:
        own = report_of(self._router, 0, self.view)
        metrics = own.metrics if self._ended is None else add_up([own.metrics, self._ended])
        coordination = self._membership.metrics()
        return msgspec.structs.replace(own, metrics=metrics, coordination=coordination, is_ending=self.is_ending)

    async def record(self) -> RouterRecord:
        others = await self._siblings.reports(self.view)
        return RouterRecord((self.own_report(), *others))

    async def drain(self, instance: str, force: bool) -> Draining:
        return drain_instance(self._membership, instance, force)

    async def flush_caches(self) -> None:
        self._membership.coordination.flush_caches(1 + secrets.randbits(62))


def drain_instance(membership: Membership, name: str, force: bool) -> Draining:
    """Send an instance no new requests; it finishes what it runs and leaves. Idempotent.

    Raises UnknownInstance; without `force` LastInstance if requests can be served now but not without this instance.
    """
    view = membership.coordination.view
    info = _find(view, name)
    if not force:
        _require_others(view, info)
    membership.request_drain(info.role, info.engine_rank)
    return Draining(info.name, info.incarnation)


def _find(view: ClusterView, name: str) -> InstanceInfo:
    for info in view.instances:
        if info.name == name.upper():
            return info
    names = ", ".join(info.name for role in Role for info in view.instances if info.role is role) or "none"
    raise UnknownInstance(f"there is no instance {name!r} in the cluster; it has {names}")


def _require_others(view: ClusterView, info: InstanceInfo) -> None:
    if info.draining or not Candidates.of(view).usable:
        return
    others = tuple(other for other in view.instances if other is not info)
    left = Candidates.of(msgspec.structs.replace(view, instances=others))
    if not left.usable:
        raise LastInstance(
            f"without {info.name} nothing could be served ({left.why_unusable()}): start another one first, "
            f"or force it (`chitu drain {info.name} --force`)"
        )
