"""P's credits at one D: which of the segments that D granted are free, written, waiting for D, or not to be touched.

One for each registered D, kept over reconnects (D's numbers and segments are those of its incarnation). Owned by
`Stager`, under the sender's lock; nothing here blocks. The table is `states.SEGMENT_TRANSITIONS`. Invariants: no two
groups are in one segment; a segment whose write may still land, or that D may still read, is not written; numbers of
groups grow and are never used twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chitu.kv_transfer.sender.transfer_queue import TransferKVChunk
from chitu.kv_transfer.transfer_table import NEVER_S
from chitu.protocol import Staged
from chitu.protocol.states import SEGMENT_TRANSITIONS, SegmentEvent, SegmentState


@dataclass(slots=True, frozen=True)
class SegmentGroup:
    """What one segment carries: pages of a room, or (without a chunk) its logits row."""

    room: bytes
    chunk: TransferKVChunk | None


@dataclass(slots=True)
class Segment:
    index: int
    state: SegmentState = SegmentState.FREE
    number: int = 0
    """Of the group that is or was in it."""
    group: SegmentGroup | None = None
    message: Staged | None = None
    repeat_due_s: float = NEVER_S


@dataclass(slots=True)
class GrantedSegments:
    segments: dict[int, Segment] = field(default_factory=dict)
    _last_number: int = 0

    @classmethod
    def of(cls, indices: Sequence[int]) -> GrantedSegments:
        return cls({index: Segment(index) for index in indices})

    def take(self, group: SegmentGroup) -> Segment | None:
        """A free segment, for this group; None where there is none now."""
        free = [segment for segment in self.segments.values() if segment.state is SegmentState.FREE]
        if not free:
            return None
        # The one that was used longest ago: what still comes late of its last group is as old as can be.
        segment = min(free, key=lambda segment: segment.number)
        self._apply(segment, SegmentEvent.TAKE)
        self._last_number += 1
        segment.number, segment.group, segment.message = self._last_number, group, None
        segment.repeat_due_s = NEVER_S
        return segment

    def written(self, segment: Segment, message: Staged) -> None:
        """It is D's until `scattered`."""
        self._apply(segment, SegmentEvent.WRITTEN)
        segment.message = message

    def dropped(self, segment: Segment) -> None:
        """Nothing of the write can land any more, and D is not told of it."""
        self._apply(segment, SegmentEvent.DROPPED)

    def write_failed(self, segment: Segment) -> None:
        """The write may still land."""
        self._apply(segment, SegmentEvent.WRITE_FAILED)

    def scattered(self, number: int, index: int) -> Segment | None:
        """D is done with a segment, which keeps its group until it is taken again. None for an answer that
        is late or doubled."""
        segment = self.segments.get(index)
        if segment is None or segment.number != number or segment.state is not SegmentState.STAGED:
            return None
        self._apply(segment, SegmentEvent.SCATTERED)
        segment.repeat_due_s = NEVER_S
        return segment

    def settled(self, room: bytes) -> None:
        """Nothing that was written for this room can land any more."""
        for segment in self.segments.values():
            if segment.state is SegmentState.QUARANTINED and segment.group is not None and segment.group.room == room:
                self._apply(segment, SegmentEvent.SETTLED)

    def due(self, now_s: float) -> Iterator[Segment]:
        """Those whose `Staged` is to be repeated."""
        for segment in self.segments.values():
            if segment.state is SegmentState.STAGED and segment.repeat_due_s <= now_s:
                yield segment

    def count(self, state: SegmentState) -> int:
        return sum(segment.state is state for segment in self.segments.values())

    @property
    def is_exhausted(self) -> bool:
        """All of them in quarantine: nothing can be written before a settle."""
        return self.count(SegmentState.QUARANTINED) == len(self.segments)

    def _apply(self, segment: Segment, event: SegmentEvent) -> None:
        segment.state = SEGMENT_TRANSITIONS[segment.state, event]
