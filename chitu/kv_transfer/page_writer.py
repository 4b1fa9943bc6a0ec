"""P's writes into D's memory: of logits rows, pages and state rows, with their checksums, counts and trace records.

Runs on transfer threads, without the lock of `PrefillSender`: a transport may block for long, and the queue gives a
room to one thread at a time. With `verify_kv` the checksums of a job's pages are computed from our own memory once the
pages are written, so Success follows the last checksum too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from chitu.clock import Clock
from chitu.errors import ChituError, TransferFailed
from chitu.kv_cache.state_row import state_bytes_of
from chitu.kv_transfer.both_sides import (
    KVManagerConfig,
    OwnMemory,
)
from chitu.kv_transfer.chunks import ComputedPrompt, merged
from chitu.kv_transfer.layout import MAX_SUMS, PagedMemory, RoomSums, choose_pages, summed, trace_window, traced_sums
from chitu.kv_transfer.peers import DecodePeer
from chitu.kv_transfer.sender import (
    FenceResult,
    FenceWrites,
    SendRoom,
    Write,
    Written,
)
from chitu.kv_transfer.shard_writer import DecodeWriter, TransferKVChunk
from chitu.protocol import (
    KVLayout,
    PathLoad,
    StateSeal,
)
from chitu.protocol.trace import TracedPages, TraceSend, TraceSent, TraceWrite
from chitu.tracing.tracer import Tracer


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
            total_bytes=sum(bytes_by_layer)
            + self._aux_row_bytes
            + (state_bytes_of(theirs) if destination.pages else 0),
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
                sealed = self._memory.aux.seal(computed.aux_slot, job.room, computed.cached_tokens)
                slots = computed.aux_slot, write.destination.info.dst_aux_index
                written = self._noted(write, writer, [], lambda: (writer.write_aux(*slots, timeout_s, sealed),))
                return Written(job, written)
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
