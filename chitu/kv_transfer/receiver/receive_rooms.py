"""D's rooms: announced to P, heard of, and given back only when nothing can write to their pages any more.

Owned by `DecodeReceiver`; every method runs under its lock, from the step, comm or directory thread, and nothing here
blocks: frames and log lines go to the outbox, checksums are the owner's. Invariants: LOGITS_READY, SUCCESS, FAILED and
RELEASED come once per room; a room of which P was told is RELEASED only when its writer is known to have stopped:
AbortAck, a settled Failed, Success, or its process is dead and our own transports do nothing more for it (`fence`).
Until then AbortTransfer is repeated, without a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from chitu import log
from chitu.clock import Clock
from chitu.errors import (
    BootstrapTimeout,
    ChituError,
    Internal,
    PrefillLost,
    TransferFailed,
    TransferTimeout,
    from_code,
)
from chitu.kv_transfer.events import TransferEventKind
from chitu.kv_transfer.parts import KVManagerConfig, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.receiver.prefill_directory import PrefillDirectory
from chitu.kv_transfer.transfer_table import NEVER_S, Entry, Tombstone, TransferTable
from chitu.protocol import AbortAck, AbortTransfer, PrefillTimes, StatusAck, TransferInfo, TransferStatus
from chitu.protocol.states import (
    RECEIVER_AWAITS,
    RECEIVER_DEADLINES,
    RECEIVER_TRANSITIONS,
    Deadline,
    ReceiverEvent,
    ReceiverState,
)
from chitu.types import Role, instance_name, room_text


@dataclass(slots=True)
class ReceiveRoom:
    request_id: str
    info: TransferInfo
    aux_slot: int
    expected_bytes: int
    saved_bytes: int
    """Of pages that P does not write, as D has them."""
    prefill_rank: int
    prefill_incarnation: int
    announced_s: float
    host: str = ""
    """P's address, kept by the room: the abort handshake outlives P's entry in the directory."""
    port: int = 0
    cached_tokens: int = 0
    """Of the prompt, that P did not have to compute: known with the logits row."""
    has_heard: bool = False
    """P gave a sign for this room: no need to repeat TransferInfo."""
    is_written: bool = False
    """P said Success: nothing writes here any more, whatever becomes of the room."""
    prompt_logprobs: bytes | None = None
    """Came with that."""
    repeat_due_s: float = NEVER_S
    error: ChituError | None = None


ReceiveEntry = Entry[ReceiverState, ReceiveRoom]


class ReceiveRooms:
    """`fence`: of `TransportMessages`."""

    def __init__(
        self,
        config: KVManagerConfig,
        clock: Clock,
        view: PeerView,
        directory: PrefillDirectory,
        out: TransferOutbox,
        fence: Callable[[int], bool],
    ) -> None:
        self._fence = fence
        self._incarnation = config.incarnation
        self._deadlines = config.deadlines
        self._clock = clock
        self._view = view
        self._directory = directory
        self._out = out
        self._name = instance_name(Role.DECODE, config.engine_rank)
        limits_s = {
            Deadline.BOOTSTRAP: config.deadlines.bootstrap_s,
            Deadline.TRANSFER: config.deadlines.transfer_s,
        }
        self.table: TransferTable[ReceiverState, ReceiverEvent, ReceiveRoom] = TransferTable(
            RECEIVER_TRANSITIONS, RECEIVER_DEADLINES, limits_s, clock
        )
        self.bytes_moved = 0
        self.stale_frames = 0
        """Frames of incarnations that are not the writer of their room."""

    # ----------------------------------------------------------------------------------------------- from the scheduler

    def announce(self, room: bytes, record: ReceiveRoom) -> None:
        """Raises ValueError where the room is live already."""
        if self.table.tombstone(room) is not None:
            self._out.event(TransferEventKind.FAILED, room, Internal("this room ended already"))
            self._out.event(TransferEventKind.RELEASED, room)
            return
        transition = self.table.apply(room, ReceiverEvent.ANNOUNCE, record)
        if transition is None:
            raise ValueError(f"room {room_text(room)} was announced already")
        if self._view.is_lost(record.prefill_rank, record.prefill_incarnation):
            self.fail(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{record.prefill_rank} is gone"))
        else:
            self._tell_if_registered(room, transition.entry)

    def abort(self, room: bytes, error: ChituError) -> None:
        """Only RELEASED follows, whatever the scheduler has not polled yet; for an unknown room at once."""
        waiting = self._out.drop_events(room)
        tombstone = self.table.tombstone(room)
        if self.table.get(room) is not None:
            self.fail(room, ReceiverEvent.ABORT, error)
        elif tombstone is None or (not tombstone.code and TransferEventKind.RELEASED not in waiting):
            self._out.event(TransferEventKind.RELEASED, room)
            if tombstone is not None:  # it succeeded: say RELEASED once, not at every call
                self.table.bury(room, Tombstone(error.code, error.message))

    # --------------------------------------------------------------------------------------------- telling P; deadlines

    def tell_registered(self) -> None:
        """A P replied to our registration: tell it of its rooms (or fail them, where it refused)."""
        for room, entry in self.table.items():
            if entry.state is ReceiverState.BOOTSTRAPPING:
                self._tell_if_registered(room, entry)

    def _tell_if_registered(self, room: bytes, entry: ReceiveEntry) -> None:
        record = entry.data
        peer = self._directory.peer(record.prefill_rank, record.prefill_incarnation)
        if peer is None:
            return
        if peer.refusal is not None:
            self.fail(room, ReceiverEvent.PEER_FAILED, peer.refusal)
        elif peer.is_registered:
            self.table.apply(room, ReceiverEvent.SENT)
            record.host, record.port = peer.host, peer.port
            self._send_repeated(room, record, record.info)

    def tick(self, now_s: float) -> None:
        """Deadlines, repeats, and writers that died."""
        if self._view.find_ended():
            self.fail_lost()
        for room in self.table.expired(now_s):
            self._expire(room)
        for room, entry in self.table.items():
            self._tick_room(room, entry, now_s)

    def _tick_room(self, room: bytes, entry: ReceiveEntry, now_s: float) -> None:
        record = entry.data
        is_ending = entry.state is ReceiverState.QUARANTINED
        writer = record.prefill_rank, record.prefill_incarnation
        if is_ending and self._view.is_dead(*writer) and self._fence(record.prefill_incarnation):
            self.writer_stopped(room)
        elif record.repeat_due_s <= now_s:
            if is_ending:
                self._send_abort(room, record)
                return
            if record.has_heard:
                record.repeat_due_s = now_s + self._deadlines.retry_interval_s
            else:
                self._send_repeated(room, record, record.info)
            self._directory.ask(record.prefill_rank, record.prefill_incarnation)

    def _expire(self, room: bytes) -> None:
        entry = self.table.get(room)
        assert entry is not None
        peer = instance_name(Role.PREFILL, entry.data.prefill_rank)
        text = self.table.overdue_text(entry, self._name, peer, RECEIVER_AWAITS)
        error = BootstrapTimeout(text) if entry.state is ReceiverState.BOOTSTRAPPING else TransferTimeout(text)
        self.fail(room, ReceiverEvent.DEADLINE, error)

    # ----------------------------------------------------------------------------------------------------- hearing of P

    def hear(self, room: bytes, incarnation: int) -> ReceiveEntry | None:
        """The room's entry if this incarnation of P is its writer; P has given a sign for it now."""
        entry = self.table.get(room)
        if entry is None:
            return None
        if entry.data.prefill_incarnation != incarnation or entry.state is ReceiverState.BOOTSTRAPPING:
            self.stale_frames += 1
            return None
        entry.data.has_heard = True
        return entry

    def logits_arrived(self, room: bytes) -> None:
        """The aux row was verified."""
        transition = self.table.apply(room, ReceiverEvent.LOGITS)
        if transition is not None:
            cached_tokens = transition.entry.data.cached_tokens
            self._out.event(TransferEventKind.LOGITS_READY, room, cached_tokens=cached_tokens)

    def succeed(self, room: bytes, entry: ReceiveEntry, moved_bytes: int, times: PrefillTimes) -> None:
        self.logits_arrived(room)  # absorbed, but where AuxReady was lost
        if self.table.apply(room, ReceiverEvent.SUCCESS) is not None:
            self.bytes_moved += moved_bytes
            request_id, saved_bytes = entry.data.request_id, entry.data.saved_bytes
            self._out.log(logging.INFO, log.RECEIVED_KV, request_id, request_id=request_id)
            self._out.event(
                TransferEventKind.SUCCESS,
                room,
                kv_bytes=moved_bytes,
                saved_bytes=saved_bytes,
                times=times,
                prompt_logprobs=entry.data.prompt_logprobs,
            )
            self.table.bury(room, Tombstone("", ""))

    def acknowledge(self, room: bytes, message: TransferStatus) -> None:
        """Every status is acknowledged, those of forgotten rooms too: P repeats until it hears."""
        entry = self.table.get(room)
        if entry is not None and entry.data.port:
            address: tuple[str, int] | None = (entry.data.host, entry.data.port)
        else:
            address = self._directory.address_of(message.incarnation)
        if address is not None:
            self._out.frame(*address, room, StatusAck(self._incarnation, message.poll))

    def on_abort_ack(self, room: bytes, message: AbortAck) -> None:
        if self.hear(room, message.incarnation) is not None:
            # P stopped for good, so a room that still waited has failed; its Failed status was lost or is late.
            self.fail(room, ReceiverEvent.PEER_FAILED, TransferFailed("P stopped writing"))
            self.writer_stopped(room)

    def on_abort(self, room: bytes, message: AbortTransfer) -> None:
        entry = self.hear(room, message.incarnation)
        if entry is not None:
            self._out.frame(entry.data.host, entry.data.port, room, AbortAck(self._incarnation))
            self.fail(room, ReceiverEvent.PEER_FAILED, from_code(message.code, message.message))

    # -------------------------------------------------------------------------------------------------- how a room ends

    def fail(self, room: bytes, event: ReceiverEvent, error: ChituError) -> None:
        """Every failure goes through here, once per room: later ones are absorbed."""
        transition = self.table.apply(room, event)
        if transition is None:
            return
        record = transition.entry.data
        record.error = error
        if event is not ReceiverEvent.ABORT:
            self._out.event(TransferEventKind.FAILED, room, error)
        if transition.entry.state is ReceiverState.QUARANTINED and record.is_written:
            self.writer_stopped(room)
        elif transition.entry.state is ReceiverState.QUARANTINED:
            self._send_abort(room, record)
        else:
            self._out.event(TransferEventKind.RELEASED, room)
            self._bury(room, record)

    def fail_lost(self) -> None:
        """Rooms whose P left the view or was replaced; their pages stay quarantined while it may only be frozen."""
        for room, entry in self.table.items():
            rank, incarnation = entry.data.prefill_rank, entry.data.prefill_incarnation
            if self._view.is_lost(rank, incarnation) and not entry.data.is_written:
                self.fail(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{rank} is gone"))
                if self._view.is_dead(rank, incarnation) and self._fence(incarnation):
                    self.writer_stopped(room)

    def written(self, room: bytes, entry: ReceiveEntry) -> None:
        """P said Success: its last byte is here."""
        entry.data.is_written = True
        self.writer_stopped(room)

    def writer_stopped(self, room: bytes) -> None:
        """Nothing of P can write to the room's pages any more. Absorbed by a room that has not failed."""
        transition = self.table.apply(room, ReceiverEvent.WRITER_STOPPED)
        if transition is not None:
            self._out.event(TransferEventKind.RELEASED, room)
            self._bury(room, transition.entry.data)

    def _bury(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.error is not None
        self.table.bury(room, Tombstone(record.error.code, record.error.message))

    def _send_abort(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.error is not None
        message = AbortTransfer(self._incarnation, record.error.code, record.error.message)
        self._send_repeated(room, record, message)

    def _send_repeated(self, room: bytes, record: ReceiveRoom, message: TransferInfo | AbortTransfer) -> None:
        record.repeat_due_s = self._clock.monotonic() + self._deadlines.retry_interval_s
        self._out.frame(record.host, record.port, room, message)
