"""ZMQ sockets as this project opens them. Each socket has exactly one owner thread.

In a context that was made with the cluster's secrets (`net/curve.py`) both kinds are encrypted and authenticated.
"""

from __future__ import annotations

import contextlib
import re
import socket as plain_sockets
from typing import Protocol

import zmq

from chitu.config.topology import with_port
from chitu.errors import BadFrame, Capacity
from chitu.net.curve import is_secret, require_curve, serve_curve

TCP_SILENCE_MS = 10_000
"""A connection whose other end acknowledges nothing for this long (a pulled cable; a stopped process still does) is
closed and reopened. TCP by itself would retry for a quarter of an hour, or wait for ever if nothing is sent: so each
end sends keepalives, also one that only receives. The kernel answers them, so a stopped process keeps its connections
for `DEAF_MS`."""
KEEPALIVE_S = 2
"""An end probes the connection after this long without data, and again after as long. Once packets pass again, an end
whose other end is gone gets a reset in answer to its next probe."""
PING_MS = 10_000
DEAF_MS = 60_000
"""An end of a connection that no message reaches for this long, not even the answer to its ping, closes it: a flipped
bit in the length of a frame, if it passes TCP's checksum, makes the rest of the stream part of that frame. A real frame
that takes so long, 7 MB at one megabit per second, does not arrive."""
CONNECT_TIMEOUT_MS = 2_000
"""A connection attempt that takes longer is repeated: TCP's own next try may be a minute away."""
LOOK_S = 0.2
"""Time within which a process on a near host accepts a connection."""
SEND_HIGH_WATER_MARK = 100_000
"""Messages queued for a peer that does not read. Far beyond any live load, so a full queue means a dead peer."""
HANDSHAKE_MS = 3_000
"""A connection that has not proved by then that it speaks ZMTP (with a cluster key: that it has the key) is closed;
until then it takes a descriptor."""
BACKLOG = 4096
"""Connections that a port has not accepted yet: all instances of a large cluster may come at once. With libzmq's 100,
most would come a second or more later."""
LINGER_MS = 200
"""How long the queued messages of a `PushSocket` may still leave when it closes."""
MAX_FRAME_BYTES = 64 << 20
"""The sender of a larger frame is disconnected; the token ids of the longest prompt fit."""
MAX_SMALL_FRAME_BYTES = 1 << 20
"""Largest frame of ports that expect only heartbeats, joins and the like. libzmq holds all frames of a message until
the last arrives, and limits only the bytes of each frame."""

_HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,255}")


def check_address(host: str, port: int) -> None:
    """Raise BadFrame if no socket could ever connect there: addresses of peers come in messages."""
    if not _HOST.fullmatch(host) or not 0 < port <= 65535:
        raise BadFrame(f"{host[:255]!r}:{port} is no address")


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_MAXRT, TCP_SILENCE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, TCP_SILENCE_MS // 1000 // KEEPALIVE_S)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAF_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return socket


def bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, max_frame_bytes: int = MAX_FRAME_BYTES
) -> tuple[zmq.Socket[bytes], int]:
    """Bind a socket; port 0 lets the OS pick. Return it with its port. Raises zmq.ZMQError if the port is taken."""
    socket = _open(context, kind)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    if is_secret(context):
        serve_curve(socket)
        require_curve(socket)
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.bind(f"tcp://{with_port(host, port or '*')}")
    except zmq.ZMQError as error:
        socket.close()
        raise zmq.ZMQError(error.errno, f"tcp://{with_port(host, port)}: {error.strerror}") from error
    return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    host: str,
    port: int,
    *,
    queues_unconnected: bool = True,
    most_queued: int = SEND_HIGH_WATER_MARK,
) -> zmq.Socket[bytes]:
    """Connect a socket, which reconnects by itself for as long as it lives.

    Without `queues_unconnected` a send without a connection raises zmq.Again, and queued messages are lost with their
    connection: this is for messages that are repeated anyway.

    Raises BadFrame if no socket can be opened to such an address, which came with a message. Raises Capacity if this
    process has no socket or descriptor left; there may be one later.
    """
    check_address(host, port)
    try:
        socket = _open(context, kind)
    except zmq.ZMQError as error:
        raise Capacity(f"no socket to {host}:{port} now: {error.strerror}") from error
    if is_secret(context):
        require_curve(socket)
    socket.setsockopt(zmq.IMMEDIATE, not queues_unconnected)
    socket.setsockopt(zmq.SNDHWM, most_queued)
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.connect(f"tcp://{with_port(host, port)}")
    except zmq.ZMQError as error:
        socket.close()
        raise BadFrame(f"{host!r}:{port} is no address: {error}") from error
    return socket


def listens(host: str, port: int, timeout_s: float = LOOK_S) -> bool:
    """Return whether a process takes connections there: sockets that `connect` opens wait for one that does not."""
    with contextlib.suppress(OSError):
        plain_sockets.create_connection((host.strip("[]"), port), timeout_s).close()
        return True
    return False


class PushPort(Protocol):
    """What frames are pushed to. `PushSocket` is one."""

    def send(self, frame: bytes) -> bool:
        """Queue a frame. Return False if the queue is full. Never blocks."""

    def close(self) -> None: ...


class PushSocket:
    """A PUSH socket that is connected as `connect` does, and never blocks. One thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        most_queued: int = SEND_HIGH_WATER_MARK,
        *,
        queues_unconnected: bool = True,
    ) -> None:
        self._socket = connect(
            *(context, zmq.PUSH, host, port), queues_unconnected=queues_unconnected, most_queued=most_queued
        )

    def send(self, frame: bytes) -> bool:
        """Queue a frame. Return False if the queue is full, or nothing is connected and it is not queued for later."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
            return True
        return False

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._socket.close(linger_ms)
