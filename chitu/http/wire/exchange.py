"""One request and its answer on a connection: what a hot route reads and writes, and ASGI's `receive` and `send` for
the routes of a framework. The only place that frames answers.

`Connection` makes one for every request and puts it into its scope as `EXCHANGE`. ASGI passes a dict to a coroutine for
each part of an answer and checks every header again; a generation writes its parts directly to the transport. Loop
thread.

Invariants: an answer starts once and is completed once; nothing is written for a client that is gone; a client of
HTTP/1.0 gets no chunks. A body counts against the server's `BodyBudget` from its arrival until `release_body`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import NamedTuple, Protocol

import msgspec

from chitu.errors import Capacity, ChituError, PayloadTooLarge, UnsupportedEncoding
from chitu.http.wire.limits import FREE_BODY_BYTES, BodyBudget
from chitu.net.http import (
    ClientGone,
    ErrorReply,
    Headers,
    Message,
    Scope,
    error_body,
    error_headers,
    header,
)

EXCHANGE = "chitu.exchange"
"""Key of the `Exchange` in an HTTP scope."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WITHOUT_BODY = (204, 304)
COPIED_BYTES = 1 << 20
"""A larger part of an answer is not copied to frame it."""
EVENT_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
JSON = b"content-type: application/json\r\n"
"""Headers of the two kinds of answers that are written in parts."""

STATUS_LINE = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
STATUS_LINE[499] = b"HTTP/1.1 499 Client Closed Request\r\n"  # nginx's, in no standard: `RequestCancelled`
STATUS_LINE[529] = b"HTTP/1.1 529 Overloaded\r\n"  # in no standard either


class ErrorForm(NamedTuple):
    """How an API shows errors."""

    reply: type[msgspec.Struct]
    status: Callable[[ChituError], int]
    body: Callable[[ChituError, str | None], bytes]
    """Return the error object as JSON. The second argument is the request id, if `id_header` has told it."""
    id_header: bytes = b""
    """The API's own name of the header X-Request-Id of answers; empty: it has none."""


PLAIN = ErrorForm(ErrorReply, lambda error: error.http_status, lambda error, _: error_body(error))
"""OpenAI's error object, for whatever belongs to no other API."""


class Writing(Protocol):
    """Where an exchange writes, as asyncio's transports do."""

    def write(self, data: bytes) -> None: ...

    def writelines(self, list_of_data: Iterable[bytes]) -> None: ...


class Peer(Protocol):
    """What an exchange uses of its connection: a client's (`Connection`), or the router's own (`InnerPeer`)."""

    is_gone: bool
    is_write_paused: bool
    on_gone: Callable[[], None] | None

    @property
    def transport(self) -> Writing: ...

    def default_headers(self) -> Headers: ...

    def update_reading(self) -> None: ...

    def note_progress(self, num_bytes: int) -> None: ...

    async def drained(self) -> None: ...

    def on_answered(self, exchange: Exchange) -> None: ...


class Exchange:
    __slots__ = (
        "_body",
        "_budget",
        "_expects_continue",
        "_held_bytes",
        "_is_chunked",
        "_is_wanted",
        "_left_bytes",
        "_num_received",
        "_takes_body",
        "_waiter",
        "_was_given",
        "connection",
        "errors",
        "headers",
        "is_complete",
        "is_started",
        "keep_alive",
        "more_body",
        "refusal",
        "scope",
        "silent_turns",
    )

    def __init__(
        self, connection: Peer, scope: Scope, budget: BodyBudget, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.connection = connection
        self.scope = scope
        self.headers: Headers = []
        """Headers of every answer that is written here."""
        self.errors = PLAIN
        """The form of errors; whoever knows the request's route sets it."""
        self.keep_alive = keep_alive
        """Whether more requests may follow on the connection."""
        self.is_started = self.is_complete = False
        """Whether the answer has been started, and completed."""
        self.silent_turns = 0
        """Looks at it since a part of the answer was written. The owner of the stream counts them here."""
        self.more_body = True
        """Whether the client has not sent all of the body yet."""
        self.refusal: ChituError | None = None
        """Why the rest of the body is not taken."""
        self._budget = budget
        self._body = bytearray()
        """Bytes of the body that arrived and were not handed on."""
        self._num_received = self._held_bytes = 0
        self._expects_continue = expects_continue
        self._takes_body = True
        self._is_wanted = self._was_given = False
        """Whether a reader waits for the body; whether ASGI's reader has all of it."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_chunked = False
        self._left_bytes: int | None = None
        """Bytes of the answer's announced length that are left to write."""

    # ------------------------------------------------------------------------------------------------ from the parser

    def on_body(self, data: bytes) -> bool:
        """Take a part of the body; return False if it was discarded."""
        if not self._takes_body:
            return False
        self._num_received += len(data)
        more_bytes = self._num_received - FREE_BODY_BYTES - self._held_bytes
        if more_bytes > 0:
            if not self._budget.take(more_bytes):
                limit_bytes = self._budget.limit_bytes
                self.break_off(
                    Capacity(f"bodies of {limit_bytes} bytes are held at once (router.max_total_body_bytes)")
                )
                return False
            self._held_bytes += more_bytes
        self._body += data
        self._wake()
        return True

    def on_body_end(self) -> None:
        self.more_body = False
        self._wake()

    def break_off(self, error: ChituError) -> None:
        """Give up the rest of the body, which will not come or is not taken: its reader gets the error."""
        self.refusal = error
        self.keep_alive = False
        self.release_body()
        self._wake()

    def on_gone(self) -> None:
        """Wake the reader of the body: the client is gone."""
        self._wake()

    @property
    def is_unread(self) -> bool:
        """Whether more of the body arrived than a reader asked for."""
        return self._takes_body and not self._is_wanted and len(self._body) > FREE_BODY_BYTES

    # --------------------------------------------------------------------------------------------------------- request

    async def body(self, max_bytes: int) -> bytearray:
        """Return the whole body without copying it: a copy of a large one takes long. PayloadTooLarge (without reading
        if its length is announced), UnsupportedEncoding, Capacity, SlowRequest, InvalidRequest; ClientGone if the body
        never ends."""
        await self.whole(max_bytes)
        body, self._body = self._body, bytearray()
        return body

    async def whole(self, max_bytes: int) -> None:
        """Wait for the whole body and leave it to `receive`. Raises what `body` raises."""
        if self.more_body:
            announced = header(self.scope, b"content-length")
            if announced is not None and announced.isdigit() and int(announced) > max_bytes:
                self.release_body()
                raise _too_large(int(announced), max_bytes)
        coding = header(self.scope, b"content-encoding") or b"identity"
        if (self.more_body or self._num_received) and coding.lower() != b"identity":
            self.release_body()
            raise UnsupportedEncoding(f"Content-Encoding: {coding[:40].decode('latin-1')!r} is not supported")
        while True:
            if self.connection.is_gone:
                raise ClientGone
            if self.refusal is not None:
                raise self.refusal
            if self._num_received > max_bytes:
                self.release_body()
                raise _too_large(self._num_received, max_bytes)
            if not self.more_body:
                return
            await self._change()

    async def part(self) -> bytes:
        """Return the next bytes of a body that is too large to be held; empty at its end. What was returned no longer
        counts. Raises what `body` raises, except PayloadTooLarge."""
        while True:
            if self.connection.is_gone:
                raise ClientGone
            if self.refusal is not None:
                raise self.refusal
            if self._body or not self.more_body:
                part, self._body, self._num_received = bytes(self._body), bytearray(), 0
                if self._held_bytes:
                    self._budget.give(self._held_bytes)
                    self._held_bytes = 0
                self._is_wanted = False
                self.connection.note_progress(len(part))
                return part
            await self._change()

    def release_body(self) -> None:
        """Free the body, with which its reader is done, and discard what still arrives of it."""
        self._takes_body = False
        self._body = bytearray()
        if self._held_bytes:
            self._budget.give(self._held_bytes)
            self._held_bytes = 0

    async def receive(self) -> Message:
        """Receive a message, as ASGI defines it."""
        while not (self.connection.is_gone or self.is_complete):
            if self.refusal is not None:
                self.fail(self.refusal)
            elif self._body or not (self.more_body or self._was_given):
                self._was_given = not self.more_body
                part, self._body = bytes(self._body), bytearray()
                return {"type": "http.request", "body": part, "more_body": self.more_body}
            else:
                await self._change()
        return {"type": "http.disconnect"}

    @property
    def is_client_gone(self) -> bool:
        return self.connection.is_gone

    def call_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Set what to call when the client leaves before its answer is complete; None calls nothing."""
        self.connection.on_gone = on_gone

    async def _change(self) -> None:
        """Return after more of the body arrived, or something ended."""
        if self._expects_continue:
            self._expects_continue = False
            if not self.is_started:
                self.connection.transport.write(CONTINUE)
        self._is_wanted = True
        self.connection.update_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---------------------------------------------------------------------------------------------------------- answer

    def answer(self, status: int, body: bytes, more: Headers | None = None) -> None:
        """Write a complete JSON answer."""
        if self.connection.is_gone:
            return
        if self.is_started:
            raise RuntimeError("an answer was begun already")
        head = self._head(status, more or [])
        head.append(JSON + b"content-length: %d\r\n\r\n" % len(body))
        if self.scope["method"] != "HEAD":
            head.append(body)
        self.connection.transport.write(b"".join(head))
        self._complete()

    def fail(self, error: ChituError, more: Headers | None = None) -> None:
        """Answer with the error in the form of the route's API."""
        form = self.errors
        request_id = next((value.decode() for name, value in self.headers if name == form.id_header), None)
        self.answer(form.status(error), form.body(error, request_id), error_headers(error) + (more or []))

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly: `await drained()` before writing more."""
        return self.connection.is_write_paused

    async def drained(self) -> None:
        """Return when more can be written, or the client is gone."""
        await self.connection.drained()

    def stream(self, data: bytes, is_last: bool, kind: bytes = EVENT_STREAM) -> None:
        """Write a part of an answer without a length, of the kind `EVENT_STREAM` or `JSON`; its head leaves with the
        first part."""
        if self.connection.is_gone:
            return
        self.silent_turns = 0
        if not self.is_started:
            parts = self._head(200, [])
            parts.append(kind)
            self._append_chunking(parts)
            self._write(b"".join(parts), data, is_last)
        else:
            self._write(b"", data, is_last)

    async def send(self, message: Message) -> None:
        """Send a message, as ASGI defines it. Ignored once the body was refused and the refusal is written."""
        if self.is_full:
            await self.drained()
        if self.connection.is_gone or (self.refusal is not None and self.is_complete):
            return
        if self.is_complete or self.is_started == (message["type"] == "http.response.start"):
            raise RuntimeError(f"{message['type']} out of turn")
        if self.is_started:
            data = message.get("body", b"") if self.scope["method"] != "HEAD" else b""
            is_last = not message.get("more_body", False)
            if self._left_bytes is not None:
                self._left_bytes -= len(data)
                if self._left_bytes < 0 or (is_last and self._left_bytes):
                    raise RuntimeError("an answer has another length than it announced")
            self._write(b"", data, is_last)
            return
        status, headers = message["status"], [*message.get("headers", [])]
        if any(b"\r" in text or b"\n" in text for pair in headers for text in pair):
            raise RuntimeError("a header of the answer has more than one line")
        parts = self._head(status, headers)
        length = next((value for name, value in headers if name.lower() == b"content-length"), None)
        if self.scope["method"] == "HEAD" or status in WITHOUT_BODY:
            parts.append(b"\r\n")
        elif length is not None:
            self._left_bytes = int(length)
            parts.append(b"\r\n")
        else:
            self._append_chunking(parts)
        self.connection.transport.write(b"".join(parts))

    def _head(self, status: int, more: Headers) -> list[bytes]:
        """Return the head without its last empty line."""
        self.is_started = True
        lines = [STATUS_LINE[status]]
        for name, value in (*self.connection.default_headers(), *self.headers, *more):
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return lines

    def _append_chunking(self, lines: list[bytes]) -> None:
        """Append what marks the end of an answer without a length. Before HTTP/1.1 the connection's end marks it, since
        `keep_alive` is False then."""
        self._is_chunked = self.scope["http_version"] == "1.1"
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")

    def _write(self, head: bytes, data: bytes, is_last: bool) -> None:
        if self._is_chunked:
            if len(data) > COPIED_BYTES:
                self.connection.transport.writelines((b"%b%x\r\n" % (head, len(data)), data))
                data = b"\r\n"
            else:
                data = b"%b%x\r\n%b\r\n" % (head, len(data), data) if data else head
            if is_last:
                data += b"0\r\n\r\n"
        elif head:
            data = head + data
        self.connection.transport.write(data)
        if is_last:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self._wake()
        self.connection.on_answered(self)


class HotRoute(NamedTuple):
    """A route that is answered beside the application of the cold ones."""

    answer: Callable[[Exchange, Scope, str], Awaitable[None]]
    """Called with the request id."""
    errors: ErrorForm = PLAIN


def _too_large(num_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a body of {num_bytes} bytes; at most {max_bytes} are accepted (router.max_body_bytes)")
