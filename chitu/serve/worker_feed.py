"""What the coordinating process and the API processes of one router say to each other (`router.workers`).

A socket pair per API process, made by the coordinator and inherited: nobody else can reach it, and the end of either
process is the end of the stream. Messages are MessagePack with a length of 4 bytes (little-endian) before them, in
order, and both ends run the same code. What is said of the cluster (`ClusterView`, `Heartbeat`, `RequestFailed`) is the
message of `chitu.protocol` as it is. `Feed` belongs to the loop thread on both sides; it never blocks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, TypeVar, Union, cast

from chitu.config.schema import Topology
from chitu.errors import ProtocolError
from chitu.http.cluster_source import WorkerReport
from chitu.protocol import ClusterView, Codec, Heartbeat, InstanceInfo, RequestFailed, Wire, encode
from chitu.router.metrics import CoordinationMetrics

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MAX_UNREAD_BYTES = 64 << 20
"""Waiting for a process that does not read its feed: it hangs, and is given up."""

# -------------------------------------------------------------------------------------------- coordinator -> worker


class Welcome(Wire, frozen=True, tag="welcome"):
    """First of all: who the process is. With the whole topology, so that nothing is read twice."""

    topology: Topology
    index: int
    incarnation: int
    created_s: int
    """When the router started (Unix time)."""


class InstanceJoined(Wire, frozen=True, tag="instance_joined"):
    """Before the view that has it."""

    instance: InstanceInfo


class InstanceLost(Wire, frozen=True, tag="instance_lost"):
    """After the view that has it no more."""

    instance: InstanceInfo
    reason: str
    has_died: bool


class ReportAsked(Wire, frozen=True, tag="report_asked"):
    """To be answered at once by a `WorkerReport` with this number."""

    number: int


class RecordReply(Wire, frozen=True, tag="record_reply"):
    """To a `RecordAsked`: what the other API processes reported, and those that ended had counted."""

    number: int
    workers: tuple[WorkerReport, ...]
    coordination: CoordinationMetrics


class DrainAnswer(Wire, frozen=True, tag="drain_reply"):
    """To a `DrainAsked`. `code` empty: it drains; else the error."""

    number: int
    name: str = ""
    incarnation: int = 0
    code: str = ""
    message: str = ""


class EndWorkers(Wire, frozen=True, tag="end"):
    """Drain and exit with 0. The second one ends the waiting."""


# -------------------------------------------------------------------------------------------- worker -> coordinator


class WorkerReady(Wire, frozen=True, tag="worker_ready"):
    """It may be given connections."""

    token_port: int


class WorkerStartFailed(Wire, frozen=True, tag="start_failed"):
    """It ends, and any other would: a fault of the topology."""

    message: str


class ConnectionsClosed(Wire, frozen=True, tag="connections_closed"):
    """So many more of those that it was given are over."""

    count: int


class RecordAsked(Wire, frozen=True, tag="record_asked"):
    number: int


class DrainAsked(Wire, frozen=True, tag="drain_asked"):
    number: int
    instance: str
    force: bool


class FlushAsked(Wire, frozen=True, tag="flush_asked"):
    """Of the prefix caches of all instances. The answer is the view that says so."""


class EndAsked(Wire, frozen=True, tag="end_asked"):
    """It was sent a signal: one to an API process is one to the router."""


ToWorker = Union[
    Welcome,
    InstanceJoined,
    InstanceLost,
    ClusterView,
    Heartbeat,
    RequestFailed,
    ReportAsked,
    RecordReply,
    DrainAnswer,
    EndWorkers,
]
ToCoordinator = Union[
    WorkerReady, WorkerStartFailed, WorkerReport, ConnectionsClosed, RecordAsked, DrainAsked, FlushAsked, EndAsked
]

to_worker_codec: Codec[ToWorker] = Codec(ToWorker)
to_coordinator_codec: Codec[ToCoordinator] = Codec(ToCoordinator)

M = TypeVar("M")


def packed(message: Wire) -> bytes:
    """As it travels: once for all feeds that it goes to."""
    frame = encode(message)
    return len(frame).to_bytes(LENGTH_BYTES, "little") + frame


class Feed(asyncio.Protocol, Generic[M]):
    """One end. `on_message` gets every message; `on_closed` is called once, when the other end is gone."""

    def __init__(self, codec: Codec[M], on_message: Callable[[M], None], on_closed: Callable[[], None]) -> None:
        self._codec = codec
        self._on_message = on_message
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_open = True
        self._lost = asyncio.Event()

    @classmethod
    async def open(
        cls, sock: socket.socket, codec: Codec[M], on_message: Callable[[M], None], on_closed: Callable[[], None]
    ) -> Feed[M]:
        """Takes the socket over."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, feed = await loop.connect_accepted_socket(lambda: cls(codec, on_message, on_closed), sock)
        return feed

    def send(self, message: Wire) -> None:
        self.send_packed(packed(message))

    def send_packed(self, frame: bytes) -> None:
        """A closed feed swallows it."""
        if not self._is_open or self._transport is None:
            return
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.error("a process of this router does not read its feed; it is given up")
            self._transport.abort()

    def close(self) -> None:
        """What was sent still leaves; `on_closed` is not called."""
        self._is_open = False
        if self._transport is not None:
            self._transport.close()

    async def finish(self) -> None:
        """`close`, and return when all has left."""
        self.close()
        await self._lost.wait()

    # -------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) >= start + LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            frame = bytes(buffer[start + LENGTH_BYTES : end])
            start = end
            self._take(frame)
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()
        if self._is_open:
            self._is_open = False
            self._on_closed()

    def _take(self, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
        except ProtocolError as error:
            log.error("a message of another process of this router is unreadable: %s", error)
            return
        try:
            self._on_message(message)
        except Exception:
            log.exception("a message handler failed")
