"""The HTTP client of everything that is no server of HTTP itself: a connection to one server, and the reader of its
server-sent events. Blocking, in any thread.

Plain `http.client`: Ctrl-C must interrupt the read that waits for a token, and the client of a serving tool should add
no dependency. No proxy is used. Closing a connection in the middle of an answer aborts the request (the router cancels
it on P and D). Errors are those of `NETWORK_ERRORS`; each caller says what they mean to its user.

`EventParser` is pure; it gets the bytes as the socket delivers them, which may cut an event, a line end or a character.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 1 << 16
NETWORK_ERRORS = (OSError, UnicodeError, http.client.HTTPException)
"""What a connection raises; UnicodeError: an impossible host name."""
JSON = {"Content-Type": "application/json"}


class HTTPReply(NamedTuple):
    """An answer that was read to its end."""

    status: int
    body: bytes
    headers: Message
    """By name, in any case."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and where on it the routes begin."""

    scheme: str
    netloc: str
    host: str
    port: int | None
    base: str
    """Path that comes before that of each route; empty: none."""

    @classmethod
    def at(cls, url: str) -> Server:
        """Return the server of a URL. ValueError if it is none."""
        parts = urlsplit(url)
        return cls(parts.scheme, parts.netloc, parts.hostname or "", parts.port, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.base}"

    def connect(self, timeout_s: float, connect_s: float = CONNECT_TIMEOUT_S) -> ServerConnection:
        """Return an open connection. `timeout_s`: of each read and write; `connect_s`: of connecting."""
        return ServerConnection(self, timeout_s, connect_s)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON, *, timeout_s: float
    ) -> HTTPReply:
        """Return the answer to one request, on a connection of its own. `timeout_s`: of connecting, and of each read
        and write."""
        with self.connect(timeout_s, timeout_s) as connection:
            return connection.ask(method, path, body, headers)


class ServerConnection:
    """A connection, open from its construction until `close`. One thread at a time; `abort` in any."""

    def __init__(self, server: Server, timeout_s: float, connect_s: float) -> None:
        make = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
        self._base = server.base
        self._connection = make(server.host, server.port, timeout=connect_s)
        try:
            self._connection.connect()
            self._connection.sock.settimeout(timeout_s)
        except BaseException:
            self._connection.close()
            raise

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON
    ) -> http.client.HTTPResponse:
        """Send a request and return the response, whose body is not read. Read it before the next request."""
        self._connection.request(method, self._base + path, body, headers)
        return self._connection.getresponse()

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON) -> HTTPReply:
        """Return the whole answer."""
        response = self.send(method, path, body, headers)
        return HTTPReply(response.status, response.read(), response.headers)

    @property
    def is_open(self) -> bool:
        """Whether the server keeps it for another request."""
        return self._connection.sock is not None

    def abort(self) -> None:
        """End what another thread waits for."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> ServerConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventParser:
    """Splits bytes into the data of each complete server-sent event. Skips comments and other fields."""

    def __init__(self) -> None:
        self._rest = b""
        """Bytes of a line whose end has not arrived."""
        self._after_cr = False
        """Whether the last chunk ended with CR, so that an LF at the start of the next one belongs to it."""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            name, _, value = line.rstrip(b"\r\n").partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and not value and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events


def events_of(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each event of a streamed answer as it arrives, until the server ends it."""
    parser = EventParser()
    while chunk := response.read1(READ_BYTES):
        yield from parser.feed(chunk)
