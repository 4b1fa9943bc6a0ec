"""What an API process can know of the whole router: the cluster view, the loads, and every API process's own record.

`ClusterSource` is what the routes that show or change the cluster are made with. `serve/own_cluster.py` is the one of
the process that keeps the membership, `serve/replica.py:ReplicaCluster` that of the other API processes
(`router.workers`). Whichever is asked asks the others (`serve/siblings.py`), so an answer is as new as the question.
Loop thread.
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
    """0: the one that keeps the membership."""
    pid: int
    in_flight: int
    version: int
    """Of its journal: grows with every start, first token and end of a request."""
    running: tuple[RequestSnapshot, ...]
    ended: tuple[RequestSnapshot, ...]
    """The last ones, oldest first."""
    view_version: int
    """Of the cluster view that it has."""
    metrics: RouterMetrics
    """Process 0's has what those that have ended had counted, too."""
    coordination: CoordinationMetrics | None = None
    """Of process 0."""


@dataclass(slots=True, frozen=True)
class RouterRecord:
    """The router as a whole: what its API processes know together, and what the membership counts."""

    workers: tuple[WorkerReport, ...]

    @property
    def coordination(self) -> CoordinationMetrics:
        """Zeros where process 0 does not answer."""
        return next((w.coordination for w in self.workers if w.coordination is not None), CoordinationMetrics())

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
        """Those of the membership and the one for tokens, by short key name."""

    async def version(self) -> int:
        """Grows with whatever happens to any request."""

    def own_report(self) -> WorkerReport:
        """What this process knows of its own requests."""

    async def record(self) -> RouterRecord:
        """As it is when this is called or later, and when all have seen this process's view; what one that does not
        answer knew last."""

    async def drain(self, instance: str, force: bool) -> Draining:
        """See `drain_instance`."""

    async def abort_elsewhere(self, name: str, tenant: str) -> int:
        """`RunningAnswers.abort` in every other API process. Internal where one does not answer."""

    async def flush_caches(self) -> None:
        """Every instance forgets the prefixes that it has cached, within a heartbeat or so."""


def report_of(router: PDRequestRouter, index: int, view: ClusterView) -> WorkerReport:
    """What this process knows of its own requests."""
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
