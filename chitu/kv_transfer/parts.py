"""What both roles of `KVManager` are made of: settings, what is injected, and the outbox that keeps locks short.

`TransferOutbox` collects frames, log lines and the wish to wake the step thread while a role holds its lock; they leave
after the lock was given back, so no lock is ever held across `link`, `wake`, logging or a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.kv_transfer.checksums import PageSums, VerifyKV
from chitu.kv_transfer.events import PeerLink, TransferEvent, TransferEventKind, Wake
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.peer_view import PidAlive, pid_alive
from chitu.kv_transfer.tensor_parallel.fan_out import FanOut
from chitu.kv_transfer.transports.transport import Transport
from chitu.log import about
from chitu.protocol import KVLayout, RankMemory, TransportSession, Wire, encode
from chitu.tracing.tracer import Tracer

TICK_INTERVAL_S = 0.02
"""A role looks at its deadlines at most so often, however often the comm thread turns."""


class AuxRows(Protocol):
    """What the roles need of `MetadataBuffers`."""

    def seal(self, slot: int, room: bytes, cached_tokens: int = 0) -> None: ...

    def verify(self, slot: int, room: bytes) -> int: ...


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
    """Of one write; a peer that takes longer is suspended until its writes have settled."""
    settle_timeout_s: float = 0.02
    """Of one settle attempt, which keeps a transfer thread; repeated every `retry_interval_s`, one for each D."""
    max_batch_bytes: int = 16 << 20
    """KV bytes of one write at most (one layer of a chunk is never split)."""
    verify_kv: VerifyKV = "off"
    """Of both sides: P sends checksums of the KV pages, D insists on them."""

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_size)


@dataclass(slots=True)
class RoleParts:
    """Injected: memory, transports and the ways out."""

    memory: PagedMemory
    aux: AuxRows
    transports: list[Transport]
    """In order of preference."""
    link: PeerLink
    wake: Wake
    clock: Clock
    is_pid_alive: PidAlive = pid_alive
    sessions: Sequence[TransportSession] = ()
    """Of the transports that could register the memory; `KVManager` registers it."""
    follower_memories: Sequence[RankMemory] = ()
    """D of several TP ranks: the memory of ranks 1, 2, ..."""
    fan_out: FanOut | None = None
    """Of several TP ranks. P: the way to make the followers write. Both: to make them look at their pages."""
    page_sums: PageSums | None = None
    """Of the pages of all our ranks; needed where `verify_kv` is not off, and for the hashes of trace records."""
    tracer: Tracer | None = None
    """What of its rooms is traced; None in tests without."""


class Line(NamedTuple):
    """One for the log, which is not written under a lock."""

    level: int
    text: str
    values: tuple[object, ...]
    request_id: str
    """Empty: it is about none, or about several."""


class TransferOutbox:
    """Filled under the owner's lock; `take` under it too; `Sendings.leave` after it."""

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
        """Take back what the step thread has not polled of a room, but RELEASED; returns the kinds that waited."""
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
