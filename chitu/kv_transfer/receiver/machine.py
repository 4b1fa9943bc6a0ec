"""D's side of the transfer protocol as a pure state machine: it takes events and the time, and returns effects.

`DecodeReceiver` owns it and guards it with its lock. It contains no thread, socket, lock, clock or logger. It reads
only the stored state of `PeerView`; its owner probes pids. `_take` is the only way to move a room, by
`RECEIVER_TRANSITIONS`, and `_enter` does what each state requires on entry; a (state, event) pair that the table does
not have changes nothing. Invariants: LOGITS_READY, SUCCESS, FAILED and RELEASED come once per room; a room that was
announced to P is RELEASED only when its writer is known to have stopped (QUARANTINED has no deadline and repeats
AbortTransfer).
"""

from __future__ import annotations

import logging

from chitu import log
from chitu.errors import (
    BadFrame,
    BootstrapTimeout,
    ChituError,
    Integrity,
    Internal,
    PrefillLost,
    TransferFailed,
    TransferTimeout,
    from_code,
)
from chitu.kv_transfer.events import Aborted, DropEvents, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.events import TransferEventKind as Kind
from chitu.kv_transfer.parts import KVManagerConfig, Line
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.receiver import events
from chitu.kv_transfer.receiver.prefill_directory import PrefillDirectory
from chitu.kv_transfer.transfer_table import Entry, Tombstone, TransferTable
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    KVArgsRegisterInfo,
    RegisterReply,
    StatusAck,
    TransferInfo,
    TransferStatus,
    TransferSums,
    TransportMessage,
)
from chitu.protocol.states import (
    RECEIVER_AWAITS,
    RECEIVER_DEADLINES,
    RECEIVER_TRANSITIONS,
    Deadline,
    KVPoll,
    ReceiverEvent,
    ReceiverState,
    RegistrationState,
)
from chitu.types import REGISTRATION_ROOM, Role, instance_name, room_text

ReceiveEntry = Entry[ReceiverState, events.ReceiveRoom]


class ReceiverMachine:
    """State machine of all rooms of one D. `registration`: what this instance sends to every P."""

    def __init__(self, config: KVManagerConfig, registration: KVArgsRegisterInfo, view: PeerView) -> None:
        self.prefills = PrefillDirectory(registration, config.deadlines.retry_interval_s, view)
        self._incarnation = config.incarnation
        self._verifies_kv = config.verify_kv != "off"
        self._retry_interval_s = config.deadlines.retry_interval_s
        self._view = view
        self._name = instance_name(Role.DECODE, config.engine_rank)
        limits_s = {
            Deadline.BOOTSTRAP: config.deadlines.bootstrap_s,
            Deadline.TRANSFER: config.deadlines.transfer_s,
        }
        self.table: TransferTable[ReceiverState, ReceiverEvent, events.ReceiveRoom] = TransferTable(
            RECEIVER_TRANSITIONS, RECEIVER_DEADLINES, limits_s
        )
        self._now_s = 0.0
        self._effects: list[events.Effect] = []
        self.bytes_moved = 0
        self.stale_frames = 0
        """Number of frames from incarnations that are gone or are not the writer of their room."""

    def handle(self, event: events.Event, now_s: float) -> list[events.Effect]:
        """Apply one event and return the effects to carry out, in order. Raises BadFrame for a frame that no P sends to
        a D, and ValueError for a second announcement of a live room; neither changes a room."""
        self._now_s, self._effects = now_s, []
        match event:
            case events.Announced(room, record):
                self._announce(room, record)
            case Aborted(room, error):
                self._abort(room, error)
            case events.Received(room, message):
                self._receive(room, message)
            case events.RowChecked(room, error, cached_tokens):
                self._row_checked(room, error, cached_tokens)
            case events.PagesChecked(room, error, sums):
                self._pages_checked(room, error, sums)
            case ViewChanged():
                self._effects += self.prefills.take_view(now_s)
                self._fail_lost()
            case events.WriterDead(incarnation):
                for room, entry in self.table.items():
                    if entry.data.prefill_incarnation == incarnation:
                        self._take(room, ReceiverEvent.WRITER_DEAD)
            case Tick():
                self._tick()
        return self._effects

    # --------------------------------------------------------------------------------------------------------- look-ups

    def quarantined_writers(self) -> set[tuple[int, int]]:
        """Return (engine_rank, incarnation) of every P that quarantined pages wait for."""
        return {
            (entry.data.prefill_rank, entry.data.prefill_incarnation)
            for _, entry in self.table.items()
            if entry.state is ReceiverState.QUARANTINED
        }

    # ------------------------------------------------------------------------------------------------ state transitions

    def _take(
        self,
        room: bytes,
        event: ReceiverEvent,
        error: ChituError | None = None,
        new: events.ReceiveRoom | None = None,
    ) -> bool:
        """Apply an event to a room: the only way to change it. `error`: why it ends. Return False if it is absorbed."""
        applied = self.table.apply(room, event, self._now_s, new)
        if applied is None:
            return False
        before, entry = applied
        record = entry.data
        if error is not None and record.error is None:
            record.error = error
            if event is not ReceiverEvent.ABORT:
                self._tell(Kind.FAILED, room, error)
        self._enter(room, record, before, entry.state)
        return True

    def _enter(
        self, room: bytes, record: events.ReceiveRoom, before: ReceiverState | None, state: ReceiverState
    ) -> None:
        """Do what the room's new state requires on entry."""
        if state is ReceiverState.WAITING:
            self._send_repeated(room, record, record.info)
        elif state is ReceiverState.CHECKING or (
            state is ReceiverState.WRITTEN and before is not ReceiverState.CHECKING
        ):
            self._effects.append(events.CheckRow(room, record.aux_slot))
        elif state in (ReceiverState.LOGITS, ReceiverState.VERIFYING):
            if before is not ReceiverState.LOGITS:
                self._effects.append(TransferEvent(Kind.LOGITS_READY, room, cached_tokens=record.cached_tokens))
            if state is ReceiverState.VERIFYING:
                self._verify(room, record)
        elif state is ReceiverState.SUCCEEDED:
            self._succeed(room, record)
        elif state is ReceiverState.QUARANTINED:
            self._send_abort(room, record)
        elif state is ReceiverState.RELEASED:
            assert record.error is not None
            self._tell(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(record.error.code, record.error.message))

    def _verify(self, room: bytes, record: events.ReceiveRoom) -> None:
        assert record.status is not None
        is_summed = record.is_traced or record.info.page_sums
        if self._verifies_kv or (is_summed and record.status.kv_sums is not None):
            self._effects.append(events.CheckPages(room, record.info, record.status))
        else:
            self._take(room, ReceiverEvent.VERIFIED)

    def _succeed(self, room: bytes, record: events.ReceiveRoom) -> None:
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
        )
        self._effects.append(event)
        self.table.bury(room, Tombstone("", ""))

    # ----------------------------------------------------------------------------------------------- from the scheduler

    def _announce(self, room: bytes, record: events.ReceiveRoom) -> None:
        if self.table.tombstone(room) is not None:
            error = Internal("this room ended already")
            self._tell(Kind.FAILED, room, error)
            self._tell(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(error.code, error.message))
        elif not self._take(room, ReceiverEvent.ANNOUNCE, new=record):
            raise ValueError(f"room {room_text(room)} was announced already")
        elif self._view.is_lost(record.prefill_rank, record.prefill_incarnation):
            self._take(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{record.prefill_rank} is gone"))
        else:
            self._offer(room, record)

    def _abort(self, room: bytes, error: ChituError) -> None:
        self._effects.append(DropEvents(room))
        tombstone = self.table.tombstone(room)
        if self.table.get(room) is not None:
            self._take(room, ReceiverEvent.ABORT, error)
        elif tombstone is None:
            self._tell(Kind.RELEASED, room)
        elif not tombstone.code:  # it succeeded: report RELEASED once, not at every call
            self._tell(Kind.RELEASED, room)
            self.table.bury(room, Tombstone(error.code, error.message))

    def _offer(self, room: bytes, record: events.ReceiveRoom) -> None:
        """Send a room's TransferInfo if P accepted our registration; fail the room if P refused it."""
        peer = self.prefills.peer(record.prefill_rank, record.prefill_incarnation)
        if peer is not None and peer.state is RegistrationState.REFUSED:
            self._take(room, ReceiverEvent.PEER_FAILED, peer.refusal)
        elif peer is not None and peer.state is RegistrationState.ACCEPTED:
            record.host, record.port = peer.host, peer.port
            self._take(room, ReceiverEvent.SENT)

    # ------------------------------------------------------------------------------------------------------ frames of P

    def _receive(self, room: bytes, message: object) -> None:
        if isinstance(message, RegisterReply):
            if room != REGISTRATION_ROOM:
                raise BadFrame(f"a registration reply in room {room_text(room)}")
            self.prefills.heard(message.incarnation, self._now_s)
            self._on_reply(message)
        elif isinstance(message, TransportMessage):
            self.prefills.heard(message.incarnation, self._now_s)
            self._on_transport_message(message)
        elif len(room) != 16 or room == REGISTRATION_ROOM:
            raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
        elif isinstance(message, TransferStatus) and message.poll not in (KVPoll.Success, KVPoll.Failed):
            raise BadFrame(f"a status with poll {message.poll}")
        elif isinstance(message, AuxReady | TransferStatus | AbortAck | AbortTransfer):
            self.prefills.heard(message.incarnation, self._now_s)
            self._on_room_message(room, message)
        else:
            raise BadFrame(f"a {type(message).__name__} sent to D")

    def _on_room_message(self, room: bytes, message: AuxReady | TransferStatus | AbortAck | AbortTransfer) -> None:
        entry = self.table.get(room)
        if isinstance(message, TransferStatus):  # also for forgotten rooms: P repeats it until acknowledged
            address = (entry.data.host, entry.data.port) if entry is not None and entry.data.port else None
            if address := address or self.prefills.address_of(message.incarnation):
                self._effects.append(Send(*address, room, StatusAck(self._incarnation, message.poll)))
        if entry is None:
            return
        record = entry.data
        if record.prefill_incarnation != message.incarnation or entry.state is ReceiverState.BOOTSTRAPPING:
            self.stale_frames += 1
        elif isinstance(message, AuxReady):
            self._take(room, ReceiverEvent.ROW_SENT)
        elif isinstance(message, AbortAck):
            # P stopped for good, so a room that still waits has failed; its Failed status was lost or is late.
            self._take(room, ReceiverEvent.STOPPED, TransferFailed("P stopped writing"))
        elif isinstance(message, AbortTransfer):
            self._effects.append(Send(record.host, record.port, room, AbortAck(self._incarnation)))
            self._take(room, ReceiverEvent.PEER_FAILED, from_code(message.code, message.message))
        elif message.poll == KVPoll.Failed:
            event = ReceiverEvent.STOPPED if message.settled else ReceiverEvent.PEER_FAILED
            self._take(room, event, from_code(message.code, message.message))
        elif (moved_bytes := sum(message.bytes_per_rank)) != record.expected_bytes:
            text = f"P moved {moved_bytes} bytes, {record.expected_bytes} were expected"
            self._take(room, ReceiverEvent.STOPPED, Integrity(text))
        else:
            record.status = record.status or message  # a later one is a repeat
            self._take(room, ReceiverEvent.SUCCESS)

    def _on_reply(self, message: RegisterReply) -> None:
        """Take P's answer to the registration: announce the rooms that wait for it, or fail them."""
        peer = self.prefills.peer(message.engine_rank, message.incarnation)
        if peer is None or message.peer_incarnation != self._incarnation:
            self.stale_frames += 1
            return
        self._effects += self.prefills.on_reply(peer, message)
        for room, entry in self.table.items():
            if entry.state is ReceiverState.BOOTSTRAPPING:
                self._offer(room, entry.data)

    def _on_transport_message(self, message: TransportMessage) -> None:
        rank = self.prefills.rank_of(message.incarnation)
        if rank is not None:
            self._effects.append(events.Deliver(rank, message))
        else:
            self.stale_frames += 1

    # ------------------------------------------------------------------------------------------------ results of checks

    def _row_checked(self, room: bytes, error: ChituError | None, cached_tokens: int) -> None:
        entry = self.table.get(room)
        if error is not None:
            self._take(room, ReceiverEvent.CORRUPT, error)
        elif entry is not None:
            entry.data.cached_tokens = cached_tokens
            self._take(room, ReceiverEvent.LOGITS)

    def _pages_checked(self, room: bytes, error: ChituError | None, sums: TransferSums | None) -> None:
        entry = self.table.get(room)
        if error is None:
            if entry is not None:
                entry.data.sums = sums
            self._take(room, ReceiverEvent.VERIFIED)
        elif entry is not None and self._take(room, ReceiverEvent.CORRUPT, error):
            record = entry.data
            values = (self._name, record.prefill_rank, record.request_id, error.message)
            text = "%s refuses what P%d sent of %s: %s"
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
        peer = instance_name(Role.PREFILL, entry.data.prefill_rank)
        text = self.table.overdue_text(entry, self._name, peer, RECEIVER_AWAITS, self._now_s)
        error = BootstrapTimeout(text) if entry.state is ReceiverState.BOOTSTRAPPING else TransferTimeout(text)
        self._take(room, ReceiverEvent.DEADLINE, error)

    def _repeat(self, room: bytes, entry: ReceiveEntry) -> None:
        """Repeat what P has not answered. Unless the room is quarantined, also probe P with the registration."""
        record = entry.data
        if entry.state is ReceiverState.QUARANTINED:
            self._send_abort(room, record)
            return
        if entry.state is ReceiverState.WAITING:
            self._send_repeated(room, record, record.info)
        record.repeat_due_s = self._now_s + self._retry_interval_s
        self._effects += self.prefills.ask(record.prefill_rank, record.prefill_incarnation, self._now_s)

    def _fail_lost(self) -> None:
        """Fail the rooms whose P left the view or was replaced. Their pages stay quarantined: P may only be frozen."""
        for room, entry in self.table.items():
            rank = entry.data.prefill_rank
            if self._view.is_lost(rank, entry.data.prefill_incarnation):
                self._take(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{rank} is gone"))

    # --------------------------------------------------------------------------------------------------------- outgoing

    def _tell(self, kind: Kind, room: bytes, error: ChituError | None = None) -> None:
        self._effects.append(TransferEvent(kind, room, error))

    def _send_abort(self, room: bytes, record: events.ReceiveRoom) -> None:
        assert record.error is not None
        self._send_repeated(room, record, AbortTransfer(self._incarnation, record.error.code, record.error.message))

    def _send_repeated(self, room: bytes, record: events.ReceiveRoom, message: TransferInfo | AbortTransfer) -> None:
        record.repeat_due_s = self._now_s + self._retry_interval_s
        self._effects.append(Send(record.host, record.port, room, message))
