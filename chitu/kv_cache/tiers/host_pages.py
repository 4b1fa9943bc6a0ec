"""`HostPages`: pages in host memory, in slots of one size, the least recently used given up first.

Any thread; one lock, never held during a copy. A slot is *free*, *filling* (in the hands of the thread that took it),
or *found* under a key; a found one may be *pinned* by its readers. Only found slots without a pin are given up. What
was found is never written to, so a pinned slot can be read without the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from chitu.kv_cache.tiers.record import HEADER_BYTES


class HostPages:
    """`memory` holds as many records (`record.py`) of `page_bytes` bytes of content as fit; the rest stays unused."""

    def __init__(self, memory: memoryview, page_bytes: int) -> None:
        self.record_bytes = HEADER_BYTES + page_bytes
        self.num_slots = len(memory) // self.record_bytes
        self._memory = memory
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, int] = OrderedDict()
        """Slots by key, the least recently used first."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._pins: dict[int, int] = {}
        self._orphans: set[int] = set()
        """Forgotten while pinned: free with the last pin."""
        self._epoch = 0
        self.evictions = 0
        """Pages that were given up for others, since the start."""

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def record(self, slot: int) -> memoryview:
        return self._memory[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    def take(self) -> tuple[int, int] | None:
        """A slot to fill, and the epoch that `publish` wants; None while every slot is filling or pinned."""
        with self._lock:
            if self._free:
                return self._free.pop(), self._epoch
            for key, slot in self._found.items():
                if slot not in self._pins:
                    del self._found[key]
                    self.evictions += 1
                    return slot, self._epoch
            return None

    def give_back(self, slot: int) -> None:
        """A slot from `take`, of which nothing came."""
        with self._lock:
            self._free.append(slot)

    def publish(self, key: bytes, taken: tuple[int, int], holds: Callable[[], bool] = lambda: True) -> bool:
        """The taken slot is filled and sealed: from now on it is found. False, and it is free, where the key is here
        already, everything was forgotten meanwhile, or `holds()` says that it is not the page of this key. That is
        asked under the lock: `clear` comes before it or after all of this."""
        slot, epoch = taken
        with self._lock:
            if epoch != self._epoch or key in self._found or not holds():
                self._free.append(slot)
                return False
            self._found[key] = slot
            return True

    def pin(self, key: bytes) -> int | None:
        """The slot of this key, which stays as it is until `unpin`; it is the most recently used one then."""
        with self._lock:
            slot = self._found.get(key)
            if slot is not None:
                self._found.move_to_end(key)
                self._pins[slot] = self._pins.get(slot, 0) + 1
            return slot

    def unpin(self, slot: int) -> None:
        with self._lock:
            count = self._pins.pop(slot) - 1
            if count:
                self._pins[slot] = count
            elif slot in self._orphans:
                self._orphans.discard(slot)
                self._free.append(slot)

    def touch(self, chain: Iterable[bytes]) -> None:
        """These were used, in one go: of a chain given last page first, the first page is given up last."""
        with self._lock:
            for key in chain:
                if key in self._found:
                    self._found.move_to_end(key)

    def clear(self) -> None:
        """Nothing is found any more, nor will be what is filling now."""
        with self._lock:
            self._epoch += 1
            for slot in self._found.values():
                if slot in self._pins:
                    self._orphans.add(slot)
                else:
                    self._free.append(slot)
            self._found.clear()
