"""P's half of the transfer protocol: who registered, what was announced, what is computed, what has been written.

`PrefillSender` is the facade of five nouns and owns the one lock that guards all of them: `Announcements` (how rooms
begin), `ChunkFeed` (what was computed), `PageWriter` (what is written), `SendRooms` (how rooms end), `DecodePeers` (who
registered). Three kinds of threads meet here. Step: `add_request`, `begin_step` .. `send_kv_cache`, `poll`, `abort`.
Comm: `on_frame`, `on_view`, `tick`. Transfer: `_work`, through the queue. Invariants: the lock is never held across
`link`, `wake`, logging or a transport; nothing is written for a room that D did not announce; Success is sent when
every byte landed; each event comes once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from chitu.errors import BadFrame, ChituError, ProtocolError
from chitu.kv_transfer.events import KVChunk, TransferEvent, TransferEventKind
from chitu.kv_transfer.parts import TICK_INTERVAL_S, KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.sender.announcements import Announcements
from chitu.kv_transfer.sender.chunk_feed import ChunkFeed
from chitu.kv_transfer.sender.page_writer import PageWriter
from chitu.kv_transfer.sender.registration import DecodePeer, DecodePeers
from chitu.kv_transfer.sender.send_rooms import SendRooms
from chitu.kv_transfer.sender.transfer_queue import TransferJob, TransferQueue
from chitu.kv_transfer.transport_messages import TransportMessages
from chitu.net.threads import ServiceThread
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    ClusterView,
    KVArgsRegisterInfo,
    StatusAck,
    TransferInfo,
    TransportMessage,
    peer_codec,
)
from chitu.protocol.states import SenderEvent, SenderState
from chitu.types import REGISTRATION_ROOM, Ready, Role, room_text

logger = logging.getLogger(__name__)


class PrefillSender:
    """Implements `PrefillSenderLike` and `CommSide`."""

    def __init__(self, config: KVManagerConfig, parts: RoleParts) -> None:
        self._config = config
        self._parts = parts
        self._lock = threading.Lock()
        self._out = TransferOutbox()
        self._view = PeerView(Role.DECODE, config.host, parts.is_pid_alive)
        unit_bytes = parts.memory.page_bytes * len(parts.memory.region_bases) // config.layout.num_layers
        self.queue = TransferQueue(self._work, config.max_batch_bytes // unit_bytes)
        self._peers = DecodePeers(config, parts, self._view)
        self._rooms = SendRooms(config, parts.clock, self._view, self._out, self.queue)
        self._table = self._rooms.table
        self._feed = ChunkFeed(config, parts.clock, self._rooms, self.queue)
        self._announcements = Announcements(config, parts.clock, self._view, self._rooms, self._feed, self._out)
        self._writer = PageWriter(config, parts, self._rooms, self._out)
        self._messages = TransportMessages(config.incarnation, parts.transports, parts.link, self._address_of)
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        """Undecodable or misdirected frames so far."""
        self.stale_frames = 0
        """Frames of incarnations that are not (or no longer) registered, or that name another room's D."""

    # ------------------------------------------------------------------------------------------------------ life, state

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

    @property
    def bytes_moved(self) -> int:
        return self._writer.bytes_moved

    @property
    def suspended_ranks(self) -> tuple[int, ...]:
        """Engine ranks of the D that are not written to until a failed write has settled."""
        return tuple(sorted({peer.info.engine_rank for peer in list(self._peers.table.values()) if peer.is_suspended}))

    @property
    def decode_kv_args_table(self) -> dict[int, DecodePeer]:
        """The table of registered D, by incarnation."""
        return self._peers.table

    # ------------------------------------------------------------------------------------------------------ step thread

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        with self._lock:
            self._announcements.add_request(room, request_id, num_tokens, decode_rank, decode_incarnation)
        self._empty_outbox()

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        with self._lock:
            self._feed.begin_step(chunks)

    def on_layer_done(self, layer: int, ready: Ready | None = None) -> None:
        with self._lock:
            self._feed.layer_done(layer, ready)
        self._empty_outbox()

    def end_step(self) -> None:
        with self._lock:
            self._feed.end_step()
        self._empty_outbox()

    def send_kv_cache(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        with self._lock:
            self._feed.send_aux(room, aux_slot, prompt_logprobs)

    def reset_chunks(self, room: bytes) -> bool:
        with self._lock:
            return self._feed.reset(room)

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        with self._lock:
            waiting = self._out.drop_events(room)
            if TransferEventKind.SUCCESS in waiting:
                self._out.event(TransferEvent(TransferEventKind.RELEASED, room))
            else:
                self._rooms.fail(room, SenderEvent.ABORT, error)
        self._empty_outbox()

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        try:
            message = peer_codec.decode(payload)
            if isinstance(message, KVArgsRegisterInfo):
                if room != REGISTRATION_ROOM:
                    raise BadFrame(f"a registration in room {room_text(room)}")
                self._on_register(message)
            elif isinstance(message, TransportMessage):
                self._on_transport_message(message)
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
        self._empty_outbox()

    def _on_register(self, info: KVArgsRegisterInfo) -> None:
        answer = self._peers.answer(info)  # may connect: without the lock
        if answer is None:
            self.stale_frames += 1
            return
        reply, new_peer = answer
        with self._lock:
            if new_peer is not None:
                self._peers.add(new_peer)
                self._rooms.fail_lost()  # those of one that registered and never joined
            self._out.frame(info.endpoint, info.dst_port, REGISTRATION_ROOM, reply)

    def _on_transfer_info(self, room: bytes, info: TransferInfo) -> None:
        peer = self._peers.table.get(info.incarnation)
        if peer is None:
            self.stale_frames += 1  # D repeats its registration and this message until both are answered
            return
        unreachable = self._peers.reconnect(peer)  # may connect: without the lock
        with self._lock:
            self._announcements.on_transfer_info(room, info, peer, unreachable)

    def _on_status_ack(self, room: bytes, message: StatusAck) -> None:
        with self._lock:
            if not self._rooms.on_status_ack(room, message):
                self.stale_frames += 1

    def _on_abort(self, room: bytes, message: AbortTransfer) -> None:
        peer = self._peers.table.get(message.incarnation)
        if peer is None:
            self.stale_frames += 1
            return
        with self._lock:
            self._rooms.on_abort(room, message, peer)

    def _on_transport_message(self, message: TransportMessage) -> None:
        peer = self._peers.table.get(message.incarnation)
        if peer is None:
            self.stale_frames += 1
            return
        self._messages.deliver(peer.info.engine_rank, message)

    def _address_of(self, incarnation: int) -> tuple[str, int] | None:
        peer = self._peers.table.get(incarnation)
        return (peer.info.endpoint, peer.info.dst_port) if peer is not None else None

    def on_view(self, view: ClusterView) -> None:
        with self._lock:
            if not self._view.update(view):
                return
            self._rooms.fail_lost()
        self._empty_outbox()

    def tick(self, now_s: float) -> None:
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            self._rooms.tick(now_s)
            idle = self._peers.take_idle(entry.data.peer for _, entry in self._table.items())
        self._empty_outbox()
        for writer in idle:
            writer.close()

    # ------------------------------------------------------------------------------------------------- transfer threads

    def _work(self, batch: TransferJob) -> None:
        """One write, or one attempt to settle, of one room."""
        with self._lock:
            visit = self._writer.begin(batch)
        if visit is not None:
            outcome = self._writer.run(visit)
            with self._lock:
                self._writer.end(visit, outcome)
        self._empty_outbox()

    # ------------------------------------------------------------------------------------------------------ any of them

    def _empty_outbox(self) -> None:
        with self._lock:
            sendings = self._out.take()
        sendings.leave(self._parts.link, self._parts.wake, logger)
