"""The routes: one table row each, from which the application of the cold routes and the OpenAPI document are made.

The generation routes and `/v1/requests` are answered beside the application (`generate.py`, `kept_requests.py`), and
their rows only describe them. Handlers run on the router's loop, with bodies that are read already and within their
bound; `access.py` decides by its path who may call a route. Every error is OpenAI's error object, and the status codes
of a row are all that the route can answer with (test_http_fuzz.py).
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from chitu.assets import TINY_MODEL_NAME
from chitu.clock import Clock
from chitu.config.cluster_key import with_api_keys, with_cluster_key
from chitu.config.schema import Topology
from chitu.config.topology import with_router_ports
from chitu.errors import ChituError, Internal, InvalidRequest, PayloadTooLarge, UnknownTrace
from chitu.http.access import Access
from chitu.http.answers import in_pieces
from chitu.http.anthropic_bodies import COUNT_TOKENS, MESSAGES
from chitu.http.bodies import (
    ABORT,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    LARGE_BODY_BYTES,
    NO_EFFECT,
    REFUSED,
    RERANK,
    RESPONSES,
    SCORE,
    SERVED,
    TOKENIZE,
)
from chitu.http.body_decoder import (
    BodyDecoder,
    abort_decoder,
    drain_decoder,
    pause_decoder,
    resume_decoder,
    role_decoder,
    snapshot_decoder,
    warning_header,
    weights_decoder,
)
from chitu.http.body_fields import BODIES, fields_of
from chitu.http.body_reader import BodyReader, BodyRoute
from chitu.http.choice import RunningAnswers
from chitu.http.cluster_snapshot import ClusterSource, SnapshotSource, Watchers, WeightsState
from chitu.http.exchange import ANTHROPIC_PATHS, EXCHANGE
from chitu.http.kept_requests import KeptRequests
from chitu.http.metrics_text import MetricsReport, render_pieces
from chitu.http.replies import (
    AbortReply,
    ChatReply,
    CompletionReply,
    CountTokensReply,
    DetokenizeReply,
    DrainReply,
    EmbeddingsReply,
    ExampleReply,
    HealthInstance,
    HealthReply,
    MessagesReply,
    ModelReply,
    ModelsReply,
    RerankReply,
    ResponsesReply,
    RoleReply,
    ScoresReply,
    StatusReply,
    TokenizeReply,
)
from chitu.http.served_model import ServedModel
from chitu.net.http import AnthropicErrorReply, ErrorReply, error_body, error_headers, query_value
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import InstanceInfo
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.protocol.trace import AnyTraceRecord, TraceFrame, TraceLoss, TraceRequest
from chitu.tracing.timeline import answer_of, rooms_of, with_running
from chitu.tracing.trace_files import FoundRecords, find_records
from chitu.types import Role, instance_name, place_of

JSON = "application/json"
STREAM = "text/event-stream"
"""Has no schema, because tools disagree on whether it would describe the whole text or one event."""
METRICS = ("text/plain", "application/openmetrics-text")
BINARY = "application/octet-stream"
WEB_DIR = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
NOT_STORED = {"cache-control": "no-store"}
MIN_EXAMPLE, DEFAULT_EXAMPLE, MAX_EXAMPLE = 50, 600, 2000
"""Tokens of an example prompt."""

Handler = Callable[[Request], Awaitable[Response]]
StructT = TypeVar("StructT", bound=msgspec.Struct)
KEPT_REQUEST: dict[str, Any] = {
    "summary": "Answer of a request that outlived its router (`router.kept_requests.dir`), in the requested form",
    "operationId": "read_kept_request",
    "parameters": [
        {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "starting_after",
            "in": "query",
            "description": "Number of the last event that the client has; the same as the header Last-Event-ID",
            "schema": {"type": "integer", "minimum": 0},
        },
    ],
}
MAX_CHANGE_S = 86_400.0
DEFAULT_CHANGE_S = 600.0
MEANINGS = {
    400: "The request is wrong; `param` names the field",
    401: "An API key, or for an operator's call the cluster's token, is missing or wrong",
    403: "Operator's calls are not accepted from this address",
    404: "There is no such model, instance, request, trace, file, batch or path",
    408: "The request did not come in time",
    409: "Without this instance nothing could be served, see `force`; or it cannot be done in the present state",
    413: "The body is too large (`router.max_body_bytes`)",
    415: "The body is compressed (`Content-Encoding`)",
    429: "Too many requests, of all clients or of this one; see Retry-After",
    499: "The request was aborted (`/abort_request`)",
    431: "The headers are too large",
    500: "A bug of the server",
    507: "The disk is full, or holds what it may (`router.batches`)",
    503: "No instance serves, or too many wait, or the request was lost; see Retry-After",
    529: "No instance serves, or too many wait: what is 503 elsewhere; see Retry-After",
    504: "The request took longer than `router.request_timeout_s` or X-Request-Timeout allow",
}
ANYWHERE = (400, 401, 408, 413, 415, 431, 500, 503)
"""Status codes that the server itself can return before any route runs."""


class Route(NamedTuple):
    method: str
    path: str
    answer: Handler | None
    """Its name and docstring describe the route; None if it is answered beside the application."""
    reply: type[msgspec.Struct] | None = None
    """JSON of status 200; None: any."""
    statuses: tuple[int, ...] = ()
    """Status codes besides 200 and those of `ANYWHERE`."""
    kinds: tuple[str, ...] = (JSON,)
    """Content types of status 200."""
    more: Mapping[str, Any] = {}
    """Further entries of its operation in the document."""
    is_shown: bool = True
    """Whether it is in the document."""


class PageFiles(StaticFiles):
    """The page's scripts and styles, under the page's policy."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def control_app(version: str, routes: Sequence[Route]) -> FastAPI:
    """Build the application that answers the rows with a handler, and whose document has all rows."""
    app = FastAPI(title="chitu", version=version, redoc_url=None)
    _add_error_handlers(app)
    for route in routes:
        if route.answer is not None:
            app.add_api_route(route.path, route.answer, methods=[route.method], response_model=None)
    app.mount("/web", PageFiles(directory=WEB_DIR))
    app.openapi = cache(partial(openapi_document, version, tuple(routes)))  # type: ignore[method-assign]
    return app


class _HTTPError(ChituError):
    """A status that the framework decided on (404, 405)."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.http_status = status  # type: ignore[misc]
        self.code = code  # type: ignore[misc]


def _error_response(error: ChituError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.http_status, headers, JSON)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ChituError)
    async def chitu_error(request: Request, error: ChituError) -> Response:
        return _error_response(error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _error_response(Internal("the server failed to handle this request"))  # the caller logs it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        if error.status_code == 404:
            response = _error_response(_HTTPError(404, f"there is no {path}", "not_found"))
        elif error.status_code == 405:
            response = _error_response(_HTTPError(405, f"{path} does not accept {method}", "method_not_allowed"))
        else:
            response = _error_response(_HTTPError(error.status_code, str(error.detail), "invalid_request"))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response


def json_response(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON)


async def read_body(request: Request, decoder: BodyDecoder[StructT], takes_unknown: bool = False) -> StructT:
    """Return a small body. Unknown fields of it are errors, or warnings if `takes_unknown`."""
    raw = await request.body()
    if len(raw) > LARGE_BODY_BYTES:
        raise PayloadTooLarge(f"a body of {len(raw)} bytes; at most {LARGE_BODY_BYTES} are accepted here")
    warnings: list[str] = []
    body = decoder.decode(raw, warnings if takes_unknown else None)
    if warnings:
        request.scope[EXCHANGE].headers.append(warning_header(warnings))
    return body


# -------------------------------------------------------------------------------------- answered beside the application


HOT_ROUTES = (
    Route(
        *("POST", COMPLETIONS, None, CompletionReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Completion", "operationId": "create_completion"},
    ),
    Route(
        *("POST", CHAT, None, ChatReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Chat completion", "operationId": "create_chat_completion"},
    ),
    Route(
        *("POST", RESPONSES, None, ResponsesReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Response", "operationId": "create_response"},
    ),
    Route(
        *("POST", EMBEDDINGS, None, EmbeddingsReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Embeddings", "operationId": "create_embeddings"},
    ),
    Route(
        *("POST", SCORE, None, ScoresReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Scores of pairs of texts", "operationId": "create_scores"},
    ),
    Route(
        *("POST", RERANK, None, RerankReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Documents in the order of their scores", "operationId": "create_reranking"},
    ),
    Route(
        *("POST", MESSAGES, None, MessagesReply, (404, 429, 499, 504, 529), (JSON, STREAM)),
        {"summary": "Message", "operationId": "create_message"},
    ),
    Route(
        *("POST", COUNT_TOKENS, None, CountTokensReply, (404, 429, 529), (JSON,)),
        {"summary": "Tokens of a message's prompt", "operationId": "count_message_tokens"},
    ),
    Route("GET", "/v1/requests/{request_id}", None, None, (404, 499, 504), (JSON, STREAM), KEPT_REQUEST),
)


# ------------------------------------------------------------------------------------------------ of clients and probes


def client_routes(
    model: ServedModel,
    router: PDRequestRouter,
    bodies: BodyReader,
    access: Access,
    running: RunningAnswers,
    takes_unknown: bool,
) -> list[Route]:
    """Return models, tokenising and aborts. `abort_elsewhere`: as `RunningAnswers.abort`, in the router's other API
    processes."""

    def card(adapter: str = "") -> ModelReply:
        limits = model.limits(router.candidates)
        max_model_len = limits.max_model_len if limits is not None else None
        name, path, parent = (
            (adapter, model.adapters[adapter], model.name) if adapter else (model.name, model.path, None)
        )
        return ModelReply(name, "model", model.created_s, "chitu", path, max_model_len, parent)

    async def list_models(request: Request) -> Response:
        return json_response(ModelsReply("list", [card(), *map(card, model.adapters)]))

    async def get_model(request: Request) -> Response:
        return json_response(card(model.adapter_of(request.path_params["name"])))

    async def tokens(request: Request, route: BodyRoute) -> Response:
        exchange = request.scope[EXCHANGE]
        body, warnings = await bodies.tokens(route, await request.body(), exchange)
        if warnings:
            exchange.headers.append(warning_header(warnings))
        return Response(body, media_type=JSON)

    async def tokenize(request: Request) -> Response:
        return await tokens(request, "tokenize")

    async def detokenize(request: Request) -> Response:
        return await tokens(request, "detokenize")

    async def abort_request(request: Request) -> Response:
        """End a request that this API key sent: its client gets the error `cancelled`, and P and D end it at their
        next step. An id that is unknown, or whose request has ended already, is no error."""
        body = await read_body(request, abort_decoder, takes_unknown)
        tenant = access.cache_salt(request.scope)
        return json_response(AbortReply(running.abort(body.rid, tenant)))

    return [
        Route("GET", "/v1/models", list_models, ModelsReply),
        Route("GET", "/v1/models/{name:path}", get_model, ModelReply, (404,)),
        Route("POST", TOKENIZE, tokenize, TokenizeReply, (404, 429)),
        Route("POST", DETOKENIZE, detokenize, DetokenizeReply, (404, 429)),
        Route("POST", ABORT, abort_request, AbortReply),
    ]


def cluster_routes(
    router: PDRequestRouter, cluster: ClusterSource, source: SnapshotSource, access: Access, version: str
) -> list[Route]:
    watchers = Watchers(source)

    async def livez(request: Request) -> Response:
        return json_response(StatusReply("alive"))

    async def health(request: Request) -> Response:
        """Return 200 if a request can be served now, and the router has got no signal to end. The death of one instance
        among several changes nothing."""
        record = cluster.record()
        candidates = router.candidates
        reason = "the router received a signal to end" if record.is_ending else router.why_unusable()
        answer = HealthReply(
            "ending" if record.is_ending else "unavailable" if reason else "ok",
            reason,
            record.in_flight,
            [_health_of(info) for info in cluster.view.instances],
            {str(role): any(i.role is role for i in candidates.serving) for role in Role},
        )
        return json_response(answer, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        record = cluster.record()
        report = MetricsReport(version, record.metrics, record.coordination, source.instances())
        pieces, content_type = render_pieces(report, request.headers.get("accept", ""))
        return await in_pieces(pieces, {"content-type": content_type})

    async def snapshot(request: Request) -> Response:
        """Return the instances with their loads, and the requests that run or ended lately: with API keys those of the
        key's tenant, with the cluster's token all."""
        encoded = await source.fresh(access.trace_tenant(request.scope))
        return Response(encoded, media_type=JSON, headers=NOT_STORED)

    async def cluster_events(request: Request) -> Response:
        """Stream the same as server-sent events, one at every change, at most ten and at least two a second. After the
        first one, which has everything (`is_whole`), an event has the instances that changed since (their name and
        load alone, if nothing else did), the requests that run, and those that ended since. A load has what the page
        shows, without zeros. One with `is_whole` begins anew: an instance is gone."""
        client = access.client(request.scope)
        watchers.require_room(client)
        events = watchers.events(client, access.trace_tenant(request.scope))
        return StreamingResponse(events, media_type=STREAM, headers={**NOT_STORED, "x-accel-buffering": "no"})

    return [
        Route("GET", "/livez", livez, StatusReply),
        Route("GET", "/health", health, HealthReply),
        Route("GET", "/metrics", metrics, None, (), METRICS),
        Route(
            "GET",
            "/cluster",
            snapshot,
            ClusterSnapshot,
            more={"summary": "Cluster", "operationId": "cluster_cluster_get"},
        ),
        Route("GET", "/cluster/events", cluster_events, None, (429,), (STREAM,)),
    ]


def page_routes(model_name: str) -> list[Route]:
    """Return the page, and example prompts for the embedded model. The page's files are served unchanged from `web/`,
    with a policy that lets the browser load nothing from anywhere else."""

    async def page(request: Request) -> Response:
        return FileResponse(WEB_DIR / "index.html", media_type="text/html", headers=PAGE_HEADERS)

    routes = [Route("GET", "/", page, is_shown=False)]
    if model_name == TINY_MODEL_NAME:
        from chitu.assets.tiny_tasks import facts_for, recall

        async def demo_example(request: Request) -> Response:
            """Return a list of facts of about this many tokens with a question about it, and the answer, for the
            embedded model."""
            given = query_value(request.scope, "tokens")
            tokens = DEFAULT_EXAMPLE if given is None else int(given) if re.fullmatch(r"[0-9]{1,9}", given) else 0
            if not MIN_EXAMPLE <= tokens <= MAX_EXAMPLE:
                raise InvalidRequest(f"tokens must be from {MIN_EXAMPLE} to {MAX_EXAMPLE}", "tokens")
            example = recall(random.Random(), facts_for(tokens))
            return json_response(ExampleReply(example.prompt, example.answer, example.value))

        bounds = {"type": "integer", "minimum": MIN_EXAMPLE, "maximum": MAX_EXAMPLE, "default": DEFAULT_EXAMPLE}
        query = {"name": "tokens", "in": "query", "required": False, "schema": bounds}
        routes.append(Route("GET", "/demo/example", demo_example, ExampleReply, more={"parameters": [query]}))
    return routes


def _health_of(info: InstanceInfo) -> HealthInstance:
    home = instance_name(*place_of(info.home)) if info.home else ""
    return HealthInstance(info.name, info.role.value, info.incarnation, info.draining, home)


# --------------------------------------------------------------------------------------------------------- of operators


def operator_routes(
    cluster: ClusterSource,
    topology: Topology,
    token_port: int,
    running: RunningAnswers,
    kept: KeptRequests | None,
    access: Access,
) -> list[Route]:
    """Return an operator's calls. `kept`: None if there is no folder of kept requests."""

    async def drain(request: Request) -> Response:
        """Send an instance no new requests. It finishes its requests, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        body = await read_body(request, drain_decoder)
        draining = await cluster.drain(body.instance, body.force is True)
        return json_response(DrainReply(draining.name, str(draining.incarnation), "draining"))

    async def role(request: Request) -> Response:
        """Have an instance become a P, a D or a unified instance. It gets no new requests, finishes its own (those that
        take longer than `deadlines.role_change_s` go on elsewhere), and joins under another name and incarnation; its
        process, weights and cached prefixes stay. `GET /cluster` shows it as `draining`, and what it becomes."""
        body = await read_body(request, role_decoder)
        change = await cluster.change_role(body.instance, Role(body.role), body.force is True)
        return json_response(RoleReply(change.name, str(change.incarnation), change.becomes))

    async def flush_caches(request: Request) -> Response:
        """Make every instance forget its cached prefixes. Running requests keep the pages that they use, and no other
        request finds these. The command is part of the cluster view, which is repeated, so every instance receives it:
        within about a heartbeat `pages_cached` in `GET /cluster` is 0 if nothing runs."""
        await cluster.flush_caches()
        return json_response(StatusReply("flushing"))

    async def change_weights(request: Request) -> Response:
        """Have the cluster compute with the weights in another folder, of a model of the same kind. Every instance
        reads and checks them first, while requests are served; then new requests wait, running ones end, and all
        instances change at once, with empty caches. If one cannot, nothing is changed."""
        body = await read_body(request, weights_decoder)
        if not body.path.startswith("/"):
            raise InvalidRequest(f"path: {body.path!r} is no absolute path", "path")
        state = await cluster.change_weights(body.path, body.mixed is True, _timeout_s(body.timeout_s))
        return json_response(state)

    async def pause(request: Request) -> Response:
        """Have new requests wait at all routers, and return when the running ones have ended or, with `keep`, have
        stopped where they are."""
        body = await read_body(request, pause_decoder)
        return json_response(await cluster.pause(body.mode or "finish", _timeout_s(body.timeout_s)))

    async def resume(request: Request) -> Response:
        """End a pause, whichever router was asked for it: requests go on where they are, and those that waited start in
        their order."""
        if await request.body():
            await read_body(request, resume_decoder)
        return json_response(await cluster.pause("", MAX_CHANGE_S))

    async def take_snapshot(request: Request) -> Response:
        """Return a running request as a file from which another router can continue it (`router.kept_requests.dir`).
        The request runs on."""
        body = await read_body(request, snapshot_decoder)
        if kept is None:
            raise InvalidRequest("this router has no router.kept_requests.dir, so it keeps no bodies for snapshots")
        return Response(kept.snapshot(body.request_id, access.trace_tenant(request.scope)), media_type=BINARY)

    async def topology_with_ports(request: Request) -> Response:
        """Return the running topology with the router's actual ports and without keys: `chitu join` starts an instance
        of it."""
        without_keys = with_api_keys(with_cluster_key(topology, ""), ())
        # Several routers have fixed ports, which differ: an instance computes those of each.
        ports = {} if topology.dp_config.router.hosts[1:] else {"token_port": token_port, **cluster.ports()}
        return json_response(with_router_ports(without_keys, ports))

    return [
        Route("POST", "/admin/drain", drain, DrainReply, (403, 404, 409)),
        Route("POST", "/admin/role", role, RoleReply, (403, 404, 409)),
        Route("POST", "/admin/cache/flush", flush_caches, StatusReply, (403,)),
        Route("POST", "/admin/weights", change_weights, WeightsState, (403, 409)),
        Route("POST", "/admin/pause", pause, WeightsState, (403, 504)),
        Route("POST", "/admin/resume", resume, WeightsState, (403,)),
        Route("POST", "/admin/snapshot", take_snapshot, None, (403, 404), (BINARY,)),
        Route("GET", "/admin/topology", topology_with_ports, None, (403,)),
    ]


def _timeout_s(wanted_s: float | None) -> float:
    if wanted_s is not None and not 0 < wanted_s <= MAX_CHANGE_S:
        raise InvalidRequest(f"timeout_s: {wanted_s} is not within 0 and {MAX_CHANGE_S:g}", "timeout_s")
    return DEFAULT_CHANGE_S if wanted_s is None else wanted_s


def trace_routes(cluster: ClusterSource, folder: Path, access: Access, clock: Clock) -> list[Route]:
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


# --------------------------------------------------------------------------------------------------------- the document


def openapi_document(version: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document: what each route takes and answers, with every status code."""
    paths: dict[str, Any] = {}
    structs: list[Any] = [ErrorReply, AnthropicErrorReply]
    for route in routes:
        path = route.path.replace(":path}", "}")
        if route.is_shown:
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
            structs += [struct for struct in (BODIES.get(path), route.reply) if struct is not None]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for path in BODIES.keys() & paths.keys():
        properties = schemas[BODIES[path].__name__]["properties"]
        for field in fields_of(path).values():
            if "." in field.name:
                continue
            if field.effect == REFUSED:
                properties[field.name] = {"enum": [None, *field.neutral], "description": "Not supported yet"}
            elif field.effect == NO_EFFECT:
                properties.setdefault(field.name, {"description": "Without effect"})
            if field.note and field.effect != SERVED:
                properties[field.name]["description"] += f": {field.note}"
    info = {"title": "chitu", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(route: Route, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {}
    if route.answer is not None:
        name = route.answer.__name__
        operation["summary"] = name.replace("_", " ").title()
        operation["operationId"] = re.sub(r"\W", "_", f"{name}{path}") + f"_{route.method.lower()}"
        if told := inspect.getdoc(route.answer):
            operation["description"] = told
    if in_path := re.findall(r"{(\w+)}", path):
        text = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in in_path]
    operation |= route.more
    if path in BODIES and route.method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON: _schema(BODIES[path])}}
    kinds = {kind: {"schema": {"type": "string"}} if kind in METRICS else {} for kind in route.kinds}
    responses = {"200": {"description": "OK", "content": kinds}}
    if route.reply is not None:
        kinds[JSON] = _schema(route.reply)
    error = AnthropicErrorReply if path in ANTHROPIC_PATHS else ErrorReply
    for status in sorted({*ANYWHERE, *route.statuses}):
        responses[str(status)] = {"description": MEANINGS[status], "content": {JSON: _schema(error)}}
    if path == "/health":
        # The body is the same as with 200 and gives the reason.
        why = "No request can be served now, or the router is about to end"
        responses["503"] = {"description": why, "content": kinds}
    return {**operation, "responses": responses}


def _schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}
