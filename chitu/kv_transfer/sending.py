"""P's side of the transfer protocol: the shell of `SenderMachine`, which decides what becomes of a room.

`PrefillSender` owns the lock and the outbox, turns what happens into events, and carries out the effects. Beside the
machine it has `ChunkFeed` (what was computed), `PageWriter` (the writes) and `DecodePeers` (which D registered). Three
kinds of threads call it. Step: `add_request`, `feed`, `poll`, `abort`. Comm: `on_frame`, `on_view`, `tick`. Transfer:
`_work`, through the queue. Invariant: the lock is never held across `send_frame`, `wake`, logging or a transport.

`PageWriter` and `SenderTrace` run on transfer threads, without the lock: a transport may block for long, and the queue
gives a room to one thread at a time. With `verify_kv` the checksums of a job's pages are computed from our own memory
once the pages are written, so Success follows the last checksum too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from chitu.clock import Clock
from chitu.errors import BadFrame, ChituError, ProtocolError, TransferFailed
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
    TransferEventKind,
    TransferOutbox,
    ViewChanged,
)
from chitu.kv_transfer.chunks import ChunkFeed, ComputedPrompt, TransferJob, TransferQueue, merged
from chitu.kv_transfer.layout import MAX_SUMS, PagedMemory, RoomSums, choose_pages, summed, trace_window, traced_sums
from chitu.kv_transfer.peers import DecodePeer, DecodePeers, PeerView
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.sender import (
    DecodeDead,
    Event,
    FenceResult,
    FenceWrites,
    FrameReceived,
    JobDequeued,
    LayersComputed,
    QueueFence,
    Requested,
    SenderMachine,
    SenderState,
    SendRoom,
    StartSending,
    Stop,
    TrackChunks,
    Write,
    Written,
)
from chitu.kv_transfer.shard_writer import DecodeWriter, TransferKVChunk
from chitu.kv_transfer.transports.local import TransportMessages
from chitu.kv_transfer.transports.transport import batch_bytes_of
from chitu.net.threads import ServiceThread
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    ClusterView,
    KVArgsRegisterInfo,
    KVLayout,
    PathLoad,
    StateSeal,
    StatusAck,
    TransferInfo,
    TransportMessage,
    peer_codec,
)
from chitu.protocol.trace import TracedPages, TraceSend, TraceSent, TraceWrite
from chitu.tracing.tracer import Tracer
from chitu.types import REGISTRATION_ROOM, Role, room_text

logger = logging.getLogger(__name__)


class SenderTrace:
    def __init__(self, tracer: Tracer, layout: KVLayout, memory: PagedMemory) -> None:
        self._tracer = tracer
        self._layout = layout
        self._aux_row_bytes = memory.aux_row_bytes

    def has(self, room: bytes) -> bool:
        return room in self._tracer.rooms

    def note_send(self, room: bytes, write: Write) -> None:
        """Record the transfer's start. Called before each write; only the first call counts."""
        traced = self._tracer.rooms.get(room)
        if traced is None or traced.num_pages:
            return
        computed, destination = write.record.computed, write.destination
        traced.num_pages = len(computed.pages)
        theirs, first = destination.peer.info.layout, destination.info.prefix_pages
        bytes_by_layer = [
            (len(destination.pages) - first) * nbytes * theirs.tp_size for nbytes in theirs.bytes_by_layer
        ]
        written_from = first * theirs.page_size if destination.pages else computed.num_tokens
        self._tracer.add(
            room,
            TraceSend,
            prompt_tokens=computed.num_tokens,
            cached_tokens=computed.cached_tokens,
            token_range=(written_from, computed.num_tokens),
            slot=traced.slot,
            pages=TracedPages.of(computed.pages),
            peer_pages=TracedPages.of(destination.pages),
            layout=self._tracer.layout,
            bytes_by_layer=tuple(bytes_by_layer),
            total_bytes=sum(bytes_by_layer) + self._aux_row_bytes + (theirs.state_bytes if destination.pages else 0),
        )

    def note_write(
        self,
        write: Write,
        writer: DecodeWriter,
        chunks: Sequence[TransferKVChunk],
        bytes_per_rank: Sequence[int],
        latency_s: float,
        error: str,
    ) -> None:
        job, pages = write.job, (write.record.computed.pages, write.destination.pages)
        what: Literal["kv", "logits", "state"] = "logits" if job.is_aux else "state" if job.is_state else "kv"
        lengths = [*bytes_per_rank] if job.is_aux or job.is_state else writer.buffer_lengths(chunks, *pages)
        layers = [(chunk.first_layer, chunk.end_layer) for chunk in chunks] or [(0, 0)]
        self._tracer.add(
            job.room,
            TraceWrite,
            what=what,
            transport=writer.transport,
            device=self._tracer.device,
            dtype=self._layout.dtype if what == "kv" else "float32" if what == "logits" else "uint8",
            layers=(min(first for first, _ in layers), max(end for _, end in layers)),
            num_buffers=len(lengths),
            buffer_bytes=(min(lengths, default=0), max(lengths, default=0)),
            total_bytes=sum(bytes_per_rank),
            latency_s=latency_s,
            error=error,
        )

    def note_sent(self, room: bytes, record: SendRoom) -> None:
        sums = record.kv_sums
        self._tracer.add(
            room,
            TraceSent,
            total_bytes=sum(record.bytes_per_rank),
            times=record.times,
            hashes=None if sums is None else traced_sums(sums.positions, sums.sums),
        )


class PathMeter:
    """Counts the writes to each D over each transport. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[tuple[int, str], PathLoad] = {}

    def add(self, decode: int, transport: str, nbytes: int | None, took_s: float) -> None:
        """Count a write. `nbytes`: None if it failed."""
        with self._lock:
            load = self._loads.get((decode, transport)) or PathLoad(decode, transport)
            self._loads[decode, transport] = PathLoad(
                decode,
                transport,
                load.writes + (nbytes is not None),
                load.bytes + (nbytes or 0),
                load.busy_s + took_s,
                load.failures + (nbytes is None),
            )

    def loads(self) -> tuple[PathLoad, ...]:
        with self._lock:
            return tuple(self._loads.values())


class PageWriter:
    def __init__(self, config: KVManagerConfig, memory: OwnMemory, clock: Clock, trace: SenderTrace | None) -> None:
        self._config = config
        self._memory = memory
        self._clock = clock
        self._trace = trace
        self.paths = PathMeter()

    def fence(self, failed: FenceWrites) -> FenceResult:
        try:
            return FenceResult(failed, _writer_to(failed.peer).fence(self._config.fence_timeout_s))
        except ChituError as error:
            return FenceResult(failed, False, error)

    def write(self, write: Write) -> Written:
        """Write the job's logits row, chunks or state row."""
        job, computed = write.job, write.record.computed
        is_traced = self._trace is not None and self._trace.has(job.room)
        timeout_s = self._config.write_timeout_s
        try:
            writer = _writer_to(write.destination.peer)
            self._begin_sums(write, writer.transport, is_traced)
            if self._trace is not None and is_traced:
                self._trace.note_send(job.room, write)
            if job.is_aux:
                self._memory.aux.seal(computed.aux_slot, job.room, computed.cached_tokens)
                slots = computed.aux_slot, write.destination.info.dst_aux_index
                return Written(job, self._noted(write, writer, [], lambda: (writer.write_aux(*slots, timeout_s),)))
            if job.is_state:
                write.record.state = self._seal(computed)
                slots = computed.state_slot, write.destination.info.dst_state_index
                return Written(job, self._noted(write, writer, [], lambda: writer.write_state(*slots, timeout_s)))
            chunks = merged(job.chunks)
            pages = computed.pages, write.destination.pages
            moved = self._noted(write, writer, chunks, lambda: writer.write_pages(chunks, *pages, timeout_s))
            self._add_sums(chunks, write)
            return Written(job, moved)
        except ChituError as error:
            return Written(job, error=error)

    def _seal(self, computed: ComputedPrompt) -> StateSeal:
        """Return the seal of the prompt's state row. Raises TransferFailed unless it has taken in the whole prompt."""
        assert self._memory.state_seals is not None, "the layout has state"
        seal = self._memory.state_seals.seal(computed.state_slot)
        if seal.num_tokens != computed.num_tokens:
            raise TransferFailed(
                f"state row {computed.state_slot} has taken in {seal.num_tokens} tokens, the prompt has "
                f"{computed.num_tokens}"
            )
        return seal

    def _noted(
        self, write: Write, writer: DecodeWriter, chunks: list[TransferKVChunk], act: Callable[[], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Call `act` and return the bytes that it wrote. Count it, and add a trace record if the room is traced."""
        trace, clock = self._trace, self._clock
        decode = write.destination.peer.info.engine_rank
        started_s, error = clock.monotonic(), ""
        moved: tuple[int, ...] | None = None
        try:
            moved = act()
            return moved
        except ChituError as failure:
            error = failure.code
            raise
        finally:
            latency_s = clock.monotonic() - started_s
            self.paths.add(decode, writer.way, None if moved is None else sum(moved), latency_s)
            if trace is not None and trace.has(write.job.room):
                trace.note_write(write, writer, chunks, moved or (), latency_s, error)

    # ------------------------------------------------------------------------------------------------------------- sums

    def _begin_sums(self, write: Write, transport: str, is_traced: bool) -> None:
        record, verify_kv = write.record, self._config.verify_kv
        info = write.destination.info
        is_wanted = self._memory.page_sums is not None and (verify_kv != "off" or is_traced or info.page_sums)
        if is_wanted and record.kv_sums is None:
            span = info.prefix_pages, len(write.destination.pages)
            if info.page_sums:
                chosen = choose_pages("all", *span)
                num_layers = self._config.layout.num_layers
                is_by_layer = num_layers * len(chosen) <= MAX_SUMS
                record.kv_sums = RoomSums.of(chosen, transport, num_layers if is_by_layer else 1)
            else:
                chosen = choose_pages(verify_kv, *span) if verify_kv != "off" else trace_window(*span)
                record.kv_sums = RoomSums.of(chosen, transport)

    def _add_sums(self, chunks: Sequence[TransferKVChunk], write: Write) -> None:
        """Add the checksums of the chosen pages of these chunks, from our own memory."""
        room_sums, page_sums = write.record.kv_sums, self._memory.page_sums
        if room_sums is None or page_sums is None:
            return
        added = np.zeros_like(room_sums.sums)
        for chunk in chunks:
            chosen = room_sums.within(chunk.first_page, chunk.end_page)
            pages = [write.record.computed.pages[position] for position in room_sums.positions[chosen].tolist()]
            if pages:
                layers = range(chunk.first_layer, chunk.end_layer)
                rows = slice(layers.start, layers.stop) if room_sums.is_by_layer else slice(1)
                added[rows, chosen] += summed(page_sums, layers, pages, room_sums.is_by_layer)
        room_sums.sums += added


def _writer_to(peer: DecodePeer) -> DecodeWriter:
    if peer.writer is None:
        raise TransferFailed(f"writes to {peer.name} are suspended")
    return peer.writer


class PrefillSender:
    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        context: TransferContext,
        fan_out: FanOut | None = None,
    ) -> None:
        """`fan_out`: lanes to the followers, with several TP ranks."""
        self._config = config
        self._clock = context.clock
        self._lock = threading.Lock()
        self._out = TransferOutbox(context, logger)
        self._view = PeerView(Role.DECODE, config.host, context.is_pid_alive)
        unit_bytes = max(1, sum(memory.pool.page_bytes) // config.layout.num_layers)
        batch_bytes = batch_bytes_of(memory.transports, config.max_batch_bytes)
        self.queue = TransferQueue(self._work, batch_bytes // unit_bytes)
        self._peers = DecodePeers(config, memory, fan_out, self._view)
        self.machine = SenderMachine(config, self._view)
        self.feed = ChunkFeed(config, context.clock, self.queue, self._lock)
        """Takes computed pages from the step thread."""
        self._trace = None if context.tracer is None else SenderTrace(context.tracer, config.layout, memory.pool)
        self._writer = PageWriter(config, memory, context.clock, self._trace)
        self._messages = TransportMessages(config.incarnation, memory.transports, context.send_frame, self._address_of)
        self._next_tick_s = 0.0
        self.unknown_frames = 0
        """Number of undecodable or misdirected frames so far."""
        self._unregistered_frames = 0

    # ------------------------------------------------------------------------------------------------------ life, state

    def start(self) -> None:
        """Start the transfer threads. Tests call `queue.run_one()` instead."""
        self.queue.start(self._config.transfer_threads, ServiceThread)

    def close(self) -> None:
        """Stop writing. The transports may be closed after this."""
        self.queue.close(self._config.write_timeout_s + 1.0)

    def disconnect(self) -> None:
        """Close the connections to all D, after `close`; a frame that comes late opens none again, as its room is
        over or its D is taken for another one's."""
        with self._lock:
            writers = [peer.writer for peer in self._peers.table.values() if peer.writer is not None]
            for peer in self._peers.table.values():
                peer.writer = None
        for writer in writers:
            writer.close()

    def state(self, room: bytes) -> SenderState | None:
        """Return the room's state, or None if it is unknown or forgotten. For tests, logs and metrics."""
        entry = self.machine.table.get(room)
        return entry.state if entry is not None else None

    @property
    def stale_frames(self) -> int:
        """Number of frames from incarnations that are not (or no longer) registered, or not the D of their room."""
        return self._unregistered_frames + self.machine.stale_frames

    silent_prefills: tuple[int, ...] = ()
    """P has no P as its peer."""

    @property
    def suspended_ranks(self) -> tuple[int, ...]:
        """Engine ranks of the D in the cluster that get no writes until a failed write is fenced."""
        suspended = [peer.info for peer in list(self._peers.table.values()) if peer.is_suspended]
        with self._lock:
            lost = [self._view.is_lost(info.engine_rank, info.incarnation) for info in suspended]
        return tuple(sorted(info.engine_rank for info, is_lost in zip(suspended, lost, strict=True) if not is_lost))

    @property
    def path_loads(self) -> tuple[PathLoad, ...]:
        return self._writer.paths.loads()

    @property
    def decode_kv_args_table(self) -> dict[int, DecodePeer]:
        """Registered D, by incarnation."""
        return self._peers.table

    # ------------------------------------------------------------------------------------------------------ step thread

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        """Take the router's request; the room may have been announced before. Starts the bootstrap deadline."""
        self._handle(Requested(room, request_id, num_tokens, decode_rank, decode_incarnation))

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._out.poll()

    def abort(self, room: bytes, error: ChituError) -> None:
        """Stop a room and report that to D. Only RELEASED follows. An unknown room is ignored."""
        self._handle(Aborted(room, error))

    # ------------------------------------------------------------------------------------------------------ comm thread

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Process one P<->D message. Never raises for bad input: counts it, and fails its own room at most."""
        try:
            message = peer_codec.decode(payload)
            if isinstance(message, KVArgsRegisterInfo):
                if room != REGISTRATION_ROOM:
                    raise BadFrame(f"a registration in room {room_text(room)}")
                self._on_register(message)
            elif isinstance(message, TransportMessage):
                if peer := self._registered(message.incarnation):
                    self._messages.deliver(peer.info.engine_rank, message)
            elif len(room) != 16 or room == REGISTRATION_ROOM:
                raise BadFrame(f"a {type(message).__name__} in room {room_text(room)}")
            elif isinstance(message, TransferInfo | StatusAck | AbortTransfer):
                if peer := self._registered(message.incarnation):
                    # `reconnect` may block on a connection, so it runs without the lock.
                    unreachable = self._peers.reconnect(peer) if isinstance(message, TransferInfo) else None
                    self._handle(FrameReceived(room, message, peer, unreachable))
            elif not isinstance(message, AbortAck):  # P sends no AbortTransfer, so an ack of one is only late
                raise BadFrame(f"a {type(message).__name__} sent to P")
        except ProtocolError as error:
            self.unknown_frames += 1
            logger.warning("P%d: ignored a frame: %s", self._config.engine_rank, error.message)

    def _registered(self, incarnation: int) -> DecodePeer | None:
        """Return the registered D, or None after counting the frame: D repeats unanswered messages."""
        peer = self._peers.table.get(incarnation)
        self._unregistered_frames += peer is None
        return peer

    def _on_register(self, info: KVArgsRegisterInfo) -> None:
        answer = self._peers.answer(info)  # may block on a connection: without the lock
        if answer is None:
            self._unregistered_frames += 1
            return
        reply, new_peer = answer
        with self._lock:
            if new_peer is not None:
                self._peers.add(new_peer)
            self._out.put(Send(info.endpoint, info.dst_port, REGISTRATION_ROOM, reply))
        self._handle(ViewChanged())  # a D that registered and never joined may be lost by now, with its rooms

    def _address_of(self, incarnation: int) -> tuple[str, int] | None:
        peer = self._peers.table.get(incarnation)
        return (peer.info.endpoint, peer.info.dst_port) if peer is not None else None

    def on_view(self, view: ClusterView, router: int = 0) -> None:
        """Take a new cluster view: fail the rooms of incarnations that are gone."""
        with self._lock:
            if not self._view.update(view, router):
                return
        self._handle(ViewChanged())

    def on_silence(self, router: int) -> None:
        """Note that nothing is heard of a router: what it showed of the other instances counts no more."""
        with self._lock:
            self._view.note_silence(router)
        self._handle(ViewChanged())

    def tick(self, now_s: float) -> None:
        """Apply deadlines and repeat messages. Called at least every 50 ms."""
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_INTERVAL_S
        with self._lock:
            has_seen_one_end = self._view.find_ended()
            feared = [peer for peer in self._peers.table.values() if peer.is_suspended]
            dead = [peer for peer in feared if self._view.is_dead(peer.info.engine_rank, peer.info.incarnation)]
        if has_seen_one_end:
            self._handle(ViewChanged())
        for peer in dead:
            self._handle(DecodeDead(peer))
        self._handle(LayersComputed(self.feed.num_layers_done))
        self._handle(Tick())
        with self._lock:
            in_use = [entry.data.destination.peer for _, entry in self.machine.table.items() if entry.data.destination]
            idle = self._peers.detach_idle(in_use)
        for writer in idle:
            writer.close()

    # ------------------------------------------------------------------------------------------------- transfer threads

    def _work(self, job: TransferJob) -> None:
        """Do one write, or one fence attempt, of one room."""
        for effect in self._handle(JobDequeued(job)):
            if isinstance(effect, FenceWrites):
                self._handle(self._writer.fence(effect))
            else:
                self._handle(self._writer.write(effect))
                if self._trace is not None and effect.record.landed_s:
                    self._trace.note_sent(job.room, effect.record)

    # ------------------------------------------------------------------------------------------------------- any thread

    def _handle(self, event: Event) -> list[Write | FenceWrites]:
        """Apply an event and carry out its effects. Return those that the caller carries out without the lock."""
        jobs: list[Write | FenceWrites] = []
        with self._lock:
            for effect in self.machine.handle(event, self._clock.monotonic()):
                match effect:
                    case Write() | FenceWrites():
                        jobs.append(effect)
                    case Send() | TransferEvent() | Line():
                        self._out.put(effect)
                    case DropEvents(room):
                        if TransferEventKind.SUCCESS in self._out.drop_events(room):
                            self._out.put(TransferEvent(TransferEventKind.RELEASED, room))
                    case TrackChunks():
                        self.feed.track(*effect)
                    case StartSending():
                        self.feed.start_sending(*effect)
                    case Stop(room):
                        self.feed.stop(room)
                    case QueueFence(room):
                        self.queue.put_fence(room)
            leaving = self._out.drain()
        self._out.leave(leaving)
        return jobs
