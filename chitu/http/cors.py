"""CORS: headers that let scripts of other web pages use the API (`router.cors_origins`). Pure; loop thread.

A browser asks beforehand (the preflight) what a page may send, and shows the page an answer only if its head names the
page's origin. The API uses no cookies, so none are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from chitu.http.proof import HEADERS as PROOF_HEADERS
from chitu.net.http import Headers, Scope, header

EXPOSED = b", ".join((b"x-request-id", b"x-chitu-warning", b"retry-after", *PROOF_HEADERS))
"""Headers of answers that scripts may read, in addition to those that they always may."""
PREFLIGHT_S = b"600"
"""How long a browser may remember the answer to a preflight."""
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}\Z")


def cors_headers(scope: Scope, origins: Collection[str]) -> Headers:
    """Return the headers that tell whether a script of the requesting page may see an answer. Scripts never see the
    answers to operators' calls."""
    vary: Headers = [(b"vary", b"origin")]
    origin = header(scope, b"origin")
    if origin is None or scope["path"].startswith("/admin/"):
        return vary
    if "*" in origins:
        origin = b"*"
    elif origin.decode("latin-1") not in origins:
        return vary
    return [*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]


def is_preflight(scope: Scope) -> bool:
    return (
        scope["method"] == "OPTIONS"
        and header(scope, b"origin") is not None
        and header(scope, b"access-control-request-method") is not None
    )


def preflight_headers(scope: Scope) -> Headers:
    """Return the headers of the answer to a preflight: what a page may send if `cors_headers` lets it see the answer.
    All requested headers are allowed, because client libraries have headers of their own."""
    wanted = header(scope, b"access-control-request-headers") or b""
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted if _NAMES.match(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
