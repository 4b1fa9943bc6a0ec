"""D's side of the transfer protocol: announce pages to P, verify what arrives, and never free a page too early.

`DecodeReceiver` is the shell of `ReceiverMachine`, which makes every decision. It owns the lock, the outbox and the
verifying thread, turns what happens into events, and carries out the effects. With `verify_kv` a separate thread
verifies the pages. Step thread: `announce`, `poll`, `row_checked`, `abort`. Comm thread: `on_frame`, `on_view`, `tick`.
Invariants: the lock is never held across `send_frame`, `wake`, logging or a copy; the comm thread never waits for a
device (rows there are checked by the step that draws from them, or by the verifying thread); LOGITS_READY comes only
after the aux row verified, or before the step that verifies it; SUCCESS only after a row verified, with the byte count
that was announced and, if required, with verified KV; once
TransferInfo was sent, RELEASED comes only when the writer is known to have stopped. Time alone never frees an announced
page: a late one-sided write must not land in a page that another request owns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import ChituError, Integrity, ProtocolError
from chitu.kv_cache.checksum import head_copies
from chitu.kv_cache.state_row import StateStamp, line_copies, state_bytes_of
from chitu.kv_transfer.both_sides import (
    TICK_INTERVAL_S,
    Aborted,
    DropEvents,
    KVManagerConfig,
    Line,
    OwnMemory,
    Send,
    Tick,
    TransferContext,
    TransferEvent,
    TransferOutbox,
    ViewChanged,
)
from chitu.kv_transfer.layout import (
    Int64s,
    PageSums,
    check_state,
    compare,
    rank_memory,
    read_sums,
    summed,
    traced_sums,
    transfer_sums,
)
from chitu.kv_transfer.peers import PeerView
from chitu.kv_transfer.receiver import (
    Announced,
    CheckPages,
    CheckRow,
    Deliver,
    Event,
    PagesChecked,
    Received,
    ReceiverMachine,
    ReceiveRoom,
    ReceiverState,
    RowChecked,
    WriterDead,
)
from chitu.kv_transfer.transports.local import TransportMessages
from chitu.net.threads import JobThread, ServiceThread
from chitu.protocol import (
    PROTOCOL_VERSION,
    ClusterView,
    KVArgsRegisterInfo,
    PathLoad,
    RankMemory,
    TransferInfo,
    TransferSums,
    pack_i32,
    peer_codec,
    unpack_i32,
)
from chitu.types import instance_name

logger = logging.getLogger(__name__)


class DecodeReceiver:
    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        context: TransferContext,
        followers: Sequence[RankMemory] = (),
    ) -> None:
        """`followers`: memory of ranks 1, 2, ... of several TP ranks."""
        self._config = config
        self._memory = memory
        self._clock, self._tracer = context.clock, context.tracer
        self._lock = threading.Lock()
        self._out = TransferOutbox(context, logger)
        self._view = PeerView(config.writer, config.host, context.is_pid_alive)
        self.machine = ReceiverMachine(config, _registration(config, memory, followers), self._view)
        self._messages = TransportMessages(config.incarnation, memory.transports, context.send_frame, self._address_of)
        self.verifier: JobThread[CheckRow | CheckPages] | None = None
        if memory.page_sums is not None or memory.state_seals is not None or memory.aux.is_on_device:
            self.verifier = JobThread("verify", self._check)
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        """Number of undecodable or misdirected frames so far."""

    # ------------------------------------------------------------------------------------------------------ life, state

    def start(self) -> None:
        """Start the transports' threads and the verifying one, if any. Tests call `verifier.run_one()` instead."""
        self._messages.start(ServiceThread)
        if self.verifier is not None:
            self.verifier.start(ServiceThread)

    def close(self) -> None:
        """Stop the verifying thread; D has no transfer threads."""
        if self.verifier is not None:
            self.verifier.close()

    def state(self, room: bytes) -> ReceiverState | None:
        """Return the room's state, or None if it is unknown or over. For tests, logs and metrics."""
        entry = self.machine.table.get(room)
        return entry.state if entry is not None else None

    @property
    def stale_frames(self) -> int:
        """Number of frames from incarnations that are gone or are not the writer of their room."""
        return self.machine.stale_frames

    suspended_ranks: tuple[int, ...] = ()
    path_loads: tuple[PathLoad, ...] = ()
    """D writes to no peer."""

    @property
    def silent_prefills(self) -> tuple[int, ...]:
        """Incarnations of P that rooms wait for and that do not answer. Any thread."""
        with self._lock:
            return self.machine.prefills.silent()

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
        page_sums: bool = False,
        state_slot: int = -1,
        digest: int = 0,
        is_drawn_unchecked: bool = False,
    ) -> None:
        """Announce reserved pages (ceil(num_tokens / page_size)) and an aux slot to P. Starts the transfer deadline.
        The first `prefix_pages`, all full, already hold their KV: P does not write to them. Without pages P sends the
        logits row only. With `page_sums`, SUCCESS brings checksums of both sides, if the layout allows any. With state
        and pages P writes to row `state_slot`, too; `digest` is that of the prompt (`state_row.digest_of`). With
        `is_drawn_unchecked` LOGITS_READY comes before the row is verified; the caller calls `row_checked`."""
        if num_tokens < 1 or len(pages) not in (0, self._config.num_pages(num_tokens)):
            raise ValueError(f"{len(pages)} pages for {num_tokens} tokens")
        if not 0 <= prefix_pages <= min(len(pages), num_tokens // self._config.layout.page_size):
            raise ValueError(
                f"{prefix_pages} prefix pages do not fit {len(pages)} pages of a prompt of {num_tokens} tokens"
            )
        has_state = self._config.has_state(len(pages))
        if has_state == (state_slot < 0) or (has_state and prefix_pages):
            raise ValueError(f"state slot {state_slot} and {prefix_pages} prefix pages for {len(pages)} pages")
        info = TransferInfo(
            incarnation=self._config.incarnation,
            dst_kv_indices=pack_i32(pages),
            dst_aux_index=aux_slot,
            num_tokens=num_tokens,
            prefix_pages=prefix_pages,
            dst_state_index=state_slot,
            page_sums=page_sums and self._memory.page_sums is not None,
        )
        pool = self._memory.pool
        # Every rank's copy of a KV head counts: with fewer heads than ranks a head is written to several of them.
        page_bytes = sum(pool.page_bytes) * self._config.layout.tp_size
        record = ReceiveRoom(
            request_id,
            info,
            aux_slot,
            (len(pages) - prefix_pages) * page_bytes
            + pool.aux_row_bytes
            + (state_bytes_of(self._config.layout) if has_state else 0),
            prefix_pages * page_bytes,
            prefill_rank,
            prefill_incarnation,
            is_traced=self._memory.page_sums is not None and self._is_traced(room),
            state=StateStamp(num_tokens, digest) if has_state else None,
            is_drawn_unchecked=is_drawn_unchecked,
        )
        self._handle(Announced(room, record))

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def row_checked(self, room: bytes, aux_slot: int, found: bytes) -> int | None:
        """Judge what a step found in the row that it drew from. Return how many tokens P had cached; None if the row is
        not what P computed: FAILED follows, and what was drawn counts for nothing."""
        checked = self._judged(room, lambda: self._memory.aux.judge(aux_slot, room, found))
        return checked.cached_tokens if checked.error is None else None

    def abort(self, room: bytes, error: ChituError) -> None:
        """Ask P to stop. Only RELEASED follows, once P has stopped. An unknown room gets RELEASED at once."""
        self._handle(Aborted(room, error))

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Process one P<->D message. Never raises for bad input: counts it, and fails its own room at most."""
        try:
            self._handle(Received(room, peer_codec.decode(payload)))
        except ProtocolError as error:
            self.unknown_frames += 1
            name = instance_name(self._config.reader, self._config.engine_rank)
            logger.warning("%s: ignored a frame: %s", name, error.message)

    def on_image_frame(self, room: bytes, payload: bytes) -> None:
        """Count a frame on the port for E: nothing takes features here."""
        self.unknown_frames += 1

    def on_view(self, view: ClusterView, router: int = 0) -> None:
        """Take a new cluster view: fail the rooms of incarnations that are gone, and register with new P."""
        with self._lock:
            if not self._view.update(view, router):
                return
        self._handle(ViewChanged())
        self._release_dead_writers()

    def on_silence(self, router: int) -> None:
        """Note that nothing is heard of a router: what it showed of the other instances counts no more."""
        with self._lock:
            self._view.note_silence(router)
        self._handle(ViewChanged())
        self._release_dead_writers()

    def tick(self, now_s: float) -> None:
        """Apply deadlines and repeat messages. Called at least every 50 ms."""
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            has_seen_one_end = self._view.find_ended()
        if has_seen_one_end:
            self._handle(ViewChanged())
        self._handle(Tick())
        self._release_dead_writers()

    def _release_dead_writers(self) -> None:
        with self._lock:
            feared = self.machine.quarantined_writers()
            dead = [writer[1] for writer in feared if self._view.is_dead(*writer)]
        for incarnation in dead:
            if self._messages.revoke(incarnation):
                self._handle(WriterDead(incarnation))

    # ------------------------------------------------------------------------------------------------------- any thread

    def _address_of(self, incarnation: int) -> tuple[str, int] | None:
        with self._lock:
            return self.machine.prefills.address_of(incarnation)

    def _handle(self, event: Event) -> None:
        """Apply an event and carry out its effects. Raises ProtocolError for an invalid frame."""
        jobs: list[CheckRow | CheckPages | Deliver] = []
        with self._lock:
            for effect in self.machine.handle(event, self._clock.monotonic()):
                if isinstance(effect, Send | TransferEvent | Line):
                    self._out.put(effect)
                elif isinstance(effect, DropEvents):
                    self._out.drop_events(effect.room)
                else:
                    jobs.append(effect)
            leaving = self._out.drain()
        self._out.leave(leaving)
        for job in jobs:
            if isinstance(job, CheckRow) and not self._memory.aux.is_on_device:
                self._check_row(job)
            elif isinstance(job, CheckRow | CheckPages):
                assert self.verifier is not None
                self.verifier.put(job)
            else:
                self._messages.deliver(*job)

    # ----------------------------------------------------------------------------------------------------- verification

    def _check(self, job: CheckRow | CheckPages) -> None:
        if isinstance(job, CheckRow):
            self._check_row(job)
        else:
            self._check_pages(job)

    def _check_row(self, job: CheckRow) -> None:
        """Verify a logits row (half a megabyte) without the lock. The room keeps its slot until RELEASED or SUCCESS."""
        self._judged(job.room, lambda: self._memory.aux.verify(job.aux_slot, job.room))

    def _judged(self, room: bytes, judge: Callable[[], int]) -> RowChecked:
        try:
            checked = RowChecked(room, None, judge())
        except Integrity as error:
            checked = RowChecked(room, error)
        self._handle(checked)
        return checked

    def _check_pages(self, job: CheckPages) -> None:
        """Verify a room's pages and state row on the verifying thread, so heartbeats, acknowledgements and steps do not
        wait for it. If the room ends meanwhile (deadline, client gone), the result is ignored; reading memory that
        another request owns by then does no harm."""
        error: ChituError | None = None
        sums: TransferSums | None = None
        if self._memory.page_sums is not None:
            error, sums = self._summed_pages(self._memory.page_sums, job)
        if self._config.verify_kv == "off":  # computed for the trace or the client only
            error = None
        if job.state is not None:
            error = error or self._state_error(job, job.state)
        self._handle(PagesChecked(job.room, error, sums))

    def _state_error(self, job: CheckPages, expected: StateStamp) -> ChituError | None:
        """Return what is wrong with a room's state row."""
        assert self._memory.state_seals is not None, "the layout has state"
        try:
            found = self._memory.state_seals.seal(job.info.dst_state_index)
            check_state(job.status.state, expected, found, line_copies(self._config.layout))
        except ChituError as failure:
            return failure
        return None

    def _summed_pages(self, page_sums: PageSums, job: CheckPages) -> tuple[ChituError | None, TransferSums | None]:
        """Return what is wrong with a room's pages, and both sides' checksums if the request asks for them."""
        layout, pages = self._config.layout, unpack_i32(job.info.dst_kv_indices)
        sums: TransferSums | None = None
        if job.status.kv_sums is None and self._config.verify_kv == "off":
            return None, None
        try:
            first, num_layers = job.info.prefix_pages, layout.num_layers
            expected = read_sums(job.status.kv_sums, self._config.verify_kv, first, len(pages), num_layers)
            own_pages = [pages[position] for position in expected.positions.tolist()]
            found = summed(page_sums, range(num_layers), own_pages, expected.is_by_layer)
            self._note_sums(job.room, expected.positions, found)
            if job.info.page_sums and len(own_pages) == len(pages) - first:
                sums = transfer_sums(expected, found, head_copies(layout))
            if self._config.verify_kv != "off":
                compare(expected, found, head_copies(layout))
        except ChituError as failure:
            return failure, sums
        return None, sums

    def _is_traced(self, room: bytes) -> bool:
        return self._tracer is not None and room in self._tracer.rooms

    def _note_sums(self, room: bytes, positions_N: Int64s, found: Int64s) -> None:
        """Store the checksums for the trace record that the scheduler makes when it receives SUCCESS."""
        traced = self._tracer.rooms.get(room) if self._tracer is not None else None
        if traced is not None:
            traced.hashes = traced_sums(positions_N, found, head_copies(self._config.layout))


def _registration(config: KVManagerConfig, memory: OwnMemory, followers: Sequence[RankMemory]) -> KVArgsRegisterInfo:
    return KVArgsRegisterInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_rank=config.engine_rank,
        incarnation=config.incarnation,
        endpoint=config.host,
        dst_port=config.control_port,
        layout=config.layout,
        ranks=(rank_memory(memory.pool, MAIN_RANK, memory.sessions), *followers),
    )
