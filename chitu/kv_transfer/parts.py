"""Parts of both roles of `KVManager`: settings, what is injected, and the outbox that keeps locks short.

`TransferOutbox` collects frames, log lines and the request to wake the step thread while a role holds its lock. They
leave after the lock was released, so no lock is ever held across `link`, `wake`, logging or a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.kv_transfer.checksums import PageSums, VerifyKV
from chitu.kv_transfer.events import PeerLink, TransferEvent, TransferEventKind, Wake
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.metadata_buffers import MetadataBuffers
from chitu.kv_transfer.peer_view import PidAlive, pid_alive
from chitu.kv_transfer.tensor_parallel.fan_out import FanOut
from chitu.kv_transfer.transports.transport import Transport
from chitu.log import about
from chitu.protocol import KVLayout, RankMemory, TransportSession, Wire, encode
from chitu.tracing.tracer import Tracer

TICK_INTERVAL_S = 0.02
"""Shortest time between two checks of a role's deadlines, however often the comm thread calls `tick`."""


@dataclass(slots=True, frozen=True)
class KVManagerConfig:
    """Identity of this instance, and its timeouts."""

    engine_rank: int
    incarnation: int
    host: str
    """Address at which peers reach this instance."""
    control_port: int
    """Its P<->D control port."""
    layout: KVLayout
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    transfer_threads: int = 1
    write_timeout_s: float = 5.0
    """Timeout of one write; a peer that takes longer is suspended until its writes have settled."""
    settle_timeout_s: float = 0.02
    """Timeout of one settle attempt, which occupies a transfer thread; repeated every `retry_interval_s`, one per D."""
    max_batch_bytes: int = 16 << 20
    """Most KV bytes of one write (one layer of a chunk is never split)."""
    verify_kv: VerifyKV = "off"
    """KV pages that are verified, on both sides: P sends their checksums, D requires them."""

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_size)


@dataclass(slots=True)
class RoleParts:
    """What is injected into a role: memory, transports and outgoing channels."""

    memory: PagedMemory
    aux: MetadataBuffers
    transports: list[Transport]
    """Transports in order of preference."""
    link: PeerLink
    wake: Wake
    clock: Clock
    is_pid_alive: PidAlive = pid_alive
    sessions: Sequence[TransportSession] = ()
    """Sessions of the transports that could register the memory; `KVManager` registers it."""
    follower_memories: Sequence[RankMemory] = ()
    """Memory of ranks 1, 2, ... of a D of several TP ranks."""
    fan_out: FanOut | None = None
    """Lanes to the followers, with several TP ranks: P makes them write, both roles make them compute checksums."""
    page_sums: PageSums | None = None
    """Checksums of the pages of all our ranks; for `verify_kv` (unless it is off) and the hashes of trace records."""
    tracer: Tracer | None = None
    """Tracer of its rooms; None in tests without tracing."""


class Line(NamedTuple):
    """A line for the log, which is not written under a lock."""

    level: int
    text: str
    values: tuple[object, ...]
    request_id: str
    """Request that the line is about; empty if none, or several."""


class TransferOutbox:
    """Frames, log lines and events of a role. Filled and taken under its lock; `Sendings.leave` runs after it."""

    def __init__(self) -> None:
        self._frames: list[tuple[str, int, bytes, bytes]] = []
        self._lines: list[Line] = []
        self._events: list[TransferEvent] = []
        self._wants_wake = False

    def frame(self, host: str, port: int, room: bytes, message: Wire) -> None:
        self._frames.append((host, port, room, encode(message)))

    def log(self, level: int, text: str, *values: object, request_id: str = "") -> None:
        self.line(Line(level, text, values, request_id))

    def line(self, line: Line) -> None:
        self._lines.append(line)

    def event(self, event: TransferEvent) -> None:
        self._events.append(event)
        self._wants_wake = True

    def drop_events(self, room: bytes) -> set[TransferEventKind]:
        """Drop a room's events that the step thread has not polled, except RELEASED. Return the kinds that waited."""
        waiting = {event.kind for event in self._events if event.room == room}
        self._events = [
            event for event in self._events if event.room != room or event.kind is TransferEventKind.RELEASED
        ]
        return waiting

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def take(self) -> Sendings:
        sendings = Sendings(self._frames, self._lines, self._wants_wake)
        self._frames, self._lines, self._wants_wake = [], [], False
        return sendings


@dataclass(slots=True, frozen=True)
class Sendings:
    frames: list[tuple[str, int, bytes, bytes]]
    lines: list[Line]
    wants_wake: bool

    def leave(self, link: PeerLink, wake: Wake, logger: logging.Logger) -> None:
        for host, port, room, payload in self.frames:
            link(host, port, room, payload)
        for line in self.lines:
            logger.log(line.level, line.text, *line.values, extra=about(line.request_id))
        if self.wants_wake:
            wake()
