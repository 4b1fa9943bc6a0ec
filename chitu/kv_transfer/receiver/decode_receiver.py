"""D's half of the transfer protocol: announce pages to P, verify what arrives, and never give a page back too early.

`DecodeReceiver` is the facade of two nouns and owns the one lock that guards both: `PrefillDirectory` (where P is and
who took our registration) and `ReceiveRooms`. With `verify_kv` a `KVVerifier` looks at the pages, on its own thread.
Step thread: `announce`, `poll`, `abort`. Comm: `on_frame`, `on_view`, `tick`; a helper thread of the service brings the
bootstrap directory (`on_routes`). Invariants: the lock is never held across `link`, `wake`, logging or a copy;
LOGITS_READY only after the aux row verified, SUCCESS only after that, with the byte count that was announced and with
KV that was verified (where it has to be); once TransferInfo was sent, RELEASED only when the writer is known to have
stopped. Time alone never frees an announced page: a late one-sided write must not land in a page that another request
owns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from chitu.errors import BadFrame, ChituError, Integrity, ProtocolError, from_code
from chitu.kv_transfer.checksums import read_sums
from chitu.kv_transfer.events import TransferEvent
from chitu.kv_transfer.parts import TICK_INTERVAL_S, KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.receiver.kv_verifier import Arrival, KVVerifier
from chitu.kv_transfer.receiver.prefill_directory import PrefillDirectory
from chitu.kv_transfer.receiver.receive_rooms import ReceiveEntry, ReceiveRoom, ReceiveRooms
from chitu.kv_transfer.transport_messages import TransportMessages
from chitu.net.job_thread import JobThread
from chitu.net.threads import ServiceThread
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    ClusterView,
    RegisterReply,
    RouteEntry,
    TransferInfo,
    TransferStatus,
    TransportMessage,
    pack_i32,
    peer_codec,
    unpack_i32,
)
from chitu.protocol.states import KVPoll, ReceiverEvent, ReceiverState
from chitu.types import REGISTRATION_ROOM, Role, room_text

logger = logging.getLogger(__name__)


class DecodeReceiver:
    """Implements `DecodeReceiverLike` and `CommSide`."""

    def __init__(self, config: KVManagerConfig, parts: RoleParts) -> None:
        self._config = config
        self._parts = parts
        self._lock = threading.Lock()
        self._out = TransferOutbox()
        self._view = PeerView(Role.PREFILL, config.host, parts.is_pid_alive)
        self._directory = PrefillDirectory(config, parts, self._view, self._out)
        self._messages = TransportMessages(config.incarnation, parts.transports, parts.link, self._address_of)
        fence = self._messages.fence
        self._rooms = ReceiveRooms(config, parts.clock, self._view, self._directory, self._out, fence)
        self._table = self._rooms.table
        self.verifier: JobThread[Arrival] | None = None
        """None where `verify_kv` is off."""
        if config.verify_kv != "off":
            assert parts.page_sums is not None
            verifier = KVVerifier(parts.page_sums, config.layout, self._on_verified)
            self.verifier = JobThread("verify", verifier.verify)
        self._next_tick_s = 0.0
        self._stale_replies = 0
        self.unknown_frames = 0
        """Undecodable or misdirected frames so far."""

    # ------------------------------------------------------------------------------------------------------ life, state

    def start(self) -> None:
        """Start the verifying thread, where there is one; without it `run_one()` pumps by hand."""
        self._messages.start(ServiceThread)
        if self.verifier is not None:
            self.verifier.start(ServiceThread)

    def close(self) -> None:
        """Stop verifying; D has no transfer threads."""
        if self.verifier is not None:
            self.verifier.close()

    def state(self, room: bytes) -> ReceiverState | None:
        """For tests, logs and metrics; None for a room that is unknown or over."""
        entry = self._table.get(room)
        return entry.state if entry is not None else None

    @property
    def num_rooms(self) -> int:
        return len(self._table)

    @property
    def bytes_moved(self) -> int:
        return self._rooms.bytes_moved

    @property
    def stale_frames(self) -> int:
        """Frames of incarnations that are gone, or that are not the writer of their room."""
        return self._rooms.stale_frames + self._stale_replies

    def registered_prefills(self) -> dict[int, int]:
        """engine_rank -> incarnation of the P that took our registration."""
        with self._lock:
            return self._directory.registered()

    def silent_prefills(self) -> tuple[int, ...]:
        """Incarnations of P that rooms wait for and that do not answer. Any thread."""
        with self._lock:
            return self._directory.silent()

    # ------------------------------------------------------------------------------------------------------ step thread

    def announce(
        self,
        room: bytes,
        request_id: str,
        pages: Sequence[int],
        aux_slot: int,
        num_tokens: int,
        prefill_rank: int,
        prefill_incarnation: int,
        prefix_pages: int,
    ) -> None:
        if num_tokens < 1 or len(pages) not in (0, self._config.num_pages(num_tokens)):
            raise ValueError(f"{len(pages)} pages for {num_tokens} tokens")
        if not 0 <= prefix_pages <= min(len(pages), num_tokens // self._config.layout.page_size):
            raise ValueError(f"{prefix_pages} of {len(pages)} pages are a prefix of {num_tokens} tokens")
        info = TransferInfo(
            incarnation=self._config.incarnation,
            dst_kv_indices=pack_i32(pages),
            dst_aux_index=aux_slot,
            num_tokens=num_tokens,
            prefix_pages=prefix_pages,
        )
        memory = self._parts.memory
        # Every rank's copy of a KV head counts: with fewer heads than ranks a head is written to several of them.
        page_bytes = memory.page_bytes * self._config.layout.tp_size * len(memory.region_bases)
        record = ReceiveRoom(
            request_id,
            info,
            aux_slot,
            (len(pages) - prefix_pages) * page_bytes + memory.aux_row_bytes,
            prefix_pages * page_bytes,
            prefill_rank,
            prefill_incarnation,
            self._parts.clock.monotonic(),
        )
        with self._lock:
            self._rooms.announce(room, record)
        self._empty_outbox()

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        with self._lock:
            self._rooms.abort(room, error)
        self._empty_outbox()

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        try:
            message = peer_codec.decode(payload)
            with self._lock:
                self._directory.heard(message.incarnation)
            if isinstance(message, RegisterReply):
                if room != REGISTRATION_ROOM:
                    raise BadFrame(f"a registration reply in room {room_text(room)}")
                self._on_register_reply(message)
            elif isinstance(message, TransportMessage):
                self._on_transport_message(message)
            elif len(room) != 16 or room == REGISTRATION_ROOM:
                raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
            elif isinstance(message, AuxReady):
                self._on_aux_ready(room, message)
            elif isinstance(message, TransferStatus):
                self._on_status(room, message)
            elif isinstance(message, AbortAck):
                with self._lock:
                    self._rooms.on_abort_ack(room, message)
            elif isinstance(message, AbortTransfer):
                with self._lock:
                    self._rooms.on_abort(room, message)
            else:
                raise BadFrame(f"a {type(message).__name__} sent to D")
        except ProtocolError as error:
            self.unknown_frames += 1
            logger.warning("D%d: ignored a frame: %s", self._config.engine_rank, error.message)
        self._empty_outbox()

    def _on_register_reply(self, message: RegisterReply) -> None:
        with self._lock:
            if self._directory.on_reply(message):
                self._rooms.tell_registered()
            else:
                self._stale_replies += 1

    def _on_transport_message(self, message: TransportMessage) -> None:
        with self._lock:
            rank = self._directory.rank_of(message.incarnation)
            if rank is None:
                self._rooms.stale_frames += 1
                return
        self._messages.deliver(rank, message)

    def _address_of(self, incarnation: int) -> tuple[str, int] | None:
        with self._lock:
            return self._directory.address_of(incarnation)

    def _on_aux_ready(self, room: bytes, message: AuxReady) -> None:
        with self._lock:
            entry = self._rooms.hear(room, message.incarnation)
            if entry is None or entry.state is not ReceiverState.WAITING:
                return
        error = self._verify_logits(room, entry.data)
        with self._lock:
            if error is not None:
                self._rooms.fail(room, ReceiverEvent.CORRUPT, error)
            else:
                self._rooms.logits_arrived(room)

    def _on_status(self, room: bytes, message: TransferStatus) -> None:
        if message.poll not in (KVPoll.Success, KVPoll.Failed):
            raise BadFrame(f"a status with poll {message.poll}")
        with self._lock:
            self._rooms.acknowledge(room, message)
            entry = self._rooms.hear(room, message.incarnation)
            if entry is None:
                return
            if message.poll == KVPoll.Failed:
                self._rooms.fail(room, ReceiverEvent.PEER_FAILED, from_code(message.code, message.message))
                if message.settled:
                    self._rooms.writer_stopped(room)
                return
            if entry.data.is_written:  # P repeats what is being verified
                return
            is_logits_missing = entry.state is ReceiverState.WAITING  # AuxReady was lost
        error: ChituError | None = None
        moved_bytes = sum(message.bytes_per_rank)
        if moved_bytes != entry.data.expected_bytes:
            error = Integrity(f"P moved {moved_bytes} bytes, {entry.data.expected_bytes} were expected")
        elif is_logits_missing:
            error = self._verify_logits(room, entry.data)
        arrival: Arrival | None = None
        if error is None and self.verifier is not None:
            try:
                arrival = self._arrival(room, entry, message)
            except Integrity as failure:
                error = failure
        with self._lock:
            self._rooms.written(room, entry)
            entry.data.prompt_logprobs = message.prompt_logprobs
            if error is not None:
                self._rooms.fail(room, ReceiverEvent.CORRUPT, error)
            elif arrival is not None:
                self._rooms.logits_arrived(room)
            else:
                self._rooms.succeed(room, entry, moved_bytes, message.times)
        if arrival is not None and self.verifier is not None:
            self.verifier.put(arrival)

    def _arrival(self, room: bytes, entry: ReceiveEntry, message: TransferStatus) -> Arrival:
        """Raises Integrity where P did not send the checksums that we need."""
        pages = unpack_i32(entry.data.info.dst_kv_indices)
        expected = read_sums(message.kv_sums, self._config.verify_kv, entry.data.info.prefix_pages, len(pages))
        own_pages = [pages[position] for position in expected.positions.tolist()]
        return Arrival(room, entry, own_pages, expected, sum(message.bytes_per_rank), message.times)

    def _verify_logits(self, room: bytes, record: ReceiveRoom) -> ChituError | None:
        """Without the lock: it reads half a megabyte. The slot is the room's until RELEASED or after SUCCESS."""
        try:
            record.cached_tokens = self._parts.aux.verify(record.aux_slot, room)
        except Integrity as error:
            return error
        return None

    # ---------------------------------------------------------------------------------------------------- verify thread

    def _on_verified(self, arrival: Arrival, error: ChituError | None) -> None:
        room, record = arrival.room, arrival.entry.data
        with self._lock:
            if self._table.get(room) is arrival.entry:  # it may have ended meanwhile
                if error is None:
                    self._rooms.succeed(room, arrival.entry, arrival.moved_bytes, arrival.times)
                else:
                    text = "D%d refuses what P%d sent of %s: %s"
                    names = (self._config.engine_rank, record.prefill_rank, record.request_id)
                    self._out.log(logging.ERROR, text, *names, error.message, request_id=record.request_id)
                    self._rooms.fail(room, ReceiverEvent.CORRUPT, error)
        self._empty_outbox()

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_view(self, view: ClusterView) -> None:
        with self._lock:
            if not self._view.update(view):
                return
            self._directory.take_view()
            self._rooms.fail_lost()
        self._empty_outbox()

    def tick(self, now_s: float) -> None:
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            self._directory.tick(now_s)
            self._rooms.tick(now_s)
        self._empty_outbox()

    # ------------------------------------------------------------------------------------------------------- any thread

    def on_routes(self, routes: Sequence[RouteEntry]) -> None:
        """What the bootstrap server lists. Any thread; the same knowledge as the view's, from the other source."""
        with self._lock:
            for route in routes:
                if route.role is Role.PREFILL:
                    self._directory.found(route.engine_rank, route.incarnation, route.rank_ip, route.rank_port)
            self._rooms.fail_lost()
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        with self._lock:
            sendings = self._out.take()
        sendings.leave(self._parts.link, self._parts.wake, logger)
