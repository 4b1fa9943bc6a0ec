"""What the tiers share: the record of a page, loads of pages, the interface of stores, measured speed.

A record is a page outside the pool, as bytes: a header that identifies the page, then K and V of all layers and KV
heads. The header has the page's content key, and a CRC-32 of key and content. It detects a record that is truncated,
mixed up or damaged by accident (one in 2**32 passes). It does not protect from deliberate changes: every process that
can write to a store is trusted. A store may lose, change or forge records: the caller verifies what it returns.

Invariant of a `PageLoad`, which the step thread makes and the thread `tiers` fills: after `stop` has returned, nothing
of it is written to the pool any longer, so the pages may be given to another request.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from chitu.clock import Clock
from chitu.kv_cache.prefix_index import KEY_BYTES

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"chituKV1"
HEADER_BYTES = 64
"""Size of the header; the content begins on a cache line."""
MEMORY_S = 60.0
"""A speed is forgotten after this long without a measurement, so that what was slow once is tried again."""
SHORTEST_S = 1e-6


def seal(record: memoryview, key: bytes) -> None:
    """Write the header of a record whose content is complete."""
    content = record[HEADER_BYTES:]
    _HEADER.pack_into(record, 0, _MAGIC, key, len(content), _checksum(key, content))


def is_whole(record: memoryview, key: bytes) -> bool:
    """Return whether this is the page of `key`, unchanged."""
    content = record[HEADER_BYTES:]
    if len(record) < HEADER_BYTES:
        return False
    magic, its_key, nbytes, checksum = _HEADER.unpack_from(record)
    return (magic, its_key, nbytes) == (_MAGIC, key, len(content)) and checksum == _checksum(key, content)


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))


class PageLoad:
    """A load that puts the page of `keys[i]` into `pages[i]` of the pool. Its deadline is `end_s`. `host_epoch` is that
    of host memory when it began: what it fetches is not kept there behind a flush."""

    def __init__(self, keys: Sequence[bytes], pages: Sequence[int], end_s: float, host_epoch: int = 0) -> None:
        self.keys = keys
        self.pages = pages
        self.end_s = end_s
        self.host_epoch = host_epoch
        self._lock = threading.Lock()
        self.is_stopped = False
        self.position = 0
        """Position of the first page that is not restored; only `restore` changes it."""
        self.is_done = False
        """Whether nothing more will arrive. Any thread may read it."""
        self._tried: dict[str, int] = {}
        """Position of the page for which a tier was last asked, by the tier's name."""
        self._source = ("", 0, 0)

    @classmethod
    def none(cls) -> PageLoad:
        """Return a finished load without pages."""
        load = cls((), (), 0.0)
        load.is_done = True
        return load

    def tries(self, tier: str) -> bool:
        """Return whether to ask this tier for the next page; True once per page."""
        if self._tried.get(tier) == self.position:
            return False
        self._tried[tier] = self.position
        return True

    def note_source(self, tier: str, begin: int, end: int) -> None:
        """Note that a tier brought these pages to host memory."""
        self._source = (tier, begin, end)

    def num_from_source(self, begin: int, end: int) -> tuple[str, int]:
        """Return the tier that brought the last pages to host memory, and how many of these pages were among them."""
        tier, source_begin, source_end = self._source
        return tier, max(0, min(end, source_end) - max(begin, source_begin))

    def restore(self, copy: Callable[[int], None]) -> bool:
        """Call `copy` with the place of the next page in the pool. After `stop`, do nothing and return False."""
        with self._lock:
            if self.is_stopped:
                return False
            copy(self.pages[self.position])
            self.position += 1
            return True

    def stop(self) -> int:
        """Stop the load and return the final number of restored pages. Wait for one page copy at most; idempotent."""
        with self._lock:
            self.is_stopped = True
            return self.position


class StoreError(Exception):
    """The store does not work at the moment; the message has the reason."""


class PageStore(Protocol):
    """A store of page records. Every method may raise StoreError or OSError, except `may_have`."""

    def may_have(self, key: bytes) -> bool:
        """Return False if `store_get` would find nothing. Any thread; returns at once and never raises."""
        ...

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Store these records. The store may omit some."""
        ...

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Fill `records` with those of `keys`, in order, up to the first missing one. Return how many were filled."""
        ...

    def forget(self, key: bytes) -> None:
        """Remove the record of this key: what `store_get` returned is not its page."""
        ...

    def touch(self, chain: Sequence[bytes]) -> None:
        """Mark these as used; the first one counts as the most recent."""
        ...

    def clear(self) -> None:
        """Remove this instance's own records, because an operator flushed the cache."""
        ...

    def close(self) -> None: ...


class MeasuredSpeed:
    """A speed in units per second; the last measurements count most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured = (0.0, 0.0, 0.0)
        """Units, the seconds that they took, and the time of the last measurement."""

    def note(self, units: float, seconds: float) -> None:
        now_s = self._clock.monotonic()
        past_units, past_seconds, at_s = self._measured
        kept = 0.5 if now_s - at_s < MEMORY_S else 0.0
        self._measured = (kept * past_units + units, kept * past_seconds + max(seconds, SHORTEST_S), now_s)

    def per_s(self) -> float | None:
        """Return the speed, or None if nothing was measured lately."""
        units, seconds, at_s = self._measured
        return units / seconds if seconds and self._clock.monotonic() - at_s < MEMORY_S else None
