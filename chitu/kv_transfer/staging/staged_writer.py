"""The way of a P into the segments of one D: gather into a segment of our own, then one large write.

Opened next to the `ShardWriter` whose link it uses, so settling and closing are that one's business. Used by transfer
threads without a lock; which segment is whose was decided before (`stager.py`). Where the transport puts scattered
pieces into D's segment at no price per piece (`gathers`), gather and write are one call and no own segment is needed.
P and D have one rank each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from chitu.errors import TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import Staging
from chitu.kv_transfer.staging.packing import pack_pages, pack_row
from chitu.kv_transfer.staging.thresholds import StagedFrom, staged_from
from chitu.kv_transfer.tensor_parallel.shard_writer import PageMove, RankConnection, wait_for
from chitu.kv_transfer.transports.transport import CopyList, OrderedTransport, WriteError, gathers, reaches_pages
from chitu.protocol import StagingMemory
from chitu.types import Ready


class StagedWriter:
    """`theirs` was checked. Raises TransferFailed where we have no segments to gather into."""

    def __init__(
        self, memory: PagedMemory, link: RankConnection, theirs: StagingMemory, staging: Staging, regions_per_layer: int
    ) -> None:
        self._memory = memory
        self._link = link
        self._theirs = theirs
        self._staging = staging
        self._regions_per_layer = regions_per_layer
        self.needs_own_segment = not gathers(link.transport)
        self.segment_bytes = theirs.segment_bytes
        """What a group may have at most."""
        if self.needs_own_segment:
            if staging.area is None:
                raise TransferFailed(f"transport {link.transport.name} needs staging memory here, and there is none")
            self.segment_bytes = min(theirs.segment_bytes, staging.area.segment_bytes)
        self.threshold: StagedFrom | None = None
        """Set: smaller writes are direct."""
        if staging.way == "auto":
            self.threshold = staging.threshold or staged_from(link.transport.name, staging.device, staging.protocol)
        self.must_stage = theirs.is_required or not reaches_pages(link.handle)
        """Pages and logits rows of this D cannot or may not be written directly."""

    def write_pages(self, move: PageMove, own_segment: int, segment: int, timeout_s: float) -> int:
        """Bytes of the group, which is visible in D's segment now. `own_segment`: -1 where none is needed. Raises
        WriteError, or another ChituError before anything was written."""
        layers = range(move.first_layer, move.end_layer)
        after = [move.ready] if move.ready is not None else []
        base = self._base(own_segment, segment)
        pieces = pack_pages(self._memory, move.src_pages, layers, base, self._regions_per_layer)
        if self.needs_own_segment:
            return self._gather_and_write(pieces, after, own_segment, segment, timeout_s)
        if isinstance(self._link.transport, OrderedTransport):
            self._link.transport.write_after(self._link.handle, pieces, after, timeout_s)
        else:
            wait_for([move])
            self._link.transport.write(self._link.handle, pieces, timeout_s)
        return pieces.nbytes

    def write_row(self, src_slot: int, own_segment: int, segment: int, timeout_s: float) -> int:
        """The logits row, which was sealed. As above."""
        pieces = pack_row(self._memory, src_slot, self._base(own_segment, segment))
        if self.needs_own_segment:
            return self._gather_and_write(pieces, (), own_segment, segment, timeout_s)
        self._link.transport.write(self._link.handle, pieces, timeout_s)
        return pieces.nbytes

    def _base(self, own_segment: int, segment: int) -> int:
        if not self.needs_own_segment:
            return self._address(segment)
        assert self._staging.area is not None
        return self._staging.area.address(own_segment)

    def _address(self, segment: int) -> int:
        return self._theirs.base + segment * self._theirs.segment_bytes

    def _gather_and_write(
        self, pieces: CopyList, after: Sequence[Ready], own_segment: int, segment: int, timeout_s: float
    ) -> int:
        deadline_s = time.monotonic() + timeout_s
        nbytes = pieces.nbytes
        self._staging.copier.copy(pieces, after)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise WriteError(f"gathering {nbytes} bytes took over {timeout_s} s", settled=True)
        whole = CopyList((self._base(own_segment, segment),), (self._address(segment),), (nbytes,))
        self._link.transport.write(self._link.handle, whole, left_s)
        return nbytes
