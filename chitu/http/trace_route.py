"""`GET /trace/ID`: the records of a traced request, and the timeline that is made of them.

Part of the FastAPI application of the routes that are not hot. Any API process of the router can answer, since all
write to one folder (`tracing/trace_files.py`). Files are read in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response

from chitu.client.timeline import answer_of, with_running
from chitu.clock import Clock
from chitu.errors import UnknownTrace
from chitu.http.cluster_source import ClusterSource
from chitu.net.http import Scope
from chitu.protocol.trace import TraceLoss, TraceRequest
from chitu.tracing.trace_files import FoundRecords, find_records


def add_trace_route(
    app: FastAPI, cluster: ClusterSource, folder: Path, tenant_of: Callable[[Scope], str | None], clock: Clock
) -> None:
    """Add the route. `tenant_of`: the tenant whose traces a caller may read; None for all. `clock`: the router's."""

    @app.get("/trace/{request_id:path}")
    async def trace(request: Request, request_id: str) -> Response:
        """Return what the router, P and D recorded of a traced request (`X-Chitu-Trace: 1`), with its timeline."""
        found = await asyncio.to_thread(find_records, folder, request_id)
        tenant = tenant_of(request.scope)
        if tenant is None:
            workers = (await cluster.record()).workers
            snapshots = [each for worker in workers for each in (*worker.ended, *worker.running)]
            found = with_running(found, request_id, snapshots, clock.monotonic())
        if not may_read(found, tenant) or all(isinstance(record, TraceLoss) for record in found.records):
            raise UnknownTrace(
                f"there are no trace records of request {request_id!r}: it was not traced, or they are gone"
            )
        return Response(msgspec.json.encode(answer_of(found, request_id)), media_type="application/json")


def may_read(found: FoundRecords, tenant: str | None) -> bool:
    """Return whether the tenant may read the records. If requests of several tenants have the id, only the operator
    may."""
    tenants = {record.tenant for record in found.records if isinstance(record, TraceRequest)}
    return tenant is None or tenants == {tenant}
