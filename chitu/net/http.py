"""Small ASGI helpers for routes that bypass the web framework: find a header, compare a bearer token in constant time,
describe an error. Pure; used on the router's loop and by the bootstrap server.

The error object is OpenAI's: `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from chitu.errors import ChituError, InvalidRequest, PoisonRequest, ServiceError

_BY_NAME = "chitu.headers"
"""Key, in a scope, of its headers by name: a route asks for several."""
RETRY_AFTER_S = 1
"""`Retry-After` of an error that has no time of its own."""


def bearer(authorization: bytes | None) -> bytes | None:
    """Return the credential of the header; None if there is none."""
    scheme, _, credential = (authorization or b"").partition(b" ")
    return credential.strip() or None if scheme.lower() == b"bearer" else None


def is_bearer(authorization: bytes | None, known: Iterable[bytes]) -> bool:
    """Return whether the header has one of the `known` credentials. The time it takes reveals only how many there
    are."""
    given = bearer(authorization)
    if given is None:
        return False
    return any([hmac.compare_digest(given, credential) for credential in known])


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed the connection before its body was complete."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of that lower-case name; None if there is none."""
    by_name: dict[bytes, bytes] | None = scope.get(_BY_NAME)
    if by_name is None:
        by_name = scope[_BY_NAME] = dict(reversed(scope["headers"]))
    return by_name.get(name)


def query_value(scope: Scope, name: str) -> str | None:
    """Return the first query value of this name; None if there is none."""
    values = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get(name)
    return values[0] if values else None


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorDetail


def error_body(error: ChituError) -> bytes:
    """Return the error as OpenAI's error object."""
    status = error.http_status
    if status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    elif isinstance(error, ServiceError) and status != 500:
        kind = "service_unavailable_error"
    else:
        kind = "server_error"
    param = error.param if isinstance(error, InvalidRequest) else None
    return msgspec.json.encode(ErrorReply(ErrorDetail(error.message, kind, param, error.code)))


def error_headers(error: ChituError) -> Headers:
    """Return `Retry-After` if a retry can help: whole seconds, at least one. If a retry would kill more instances,
    return the header that keeps OpenAI's clients from it: they retry after any 5xx by themselves."""
    if isinstance(error, PoisonRequest):
        return [(b"x-should-retry", b"false")]
    if isinstance(error, ServiceError) and error.retryable:
        seconds = RETRY_AFTER_S if error.retry_after_s is None else max(RETRY_AFTER_S, math.ceil(error.retry_after_s))
        return [(b"retry-after", b"%d" % seconds)]
    return []
