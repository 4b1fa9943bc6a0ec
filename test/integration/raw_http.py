"""HTTP at the byte level: requests that a client library would not send, or would build too slowly."""

from __future__ import annotations

import socket
from typing import NamedTuple


class Reply(NamedTuple):
    status: int
    content_type: str
    body: bytes


class RawClient:
    """A connection that sends any bytes and reads one answer to them. It reconnects if the server closed the last
    one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._buffer = b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def send(self, request: bytes) -> None:
        """Send without reading the answer."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        self._socket.sendall(request)

    def exchange(self, request: bytes) -> Reply:
        """Send `request` as it is and return the answer."""
        self.send(request)
        status, headers = self._head()
        while status == 100:
            status, headers = self._head()
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self._until(b"\r\n"), 16):
                body += self._take(size + 2)[:-2]
            self._take(2)
        else:
            body = self._take(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":
            self.close()
        return Reply(status, headers[b"content-type"].partition(b";")[0].decode(), body)

    def _head(self) -> tuple[int, dict[bytes, bytes]]:
        status_line, *lines = self._until(b"\r\n\r\n").split(b"\r\n")
        return int(status_line.split(b" ")[1]), {
            name.lower(): value for name, _, value in (x.partition(b": ") for x in lines)
        }

    def _until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            self._read()
        found, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return found

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._read()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def _read(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(1 << 16)
        assert data, f"the server closed the connection within an answer: {self._buffer[-500:]!r}"
        self._buffer += data


def http_request(method: str, path: str, raw: bytes, headers: dict[str, bytes], in_chunks: bool = False) -> bytes:
    """Return the bytes of a request; with `in_chunks` the body comes in pieces of 7 bytes."""
    lines = {"host": b"fuzz", **headers}
    body = raw
    if in_chunks:
        chunks = [raw[i : i + 7] for i in range(0, min(len(raw), 399), 7)] + [raw[399:]]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
        lines["transfer-encoding"] = b"chunked"
    else:
        lines["content-length"] = b"%d" % len(raw)
    head = b"".join(b"%b: %b\r\n" % (name.encode(), value) for name, value in lines.items())
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method.encode(), path.encode(), head, body)
