"""The way of trace records to the router: a PUSH socket to its stats port. Thread `trace` only."""

from __future__ import annotations

import contextlib

import zmq

from chitu.net.sockets import connect

MAX_MESSAGES = 64
"""That wait for a router that does not read; of more the records are dropped. Trace batches are some 128 KiB."""
LINGER_MS = 200


class StatsSocket:
    """`tracer.TraceSocket`. BadFrame or Capacity where it cannot be opened."""

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
