"""What a router makes of what answers at the port of the router that decides (`serve/other_routers.py`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from chitu.config.schema import RouterConfig
from chitu.errors import LastInstance, NoInstance
from chitu.http.fleet.replies import DrainReply
from chitu.net.http import error_body
from chitu.serve.other_routers import OtherRouters


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """Run a service that answers every POST like this. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask_first(port: int) -> DrainReply | None:
    """Return what the second router of one machine is told at the port of the first."""
    config = RouterConfig(hosts=("127.0.0.1", "127.0.0.1"), port=port - 1)  # the first has the next one alone
    return asyncio.run(OtherRouters(config, 1, None).ask([0, 1], "/admin/drain", {"instance": "D0"}, DrainReply))


@pytest.mark.parametrize("status", [200, 404, 502])
@pytest.mark.parametrize("body", [b"", b"<html>not here</html>", b"{}", b'{"error": {"message": "\xff"}}'])
def test_another_service_at_its_port_is_named(status: int, body: bytes) -> None:
    with (
        answering(status, body) as port,
        pytest.raises(NoInstance, match=rf"what answers at http://127\.0\.0\.1:{port} is not the router"),
    ):
        ask_first(port)


def test_its_refusal_is_the_answer() -> None:
    refusal = LastInstance("nothing could be served")
    with (
        answering(refusal.http_status, error_body(refusal)) as port,
        pytest.raises(LastInstance, match="could be served"),
    ):
        ask_first(port)
