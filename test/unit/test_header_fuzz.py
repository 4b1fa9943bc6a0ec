"""Odd headers, paths and queries on every route that reads them by a library: whatever a codec raises, it is no 500."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_world import World

from chitu.assets import TINY_MODEL_DIR
from chitu.cluster.cluster import RouterRecord
from chitu.config.schema import BatchesConfig, ModelConfig, RouterConfig
from chitu.errors import ChituError
from chitu.http.answer.generate import GenerationRoutes
from chitu.http.answer.kept_folder import KeptFolder
from chitu.http.answer.kept_requests import KeptRequests, KeptRoute
from chitu.http.api_document import control_app
from chitu.http.ask.reader import BodyReader
from chitu.http.ask.served_model import ServedModel
from chitu.http.batch.batches import Batches
from chitu.http.batch.routes import batch_routes, file_routes
from chitu.http.batch.store import FileStore
from chitu.http.dialects.openai.cold import client_routes
from chitu.http.fleet.page import page_routes
from chitu.http.fleet.trace_routes import trace_routes
from chitu.http.table import BODIES, ENDPOINTS, READERS
from chitu.http.wire.access import Access
from chitu.http.wire.app import RouterApp
from chitu.http.wire.connection import RequestParser
from chitu.http.wire.exchange import EXCHANGE, Exchange
from chitu.http.wire.inner import InnerPeer
from chitu.http.wire.limits import BodyBudget, HTTPLimits
from chitu.net.http import Scope

MODEL = ServedModel.load(ModelConfig(path=str(TINY_MODEL_DIR), served_name="m"), 0)
PATHS = (
    *("/v1/completions", "/v1/messages", "/v1/files", "/v1/batches", "/v1/models/m", "/tokenize", "/nothing"),
    *("/web/chat.js", "/web/", "/trace/r", "/v1/requests/r", "/v1/files/file-1", "/v1/batches/batch_1"),
    *("/v1/files/file-1/content", "/v1/batches/batch_1/cancel", "/"),
)
CHARSETS = (
    *("utf-8", "latin-1", "idna", "punycode", "undefined", "unicode_escape", "utf-7", "utf-16", "hex", "zip", "rot13"),
    *("none", "a\0", "", "x" * 300, "raw_unicode_escape", "aliases", "utf-8_sig", "\xff"),
)
BIG = "9" * 5000
"""More digits than Python reads as a number."""
ODD = (
    *("", "\xff", "%", "%00", "%ff", "%ed%a0%80", "%zz", "[", "[::1", "]", "a b", "é", '"', "\\", ";", "=", "*", "\t"),
    *(BIG, "-1", "nan", "1e400", "..", "%2e%2e%2f", "//", "@", ":x", ":99999", "xn--a", "=?utf-8?b?/w==?=", "a" * 300),
)
NAMES = (
    *("content-type", "content-disposition", "content-encoding", "authorization", "x-api-key", "cookie", "expect"),
    *("last-event-id", "x-request-timeout", "x-request-id", "x-chitu-trace", "accept", "origin", "x-forwarded-for"),
    *("host", "range", "if-range", "if-modified-since", "if-none-match"),
    *("access-control-request-method", "access-control-request-headers"),
)

odd_texts = st.sampled_from(ODD) | st.text(st.characters(min_codepoint=0x20, codec="latin-1"), max_size=12)
encoded = st.builds("{}'{}'{}".format, st.sampled_from(CHARSETS), st.sampled_from(("", "en")), odd_texts)
parameters = st.builds("; {}*={}".format, st.sampled_from(("name", "filename", "boundary")), encoded) | st.builds(
    "; {}{}={}".format,
    st.sampled_from(("name", "filename", "boundary", "charset", "version", "q")),
    st.sampled_from(("", "*", "*0", "*0*", "*1*", f"*{BIG}", f"*{BIG}*", "**")),
    odd_texts | encoded | odd_texts.map('"{}"'.format),
)
more = st.lists(parameters | odd_texts, max_size=3).map("".join)
kinds = st.sampled_from(
    (
        *("multipart/form-data", "multipart/form-data; boundary=b", "application/json", "Bearer ", "Basic ", "bytes="),
        *("application/openmetrics-text", "W/"),
    )
)
values = st.builds("{}{}".format, kinds | odd_texts, more)
dispositions = st.builds("{}{}".format, st.sampled_from(("form-data; name=file", "form-data", "attachment")), more)
LINE_BREAKS = re.compile("[\r\n]")
FORM = '--b\r\n{}\r\n\r\nx\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'


class Server:
    """The router's HTTP side on a folder, without sockets and instances."""

    def __init__(self, folder: Path) -> None:
        world, config, none = World(), RouterConfig(api_keys=("k",)), Any
        access = Access(config, None, world.clock)
        bodies = BodyReader(MODEL, world.router, none, False, access.client, READERS)
        routes = GenerationRoutes(
            *(MODEL, world.router, bodies, config, world.clock, access.cache_salt, access.require_priority),
            endpoints=ENDPOINTS,
        )
        kept = KeptRequests(
            *(KeptFolder(config.kept_requests, folder / "kept"), MODEL, world.router, bodies, routes),
            *(access.require_kept_priority, world.clock),
        )
        batches = Batches(
            FileStore(BatchesConfig(), folder / "batches"), {}, access.credential_of, 1 << 20, lambda: False
        )
        cluster: Any = SimpleNamespace(record=lambda: RouterRecord(0, 0, (), ()))
        rows = [
            *client_routes(MODEL, world.router, bodies, access, routes.running, False),
            *file_routes(batches, access),
            *batch_routes(batches, access, False),
            *page_routes("m"),
            *trace_routes(cluster, folder / "traces", access, world.clock),
        ]
        kept_route = KeptRoute(kept, routes, access.cache_salt, world.clock).answer
        self.app = RouterApp(
            routes.hot_routes(), control_app("0", rows, BODIES), access, 1 << 20, ("http://a",), kept_route
        )

    async def status(self, raw: bytes) -> int:
        """Return the status of the answer to the bytes of a request."""
        scopes: list[Scope] = []
        peer = InnerPeer()

        def on_head(scope: Scope, may_follow: bool, expects_continue: bool) -> None:
            scope |= {"client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 1)}
            scope[EXCHANGE] = Exchange(peer, scope, BodyBudget(1 << 20), False, False)
            scopes.append(scope)

        def on_body(data: bytes) -> None:
            scopes[0][EXCHANGE].on_body(data)

        def on_end() -> None:
            scopes[0][EXCHANGE].on_body_end()
            parser.close()

        parser = RequestParser(HTTPLimits(), on_head, on_body, on_end)
        try:
            parser.feed(raw)
        except ChituError as error:
            return error.http_status
        if not scopes:
            return 400  # an incomplete head, for which a connection waits
        exchange: Exchange = scopes[0][EXCHANGE]
        exchange.on_body_end()
        await self.app(scopes[0], exchange.receive, exchange.send)
        head = b"".join(peer.transport.parts).partition(b"\r\n\r\n")[0]
        return int(head.split(b" ", 2)[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield Server(tmp_path_factory.mktemp("server"))


def head_of(method: str, target: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {LINE_BREAKS.sub('', value)}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def require_no_500(server: Server, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        status = asyncio.run(server.status(raw))
    assert status != 500 and not caplog.records, f"{raw!r}: {status} {caplog.text}"


FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it is cleared for each


@FIXTURES
@given(
    st.sampled_from(PATHS),
    st.sampled_from(("", "?", "/")),
    st.lists(odd_texts, max_size=2).map("".join),
    st.sampled_from(("GET", "POST", "DELETE", "HEAD", "OPTIONS")),
    st.lists(st.tuples(st.sampled_from(NAMES), values), max_size=4),
    st.booleans(),
)
def test_no_header_path_or_query_is_a_500(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    path: str,
    between: str,
    more: str,
    method: str,
    headers: list[tuple[str, str]],
    has_key: bool,
) -> None:
    keys = [("authorization", "Bearer k")] if has_key else []
    body = b'{"model": "m", "prompt": "a"}'
    lengths = [("content-length", str(len(body)))] if method == "POST" else []
    raw = head_of(method, path + between + more, [*keys, *headers, *lengths]) + body * bool(lengths)
    require_no_500(server, raw, caplog)


@FIXTURES
@given(dispositions, more, st.sampled_from(("Content-Disposition", "content-disposition ", "Content-Type", "")))
def test_no_head_of_a_part_is_a_500(
    server: Server, caplog: pytest.LogCaptureFixture, disposition: str, more: str, name: str
) -> None:
    form = FORM.format(f"{name}: {disposition}").encode("latin-1")
    for boundary in ("; boundary=b", ""):
        headers = [("authorization", "Bearer k"), ("content-type", f"multipart/form-data{boundary}{more}")]
        raw = head_of("POST", "/v1/files", [*headers, ("content-length", str(len(form)))]) + form
        require_no_500(server, raw, caplog)
