"""What both sides of the transfer have: settings, memory, context, and the outbox that keeps locks short.

`TransferOutbox` collects frames, log lines and the request to wake the step thread while a side holds its lock. They
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
from chitu.kv_transfer.layout import MetadataBuffers, PagedMemory
from chitu.kv_transfer.peer_view import PidAlive, pid_alive
from chitu.kv_transfer.transfer_table import Send, TransferEvent, TransferEventKind, Wake
from chitu.kv_transfer.transports.transport import SendFrame, Transport
from chitu.log import about
from chitu.protocol import KVLayout, TransportSession, encode
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
    """Timeout of one write; a peer that takes longer is suspended until its writes are fenced."""
    fence_timeout_s: float = 0.02
    """Timeout of one fence attempt, which occupies a transfer thread; repeated every `retry_interval_s`, one per D."""
    max_batch_bytes: int = 16 << 20
    """Most KV bytes of one write (one layer of a chunk is never split)."""
    verify_kv: VerifyKV = "off"
    """KV pages that are verified, on both sides: P sends their checksums, D requires them."""

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_size)


@dataclass(slots=True, frozen=True)
class OwnMemory:
    """The memory of this rank that transfers read or write, and how they reach it."""

    pool: PagedMemory
    aux: MetadataBuffers
    transports: list[Transport]
    """Transports in order of preference. Those that cannot register the memory leave the list."""
    page_sums: PageSums | None = None
    """Checksums of the pages of all our ranks; for `verify_kv` (unless it is off) and the hashes of trace records."""
    sessions: Sequence[TransportSession] = ()
    """Sessions of the transports that could register the memory (`registered`)."""


@dataclass(slots=True, frozen=True)
class TransferContext:
    """What a side of the transfer reaches of its process."""

    link: SendFrame
    wake: Wake
    clock: Clock
    tracer: Tracer | None = None
    """Tracer of its rooms; None in tests without tracing."""
    is_pid_alive: PidAlive = pid_alive


class Line(NamedTuple):
    """A line for the log, which is not written under a lock."""

    level: int
    text: str
    values: tuple[object, ...]
    request_id: str
    """Request that the line is about; empty if none, or several."""


class TransferOutbox:
    """Frames, log lines and events of a role. `put` to `drain` are called under its lock, `leave` after it."""

    def __init__(self, context: TransferContext, logger: logging.Logger) -> None:
        self._link, self._wake = context.link, context.wake
        self._logger = logger
        self._leaving: list[Send | Line | TransferEvent] = []
        self._events: list[TransferEvent] = []

    def put(self, effect: Send | Line | TransferEvent) -> None:
        self._leaving.append(effect)
        if isinstance(effect, TransferEvent):
            self._events.append(effect)

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

    def drain(self) -> list[Send | Line | TransferEvent]:
        leaving, self._leaving = self._leaving, []
        return leaving

    def leave(self, leaving: list[Send | Line | TransferEvent]) -> None:
        """Send the frames, write the lines, and wake the step thread if it has events to poll."""
        for effect in leaving:
            if isinstance(effect, Send):
                self._link(effect.host, effect.port, effect.room, encode(effect.message))
            elif isinstance(effect, Line):
                self._logger.log(effect.level, effect.text, *effect.values, extra=about(effect.request_id))
        if any(isinstance(effect, TransferEvent) for effect in leaving):
            self._wake()
