"""The HTTP server alone, without a router, and clients that send it any bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from chitu.errors import ChituError
from chitu.http.wire.exchange import EXCHANGE, Exchange
from chitu.http.wire.limits import HTTPLimits
from chitu.http.wire.server import HTTPServer, listen
from chitu.net.http import Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]
MAX_BODY = 100_000
PATIENT = HTTPLimits(head_s=20, body_s=20, write_s=20)
WAIT_S = 15.0


class Echo:
    """Application that answers with the length of the body and counts its requests."""

    def __init__(self, max_body_bytes: int = MAX_BODY) -> None:
        self.max_body_bytes = max_body_bytes
        self.started = self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        exchange: Exchange = scope[EXCHANGE]
        try:
            body = await exchange.body(self.max_body_bytes)
            exchange.answer(200, b"%d" % len(body))
        except ChituError as error:
            exchange.fail(error)
        except Exception:
            pass  # the client is gone
        finally:
            self.ended += 1


@asynccontextmanager
async def serving(app: App, limits: HTTPLimits) -> AsyncIterator[int]:
    server = HTTPServer(app, listen("127.0.0.1", 0, "port"), limits=limits)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop(1.0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def status(self) -> int:
        """Return the status of the next answer, after reading its body."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.body = await self.reader.readexactly(length)
        return int(head.split()[1])

    async def is_closed(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def get(*headers: bytes) -> bytes:
    return b"\r\n".join([b"GET / HTTP/1.1", b"host: h", *headers, b"", b""])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)
