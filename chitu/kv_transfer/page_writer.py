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

from chitu import log
from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.parts import KVManagerConfig, Outbox, RoleParts
from chitu.kv_transfer.plan import join, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.registration import Connection
from chitu.kv_transfer.send_rooms import SendEntry, SendRoom, SendRooms
from chitu.kv_transfer.transfer_queue import Batch, TransferKVChunk
from chitu.kv_transfer.transport import CopyList, WriteError
from chitu.lifecycle import SenderEvent, SenderState
from chitu.messages import AuxReady
from chitu.types import room_text


@dataclass(slots=True, frozen=True)
class Visit:
    """A batch that may be worked on now, its room and the way to the room's D."""

    batch: Batch
    entry: SendEntry
    connection: Connection


@dataclass(slots=True, frozen=True)
class Outcome:
    """Of a write: `nbytes` written or the `error`. Of a settle attempt: whether it `is_settled` and why not."""

    nbytes: int = 0
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
        connection = entry.data.peer.connection
        if batch.is_settle:
            if entry.state is not SenderState.SETTLING or not entry.data.is_unsettled:
                return None
        elif entry.state is not SenderState.TRANSFERRING:
            return None
        elif entry.data.peer.is_suspended or connection is None:
            error = TransferFailed(f"{entry.data.peer.name} does not take writes")
            self._rooms.fail(batch.room, SenderEvent.WRITE_FAILED, error)
            return None
        if connection is None:
            return None
        entry.data.is_in_flight = True
        return Visit(batch, entry, connection)

    # ----------------------------------------------------------------------------------------------- run (no lock held)

    def run(self, visit: Visit) -> Outcome:
        """The transport call, which blocks. Never raises a ChituError."""
        transport, handle = visit.connection.transport, visit.connection.handle
        try:
            if visit.batch.is_settle:
                return Outcome(is_settled=transport.settle(handle, self._config.settle_timeout_s))
            if visit.batch.is_aux:
                self._parts.aux.seal(visit.entry.data.aux_slot, visit.batch.room)
            copies = self._copies(visit.batch, visit.entry.data)
            transport.write(handle, copies, self._config.write_timeout_s)
            return Outcome(nbytes=copies.nbytes)
        except ChituError as error:
            return Outcome(error=error)

    def _copies(self, batch: Batch, record: SendRoom) -> CopyList:
        assert record.peer is not None and record.info is not None
        mine, theirs = self._parts.memory, record.peer.memory
        if batch.is_aux:
            return plan_aux_copy(mine, theirs, record.aux_slot, record.info.dst_aux_index)
        plans: list[CopyList] = []
        for chunk in _merged(batch.chunks):
            pages = slice(chunk.first_page, chunk.end_page)
            layers = range(chunk.first_layer, chunk.end_layer)
            plans.append(plan_page_copies(mine, theirs, record.pages[pages], record.dst_pages[pages], layers))
        return plans[0] if len(plans) == 1 else join(*plans)

    # -------------------------------------------------------------------------------------------------------------- end

    def end(self, visit: Visit, outcome: Outcome) -> None:
        visit.entry.data.is_in_flight = False
        if visit.batch.is_settle:
            self._settle_tried(visit.batch.room, visit.entry.data, outcome)
        elif outcome.error is not None:
            self._write_failed(visit.batch.room, visit.entry.data, outcome.error)
        else:
            self._written(visit.batch, visit.entry, outcome.nbytes)
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

    def _written(self, batch: Batch, entry: SendEntry, nbytes: int) -> None:
        record = entry.data
        record.bytes_moved += nbytes
        self.bytes_moved += nbytes
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
