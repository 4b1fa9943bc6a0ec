"""P's rooms: what is known of each, and every way in which one ends.

Owned by `PrefillSender`; every method runs under its lock, from any of its threads, and nothing here blocks: frames and
log lines go to the outbox. `Announcements`, `ChunkFeed` and `PageWriter` bring a room forward; failing, settling,
telling D how it ended and forgetting happen here. Invariants: FAILED and RELEASED come once per room; RELEASED comes
only when no write of the room waits, runs or can still land; a status is repeated until D acknowledges it, D is gone or
`transfer_s` passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chitu.clock import Clock
from chitu.errors import BootstrapTimeout, ChituError, DecodeLost, TransferTimeout, from_code
from chitu.kv_transfer.checksums import RoomSums
from chitu.kv_transfer.events import TransferEvent, TransferEventKind
from chitu.kv_transfer.parts import KVManagerConfig, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.transfer_queue import TransferKVChunk, TransferQueue
from chitu.kv_transfer.transfer_table import NEVER_S, Entry, Tombstone, TransferTable
from chitu.protocol import AbortAck, AbortTransfer, PrefillTimes, StatusAck, TransferInfo, TransferStatus
from chitu.protocol.states import (
    SENDER_AWAITS,
    SENDER_DEADLINES,
    SENDER_TRANSITIONS,
    Deadline,
    KVPoll,
    SenderEvent,
    SenderState,
)
from chitu.types import Role, instance_name


@dataclass(slots=True)
class SendRoom:
    """What P knows of a room, from both halves and from its own computing."""

    request_id: str = ""
    num_tokens: int = 0
    """Prompt tokens by the router's half; 0 while that is missing."""
    decode_rank: int = -1
    decode_incarnation: int = 0
    info: TransferInfo | None = None
    peer: DecodePeer | None = None
    dst_pages: Sequence[int] = ()
    pages: Sequence[int] = ()
    cached_tokens: int = 0
    """Where its first chunk began: what is before was in the pages already."""
    next_page: int = 0
    """Pages before this one (of all layers) were handed out by finished steps."""
    backlog: list[TransferKVChunk] = field(default_factory=list)
    """Computed, not announced."""
    aux_slot: int = -1
    prompt_logprobs: bytes | None = None
    """Of all of the prompt, for D; None where nobody asks."""
    is_aux_written: bool = False
    units_left: int = 0
    """Layer pages that have not landed yet; known from the announcement on."""
    bytes_per_rank: tuple[int, ...] = ()
    """Moved by each of our TP ranks."""
    kv_sums: RoomSums | None = None
    """Checksums of what was written; None until the first write, and where `verify_kv` is off."""
    is_kv_logged: bool = False
    error: ChituError | None = None
    repeat_due_s: float = NEVER_S
    is_peer_done: bool = False
    """D aborted or acknowledged the failure: no status is owed any more."""
    requested_s: float = 0.0
    """When the router's half came; with the next three, what `PrefillTimes` is made of."""
    started_s: float = 0.0
    """When its first chunk began to compute."""
    computed_s: float = 0.0
    """When its logits row was complete."""
    landed_s: float = 0.0

    @property
    def decode(self) -> tuple[int, int]:
        """(engine_rank, incarnation) of the room's D; (-1, 0) where unknown."""
        if self.peer is not None:
            return self.peer.info.engine_rank, self.peer.info.incarnation
        return self.decode_rank, self.decode_incarnation

    @property
    def times(self) -> PrefillTimes:
        """Of a room that has landed."""
        return PrefillTimes(
            self.started_s - self.requested_s,
            self.computed_s - self.started_s,
            self.landed_s - self.computed_s,
        )


SendEntry = Entry[SenderState, SendRoom]

SENDING_STATES = frozenset({SenderState.WAITING, SenderState.TRANSFERRING, SenderState.WRITING})
"""Both halves are here and D waits for more."""
OPEN_STATES = SENDING_STATES | {SenderState.REQUESTED}
"""States in which the step thread computes for a room."""
UNSETTLED_STATES = frozenset({SenderState.UNSETTLED, SenderState.SETTLING})
"""A write failed and may still land."""
WRITABLE_STATES = SENDING_STATES | UNSETTLED_STATES | {SenderState.STOPPING}
"""Of an announced room: a write to its pages may run or come."""


class SendRooms:
    """`table` is shared with the collaborators that bring rooms forward."""

    def __init__(
        self, config: KVManagerConfig, clock: Clock, view: PeerView, out: TransferOutbox, queue: TransferQueue
    ) -> None:
        self._incarnation = config.incarnation
        self._deadlines = config.deadlines
        self._clock = clock
        self._view = view
        self._out = out
        self._queue = queue
        self._name = instance_name(Role.PREFILL, config.engine_rank)
        deadlines = config.deadlines
        limits_s = {
            Deadline.BOOTSTRAP: deadlines.queue_s + deadlines.bootstrap_s,
            Deadline.TRANSFER: deadlines.transfer_s,
            Deadline.REPEAT: deadlines.transfer_s,
        }
        self.table: TransferTable[SenderState, SenderEvent, SendRoom] = TransferTable(
            SENDER_TRANSITIONS, SENDER_DEADLINES, limits_s
        )

    # -------------------------------------------------------------------------------------------------- how a room ends

    def fail(self, room: bytes, event: SenderEvent, error: ChituError) -> None:
        """Every failure goes through here, once per room: later ones (and those of unknown rooms) are absorbed."""
        transition = self.table.apply(room, event, self._clock.monotonic())
        if transition is None:
            return
        entry, record = transition.entry, transition.entry.data
        if transition.before is SenderState.STOPPING:  # it has failed already: what ended is its last write
            if entry.state is SenderState.RELEASED:
                self._release(room, entry)
            return
        record.error = error
        record.backlog = []
        self._queue.drop(room)
        if event is not SenderEvent.ABORT and record.num_tokens:
            self._out.event(TransferEvent(TransferEventKind.FAILED, room, error))
        if record.peer is not None and not record.is_peer_done:
            record.repeat_due_s = self._clock.monotonic()
        if entry.state is SenderState.RELEASED:
            self._release(room, entry)
        if self.table.get(room) is entry and record.repeat_due_s < NEVER_S:
            self._send_status(room, entry)

    def fail_lost(self) -> None:
        """D left the cluster view or was replaced: its rooms fail, and nobody is left to hear how others ended."""
        for room, entry in self.table.items():
            rank, incarnation = entry.data.decode
            if incarnation and self._view.is_lost(rank, incarnation):
                self.fail(room, SenderEvent.PEER_LOST, DecodeLost(f"D{rank} is gone"))
                self._forget(room, SenderEvent.GIVEN_UP)

    def succeed(self, room: bytes, entry: SendEntry) -> None:
        """The last byte landed."""
        self.table.apply(room, SenderEvent.LANDED, self._clock.monotonic())
        entry.data.landed_s = self._clock.monotonic()
        self._out.event(TransferEvent(TransferEventKind.SUCCESS, room, kv_bytes=sum(entry.data.bytes_per_rank)))
        self._send_status(room, entry)

    def take(self, room: bytes, event: SenderEvent) -> None:
        """A write or an attempt to settle begins or ends."""
        transition = self.table.apply(room, event, self._clock.monotonic())
        if transition is not None and transition.entry.state is SenderState.RELEASED:
            self._release(room, transition.entry)

    def _release(self, room: bytes, entry: SendEntry) -> None:
        """It came into RELEASED."""
        record, peer = entry.data, entry.data.peer
        self._queue.drop(room)
        if record.num_tokens:
            self._out.event(TransferEvent(TransferEventKind.RELEASED, room))
        if peer is None:
            self._forget(room, SenderEvent.ACKNOWLEDGED)
        elif self._view.is_lost(peer.info.engine_rank, peer.info.incarnation):
            self._forget(room, SenderEvent.GIVEN_UP)
        else:
            self._ack_abort(room, peer)
            if record.is_peer_done:
                self._forget(room, SenderEvent.ACKNOWLEDGED)

    def _forget(self, room: bytes, event: SenderEvent) -> None:
        transition = self.table.apply(room, event, self._clock.monotonic())
        if transition is not None and transition.entry.state is SenderState.FORGOTTEN:
            error = transition.entry.data.error
            self.table.bury(room, Tombstone(error.code if error else "", error.message if error else ""))

    def unsettled(self, peer: DecodePeer) -> dict[bytes, SendEntry]:
        """Rooms with a write to this D that failed and may still land."""
        return {
            room: entry
            for room, entry in self.table.items()
            if entry.data.peer is peer and entry.state in UNSETTLED_STATES
        }

    # ------------------------------------------------------------------------------------------------------------ clock

    def tick(self, now_s: float) -> None:
        """Deadlines, due settle attempts and status repeats; D that have ended."""
        if self._view.find_ended():
            self.fail_lost()
        for room in self.table.expired(now_s):
            self._expire(room)
        for room, entry in self.table.items():
            self._tick_room(room, entry, now_s)

    def _tick_room(self, room: bytes, entry: SendEntry, now_s: float) -> None:
        record, peer = entry.data, entry.data.peer
        if entry.state is SenderState.UNSETTLED:
            assert peer is not None
            if self._view.is_dead(peer.info.engine_rank, peer.info.incarnation):
                self.take(room, SenderEvent.SETTLED)
                if self.table.get(room) is not entry:
                    return
            elif peer.settle_due_s <= now_s:
                peer.settle_due_s = now_s + self._deadlines.retry_interval_s
                self._queue.put_settle(room)
        if record.repeat_due_s <= now_s:
            self._send_status(room, entry)

    def _expire(self, room: bytes) -> None:
        entry = self.table.get(room)
        assert entry is not None
        if entry.state in (SenderState.SUCCEEDED, SenderState.RELEASED):
            self._forget(room, SenderEvent.GIVEN_UP)
        else:
            peer = instance_name(Role.DECODE, entry.data.decode[0])
            text = self.table.overdue_text(entry, self._name, peer, SENDER_AWAITS, self._clock.monotonic())
            error = BootstrapTimeout(text) if entry.state is SenderState.REQUESTED else TransferTimeout(text)
            self.fail(room, SenderEvent.DEADLINE, error)

    # --------------------------------------------------------------------------------------- what D is told and answers

    def on_status_ack(self, room: bytes, message: StatusAck) -> bool:
        """D knows how the room ended. False: it does not come from the room's D."""
        entry = self.table.get(room)
        if entry is None:
            return True
        if entry.data.peer is None or entry.data.peer.info.incarnation != message.incarnation:
            return False
        if entry.state is SenderState.SUCCEEDED and message.poll == KVPoll.Success:
            self._forget(room, SenderEvent.ACKNOWLEDGED)
        elif message.poll == KVPoll.Failed:
            entry.data.is_peer_done = True
            entry.data.repeat_due_s = NEVER_S
            self._forget(room, SenderEvent.ACKNOWLEDGED)  # absorbed while SETTLING
        return True

    def on_abort(self, room: bytes, message: AbortTransfer, peer: DecodePeer) -> None:
        """D gave the room up; it hears AbortAck once nothing writes to its pages."""
        entry = self.table.get(room)
        if entry is None:
            if self.table.tombstone(room) is None:
                self.table.bury(room, Tombstone(message.code, message.message))
            self._ack_abort(room, peer)
            return
        if entry.data.decode[1] != message.incarnation:
            self._ack_abort(room, peer)  # not the D that this room is written to
            return
        entry.data.is_peer_done = True
        entry.data.repeat_due_s = NEVER_S
        if entry.data.peer is None:
            entry.data.peer = peer  # so that the ack finds its way
        if entry.state in (SenderState.SUCCEEDED, SenderState.RELEASED):
            self._ack_abort(room, peer)
            self._forget(room, SenderEvent.ACKNOWLEDGED)
        else:
            self.fail(room, SenderEvent.PEER_ABORT, from_code(message.code, message.message))

    def _ack_abort(self, room: bytes, peer: DecodePeer) -> None:
        self._out.frame(peer.info.endpoint, peer.info.dst_port, room, AbortAck(self._incarnation))

    def _send_status(self, room: bytes, entry: SendEntry) -> None:
        record = entry.data
        assert record.peer is not None
        record.repeat_due_s = self._clock.monotonic() + self._deadlines.retry_interval_s
        info = record.peer.info
        if entry.state is SenderState.SUCCEEDED:
            status = TransferStatus(
                self._incarnation,
                KVPoll.Success,
                bytes_per_rank=record.bytes_per_rank,
                times=record.times,
                kv_sums=record.kv_sums.message() if record.kv_sums is not None else None,
                prompt_logprobs=record.prompt_logprobs,
            )
        else:
            assert record.error is not None
            is_settled = entry.state is SenderState.RELEASED
            error = record.error
            status = TransferStatus(self._incarnation, KVPoll.Failed, is_settled, error.code, error.message)
        self._out.frame(info.endpoint, info.dst_port, room, status)
