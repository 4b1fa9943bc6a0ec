"""`GET /trace/ID`: the records of a traced request, and the timeline that is made of them.

Part of the FastAPI application of the routes that are not hot. Any API process of the router can answer, since all
write to one folder (`tracing/trace_files.py`). Files are read in a thread. Ids are the client's to choose, so requests
of several tenants may have one: each tenant reads the records of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response

from chitu.client.timeline import answer_of, rooms_of, with_running
from chitu.clock import Clock
from chitu.errors import UnknownTrace
from chitu.http.cluster_source import ClusterSource
from chitu.net.http import Scope
from chitu.protocol.snapshot import RequestSnapshot
from chitu.protocol.trace import AnyTraceRecord, TraceFrame, TraceLoss, TraceRequest
from chitu.tracing.trace_files import FoundRecords, find_records


def add_trace_route(
    app: FastAPI, cluster: ClusterSource, folder: Path, tenant_of: Callable[[Scope], str | None], clock: Clock
) -> None:
    """Add the route. `tenant_of`: the tenant whose traces a caller may read; None for all. `clock`: the router's."""

    @app.get("/trace/{request_id:path}")
    async def trace(request: Request, request_id: str) -> Response:
        """Return what the router, P and D recorded of a traced request (`X-Chitu-Trace: 1`), with its timeline."""
        tenant = tenant_of(request.scope)
        workers = (await cluster.record()).workers
        snapshots = [each for worker in workers for each in (*worker.ended, *worker.running)]
        if tenant is not None:
            snapshots = [each for each in snapshots if each.tenant == tenant]
        found = await asyncio.to_thread(records_of, folder, request_id, tenant, snapshots)
        if all(isinstance(record, TraceLoss) for record in found.records):
            raise UnknownTrace(
                f"there are no trace records of request {request_id!r}: it was not traced, or they are gone"
            )
        answer = answer_of(with_running(found, request_id, snapshots, clock.monotonic()), request_id)
        return Response(msgspec.json.encode(answer), media_type="application/json")


def records_of(folder: Path, request_id: str, tenant: str | None, snapshots: Sequence[RequestSnapshot]) -> FoundRecords:
    """Return the records of the tenant's requests with this id (None: of all tenants'). `snapshots`: records of the
    tenant's requests that the router has in memory. Blocks.

    Instances know no tenants: theirs are the records of rooms that belong to a request of the tenant. A message with
    tokens has those of other requests too, so only its length is returned.
    """
    if tenant is None:
        return find_records(folder, request_id)
    mine = find_records(folder, request_id, lambda each: isinstance(each, TraceRequest) and each.tenant == tenant)
    rooms = rooms_of(snapshots)
    for request in mine.records:
        if isinstance(request, TraceRequest):
            rooms |= rooms_of(attempt for attempts in request.choices for attempt in attempts)

    def is_wanted(record: AnyTraceRecord) -> bool:
        return record.tenant == tenant if isinstance(record, TraceRequest) else record.room in rooms

    found = find_records(folder, request_id, is_wanted)
    records = [_without_others(record) for record in found.records]
    return FoundRecords(records, found.num_unreadable, found.is_cut)


def _without_others(record: AnyTraceRecord) -> AnyTraceRecord:
    is_shared = isinstance(record, TraceFrame) and record.port == "token"
    return msgspec.structs.replace(record, data=b"") if is_shared else record
