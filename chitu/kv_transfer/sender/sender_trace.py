"""P's trace records of a transfer: before the first byte, of each submit, and when the last byte has landed.

Transfer threads: `PageWriter`, and `PrefillSender` for the last record. For rooms that are not traced only `has` does
something.
"""

from __future__ import annotations

from collections.abc import Sequence

from chitu.kv_transfer.checksums import traced_sums
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.sender.events import SendRoom, Write
from chitu.kv_transfer.sender.transfer_queue import TransferJob
from chitu.kv_transfer.tensor_parallel.shard_writer import DecodeWriter, PageMove
from chitu.protocol import KVLayout
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
        layer_bytes = (len(destination.pages) - first) * theirs.regions_per_layer * theirs.page_bytes * theirs.tp_size
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
            bytes_by_layer=(layer_bytes,) * theirs.num_layers,
            total_bytes=layer_bytes * theirs.num_layers + self._aux_row_bytes,
        )

    def note_write(
        self,
        batch: TransferJob,
        writer: DecodeWriter,
        moves: Sequence[PageMove],
        bytes_per_rank: Sequence[int],
        latency_s: float,
        error: str,
    ) -> None:
        lengths = [self._aux_row_bytes] if batch.is_aux else writer.buffer_lengths(moves)
        layers = [(move.first_layer, move.end_layer) for move in moves] or [(0, 0)]
        self._tracer.add(
            batch.room,
            TraceWrite,
            what="logits" if batch.is_aux else "kv",
            transport=writer.transport,
            device=self._tracer.device,
            dtype="float32" if batch.is_aux else self._layout.dtype,
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
