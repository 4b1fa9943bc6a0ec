"""P's writes into D's memory, watched: no byte of a room moves but between what is in that room's hands, now and when a
late write lands, and others go on in the middle of a write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pd_node import NUM_PAGES, PAGE_BYTES

from chitu.kv_transfer.transports.transport import CopyList
from chitu.types import Role

if TYPE_CHECKING:
    from cluster import Cluster
    from cluster_process import Process


class WriteWatch:
    """`on_write` and `on_land` of the world's fabric."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._writes: dict[int, tuple[bytes, CopyList]] = {}
        """Room and copies, by the id of the copies."""
        self._is_inside_write = False

    def on_write(self, target: str, copies: CopyList) -> None:
        self._writes[id(copies)] = self._world.writing, copies
        if len(self._writes) % 3 == 0 and not self._is_inside_write:
            self._in_the_middle_of_a_write()

    def _in_the_middle_of_a_write(self) -> None:
        """Which takes long: the comm threads and the step threads of D go on, and those of P hear of it."""
        world, self._is_inside_write = self._world, True
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


def _check(process: Process, room: bytes, addresses: object, lengths: object, is_source: bool) -> None:
    """Which of the process's pages and aux slots these addresses are, and whether the room has them."""
    memory = process.memory
    at, length = np.asarray(addresses, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    if not ((at >= memory.arena_base) & (at < memory.arena_base + memory.arena_bytes)).any():
        return
    region_bytes = NUM_PAGES * PAGE_BYTES
    pages: set[int] = set()
    slots: set[int] = set()
    for start, count in zip(at - memory.arena_base, length, strict=True):
        if start < memory.aux_base - memory.arena_base:
            first = int(start % region_bytes) // PAGE_BYTES
            pages |= set(range(first, first + -(-int(count) // PAGE_BYTES)))
        else:
            slots.add(int(start - memory.aux_base + memory.arena_base) // memory.aux_row_bytes)
    process.check_landing(room, pages, slots, is_source)
