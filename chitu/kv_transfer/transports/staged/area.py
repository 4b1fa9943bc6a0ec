"""Staging memory of an instance: one range of registered memory, cut into segments of equal size.

D grants its segments to the P of the cluster, in equal shares by engine rank; P gathers into segments of its own. Built
by the service's main thread, then read-only: any thread. Source: docs/adr/0015.

Invariant: a segment lies inside the area, and the area inside the allocation that the transports have registered: the
pool's arena, behind its pages, or a host arena of its own (`area.py`). Nothing else uses that memory.

Segments in host memory beside a pool in GPU memory: an anonymous shared file, which a process of the same host
can map (`shm`), and from which libraries send over TCP anyway.

Built by the service's main thread. The system allocates the memory when it is touched, and it is pinned at the first
copy of the device to or from it (0.7 ms per MiB, measured for 448 MiB), so an instance whose writes go another way pays
nothing. `device_base` may be called by several threads. Invariant: pinned once, and unpinned before the mapping is
removed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from chitu.errors import TransferFailed
from chitu.kv_cache.shared_memory import shared_memory
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.cuda_ipc import PinDriver
from chitu.kv_transfer.transports.mapped import APART
from chitu.protocol import TransportSession

SEGMENTS = "segments"
"""Attribute of D's session: base, bytes and number of its segments."""
OWNERS = "segment_owners"
"""Attribute of D's session: engine ranks of the P that share its segments."""
ADDRESS_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class StagingArea:
    base: int
    segment_bytes: int
    num_segments: int
    arena_base: int
    """Base of the allocation that the transports register."""
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
        """Return the address of the segment's first byte. Raises IndexError for a segment that does not exist."""
        if not 0 <= segment < self.num_segments:
            raise IndexError(f"segment {segment} of {self.num_segments}")
        return self.base + segment * self.segment_bytes

    def is_in(self, memory: PagedMemory) -> bool:
        """Return whether it lies in the pool's own arena, which every transport registers anyway."""
        return self.arena_base == memory.arena_base

    def attributes(self, memory: PagedMemory, owners: Sequence[int]) -> dict[str, str]:
        """Return the session attributes that describe D's area."""
        found = {SEGMENTS: f"{self.base}:{self.segment_bytes}:{self.num_segments}", OWNERS: ",".join(map(str, owners))}
        return found if self.is_in(memory) else {**found, APART: f"{self.arena_base}:{self.arena_bytes}"}


def area_of(memory: PagedMemory, base: int, segment_bytes: int, num_segments: int) -> StagingArea:
    """Return the area at the tail of a pool's arena."""
    return StagingArea(base, segment_bytes, num_segments, memory.arena_base, memory.arena_bytes)


def share_of(num_segments: int, owners: Sequence[int], rank: int) -> range:
    """Return the segments that the P of this engine rank may write. They are fixed, so no P waits for a grant, and a
    silent P costs other P nothing. A P that comes back gets the segments of its predecessor, which is dead by then."""
    ranks = sorted(set(owners))
    share = num_segments // max(1, len(ranks))
    first = ranks.index(rank) * share if rank in ranks else 0
    return range(first, first + share) if rank in ranks else range(0)


def granted(session: TransportSession, rank: int) -> tuple[int, int, range] | None:
    """Return the base and size of a D's segments, and those that the P of this rank may write, or None if there are
    none. Raises TransferFailed for invalid numbers."""
    text = session.attributes.get(SEGMENTS, "")
    if not text:
        return None
    try:
        base, segment_bytes, num_segments = (int(number) for number in text.split(":"))
        owners = [int(number) for number in session.attributes.get(OWNERS, "").split(",") if number]
    except ValueError as error:
        raise TransferFailed(f"segments {text[:80]!r} of {session.session_id} are not well formed") from error
    if min(base, segment_bytes - 1, num_segments) < 0 or base + segment_bytes * num_segments >= ADDRESS_LIMIT:
        raise TransferFailed(f"{num_segments} segments of {segment_bytes} bytes at {base:#x} of {session.session_id}")
    mine = share_of(num_segments, owners, rank)
    return (base, segment_bytes, mine) if mine else None


PAGE_BYTES = 4096


class HostArena:
    """Implements `copier.Window`. Raises ConfigError if the memory cannot be allocated."""

    def __init__(self, nbytes: int, driver: PinDriver) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._driver = driver
        self._lock = threading.Lock()
        self._device_base: int | None = None
        self._map = shared_memory("chitu-staging", self.nbytes, "staging in host memory")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def is_pinned(self) -> bool:
        return self._device_base is not None

    def device_base(self) -> int:
        """Return the device address of `base`; pins the memory at the first call. Raises TransferFailed."""
        with self._lock:
            if self._device_base is None:
                self._device_base = self._driver.pin(self.base, self.nbytes)
            return self._device_base

    def close(self) -> None:
        """Unpin and release the memory; no copy may be in flight. Idempotent. Processes that mapped it keep it."""
        with self._lock:
            if self._device_base is not None:
                self._driver.unpin(self.base)
                self._device_base = None
            self._map.close()
