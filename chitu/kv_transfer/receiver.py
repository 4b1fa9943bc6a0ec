"""D's side of the transfer protocol as a pure state machine: it takes events and the time, and returns effects.

Here are its states, its table, its events, effects and records. `DecodeReceiver` owns the machine, guards it with its
lock, makes the events and carries out the effects in their order. The machine contains no thread, socket, lock, clock
or logger, and reads only the stored state of `PeerView`. `_apply` is the only way to move a room, by
`RECEIVER_TRANSITIONS`, and `_enter` does what each state requires on entry; a (state, event) pair that the table does
not have changes nothing. Invariants: LOGITS_READY, SUCCESS, FAILED and RELEASED come once per room; a room that was
announced to P is RELEASED only when its writer is known to have stopped (QUARANTINED has no deadline and repeats
AbortTransfer).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, Union

from chitu import log
from chitu.errors import (
    BadFrame,
    BootstrapTimeout,
    ChituError,
    Integrity,
    Internal,
    PrefillLost,
    TransferFailed,
    from_code,
)
from chitu.kv_cache.state_row import StateStamp
from chitu.kv_transfer.both_sides import (
    NEVER_S,
    Aborted,
    Deadline,
    DropEvents,
    Entry,
    KVManagerConfig,
    Line,
    Send,
    Tick,
    Tombstone,
    TransferEvent,
    TransferTable,
    ViewChanged,
    edges,
    timeout_of,
)
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.peers import PeerView, PrefillDirectory, RegistrationState
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    KVArgsRegisterInfo,
    PeerMessage,
    RegisterReply,
    StatusAck,
    TransferInfo,
    TransferProgress,
    TransferStatus,
    TransferSums,
    TransportMessage,
)
from chitu.protocol.peer import KVPoll
from chitu.types import REGISTRATION_ROOM, instance_name, room_text


class ReceiverState(Enum):
    BOOTSTRAPPING = auto()
    """Announced by the scheduler; P does not have D's registration yet, so it was not sent the pages."""
    WAITING = auto()
    """TransferInfo was sent (and is repeated until P's first message about the room)."""
    CHECKING = auto()
    """P reported that the aux row is here; D verifies it."""
    LOGITS = auto()
    """The aux row is here and verified; KV is in flight."""
    WRITTEN = auto()
    """P reported Success: it writes nothing here any more, whatever becomes of the room. D verifies the aux row
    first."""
    VERIFYING = auto()
    """As WRITTEN, and the aux row is verified; D verifies the KV (`verify_kv`)."""
    SUCCEEDED = auto()
    """All bytes are here; the pages belong to the request again."""
    QUARANTINED = auto()
    """Failed; P may still write. AbortTransfer is repeated until P acknowledges that it stopped, or is known dead."""
    RELEASED = auto()
    """Failed, and P cannot write the pages any more."""


class ReceiverEvent(Enum):
    ANNOUNCE = auto()
    SENT = auto()
    """P acknowledged D's registration, and TransferInfo is sent."""
    ROW_SENT = auto()
    """P sent AuxReady."""
    LOGITS = auto()
    """The aux row is correct."""
    SUCCESS = auto()
    """P wrote its last byte, as many as were announced."""
    VERIFIED = auto()
    """The KV is correct."""
    ABORT = auto()
    """D's own scheduler gave the room up."""
    PEER_FAILED = auto()
    """P gave the room up and may still write, or it refused the registration."""
    STOPPED = auto()
    """P has stopped for good and D does not have all: AbortAck, a settled Failed, Success with other bytes."""
    PEER_LOST = auto()
    """P's incarnation left the cluster view or was replaced."""
    CORRUPT = auto()
    """The aux row or verified KV is not what P computed."""
    DEADLINE = auto()
    WRITER_DEAD = auto()
    """The writer's process is dead and none of D's own transports writes for it."""


S = ReceiverState
E = ReceiverEvent

RECEIVER_OWN_FAILURES: Final = frozenset({E.ABORT, E.CORRUPT, E.DEADLINE})
"""Failures that can end a room after P's Success: P cannot take back what it has written."""
RECEIVER_FAILURES: Final = RECEIVER_OWN_FAILURES | {E.PEER_FAILED, E.PEER_LOST}
_WRITTEN_TO: Final = (S.WAITING, S.CHECKING, S.LOGITS)

RECEIVER_TRANSITIONS: Final[Mapping[tuple[ReceiverState | None, ReceiverEvent], ReceiverState]] = {
    (None, E.ANNOUNCE): S.BOOTSTRAPPING,
    (S.BOOTSTRAPPING, E.SENT): S.WAITING,
    (S.WAITING, E.ROW_SENT): S.CHECKING,
    (S.CHECKING, E.LOGITS): S.LOGITS,
    **edges((S.WAITING, S.CHECKING), (E.SUCCESS,), S.WRITTEN),
    (S.WRITTEN, E.LOGITS): S.VERIFYING,
    (S.LOGITS, E.SUCCESS): S.VERIFYING,
    (S.VERIFYING, E.VERIFIED): S.SUCCEEDED,
    **edges((S.BOOTSTRAPPING,), RECEIVER_FAILURES, S.RELEASED),
    **edges(_WRITTEN_TO, RECEIVER_FAILURES, S.QUARANTINED),
    **edges(_WRITTEN_TO, (E.STOPPED,), S.RELEASED),
    **edges((S.WRITTEN, S.VERIFYING), RECEIVER_OWN_FAILURES, S.RELEASED),
    **edges(
        (S.QUARANTINED,),
        (E.STOPPED, E.SUCCESS, E.WRITER_DEAD),
        S.RELEASED,
    ),
}
"""(state, event) -> next state; a pair that is not here is absorbed. `None`: the room is unknown."""

RECEIVER_DEADLINES: Final[Mapping[ReceiverState, Deadline]] = {
    S.BOOTSTRAPPING: Deadline.BOOTSTRAP,
    S.WAITING: Deadline.TRANSFER,
    S.CHECKING: Deadline.TRANSFER,
    S.LOGITS: Deadline.TRANSFER,
    S.WRITTEN: Deadline.TRANSFER,
    S.VERIFYING: Deadline.TRANSFER,
    S.SUCCEEDED: Deadline.TERMINAL,
    S.QUARANTINED: Deadline.HANDSHAKE,
    S.RELEASED: Deadline.TERMINAL,
}

RECEIVER_AWAITS: Final[Mapping[ReceiverState, str]] = {
    S.BOOTSTRAPPING: "{peer} to accept its registration",
    S.WAITING: "{peer}'s logits",
    S.CHECKING: "its check of {peer}'s logits row",
    S.LOGITS: "{peer}'s last KV",
    S.WRITTEN: "its check of {peer}'s logits row",
    S.VERIFYING: "its check of {peer}'s KV",
}


@dataclass(slots=True)
class ReceiveRoom:
    """D's record of a room. Nothing here decides: the room's state does."""

    request_id: str
    info: TransferInfo
    aux_slot: int
    expected_bytes: int
    saved_bytes: int
    """Bytes of the pages that P does not write because D has them."""
    prefill_rank: int
    prefill_incarnation: int
    host: str = ""
    """P's address, kept by the room: the abort handshake outlives P's entry in the directory."""
    port: int = 0
    cached_tokens: int = 0
    """Prompt tokens that P did not have to compute; known with the logits row."""
    status: TransferStatus | None = None
    """P's Success status."""
    num_advances: int = 0
    """How often it has advanced on P, by P's word."""
    repeat_due_s: float = NEVER_S
    error: ChituError | None = None
    is_traced: bool = False
    """True if checksums of its pages are computed for a trace record, whatever `verify_kv` is."""
    sums: TransferSums | None = None
    """Checksums of its pages on both sides, if the request asked for them."""
    state: StateStamp | None = None
    """Tokens that its state must have taken in; None without a state row."""
    is_drawn_unchecked: bool = False
    """Whether the step that draws its first token checks the row (`RowChecked` is then the scheduler's): LOGITS_READY
    comes with the row."""


# --------------------------------------------------------------------------------------------------------------- events


class Announced(NamedTuple):
    """D's scheduler announced a room."""

    room: bytes
    record: ReceiveRoom


class Received(NamedTuple):
    """A P sent a frame."""

    room: bytes
    message: PeerMessage


class RowChecked(NamedTuple):
    """Answer to `CheckRow`, or what a step found that drew from the row."""

    room: bytes
    error: ChituError | None
    cached_tokens: int = 0


class PagesChecked(NamedTuple):
    """Answer to `CheckPages`. `sums`: checksums of both sides, if the request asked for them."""

    room: bytes
    error: ChituError | None
    sums: TransferSums | None = None


class WriterDead(NamedTuple):
    """Nothing of this P writes any more, and none of our own transports writes for it."""

    incarnation: int


Event = Union[Announced, Aborted, Received, RowChecked, PagesChecked, ViewChanged, WriterDead, Tick]

# -------------------------------------------------------------------------------------------------------------- effects


class CheckRow(NamedTuple):
    """Verify the logits row."""

    room: bytes
    aux_slot: int


class CheckPages(NamedTuple):
    """Verify the pages and the state row against P's checksums."""

    room: bytes
    info: TransferInfo
    status: TransferStatus
    state: StateStamp | None = None
    """As in `ReceiveRoom`."""


class Deliver(NamedTuple):
    """Deliver a message to our own transport."""

    prefill_rank: int
    message: TransportMessage


Effect = Union[Send, TransferEvent, Line, DropEvents, CheckRow, CheckPages, Deliver]


ReceiveEntry = Entry[ReceiverState, ReceiveRoom]


class ReceiverMachine:
    """State machine of all rooms of one D. `registration`: what this instance sends to every P."""

    def __init__(self, config: KVManagerConfig, registration: KVArgsRegisterInfo, view: PeerView) -> None:
        self.prefills = PrefillDirectory(registration, config.deadlines.retry_interval_s, view, config.writer)
        self._incarnation = config.incarnation
        self._verifies_kv = config.verify_kv != "off"
        self._retry_interval_s = config.deadlines.retry_interval_s
        self._view = view
        self._name = instance_name(config.reader, config.engine_rank)
        self._writer = config.writer
        limits_s = {
            Deadline.BOOTSTRAP: config.deadlines.bootstrap_s,
            Deadline.TRANSFER: config.deadlines.transfer_s,
        }
        self.table: TransferTable[ReceiverState, ReceiverEvent, ReceiveRoom] = TransferTable(
            RECEIVER_TRANSITIONS, RECEIVER_DEADLINES, limits_s
        )
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self.bytes_moved = 0
        self.stale_frames = 0
        """Number of frames from incarnations that are gone or are not the writer of their room."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. Raises BadFrame for a frame that no P sends to
        a D, and ValueError for a second announcement of a live room; neither changes a room."""
        self._now_s, self._effects = now_s, []
        match event:
            case Announced(room, record):
                self._announce(room, record)
            case Aborted(room, error):
                self._abort(room, error)
            case Received(room, message):
                self._receive(room, message)
            case RowChecked(room, error, cached_tokens):
                self._row_checked(room, error, cached_tokens)
            case PagesChecked(room, error, sums):
                self._pages_checked(room, error, sums)
            case ViewChanged():
                self._effects += self.prefills.on_view(now_s)
                self._fail_lost()
            case WriterDead(incarnation):
                for room, entry in self.table.items():
                    if entry.data.prefill_incarnation == incarnation:
                        self._apply(room, E.WRITER_DEAD)
            case Tick():
                self._tick()
        return self._effects

    # --------------------------------------------------------------------------------------------------------- look-ups

    def quarantined_writers(self) -> set[tuple[int, int]]:
        """Return (engine_rank, incarnation) of every P that quarantined pages wait for."""
        return {
            (entry.data.prefill_rank, entry.data.prefill_incarnation)
            for _, entry in self.table.items()
            if entry.state is S.QUARANTINED
        }

    # ------------------------------------------------------------------------------------------------ state transitions

    def _apply(
        self,
        room: bytes,
        event: ReceiverEvent,
        error: ChituError | None = None,
        new: ReceiveRoom | None = None,
    ) -> bool:
        """Apply an event to a room: the only way to change it. `error`: why it ends. Return False if it is absorbed."""
        applied = self.table.apply(room, event, self._now_s, new)
        if applied is None:
            return False
        before, entry = applied
        record = entry.data
        if error is not None and record.error is None:
            record.error = error
            if event is not E.ABORT:
                self._emit(Kind.FAILED, room, error)
        self._enter(room, record, before, entry.state)
        return True

    def _enter(self, room: bytes, record: ReceiveRoom, before: ReceiverState | None, state: ReceiverState) -> None:
        """Do what the room's new state requires on entry."""
        if state is S.WAITING:
            self._send_repeated(room, record, record.info)
        elif state is S.CHECKING or (state is S.WRITTEN and before is not S.CHECKING):
            if record.is_drawn_unchecked:
                self._effects.append(TransferEvent(Kind.LOGITS_READY, room))
            else:
                self._effects.append(CheckRow(room, record.aux_slot))
        elif state in (S.LOGITS, S.VERIFYING):
            if before is not S.LOGITS and not record.is_drawn_unchecked:
                self._effects.append(TransferEvent(Kind.LOGITS_READY, room, cached_tokens=record.cached_tokens))
            if state is S.VERIFYING:
                self._verify(room, record)
        elif state is S.SUCCEEDED:
            self._succeed(room, record)
        elif state is S.QUARANTINED:
            self._send_abort(room, record)
        elif state is S.RELEASED:
            assert record.error is not None
            self._emit(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(record.error.code, record.error.message))

    def _verify(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.status is not None
        is_summed = record.is_traced or record.info.page_sums
        if self._verifies_kv or record.state is not None or (is_summed and record.status.kv_sums is not None):
            self._effects.append(CheckPages(room, record.info, record.status, record.state))
        else:
            self._apply(room, E.VERIFIED)

    def _succeed(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.status is not None
        self.bytes_moved += record.expected_bytes
        self._effects.append(Line(logging.INFO, log.RECEIVED_KV, (record.request_id,), record.request_id))
        event = TransferEvent(
            Kind.SUCCESS,
            room,
            kv_bytes=record.expected_bytes,
            saved_bytes=record.saved_bytes,
            times=record.status.times,
            prompt_logprobs=record.status.prompt_logprobs,
            sums=record.sums,
            is_uncached=record.status.uncached,
        )
        self._effects.append(event)
        self.table.bury(room, Tombstone("", ""))

    # ----------------------------------------------------------------------------------------------- from the scheduler

    def _announce(self, room: bytes, record: ReceiveRoom) -> None:
        if self.table.tombstone(room) is not None:
            error = Internal("this room ended already")
            self._emit(Kind.FAILED, room, error)
            self._emit(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(error.code, error.message))
        elif not self._apply(room, E.ANNOUNCE, new=record):
            raise ValueError(f"room {room_text(room)} was announced already")
        elif self._view.is_lost(record.prefill_rank, record.prefill_incarnation):
            self._apply(room, E.PEER_LOST, PrefillLost(f"{self._name_of(record.prefill_rank)} is gone"))
        else:
            self._offer(room, record)

    def _abort(self, room: bytes, error: ChituError) -> None:
        self._effects.append(DropEvents(room))
        tombstone = self.table.tombstone(room)
        if self.table.get(room) is not None:
            self._apply(room, E.ABORT, error)
        elif tombstone is None:
            self._emit(Kind.RELEASED, room)
        elif not tombstone.code:  # it succeeded: report RELEASED once, not at every call
            self._emit(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(error.code, error.message))

    def _offer(self, room: bytes, record: ReceiveRoom) -> None:
        """Send a room's TransferInfo if P accepted our registration; fail the room if P refused it."""
        peer = self.prefills.peer(record.prefill_rank, record.prefill_incarnation)
        if peer is not None and peer.state is RegistrationState.REFUSED:
            self._apply(room, E.PEER_FAILED, peer.refusal)
        elif peer is not None and peer.state is RegistrationState.ACCEPTED:
            record.host, record.port = peer.host, peer.port
            self._apply(room, E.SENT)

    # ------------------------------------------------------------------------------------------------------ frames of P

    def _receive(self, room: bytes, message: object) -> None:
        if isinstance(message, RegisterReply):
            if room != REGISTRATION_ROOM:
                raise BadFrame(f"a registration reply in room {room_text(room)}")
            self.prefills.on_frame(message.incarnation, self._now_s)
            self._on_reply(message)
        elif isinstance(message, TransportMessage):
            self.prefills.on_frame(message.incarnation, self._now_s)
            self._on_transport_message(message)
        elif len(room) != 16 or room == REGISTRATION_ROOM:
            raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
        elif isinstance(message, TransferStatus) and message.poll not in (KVPoll.Success, KVPoll.Failed):
            raise BadFrame(f"a status with poll {message.poll}")
        elif isinstance(message, AuxReady | TransferProgress | TransferStatus | AbortAck | AbortTransfer):
            self.prefills.on_frame(message.incarnation, self._now_s)
            self._on_room_message(room, message)
        else:
            raise BadFrame(f"a {type(message).__name__} sent to D")

    def _on_room_message(
        self, room: bytes, message: AuxReady | TransferProgress | TransferStatus | AbortAck | AbortTransfer
    ) -> None:
        entry = self.table.get(room)
        if isinstance(message, TransferStatus):  # also for forgotten rooms: P repeats it until acknowledged
            address = (entry.data.host, entry.data.port) if entry is not None and entry.data.port else None
            if address := address or self.prefills.address_of(message.incarnation):
                self._effects.append(Send(*address, room, StatusAck(self._incarnation, message.poll)))
        if entry is None:
            return
        record = entry.data
        if record.prefill_incarnation != message.incarnation or entry.state is S.BOOTSTRAPPING:
            self.stale_frames += 1
        elif isinstance(message, AuxReady):
            self._apply(room, E.ROW_SENT)
        elif isinstance(message, TransferProgress):
            if message.number > record.num_advances and entry.state in _WRITTEN_TO:
                record.num_advances = message.number
                self.table.advance(entry, self._now_s)
        elif isinstance(message, AbortAck):
            # P stopped for good, so a room that still waits has failed; its Failed status was lost or is late.
            self._apply(room, E.STOPPED, TransferFailed("P stopped writing"))
        elif isinstance(message, AbortTransfer):
            self._effects.append(Send(record.host, record.port, room, AbortAck(self._incarnation)))
            self._apply(room, E.PEER_FAILED, from_code(message.code, message.message))
        elif message.poll == KVPoll.Failed:
            event = E.STOPPED if message.settled else E.PEER_FAILED
            self._apply(room, event, from_code(message.code, message.message))
        elif (moved_bytes := sum(message.bytes_per_rank)) != record.expected_bytes:
            text = f"P moved {moved_bytes} bytes, {record.expected_bytes} were expected"
            self._apply(room, E.STOPPED, Integrity(text))
        else:
            record.status = record.status or message  # a later one is a repeat
            self._apply(room, E.SUCCESS)

    def _on_reply(self, message: RegisterReply) -> None:
        """Take P's answer to the registration: announce the rooms that wait for it, or fail them."""
        peer = self.prefills.peer(message.engine_rank, message.incarnation)
        if peer is None or message.peer_incarnation != self._incarnation:
            self.stale_frames += 1
            return
        self._effects += self.prefills.on_reply(peer, message, self._now_s)
        for room, entry in self.table.items():
            if entry.state is S.BOOTSTRAPPING:
                self._offer(room, entry.data)

    def _on_transport_message(self, message: TransportMessage) -> None:
        rank = self.prefills.rank_of(message.incarnation)
        if rank is not None:
            self._effects.append(Deliver(rank, message))
        else:
            self.stale_frames += 1

    # ------------------------------------------------------------------------------------------------ results of checks

    def _row_checked(self, room: bytes, error: ChituError | None, cached_tokens: int) -> None:
        entry = self.table.get(room)
        if error is not None:
            self._apply(room, E.CORRUPT, error)
        elif entry is not None:
            entry.data.cached_tokens = cached_tokens
            self._apply(room, E.LOGITS)

    def _pages_checked(self, room: bytes, error: ChituError | None, sums: TransferSums | None) -> None:
        entry = self.table.get(room)
        for _, other in self.table.items():  # one thread checks one room after the other
            if other.state is S.VERIFYING:
                self.table.advance(other, self._now_s)
        if error is None:
            if entry is not None:
                entry.data.sums = sums
            self._apply(room, E.VERIFIED)
        elif entry is not None and self._apply(room, E.CORRUPT, error):
            record = entry.data
            values = (self._name, self._name_of(record.prefill_rank), record.request_id, error.message)
            text = "%s rejects the data of %s for %s: %s"
            self._effects.append(Line(logging.ERROR, text, values, record.request_id))

    # --------------------------------------------------------------------------------------------------- timers; lost P

    def _tick(self) -> None:
        """Apply deadlines and send what is due again."""
        self._effects += self.prefills.tick(self._now_s)
        for room in self.table.expired(self._now_s):
            self._expire(room)
        for room, entry in self.table.items():
            if entry.data.repeat_due_s <= self._now_s:
                self._repeat(room, entry)

    def _expire(self, room: bytes) -> None:
        entry = self.table.get(room)
        assert entry is not None
        peer = self._name_of(entry.data.prefill_rank)
        text = self.table.overdue_text(entry, self._name, peer, RECEIVER_AWAITS, self._now_s)
        is_first = entry.state is S.BOOTSTRAPPING
        error = BootstrapTimeout(text) if is_first else timeout_of(text, entry.data.num_advances > 0)
        self._apply(room, E.DEADLINE, error)

    def _repeat(self, room: bytes, entry: ReceiveEntry) -> None:
        """Repeat the unanswered messages to P. Unless the room is quarantined, also probe P with the registration."""
        record = entry.data
        if entry.state is S.QUARANTINED:
            self._send_abort(room, record)
            return
        if entry.state is S.WAITING and not record.num_advances:
            self._send_repeated(room, record, record.info)
        record.repeat_due_s = self._now_s + self._retry_interval_s
        self._effects += self.prefills.probe(record.prefill_rank, record.prefill_incarnation, self._now_s)

    def _fail_lost(self) -> None:
        """Fail the rooms whose P left the view or was replaced. Their pages stay quarantined: P may only be frozen."""
        for room, entry in self.table.items():
            rank = entry.data.prefill_rank
            if self._view.is_lost(rank, entry.data.prefill_incarnation):
                self._apply(room, E.PEER_LOST, PrefillLost(f"{self._name_of(rank)} is gone"))

    # --------------------------------------------------------------------------------------------------------- outgoing

    def _name_of(self, rank: int) -> str:
        return instance_name(self._writer, rank)

    def _emit(self, kind: Kind, room: bytes, error: ChituError | None = None) -> None:
        self._effects.append(TransferEvent(kind, room, error))

    def _send_abort(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.error is not None
        self._send_repeated(room, record, AbortTransfer(self._incarnation, record.error.code, record.error.message))

    def _send_repeated(self, room: bytes, record: ReceiveRoom, message: TransferInfo | AbortTransfer) -> None:
        record.repeat_due_s = self._now_s + self._retry_interval_s
        self._effects.append(Send(record.host, record.port, room, message))
