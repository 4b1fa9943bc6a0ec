"""Staging memory of an instance: one range of registered memory, cut into segments of equal size.

D grants its segments to the P that register with it; P gathers into its own ones, where its transport does not write
scattered pieces into D's segment by itself. Built by the service's main thread, then read only: any thread. Who may use
a segment is the business of `staged_writer.py` (P) and `scatterer.py` (D). Source: docs/adr/0005.

Invariant: a segment lies inside the area, and the area inside the allocation that the transports have registered: the
pool's arena, behind its pages, or a host arena of its own (`host_area.py`). Nothing else has bytes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.copier import PieceCopier
from chitu.kv_transfer.staging.thresholds import StagedFrom
from chitu.protocol import StagingMemory

TransferWay = Literal["auto", "direct", "staged"]


@dataclass(frozen=True, slots=True)
class StagingArea:
    base: int
    segment_bytes: int
    num_segments: int
    arena_base: int
    """Of the allocation that the transports register."""
    arena_bytes: int

    def __post_init__(self) -> None:
        is_inside = self.arena_base <= self.base and self.base + self.nbytes <= self.arena_base + self.arena_bytes
        if self.segment_bytes < 1 or self.num_segments < 1 or not is_inside:
            raise ValueError(
                f"{self.num_segments} segments of {self.segment_bytes} bytes at {self.base:#x} in an arena of"
                f" {self.arena_bytes} bytes at {self.arena_base:#x}"
            )

    @property
    def nbytes(self) -> int:
        return self.num_segments * self.segment_bytes

    def address(self, segment: int) -> int:
        """Of the segment's first byte. IndexError for one that does not exist."""
        if not 0 <= segment < self.num_segments:
            raise IndexError(f"segment {segment} of {self.num_segments}")
        return self.base + segment * self.segment_bytes

    def is_in(self, memory: PagedMemory) -> bool:
        """Whether it lies in the pool's own arena, which every transport registers anyway."""
        return self.arena_base == memory.arena_base

    def memory(self, is_required: bool = False) -> StagingMemory:
        """The record that a peer gets."""
        return StagingMemory(
            self.arena_base, self.arena_bytes, self.base, self.segment_bytes, self.num_segments, is_required
        )


def area_of(memory: PagedMemory, staging_base: int, segment_bytes: int, num_segments: int) -> StagingArea:
    """The area at the tail of a pool's arena."""
    return StagingArea(staging_base, segment_bytes, num_segments, memory.arena_base, memory.arena_bytes)


@dataclass(frozen=True, slots=True)
class Staging:
    """What the service hands to `KVManager`; None there: every write is direct."""

    way: TransferWay
    """As configured. `direct` only where nothing else was possible (TP)."""
    copier: PieceCopier
    area: StagingArea | None
    """D: what it grants. P: what it gathers into; None where its transports gather by themselves (`gathers`)."""
    device: str = "cpu"
    """Where the pool is; with the next, what the entry of `thresholds.py` is chosen by."""
    protocol: str = "tcp"
    """Mooncake's."""
    threshold: StagedFrom | None = None
    """In place of that entry."""
