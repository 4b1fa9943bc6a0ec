"""uvicorn on a socket of ours, on a loop of ours, without its signal handlers, and with bounds on what a client may
take: connections, size and time of a request's head, time of its body, time without reading an answer. Loop thread.

Memory a connection can hold: its head and body (both bounded; bodies by whoever reads them), and of an answer what the
transport buffers (uvicorn stops the sender there) plus what the request itself has ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chitu.errors import Capacity, ChituError, ConfigError, HeadersTooLarge, InvalidRequest, SlowRequest
from chitu.net.http import error_body, error_headers
from chitu.serve.exchange import EXCHANGE, Exchange

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 256
"""For everything that is no client's connection."""


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


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """For one server. What they protect is this process; requests have bounds of their own."""

    max_connections: int = 8192
    """Open at once, in this process; fewer where it may not have so many descriptors."""
    max_headers: int = 100
    max_head_bytes: int = 64 << 10
    """Request line and headers."""
    head_s: float = 10.0
    """From a connection's start, or the first byte of a later request, to the end of the headers."""
    body_s: float = 60.0
    """From there to the end of the body."""
    write_s: float = 60.0
    """A client that does not take what is written to it for so long is cut off."""
    keep_alive_s: int = 75
    """Between two requests."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with `HTTPLimits`, that also says when the client is gone. ASGI tells a task that waits in
    `receive`; this saves every request that task. Each request has an `Exchange` in its scope.

    A request that comes whole, as nearly all do, starts no timer.
    """

    is_gone = False
    on_gone: Callable[[], None] | None = None
    """Of the request that runs; one runs at a time."""
    on_closed: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limits = cast(_Config, config).limits
        self._deadline: asyncio.TimerHandle | None = None
        """Of what is being read."""
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._is_in_body = False
        self._head_bytes = 0
        """Of an incomplete head, counted as it comes."""
        self._header_bytes = 0
        """Of its headers, counted as they are parsed."""
        self._refusal: ChituError | None = None

    # ------------------------------------------------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(Capacity(f"{self._limits.max_connections} connections are open already"))
        else:
            self._start_timer(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()
        if self.on_closed is not None:
            self.on_closed()

    # --------------------------------------------------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        was_in_body = self._is_in_body
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)  # the parser tells of a header only when it has all of it
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(self._too_large())
            elif self._deadline is None:
                self._start_timer(self._limits.head_s)
        elif self._is_in_body:
            if not was_in_body:
                self._stop_timer()
                self._start_timer(self._limits.body_s)
        else:
            self._stop_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_in_body, self._head_bytes, self._header_bytes = True, False, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= self._limits.max_headers or self._header_bytes > self._limits.max_head_bytes:
            self._refusal = self._too_large()
            raise self._refusal  # ends the parsing, and comes back as `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # raises where the request line is wrong: then it is still the head that is
        self._is_in_head, self._is_in_body = False, True
        cast(dict[str, Any], self.scope)[EXCHANGE] = Exchange(self, self.cycle)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest("this is no HTTP request that the server understands"))

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(f"at most {limits.max_headers} headers and {limits.max_head_bytes} bytes are taken")

    def _start_timer(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self._too_slow, seconds)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self, seconds: float) -> None:
        self._deadline = None
        if self.flow.read_paused:  # it is not the client who lets this wait
            self._start_timer(seconds)
        elif self._is_in_head and not self._head_bytes:
            self.transport.close()  # it never asked for anything
        else:
            self._refuse(SlowRequest(f"the request was not complete after {seconds:g} s"))

    def _refuse(self, error: ChituError) -> None:
        """Answer, unless an answer was given or is under way, and close."""
        self._refusal = error
        last = self.cycle
        if (last is None or last.response_complete) if self._is_in_head else not last.response_started:
            body = error_body(error)
            lines = [b"HTTP/1.1 %d Refused" % error.http_status, b"content-type: application/json"]
            lines += [name + b": " + value for name, value in error_headers(error)]
            lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    # --------------------------------------------------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self._limits.write_s, self._not_read)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _not_read(self) -> None:
        log.warning("%s does not read its answer: cut off after %g s", self.client, self._limits.write_s)
        self.transport.abort()


class _Config(uvicorn.Config):
    """Carries the limits to each `Connection`, which uvicorn makes."""

    limits = HTTPLimits()


def within_descriptors(limits: HTTPLimits) -> HTTPLimits:
    """So many connections that the process keeps descriptors for its own; it may take all that the system gives it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(limits, max_connections=max(1, min(limits.max_connections, soft - SPARE_DESCRIPTORS)))
    return limits


class _Server(uvicorn.Server):
    """The process has two servers and drains on its own terms, so neither may take the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HTTPServer:
    """Serves `app` on `sock` from `start` until `stop`. Without `sock`: only connections that it adopts."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket | None,
        headers: Sequence[tuple[str, str]] = (),
        limits: HTTPLimits | None = None,
    ) -> None:
        """`headers` are put into every response."""
        self._sockets = [sock] if sock is not None else []
        self.port: int = sock.getsockname()[1] if sock is not None else 0
        limits = limits or HTTPLimits()
        config = _Config(
            app,
            interface="asgi3",  # a bound method would be taken for ASGI 2
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_s,
            headers=list(headers),
        )
        config.limits = within_descriptors(limits)
        self._server = _Server(config)
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
