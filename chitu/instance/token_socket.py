"""The way of an instance's tokens to the router or one of its API processes. Step thread."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

LAST_TOKENS_MS = 200
"""How long messages that are queued when a socket to the router closes may still leave."""


@dataclass(slots=True, frozen=True)
class TokenSocket:
    """Implements `TokenPort` for one API process."""

    socket: zmq.Socket[bytes]

    def send(self, frame: bytes) -> bool:
        return send_now(self.socket, frame)

    def close(self) -> None:
        self.socket.close(LAST_TOKENS_MS)


def send_now(socket: zmq.Socket[bytes], frame: bytes) -> bool:
    """False where the queue is full."""
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
