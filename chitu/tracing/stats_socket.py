"""Socket that takes trace records to the router: PUSH to its stats port. Used by thread `trace` only."""

from __future__ import annotations

import contextlib

import zmq

from chitu.net.sockets import connect

MAX_MESSAGES = 64
"""Messages queued for a router that does not read; records beyond them are dropped. A batch is some 128 KiB."""
LINGER_MS = 200


class StatsSocket:
    """A `tracer.TraceSocket`. Raises BadFrame or Capacity if it cannot be opened."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        self._socket = connect(context, zmq.PUSH, host, port)
        self._socket.setsockopt(zmq.SNDHWM, MAX_MESSAGES)

    def send(self, frame: bytes) -> bool:
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        self._socket.close(LINGER_MS)
