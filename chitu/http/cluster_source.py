"""The whole router as an API process sees it: the cluster view, the loads, and the record of every API process.

The routes that show or change the cluster use a `ClusterSource`. `serve/own_cluster.py` implements it for the process
that keeps the membership, `serve/replica.py:ReplicaCluster` for the other API processes (`router.workers`). For each
call a source asks the other processes (`serve/siblings.py`), so a result is as new as the call. Loop thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import ClusterView, LoadReport, Wire
from chitu.protocol.snapshot import RequestSnapshot
from chitu.router.metrics import CoordinationMetrics, RouterMetrics
from chitu.types import Role

Loads = Mapping[tuple[Role, int], LoadReport]


class WorkerReport(Wire, frozen=True, tag="worker_report"):
    """One API process as it is now."""

    index: int
    """Index of the process; 0 keeps the membership."""
    pid: int
    in_flight: int
    version: int
    """Version of its journal: grows with every start, first token and end of a request."""
    running: tuple[RequestSnapshot, ...]
    ended: tuple[RequestSnapshot, ...]
    """Requests that ended last, oldest first."""
    view_version: int
    """Version of the cluster view that it has."""
    metrics: RouterMetrics
    """Metrics of the process; those of process 0 include the counts of processes that have ended."""
    coordination: CoordinationMetrics | None = None
    """Metrics of the membership; of process 0 only."""
    is_ending: bool = False
    """Whether the whole router has got a signal to end; of process 0 only."""


@dataclass(slots=True, frozen=True)
class RouterRecord:
    """The router as a whole: the reports of its API processes, and the metrics of the membership."""

    workers: tuple[WorkerReport, ...]

    @property
    def coordination(self) -> CoordinationMetrics:
        """Metrics of the membership; zeros if process 0 does not answer."""
        return next((w.coordination for w in self.workers if w.coordination is not None), CoordinationMetrics())

    @property
    def is_ending(self) -> bool:
        return any(worker.is_ending for worker in self.workers)

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers)


@dataclass(slots=True, frozen=True)
class Draining:
    """An instance that was asked to finish and leave."""

    name: str
    incarnation: int


class ClusterSource(Protocol):
    @property
    def view(self) -> ClusterView: ...

    def loads(self) -> Loads:
        """Return the last report of each member."""

    def ports(self) -> Mapping[str, int]:
        """Return the ports of the membership and the token port, by short key name."""

    def own_report(self) -> WorkerReport:
        """Return this process's report on its own requests."""

    async def record(self) -> RouterRecord:
        """Return the reports of all API processes, made after this call and after all have this process's view. For a
        process that does not answer, its last known report is used."""

    async def drain(self, instance: str, force: bool) -> Draining:
        """See `drain_instance`."""

    async def flush_caches(self) -> None:
        """Make every instance forget its cached prefixes, within about a heartbeat."""


def report_of(router: PDRequestRouter, index: int, view: ClusterView) -> WorkerReport:
    """Return this process's report on its own requests."""
    return WorkerReport(
        index=index,
        pid=os.getpid(),
        in_flight=router.in_flight,
        version=router.journal.version,
        running=tuple(router.running()),
        ended=tuple(router.journal.ended),
        view_version=view.version,
        metrics=router.metrics(),
    )
