"""The one-sided writes of P: what a transfer thread does with one batch of the queue.

Owned by `PrefillSender`. With `verify_kv` the pages of a batch are summed up here, from our own memory, once they are
written. A visit has three parts: `begin` (under the sender's lock: may this batch still be written?), `run` (without
it: the transport, for as long as that takes) and `end` (under it: what the outcome means for the room). The queue gives
a room to one thread at most, so there are never two visits to a room at once. Invariants: Success follows the last byte
and the last checksum; a write that failed and may still land suspends its D until a settle succeeded, and keeps the
room UNSETTLED until then; of one D's rooms one at a time is SETTLING.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from chitu import log
from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.checksums import Int64s, RoomSums, choose_pages, trace_window
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.send_rooms import SendEntry, SendRoom, SendRooms
from chitu.kv_transfer.sender.sender_trace import SenderTrace
from chitu.kv_transfer.sender.transfer_queue import TransferJob, TransferKVChunk, merged
from chitu.kv_transfer.tensor_parallel.shard_writer import DecodeWriter, PageMove
from chitu.kv_transfer.transports.transport import WriteError
from chitu.protocol import AuxReady
from chitu.protocol.states import SenderEvent, SenderState


@dataclass(slots=True, frozen=True)
class Visit:
    """A batch that may be worked on now, its room and the way to the room's D."""

    batch: TransferJob
    entry: SendEntry
    writer: DecodeWriter
    unsettled: dict[bytes, SendEntry] = field(default_factory=dict)
    """Of a settle: all rooms that it is for. One whose write fails later is none of them."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """Of a write: bytes written by each TP rank, or the `error`. Of a settle attempt: whether it `is_settled`."""

    bytes_per_rank: tuple[int, ...] = ()
    sums: Int64s | None = None
    """What this batch adds to the room's checksums."""
    is_settled: bool = False
    error: ChituError | None = None


class PageWriter:
    def __init__(self, config: KVManagerConfig, parts: RoleParts, rooms: SendRooms, out: TransferOutbox) -> None:
        self._config = config
        self._parts = parts
        self._rooms = rooms
        self._out = out
        self._trace = None if parts.tracer is None else SenderTrace(parts.tracer, config.layout, parts.memory)
        self.bytes_moved = 0

    # ------------------------------------------------------------------------------------------------------------ begin

    def begin(self, batch: TransferJob) -> Visit | None:
        """None: there is nothing to do for this batch any more."""
        entry = self._rooms.table.get(batch.room)
        if entry is None or entry.data.peer is None:
            return None
        writer = entry.data.peer.writer
        if batch.is_settle:
            unsettled = self._rooms.unsettled(entry.data.peer)
            is_asking = any(other.state is SenderState.SETTLING for other in unsettled.values())
            if entry.state is not SenderState.UNSETTLED or is_asking or writer is None:
                return None
            self._rooms.take(batch.room, SenderEvent.SETTLE_BEGAN)
            return Visit(batch, entry, writer, unsettled)
        if entry.state is not SenderState.TRANSFERRING:
            return None
        if entry.data.peer.is_suspended or writer is None:
            error = TransferFailed(f"{entry.data.peer.name} does not take writes")
            self._rooms.fail(batch.room, SenderEvent.WRITE_FAILED, error)
            return None
        record, verify_kv = entry.data, self._config.verify_kv
        is_traced = self._trace is not None and self._trace.has(batch.room)
        if (verify_kv != "off" or is_traced) and record.kv_sums is None and record.info is not None:
            span = record.info.prefix_pages, len(record.dst_pages)
            chosen = choose_pages(verify_kv, *span) if verify_kv != "off" else trace_window(*span)
            if self._parts.page_sums is not None:
                record.kv_sums = RoomSums.of(chosen, writer.transport)
        if is_traced and self._trace is not None:
            self._trace.note_send(batch.room, record)
        self._rooms.take(batch.room, SenderEvent.WRITE_BEGAN)
        return Visit(batch, entry, writer)

    # ----------------------------------------------------------------------------------------------- run (no lock held)

    def run(self, visit: Visit) -> Outcome:
        """The transport calls, which block. Never raises a ChituError."""
        batch, record, writer = visit.batch, visit.entry.data, visit.writer
        timeout_s = self._config.write_timeout_s
        try:
            if batch.is_settle:
                return Outcome(is_settled=writer.settle(self._config.settle_timeout_s))
            if batch.is_aux:
                assert record.info is not None
                self._parts.aux.seal(record.aux_slot, batch.room, record.cached_tokens)
                slots = record.aux_slot, record.info.dst_aux_index
                return Outcome(self._noted(visit, [], lambda: (writer.write_aux(*slots, timeout_s),)))
            chunks = merged(batch.chunks)
            moves = _moves(chunks, record)
            moved = self._noted(visit, moves, lambda: writer.write_pages(moves, timeout_s))
            return Outcome(moved, self._sums(chunks, record))
        except ChituError as error:
            return Outcome(error=error)

    def _noted(self, visit: Visit, moves: list[PageMove], write: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """The bytes that `write` wrote, with a record of it where the room is traced."""
        trace, clock = self._trace, self._parts.clock
        if trace is None or not trace.has(visit.batch.room):
            return write()
        started_s, error = clock.monotonic(), ""
        moved: tuple[int, ...] = ()
        try:
            moved = write()
            return moved
        except ChituError as failure:
            error = failure.code
            raise
        finally:
            latency_s = clock.monotonic() - started_s
            trace.note_write(visit.batch, visit.writer, moves, moved, latency_s, error)

    def _sums(self, chunks: Sequence[TransferKVChunk], record: SendRoom) -> Int64s | None:
        """What the chosen pages of these chunks hold here; zero for the others."""
        room_sums, page_sums = record.kv_sums, self._parts.page_sums
        if room_sums is None:
            return None
        assert page_sums is not None
        added_N = np.zeros_like(room_sums.sums)
        for chunk in chunks:
            chosen = room_sums.within(chunk.first_page, chunk.end_page)
            pages = [record.pages[position] for position in room_sums.positions[chosen].tolist()]
            if pages:
                added_N[chosen] += page_sums.sums(range(chunk.first_layer, chunk.end_layer), pages)
        return added_N

    # -------------------------------------------------------------------------------------------------------------- end

    def end(self, visit: Visit, outcome: Outcome) -> None:
        room, entry = visit.batch.room, visit.entry
        peer = entry.data.peer
        assert peer is not None
        if visit.batch.is_settle:
            self._settle_tried(visit, peer, outcome)
        elif outcome.error is not None:
            self._write_failed(room, entry.data, outcome.error, peer)
        else:
            if outcome.sums is not None and entry.data.kv_sums is not None:
                entry.data.kv_sums.sums += outcome.sums
            self._landed(room, entry, visit.batch, outcome.bytes_per_rank)

    def _settle_tried(self, visit: Visit, peer: DecodePeer, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._out.log(logging.WARNING, "settling writes to %s: %s", peer.name, outcome.error.message)
        if not outcome.is_settled:
            self._rooms.take(visit.batch.room, SenderEvent.SETTLE_FAILED)
            return
        for room in visit.unsettled:
            self._rooms.take(room, SenderEvent.SETTLED)
        if peer.is_suspended and not self._rooms.unsettled(peer):
            peer.is_suspended = False
            self._out.log(logging.INFO, "%s takes writes again", peer.name)

    def _write_failed(self, room: bytes, record: SendRoom, failure: ChituError, peer: DecodePeer) -> None:
        event = SenderEvent.WRITE_FAILED
        if isinstance(failure, WriteError) and not failure.settled:
            event = SenderEvent.WRITE_UNSETTLED
            if not peer.is_suspended:
                peer.is_suspended = True
                self._out.log(logging.WARNING, "%s is not written to until its writes have settled", peer.name)
        error = failure if isinstance(failure, TransferFailed) else TransferFailed(failure.message)
        text = "transfer of %s failed: %s"
        self._out.log(logging.WARNING, text, record.request_id, failure.message, request_id=record.request_id)
        self._rooms.fail(room, event, error)

    def _landed(self, room: bytes, entry: SendEntry, batch: TransferJob, bytes_per_rank: Sequence[int]) -> None:
        """The logits row or the chunks of the batch are in D's memory."""
        record = entry.data
        totals = zip_longest(record.bytes_per_rank, bytes_per_rank, fillvalue=0)
        record.bytes_per_rank = tuple(before + now for before, now in totals)
        self.bytes_moved += sum(bytes_per_rank)
        if entry.state is not SenderState.WRITING:  # it failed meanwhile
            self._rooms.take(room, SenderEvent.WRITE_ENDED)
            return
        assert record.peer is not None
        if batch.is_aux:
            record.is_aux_written = True
            self._out.log(logging.INFO, log.FINISHED_AUX, record.request_id, request_id=record.request_id)
            info = record.peer.info
            self._out.frame(info.endpoint, info.dst_port, room, AuxReady(self._config.incarnation))
        record.units_left -= sum(chunk.num_units for chunk in batch.chunks)
        if not record.units_left and not record.is_kv_logged:
            record.is_kv_logged = True
            self._out.log(logging.INFO, log.FINISHED_KV, record.request_id, request_id=record.request_id)
        if not record.units_left and record.is_aux_written:
            self._rooms.succeed(room, entry)
            if self._trace is not None:
                self._trace.note_sent(room, record)
        else:
            self._rooms.take(room, SenderEvent.WRITE_ENDED)


def _moves(chunks: Sequence[TransferKVChunk], record: SendRoom) -> list[PageMove]:
    moves = []
    for chunk in chunks:
        pages = slice(chunk.first_page, chunk.end_page)
        src_pages, dst_pages = record.pages[pages], record.dst_pages[pages]
        moves.append(PageMove(chunk.first_layer, chunk.end_layer, src_pages, dst_pages, chunk.ready))
    return moves
