"""The sockets on which tokens go to the router or one of its API processes. Step thread."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

LAST_TOKENS_MS = 200
"""Linger of a socket to the router: how long queued messages may still leave when it closes."""


@dataclass(slots=True, frozen=True)
class TokenSocket:
    """Implementation of `TokenPort` for one API process."""

    socket: zmq.Socket[bytes]

    def send(self, frame: bytes) -> bool:
        return send_now(self.socket, frame)

    def close(self) -> None:
        self.socket.close(LAST_TOKENS_MS)


def send_now(socket: zmq.Socket[bytes], frame: bytes) -> bool:
    """Send a frame without blocking; return False if the queue is full."""
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
