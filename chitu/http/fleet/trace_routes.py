"""The records of traced requests, of each tenant its own. Loop thread; files in other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chitu.clock import Clock
from chitu.cluster.cluster import Cluster
from chitu.errors import UnknownTrace
from chitu.http.wire.access import Access
from chitu.http.wire.routes import Route, json_response
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.trace import AnyTraceRecord, TraceFrame, TraceLoss, TraceRequest
from chitu.tracing.timeline import answer_of, rooms_of, with_running
from chitu.tracing.trace_files import FoundRecords, find_records


def trace_routes(cluster: Cluster, folder: Path, access: Access, clock: Clock) -> list[Route]:
    """Return the records of a traced request. Any router of a host can answer: all write to one folder
    (`tracing/trace_files.py`). Ids are the client's to choose, so requests of several tenants may have one: each tenant
    reads the records of its own."""

    async def trace(request: Request) -> Response:
        """Return what the router, P and D recorded of a traced request (`X-Chitu-Trace: 1`), with its timeline."""
        request_id, tenant = request.path_params["request_id"], access.trace_tenant(request.scope)
        record = cluster.record()
        snapshots = [*record.ended, *record.running]
        if tenant is not None:
            snapshots = [each for each in snapshots if each.tenant == tenant]
        found = await asyncio.to_thread(records_of, folder, request_id, tenant, snapshots)
        if all(isinstance(record, TraceLoss) for record in found.records):
            raise UnknownTrace(
                f"there are no trace records of request {request_id!r}: it was not traced, or they are gone"
            )
        return json_response(answer_of(with_running(found, request_id, snapshots, clock.monotonic()), request_id))

    return [Route("GET", "/trace/{request_id:path}", trace, None, (404,))]


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
