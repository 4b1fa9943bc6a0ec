"""What sequences hold of an instance (pages, an executor slot, an aux slot) and when it is free again.

Owned by `PDScheduler`, used by its managers; step thread only. Invariant: while a launched step is unread, nothing that
was held when it was launched is free. A kernel may still read or write it, and D promises free pages and aux slots to a
peer, whose writes no stream of ours orders. So what is given back meanwhile waits for the newest launched step to be
read; where none is in flight it is free at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import Internal
from chitu.instance.scheduling.sequence import Sequence
from chitu.instance.scheduling.slots import SlotPool


class AuxSlots(Protocol):
    """The slice of `MetadataBuffers` that scheduling needs."""

    @property
    def num_free(self) -> int: ...

    def allocate(self) -> int | None: ...

    def free(self, slot: int) -> None: ...


class NoAuxSlots:
    """Of an instance that hands no logits over."""

    num_free = 0

    def allocate(self) -> int | None:
        return None

    def free(self, slot: int) -> None:
        raise Internal(f"aux slot {slot} came back to an instance that has none")


class Resources:
    """`sync_step` reads what is in flight, so that nothing is: requests may
    end in it, and what they held comes back. The scheduler sets it."""

    def __init__(self, cache: PagedKVCacheManager, num_slots: int, aux: AuxSlots) -> None:
        self.cache = cache
        self.slots = SlotPool(num_slots)
        self.aux = aux
        self.sync_step: Callable[[], None] = lambda: None
        self._num_launched = self._num_read = 0
        self._leaving: deque[tuple[int, Callable[[], None]]] = deque()
        """What happens when that many steps have been read."""

    @property
    def num_unread(self) -> int:
        """Launched steps that were not read yet."""
        return self._num_launched - self._num_read

    def launched(self) -> None:
        """A step is about to be launched: what is held now may be used by it."""
        self._num_launched += 1

    def read(self) -> None:
        """The oldest unread step is done."""
        self._num_read += 1
        while self._leaving and self._leaving[0][0] <= self._num_read:
            self._leaving.popleft()[1]()

    def take_aux(self) -> int:
        """A slot, where the caller has just seen that one is free."""
        slot = self.aux.allocate()
        if slot is None:
            raise Internal("an aux slot was counted as free but none is")
        return slot

    def hold_forks(self, source: Sequence) -> None:
        """A slot for each fork (the first one gets that of the prompt, where it has one) and the page in which the
        prompt ends. The caller has just seen that they are free."""
        for fork in source.forks:
            self.cache.reserve(fork.room, source.prompt_len % self.cache.page_size)
        for fork in source.forks[source.slot >= 0 :]:
            self.slots.take(fork)

    def free_slot(self, sequence: Sequence) -> None:
        """It keeps its pages. As all of these: nothing happens where it has none (any more)."""
        if sequence.slot >= 0:
            self._when_read(partial(self._free_slot, sequence))

    def free_aux(self, sequence: Sequence) -> None:
        if sequence.aux_slot >= 0:
            self._when_read(partial(self._free_aux, sequence))

    def free_all(self, sequence: Sequence, then: Callable[[], object]) -> None:
        """The request is over and no peer touches its pages. `then` follows."""
        self._when_read(partial(self._free_all, sequence, then))

    def vacate(self, sequence: Sequence, is_offloaded: bool) -> None:
        """Free all at once of a sequence that comes back later; nothing may be in flight. `is_offloaded`: the executor
        forgets the slot when it has saved its pages."""
        if self.num_unread:
            raise Internal(f"pages are wanted back from {sequence.request_id} with a step in flight")
        if sequence.slot >= 0:
            self.slots.free(sequence, admitted=sequence.admitted and not is_offloaded)
            sequence.admitted = False
        self._free_aux(sequence)
        self.cache.remove_task(sequence.room)

    def _when_read(self, action: Callable[[], None]) -> None:
        if self.num_unread:
            self._leaving.append((self._num_launched, action))
        else:
            action()

    def _free_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self.slots.free(sequence, admitted=sequence.admitted)

    def _free_aux(self, sequence: Sequence) -> None:
        if sequence.aux_slot >= 0:
            self.aux.free(sequence.aux_slot)
            sequence.aux_slot = -1

    def _free_all(self, sequence: Sequence, then: Callable[[], object]) -> None:
        self._free_slot(sequence)
        self._free_aux(sequence)
        self.cache.remove_task(sequence.room)
        then()
