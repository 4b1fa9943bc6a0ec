"""ZMQ sockets on an asyncio loop, without a task or a future per message.

Owned and called by the loop thread alone (the router). `FrameReader` and `BulkReader` drain a socket when its
descriptor wakes the loop; `Outbox` opens one PUSH socket per live peer, which sends once a turn. The descriptor of a
ZMQ socket is edge-triggered: after it fires, the socket must be read until EAGAIN, and checked again after a send on it
(`poke`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from chitu.errors import ProtocolError
from chitu.net.sockets import connect
from chitu.protocol import InstanceInfo

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 256
"""Messages read before yielding to the event loop, so that a flood on one socket cannot starve the others."""
MAX_TURN_S = 0.002
"""Time after which a `FrameReader` yields, since a message may cost much more than another: a join takes 0.3 ms."""
FEW_MESSAGES = 2
"""Usual number of messages at a time. Up to this number the reader checks after each whether there are more, which
costs a third of the exception that reports none. With more messages the one exception is cheaper."""
MAX_MESSAGE_BYTES = 256 << 10
"""Bytes of frames after which a message to a peer does not wait for the end of the turn: prompts may be long."""
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
LINGER_MS = 200
"""Time in which queued messages may still leave when a process ends."""


class FrameReader:
    """Passes every message of one socket to `on_message` (a list of frames).

    A message that raises ProtocolError is counted in `bad_messages`, any other exception is logged; reading continues.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._fd = int(socket.getsockopt(zmq.FD))
        self._closed = False
        self._emptied_s = time.monotonic()
        self._is_due = False
        """Whether the next turn reads on. Several reads in one turn would keep the loop for as many times as long."""
        self.bad_messages = 0
        loop.add_reader(self._fd, self._on_ready)
        self.poke()

    def poke(self) -> None:
        """Check the socket again after a send on it: the send may have swallowed the wake-up."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._read_on)

    def read_until_s(self) -> float:
        """Return the time (of the monotonic clock) until which all that arrived has been handled."""
        if not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            self._emptied_s = time.monotonic()
        else:
            self.poke()
        return self._emptied_s

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _on_ready(self) -> None:
        if not self._is_due:
            self._drain()

    def _read_on(self) -> None:
        self._is_due = False
        self._drain()

    def _drain(self) -> None:
        if self._closed:
            return
        receive, clock = self._socket.recv_multipart, time.monotonic
        end_s = clock() + MAX_TURN_S
        try:
            for _ in range(MAX_MESSAGES_PER_TURN):
                self._take(receive(zmq.NOBLOCK))
                if clock() >= end_s:
                    break
            self.poke()
        except zmq.Again:
            self._emptied_s = clock()

    def _take(self, frames: list[bytes]) -> None:
        try:
            self._on_message(frames)
        except ProtocolError as error:
            self.bad_messages += 1
            logger.warning("ignored a bad message: %s", error)
        except Exception:
            logger.exception("a message handler failed")


class BulkReader(FrameReader):
    """Reader of a socket with many messages of one frame each. `on_message` gets all that are ready in one call, one
    frame per message. It handles bad ones itself, so that one does not discard the others."""

    def _drain(self) -> None:
        if self._closed:
            return
        socket, frames = self._socket, []
        receive = socket.recv
        try:
            for number in range(MAX_MESSAGES_PER_TURN):
                frames.append(receive(_NOBLOCK))
                if number < FEW_MESSAGES and not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                    break
            else:
                self.poke()
        except zmq.Again:
            pass
        if frames:
            self._take(frames)


class PeerSocket:
    """PUSH socket to one incarnation of a peer. What is sent in one turn of the loop leaves at its end as one message,
    a frame each: handing a message to ZMQ's thread costs as much as a fifth of a request."""

    def __init__(self, socket: zmq.Socket[bytes], flush_soon: Callable[[PeerSocket], None]) -> None:
        self._socket = socket
        self._flush_soon = flush_soon
        self._frames: list[bytes] = []
        self._num_bytes = 0

    def send(self, frame: bytes) -> bool:
        """Queue a frame. Return False if the queue is full."""
        frames = self._frames
        if not frames:
            if not int(self._socket.getsockopt(_EVENTS)) & _POLLOUT:
                return False
            self._flush_soon(self)
        frames.append(frame)
        self._num_bytes += len(frame)
        if self._num_bytes >= MAX_MESSAGE_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Send what is queued. There is room for it: the queue was not full before its first frame."""
        if frames := self._frames:
            self._frames, self._num_bytes, last = [], 0, frames.pop()
            with contextlib.suppress(zmq.Again):
                for frame in frames:
                    self._socket.send(frame, _NOBLOCK | _SNDMORE)
                self._socket.send(last, _NOBLOCK)

    def close(self, linger_ms: int = 0) -> None:
        """Close it. Queued messages are dropped after `linger_ms`, so that a successor on the same port never receives
        them."""
        self.flush()
        self._socket.close(linger=linger_ms)


class Outbox:
    """Opens the sockets to instances, and sends at the end of a turn what was queued in it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._queued: list[PeerSocket] = []

    def open(self, instance: InstanceInfo) -> PeerSocket:
        """Return a socket that connects to it. Raises Capacity if this process has no socket left."""
        return PeerSocket(connect(self._context, zmq.PUSH, instance.host, instance.port), self._flush_soon)

    def _flush_soon(self, peer: PeerSocket) -> None:
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queued.append(peer)

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        for peer in queued:
            peer.flush()
