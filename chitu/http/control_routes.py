"""`GET /trace/ID`: the records of a traced request, and the timeline that is made of them.

Part of the FastAPI application of the routes that are not hot. Any API process of the router can answer, since all
write to one folder (`tracing/trace_files.py`). Files are read in a thread. Ids are the client's to choose, so requests
of several tenants may have one: each tenant reads the records of its own.

An operator's calls to the router: `POST /admin/drain` and `/admin/cache/flush`, `GET /admin/topology`, and others.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. `access.py` decides which
callers may use them.

The routes that are not hot, as a FastAPI application: models, health, tokenising, metrics, API
documentation, and through `web_routes` the page.

Called on the router's loop, with bodies that are read already and within their bound. The generation routes are
answered beside it (`generate.py`) and only appear in its OpenAPI document. Every error is OpenAI's error object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from chitu.clock import Clock
from chitu.config.schema import RouterConfig, Topology
from chitu.errors import ChituError, Internal, InvalidRequest, PayloadTooLarge, UnknownTrace
from chitu.http.access import Access
from chitu.http.bodies import LARGE_BODY_BYTES
from chitu.http.body_decoder import abort_decoder, warning_header
from chitu.http.body_reader import BodyReader, BodyRoute
from chitu.http.cluster_snapshot import ClusterSource, SnapshotSource
from chitu.http.exchange import EXCHANGE
from chitu.http.metrics_text import MetricsReport, render_pieces
from chitu.http.openapi_document import openapi_document
from chitu.http.served_model import ServedModel
from chitu.http.sse import in_pieces
from chitu.http.web_routes import add_web_routes
from chitu.net.http import Scope, error_headers, error_object
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import encode
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.trace import AnyTraceRecord, TraceFrame, TraceLoss, TraceRequest
from chitu.tracing.timeline import answer_of, rooms_of, with_running
from chitu.tracing.trace_files import FoundRecords, find_records
from chitu.types import Role


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


class DrainBody(BaseModel):
    instance: str
    """Name of the instance: `P0`, `D1`, `U0`."""
    force: bool = False
    """Drain it even if no request could be served afterwards."""


class DrainReply(BaseModel):
    instance: str
    incarnation: str
    """Incarnation in decimal. It distinguishes this process from one that takes its place."""
    status: str


class SnapshotBody(BaseModel):
    request_id: str
    """Id of the request, or of its answer."""


class AbortHere(BaseModel):
    rid: str
    tenant: str


def add_admin_routes(
    app: FastAPI,
    cluster: ClusterSource,
    topology: Callable[[], Topology],
    abort: Callable[[str, str], int],
    snapshot: Callable[[str, str | None], bytes] | None,
    tenant_of: Callable[[Scope], str | None],
) -> None:
    """Add the routes to `app`. `topology`: what an instance needs to join. `abort`: see `RunningAnswers`. `snapshot`:
    see `KeptRequests`; None if there is no folder of kept requests. `tenant_of`: the tenant whose requests a caller may
    see; None for all, as an operator with the cluster's token."""

    @app.post("/admin/drain")
    async def drain(body: DrainBody) -> DrainReply:
        """Send an instance no new requests. It finishes its requests, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        draining = await cluster.drain(body.instance, body.force)
        return DrainReply(instance=draining.name, incarnation=str(draining.incarnation), status="draining")

    @app.post("/admin/cache/flush")
    async def flush_caches() -> dict[str, str]:
        """Make every instance forget its cached prefixes. Running requests keep the pages that they use, and no other
        request finds these. The command is part of the cluster view, which is repeated, so every instance receives it:
        within about a heartbeat `pages_cached` in `GET /cluster` is 0 if nothing runs."""
        await cluster.flush_caches()
        return {"status": "flushing"}

    @app.post("/admin/snapshot")
    async def take_snapshot(request: Request, body: SnapshotBody) -> Response:
        """Return a running request as a file from which another router can continue it (`router.kept_requests.dir`).
        The request runs on."""
        if snapshot is None:
            raise InvalidRequest("this router has no router.kept_requests.dir, so it keeps no bodies for snapshots")
        return Response(snapshot(body.request_id, tenant_of(request.scope)), media_type="application/octet-stream")

    @app.post("/admin/abort", include_in_schema=False)
    async def abort_here(body: AbortHere) -> dict[str, int]:
        """End requests of this API process on behalf of `/abort_request` of another one."""
        return {"aborted": abort(body.rid, body.tenant)}

    @app.get("/admin/record", include_in_schema=False)
    async def record() -> Response:
        """Return this API process's report on its own requests, for the other API processes (MessagePack)."""
        return Response(encode(cluster.own_report()), media_type="application/msgpack")

    @app.get("/admin/topology")
    async def topology_with_ports() -> Response:
        """Return the running topology with the router's actual ports and without keys: `chitu join` starts an instance
        of it."""
        return Response(msgspec.json.encode(topology()), media_type="application/json")


def _error_response(error: ChituError) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(error_object(error), error.http_status, headers)


class _HTTPError(ChituError):
    """A status that the framework decided on (404, 405)."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.http_status = status  # type: ignore[misc]
        self.code = code  # type: ignore[misc]


def make_control_app(
    model: ServedModel,
    router: PDRequestRouter,
    cluster: ClusterSource,
    source: SnapshotSource,
    bodies: BodyReader,
    access: Access,
    config: RouterConfig,
    version: str,
    abort: Callable[[str, Scope], Awaitable[int]],
) -> FastAPI:
    """Build the application. `abort` ends the requests with an id and returns their number."""
    app = FastAPI(title="chitu", version=version, redoc_url=None)
    _add_error_handlers(app)
    _add_model_routes(app, model, router)
    _add_tokenizer_routes(app, bodies)
    _add_abort_route(app, abort, config.unknown_fields == "warn")
    _add_health_routes(app, router, cluster)
    _add_metrics_route(app, cluster, source)
    add_web_routes(app, source, access)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ChituError)
    async def chitu_error(request: Request, error: ChituError) -> Response:
        return _error_response(error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _error_response(Internal("the server failed to handle this request"))  # the caller logs it

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error_response(InvalidRequest(f"{param or 'the body'}: {first['msg']}", param or None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        if error.status_code == 404:
            response = _error_response(_HTTPError(404, f"there is no {path}", "not_found"))
        elif error.status_code == 405:
            response = _error_response(_HTTPError(405, f"{path} does not take {method}", "method_not_allowed"))
        else:
            response = _error_response(_HTTPError(error.status_code, str(error.detail), "invalid_request"))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response


def _add_model_routes(app: FastAPI, model: ServedModel, router: PDRequestRouter) -> None:
    def card() -> dict[str, Any]:
        limits = model.limits(router.candidates)
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "chitu",
            "root": model.path,
            "max_model_len": limits.max_model_len if limits is not None else None,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        model.require_name(name)
        return card()


def _add_abort_route(app: FastAPI, abort: Callable[[str, Scope], Awaitable[int]], takes_unknown: bool) -> None:
    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        """End a request that this API key sent: its client gets the error `cancelled`, and P and D end it at their
        next step. An id that is unknown, or whose request has ended already, is no error."""
        raw = await request.body()
        if len(raw) > LARGE_BODY_BYTES:
            raise PayloadTooLarge(f"a body of {len(raw)} bytes; at most {LARGE_BODY_BYTES} are taken here")
        warnings: list[str] = []
        body = abort_decoder.decode(raw, warnings if takes_unknown else None)
        if warnings:
            request.scope[EXCHANGE].headers.append(warning_header(warnings))
        return JSONResponse({"aborted": await abort(body.rid, request.scope)})


def _add_tokenizer_routes(app: FastAPI, bodies: BodyReader) -> None:
    async def answer(request: Request, route: BodyRoute) -> Response:
        exchange = request.scope[EXCHANGE]
        body, warnings = await bodies.tokens(route, await request.body(), exchange)
        if warnings:
            exchange.headers.append(warning_header(warnings))
        return Response(body, media_type="application/json")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(request, "tokenize")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(request, "detokenize")


def _add_health_routes(app: FastAPI, router: PDRequestRouter, cluster: ClusterSource) -> None:
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/health")
    async def health() -> Response:
        """Return 200 if a request can be served now, and the router has got no signal to end. The death of one instance
        among several changes nothing."""
        record = await cluster.record()
        candidates = router.candidates
        reason = "the router received a signal to end" if record.is_ending else candidates.why_unusable()
        body = {
            "status": "ending" if record.is_ending else "unavailable" if reason else "ok",
            "reason": reason,
            "in_flight": record.in_flight,
            "instances": [
                {
                    "name": i.name,
                    "role": str(i.role),
                    "incarnation": i.incarnation,
                    "draining": i.draining,
                }
                for i in cluster.view.instances
            ],
            "ready": {str(role): any(i.role is role for i in candidates.serving) for role in Role},
        }
        return Response(msgspec.json.encode(body), 503 if reason else 200, media_type="application/json")


def _add_metrics_route(app: FastAPI, cluster: ClusterSource, source: SnapshotSource) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        record = await cluster.record()
        counted = [worker.metrics for worker in record.workers]
        report = MetricsReport(app.version, len(counted), counted, record.coordination, source.instances())
        pieces, content_type = render_pieces(report, request.headers.get("accept", ""))
        return await in_pieces(pieces, {"content-type": content_type})
