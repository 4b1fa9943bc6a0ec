"""Errors in Anthropic's form: the error object, and the status of a server that is too busy. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.errors import Capacity, ChituError, NoInstance, Overloaded, QueueTimeout
from chitu.http.wire.exchange import ErrorForm

OVERLOADED = 529
"""Status of a server that is too busy."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


def status_of(error: ChituError) -> int:
    """Return the status of an error: 529 if nothing can serve the request now."""
    if error.http_status == 503 and isinstance(error, (Capacity, NoInstance, Overloaded, QueueTimeout)):
        return OVERLOADED
    return error.http_status


def error_json(error: ChituError, request_id: str | None = None) -> bytes:
    """Return the error object."""
    status = status_of(error)
    kind = _TYPES.get(status) or ("api_error" if status >= 499 else "invalid_request_error")
    detail = AnthropicErrorDetail(kind, error.message)
    return msgspec.json.encode(AnthropicErrorReply("error", detail, request_id))


ERRORS = ErrorForm(AnthropicErrorReply, status_of, error_json, b"request-id")
