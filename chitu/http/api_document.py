"""The application of the cold routes and the OpenAPI document, both made of the rows of the table of routes.

The generation routes and `/v1/requests` are answered beside the application (`answer/generate.py`), and their rows only
describe them. Handlers run on the router's loop, with bodies that are read already and within their bound. Every error
is OpenAI's error object.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from chitu.errors import ChituError, Internal
from chitu.http.ask.bodies import NO_EFFECT, REFUSED, SERVED
from chitu.http.ask.decoder import BodyTable
from chitu.http.fleet.page import WEB_DIR, PageFiles
from chitu.http.wire.exchange import PLAIN
from chitu.http.wire.routes import JSON, METRICS, Route
from chitu.net.http import error_body, error_headers

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


def control_app(version: str, routes: Sequence[Route], bodies: BodyTable) -> FastAPI:
    """Build the application that answers the rows with a handler, and whose document has all rows."""
    app = FastAPI(title="chitu", version=version, redoc_url=None)
    app.state.bodies = bodies
    _add_error_handlers(app)
    for route in routes:
        if route.answer is not None:
            app.add_api_route(route.path, route.answer, methods=[route.method], response_model=None)
    app.mount("/web", PageFiles(directory=WEB_DIR))
    app.openapi = cache(partial(openapi_document, version, tuple(routes), bodies))  # type: ignore[method-assign]
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


# --------------------------------------------------------------------------------------------------------- the document


def openapi_document(version: str, routes: Sequence[Route], table: BodyTable) -> dict[str, Any]:
    """Return the OpenAPI document: what each route takes and answers, with every status code."""
    paths: dict[str, Any] = {}
    bodies = table.bodies
    structs: list[Any] = [PLAIN.reply, *dict.fromkeys(route.errors.reply for route in routes)]
    for route in routes:
        path = route.path.replace(":path}", "}")
        if route.is_shown:
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, bodies.get(path))
            structs += [struct for struct in (bodies.get(path), route.reply) if struct is not None]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for path in bodies.keys() & paths.keys():
        properties = schemas[bodies[path].__name__]["properties"]
        for field in table.fields[path].values():
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


def _operation(route: Route, path: str, body: type[msgspec.Struct] | None) -> dict[str, Any]:
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
    if body is not None and route.method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON: _schema(body)}}
    kinds = {kind: {"schema": {"type": "string"}} if kind in METRICS else {} for kind in route.kinds}
    responses = {"200": {"description": "OK", "content": kinds}}
    if route.reply is not None:
        kinds[JSON] = _schema(route.reply)
    for status in sorted({*ANYWHERE, *route.statuses}):
        responses[str(status)] = {"description": MEANINGS[status], "content": {JSON: _schema(route.errors.reply)}}
    if path == "/health":
        # The body is the same as with 200 and gives the reason.
        why = "No request can be served now, or the router is about to end"
        responses["503"] = {"description": why, "content": kinds}
    return {**operation, "responses": responses}


def _schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}
