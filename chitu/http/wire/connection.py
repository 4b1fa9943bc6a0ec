"""HTTP/1 on one connection: its requests, parsed by httptools, the order of their answers, and bounds on what a client
may use (`HTTPLimits`): connections, size and time of a head, time of a body, time without reading an answer. Loop
thread.

One request is answered at a time. Pipelined requests wait, and nothing more is read meanwhile. A connection holds at
most its head (bounded), `FREE_BODY_BYTES` of a body plus what the server's `BodyBudget` grants, and of an answer what
the transport buffers (the sender waits there) plus what the request itself has ready.

A connection ends with its last answer. If the client may still be sending then, only our side is closed, and what
arrives is discarded for a while: a kernel that closes a socket with unread bytes resets the connection, and the client
loses the answer.

`RequestParser` is pure: bytes in, calls out. httptools stops at a request that asks for an upgrade to another protocol,
which is ignored (RFC 9110, 7.8): the head is parsed again without it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.server import ServerState

from chitu.errors import Capacity, ChituError, HeadersTooLarge, Internal, InvalidRequest, NoInstance, SlowRequest
from chitu.http.wire.exchange import CONTINUE, EXCHANGE, Exchange
from chitu.http.wire.limits import (
    LINGER_BYTES,
    PROBE_CONNECTIONS,
    PROBE_HEAD_S,
    PROBE_PATHS,
    PROGRESS_BYTES,
    BodyBudget,
    HTTPLimits,
)
from chitu.net.http import Headers, Receive, Scope, Send, error_body, error_headers, header

logger = logging.getLogger(__name__)

TCP_CLOSE = 7
"""State of a socket in TCP_INFO once the peer has reset the connection."""
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 5.0
"""First and longest delay between checks whether a client that has closed its side is still there; it doubles."""


class RequestParser:
    """Parser of one connection. `feed` raises the ChituError that `on_head` raises. `on_end` follows every `on_head`
    once. `on_head` gets the ASGI scope without the addresses, whether more requests may follow, and whether the client
    expects `100 Continue`."""

    def __init__(
        self,
        limits: HTTPLimits,
        on_head: Callable[[Scope, bool, bool], None],
        on_body: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._on_head = on_head
        self._on_body = on_body
        self._on_end = on_end
        self._parser: Any = httptools.HttpRequestParser(self)
        self.is_over = False
        """Whether no request follows: set by the owner, and once `feed` has raised."""
        self.num_begun = 0
        """Requests whose first byte has arrived."""
        self.is_in_head = self._is_in_body = False
        self._has_news = False
        self._held_bytes = 0
        """Bytes since the parser last reported a head or a part of a body. It keeps a header, or a trailer after the
        chunks of a body, until it is complete."""
        self._url = b""
        self._headers: Headers = []
        self._refusal: ChituError | None = None

    def feed(self, data: bytes) -> None:
        """Parse `data`. HeadersTooLarge or InvalidRequest if it is no valid request; then nothing more is taken."""
        self._has_news = False
        self._parse(data)
        if self._has_news or not (self.is_in_head or self._is_in_body):
            self._held_bytes = 0
            return
        self._held_bytes += len(data)
        if self._held_bytes > self._limits.max_head_bytes:
            self.close()
            raise self._too_large()

    def close(self) -> None:
        """Take nothing more."""
        self.is_over, self.is_in_head = True, False

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._parse(self._head_without_upgrade() + data[stop.args[0] :])
        except httptools.HttpParserError:
            if not self.is_over:  # else it is after a request that declared itself the last
                self.close()
                raise self._refusal or InvalidRequest("this is no HTTP request that the server understands") from None

    def _head_without_upgrade(self) -> bytes:
        parser = self._parser
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self._url, parser.get_http_version().encode())
        kept = [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] != b"upgrade"]
        return b"".join((line, *kept, b"\r\n"))

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(f"at most {limits.max_headers} headers and {limits.max_head_bytes} bytes are accepted")

    # ------------------------------------------------------------------------------------ calls of the parser; what is
    # raised in these leaves `feed_data` as another exception

    def _refuse(self, error: ChituError) -> ChituError:
        self._refusal = error
        return error

    def on_message_begin(self) -> None:
        if self.is_over:
            raise InvalidRequest("behind the last request")
        self.num_begun += 1
        self.is_in_head, self._held_bytes = True, 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_in_head:
            return  # a trailer
        headers = self._headers
        if len(headers) >= self._limits.max_headers:
            raise self._refuse(self._too_large())
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        method = parser.get_method()
        if method == b"CONNECT":
            raise InvalidRequest("no tunnels")
        if parser.should_upgrade():
            return
        if sum(map(len, chain.from_iterable(headers))) > self._limits.max_head_bytes:
            raise self._refuse(self._too_large())
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        version = parser.get_http_version()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "state": {},
        }
        is_new = version == "1.1"
        expects = is_new and (header(scope, b"expect") or b"").lower() == b"100-continue"
        self.is_in_head, self._is_in_body, self._has_news = False, True, True
        try:
            self._on_head(scope, is_new and parser.should_keep_alive(), expects)
        except ChituError as error:
            raise self._refuse(error) from None

    def on_body(self, data: bytes) -> None:
        self._has_news = True
        self._on_body(data)

    def on_message_complete(self) -> None:
        if self._is_in_body:  # else: an upgrade
            self._is_in_body = False
            self._on_end()


App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Serving:
    """State that the connections of one server share."""

    def __init__(self, app: App, limits: HTTPLimits, state: ServerState) -> None:
        """`state`: uvicorn's connections and tasks, and the headers of every answer, which it renews each second."""
        self.app = app
        self.limits = limits
        self.state = state
        self.connections = cast("set[Connection]", state.connections)
        self.bodies = BodyBudget(limits.max_total_body_bytes)
        self.late: dict[Connection, None] = {}
        """Connections beyond `max_connections`, oldest first."""
        self.is_ending = False
        """Whether the server is ending: each connection gets one more answer."""

    def default_headers(self) -> Headers:
        """Return the headers of every answer."""
        return self.state.default_headers


class _Phase(enum.Enum):
    """Event that the connection waits for; each but the last has a deadline."""

    NEW = enum.auto()
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    LINGER = enum.auto()
    ANSWER = enum.auto()


class Connection(asyncio.Protocol):
    """One client's connection. A request that arrives whole, as nearly all do, starts no timer."""

    transport: asyncio.Transport

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._requests = RequestParser(server.limits, self._on_head, self._on_body, self._on_end)
        self.default_headers = server.default_headers
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        """Callback of the running request for a client that leaves before its answer is complete."""
        self._reading: Exchange | None = None
        """Request whose body is not complete."""
        self._running: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        """Pipelined requests; the last of them may be the one that is being read."""
        self._dropped_bytes = self._progress_bytes = 0
        self._has_ended = False
        """The client has closed its side, and waits for answers."""
        self._is_lingering = False
        self._refusal: ChituError | None = None
        """Error to send after all answers."""
        self._timed: tuple[_Phase, int] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_paused = False
        self.is_write_paused = False
        self._can_write = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        names = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        self._addresses = tuple((str(name[0]), int(name[1])) if name else None for name in names)
        server = self._server
        if len(server.connections) - len(server.late) >= self._limits.max_connections:
            server.late[self] = None
            if len(server.late) > PROBE_CONNECTIONS:
                next(iter(server.late))._give_way()
        server.connections.add(self)
        self._rearm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        for timer in (self._deadline, self._write_deadline, self._look):
            if timer is not None:
                timer.cancel()
        self._server.connections.discard(self)
        self._server.late.pop(self, None)
        self._can_write.set()
        if self._running is not None:
            self._running.on_gone()
            self._running = None
        for exchange in self._waiting:
            exchange.release_body()
        self._waiting.clear()
        del self._requests  # it refers to this connection
        if self.on_gone is not None:
            self.on_gone()

    def shutdown(self) -> None:
        """Close after the running answer."""
        self._requests.close()
        if self._running is None:
            self.transport.close()
        else:
            self._running.keep_alive = False

    def eof_received(self) -> bool:
        """Handle the end of the client's data. If the client has left altogether, its kernel resets the connection when
        anything is sent to it. So if it waits for a first byte, send a `100 Continue`, which every client of HTTP/1.1
        discards (RFC 9110, 15.2.1)."""
        if self._running is None:
            return False  # closes
        if not self._has_ended:
            self._has_ended = True
            self._requests.close()
            (self._waiting[-1] if self._waiting else self._running).keep_alive = False
            if self._reading is not None:
                self._reading.break_off(InvalidRequest("the connection ended before the body did"))
            elif not self._running.is_started and self._running.scope["http_version"] == "1.1":
                self.transport.write(CONTINUE)
            self._look_later(FIRST_LOOK_S)
        return True

    def _look_later(self, seconds: float) -> None:
        self._look = self._loop.call_later(seconds, self._look_for_client, seconds)

    def _look_for_client(self, waited_s: float) -> None:
        """Check for a reset, which no read reports any more."""
        sock: socket.socket = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
        else:
            self._look_later(min(2 * waited_s, LAST_LOOK_S))

    # --------------------------------------------------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        if self._requests.is_over:
            self._drop(len(data))
            return
        try:
            self._requests.feed(data)
        except ChituError as error:
            self._refuse(error)
        self.update_reading()
        self._rearm()

    def _on_head(self, scope: Scope, may_follow: bool, expects_continue: bool) -> None:
        server = self._server
        is_late = self in server.late
        if is_late and scope["path"] not in PROBE_PATHS:
            raise self._no_room()
        scope["client"], scope["server"] = self._addresses
        keeps_alive = may_follow and not is_late and not server.is_ending
        exchange = scope[EXCHANGE] = Exchange(self, scope, server.bodies, keeps_alive, expects_continue)
        self._reading, self._dropped_bytes = exchange, 0
        if self._running is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)

    def _on_body(self, data: bytes) -> None:
        if self._reading is not None and not self._reading.on_body(data):
            self._drop(len(data))

    def _on_end(self) -> None:
        exchange, self._reading = self._reading, None
        if exchange is not None:
            exchange.on_body_end()
            if not exchange.keep_alive:
                self._requests.close()

    def update_reading(self) -> None:
        """Resume or pause reading, as the consumers of requests and bodies keep up."""
        reading, is_over = self._reading, self._requests.is_over
        should_pause = not is_over and (bool(self._waiting) or (reading is not None and reading.is_unread))
        if should_pause is not self._is_paused and not self.transport.is_closing():
            self._is_paused = should_pause
            if should_pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def note_progress(self, num_bytes: int) -> None:
        """Note that a reader took a part of a body that it reads in parts. Each `PROGRESS_BYTES` have the time of a
        body."""
        self._progress_bytes += num_bytes
        if self._progress_bytes >= PROGRESS_BYTES:
            self._progress_bytes, self._timed = 0, None
            self._rearm()
        self.update_reading()

    def _drop(self, num_bytes: int) -> None:
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.abort()

    def _no_room(self) -> Capacity:
        return Capacity(f"{self._limits.max_connections} connections are open already")

    # ------------------------------------------------------------------------------------------------------- deadlines

    def _rearm(self) -> None:
        """Set the one timer for the event that the connection waits for now."""
        if self._is_lingering:
            phase = _Phase.LINGER
        elif self._reading is not None:
            phase = _Phase.BODY
        elif self._requests.is_in_head:
            phase = _Phase.HEAD
        elif self._running is not None:
            phase = _Phase.ANSWER
        else:
            phase = _Phase.IDLE if self._requests.num_begun else _Phase.NEW
        timed = (phase, self._requests.num_begun)
        if timed == self._timed:
            return
        self._timed = timed
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if phase is not _Phase.ANSWER:
            seconds = self._seconds(phase)
            self._deadline = self._loop.call_later(seconds, self._too_slow, phase, seconds)

    def _seconds(self, phase: _Phase) -> float:
        limits = self._limits
        if phase is _Phase.IDLE:
            return limits.keep_alive_s
        if phase is _Phase.BODY:
            return limits.body_s
        if phase is _Phase.LINGER:
            return limits.linger_s
        return min(PROBE_HEAD_S, limits.head_s) if self in self._server.late else limits.head_s

    def _too_slow(self, phase: _Phase, seconds: float) -> None:
        self._timed = self._deadline = None
        if self._is_paused:  # the delay is not the client's
            self._rearm()
        elif phase is _Phase.LINGER and self.transport.get_write_buffer_size():
            self._rearm()  # it reads, if slowly; `write_s` bounds that
        elif phase is _Phase.LINGER:
            self.transport.abort()
        elif phase is _Phase.BODY and self._reading is not None:
            self._refuse(SlowRequest(f"the body was not complete after {seconds:g} s"))
        elif phase is _Phase.HEAD:
            self._refuse(SlowRequest(f"the head was not complete after {seconds:g} s"))
        elif self in self._server.late:
            self._refuse(self._no_room())
        else:
            self.transport.close()

    # ------------------------------------------------------------------------------------------------------- answering

    def _start(self, exchange: Exchange) -> None:
        self._running = exchange
        tasks = self._server.state.tasks
        task = self._loop.create_task(self._serve(exchange))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _serve(self, exchange: Exchange) -> None:
        is_cut_off = False
        try:
            await self._server.app(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # by `HTTPServer.stop`, after its timeout
            is_cut_off = True
            raise
        except Exception:
            logger.exception("a request failed")
        finally:
            exchange.release_body()
            if not self.is_gone:
                self.update_reading()
            del exchange.scope[EXCHANGE]  # so that reference counting frees both
            if not exchange.is_complete and not self.is_gone:
                if exchange.is_started:
                    self.transport.close()
                elif is_cut_off:
                    exchange.fail(exchange.refusal or NoInstance("the server is shutting down"))
                else:
                    exchange.fail(exchange.refusal or Internal("the server failed to handle this request"))

    def on_answered(self, exchange: Exchange) -> None:
        """Go on after the answer of the running request was written."""
        self._running = self.on_gone = None
        if not exchange.keep_alive:
            self._end()
        elif self._waiting:
            self._start(self._waiting.popleft())
        elif self._refusal is not None:
            self._say_refusal(self._refusal)
        self.update_reading()
        self._rearm()

    def _refuse(self, error: ChituError) -> None:
        """Take nothing more and report `error`: to the request whose body is being read or, if there is none, after the
        answers to earlier requests."""
        self._requests.close()
        if self._reading is None:
            self._refusal = error
            if self._running is None:
                self._say_refusal(error)
        else:
            self._reading.break_off(error)
            if self._running is None:
                self._end()  # its answer was given before

    def _say_refusal(self, error: ChituError) -> None:
        body = error_body(error)
        lines = [b"HTTP/1.1 %d Refused" % error.http_status, b"content-type: application/json"]
        lines += [name + b": " + value for name, value in error_headers(error)]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self._end()

    def _end(self) -> None:
        """Close the connection after its last answer was written."""
        self._requests.close()
        for exchange in self._waiting:
            exchange.release_body()
        self._waiting.clear()
        is_unread = self._refusal is not None or self._reading is not None or self._is_paused
        if is_unread and not self._has_ended and not self.transport.is_closing():
            self._is_lingering = True
            self.update_reading()
            self.transport.write_eof()
            self._rearm()
        else:
            self.transport.close()

    def _give_way(self) -> None:
        """Make room for a newer connection, beyond the bound on connections."""
        del self._server.late[self]
        self._server.connections.discard(self)
        if self._running is None and self._refusal is None:
            self._say_refusal(self._no_room())
            self.transport.close()
        else:
            self.transport.abort()

    # --------------------------------------------------------------------------------------------------------- writing

    async def drained(self) -> None:
        """Return when more can be written, or the client is gone."""
        if self.is_write_paused and not self.is_gone:
            await self._can_write.wait()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._can_write.clear()
        if self._write_deadline is None:
            self._write_deadline = self._loop.call_later(self._limits.write_s, self._not_read)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._can_write.set()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _not_read(self) -> None:
        logger.warning(
            "closed the connection of %s: the client read nothing of its answer for %g s",
            self._addresses[0],
            self._limits.write_s,
        )
        self.transport.abort()
