"""Open-loop load for `overload.py`: requests are sent when due, whether or not earlier ones are finished.

A closed loop slows down with the server and so hides its collapse. Here arrivals are a Poisson process; each request is
streamed over a kept-alive connection from a pool, its client disconnects after `patience_s`, and its result is an
`Outcome`. One asyncio loop, in the benchmark's process.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Outcome:
    """Result of one request. Times are seconds since it was due."""

    status: int
    """HTTP status; 0: the client disconnected before it received one."""
    code: str = ""
    """Error code from the error object, if the request failed."""
    retry_after: str = ""
    first_s: float | None = None
    """Time of the first streamed token."""
    total_s: float | None = None
    """Time of the end of the answer or rejection; None: the client disconnected."""
    is_whole: bool = False
    """Whether the stream ended with `[DONE]`."""


class Connections:
    """Pool of kept-alive connections to one port, which opens a new one if none is free."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, raw: bytes, due_s: float) -> Outcome:
        """Send one request and read its answer. If cancelled, disconnect as a client does."""
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        is_whole = False
        try:
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            if b"content-length" in fields:
                error = json.loads(await reader.readexactly(int(fields[b"content-length"])))["error"]
                is_whole = True
                retry_after = fields.get(b"retry-after", b"").decode()
                return Outcome(status, error["code"], retry_after, None, time.perf_counter() - due_s)
            first_s, tail = None, b""
            while True:
                size = int(await reader.readline(), 16)
                data = await reader.readexactly(size + 2)
                if first_s is None:
                    first_s = time.perf_counter() - due_s
                if not size:
                    break
                tail = data
            is_whole = True
            return Outcome(status, "", "", first_s, time.perf_counter() - due_s, b"data: [DONE]" in tail)
        finally:
            if is_whole:
                self._free.append((reader, writer))
            else:
                writer.close()

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def ask(connections: Connections, raw: bytes, due_s: float, patience_s: float) -> Outcome:
    """Send one request. Return status 0 if the client gave up or could not connect."""
    try:
        async with asyncio.timeout(patience_s):
            return await connections.request(raw, due_s)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return Outcome(0)


async def closed_loop(
    connections: Connections, requests: Iterator[bytes], clients: int, duration_s: float, patience_s: float
) -> float:
    """Return the answers a second that `clients` clients receive if each sends its next request at once."""
    begin_s = time.perf_counter()
    counted = 0

    async def client() -> None:
        nonlocal counted
        while time.perf_counter() - begin_s < duration_s:
            outcome = await ask(connections, next(requests), time.perf_counter(), patience_s)
            if outcome.is_whole:
                counted += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return counted / (time.perf_counter() - begin_s)


async def offer(
    connections: Connections,
    requests: Iterator[bytes],
    rate: float,
    duration_s: float,
    patience_s: float,
    rng: random.Random,
    on_late: Callable[[float], None] = lambda late_s: None,
) -> list[Outcome]:
    """Send Poisson arrivals at `rate` a second for `duration_s`; return when every client has its answer or left. Pass
    to `on_late` how late the generator itself was, for each request."""
    tasks: list[asyncio.Task[Outcome]] = []
    begin_s = due_s = time.perf_counter()
    while (due_s := due_s + rng.expovariate(rate)) < begin_s + duration_s:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        on_late(time.perf_counter() - due_s)
        tasks.append(asyncio.create_task(ask(connections, next(requests), due_s, patience_s)))
    return list(await asyncio.gather(*tasks))
