"""D's half of the transfer protocol: announce pages to P, verify what arrives, and never give a page back too early.

Two kinds of threads meet here. Step: `announce`, `poll`, `abort`. Comm: `on_frame`, `on_view`, `tick`; a helper thread
of the service brings the bootstrap directory (`on_routes`). One lock guards all state and is never held across `link`,
`wake` or a checksum. Invariants: LOGITS_READY only after the aux row verified, SUCCESS only after that and with the
byte count that was announced; once TransferInfo was sent, RELEASED only when the writer is known to have stopped:
AbortAck, a settled Failed, Success, or its process is dead. Time alone never frees an announced page: a late one-sided
write must not land in a page that another request owns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from chitu import log
from chitu.errors import (
    BadFrame,
    BootstrapTimeout,
    ChituError,
    Integrity,
    Internal,
    PrefillLost,
    ProtocolError,
    TransferFailed,
    TransferTimeout,
    from_code,
)
from chitu.kv_transfer.events import TransferEvent, TransferEventKind
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.parts import TICK_INTERVAL_S, KVManagerConfig, Outbox, RoleParts
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.registration import TP_RANK
from chitu.kv_transfer.transfer_table import NEVER_S, Entry, Tombstone, TransferTable
from chitu.lifecycle import RECEIVER_DEADLINES, RECEIVER_TRANSITIONS, KVPoll, ReceiverEvent, ReceiverState
from chitu.messages import (
    PROTOCOL_VERSION,
    AbortAck,
    AbortTransfer,
    AuxReady,
    ClusterView,
    KVArgsRegisterInfo,
    RegisterReply,
    RouteEntry,
    StatusAck,
    TransferInfo,
    TransferStatus,
    pack_i32,
    peer_codec,
)
from chitu.types import REGISTRATION_ROOM, Role, room_text

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillPeer:
    """The newest known incarnation of one P rank."""

    incarnation: int
    host: str
    port: int
    is_registered: bool = False
    refusal: ChituError | None = None
    """P refused our registration; it will not change its mind within this incarnation."""
    repeat_due_s: float = 0.0


@dataclass(slots=True)
class ReceiveRoom:
    request_id: str
    info: TransferInfo
    aux_slot: int
    expected_bytes: int
    prefill_rank: int
    prefill_incarnation: int
    announced_s: float
    host: str = ""
    """P's address, kept by the room: the abort handshake outlives P's entry in the directory."""
    port: int = 0
    has_heard: bool = False
    """P gave a sign for this room: no need to repeat TransferInfo."""
    repeat_due_s: float = NEVER_S
    error: ChituError | None = None


ReceiveEntry = Entry[ReceiverState, ReceiveRoom]


class DecodeReceiver:
    """Implements `DecodeReceiverLike` and `CommSide`."""

    def __init__(self, config: KVManagerConfig, parts: RoleParts) -> None:
        self._config = config
        self._parts = parts
        self._deadlines = config.deadlines
        self._clock = parts.clock
        self._lock = threading.Lock()
        self._out = Outbox()
        self._table: TransferTable[ReceiverState, ReceiverEvent, ReceiveRoom] = TransferTable(
            RECEIVER_TRANSITIONS, RECEIVER_DEADLINES
        )
        self._view = PeerView(Role.PREFILL, config.host, parts.is_pid_alive)
        self._prefills: dict[int, PrefillPeer] = {}
        self._registration = KVArgsRegisterInfo(
            protocol_version=PROTOCOL_VERSION,
            engine_rank=config.engine_rank,
            incarnation=config.incarnation,
            endpoint=config.host,
            dst_port=config.control_port,
            layout=config.layout,
            ranks=(rank_memory(parts.memory, TP_RANK, parts.sessions),),
        )
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        self.stale_frames = 0
        self.bytes_moved = 0

    def close(self) -> None:
        """Nothing to end: D has no transfer threads."""

    def state(self, room: bytes) -> ReceiverState | None:
        """For tests, logs and metrics; None for a room that is unknown or over."""
        entry = self._table.get(room)
        return entry.state if entry is not None else None

    @property
    def num_rooms(self) -> int:
        return len(self._table)

    def registered_prefills(self) -> dict[int, int]:
        """engine_rank -> incarnation of the P that took our registration."""
        with self._lock:
            return {rank: peer.incarnation for rank, peer in self._prefills.items() if peer.is_registered}

    # ----------------------------------------------------------------------------------------------------- step thread

    def announce(
        self,
        room: bytes,
        request_id: str,
        pages: Sequence[int],
        aux_slot: int,
        num_tokens: int,
        prefill_rank: int,
        prefill_incarnation: int,
    ) -> None:
        if num_tokens < 1 or len(pages) != self._config.num_pages(num_tokens):
            raise ValueError(f"{len(pages)} pages for {num_tokens} tokens")
        info = TransferInfo(
            incarnation=self._config.incarnation,
            dst_kv_indices=pack_i32(pages),
            dst_aux_index=aux_slot,
            num_tokens=num_tokens,
        )
        memory = self._parts.memory
        kv_bytes = (len(pages) - info.prefix_pages) * memory.page_bytes * len(memory.region_bases)
        now_s = self._clock.monotonic()
        record = ReceiveRoom(
            request_id,
            info,
            aux_slot,
            kv_bytes + memory.aux_row_bytes,
            prefill_rank,
            prefill_incarnation,
            now_s,
        )
        with self._lock:
            if self._table.tombstone(room) is not None:
                self._event(TransferEventKind.FAILED, room, Internal("this room ended already"))
                self._event(TransferEventKind.RELEASED, room)
            else:
                transition = self._table.apply(room, ReceiverEvent.ANNOUNCE, record)
                if transition is None:
                    raise ValueError(f"room {room_text(room)} was announced already")
                transition.entry.deadline_s = now_s + self._deadlines.bootstrap_s
                if self._view.is_lost(prefill_rank, prefill_incarnation):
                    self._fail(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{prefill_rank} is gone"))
                else:
                    self._advance(room, transition.entry)
        self._leave()

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        with self._lock:
            waiting = self._out.drop_events(room)
            entry = self._table.get(room)
            tombstone = self._table.tombstone(room)
            if entry is not None:
                self._fail(room, ReceiverEvent.ABORT, error)
            elif tombstone is None or (not tombstone.code and TransferEventKind.RELEASED not in waiting):
                self._event(TransferEventKind.RELEASED, room)
                if tombstone is not None:  # it succeeded: say RELEASED once, not at every call
                    self._table.bury(room, Tombstone(error.code, error.message))
        self._leave()

    # ----------------------------------------------------------------------------------------------------- comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        try:
            message = peer_codec.decode(payload)
            if isinstance(message, RegisterReply):
                if room != REGISTRATION_ROOM:
                    raise BadFrame(f"a registration reply in room {room_text(room)}")
                self._on_register_reply(message)
            elif len(room) != 16 or room == REGISTRATION_ROOM:
                raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
            elif isinstance(message, AuxReady):
                self._on_aux_ready(room, message)
            elif isinstance(message, TransferStatus):
                self._on_status(room, message)
            elif isinstance(message, AbortAck):
                self._on_abort_ack(room, message)
            elif isinstance(message, AbortTransfer):
                self._on_abort(room, message)
            else:
                raise BadFrame(f"a {type(message).__name__} sent to D")
        except ProtocolError as error:
            self.unknown_frames += 1
            logger.warning("D%d: ignored a frame: %s", self._config.engine_rank, error.message)
        self._leave()

    def on_view(self, view: ClusterView) -> None:
        with self._lock:
            if not self._view.update(view):
                return
            for instance in self._view.present():
                if instance.control_port:
                    self._found(instance.engine_rank, instance.incarnation, instance.host, instance.control_port)
            for rank, peer in self._prefills.items():
                if self._view.is_lost(rank, peer.incarnation):
                    peer.is_registered, peer.repeat_due_s = False, 0.0  # register anew when it comes back
            self._fail_lost()
        self._leave()

    def on_routes(self, routes: Sequence[RouteEntry]) -> None:
        """What the bootstrap server lists. Any thread; the same knowledge as the view's, from the other source."""
        with self._lock:
            for route in routes:
                if route.role is Role.PREFILL:
                    self._found(route.engine_rank, route.incarnation, route.rank_ip, route.rank_port)
            self._fail_lost()
        self._leave()

    def tick(self, now_s: float) -> None:
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            for rank, peer in self._prefills.items():
                if peer.repeat_due_s <= now_s and not self._view.is_lost(rank, peer.incarnation):
                    self._register(peer)
            for room in self._table.expired(now_s):
                self._expire(room)
            for room, entry in self._table.items():
                self._tick_room(room, entry, now_s)
        self._leave()

    def _tick_room(self, room: bytes, entry: ReceiveEntry, now_s: float) -> None:
        record = entry.data
        if entry.state is ReceiverState.QUARANTINED and self._view.is_dead(
            record.prefill_rank, record.prefill_incarnation
        ):
            self._writer_stopped(room)
        elif record.repeat_due_s <= now_s:
            if entry.state is ReceiverState.WAITING and not record.has_heard:
                self._repeat(room, record, record.info)
            elif entry.state is ReceiverState.QUARANTINED:
                self._send_abort(room, record)

    def _expire(self, room: bytes) -> None:
        entry = self._table.get(room)
        assert entry is not None
        rank = entry.data.prefill_rank
        if entry.state is ReceiverState.BOOTSTRAPPING:
            error: ChituError = BootstrapTimeout(f"P{rank} was not reachable for {self._deadlines.bootstrap_s:g} s")
        else:
            error = TransferTimeout(f"P{rank} did not deliver within {self._deadlines.transfer_s:g} s")
        self._fail(room, ReceiverEvent.DEADLINE, error)

    # ------------------------------------------------------------------------------------------------- registration

    def _found(self, rank: int, incarnation: int, host: str, port: int) -> None:
        """Register with a P once per incarnation; repeated by `tick` until it replies."""
        self._view.note(rank, incarnation)
        peer = self._prefills.get(rank)
        if peer is not None and incarnation < peer.incarnation:
            return
        if peer is None or peer.incarnation != incarnation:
            peer = self._prefills[rank] = PrefillPeer(incarnation, host, port)
        elif (peer.host, peer.port) != (host, port):
            peer.host, peer.port, peer.is_registered = host, port, False
        if not peer.is_registered and peer.refusal is None and peer.repeat_due_s <= self._clock.monotonic():
            self._register(peer)

    def _register(self, peer: PrefillPeer) -> None:
        if peer.is_registered or peer.refusal is not None:
            peer.repeat_due_s = NEVER_S
            return
        peer.repeat_due_s = self._clock.monotonic() + self._deadlines.retry_interval_s
        self._out.frame(peer.host, peer.port, REGISTRATION_ROOM, self._registration)

    def _on_register_reply(self, message: RegisterReply) -> None:
        with self._lock:
            peer = self._prefills.get(message.engine_rank)
            is_mine = message.peer_incarnation == self._config.incarnation
            if peer is None or peer.incarnation != message.incarnation or not is_mine:
                self.stale_frames += 1
                return
            if peer.is_registered or peer.refusal is not None:
                return
            peer.repeat_due_s = NEVER_S
            if message.code:
                peer.refusal = from_code(message.code, message.message)
                text = "P%d refused this instance: %s"
                self._out.log(logging.ERROR, text, message.engine_rank, message.message)
            else:
                peer.is_registered = True
                self._out.log(logging.INFO, log.DECODE_REGISTERED, message.engine_rank)
            for room, entry in self._table.items():
                if entry.state is ReceiverState.BOOTSTRAPPING:
                    self._advance(room, entry)

    def _advance(self, room: bytes, entry: ReceiveEntry) -> None:
        """Tell P of a room as soon as P knows us."""
        record = entry.data
        peer = self._prefills.get(record.prefill_rank)
        if peer is None or peer.incarnation != record.prefill_incarnation:
            return
        if peer.refusal is not None:
            self._fail(room, ReceiverEvent.PEER_FAILED, peer.refusal)
        elif peer.is_registered:
            self._table.apply(room, ReceiverEvent.SENT)
            entry.deadline_s = record.announced_s + self._deadlines.transfer_s
            record.host, record.port = peer.host, peer.port
            self._repeat(room, record, record.info)

    def _fail_lost(self) -> None:
        for room, entry in self._table.items():
            record = entry.data
            if self._view.is_lost(record.prefill_rank, record.prefill_incarnation):
                self._fail(room, ReceiverEvent.PEER_LOST, PrefillLost(f"P{record.prefill_rank} is gone"))
                if self._view.is_dead(record.prefill_rank, record.prefill_incarnation):
                    self._writer_stopped(room)

    # --------------------------------------------------------------------------------------------------------- rooms

    def _live(self, room: bytes, incarnation: int) -> ReceiveEntry | None:
        """The room's entry if this incarnation of P is its writer."""
        entry = self._table.get(room)
        if entry is None:
            return None
        if entry.data.prefill_incarnation != incarnation or entry.state is ReceiverState.BOOTSTRAPPING:
            self.stale_frames += 1
            return None
        entry.data.has_heard = True
        return entry

    def _on_aux_ready(self, room: bytes, message: AuxReady) -> None:
        with self._lock:
            entry = self._live(room, message.incarnation)
            is_wanted = entry is not None and entry.state is ReceiverState.WAITING
        if entry is None or not is_wanted:
            return
        error = self._verify(room, entry.data)
        with self._lock:
            if error is not None:
                self._fail(room, ReceiverEvent.CORRUPT, error)
            elif self._table.apply(room, ReceiverEvent.LOGITS) is not None:
                self._event(TransferEventKind.LOGITS_READY, room)

    def _verify(self, room: bytes, record: ReceiveRoom) -> ChituError | None:
        """Without the lock: it reads half a megabyte. The slot is the room's until RELEASED or after SUCCESS."""
        try:
            self._parts.aux.verify(record.aux_slot, room)
        except Integrity as error:
            return error
        return None

    def _on_status(self, room: bytes, message: TransferStatus) -> None:
        if message.poll not in (KVPoll.Success, KVPoll.Failed):
            raise BadFrame(f"a status with poll {message.poll}")
        with self._lock:
            self._acknowledge(room, message)
            entry = self._live(room, message.incarnation)
            state = entry.state if entry is not None else None
        if entry is None:
            return
        if message.poll == KVPoll.Failed:
            with self._lock:
                self._fail(room, ReceiverEvent.PEER_FAILED, from_code(message.code, message.message))
                if message.settled:
                    self._writer_stopped(room)
            return
        error: ChituError | None = None
        moved = sum(message.bytes_per_rank)
        if moved != entry.data.expected_bytes:
            error = Integrity(f"P moved {moved} bytes, {entry.data.expected_bytes} were expected")
        elif state is ReceiverState.WAITING:
            error = self._verify(room, entry.data)
        with self._lock:
            if error is not None:
                self._fail(room, ReceiverEvent.CORRUPT, error)
            else:
                self._succeed(room, entry, moved)
            self._writer_stopped(room)

    def _succeed(self, room: bytes, entry: ReceiveEntry, moved: int) -> None:
        if self._table.apply(room, ReceiverEvent.LOGITS) is not None:  # AuxReady was lost
            self._event(TransferEventKind.LOGITS_READY, room)
        if self._table.apply(room, ReceiverEvent.SUCCESS) is not None:
            self.bytes_moved += moved
            self._out.log(logging.INFO, log.RECEIVED_KV, entry.data.request_id)
            self._event(TransferEventKind.SUCCESS, room, kv_bytes=moved)
            self._table.bury(room, Tombstone("", ""))

    def _acknowledge(self, room: bytes, message: TransferStatus) -> None:
        """Every status is acknowledged, those of forgotten rooms too: P repeats until it hears."""
        entry = self._table.get(room)
        address: tuple[str, int] | None = None
        if entry is not None and entry.data.port:
            address = (entry.data.host, entry.data.port)
        else:
            peers = (peer for peer in self._prefills.values() if peer.incarnation == message.incarnation)
            address = next(((peer.host, peer.port) for peer in peers), None)
        if address is not None:
            self._out.frame(*address, room, StatusAck(self._config.incarnation, message.poll))

    def _on_abort_ack(self, room: bytes, message: AbortAck) -> None:
        with self._lock:
            if self._live(room, message.incarnation) is not None:
                # P stopped for good, so a room that still waited has failed; its Failed status was lost or is late.
                self._fail(room, ReceiverEvent.PEER_FAILED, TransferFailed("P stopped writing"))
                self._writer_stopped(room)

    def _on_abort(self, room: bytes, message: AbortTransfer) -> None:
        with self._lock:
            entry = self._live(room, message.incarnation)
            if entry is not None:
                self._out.frame(entry.data.host, entry.data.port, room, AbortAck(self._config.incarnation))
                self._fail(room, ReceiverEvent.PEER_FAILED, from_code(message.code, message.message))

    # -------------------------------------------------------------------------------------------- failure and its end

    def _fail(self, room: bytes, event: ReceiverEvent, error: ChituError) -> None:
        """Every failure goes through here, once per room: later ones are absorbed."""
        transition = self._table.apply(room, event)
        if transition is None:
            return
        record = transition.entry.data
        record.error = error
        if event is not ReceiverEvent.ABORT:
            self._event(TransferEventKind.FAILED, room, error)
        if transition.entry.state is ReceiverState.QUARANTINED:
            self._send_abort(room, record)
        else:
            self._released(room, error)

    def _writer_stopped(self, room: bytes) -> None:
        transition = self._table.apply(room, ReceiverEvent.WRITER_STOPPED)
        if transition is not None:
            assert transition.entry.data.error is not None
            self._released(room, transition.entry.data.error)

    def _released(self, room: bytes, error: ChituError) -> None:
        self._event(TransferEventKind.RELEASED, room)
        self._table.bury(room, Tombstone(error.code, error.message))

    def _send_abort(self, room: bytes, record: ReceiveRoom) -> None:
        assert record.error is not None
        self._repeat(room, record, AbortTransfer(self._config.incarnation, record.error.code, record.error.message))

    def _repeat(self, room: bytes, record: ReceiveRoom, message: TransferInfo | AbortTransfer) -> None:
        record.repeat_due_s = self._clock.monotonic() + self._deadlines.retry_interval_s
        self._out.frame(record.host, record.port, room, message)

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _event(self, kind: TransferEventKind, room: bytes, error: ChituError | None = None, kv_bytes: int = 0) -> None:
        self._out.event(kind, room, error, kv_bytes=kv_bytes)

    def _leave(self) -> None:
        with self._lock:
            sendings = self._out.take()
        sendings.leave(self._parts.link, self._parts.wake, logger)
