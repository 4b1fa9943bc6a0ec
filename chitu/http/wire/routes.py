"""Rows of the table of routes, and what handlers of cold routes answer with. Loop thread.

The status codes of a row are all that the route can answer with (test_http_fuzz.py). `access.py` decides by its path
who may call a route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chitu.http.wire.exchange import PLAIN, ErrorForm

JSON = "application/json"
STREAM = "text/event-stream"
"""Has no schema, because tools disagree on whether it would describe the whole text or one event."""
METRICS = ("text/plain", "application/openmetrics-text")
BINARY = "application/octet-stream"
NOT_STORED = {"cache-control": "no-store"}
Handler = Callable[[Request], Awaitable[Response]]


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
    errors: ErrorForm = PLAIN


def json_response(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON)
