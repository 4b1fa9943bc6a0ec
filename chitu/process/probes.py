"""Answers to the probes of an orchestrator (`dp_config.probe_port`): `/livez` and `/readyz`.

A thread with an asyncio loop, so a launcher that waits for its processes still answers. It knows nothing but what
`why_unready` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from chitu.config.topology import family_of
from chitu.errors import ConfigError

KEY = "dp_config.probe_port"
ANSWER_S = 2.0
"""Time for a request and its answer; then the connection is closed."""
MAX_CONNECTIONS = 64
"""Connections at once; one more is closed."""
MAX_HEAD_BYTES = 4096
REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Probes:
    """The server, from its construction until `close`."""

    def __init__(self, host: str, port: int, why_unready: Callable[[], str]) -> None:
        """Listen on `host`; port 0 is any free one. `why_unready` returns a clause, or "" if everything is ready.

        Raise ConfigError if it cannot listen."""
        self._why_unready = why_unready
        try:
            listening = socket.create_server((host, port), family=family_of(host), backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._num_open = 0
        self._thread = threading.Thread(target=self._run, args=(listening,), name="probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        async with await asyncio.start_server(self._take, sock=listening, limit=MAX_HEAD_BYTES):
            await self._end.wait()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            self._num_open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, reason = 200, ""
        if path == b"/readyz":
            reason = self._why_unready()
            status = 503 if reason else 200
        elif path != b"/livez":
            status, reason = 404, "there are /livez and /readyz"
        if method not in (b"GET", b"HEAD"):
            status, reason = 405, "only GET and HEAD"
        body = msgspec.json.encode(
            {"status": "unready" if status == 503 else REASONS[status].lower(), "reason": reason}
        )
        first = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{first}Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if method == b"HEAD" else body)
