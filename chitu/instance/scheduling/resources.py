"""What sequences hold of an instance (pages, an executor slot, an aux slot) and when it is free again.

Owned by `PDScheduler`, used by its managers; step thread only. Invariant: while a launched step is unread, nothing that
was held at its launch is free. A kernel may still read or write it, and D offers free pages and aux slots to a peer,
whose writes none of our streams orders. So what is released meanwhile becomes free when the newest launched step is
read. If no step is in flight it is free at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import Internal
from chitu.instance.scheduling.sequence import Sequence
from chitu.instance.scheduling.slots import SlotPool
from chitu.kv_transfer.metadata_buffers import MetadataBuffers


class Resources:
    """The pages, slots and aux slots of an instance. `sync_step`, set by the scheduler, reads the step in flight, so
    that none is. Requests may end in it, and what they held becomes free."""

    def __init__(self, cache: PagedKVCacheManager, num_slots: int, aux: MetadataBuffers) -> None:
        self.cache = cache
        self.slots = SlotPool(num_slots)
        self.aux = aux
        self.sync_step: Callable[[], None] = lambda: None
        self._num_launched = self._num_read = 0
        self._leaving: deque[tuple[int, Callable[[], None]]] = deque()
        """Releases that wait, each until that many steps have been read."""

    @property
    def num_unread(self) -> int:
        """Number of launched steps that are not read yet."""
        return self._num_launched - self._num_read

    def launched(self) -> None:
        """Note that a step is about to be launched, which may use what is held now."""
        self._num_launched += 1

    def read(self) -> None:
        """Note that the oldest unread step was read, and make free what waited for it."""
        self._num_read += 1
        while self._leaving and self._leaving[0][0] <= self._num_read:
            self._leaving.popleft()[1]()

    def take_aux(self) -> int:
        """Take an aux slot. The caller has just checked that one is free."""
        slot = self.aux.allocate()
        if slot is None:
            raise Internal("an aux slot was counted as free but none is")
        return slot

    def hold_forks(self, source: Sequence) -> None:
        """Reserve for each fork the page in which the prompt ends, and a slot; the first fork later gets the slot of
        the prompt, if that has one. The caller has just checked that they are free."""
        for fork in source.forks:
            self.cache.reserve(fork.room, source.prompt_len % self.cache.page_size)
        for fork in source.forks[source.slot >= 0 :]:
            self.slots.take(fork)

    def free_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that keeps its pages, if it has one."""
        if sequence.slot >= 0:
            self.when_read(partial(self.slots.free, sequence))

    def free_aux(self, sequence: Sequence) -> None:
        """Free the aux slot of a sequence, if it has one."""
        if sequence.aux_slot >= 0:
            self.when_read(partial(self._free_aux, sequence))

    def vacate(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free at once all that a sequence holds. No step may be in flight. `is_offloaded`: the executor itself
        releases the slot after it has saved its pages."""
        if self.num_unread:
            raise Internal(f"pages are wanted back from {sequence.request_id} with a step in flight")
        self.free_now(sequence, is_offloaded)

    def when_read(self, action: Callable[[], None]) -> None:
        """Call the action when the newest launched step is read; at once if it has been."""
        if self.num_unread:
            self._leaving.append((self._num_launched, action))
        else:
            action()

    def free_now(self, sequence: Sequence, is_offloaded: bool = False) -> None:
        """Free all that a sequence holds, which no launched step and no peer touches. `is_offloaded` is as in
        `vacate`."""
        self.slots.free(sequence, is_offloaded)
        self._free_aux(sequence)
        self.cache.remove_task(sequence.room)

    def _free_aux(self, sequence: Sequence) -> None:
        if sequence.aux_slot >= 0:
            self.aux.free(sequence.aux_slot)
            sequence.aux_slot = -1
