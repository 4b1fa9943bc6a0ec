"""D: groups that lie in segments: which are new, whether their room still waits, and what P is answered.

Owned by `DecodeReceiver`, every method under its lock: `arrived` from the comm thread, `begin` and `end` from the
scattering thread, which copies between the two without it. Invariants: no group is scattered twice; none is scattered
into a room that does not wait any more; while a scatter is inside a room the room's pages are nobody else's; a segment
is answered for only when nobody reads it. A segment belongs to one incarnation of P, whose numbers grow, so the last
number of each segment is all that has to be remembered. Source: adr/0005.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from chitu.errors import BadFrame, ChituError, Integrity
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.parts import KVManagerConfig, TransferOutbox
from chitu.kv_transfer.receiver.prefill_directory import PrefillDirectory
from chitu.kv_transfer.receiver.receive_rooms import ReceiveEntry, ReceiveRooms
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.grants import SegmentGrants
from chitu.kv_transfer.staging.packing import unit_bytes
from chitu.protocol import Scattered, Staged, unpack_i32
from chitu.protocol.states import ReceiverEvent, ReceiverState

OPEN_STATES = frozenset({ReceiverState.WAITING, ReceiverState.LOGITS})
"""The room's pages wait for KV."""


@dataclass(slots=True, frozen=True)
class StagedGroup:
    """A job of the scattering thread."""

    room: bytes
    message: Staged


@dataclass(slots=True, frozen=True)
class Scatter:
    """A scatter that may be done now."""

    group: StagedGroup
    entry: ReceiveEntry
    pages: tuple[int, ...]
    """Ours, in the order in which they lie in the segment; none: it is the logits row."""


@dataclass(slots=True)
class _Segment:
    """What came last in it."""

    incarnation: int = 0
    number: int = 0
    is_answered: bool = False


class StagedArrivals:
    def __init__(
        self,
        config: KVManagerConfig,
        memory: PagedMemory,
        area: StagingArea,
        grants: SegmentGrants,
        rooms: ReceiveRooms,
        directory: PrefillDirectory,
        out: TransferOutbox,
    ) -> None:
        self._incarnation = config.incarnation
        self._layout = config.layout
        self._memory = memory
        self._area = area
        self._grants = grants
        self._rooms = rooms
        self._directory = directory
        self._out = out
        self._segments = [_Segment() for _ in range(area.num_segments)]

    # ------------------------------------------------------------------------------------------------------ comm thread

    def arrived(self, room: bytes, message: Staged) -> StagedGroup | None:
        """The job, where this group is new. What is known is answered again, or will be. Raises BadFrame."""
        rank = self._directory.rank_of(message.incarnation)
        if rank is None:
            self._rooms.stale_frames += 1
            return None
        if message.segment not in self._grants.of(rank):
            raise BadFrame(f"P{rank} staged a group in segment {message.segment}, which it was not granted")
        if not 0 < message.length <= self._area.segment_bytes:
            raise BadFrame(f"P{rank} staged {message.length} bytes in a segment of {self._area.segment_bytes}")
        segment = self._segments[message.segment]
        if message.incarnation != segment.incarnation:
            # The directory knows one incarnation of a rank, so this one has taken the other's place.
            segment.incarnation, segment.number = message.incarnation, 0
        if message.number < segment.number:
            return None  # late; P has used the segment again, so it knows
        if message.number == segment.number:
            if segment.is_answered:
                self._answer(room, message)
            return None
        segment.number, segment.is_answered = message.number, False
        return StagedGroup(room, message)

    # ------------------------------------------------------------------------------------------------ scattering thread

    def begin(self, group: StagedGroup) -> Scatter | None:
        """The room is marked as being scattered. None: it does not wait (any more), and P has been answered."""
        message = group.message
        entry = self._rooms.hear(group.room, message.incarnation)
        if entry is None or entry.state not in OPEN_STATES or entry.data.is_written:
            self._done(group)
            return None
        try:
            pages = self._own_pages(entry, message)
        except BadFrame as error:
            text = "a group of room %s makes no sense: %s"
            self._out.log(logging.WARNING, text, entry.data.request_id, error.message)
            self._rooms.fail(group.room, ReceiverEvent.CORRUPT, Integrity(error.message))
            self._done(group)
            return None
        entry.data.num_scattering += 1
        return Scatter(group, entry, pages)

    def end(self, scatter: Scatter, error: ChituError | None) -> None:
        """The copy is over; `error`: it failed, or what it brought is not what P sealed."""
        group, record = scatter.group, scatter.entry.data
        record.num_scattering -= 1
        record.num_scattered += 1
        if self._rooms.table.get(group.room) is scatter.entry:
            if error is not None:
                self._rooms.fail(group.room, ReceiverEvent.CORRUPT, error)
            elif not scatter.pages:
                self._rooms.logits_arrived(group.room)
            self._rooms.free_if_untouched(group.room)
        self._done(group)

    def _own_pages(self, entry: ReceiveEntry, message: Staged) -> tuple[int, ...]:
        """The pages that the group's positions mean; none for the logits row. Raises BadFrame."""
        record = entry.data
        if message.aux_slot >= 0:
            if message.aux_slot != record.aux_slot or message.length != self._memory.aux_row_bytes:
                raise BadFrame(f"{message.length} bytes for aux slot {message.aux_slot}")
            return ()
        pages = unpack_i32(record.info.dst_kv_indices)
        layers, positions = message.end_layer - message.first_layer, message.end_page - message.first_page
        is_inside = (
            0 <= message.first_layer < message.end_layer <= self._layout.num_layers
            and record.info.prefix_pages <= message.first_page < message.end_page <= len(pages)
        )
        wanted = layers * positions * unit_bytes(self._memory, self._layout.regions_per_layer)
        if not is_inside or message.length != wanted:
            raise BadFrame(
                f"{message.length} bytes for layers {message.first_layer} to {message.end_layer - 1} of pages"
                f" {message.first_page} to {message.end_page - 1} of {len(pages)}"
            )
        return tuple(pages[message.first_page : message.end_page])

    def _done(self, group: StagedGroup) -> None:
        """Nobody reads the segment (for this group) any more."""
        message = group.message
        segment = self._segments[message.segment]
        if (segment.incarnation, segment.number) == (message.incarnation, message.number):
            segment.is_answered = True
        self._answer(group.room, message)

    def _answer(self, room: bytes, message: Staged) -> None:
        address = self._directory.address_of(message.incarnation)
        if address is not None:
            self._out.frame(*address, room, Scattered(self._incarnation, message.number, message.segment))
