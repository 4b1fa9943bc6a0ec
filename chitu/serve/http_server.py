"""uvicorn on a socket of ours, on a loop of ours, without its signal handlers. Loop thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chitu.errors import ConfigError

CONNECTION = "chitu.connection"
"""Key of the `Connection` in an HTTP scope."""


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening TCP socket; port 0 lets the OS pick. ConfigError, naming the `key`, where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: a token must never wait for the client's delayed ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock


class Connection(HttpToolsProtocol):
    """uvicorn's protocol that also says when the client is gone. ASGI tells a task that waits in `receive`; this saves
    every request that task. Requests find it in their scope as `CONNECTION`."""

    is_gone = False
    on_gone: Callable[[], None] | None = None
    """Of the request that runs; one runs at a time."""
    on_closed: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()
        if self.on_closed is not None:
            self.on_closed()


class _Server(uvicorn.Server):
    """The process has two servers and drains on its own terms, so neither may take the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HTTPServer:
    """Serves `app` on `sock` from `start` until `stop`. Without `sock`: only connections that it adopts."""

    def __init__(self, app: Any, sock: socket.socket | None, headers: Sequence[tuple[str, str]] = ()) -> None:
        """`headers` are put into every response."""
        self._sockets = [sock] if sock is not None else []
        self.port: int = sock.getsockname()[1] if sock is not None else 0
        self._server = _Server(
            uvicorn.Config(
                app,
                interface="asgi3",  # a bound method would be taken for ASGI 2
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                headers=list(headers),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once connections are taken."""
        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def adopt(self, connection: socket.socket, on_closed: Callable[[], None]) -> None:
        """Serve a connection (non-blocking) that another process accepted. OSError where it is gone already."""
        config, server = self._server.config, self._server

        def protocol() -> Connection:
            made = Connection(config, server.server_state, server.lifespan.state)
            made.on_closed = on_closed
            return made

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    def stop_accepting(self) -> None:
        """No new connections; those that are open are served on."""
        for server in self._server.servers:
            server.close()

    async def stop(self, timeout_s: float) -> None:
        """Close: idle connections at once, busy ones after their response, all of them after `timeout_s`."""
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_s))
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._task, timeout_s + 0.5)
