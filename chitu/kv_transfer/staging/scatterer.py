"""D copies what lies in segments to where it belongs, on its `scatter` thread (`job_thread.py`). The comm thread only
queues.

A visit has three parts, like a write of P: `begin` (under the receiver's lock: may it still be done?), the copy
(without it: on a GPU one launch, on a stream of its own) and `end` (under it: P is answered). A device that hangs
keeps the room's pages, and the silence of the step thread ends the process.
"""

from __future__ import annotations

from typing import Protocol

from chitu.errors import ChituError
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.arrivals import Scatter, StagedGroup
from chitu.kv_transfer.staging.copier import PieceCopier
from chitu.kv_transfer.staging.packing import pack_pages, pack_row, turned


class ScatterRooms(Protocol):
    """`StagedReceiving`; the first two take the receiver's lock."""

    def begin_scatter(self, group: StagedGroup) -> Scatter | None: ...

    def end_scatter(self, scatter: Scatter, error: ChituError | None) -> None: ...

    def verify_row(self, scatter: Scatter) -> ChituError | None:
        """Whether the logits row that was just copied is the room's. Without the lock."""
        ...


class Scatterer:
    def __init__(
        self, rooms: ScatterRooms, memory: PagedMemory, area: StagingArea, copier: PieceCopier, regions_per_layer: int
    ) -> None:
        self._rooms = rooms
        self._memory = memory
        self._area = area
        self._copier = copier
        self._regions_per_layer = regions_per_layer

    def scatter(self, group: StagedGroup) -> None:
        scatter = self._rooms.begin_scatter(group)
        if scatter is None:
            return
        error: ChituError | None = None
        try:
            self._copy(scatter)
            if not scatter.pages:
                error = self._rooms.verify_row(scatter)
        except ChituError as failure:
            error = failure
        self._rooms.end_scatter(scatter, error)

    def _copy(self, scatter: Scatter) -> None:
        message = scatter.group.message
        base = self._area.address(message.segment)
        if scatter.pages:
            layers = range(message.first_layer, message.end_layer)
            pieces = pack_pages(self._memory, scatter.pages, layers, base, self._regions_per_layer)
        else:
            pieces = pack_row(self._memory, message.aux_slot, base)
        self._copier.copy(turned(pieces))
