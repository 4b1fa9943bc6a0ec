"""What an instance records of the requests that are traced, on its way to the router.

Made by the process entry, used by every thread of an instance. The comm thread registers traced rooms (`begin`), any
thread that sees something of one adds a record, and the thread `trace`, which starts with the first of them, sends the
records to the router's stats port. The step thread ends a room with its last record, and in any case when no sequence
has it (any longer). Invariants: `rooms` is empty while nothing is traced, and then one lookup in it is all that tracing
costs; `add` never blocks; records that find no room are counted, and the count is sent to the router.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chitu.clock import Clock
from chitu.errors import ChituError
from chitu.net.sockets import PushPort
from chitu.net.threads import ServiceThread
from chitu.protocol import (
    KVLayout,
    RequestMessage,
    SampledRequest,
    TraceLines,
    encode,
    unpack_i32,
)
from chitu.protocol.trace import (
    HEAD_TOKENS,
    MAX_FRAME_BYTES,
    AnyTraceRecord,
    TraceArrival,
    TracedLayout,
    TracedSums,
    TraceFrame,
)
from chitu.types import Role, instance_name, room_text

logger = logging.getLogger(__name__)

MAX_QUEUED = 8192
"""Records that wait to be sent."""
MAX_FRAME_SHARE_BYTES = 8 << 20
"""Bytes of recorded frames that wait to be sent."""
MAX_MESSAGES = 64
"""Messages queued for a router that does not read; the records of further ones are dropped."""
BATCH_BYTES = 128 << 10
"""Approximate bytes of one message to the router; its port takes 1 MiB."""
PAUSE_S = 0.05
"""Seconds between two sends while something is traced."""
MAX_ROOMS = 1024
"""Rooms that are traced at once; beyond it the oldest are no longer traced."""
LINGER_S = 2.0
"""Seconds after the end of a room in which frames of it may still come."""


@dataclass(slots=True)
class TracedRoom:
    """What the writers of a room's records remember between two of them."""

    request_id: str
    room: str
    has_frames: bool
    slot: int = -1
    num_pages: int = 0
    """Number of pages that records have named."""
    hashes: TracedSums | None = None
    router: int = 0
    """Index of the router that sent the request; its records go there."""
    ended_s: float | None = None


class Tracer:
    def __init__(
        self,
        role: Role,
        engine_rank: int,
        incarnation: int,
        layout: KVLayout,
        device: str,
        open_sockets: Callable[[], Sequence[PushPort]],
        clock: Clock,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`open_sockets` opens the sockets to the routers, which only the thread `trace` uses."""
        self._identity = role, engine_rank, incarnation
        self.name = instance_name(role, engine_rank)
        self.device = device
        self.kv_layout = layout
        self.layout = TracedLayout(layout.num_layers, layout.page_size, layout.dtype, layout.tp_size, layout.groups)
        self._open_sockets = open_sockets
        self._clock = clock
        self._pause_s = pause_s
        self.rooms: dict[bytes, TracedRoom] = {}
        """Traced rooms, oldest first. Other threads only read it."""
        self._queue: deque[tuple[int, AnyTraceRecord]] = deque()
        """Records that wait, each with the index of its router."""
        self._frame_bytes = 0
        self._num_dropped = 0
        self._lock = threading.Lock()
        """Guards changes of `rooms` and the count of dropped records."""
        self._thread: ServiceThread | None = None
        self._is_wanted, self._closing = threading.Event(), threading.Event()

    def rename(self, role: Role, engine_rank: int, incarnation: int) -> None:
        """Make records as another incarnation from now on. No room is left."""
        self._identity, self.name = (role, engine_rank, incarnation), instance_name(role, engine_rank)

    # ----------------------------------------------------------------------------------------------------- comm thread

    def begin(self, message: RequestMessage, frame: bytes) -> None:
        """Start tracing a request that arrived, and its forks."""
        head, ids = message.head, message.head.token_ids
        has_frames = head.options.trace == "frames"
        pairs = [(head.room, head.request_id)]
        if isinstance(message, SampledRequest):
            pairs += [(fork.room, fork.request_id) for fork in message.forks]
        with self._lock:
            for room, request_id in pairs:
                self.rooms.setdefault(room, TracedRoom(request_id, room_text(room), has_frames, router=head.router))
            while len(self.rooms) > MAX_ROOMS:
                del self.rooms[next(iter(self.rooms))]
        if self._thread is None:
            self._thread = ServiceThread("trace", self._loop)
            self._thread.start()
        for room, _ in pairs:
            self.add(
                room,
                TraceArrival,
                prompt_tokens=len(ids) // 4,
                continued_tokens=head.num_emitted,
                prompt_head=tuple(unpack_i32(ids[: 4 * HEAD_TOKENS])) if len(ids) % 4 == 0 else (),
            )
        self.frame(head.room, "received", "request", frame)
        self._is_wanted.set()

    # ------------------------------------------------------------------------------------------------------ any thread

    def add(self, room: bytes, kind: type[Any], **fields: Any) -> None:
        """Add a record of this room, if it is traced. Never blocks."""
        traced = self.rooms.get(room)
        if traced is None:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._drop(1)
            return
        record = kind(
            request_id=traced.request_id, room=traced.room, instance=self.name, at_s=self._clock.monotonic(), **fields
        )
        self._queue.append((traced.router, record))

    def frame(self, room: bytes, direction: str, port: str, frame: bytes) -> None:
        """Add a message of this room, if its frames are wanted."""
        traced = self.rooms.get(room)
        if traced is None or not traced.has_frames:
            return
        data = frame if len(frame) <= MAX_FRAME_BYTES else b""
        if self._frame_bytes + len(data) > MAX_FRAME_SHARE_BYTES:
            self._drop(1)
            return
        self._frame_bytes += len(data)  # several threads write it: approximate
        self.add(room, TraceFrame, direction=direction, port=port, num_bytes=len(frame), data=data)

    def end(self, room: bytes) -> None:
        """Note that the last record of a room was added, or that the room is gone from here. Idempotent."""
        traced = self.rooms.get(room)
        if traced is not None and traced.ended_s is None:
            traced.ended_s = self._clock.monotonic()

    def close(self) -> None:
        """Send the waiting records, and stop."""
        self._closing.set()
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join(1.0)

    # ---------------------------------------------------------------------------------------------------- trace thread

    def _loop(self) -> None:
        sockets: Sequence[PushPort] = ()
        try:
            sockets = self._open_sockets()
        except ChituError as error:
            logger.warning("trace records cannot be sent: %s", error.message)
        while not self._closing.is_set():
            self._is_wanted.wait()
            self._is_wanted.clear()
            while (self.rooms or self._queue) and not self._closing.wait(self._pause_s):
                self.send_waiting(sockets)
                self._forget_ended()
        self.send_waiting(sockets)
        for socket in sockets:
            socket.close()

    def send_waiting(self, sockets: Sequence[PushPort]) -> None:
        """Send the records in messages of about `BATCH_BYTES`. What a router does not take is dropped, and the next
        message reports how much."""
        encoder, lines, num_lines = msgspec.json.Encoder(), bytearray(), 0
        while self._queue:
            router, record = self._queue.popleft()
            if isinstance(record, TraceFrame):
                self._frame_bytes -= len(record.data)
            lines += encoder.encode(record) + b"\n"
            num_lines += 1
            if len(lines) >= BATCH_BYTES or not self._queue or self._queue[0][0] != router:
                dropped = self._num_dropped
                message = TraceLines(*self._identity, bytes(lines), dropped)
                is_sent = router < len(sockets) and sockets[router].send(encode(message))
                self._drop(-dropped if is_sent else num_lines)
                lines, num_lines = bytearray(), 0

    def _forget_ended(self) -> None:
        """Forget rooms of requests that are over, once no more records of them can come."""
        end_s = self._clock.monotonic() - LINGER_S
        with self._lock:
            over = [room for room, each in self.rooms.items() if each.ended_s is not None and each.ended_s < end_s]
            for room in over:
                del self.rooms[room]

    def _drop(self, num_records: int) -> None:
        with self._lock:
            self._num_dropped += num_records
