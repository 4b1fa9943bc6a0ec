"""The one-sided writes of P, and the checksums of what they wrote: what a transfer thread does with one job.

Owned by `PrefillSender`, called without its lock: a transport may block for long. The queue gives a room to one thread
at a time. With `verify_kv` the checksums of a job's pages are computed here, from our own memory, once the pages are
written. So Success follows the last checksum too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.checksums import MAX_SUMS, RoomSums, choose_pages, summed, trace_window
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts
from chitu.kv_transfer.sender.events import SettleResult, SettleWrites, Write, Written
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.sender_trace import SenderTrace
from chitu.kv_transfer.sender.transfer_queue import TransferKVChunk, merged
from chitu.kv_transfer.tensor_parallel.shard_writer import DecodeWriter, PageMove


class PageWriter:
    def __init__(self, config: KVManagerConfig, parts: RoleParts, trace: SenderTrace | None) -> None:
        self._config = config
        self._parts = parts
        self._trace = trace

    def settle(self, settle: SettleWrites) -> SettleResult:
        try:
            return SettleResult(settle, _writer_to(settle.peer).settle(self._config.settle_timeout_s))
        except ChituError as error:
            return SettleResult(settle, False, error)

    def write(self, write: Write) -> Written:
        """Write the job's logits row or chunks."""
        job, computed = write.job, write.record.computed
        is_traced = self._trace is not None and self._trace.has(job.room)
        timeout_s = self._config.write_timeout_s
        try:
            writer = _writer_to(write.destination.peer)
            self._begin_sums(write, writer.transport, is_traced)
            if self._trace is not None and is_traced:
                self._trace.note_send(job.room, write)
            if job.is_aux:
                self._parts.aux.seal(computed.aux_slot, job.room, computed.cached_tokens)
                slots = computed.aux_slot, write.destination.info.dst_aux_index
                return Written(job, self._noted(write, writer, [], lambda: (writer.write_aux(*slots, timeout_s),)))
            chunks = merged(job.chunks)
            moves = _moves(chunks, write)
            moved = self._noted(write, writer, moves, lambda: writer.write_pages(moves, timeout_s))
            self._add_sums(chunks, write)
            return Written(job, moved)
        except ChituError as error:
            return Written(job, error=error)

    def _noted(
        self, write: Write, writer: DecodeWriter, moves: list[PageMove], act: Callable[[], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Call `act` and return the bytes that it wrote. Add a trace record if the room is traced."""
        trace, clock = self._trace, self._parts.clock
        if trace is None or not trace.has(write.job.room):
            return act()
        started_s, error = clock.monotonic(), ""
        moved: tuple[int, ...] = ()
        try:
            moved = act()
            return moved
        except ChituError as failure:
            error = failure.code
            raise
        finally:
            latency_s = clock.monotonic() - started_s
            trace.note_write(write.job, writer, moves, moved, latency_s, error)

    # ------------------------------------------------------------------------------------------------------------- sums

    def _begin_sums(self, write: Write, transport: str, is_traced: bool) -> None:
        record, verify_kv = write.record, self._config.verify_kv
        info = write.destination.info
        is_wanted = self._parts.page_sums is not None and (verify_kv != "off" or is_traced or info.page_sums)
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
        room_sums, page_sums = write.record.kv_sums, self._parts.page_sums
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
        raise TransferFailed(f"{peer.name} does not take writes")
    return peer.writer


def _moves(chunks: Sequence[TransferKVChunk], write: Write) -> list[PageMove]:
    moves = []
    for chunk in chunks:
        pages = slice(chunk.first_page, chunk.end_page)
        src_pages, dst_pages = write.record.computed.pages[pages], write.destination.pages[pages]
        moves.append(PageMove(chunk.first_layer, chunk.end_layer, src_pages, dst_pages, chunk.ready))
    return moves
