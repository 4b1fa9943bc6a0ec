"""ZMQ sockets as this project opens them. Each socket has exactly one owner thread."""

from __future__ import annotations

import zmq

SEND_HIGH_WATER_MARK = 100_000
"""Messages queued for a peer that does not read. Far beyond any live load, so a full queue means a dead peer."""


def _prepare(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return socket


def bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int) -> tuple[zmq.Socket[bytes], int]:
    """Bind a socket; port 0 lets the OS pick. Returns it with its port. zmq.ZMQError where the port is taken."""
    socket = _prepare(context.socket(kind))
    try:
        socket.bind(f"tcp://{host}:{port if port else '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise zmq.ZMQError(error.errno, f"tcp://{host}:{port}: {error.strerror}") from error
    return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """Connect a socket; reconnects by itself for as long as it lives."""
    socket = _prepare(context.socket(kind))
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(f"tcp://{host}:{port}")
    return socket
