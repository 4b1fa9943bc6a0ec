"""The table of the APIs: an API of another vendor is a folder of `dialects/` and a row here. Also the bodies of all
routes, and how each is read.
"""

from __future__ import annotations

from typing import Any

from chitu.http.answer.dialect import Endpoint
from chitu.http.ask.decoder import BodyTable
from chitu.http.ask.reader import Reader
from chitu.http.batch.bodies import BATCHES, BatchBody
from chitu.http.dialects.anthropic.dialect import DIALECT as ANTHROPIC
from chitu.http.dialects.openai.dialect import DIALECT as OPENAI
from chitu.http.dialects.pooled.dialect import DIALECT as POOLED
from chitu.http.dialects.responses.dialect import DIALECT as RESPONSES
from chitu.http.fleet.bodies import OPERATOR_BODIES
from chitu.http.wire.exchange import PLAIN
from chitu.http.wire.routes import JSON, STREAM, Route

DIALECTS = (OPENAI, RESPONSES, ANTHROPIC, POOLED)

ENDPOINTS: dict[str, Endpoint] = {each.name: each for dialect in DIALECTS for each in dialect.endpoints}
"""All endpoints by name."""
BODIES = BodyTable(
    {
        **{each.path: each.body for each in ENDPOINTS.values()},
        **{path: body for dialect in DIALECTS for path, body in dialect.bodies.items()},
        BATCHES: BatchBody,
        **OPERATOR_BODIES,
    },
    tuple(rows for dialect in DIALECTS for rows in dialect.unserved),
)
READERS: dict[str, Reader] = {name: Reader(BODIES.decoder(each.body), each.read) for name, each in ENDPOINTS.items()}
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


def _row(each: Endpoint) -> Route:
    kinds = (JSON, STREAM) if each.is_streamed else (JSON,)
    told = {"summary": each.operation[0], "operationId": each.operation[1]}
    return Route("POST", each.path, None, each.reply, each.statuses, kinds, told, errors=each.errors)


HOT_ROUTES = (
    # Those with an error object of their own come last.
    *sorted([_row(each) for each in ENDPOINTS.values() if each.reply is not None], key=lambda row: row.errors != PLAIN),
    Route("GET", "/v1/requests/{request_id}", None, None, (404, 499, 504), (JSON, STREAM), KEPT_REQUEST),
)
"""Rows of the routes that are answered beside the application."""
