"""P's half of the transfer protocol: who registered, what was announced, what is computed, what has been written.

Three kinds of threads meet here. Step: `add_request`, `begin_step` .. `send_kv_cache`, `poll`, `abort`. Comm:
`on_frame`, `on_view`, `tick`. Transfer: `_work`, through the queue. One lock guards all state and is never held across
`link`, `wake` or a transport. Invariants: nothing is written for a room that D did not announce; Success is sent when
every byte landed; RELEASED comes when no write of the room runs, waits or can still land; each event comes once.

Sendable pages: a page leaves when it is full, or when the prompt ends in it; the partly filled last page of a chunk
leaves with a later chunk, so every page is written exactly once per layer. Chunks of a room that is not announced yet
are kept as ranges (not bytes) and leave when TransferInfo comes. Sources: S3 (lifecycle steps 2 to 5).
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from chitu import log
from chitu.errors import (
    BadFrame,
    BootstrapTimeout,
    ChituError,
    DecodeLost,
    ProtocolError,
    TransferFailed,
    TransferTimeout,
    from_code,
)
from chitu.kv_transfer.events import KVChunk, TransferEvent, TransferEventKind
from chitu.kv_transfer.parts import TICK_INTERVAL_S, KVManagerConfig, Outbox, RoleParts
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.plan import join, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.registration import (
    Connection,
    DecodePeer,
    check_registration,
    check_return_address,
    open_connection,
)
from chitu.kv_transfer.transfer_queue import Batch, TransferKVChunk, TransferQueue
from chitu.kv_transfer.transfer_table import NEVER_S, Entry, Tombstone, TransferTable
from chitu.kv_transfer.transport import CopyList, WriteError
from chitu.lifecycle import SENDER_DEADLINES, SENDER_TRANSITIONS, KVPoll, SenderEvent, SenderState
from chitu.messages import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    ClusterView,
    KVArgsRegisterInfo,
    RegisterReply,
    StatusAck,
    TransferInfo,
    TransferStatus,
    peer_codec,
    unpack_i32,
)
from chitu.net.threads import ServiceThread
from chitu.types import REGISTRATION_ROOM, Role, room_text

logger = logging.getLogger(__name__)


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
    next_page: int = 0
    """Pages before this one (of all layers) were handed out by finished steps."""
    backlog: list[TransferKVChunk] = field(default_factory=list)
    """Computed, not announced."""
    aux_slot: int = -1
    is_aux_written: bool = False
    units_left: int = 0
    """Layer pages that have not landed yet; known from the announcement on."""
    bytes_moved: int = 0
    is_kv_logged: bool = False
    is_in_flight: bool = False
    """A transfer thread is inside a transport call for this room."""
    is_unsettled: bool = False
    """A write failed and may still land."""
    settle_due_s: float = NEVER_S
    error: ChituError | None = None
    repeat_due_s: float = NEVER_S
    is_peer_done: bool = False
    """D aborted or acknowledged the failure: no status is owed any more."""


@dataclass(slots=True)
class _StepChunk:
    room: bytes
    first_page: int
    end_page: int
    layers_done: set[int] = field(default_factory=set)


SendEntry = Entry[SenderState, SendRoom]


class PrefillSender:
    """Implements `PrefillSenderLike` and `CommSide`."""

    def __init__(self, config: KVManagerConfig, parts: RoleParts) -> None:
        self._config = config
        self._parts = parts
        self._deadlines = config.deadlines
        self._clock = parts.clock
        self._lock = threading.Lock()
        self._out = Outbox()
        self._table: TransferTable[SenderState, SenderEvent, SendRoom] = TransferTable(
            SENDER_TRANSITIONS, SENDER_DEADLINES
        )
        self._view = PeerView(Role.DECODE, config.host, parts.is_pid_alive)
        self.decode_kv_args_table: dict[int, DecodePeer] = {}
        """S3's table of registered D, by incarnation."""
        self._step: list[_StepChunk] = []
        unit_bytes = parts.memory.page_bytes * len(parts.memory.region_bases) // config.layout.num_layers
        self._max_batch_units = max(1, config.max_batch_bytes // unit_bytes)
        self.queue = TransferQueue(self._work, self._max_batch_units)
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        """Undecodable or misdirected frames so far."""
        self.stale_frames = 0
        """Frames of incarnations that are not (or no longer) registered, or that name another room's D."""
        self.bytes_moved = 0

    # ----------------------------------------------------------------------------------------------------- life, state

    def start(self) -> None:
        """Start the transfer threads; without it `queue.run_one()` pumps by hand."""
        self.queue.start(self._config.transfer_threads, ServiceThread)

    def close(self) -> None:
        """Stop writing. The transports may be closed after this."""
        self.queue.close(self._config.write_timeout_s + 1.0)

    def state(self, room: bytes) -> SenderState | None:
        """For tests, logs and metrics; None for a room that is unknown or forgotten."""
        entry = self._table.get(room)
        return entry.state if entry is not None else None

    @property
    def num_rooms(self) -> int:
        return len(self._table)

    # ----------------------------------------------------------------------------------------------------- step thread

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        with self._lock:
            self._add_request(room, request_id, num_tokens, decode_rank, decode_incarnation)
        self._leave()

    def _add_request(self, room: bytes, request_id: str, num_tokens: int, rank: int, incarnation: int) -> None:
        tombstone = self._table.tombstone(room)
        if tombstone is not None:
            # D gave up before the router's half came (or the room is used twice): the step thread must not wait for it.
            error = from_code(tombstone.code or "protocol", tombstone.message or "this room ended already")
            self._event(TransferEventKind.FAILED, room, error)
            self._event(TransferEventKind.RELEASED, room)
            return
        transition = self._table.apply(room, SenderEvent.ADD_REQUEST, SendRoom())
        if transition is None:
            logger.warning("room %s was added twice", room_text(room))
            return
        entry, record = transition.entry, transition.entry.data
        record.request_id, record.num_tokens = request_id, num_tokens
        record.decode_rank, record.decode_incarnation = rank, incarnation
        if record.info is not None:  # announced first
            assert record.peer is not None
            if record.peer.info.incarnation != incarnation:
                self._fail(room, SenderEvent.REFUSED, BadFrame("the room was announced by another D than its own"))
            elif record.info.num_tokens != num_tokens:
                self._fail(room, SenderEvent.REFUSED, _other_length(record.info.num_tokens, num_tokens))
            else:
                self._both_halves(room, entry)
            return
        entry.deadline_s = self._clock.monotonic() + self._deadlines.queue_s + self._deadlines.bootstrap_s
        if self._view.is_lost(rank, incarnation):
            self._fail(room, SenderEvent.PEER_LOST, DecodeLost(f"D{rank} is gone"))

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        with self._lock:
            self._step = []
            for chunk in chunks:
                entry = self._table.get(chunk.room)
                if entry is None or entry.state not in _OPEN:
                    continue
                record = entry.data
                record.pages = tuple(chunk.pages)
                is_last = chunk.end >= record.num_tokens
                page_size = self._config.layout.page_size
                end_page = self._config.num_pages(chunk.end) if is_last else chunk.end // page_size
                if end_page > record.next_page:
                    self._step.append(_StepChunk(chunk.room, record.next_page, end_page))

    def on_layer_done(self, layer: int) -> None:
        with self._lock:
            for chunk in self._step:
                self._layer_done(chunk, layer)
        self._leave()

    def end_step(self) -> None:
        with self._lock:
            for chunk in self._step:
                for layer in range(self._config.layout.num_layers):
                    self._layer_done(chunk, layer)
                entry = self._table.get(chunk.room)
                if entry is None:
                    continue
                entry.data.next_page = chunk.end_page
                if entry.data.backlog:
                    entry.data.backlog = [self._whole(entry.data)]
            self._step = []
        self._leave()

    def _layer_done(self, chunk: _StepChunk, layer: int) -> None:
        entry = self._table.get(chunk.room)
        if layer in chunk.layers_done or entry is None:
            return
        chunk.layers_done.add(layer)
        piece = TransferKVChunk(layer, layer + 1, chunk.first_page, chunk.end_page)
        if entry.state is SenderState.REQUESTED:
            entry.data.backlog.append(piece)
        elif entry.state in (SenderState.WAITING, SenderState.TRANSFERRING):
            self._submit(chunk.room, entry, piece)

    def _whole(self, record: SendRoom) -> TransferKVChunk:
        return TransferKVChunk(0, self._config.layout.num_layers, 0, record.next_page)

    def _submit(self, room: bytes, entry: SendEntry, chunk: TransferKVChunk) -> None:
        """Queue an announced room's chunk, without the pages that D has, in pieces of at most one batch."""
        info = entry.data.info
        assert info is not None
        first_page = max(chunk.first_page, info.prefix_pages)
        if first_page >= chunk.end_page:
            return
        self._table.apply(room, SenderEvent.DATA)
        layers = max(1, self._max_batch_units // (chunk.end_page - first_page))
        for layer in range(chunk.first_layer, chunk.end_layer, layers):
            end_layer = min(layer + layers, chunk.end_layer)
            self.queue.put_chunk(room, TransferKVChunk(layer, end_layer, first_page, chunk.end_page))

    def send_kv_cache(self, room: bytes, aux_slot: int) -> None:
        with self._lock:
            entry = self._table.get(room)
            if entry is not None and entry.state in _OPEN and entry.data.aux_slot < 0:
                entry.data.aux_slot = aux_slot
                if entry.state is not SenderState.REQUESTED:
                    self._submit_aux(room)

    def _submit_aux(self, room: bytes) -> None:
        self._table.apply(room, SenderEvent.DATA)
        self.queue.put_aux(room)

    def reset_chunks(self, room: bytes) -> bool:
        with self._lock:
            entry = self._table.get(room)
            if entry is None or entry.state is not SenderState.REQUESTED:
                return False
            record = entry.data
            record.backlog, record.pages, record.next_page, record.aux_slot = [], (), 0, -1
            self._step = [chunk for chunk in self._step if chunk.room != room]
            return True

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        with self._lock:
            waiting = self._out.drop_events(room)
            entry = self._table.get(room)
            if TransferEventKind.SUCCESS in waiting:
                self._event(TransferEventKind.RELEASED, room)
            elif entry is not None:
                self._fail(room, SenderEvent.ABORT, error)
        self._leave()

    # ----------------------------------------------------------------------------------------------------- comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        try:
            message = peer_codec.decode(payload)
            if isinstance(message, KVArgsRegisterInfo):
                if room != REGISTRATION_ROOM:
                    raise BadFrame(f"a registration in room {room_text(room)}")
                self._on_register(message)
            elif len(room) != 16 or room == REGISTRATION_ROOM:
                raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
            elif isinstance(message, TransferInfo):
                self._on_transfer_info(room, message)
            elif isinstance(message, StatusAck):
                self._on_status_ack(room, message)
            elif isinstance(message, AbortTransfer):
                self._on_abort(room, message)
            elif not isinstance(message, AbortAck):  # P sends no AbortTransfer, so an ack of one is only late
                raise BadFrame(f"a {type(message).__name__} sent to P")
        except ProtocolError as error:
            self.unknown_frames += 1
            logger.warning("P%d: ignored a frame: %s", self._config.engine_rank, error.message)
        self._leave()

    def on_view(self, view: ClusterView) -> None:
        with self._lock:
            if not self._view.update(view):
                return
            for room, entry in self._table.items():
                rank, incarnation = self._decode_of(entry.data)
                if incarnation and self._view.is_lost(rank, incarnation):
                    self._peer_lost(room, rank)
        self._leave()

    def tick(self, now_s: float) -> None:
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            for room in self._table.expired(now_s):
                self._expire(room)
            for room, entry in self._table.items():
                self._tick_room(room, entry, now_s)
            idle = self._take_idle_connections()
        self._leave()
        for connection in idle:
            connection.transport.disconnect(connection.handle)

    def _tick_room(self, room: bytes, entry: SendEntry, now_s: float) -> None:
        record = entry.data
        if entry.state is SenderState.SETTLING:
            self._try_settle(room)
            if self._table.get(room) is not entry:
                return
            if record.settle_due_s <= now_s and not record.is_in_flight and entry.state is SenderState.SETTLING:
                record.settle_due_s = now_s + self._deadlines.retry_interval_s
                self.queue.put_settle(room)
        if record.repeat_due_s <= now_s:
            self._send_status(room, entry)

    def _expire(self, room: bytes) -> None:
        entry = self._table.get(room)
        assert entry is not None
        if entry.state in (SenderState.SUCCEEDED, SenderState.RELEASED):
            self._forget(room, SenderEvent.GIVEN_UP)
        elif entry.state is SenderState.REQUESTED:
            limit_s = self._deadlines.queue_s + self._deadlines.bootstrap_s
            error: ChituError = BootstrapTimeout(f"D{entry.data.decode_rank} did not announce within {limit_s:g} s")
            self._fail(room, SenderEvent.DEADLINE, error)
        else:
            error = TransferTimeout(f"not transferred within {self._deadlines.transfer_s:g} s ({entry.state.name})")
            self._fail(room, SenderEvent.DEADLINE, error)

    # ------------------------------------------------------------------------------------------- registration (comm)

    def _on_register(self, info: KVArgsRegisterInfo) -> None:
        check_return_address(info)
        with self._lock:
            known = self.decode_kv_args_table.get(info.incarnation)
            is_old = self._view.is_replaced(info.engine_rank, info.incarnation)
        if is_old:
            self.stale_frames += 1
            return
        error: ChituError | None = None
        if known is None:
            try:
                memory = check_registration(info, self._config.layout, self._parts.memory)
                connection = open_connection(memory, self._parts.transports)
            except ChituError as failure:
                error = failure
            else:
                self._add_peer(DecodePeer(info, memory, connection))
        elif known.info != info:
            error = BadFrame(f"D{info.engine_rank} registered twice with different memory")
        if error is not None:
            logger.error("refused D%d (%s): %s", info.engine_rank, info.endpoint, error.message)
        reply = RegisterReply(
            engine_rank=self._config.engine_rank,
            incarnation=self._config.incarnation,
            peer_incarnation=info.incarnation,
            code=error.code if error is not None else "",
            message=error.message if error is not None else "",
        )
        with self._lock:
            self._out.frame(info.endpoint, info.dst_port, REGISTRATION_ROOM, reply)

    def _add_peer(self, peer: DecodePeer) -> None:
        with self._lock:
            self.decode_kv_args_table[peer.info.incarnation] = peer
            self._view.note(peer.info.engine_rank, peer.info.incarnation)
            for room, entry in self._table.items():
                rank, incarnation = self._decode_of(entry.data)
                if rank == peer.info.engine_rank and incarnation and self._view.is_lost(rank, incarnation):
                    self._peer_lost(room, rank)

    def _take_idle_connections(self) -> list[Connection]:
        """Connections to D that are lost and whose rooms are all over; superseded registrations are dropped."""
        idle: list[Connection] = []
        for incarnation, peer in list(self.decode_kv_args_table.items()):
            rank = peer.info.engine_rank
            if not self._view.is_lost(rank, incarnation):
                continue
            if any(entry.data.peer is peer for _, entry in self._table.items()):
                continue
            if peer.connection is not None:
                idle.append(peer.connection)
                peer.connection = None
            if self._view.is_replaced(rank, incarnation):
                del self.decode_kv_args_table[incarnation]
        return idle

    # ------------------------------------------------------------------------------------------------ rooms (comm)

    def _on_transfer_info(self, room: bytes, info: TransferInfo) -> None:
        peer = self.decode_kv_args_table.get(info.incarnation)
        if peer is None:
            self.stale_frames += 1  # D repeats its registration and this message until both are answered
            return
        refusal: ChituError | None = None
        if peer.connection is None and not self._view.is_lost(peer.info.engine_rank, info.incarnation):
            try:  # it was lost and came back
                peer.connection = open_connection(peer.memory, self._parts.transports)
                peer.is_suspended = False
            except ChituError as error:
                refusal = error
        with self._lock:
            self._announce(room, info, peer, refusal)

    def _announce(self, room: bytes, info: TransferInfo, peer: DecodePeer, refusal: ChituError | None) -> None:
        entry = self._table.get(room)
        if entry is not None and entry.data.info is not None:
            if entry.data.info != info or entry.data.peer is not peer:
                is_same_peer = entry.data.peer is peer
                self._refuse(peer, room, TransferFailed("this room was announced already"), settled=not is_same_peer)
            return
        tombstone = self._table.tombstone(room)
        if tombstone is not None:
            self._refuse(peer, room, from_code(tombstone.code or "protocol", tombstone.message or "the room is over"))
            return
        if entry is not None and entry.state is not SenderState.REQUESTED:
            assert entry.data.error is not None
            self._refuse(peer, room, entry.data.error)
            return
        if entry is not None and entry.data.decode_incarnation != info.incarnation:
            self._refuse(peer, room, BadFrame("the router gave this room to another D"))
            return
        if self._view.is_lost(peer.info.engine_rank, info.incarnation):
            refusal = DecodeLost(f"D{peer.info.engine_rank} is not in the cluster view")
        try:
            dst_pages = self._check_announcement(info, peer, entry.data if entry is not None else None)
        except ProtocolError as error:
            refusal = refusal or error
            dst_pages = array("i")
        if refusal is not None:
            self._refuse(peer, room, refusal)
            if entry is not None:
                self._fail(room, SenderEvent.REFUSED, refusal)
            return
        transition = self._table.apply(room, SenderEvent.ANNOUNCE, SendRoom())
        assert transition is not None
        entry = transition.entry
        record = entry.data
        record.info, record.peer, record.dst_pages = info, peer, dst_pages
        record.units_left = self._config.layout.num_layers * (len(dst_pages) - info.prefix_pages)
        entry.deadline_s = self._clock.monotonic() + self._deadlines.transfer_s
        if entry.state is SenderState.WAITING:
            self._both_halves(room, entry)

    def _check_announcement(self, info: TransferInfo, peer: DecodePeer, record: SendRoom | None) -> array[int]:
        """Destination pages, every one a page of D; BadFrame otherwise."""
        dst_pages = unpack_i32(info.dst_kv_indices)
        if info.num_tokens < 1 or len(dst_pages) != self._config.num_pages(info.num_tokens):
            raise BadFrame(f"{len(dst_pages)} pages announced for {info.num_tokens} tokens")
        if record is not None and record.num_tokens != info.num_tokens:
            raise _other_length(info.num_tokens, record.num_tokens)
        if min(dst_pages) < 0 or max(dst_pages) >= peer.memory.num_pages:
            raise BadFrame(f"pages {min(dst_pages)} to {max(dst_pages)} announced of {peer.memory.num_pages}")
        if len(set(dst_pages)) != len(dst_pages):
            raise BadFrame("a page is announced twice")
        if not 0 <= info.dst_aux_index < peer.memory.num_aux_slots:
            raise BadFrame(f"aux slot {info.dst_aux_index} announced of {peer.memory.num_aux_slots}")
        if not 0 <= info.prefix_pages <= len(dst_pages):
            raise BadFrame(f"{info.prefix_pages} prefix pages of {len(dst_pages)}")
        if info.state_indices:
            raise BadFrame("state indices announced for a layout without state")
        return dst_pages

    def _both_halves(self, room: bytes, entry: SendEntry) -> None:
        """The room can be delivered: tell the step thread, and let go of what was computed so far."""
        self._event(TransferEventKind.ANNOUNCED, room)
        backlog, entry.data.backlog = entry.data.backlog, []
        for chunk in backlog:
            self._submit(room, entry, chunk)
        if entry.data.aux_slot >= 0:
            self._submit_aux(room)

    def _refuse(self, peer: DecodePeer, room: bytes, error: ChituError, settled: bool = True) -> None:
        """One Failed status; D's repeats of TransferInfo get another one."""
        self._out.frame(
            peer.info.endpoint,
            peer.info.dst_port,
            room,
            TransferStatus(self._config.incarnation, KVPoll.Failed, settled, error.code, error.message),
        )

    def _on_status_ack(self, room: bytes, message: StatusAck) -> None:
        with self._lock:
            entry = self._table.get(room)
            if entry is None:
                return
            if entry.data.peer is None or entry.data.peer.info.incarnation != message.incarnation:
                self.stale_frames += 1
            elif entry.state is SenderState.SUCCEEDED and message.poll == KVPoll.Success:
                self._forget(room, SenderEvent.ACKNOWLEDGED)
            elif message.poll == KVPoll.Failed:
                entry.data.is_peer_done = True
                entry.data.repeat_due_s = NEVER_S
                self._forget(room, SenderEvent.ACKNOWLEDGED)  # absorbed while SETTLING

    def _on_abort(self, room: bytes, message: AbortTransfer) -> None:
        with self._lock:
            peer = self.decode_kv_args_table.get(message.incarnation)
            if peer is None:
                self.stale_frames += 1
                return
            entry = self._table.get(room)
            if entry is None:
                if self._table.tombstone(room) is None:
                    self._table.bury(room, Tombstone(message.code, message.message))
                self._ack_abort(room, peer)
                return
            if self._decode_of(entry.data)[1] != message.incarnation:
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
                self._fail(room, SenderEvent.PEER_ABORT, from_code(message.code, message.message))

    def _ack_abort(self, room: bytes, peer: DecodePeer) -> None:
        self._out.frame(peer.info.endpoint, peer.info.dst_port, room, AbortAck(self._config.incarnation))

    # -------------------------------------------------------------------------------------------- failure and its end

    def _fail(self, room: bytes, event: SenderEvent, error: ChituError) -> None:
        """Every failure goes through here, once per room: later ones are absorbed."""
        transition = self._table.apply(room, event)
        if transition is None:
            return
        record = transition.entry.data
        record.error = error
        record.backlog = []
        self.queue.drop(room)
        if event is not SenderEvent.ABORT and record.num_tokens:
            self._event(TransferEventKind.FAILED, room, error)
        if record.peer is not None and not record.is_peer_done:
            record.repeat_due_s = self._clock.monotonic()
        self._try_settle(room)
        if self._table.get(room) is transition.entry and record.repeat_due_s < NEVER_S:
            self._send_status(room, transition.entry)

    def _peer_lost(self, room: bytes, rank: int) -> None:
        self._fail(room, SenderEvent.PEER_LOST, DecodeLost(f"D{rank} is gone"))
        self._forget(room, SenderEvent.GIVEN_UP)

    def _try_settle(self, room: bytes) -> None:
        """SETTLING -> RELEASED where no write of the room runs or can still land."""
        entry = self._table.get(room)
        if entry is None or entry.state is not SenderState.SETTLING:
            return
        record, peer = entry.data, entry.data.peer
        if record.is_in_flight:
            return
        if record.is_unsettled:
            assert peer is not None
            if not self._view.is_dead(peer.info.engine_rank, peer.info.incarnation):
                if record.settle_due_s == NEVER_S:
                    record.settle_due_s = self._clock.monotonic()
                return
        self._table.apply(room, SenderEvent.SETTLED)
        self.queue.drop(room)
        if record.num_tokens:
            self._event(TransferEventKind.RELEASED, room)
        entry.deadline_s = self._clock.monotonic() + self._deadlines.transfer_s
        if peer is None:
            self._forget(room, SenderEvent.ACKNOWLEDGED)
        elif self._view.is_lost(peer.info.engine_rank, peer.info.incarnation):
            self._forget(room, SenderEvent.GIVEN_UP)
        else:
            self._ack_abort(room, peer)
            if record.is_peer_done:
                self._forget(room, SenderEvent.ACKNOWLEDGED)

    def _forget(self, room: bytes, event: SenderEvent) -> None:
        transition = self._table.apply(room, event)
        if transition is not None and transition.entry.state is SenderState.FORGOTTEN:
            error = transition.entry.data.error
            self._table.bury(room, Tombstone(error.code if error else "", error.message if error else ""))

    def _send_status(self, room: bytes, entry: SendEntry) -> None:
        record = entry.data
        assert record.peer is not None
        record.repeat_due_s = self._clock.monotonic() + self._deadlines.retry_interval_s
        info = record.peer.info
        if entry.state is SenderState.SUCCEEDED:
            status = TransferStatus(self._config.incarnation, KVPoll.Success, bytes_per_rank=(record.bytes_moved,))
        else:
            assert record.error is not None
            is_settled = entry.state is SenderState.RELEASED
            error = record.error
            status = TransferStatus(self._config.incarnation, KVPoll.Failed, is_settled, error.code, error.message)
        self._out.frame(info.endpoint, info.dst_port, room, status)

    # ------------------------------------------------------------------------------------------------- transfer threads

    def _work(self, batch: Batch) -> None:
        """One write, or one attempt to settle, of one room. Never two at once for the same room."""
        with self._lock:
            entry = self._table.get(batch.room)
            connection = self._may_work(batch, entry)
            if entry is not None and connection is not None:
                entry.data.is_in_flight = True
        if entry is not None and connection is not None:
            if batch.is_settle:
                self._settle(batch.room, entry.data, connection)
            else:
                self._write(batch, entry.data, connection)
        self._leave()

    def _may_work(self, batch: Batch, entry: SendEntry | None) -> Connection | None:
        if entry is None or entry.data.peer is None:
            return None
        peer = entry.data.peer
        if batch.is_settle:
            is_due = entry.state is SenderState.SETTLING and entry.data.is_unsettled
            return peer.connection if is_due else None
        if entry.state is not SenderState.TRANSFERRING:
            return None
        if peer.is_suspended or peer.connection is None:
            error = TransferFailed(f"{peer.name} does not take writes")
            self._fail(batch.room, SenderEvent.WRITE_FAILED, error)
            return None
        return peer.connection

    def _settle(self, room: bytes, record: SendRoom, connection: Connection) -> None:
        try:
            is_settled = connection.transport.settle(connection.handle, self._config.settle_timeout_s)
        except ChituError as error:
            logger.warning("settling room %s: %s", room_text(room), error.message)
            is_settled = False
        with self._lock:
            record.is_in_flight = False
            if is_settled:
                record.is_unsettled = False
                assert record.peer is not None
                record.peer.is_suspended = False
            self._try_settle(room)

    def _write(self, batch: Batch, record: SendRoom, connection: Connection) -> None:
        failure: ChituError | None = None
        nbytes = 0
        try:
            if batch.is_aux:
                self._parts.aux.seal(record.aux_slot, batch.room)
            copies = self._copies(batch, record)
            nbytes = copies.nbytes
            connection.transport.write(connection.handle, copies, self._config.write_timeout_s)
        except ChituError as error:
            failure = error
        with self._lock:
            record.is_in_flight = False
            if failure is not None:
                self._write_failed(batch.room, record, failure)
            else:
                self._written(batch, record, nbytes)
            self._try_settle(batch.room)

    def _copies(self, batch: Batch, record: SendRoom) -> CopyList:
        assert record.peer is not None and record.info is not None
        mine, theirs = self._parts.memory, record.peer.memory
        if batch.is_aux:
            return plan_aux_copy(mine, theirs, record.aux_slot, record.info.dst_aux_index)
        parts: list[CopyList] = []
        for chunk in _merged(batch.chunks):
            pages = slice(chunk.first_page, chunk.end_page)
            layers = range(chunk.first_layer, chunk.end_layer)
            parts.append(plan_page_copies(mine, theirs, record.pages[pages], record.dst_pages[pages], layers))
        return parts[0] if len(parts) == 1 else join(*parts)

    def _write_failed(self, room: bytes, record: SendRoom, failure: ChituError) -> None:
        if isinstance(failure, WriteError) and not failure.settled:
            record.is_unsettled = True
            assert record.peer is not None
            record.peer.is_suspended = True
        error = failure if isinstance(failure, TransferFailed) else TransferFailed(failure.message)
        self._out.log(logging.WARNING, "transfer of %s failed: %s", record.request_id, failure.message)
        self._fail(room, SenderEvent.WRITE_FAILED, error)

    def _written(self, batch: Batch, record: SendRoom, nbytes: int) -> None:
        record.bytes_moved += nbytes
        self.bytes_moved += nbytes
        entry = self._table.get(batch.room)
        if entry is None or entry.state is not SenderState.TRANSFERRING:
            return
        assert record.peer is not None
        if batch.is_aux:
            record.is_aux_written = True
            self._out.log(logging.INFO, log.FINISHED_AUX, record.request_id)
            info = record.peer.info
            self._out.frame(info.endpoint, info.dst_port, batch.room, AuxReady(self._config.incarnation))
        else:
            record.units_left -= sum(chunk.num_units for chunk in batch.chunks)
        if not record.units_left and not record.is_kv_logged:
            record.is_kv_logged = True
            self._out.log(logging.INFO, log.FINISHED_KV, record.request_id)
        if record.units_left or not record.is_aux_written:
            return
        self._table.apply(batch.room, SenderEvent.LANDED)
        entry.deadline_s = self._clock.monotonic() + self._deadlines.transfer_s
        self._event(TransferEventKind.SUCCESS, batch.room, kv_bytes=record.bytes_moved)
        self._send_status(batch.room, entry)

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _event(self, kind: TransferEventKind, room: bytes, error: ChituError | None = None, kv_bytes: int = 0) -> None:
        self._out.event(TransferEvent(kind, room, error, kv_bytes))

    def _leave(self) -> None:
        with self._lock:
            sendings = self._out.take()
        sendings.leave(self._parts.link, self._parts.wake, logger)

    @staticmethod
    def _decode_of(record: SendRoom) -> tuple[int, int]:
        """(engine_rank, incarnation) of the D of a room; (-1, 0) where unknown."""
        if record.peer is not None:
            return record.peer.info.engine_rank, record.peer.info.incarnation
        return record.decode_rank, record.decode_incarnation


_OPEN = frozenset({SenderState.REQUESTED, SenderState.WAITING, SenderState.TRANSFERRING})
"""States in which the step thread computes for a room."""


def _other_length(announced: int, mine: int) -> BadFrame:
    return BadFrame(f"D announced {announced} prompt tokens, the router's half has {mine}")


def _merged(chunks: Sequence[TransferKVChunk]) -> list[TransferKVChunk]:
    """Neighbouring layers of the same pages as one chunk: several layers become one plan."""
    merged: list[TransferKVChunk] = []
    for chunk in chunks:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.end_layer == chunk.first_layer
            and (last.first_page, last.end_page) == (chunk.first_page, chunk.end_page)
        ):
            merged[-1] = TransferKVChunk(last.first_layer, chunk.end_layer, chunk.first_page, chunk.end_page)
        else:
            merged.append(chunk)
    return merged
