"""P: which writes go through segments, what each segment carries, and which writes have to wait for one.

Owned by `PageWriter`, every method under the sender's lock (transfer, comm and step threads); nothing here blocks. A
visit of a transfer thread writes one group: pages of neighbouring layers, at most a segment, or a logits row. What is
left of its batch goes back to the queue. Where no segment is free the batch is parked until one is, so a D that is slow
to scatter holds up its own rooms alone. Invariants: a group counts as landed only when D said `Scattered`; `Staged` is
repeated until then, whatever has become of the room, because the segment is D's until it answers. Source: adr/0005.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from chitu.clock import Clock
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.plan import merge_runs
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.send_rooms import SendRoom
from chitu.kv_transfer.sender.transfer_queue import TransferJob, TransferQueue, cut, merged
from chitu.kv_transfer.staging.granted import Segment, SegmentGroup
from chitu.kv_transfer.staging.packing import unit_bytes
from chitu.kv_transfer.staging.staged_writer import StagedWriter
from chitu.protocol import Scattered, Staged

NO_SEGMENT = -1


@dataclass(slots=True, frozen=True)
class Place:
    """Where a group goes. `batch` is what is left of the visit's batch: this group alone."""

    batch: TransferJob
    group: SegmentGroup
    segment: Segment
    own_segment: int
    writer: StagedWriter


class Stager:
    def __init__(self, config: KVManagerConfig, parts: RoleParts, queue: TransferQueue, out: TransferOutbox) -> None:
        self._incarnation = config.incarnation
        self._retry_interval_s = config.deadlines.retry_interval_s
        self._regions_per_layer = config.layout.regions_per_layer
        self._memory: PagedMemory = parts.memory
        self._clock: Clock = parts.clock
        self._queue = queue
        self._out = out
        area = parts.staging.area if parts.staging is not None else None
        self._own_free = list(range(area.num_segments)) if area is not None else []
        self._parked: set[bytes] = set()

    # --------------------------------------------------------------------------------------------------- before a write

    def wants(self, batch: TransferJob, record: SendRoom, peer: DecodePeer) -> bool:
        """Whether this batch is to be staged. It must be where D's pages cannot or may not be written directly."""
        writer = peer.staged_writer
        if writer is None or batch.is_settle:
            return False
        if writer.must_stage:
            return True
        if batch.is_aux:  # one piece: nothing to gather
            return False
        return writer.threshold is None or writer.threshold.is_met(*self._size_of(batch, record))

    def _size_of(self, batch: TransferJob, record: SendRoom) -> tuple[int, int]:
        """Pieces that a direct write of this batch would have, and its bytes."""
        num_pieces = num_units = 0
        for chunk in batch.chunks:
            pages = slice(chunk.first_page, chunk.end_page)
            src_P = np.asarray(record.pages[pages], dtype=np.int64)
            starts, _ = merge_runs(src_P, np.asarray(record.dst_pages[pages], dtype=np.int64))
            num_pieces += len(starts) * (chunk.end_layer - chunk.first_layer) * self._regions_per_layer
            num_units += chunk.num_units
        return num_pieces, num_units * unit_bytes(self._memory, self._regions_per_layer)

    def place(self, batch: TransferJob, peer: DecodePeer) -> Place | None:
        """A segment for the first group of the batch; the others are queued again. None: all of it was parked."""
        writer, granted = peer.staged_writer, peer.segments
        assert writer is not None
        rest = batch
        group = SegmentGroup(batch.room, None)
        if not batch.is_aux:
            first, *others = merged(batch.chunks)
            max_units = writer.segment_bytes // unit_bytes(self._memory, self._regions_per_layer)
            first, *cut_off = cut(first, max_units)
            group, rest = SegmentGroup(batch.room, first), replace(batch, chunks=(*cut_off, *others))
        has_own = bool(self._own_free) or not writer.needs_own_segment
        segment = granted.take(group) if has_own else None
        if segment is None:
            self._parked.add(batch.room)
            self._queue.put_back(batch, is_parked=True)
            return None
        if rest.chunks:
            self._queue.put_back(rest)
        own_segment = self._own_free.pop() if writer.needs_own_segment else NO_SEGMENT
        chunks = (group.chunk,) if group.chunk is not None else ()
        return Place(replace(batch, chunks=chunks), group, segment, own_segment, writer)

    # ---------------------------------------------------------------------------------------------------- after a write

    def written(self, place: Place, peer: DecodePeer, record: SendRoom, nbytes: int) -> None:
        """The group is in D's segment and its room still waits for it: tell D."""
        chunk = place.group.chunk
        span = (0, 0, 0, 0)
        if chunk is not None:
            span = (chunk.first_layer, chunk.end_layer, chunk.first_page, chunk.end_page)
        aux_slot = record.info.dst_aux_index if chunk is None and record.info is not None else -1
        segment = place.segment
        message = Staged(self._incarnation, segment.number, segment.index, *span, nbytes, aux_slot)
        peer.segments.written(segment, message)
        self._send(peer, segment)
        self._gathered(place)

    def dropped(self, place: Place, peer: DecodePeer) -> None:
        """The write failed for good, or its room ended meanwhile."""
        peer.segments.dropped(place.segment)
        self._gathered(place)
        self._resume()

    def write_failed(self, place: Place, peer: DecodePeer) -> bool:
        """It may still land. True where no segment of this D is left to write to."""
        peer.segments.write_failed(place.segment)
        self._gathered(place)
        return peer.segments.is_exhausted

    def settled(self, room: bytes, peer: DecodePeer) -> None:
        peer.segments.settled(room)
        self._resume()

    def _gathered(self, place: Place) -> None:
        """Our own segment is free: a write that is still to land goes where nobody reads."""
        if place.own_segment != NO_SEGMENT:
            self._own_free.append(place.own_segment)
            self._resume()

    # ------------------------------------------------------------------------------------------------------ D's answers

    def scattered(self, room: bytes, message: Scattered, peer: DecodePeer) -> Segment | None:
        """D is done with a segment, which keeps its group until it is taken again. None for an answer that
        is late or doubled."""
        segment = peer.segments.scattered(message.number, message.segment)
        if segment is None or segment.group is None:
            return None
        self._resume()
        if segment.group.room != room:
            return None
        return segment

    def repeat(self, peers: Iterable[DecodePeer], now_s: float) -> None:
        """`Staged` that these D have not answered."""
        for peer in peers:
            for segment in peer.segments.due(now_s):
                self._send(peer, segment)

    def _send(self, peer: DecodePeer, segment: Segment) -> None:
        assert segment.message is not None and segment.group is not None
        segment.repeat_due_s = self._clock.monotonic() + self._retry_interval_s
        self._out.frame(peer.info.endpoint, peer.info.dst_port, segment.group.room, segment.message)

    def _resume(self) -> None:
        """Something is free again. All that is parked may try: which of it fits, its next visit finds out."""
        if self._parked:
            self._queue.resume(self._parked)
            self._parked.clear()
