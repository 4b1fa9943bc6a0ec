"""Watches P's writes into D's memory: bytes move only in memory that their room owns, both at once and when a late
write lands; other threads go on in the middle of a write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pd_node import NUM_PAGES, PAGE_BYTES

from chitu.kv_transfer.checksums import VerifyKV
from chitu.kv_transfer.transports.staged import TransferWay
from chitu.kv_transfer.transports.transport import CopyList
from chitu.types import Role

if TYPE_CHECKING:
    from cluster import Cluster
    from cluster_process import Process


@dataclass(frozen=True)
class Writes:
    """How the Ps of a world write and how the Ds verify."""

    max_batch_bytes: int = 4 * PAGE_BYTES
    verify_kv: VerifyKV = "off"
    way: TransferWay = "direct"
    segment_bytes: int = 0
    """Bytes of a segment. Zero: no instance has segments."""
    gathers: bool = False
    """Whether P's transport puts pieces into D's segments by itself."""


class WriteWatch:
    """The `on_write` and `on_land` callbacks of the world's fabric."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._writes: dict[int, tuple[bytes, CopyList]] = {}
        """Room and copies, by the id of the copies."""
        self._num_moves = 0
        self._is_inside_write = False

    def on_write(self, target: str, copies: CopyList) -> None:
        self._writes[id(copies)] = self._world.writing, copies
        self.meanwhile()

    def meanwhile(self) -> None:
        """Let other threads run in the middle of a write, gather or scatter, which take long: the comm threads and the
        step threads of D go on, and those of P receive their messages."""
        self._num_moves += 1
        world = self._world
        if self._is_inside_write or (self._num_moves % 3 and not world.interruptions):
            return
        self._is_inside_write = True
        if world.interruptions:
            world.op_cancel(world.interruptions.popleft(), 0)
            while world.orders and world.deliver_order():
                pass
        for process in world.of(Role.DECODE):
            if not process.is_frozen and not process.is_slow and process not in world.stepping:
                world.step(process)
        for _ in range(min(2, len(world.frames))):
            world.deliver(0)
        for process in world.of(Role.PREFILL):
            if not process.is_frozen:
                process.tick(world.clock.monotonic())
        self._is_inside_write = False

    def on_land(self, target: str, copies: CopyList) -> None:
        room = self._writes[id(copies)][0]
        for process in self._world.processes:
            if process.role is Role.PREFILL:
                _check(process, room, copies.src, copies.length, is_source=True)
            elif process.session == target:
                _check(process, room, copies.dst, copies.length, is_source=False)

    def on_copy(self, process: Process, copies: CopyList) -> None:
        """Check that a room owns all pieces that are gathered into a segment of this process or scattered out of
        one."""
        self.meanwhile()
        is_source = process.role is Role.PREFILL
        pages, slots = _parts(process, copies.src if is_source else copies.dst, copies.length)
        sequences = process.sequences()
        rooms = [room for room in sequences if pages <= set(process.cache.get_page_indices(room))]
        rooms = [room for room in rooms if slots <= {sequences[room].aux_slot}]
        assert rooms, f"pages {pages} and aux slots {slots} of {process.name} are copied, and no room has them"
        process.check_landing(rooms[0], pages, slots, is_source)


def _check(process: Process, room: bytes, addresses: object, lengths: object, is_source: bool) -> None:
    """Check that the room has these pages and aux slots of the process. Segments are exempt: any P may write them at
    any time, and if all writes are staged, nothing else is written."""
    memory, at = process.memory, np.asarray(addresses, dtype=np.int64)
    if not ((at >= memory.arena_base) & (at < memory.arena_base + memory.arena_bytes)).any():
        return
    pages, slots = _parts(process, addresses, lengths)
    if pages or slots:
        assert is_source or process.world.writes.way != "staged", "a write beside the segments"
        process.check_landing(room, pages, slots, is_source)


def _parts(process: Process, addresses: object, lengths: object) -> tuple[set[int], set[int]]:
    """Return the pages and aux slots of the process that contain these bytes."""
    memory = process.memory
    offsets = np.asarray(addresses, dtype=np.int64) - memory.arena_base
    aux_offset = memory.aux_base - memory.arena_base
    area_offset = None if memory.area is None else memory.area.base - memory.arena_base
    region_bytes = NUM_PAGES * PAGE_BYTES
    pages: set[int] = set()
    slots: set[int] = set()
    for start, count in zip(offsets.tolist(), np.asarray(lengths).tolist(), strict=True):
        if start < aux_offset:
            first = start % region_bytes // PAGE_BYTES
            pages.update(range(first, first + -(-count // PAGE_BYTES)))
        elif area_offset is None or start < area_offset:
            slots.add((start - aux_offset) // memory.aux_row_bytes)
    return pages, slots
