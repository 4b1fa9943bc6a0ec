"""P's side of the transfer protocol as a pure state machine: it takes events and the time, and returns effects.

Here are its events, effects and records; `sender_table.py` has its states. `PrefillSender` owns the machine, guards it
with its lock, makes the events and carries out the effects in their order. The machine contains no thread, socket,
lock, clock or logger, and reads only the stored state of `PeerView`. `_apply` is the only way to move a room, by
`SENDER_TRANSITIONS`, and `_enter` does what each state requires on entry; a (state, event) pair that the table does not
have changes nothing. Invariants: a room goes on only if the router's request and D's announcement name the same D and
the same prompt length, and every page and slot that D names was checked against its registered memory; a TransferInfo
that is not accepted is answered with a Failed status, and so is each repeat of it; FAILED, SUCCESS and RELEASED come
once per room; RELEASED comes only when no write of the room waits, runs or can still land; Success follows the last
byte; a write that failed and may still land suspends its D until a fence succeeded, and only one room of a D is FENCING
at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Union

from chitu import log
from chitu.errors import BadFrame, BootstrapTimeout, ChituError, DecodeLost, TransferFailed, from_code
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
    timeout_of,
)
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.chunks import ComputedPrompt, TransferJob
from chitu.kv_transfer.layout import RoomSums
from chitu.kv_transfer.peers import DecodePeer, PeerView, check_announcement
from chitu.kv_transfer.sender_table import (
    OPEN_STATES,
    SENDER_AWAITS,
    SENDER_DEADLINES,
    SENDER_NO_STATUS_OWED,
    SENDER_TRANSITIONS,
    WRITABLE_STATES,
    E,
    S,
    SenderState,
)
from chitu.kv_transfer.transports.transport import WriteError
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    StateSeal,
    StatusAck,
    TransferInfo,
    TransferProgress,
    TransferStatus,
    Wire,
)
from chitu.protocol.account import PrefillTimes
from chitu.protocol.peer import KVPoll
from chitu.types import instance_name, room_text

REPEAT_BYTES = 1 << 20
"""Bytes of a prompt's logprobs for each `retry_interval_s` until its status is repeated: so repeats of a large one do
not queue up behind each other on a slow link."""


_ADVANCING = frozenset({S.ANNOUNCED, S.WAITING, S.TRANSFERRING, S.WRITING})
"""States in which a room waits for P's own work; ANNOUNCED for the end of a step, as the router's half is read then."""
_TO_WRITE = frozenset({S.WAITING, S.TRANSFERRING})
"""States in which a write may begin."""
_QUIET = frozenset({S.WRITING, S.TRANSFERRING})
"""States that require nothing on entry."""
_ACKNOWLEDGED = frozenset({(S.SUCCEEDED, KVPoll.Success), (S.RELEASED, KVPoll.Failed)})
"""Status that D acknowledges in each state."""
_REPORTED_AT_ONCE = frozenset({S.STOPPING, S.UNFENCED, S.FORGOTTEN})
"""States of failed rooms that are reported to D at once when an open room enters them. RELEASED is always reported."""


class Destination(NamedTuple):
    """D's announcement of a room, checked: where its bytes go."""

    info: TransferInfo
    peer: DecodePeer
    pages: Sequence[int]
    """Pages of D, in the order of the prompt; empty if D wants the logits row only."""
    first_page: int
    """First position in the page list that P writes."""


@dataclass(slots=True)
class SendRoom:
    """P's record of a room. The room's state decides what happens; of these fields only `units_left` does too."""

    request_id: str = ""
    decode_rank: int = -1
    decode_incarnation: int = 0
    """Incarnation of its D; 0 until the router's request or D's announcement comes."""
    computed: ComputedPrompt = field(default_factory=lambda: ComputedPrompt(0))
    destination: Destination | None = None
    units_left: int = 0
    """Pages times layers that have not landed yet, plus one for each row; known from the announcement on."""
    bytes_per_rank: tuple[int, ...] = ()
    """Bytes moved by each of our TP ranks."""
    kv_sums: RoomSums | None = None
    """Checksums of what was written, added to by the thread that works on the room; None if they are not needed."""
    state: StateSeal | None = None
    """Seal of its state row, set by the thread that writes it."""
    error: ChituError | None = None
    repeat_due_s: float = NEVER_S
    seen: tuple[int, int] = (0, 0)
    """What was last seen of it, and of what comes before it (`SenderMachine._place_of`)."""
    last_layer: int = 0
    """Layer of P by which its step thread has read the router's half, if that has come."""
    num_advances: int = 0
    num_reported: int = 0
    """Of these, how many D knows of."""
    report_due_s: float = 0.0
    """When D may be told again that the room advances."""
    requested_s: float = 0.0
    """Time of the router's request. `PrefillTimes` is made of it, the times in `computed`, and `landed_s`."""
    landed_s: float = 0.0

    @property
    def times(self) -> PrefillTimes:
        """Durations on P of a room that has landed."""
        return PrefillTimes.of(self.requested_s, self.computed.started_s, self.computed.computed_s, self.landed_s)


# --------------------------------------------------------------------------------------------------------------- events


class Requested(NamedTuple):
    """P's scheduler got the router's request for a room."""

    room: bytes
    request_id: str
    num_tokens: int
    decode_rank: int
    decode_incarnation: int


class FrameReceived(NamedTuple):
    """A registered D sent a frame about a room."""

    room: bytes
    message: TransferInfo | StatusAck | AbortTransfer
    peer: DecodePeer
    unreachable: ChituError | None = None
    """Reason why no connection to this D could be opened."""


class LayersComputed(NamedTuple):
    """P's steps have computed so many layers since its start."""

    num_layers: int


class JobDequeued(NamedTuple):
    """A transfer thread dequeued a job and asks whether it may still be done."""

    job: TransferJob


class Written(NamedTuple):
    """Answer to `Write`. `bytes_per_rank`: bytes written by each TP rank, unless there is an `error`."""

    job: TransferJob
    bytes_per_rank: Sequence[int] = ()
    error: ChituError | None = None


class FenceResult(NamedTuple):
    """Answer to `FenceWrites`: nothing of the failed writes to this D can land any more, or the attempt failed."""

    fence: FenceWrites
    is_fenced: bool
    error: ChituError | None = None


class DecodeDead(NamedTuple):
    """Nothing can land in the memory of this D any more: its process has ended."""

    peer: DecodePeer


Event = Union[
    Requested, Aborted, FrameReceived, LayersComputed, JobDequeued, Written, FenceResult, ViewChanged, DecodeDead, Tick
]

# -------------------------------------------------------------------------------------------------------------- effects


class TrackChunks(NamedTuple):
    """Track the computed chunks of this room from now on."""

    room: bytes
    computed: ComputedPrompt


class StartSending(NamedTuple):
    """Queue what is computed of this room for writing, from this position on."""

    room: bytes
    first_page: int


class Stop(NamedTuple):
    """Write nothing more of this room, and forget what waits."""

    room: bytes


class QueueFence(NamedTuple):
    """Queue a fence attempt."""

    room: bytes


class Write(NamedTuple):
    """Do the job, in the thread that sent `JobDequeued`."""

    job: TransferJob
    record: SendRoom
    destination: Destination


class FenceWrites(NamedTuple):
    """Try to fence the failed writes to this D, in the thread that sent `JobDequeued`."""

    room: bytes
    peer: DecodePeer
    rooms: tuple[bytes, ...]
    """Rooms that this attempt covers. A room whose write fails later is not among them."""


Effect = Union[Send, TransferEvent, DropEvents, Line, TrackChunks, StartSending, Stop, QueueFence, Write, FenceWrites]


SendEntry = Entry[SenderState, SendRoom]


class SenderMachine:
    def __init__(self, config: KVManagerConfig, view: PeerView) -> None:
        self._config = config
        self._view = view
        self._name = instance_name(config.writer, config.engine_rank)
        deadlines = config.deadlines
        limits_s = {
            Deadline.BOOTSTRAP: deadlines.queue_s + deadlines.bootstrap_s,
            Deadline.TRANSFER: deadlines.transfer_s,
            Deadline.REPEAT: deadlines.transfer_s,
        }
        self.table: TransferTable[SenderState, E, SendRoom] = TransferTable(
            SENDER_TRANSITIONS, SENDER_DEADLINES, limits_s
        )
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self._num_layers = self._num_writes = 0
        """Layers that P has computed, and writes that have landed, of all rooms."""
        self.bytes_moved = 0
        self.stale_frames = 0
        """Number of acknowledgements from a D that is not the room's own."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order."""
        self._now_s, self._effects = now_s, []
        match event:
            case LayersComputed(num_layers):
                self._num_layers = num_layers
            case JobDequeued(job):
                self._begin_job(job)
            case Written():
                self._written(event)
            case Requested():
                self._request(event)
            case FrameReceived(room, TransferInfo() as info, peer, unreachable):
                self._announce(room, info, peer, unreachable)
            case FrameReceived(room, StatusAck() as message):
                self._acknowledge(room, message)
            case FrameReceived(room, AbortTransfer() as message, peer):
                self._peer_abort(room, message, peer)
            case Aborted(room, error):
                self._effects.append(DropEvents(room))
                self._apply(room, E.ABORT, error)
            case FenceResult():
                self._fence_tried(event)
            case DecodeDead(peer):
                for room in tuple(peer.unfenced):
                    self._apply(room, E.FENCED)
            case ViewChanged():
                self._fail_lost()
            case Tick():
                self._tick()
        return self._effects

    # ------------------------------------------------------------------------------------------------ state transitions

    def _apply(self, room: bytes, event: E, error: ChituError | None = None, new: SendRoom | None = None) -> bool:
        """Apply an event to a room: the only way to change it. `error`: why it ends. Return False if it is absorbed."""
        applied = self.table.apply(room, event, self._now_s, new)
        if applied is None:
            return False
        before, entry = applied
        state, record = entry.state, entry.data
        if state in _QUIET:
            return True
        if before in OPEN_STATES and state not in OPEN_STATES:
            record.error = error
            self._effects.append(Stop(room))
            if error is not None and event is not E.ABORT and before is not S.ANNOUNCED:
                self._effects.append(TransferEvent(Kind.FAILED, room, error))
        if record.destination is not None:
            self._enter(room, entry, record.destination, before, event)
        if state is S.FORGOTTEN:
            if before in OPEN_STATES and before is not S.ANNOUNCED:
                self._effects.append(TransferEvent(Kind.RELEASED, room))
            code, message = (record.error.code, record.error.message) if record.error is not None else ("", "")
            self.table.bury(room, Tombstone(code, message))
        return True

    def _enter(
        self, room: bytes, entry: SendEntry, destination: Destination, before: SenderState | None, event: E
    ) -> None:
        """Do what the new state of an announced room requires on entry."""
        state, record, peer = entry.state, entry.data, destination.peer
        if state is S.WAITING:
            self._effects.append(TransferEvent(Kind.ANNOUNCED, room))
            self._effects.append(StartSending(room, destination.first_page))
        elif state is S.SUCCEEDED:
            record.landed_s = self._now_s
            self._log(logging.INFO, log.FINISHED_KV, record.request_id, request_id=record.request_id)
            self._effects.append(TransferEvent(Kind.SUCCESS, room, kv_bytes=sum(record.bytes_per_rank)))
            self._send_status(room, entry, peer)
        elif state is S.UNFENCED:
            if not peer.is_suspended:
                self._log(logging.WARNING, "suspending writes to %s until outstanding writes are fenced", peer.name)
            peer.unfenced.add(room)
        elif state is S.RELEASED:
            peer.unfenced.discard(room)
            self._effects.append(TransferEvent(Kind.RELEASED, room))
            if self._view.is_lost(record.decode_rank, record.decode_incarnation):
                self._apply(room, E.PEER_LOST)
            else:
                self._send_status(room, entry, peer)
        if before in OPEN_STATES and state in _REPORTED_AT_ONCE and event not in SENDER_NO_STATUS_OWED:
            self._send_status(room, entry, peer)

    # --------------------------------------------------------------------------------------------- the router's request

    def _request(self, event: Requested) -> None:
        room, entry = event.room, self.table.get(event.room)
        if entry is not None and entry.state is not S.ANNOUNCED:
            self._log(logging.WARNING, "room %s was added twice", room_text(room))
            return
        if entry is not None and entry.data.destination is not None:
            info = entry.data.destination.info
            if info.incarnation != event.decode_incarnation:
                self._apply(room, E.REFUSED, BadFrame("the room was announced by another D than its own"))
            elif info.num_tokens != event.num_tokens:
                self._apply(room, E.REFUSED, _other_length(info.num_tokens, event.num_tokens))
        tombstone = self.table.tombstone(room)
        if tombstone is not None:
            # D gave up before the router's request came, or the room is used twice: the step thread must not wait.
            error = from_code(tombstone.code or "protocol", tombstone.message or "this room ended already")
            self._effects.append(TransferEvent(Kind.FAILED, room, error))
            self._effects.append(TransferEvent(Kind.RELEASED, room))
            return
        record = entry.data if entry is not None else SendRoom()
        record.request_id, record.requested_s, record.computed.num_tokens = (
            event.request_id,
            self._now_s,
            event.num_tokens,
        )
        record.decode_rank, record.decode_incarnation = event.decode_rank, event.decode_incarnation
        self._effects.append(TrackChunks(room, record.computed))
        self._apply(room, E.ADD_REQUEST, new=record)
        if self._view.is_lost(record.decode_rank, record.decode_incarnation):
            self._apply(room, E.PEER_LOST, DecodeLost(f"{self._name_of(record.decode_rank)} is gone"))

    # ------------------------------------------------------------------------------------------------------ frames of D

    def _announce(self, room: bytes, info: TransferInfo, peer: DecodePeer, unreachable: ChituError | None) -> None:
        entry, tombstone = self.table.get(room), self.table.tombstone(room)
        if tombstone is not None:
            self._refuse(room, peer, from_code(tombstone.code or "protocol", tombstone.message or "the room is over"))
            return
        record = entry.data if entry is not None else SendRoom()
        if record.destination is not None:
            self._announced_again(room, info, peer, record.destination)
            return
        if entry is not None and record.decode_incarnation != info.incarnation:
            self._refuse(room, peer, BadFrame("the router assigned this room to another D"))
            return
        try:
            if self._view.is_lost(peer.info.engine_rank, info.incarnation):
                raise DecodeLost(f"{self._name_of(peer.info.engine_rank)} is not in the cluster view")
            if unreachable is not None:
                raise unreachable
            pages = check_announcement(info, peer.memory, self._config)
            if entry is not None and info.num_tokens != record.computed.num_tokens:
                raise _other_length(info.num_tokens, record.computed.num_tokens)
            self._require_unclaimed(info, peer, pages)
        except ChituError as error:
            self._refuse(room, peer, error)
            self._apply(room, E.REFUSED, error)
            return
        peer.aux_rooms[info.dst_aux_index] = room
        if info.dst_state_index >= 0:
            peer.state_rooms[info.dst_state_index] = room
        peer.page_rooms.update(dict.fromkeys(pages[info.prefix_pages :], room))
        first_page = info.prefix_pages if pages else self._config.num_pages(info.num_tokens)
        record.destination = Destination(info, peer, pages, first_page)
        record.decode_rank, record.decode_incarnation = peer.info.engine_rank, info.incarnation
        record.report_due_s = self._now_s + self._config.progress_interval_s
        num_rows = 1 + self._config.has_state(len(pages))
        record.units_left = self._config.layout.num_layers * (len(pages) - info.prefix_pages) + num_rows
        record.last_layer = self._num_layers + 2 * (1 + self._config.layout.num_layers)
        record.seen = self._place_of(record)
        self._apply(room, E.ANNOUNCE, new=record)

    def _announced_again(self, room: bytes, info: TransferInfo, peer: DecodePeer, destination: Destination) -> None:
        """Ignore an identical TransferInfo, which is D's repeat; refuse a different one, whichever D sent it."""
        if destination.info != info or destination.peer is not peer:
            is_fenced = destination.peer is not peer  # nothing was ever written to a D that this room is not for
            self._refuse(room, peer, TransferFailed("this room was announced already"), is_fenced)

    def _require_unclaimed(self, info: TransferInfo, peer: DecodePeer, pages: Sequence[int]) -> None:
        """Raise BadFrame if a page or slot of this announcement may still be written for another room of the same D. A
        correct D does not reuse them before P has reported that it stopped."""
        self._require_free("aux slot", info.dst_aux_index, peer.aux_rooms.get(info.dst_aux_index))
        if info.dst_state_index >= 0:
            self._require_free("state slot", info.dst_state_index, peer.state_rooms.get(info.dst_state_index))
        for page in pages:
            self._require_free("page", page, peer.page_rooms.get(page))

    def _require_free(self, what: str, number: int, room: bytes | None) -> None:
        """Raise BadFrame if `room`, the last room that announced this page or slot, may still be written to."""
        entry = self.table.get(room) if room is not None else None
        if room is not None and entry is not None and entry.state in WRITABLE_STATES:
            raise BadFrame(f"{what} {number} is announced for room {room_text(room)}")

    def _acknowledge(self, room: bytes, message: StatusAck) -> None:
        """Take D's acknowledgement of how the room ended."""
        entry = self.table.get(room)
        if entry is None:
            return
        if entry.data.destination is None or entry.data.decode_incarnation != message.incarnation:
            self.stale_frames += 1
        elif (entry.state, message.poll) in _ACKNOWLEDGED:
            self._apply(room, E.ACKNOWLEDGED)

    def _peer_abort(self, room: bytes, message: AbortTransfer, peer: DecodePeer) -> None:
        """Stop a room that D gave up. D gets AbortAck once nothing writes to its pages."""
        entry = self.table.get(room)
        if entry is None:
            if self.table.tombstone(room) is None:
                self.table.bury(room, Tombstone(message.code, message.message))
        elif entry.data.decode_incarnation == message.incarnation:  # else it is not the D that this room is written to
            self._apply(room, E.PEER_ABORT, from_code(message.code, message.message))
            if self.table.get(room) is not None:
                return
        self._send(room, peer, AbortAck(self._config.incarnation))

    # ---------------------------------------------------------------------------------------------------------- writing

    def _begin_job(self, job: TransferJob) -> None:
        entry = self.table.get(job.room)
        if entry is None or entry.data.destination is None:
            return
        destination, peer = entry.data.destination, entry.data.destination.peer
        if job.is_fence:
            if entry.state is S.FENCING:
                self._effects.append(FenceWrites(job.room, peer, tuple(peer.unfenced)))
        elif peer.is_suspended and entry.state in _TO_WRITE:
            self._apply(job.room, E.WRITE_FAILED, TransferFailed(f"writes to {peer.name} are suspended"))
        elif self._apply(job.room, E.WRITE_BEGAN):
            self._effects.append(Write(job, entry.data, destination))

    def _written(self, event: Written) -> None:
        """Record that the job's logits row or chunks are in D's memory, or that the write failed."""
        room, job, entry = event.job.room, event.job, self.table.get(event.job.room)
        if entry is None or entry.data.destination is None:
            return
        record, destination = entry.data, entry.data.destination
        if event.error is not None:
            self._write_failed(room, record.request_id, event.error)
            return
        totals = zip_longest(record.bytes_per_rank, event.bytes_per_rank, fillvalue=0)
        record.bytes_per_rank = tuple(before + now for before, now in totals)
        self.bytes_moved += sum(event.bytes_per_rank)
        self._num_writes += 1
        record.units_left -= job.num_units
        if entry.state is S.WRITING:
            self._note_progress(room, entry, destination.peer)
        if job.is_aux and entry.state is S.WRITING:  # else the room failed meanwhile
            self._log(logging.INFO, log.FINISHED_AUX, record.request_id, request_id=record.request_id)
            self._send(room, destination.peer, AuxReady(self._config.incarnation))
        self._apply(room, E.WRITE_ENDED if record.units_left else E.LANDED)

    def _write_failed(self, room: bytes, request_id: str, failure: ChituError) -> None:
        may_land = isinstance(failure, WriteError) and not failure.fenced
        text = "transfer of %s failed: %s"
        self._log(logging.WARNING, text, request_id, failure.message, request_id=request_id)
        error = failure if isinstance(failure, TransferFailed) else TransferFailed(failure.message)
        self._apply(room, E.WRITE_UNFENCED if may_land else E.WRITE_FAILED, error)

    def _fence_tried(self, event: FenceResult) -> None:
        room, peer, rooms = event.fence
        if event.error is not None:
            self._log(logging.WARNING, "fencing writes to %s: %s", peer.name, event.error.message)
        if not event.is_fenced:
            self._apply(room, E.FENCE_FAILED)
            return
        for fenced in rooms:
            self._apply(fenced, E.FENCED)
        if not peer.is_suspended:
            self._log(logging.INFO, "resumed writes to %s", peer.name)

    # --------------------------------------------------------------------------------------------------- timers; lost D

    def _tick(self) -> None:
        """Apply deadlines, start fence attempts that are due, and repeat statuses."""
        for room, entry in self.table.items():
            if entry.state in _ADVANCING and entry.data.destination is not None:
                self._note_progress(room, entry, entry.data.destination.peer)
        for room in self.table.expired(self._now_s):
            self._expire(room)
        for room, entry in self.table.items():
            if entry.data.destination is None:
                continue
            peer = entry.data.destination.peer
            if entry.state is S.UNFENCED and peer.fence_due_s <= self._now_s:
                self._ask_to_fence(room, peer)
            if entry.data.repeat_due_s <= self._now_s:
                self._send_status(room, entry, peer)

    def _place_of(self, record: SendRoom) -> tuple[int, int]:
        """Return what is left to write of a room, and how far P has come with what is before it: the step in which the
        router's half waits, then other prompts until its own is computed, then the pages of others."""
        if record.computed.computed_s:
            return record.units_left, self._num_writes
        return record.units_left, self._num_layers if record.requested_s else min(self._num_layers, record.last_layer)

    def _note_progress(self, room: bytes, entry: SendEntry, peer: DecodePeer) -> None:
        """Extend the room's deadline if it has advanced, and tell D from time to time."""
        record, place = entry.data, self._place_of(entry.data)
        if place != record.seen:
            record.num_advances += 1
            record.seen = place
            self.table.advance(entry, self._now_s)
        if record.num_advances > record.num_reported and record.report_due_s <= self._now_s:
            record.num_reported = record.num_advances
            record.report_due_s = self._now_s + self._config.progress_interval_s
            self._send(room, peer, TransferProgress(self._config.incarnation, record.num_advances))

    def _expire(self, room: bytes) -> None:
        entry = self.table.get(room)
        if entry is None:
            return
        peer = self._name_of(entry.data.decode_rank)
        text = self.table.overdue_text(entry, self._name, peer, SENDER_AWAITS, self._now_s)
        is_first = entry.state is S.REQUESTED
        error = BootstrapTimeout(text) if is_first else timeout_of(text, entry.data.num_advances > 0)
        self._apply(room, E.DEADLINE, error)

    def _ask_to_fence(self, room: bytes, peer: DecodePeer) -> None:
        """Queue a fence attempt, unless another room of this D is being fenced."""
        entries = (self.table.get(other) for other in peer.unfenced)
        if not any(entry is not None and entry.state is S.FENCING for entry in entries):
            peer.fence_due_s = self._now_s + self._config.deadlines.retry_interval_s
            self._apply(room, E.FENCE_BEGAN)
            self._effects.append(QueueFence(room))

    def _fail_lost(self) -> None:
        """Fail the rooms of each D that left the cluster view or was replaced, and stop repeating statuses to it."""
        for room, entry in self.table.items():
            rank, incarnation = entry.data.decode_rank, entry.data.decode_incarnation
            if self._view.is_lost(rank, incarnation):
                self._apply(room, E.PEER_LOST, DecodeLost(f"{self._name_of(rank)} is gone"))

    # --------------------------------------------------------------------------------------------------------- outgoing

    def _send_status(self, room: bytes, entry: SendEntry, peer: DecodePeer) -> None:
        record = entry.data
        logprobs = record.computed.prompt_logprobs
        num_intervals = 1 + len(logprobs or b"") // REPEAT_BYTES
        record.repeat_due_s = self._now_s + num_intervals * self._config.deadlines.retry_interval_s
        if record.error is not None:
            self._refuse(room, peer, record.error, entry.state in (S.RELEASED, S.FORGOTTEN))
            return
        status = TransferStatus(
            self._config.incarnation,
            KVPoll.Success,
            bytes_per_rank=record.bytes_per_rank,
            times=record.times,
            kv_sums=record.kv_sums.message() if record.kv_sums is not None else None,
            state=record.state,
            prompt_logprobs=logprobs,
            uncached=record.computed.is_uncached,
        )
        self._send(room, peer, status)

    def _refuse(self, room: bytes, peer: DecodePeer, error: ChituError, is_fenced: bool = True) -> None:
        status = TransferStatus(self._config.incarnation, KVPoll.Failed, is_fenced, error.code, error.message)
        self._send(room, peer, status)

    def _send(self, room: bytes, peer: DecodePeer, message: Wire) -> None:
        self._effects.append(Send(peer.info.endpoint, peer.info.dst_port, room, message))

    def _name_of(self, rank: int) -> str:
        return instance_name(self._config.reader, rank)

    def _log(self, level: int, text: str, *values: object, request_id: str = "") -> None:
        self._effects.append(Line(level, text, values, request_id))


def _other_length(announced: int, mine: int) -> BadFrame:
    return BadFrame(f"D announced {announced} prompt tokens, the router's request has {mine}")
