"""The routes that are not hot, as a FastAPI application: models, health, tokenising, metrics, API
documentation, and through `web_routes` the page.

Called on the router's loop, with bodies that are read already and within their bound. The generation routes are
answered beside it (`generate.py`) and only appear in its OpenAPI document. Every error is OpenAI's error object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from chitu.config.schema import RouterConfig
from chitu.errors import ChituError, Internal, InvalidRequest, PayloadTooLarge
from chitu.http.access import Access
from chitu.http.body_decoder import abort_decoder, warning_header
from chitu.http.body_reader import BodyReader
from chitu.http.body_work import BodyRoute
from chitu.http.cluster_snapshot import SnapshotSource
from chitu.http.cluster_source import ClusterSource
from chitu.http.exchange import EXCHANGE
from chitu.http.metrics_text import MetricsReport, render_pieces
from chitu.http.openapi_document import openapi_document
from chitu.http.pieces import in_pieces
from chitu.http.request_bodies import LARGE_BODY_BYTES
from chitu.http.served_model import ServedModel
from chitu.http.web_routes import add_web_routes
from chitu.net.http import Scope, error_headers, error_object
from chitu.pd_request_router import PDRequestRouter
from chitu.types import Role


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
        reason = "the router has got a signal to end" if record.is_ending else candidates.why_unusable()
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
