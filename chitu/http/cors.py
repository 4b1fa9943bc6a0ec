"""What lets scripts of other web pages use the API from a browser (CORS, `router.cors_origins`). Pure; loop thread.

A browser asks beforehand (the preflight) what a page may send, and shows the page an answer only where its head names
the page's origin. No cookies are in use, so none are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from chitu.http.proof import HEADERS as PROOF_HEADERS
from chitu.net.http import Headers, Scope, header

EXPOSED = b", ".join((b"x-request-id", b"x-chitu-warning", b"retry-after", *PROOF_HEADERS))
"""Headers of answers that scripts may read, beside those that they always may."""
PREFLIGHT_S = b"600"
"""How long a browser may remember the answer to a preflight."""
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}\Z")


def cors_headers(scope: Scope, origins: Collection[str]) -> Headers:
    """Of every answer: whether a script of the asking page may see it. Operators' calls are no script's."""
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
    """Of the answer to a preflight: what a page may send that `cors_headers` lets see the answer. Client libraries have
    headers of their own, so it is what they ask for."""
    wanted = header(scope, b"access-control-request-headers") or b""
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted if _NAMES.match(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
