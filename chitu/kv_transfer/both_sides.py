"""What both sides of a transfer share: settings, memory, context, events, the outbox, and the table room -> state.

`TransferOutbox` collects frames, log lines and the request to wake the step thread while a side holds its lock. They
leave after the lock was released, so no lock is ever held across `send_frame`, `wake`, logging or a transport.

`TransferTable.apply(room, event)` is the only writer of a room's state; the tables of `sender.py` and `receiver.py`
decide. A side calls it under its lock. Invariants: an event that the state has no transition for changes nothing (so
terminal states absorb late frames); no state is entered without its deadline, which bounds silence: it begins anew with
each state, and with `advance`, so a slow peer has time and a silent one does not; a room that ended leaves a tombstone,
and only `apply` on a room without one can create an entry. Tombstones are bounded: the oldest is evicted first, long
after the last frame of its room could arrive.

Invariants of the tables (`test/unit/test_states.py` checks them): a room that succeeded never fails, and the other way
round; from every state a terminal one can be reached; every state that is not terminal has a deadline by the clock or
waits for an event that the protocol repeats until it comes; a state with a deadline has a text for what it waits for,
which its error quotes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Generic, NamedTuple, TypeVar

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import ChituError, TransferStalled, TransferTimeout
from chitu.kv_cache.state_sums import StateSeals
from chitu.kv_transfer.layout import MetadataBuffers, PagedMemory, PageSums, VerifyKV
from chitu.kv_transfer.transports.transport import SendFrame, Transport
from chitu.log import about
from chitu.net.process_deaths import PidAlive, pid_alive
from chitu.protocol import PROTOCOL_VERSION, KVLayout, TransferSums, TransportSession, Wire, encode_for
from chitu.protocol.account import NO_TIMES, PrefillTimes
from chitu.tracing.tracer import Tracer
from chitu.types import Role, waited_text

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
T = TypeVar("T")
MAX_TOMBSTONES = 100_000
NEVER_S = float("inf")
TICK_INTERVAL_S = 0.02
"""Shortest time between two checks of a role's deadlines, however often the comm thread calls `tick`."""


class TransferEventKind(Enum):
    ANNOUNCED = auto()
    """P: TransferInfo came; the room's pages on D are reserved, so what is computed now can always be delivered."""
    LOGITS_READY = auto()
    """D: the aux row is complete; token 1 can be sampled. It is verified, too, unless the step that samples is to do
    that. Always before SUCCESS, which waits for the check."""
    SUCCESS = auto()
    """P: everything was written. D: KV is here; the pages and the aux slot belong to the request again."""
    FAILED = auto()
    """The room failed, with `error` as the cause. Its pages stay quarantined until RELEASED."""
    RELEASED = auto()
    """After FAILED or `abort`: nothing reads (P) or writes (D) the room's pages and aux slot any more."""


@dataclass(slots=True, frozen=True)
class TransferEvent:
    kind: TransferEventKind
    room: bytes
    error: ChituError | None = None
    """Cause of a FAILED event; None for every other kind."""
    kv_bytes: int = 0
    """Bytes moved (KV and logits), with SUCCESS."""
    saved_bytes: int = 0
    """KV bytes of the prompt that D had already, with SUCCESS on D."""
    times: PrefillTimes = NO_TIMES
    """Durations on P, with SUCCESS on D."""
    cached_tokens: int = 0
    """Prompt tokens that P did not have to compute, with LOGITS_READY on D."""
    prompt_logprobs: bytes | None = None
    """Logprobs of the prompt, with SUCCESS on D, if they were requested."""
    sums: TransferSums | None = None
    """Checksums of the pages on both sides, with SUCCESS on D, if they were requested."""
    is_uncached: bool = False
    """Whether the prompt must not be cached, with SUCCESS on D."""


class Aborted(NamedTuple):
    """The scheduler aborts a room (either machine). Only RELEASED follows; events that were not polled yet are dropped.
    D emits one more RELEASED, at once, for an unknown room."""

    room: bytes
    error: ChituError


class ViewChanged(NamedTuple):
    """The members of `PeerView` changed, or one was seen to end (either machine)."""


class Tick(NamedTuple):
    """Time has passed (either machine)."""


def timeout_of(text: str, has_advanced: bool) -> ChituError:
    """Return the error of a room that did not advance for `transfer_s`. If it had advanced before, P or the link may
    only be slow: no circuit breaker counts that."""
    text += " (deadlines.transfer_s)"
    return TransferStalled(f"{text}; it had advanced before") if has_advanced else TransferTimeout(text)


class DropEvents(NamedTuple):
    """Drop the events of a room that the step thread has not polled, except RELEASED (either machine). P emits RELEASED
    if SUCCESS was among them."""

    room: bytes


class Send(NamedTuple):
    """Send a frame (either machine)."""

    host: str
    port: int
    room: bytes
    message: Wire


Wake = Callable[[], None]
"""Function that wakes the step thread after an event was queued. Any thread, never blocks."""


class Deadline(Enum):
    """What ends a stay in a state if nothing else does, and nothing advances."""

    BOOTSTRAP = auto()
    """P: `queue_s + bootstrap_s` (D may wait that long for pages before it announces). D: `bootstrap_s`."""
    TRANSFER = auto()
    """`transfer_s` in which nothing of the room, or of what comes before it, is computed, written or checked."""
    REPEAT = auto()
    """`transfer_s` of repeating a status without an acknowledgement; then the room is forgotten."""
    HANDSHAKE = auto()
    """No clock: time alone must never free memory that a peer may touch. Left when the writer has stopped."""
    TERMINAL = auto()
    """Nothing more to wait for; the entry is dropped and only its tombstone is kept."""


NO_CLOCK: Final = frozenset({Deadline.HANDSHAKE, Deadline.TERMINAL})
"""Deadlines that no clock ends."""


def edges(sources: Iterable[S], events: Iterable[E], target: S) -> dict[tuple[S | None, E], S]:
    """Return rows of a table: each of these events leads from each of these states to `target`."""
    causes = tuple(events)
    return {(source, event): target for source in sources for event in causes}


@dataclass(slots=True)
class Entry(Generic[S, T]):
    """A live room. `data` is the owner's record; only `TransferTable.apply` writes the state."""

    state: S
    data: T
    since_s: float
    """Time (monotonic seconds) at which the room entered this state, or advanced last in it."""
    deadline_s: float
    """Time at which the owner applies its DEADLINE event."""


@dataclass(slots=True, frozen=True)
class Tombstone:
    """What is remembered of a room that ended."""

    code: str
    """Error code; empty if the room succeeded."""
    message: str


@dataclass(slots=True)
class TransferTable(Generic[S, E, T]):
    transitions: Mapping[tuple[S | None, E], S]
    deadlines: Mapping[S, Deadline]
    limits_s: Mapping[Deadline, float]
    """Length of every deadline in `deadlines` that a clock ends."""
    max_tombstones: int = MAX_TOMBSTONES
    _entries: dict[bytes, Entry[S, T]] = field(default_factory=dict)
    _tombstones: OrderedDict[bytes, Tombstone] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, room: bytes) -> Entry[S, T] | None:
        return self._entries.get(room)

    def tombstone(self, room: bytes) -> Tombstone | None:
        return self._tombstones.get(room)

    def items(self) -> Iterator[tuple[bytes, Entry[S, T]]]:
        """Return a snapshot, so that the caller may apply events while it iterates."""
        return iter(list(self._entries.items()))

    def apply(self, room: bytes, event: E, now_s: float, new: T | None = None) -> tuple[S | None, Entry[S, T]] | None:
        """Apply one event. Return the state before it and the room; None if it is absorbed. `new` is the record of a
        room that this event may create."""
        entry = self._entries.get(room)
        before = entry.state if entry is not None else None
        target = self.transitions.get((before, event))
        if target is None:
            return None
        if entry is None:
            if new is None or room in self._tombstones:
                return None
            entry = self._entries[room] = Entry(target, new, NEVER_S, NEVER_S)
        entry.state = target
        self.advance(entry, now_s)
        return before, entry

    def advance(self, entry: Entry[S, T], now_s: float) -> None:
        """Begin the deadline of the room's state anew: what the room waits for is slow, and not silent."""
        entry.since_s = now_s
        entry.deadline_s = now_s + self.limits_s.get(self.deadlines[entry.state], NEVER_S)

    def overdue_text(self, entry: Entry[S, T], who: str, peer: str, awaits: Mapping[S, str], now_s: float) -> str:
        """Return why a room whose deadline passed ends: state, peer, seconds. `awaits`: what is missing, by state."""
        return waited_text(who, now_s - entry.since_s, entry.state, awaits[entry.state].format(peer=peer))

    def bury(self, room: bytes, tombstone: Tombstone) -> None:
        """Drop the entry (if any) and remember the room, so that no late frame brings it back."""
        self._entries.pop(room, None)
        self._tombstones[room] = tombstone
        self._tombstones.move_to_end(room)
        while len(self._tombstones) > self.max_tombstones:
            self._tombstones.popitem(last=False)

    def expired(self, now_s: float) -> list[bytes]:
        """Return the rooms whose deadline has passed."""
        return [room for room, entry in self._entries.items() if entry.deadline_s <= now_s]


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
    """Most KV bytes of one write, unless the transport is fast (one layer of a chunk is never split)."""
    verify_kv: VerifyKV = "off"
    """KV pages that are verified, on both sides: P sends their checksums, D requires them."""
    writer: Role = Role.PREFILL
    """Role of the side that writes. An E writes rows of features as P writes pages, and P is then the D."""
    reader: Role = Role.DECODE
    """Role of the side whose memory is written."""
    other_readers: tuple[Role, ...] = ()
    """More roles of that side: an E writes to instances of several."""

    @property
    def progress_interval_s(self) -> float:
        """Shortest time between two reports of P that a room advances: ten within the silence that D bears. Of an E:
        five within that which P bears (`instance/image_pulls.py`)."""
        silence_s = self.deadlines.transfer_s
        if self.writer is Role.ENCODE:
            silence_s = min(silence_s, self.deadlines.bootstrap_s)
        return silence_s / 10

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_size)

    def has_state(self, num_pages: int) -> bool:
        """Return whether a room gets a state row, too, if D wants this many pages of it."""
        return bool(self.layout.state) and num_pages > 0


@dataclass(slots=True, frozen=True)
class OwnMemory:
    """The memory of this rank that transfers read or write, and how they reach it."""

    pool: PagedMemory
    aux: MetadataBuffers
    transports: list[Transport]
    """Transports in order of preference. Those that cannot register the memory leave the list."""
    page_sums: PageSums | None = None
    """Checksums of the pages of all our ranks; for `verify_kv` (unless it is off) and the hashes of trace records."""
    state_seals: StateSeals | None = None
    """Seals of the state rows of all our ranks; None if the layout has no state."""
    sessions: Sequence[TransportSession] = ()
    """Sessions of the transports that could register the memory (`registered`)."""


@dataclass(slots=True, frozen=True)
class TransferContext:
    """What a side of the transfer reaches of its process."""

    send_frame: SendFrame
    wake: Wake
    clock: Clock
    tracer: Tracer | None = None
    """Tracer of its rooms; None in tests without tracing."""
    version_of: Callable[[str, int], int] = lambda host, port: PROTOCOL_VERSION
    """Returns the version of the wire that the peer with this control port reads."""
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
        self._send_frame, self._wake, self._version_of = context.send_frame, context.wake, context.version_of
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
        """Send the frames, wake the step thread if it has events to poll, and then write the lines, for which nobody
        waits."""
        for effect in leaving:
            if isinstance(effect, Send):
                frame = encode_for(self._version_of(effect.host, effect.port), effect.message)
                self._send_frame(effect.host, effect.port, effect.room, frame)
        if any(isinstance(effect, TransferEvent) for effect in leaving):
            self._wake()
        for effect in leaving:
            if isinstance(effect, Line):
                self._logger.log(effect.level, effect.text, *effect.values, extra=about(effect.request_id))
