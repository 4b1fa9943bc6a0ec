"""uvicorn with our own socket, loop and protocol class (`connection.py`, docs/adr/0008), and without its signal
handlers. uvicorn keeps connections, tasks and the headers of every answer, and ends them. We accept connections
ourselves, because uvloop accepts one a turn. Loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from chitu.config.topology import family_of
from chitu.errors import ConfigError
from chitu.http.wire.connection import App, Connection, Serving
from chitu.http.wire.limits import HTTPLimits, within_descriptors

logger = logging.getLogger(__name__)

CONNECTIONS_PER_TURN = 16
"""Connections accepted in one turn of the loop, which has other work too: a millisecond or two."""
ACCEPT_PAUSE_S = 0.05


def listen(host: str, port: int, key: str, *, is_shared: bool = False) -> socket.socket:
    """Return a listening TCP socket; port 0 lets the OS pick. ConfigError, naming the `key`, if it cannot listen.
    `is_shared`: other sockets of this user may listen on the same port."""
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: a token must never wait for the client's delayed ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock


class Listener:
    """Accepts the connections of a listening socket in bursts: with one connection a turn of the loop, a hundred new
    clients would wait for a hundred turns. Active between `resume` and `pause`; on its loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, take: Callable[[socket.socket], None]
    ) -> None:
        """`sock`: non-blocking, listening. `take` gets non-blocking connections, and may call `pause`."""
        self._loop = loop
        self._socket = sock
        self._take = take
        self.port: int = sock.getsockname()[1]
        self._is_wanted = self._is_reading = self._is_closed = False

    def resume(self) -> None:
        self._is_wanted = True
        if not self._is_reading and not self._is_closed:
            self._is_reading = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def pause(self) -> None:
        """Stop accepting; new connections wait in the kernel's queue."""
        self._is_wanted = False
        self._stop_reading()

    def close(self) -> None:
        """Take the connections that wait, which would be reset with the socket, and accept no more."""
        if not self._is_closed:
            if self._is_reading:
                self._accept()
            self._is_closed = True
            self._stop_reading()
            self._socket.close()

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(CONNECTIONS_PER_TURN):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # This connection is gone already, or the process is out of descriptors, which become free again.
                logger.warning("cannot accept a connection: %s", error)
                self._stop_reading()
                self._loop.call_later(ACCEPT_PAUSE_S, self._try_again)
                return
            connection.setblocking(False)
            self._take(connection)
            if not self._is_reading:
                return

    def _try_again(self) -> None:
        if self._is_wanted:
            self.resume()


class _Server(uvicorn.Server):
    """A server that takes no signals: the process has two servers and drains on its own terms."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HTTPServer:
    """Serves `app` on `sock` and on adopted connections, from `start` until `stop`."""

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        headers: Sequence[tuple[str, str]] = (),
        limits: HTTPLimits | None = None,
    ) -> None:
        """`headers`: added to every response."""
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(self._loop, sock, self.adopt)
        self.port = self._listener.port
        config = uvicorn.Config(
            app,
            interface="asgi3",  # a bound method would be taken for ASGI 2
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=list(headers),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._serving = Serving(app, within_descriptors(limits or HTTPLimits()), self._server.server_state)
        self._adoptions: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Return once connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[]))
        while not (self._server.started and self._serving.state.default_headers):
            if self._task.done():
                self._task.result()
                raise ConfigError("the HTTP server ended while it started")
            await asyncio.sleep(0)
        self._listener.resume()

    def adopt(self, connection: socket.socket) -> None:
        """Serve a non-blocking connection that was accepted elsewhere."""
        task = self._loop.create_task(self._adopt(connection))
        self._adoptions.add(task)
        task.add_done_callback(self._adoptions.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self._serving), connection)
        except OSError as error:
            logger.info("a connection was closed before it was served: %s", error)
            connection.close()

    def stop_accepting(self) -> None:
        """Accept no new connections; open ones get one more answer."""
        self._listener.close()
        self._serving.is_ending = True

    async def stop(self, timeout_s: float) -> None:
        """Close: idle connections at once, busy ones after their response, all of them after `timeout_s`."""
        self.stop_accepting()
        if self._adoptions:
            await asyncio.wait(self._adoptions, timeout=timeout_s)
        self._server.config.timeout_graceful_shutdown = max(1, round(timeout_s))
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, timeout_s + 0.5)
        for connection in list(self._serving.connections):
            connection.transport.abort()
