"""One request and its answer on a connection, without ASGI's messages: what a hot route reads and writes.

Made by `Connection` for every request, found in its scope as `EXCHANGE`. ASGI passes a dict to a coroutine for each
part of an answer and looks at every header again; a generation writes its parts to the transport as they are. What
uvicorn keeps for the request (its `RequestResponseCycle`) is kept true, so that whatever follows on the connection
(pipelined requests, keep-alive, shutdown) is uvicorn's as ever. Loop thread.

Invariants: an answer starts once and is completed once; nothing is written for a client that is gone. Names and values
of headers are the server's own or were checked (`app.py`), so nothing of a client can end a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from chitu.errors import ChituError
from chitu.net.http import Headers, Receive, Scope, error_body, error_headers, read_body

if TYPE_CHECKING:
    from chitu.serve.http_server import Connection

EXCHANGE = "chitu.exchange"
"""Key of the `Exchange` in an HTTP scope."""


class Exchange:
    __slots__ = ("_cycle", "_scope", "connection", "headers")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self.connection = connection
        self._cycle = cycle
        self._scope = cast(Scope, cycle.scope)
        self.headers: Headers = []
        """Of every answer that is given here."""

    # --------------------------------------------------------------------------------------------------------- request

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. PayloadTooLarge, ClientGone."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.flow.read_paused or len(cycle.body) > max_bytes:
            return await read_body(self._scope, cast(Receive, cycle.receive), max_bytes)
        return bytes(cycle.body)

    @property
    def is_client_gone(self) -> bool:
        return self.connection.is_gone

    def call_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """What to do when the client leaves before its answer is complete; None: nothing any more."""
        self.connection.on_gone = on_gone

    # ---------------------------------------------------------------------------------------------------------- answer

    @property
    def is_started(self) -> bool:
        return self._cycle.response_started

    @property
    def is_complete(self) -> bool:
        return self._cycle.response_complete

    def answer(self, status: int, body: bytes, more: Headers | None = None) -> None:
        """A complete JSON answer."""
        if self._cycle.disconnected:
            return
        if self._cycle.response_started:
            raise RuntimeError("an answer was begun already")
        head = self._head(status, more or [])
        head.append(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        if self._scope["method"] != "HEAD":
            head.append(body)
        self._cycle.transport.write(b"".join(head))
        self._complete()

    def fail(self, error: ChituError) -> None:
        """The error as OpenAI's object."""
        self.answer(error.http_status, error_body(error), error_headers(error))

    @property
    def is_full(self) -> bool:
        """The client reads slower than it is written to: `await drained()` before more."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def drained(self) -> None:
        """Returns when more can be written, or the client is gone."""
        await self._cycle.flow.drain()

    def stream(self, data: bytes, is_last: bool) -> None:
        """A part of an event stream; its head leaves with the first one."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        if cycle.response_started:
            parts: list[bytes] = []
        else:
            parts = self._head(200, [])
            parts.append(
                b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
                b"x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        parts.append(b"%x\r\n%b\r\n" % (len(data), data))
        if is_last:
            parts.append(b"0\r\n\r\n")
        cycle.transport.write(b"".join(parts))
        if is_last:
            self._complete()

    def _head(self, status: int, more: Headers) -> list[bytes]:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *self.headers, *more):
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        return lines

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
