"""`HostPages`: pages in host memory, in slots of one size, the least recently used evicted first.

Any thread; one lock, never held during a copy. A slot is *free*, *filling* (owned by the thread that took it), or
*found* under a key; a found one may be *pinned* by its readers. Only found slots without a pin are evicted. A found
slot is never written to, so a pinned one can be read without the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from chitu.kv_cache.tiers.pages import HEADER_BYTES


class HostPages:
    """The slots in `memory`: as many records (`pages.py`) of `page_bytes` bytes of content as fit; the rest of it is
    unused."""

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
        """Slots cleared while pinned; the last unpin frees them."""
        self.epoch = 0
        """Number of calls of `clear`."""
        self.evictions = 0
        """Pages evicted for other pages since the start."""

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def record(self, slot: int) -> memoryview:
        return self._memory[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    def take(self) -> tuple[int, int] | None:
        """Take a slot to fill; return it with the epoch for `publish`. None if all slots are filling or pinned."""
        with self._lock:
            if self._free:
                return self._free.pop(), self.epoch
            for key, slot in self._found.items():
                if slot not in self._pins:
                    del self._found[key]
                    self.evictions += 1
                    return slot, self.epoch
            return None

    def give_back(self, slot: int) -> None:
        """Free a slot from `take` that was not filled."""
        with self._lock:
            self._free.append(slot)

    def publish(self, key: bytes, taken: tuple[int, int], holds: Callable[[], bool] = lambda: True) -> bool:
        """Publish a taken slot, which is filled and sealed, under its key. Free it and return False if the key is here
        already, `clear` was called meanwhile, or `holds()` denies that the slot holds the page of this key. `holds` is
        called under the lock, so a `clear` comes before or after all of this."""
        slot, epoch = taken
        with self._lock:
            if epoch != self.epoch or key in self._found or not holds():
                self._free.append(slot)
                return False
            self._found[key] = slot
            return True

    def pin(self, key: bytes) -> int | None:
        """Return the slot of this key, or None; it stays unchanged until `unpin`, and is now the most recently used."""
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
        """Mark pages as used. Of a chain given last page first, the first page is evicted last."""
        with self._lock:
            for key in chain:
                if key in self._found:
                    self._found.move_to_end(key)

    def clear(self) -> None:
        """Forget all pages, including those that are filling now."""
        with self._lock:
            self.epoch += 1
            for slot in self._found.values():
                if slot in self._pins:
                    self._orphans.add(slot)
                else:
                    self._free.append(slot)
            self._found.clear()
