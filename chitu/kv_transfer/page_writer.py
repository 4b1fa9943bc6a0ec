"""The one-sided writes of P: what a transfer thread does with one batch of the queue.

Owned by `PrefillSender`. A visit has three parts: `begin` (under the sender's lock: may this batch still be written?),
`run` (without it: the transport, for as long as that takes) and `end` (under it: what the outcome means for the room).
The queue gives a room to one thread at most, so there are never two visits to a room at once. Invariants: Success
follows the last byte; a write that failed and may still land suspends its D until a settle succeeded, and keeps the
room SETTLING until then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from chitu import log
from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.parts import KVManagerConfig, Outbox, RoleParts
from chitu.kv_transfer.send_rooms import SendEntry, SendRoom, SendRooms
from chitu.kv_transfer.shard_writer import DecodeWriter, PageMove
from chitu.kv_transfer.transfer_queue import Batch, TransferKVChunk
from chitu.kv_transfer.transport import WriteError
from chitu.lifecycle import SenderEvent, SenderState
from chitu.messages import AuxReady
from chitu.types import room_text


@dataclass(slots=True, frozen=True)
class Visit:
    """A batch that may be worked on now, its room and the way to the room's D."""

    batch: Batch
    entry: SendEntry
    writer: DecodeWriter


@dataclass(slots=True, frozen=True)
class Outcome:
    """Of a write: bytes written by each TP rank, or the `error`. Of a settle attempt: whether it `is_settled`."""

    bytes_per_rank: tuple[int, ...] = ()
    is_settled: bool = False
    error: ChituError | None = None


class PageWriter:
    def __init__(self, config: KVManagerConfig, parts: RoleParts, rooms: SendRooms, out: Outbox) -> None:
        self._config = config
        self._parts = parts
        self._rooms = rooms
        self._out = out
        self.bytes_moved = 0

    # ------------------------------------------------------------------------------------------------------------ begin

    def begin(self, batch: Batch) -> Visit | None:
        """None: there is nothing to do for this batch any more."""
        entry = self._rooms.table.get(batch.room)
        if entry is None or entry.data.peer is None:
            return None
        writer = entry.data.peer.writer
        if batch.is_settle:
            if entry.state is not SenderState.SETTLING or not entry.data.is_unsettled:
                return None
        elif entry.state is not SenderState.TRANSFERRING:
            return None
        elif entry.data.peer.is_suspended or writer is None:
            error = TransferFailed(f"{entry.data.peer.name} does not take writes")
            self._rooms.fail(batch.room, SenderEvent.WRITE_FAILED, error)
            return None
        if writer is None:
            return None
        entry.data.is_in_flight = True
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
                self._parts.aux.seal(record.aux_slot, batch.room)
                return Outcome((writer.write_aux(record.aux_slot, record.info.dst_aux_index, timeout_s),))
            return Outcome(writer.write_pages(_moves(batch, record), timeout_s))
        except ChituError as error:
            return Outcome(error=error)

    # -------------------------------------------------------------------------------------------------------------- end

    def end(self, visit: Visit, outcome: Outcome) -> None:
        visit.entry.data.is_in_flight = False
        if visit.batch.is_settle:
            self._settle_tried(visit.batch.room, visit.entry.data, outcome)
        elif outcome.error is not None:
            self._write_failed(visit.batch.room, visit.entry.data, outcome.error)
        else:
            self._written(visit.batch, visit.entry, outcome.bytes_per_rank)
        self._rooms.release_if_settled(visit.batch.room)

    def _settle_tried(self, room: bytes, record: SendRoom, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._out.log(logging.WARNING, "settling room %s: %s", room_text(room), outcome.error.message)
        if outcome.is_settled:
            assert record.peer is not None
            record.is_unsettled = False
            record.peer.is_suspended = False

    def _write_failed(self, room: bytes, record: SendRoom, failure: ChituError) -> None:
        if isinstance(failure, WriteError) and not failure.settled:
            assert record.peer is not None
            record.is_unsettled = True
            record.peer.is_suspended = True
        error = failure if isinstance(failure, TransferFailed) else TransferFailed(failure.message)
        self._out.log(logging.WARNING, "transfer of %s failed: %s", record.request_id, failure.message)
        self._rooms.fail(room, SenderEvent.WRITE_FAILED, error)

    def _written(self, batch: Batch, entry: SendEntry, bytes_per_rank: tuple[int, ...]) -> None:
        record = entry.data
        sums = zip_longest(record.bytes_per_rank, bytes_per_rank, fillvalue=0)
        record.bytes_per_rank = tuple(before + now for before, now in sums)
        self.bytes_moved += sum(bytes_per_rank)
        if entry.state is not SenderState.TRANSFERRING:  # it failed meanwhile
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
        if not record.units_left and record.is_aux_written:
            self._rooms.succeed(batch.room, entry)


def _moves(batch: Batch, record: SendRoom) -> list[PageMove]:
    moves = []
    for chunk in _merged(batch.chunks):
        pages = slice(chunk.first_page, chunk.end_page)
        moves.append(PageMove(chunk.first_layer, chunk.end_layer, record.pages[pages], record.dst_pages[pages]))
    return moves


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
