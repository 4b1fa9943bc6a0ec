"""The bootstrap directory: its rules as values, its ASGI face, and the client against a real socket."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest

from chitu.errors import BootstrapTimeout, IncompatibleLayout
from chitu.kv_transfer.bootstrap import MAX_BODY_BYTES, BootstrapClient, BootstrapServer, RouteError
from chitu.protocol import KVLayout, RouteEntry
from chitu.testing.clock import FakeClock
from chitu.types import Role

LAYOUT = KVLayout("hash", 2, 2, 16, 16, "float32", 100)


def entry(rank: int = 0, incarnation: int = 1, layout: KVLayout = LAYOUT, port: int = 5000) -> RouteEntry:
    return RouteEntry(Role.PREFILL, rank, "127.0.0.1", port, 1, incarnation, layout)


def call(server: BootstrapServer, method: str, target: str, body: bytes = b"") -> tuple[int, Any]:
    """One request through the ASGI application."""
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []
    parts = [body[:10], body[10:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}
    asyncio.run(server.app(scope, receive, send))
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])


def test_an_entry_that_was_put_is_found_by_rank_and_in_the_list() -> None:
    server = BootstrapServer(FakeClock())
    assert call(server, "PUT", "/route", msgspec.json.encode(entry(1, port=5001)))[0] == 200
    assert call(server, "PUT", "/route", msgspec.json.encode(entry(0, incarnation=(1 << 63) - 1)))[0] == 200
    status, found = call(server, "GET", "/route?engine_rank=1")
    assert status == 200 and msgspec.convert(found, RouteEntry) == entry(1, port=5001)
    status, listed = call(server, "GET", "/route")
    assert [item["engine_rank"] for item in listed] == [0, 1]
    assert call(server, "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("PUT", "/route", b"not json", 400),
        ("PUT", "/route", b"\xff\xfe{}", 400),
        ("PUT", "/route", b"{}", 400),
        ("PUT", "/route", msgspec.json.encode(entry(port=0)), 400),
        ("PUT", "/route", msgspec.json.encode(entry(rank=-1)), 400),
        ("PUT", "/route", msgspec.json.encode(entry(incarnation=0)), 400),
        ("PUT", "/route", msgspec.json.encode(entry(incarnation=1 << 63)), 400),
        ("PUT", "/route", msgspec.json.encode(entry(incarnation=77)).replace(b":77,", b":%d," % (1 << 65)), 400),
        ("PUT", "/route", msgspec.json.encode(entry()).replace(b"prefill", b"decode"), 400),
        ("PUT", "/route", b'{"extra":1,' + msgspec.json.encode(entry())[1:], 400),
        ("PUT", "/route", b" " * (MAX_BODY_BYTES + 1), 413),
        ("GET", "/route?engine_rank=7", b"", 404),
        ("GET", "/route?engine_rank=x", b"", 400),
        ("GET", "/elsewhere", b"", 404),
        ("DELETE", "/route", b"", 405),
    ],
)
def test_wrong_requests_get_their_status_and_a_message(method: str, target: str, body: bytes, status: int) -> None:
    found, answer = call(BootstrapServer(FakeClock()), method, target, body)
    assert found == status and answer["error"]["message"]


@pytest.mark.parametrize(("first", "second"), [(5, 6), (6, 5)])
def test_another_incarnation_replaces_one_which_is_refused_from_then_on(first: int, second: int) -> None:
    server = BootstrapServer(FakeClock())
    server.register(entry(incarnation=first))
    server.register(entry(incarnation=second, port=5002))
    assert server.lookup(0).rank_port == 5002
    with pytest.raises(RouteError, match=f"{second} has taken the place of {first}") as error:
        server.register(entry(incarnation=first))
    assert error.value.status == 410
    server.register(entry(incarnation=second, port=5002))
    assert server.lookup(0).incarnation == second


def test_another_layout_is_refused_with_both_printed_but_a_lone_instance_may_change_its_own() -> None:
    server = BootstrapServer(FakeClock())
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    server.register(entry(0))
    status, answer = call(server, "PUT", "/route", msgspec.json.encode(entry(1, layout=other)))
    assert status == 409
    assert "page_size=16" in answer["error"]["message"] and "page_size=32" in answer["error"]["message"]
    server.register(entry(0, incarnation=2, layout=other))
    assert server.lookup(0).layout == other


def test_an_entry_lives_as_long_as_it_is_renewed_by_its_own_incarnation() -> None:
    clock = FakeClock()
    server = BootstrapServer(clock, lease_s=3.0)
    server.register(entry(0, incarnation=4))
    clock.advance(2.0)
    server.renew(0, incarnation=4)
    clock.advance(2.0)
    assert server.lookup(0).incarnation == 4
    server.renew(0, incarnation=3)
    clock.advance(1.5)
    with pytest.raises(RouteError) as error:
        server.lookup(0)
    assert error.value.status == 404 and server.entries() == []


def test_an_instance_that_leaves_is_forgotten_but_not_its_successor() -> None:
    server = BootstrapServer(FakeClock())
    server.register(entry(0, incarnation=4))
    for other in (3, 5):
        server.forget(0, incarnation=other)
    assert server.entries()
    server.forget(0, incarnation=4)
    assert not server.entries()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, _, query = self.path.partition("?")
        status, answer = self.server.bootstrap.handle(self.command, path, query, body)
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(HTTPServer):
    bootstrap: BootstrapServer


def test_the_client_registers_finds_lists_and_reports_refusals_over_a_real_socket() -> None:
    with _Server(("127.0.0.1", 0), _Handler) as http_server:
        http_server.bootstrap = BootstrapServer(FakeClock())
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            client = BootstrapClient("127.0.0.1", http_server.server_port)
            assert client.get(0) is None and client.get_all() == []
            client.put(entry(0, incarnation=2))
            client.put(entry(0, incarnation=3))
            assert client.get(0) == entry(0, incarnation=3)
            assert client.get_all() == [entry(0, incarnation=3)]
            with pytest.raises(RouteError, match="410"):
                client.put(entry(0, incarnation=2))
            with pytest.raises(IncompatibleLayout, match="page_size=8"):
                client.put(entry(1, layout=msgspec.structs.replace(LAYOUT, page_size=8)))
        finally:
            http_server.shutdown()
            thread.join()


def test_a_server_that_is_not_there_is_a_bootstrap_timeout() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    with pytest.raises(BootstrapTimeout, match=str(port)):
        BootstrapClient("127.0.0.1", port, timeout_s=1.0).get_all()
