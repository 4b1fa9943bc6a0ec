"""The ASGI application of the API port: request ids, access, CORS, and hot routes beside the cold ones. Loop thread.

CORS (`router.cors_origins`): a browser asks beforehand (the preflight) what a page may send, and shows the page an
answer only if its head names the page's origin. The API uses no cookies, so none are allowed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from chitu.errors import ChituError, Internal
from chitu.http.wire.access import Access
from chitu.http.wire.exchange import EXCHANGE, Exchange, HotRoute
from chitu.log import about
from chitu.net.http import ClientGone, Headers, Receive, Scope, Send, header

logger = logging.getLogger(__name__)

EXPOSED = (b"x-chitu-warning", b"retry-after")
"""Headers of answers that scripts may read, in addition to ids, and to those that they always may."""
PREFLIGHT_S = b"600"
"""How long a browser may remember the answer to a preflight."""
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}\Z")
COUNTED_PATHS = frozenset({"/tokenize", "/detokenize"})
"""Cold routes that count against a client's rate, because they cost about as much here as a hot one."""
STREAMED_PATHS = frozenset({"/v1/files"})
"""Cold routes that read their bodies themselves, part by part."""
ENDLESS_PATHS = frozenset({"/cluster/events"})
"""Paths whose answers never end, so that HEAD is not served."""
KEPT_FOLDER = "/v1/requests/"
"""Path prefix of the answers of requests that outlived their router, by id."""
_SAFE_ID = re.compile(rb"[!-~]{1,128}\Z")


def cors_headers(scope: Scope, origins: Collection[str], exposed: bytes) -> Headers:
    """Return the headers that tell whether a script of the requesting page may see an answer, and which of its headers.
    Scripts never see the answers to operators' calls."""
    vary: Headers = [(b"vary", b"origin")]
    origin = header(scope, b"origin")
    if origin is None or scope["path"].startswith("/admin/"):
        return vary
    if "*" in origins:
        origin = b"*"
    elif origin.decode("latin-1") not in origins:
        return vary
    return [*vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", exposed)]


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
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted if _NAMES.match(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", PREFLIGHT_S),
    ]


ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class MethodNotAllowed(ChituError):
    code = "method_not_allowed"
    http_status = 405

    def __init__(self, path: str, method: str, allowed: str) -> None:
        super().__init__(f"{path} accepts {allowed}, not {method}")
        self.allowed = allowed.encode()


class RouterApp:
    def __init__(
        self,
        hot: Mapping[str, HotRoute],
        cold: ASGIApp,
        access: Access,
        max_body_bytes: int,
        cors_origins: Collection[str] = (),
        kept: Callable[[Exchange, Scope, str], Awaitable[None]] | None = None,
        exposed: Iterable[bytes] = (),
    ) -> None:
        """`hot`: POST routes by path, each counted by `access`. `kept` answers GETs below `KEPT_FOLDER`, called with
        the id in the path. `cold` answers everything else, and gets its bodies whole: `max_body_bytes` at most.
        `cors_origins`: see `app.py`. `exposed`: headers of answers that scripts may read, too."""
        self._cors_origins = cors_origins
        ids = dict.fromkeys([b"x-request-id", *[each.errors.id_header for each in hot.values()]])
        self._exposed = b", ".join([*filter(None, ids), *EXPOSED, *exposed])
        self._hot = hot
        self._kept = kept
        self._cold = cold
        self._access = access
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"x-request-id")
        request_id = given.decode("ascii") if given is not None and _SAFE_ID.match(given) else os.urandom(16).hex()
        exchange: Exchange = scope[EXCHANGE]
        exchange.headers = [(b"x-request-id", request_id.encode("ascii"))]
        try:
            path = scope["path"]
            route = self._hot.get(path)
            if route is not None:
                exchange.errors = route.errors
                if route.errors.id_header:
                    exchange.headers.append((route.errors.id_header, exchange.headers[0][1]))
            if self._cors_origins:
                exchange.headers += cors_headers(scope, self._cors_origins, self._exposed)
                if is_preflight(scope):  # a browser's own request, which has no key
                    exchange.answer(200, b"", preflight_headers(scope))
                    return
            self._access.require(scope)
            if self._kept is not None and path.startswith(KEPT_FOLDER):
                _require_method(scope, "GET")  # not HEAD: an answer may take as long as its request
                await self._kept(exchange, scope, path.removeprefix(KEPT_FOLDER))
            elif route is None:
                if scope["method"] == "HEAD" and path not in ENDLESS_PATHS:
                    scope = {**scope, "method": "GET"}  # the exchange knows it and omits the body
                if path in COUNTED_PATHS:
                    self._access.count(scope)
                if path not in STREAMED_PATHS:
                    await exchange.whole(self._max_body_bytes)
                await self._cold(scope, receive, send)
            else:
                _require_method(scope, "POST")
                self._access.count(scope)
                await route.answer(exchange, scope, request_id)
        except ClientGone:
            pass
        except MethodNotAllowed as error:
            exchange.fail(error, [(b"allow", error.allowed)])
        except ChituError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("request %s: a handler failed", request_id, extra=about(request_id))
            if not exchange.is_started:
                exchange.fail(Internal("the server failed to handle this request"))
            elif not exchange.is_complete:
                raise


def _require_method(scope: Scope, allowed: str) -> None:
    """Raise MethodNotAllowed unless the request has that method."""
    if scope["method"] != allowed:
        raise MethodNotAllowed(scope["path"], scope["method"], allowed)
