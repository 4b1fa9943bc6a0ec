"""The queue of pending writes, and the threads that do them.

The step thread puts jobs in (`ChunkFeed`), transfer threads take batches out. Order: aux rows of any room first
(token 1 waits for them), then rooms first come, first served. Jobs of one room leave in the order in which they came,
and at most one thread works on a room, so Success can never overtake data. Jobs of a room that wait together leave as
one batch (several layers become one write), up to `max_batch_units` (pages times layers), so a long prompt does not
hold up the next aux row. Without `start`, `run_one` does one batch in the caller's thread (tests).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chitu.types import Ready

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class TransferKVChunk:
    """KV pages `[first_page, end_page)` (positions in the room's page list) of layers `[first_layer, end_layer)`."""

    first_layer: int
    end_layer: int
    first_page: int
    end_page: int
    ready: Ready | None = None
    """Event after which the pages are computed; None: they already are."""

    @property
    def num_units(self) -> int:
        """Pages times layers."""
        return (self.end_layer - self.first_layer) * (self.end_page - self.first_page)


@dataclass(slots=True, frozen=True)
class TransferJob:
    """One job of a transfer thread for one room: the aux row, KV chunks, or a settle attempt."""

    room: bytes
    is_aux: bool
    chunks: tuple[TransferKVChunk, ...]
    is_settle: bool = False

    @property
    def num_units(self) -> int:
        """Pages times layers; the aux row counts as one."""
        return self.is_aux + sum(chunk.num_units for chunk in self.chunks)


@dataclass(slots=True)
class _Pending:
    is_aux: bool = False
    is_settle: bool = False
    chunks: deque[TransferKVChunk] = field(default_factory=deque)

    @property
    def is_empty(self) -> bool:
        return not (self.is_aux or self.is_settle or self.chunks)


Work = Callable[[TransferJob], None]


def merged(chunks: Sequence[TransferKVChunk]) -> list[TransferKVChunk]:
    """Return the chunks with neighbouring layers of the same pages merged: several layers become one plan, which is
    ready when the last of them is."""
    found: list[TransferKVChunk] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if (
            last is not None
            and last.end_layer == chunk.first_layer
            and (last.first_page, last.end_page) == (chunk.first_page, chunk.end_page)
        ):
            pages = chunk.first_page, chunk.end_page
            found[-1] = TransferKVChunk(last.first_layer, chunk.end_layer, *pages, chunk.ready or last.ready)
        else:
            found.append(chunk)
    return found


class TransferQueue:
    """Pending jobs by room. `work(batch)` is called without the queue's lock; it must not raise."""

    def __init__(self, work: Work, max_batch_units: int) -> None:
        self._work = work
        self.max_batch_units = max(1, max_batch_units)
        self._pending: OrderedDict[bytes, _Pending] = OrderedDict()
        self._busy: set[bytes] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def put_aux(self, room: bytes) -> None:
        with self._changed:
            self._of(room).is_aux = True
            self._changed.notify()

    def put_chunk(self, room: bytes, chunk: TransferKVChunk) -> None:
        with self._changed:
            self._of(room).chunks.append(chunk)
            self._changed.notify()

    def put_settle(self, room: bytes) -> None:
        with self._changed:
            self._of(room).is_settle = True
            self._changed.notify()

    def drop(self, room: bytes) -> bool:
        """Forget what waits for a room. Return True if a thread works on it right now."""
        with self._changed:
            self._pending.pop(room, None)
            return room in self._busy

    def __len__(self) -> int:
        """Return the number of rooms with waiting jobs."""
        return len(self._pending)

    def run_one(self) -> bool:
        """Do one batch in this thread. Return False if nothing waits."""
        batch = self._take(wait=False)
        if batch is None:
            return False
        self._do(batch)
        return True

    def start(self, num_threads: int, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        """Start `transfer-N` threads; `spawn(name, target)` makes a thread whose death must end the process."""
        for n in range(num_threads):
            thread = spawn(f"transfer-{n}", self._loop)
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the batches that run now. Log every thread that does not end in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning("%s did not stop writing within %g s", thread.name, timeout_s)

    def _of(self, room: bytes) -> _Pending:
        return self._pending.setdefault(room, _Pending())

    def _loop(self) -> None:
        while (batch := self._take(wait=True)) is not None:
            self._do(batch)

    def _do(self, batch: TransferJob) -> None:
        try:
            self._work(batch)
        finally:
            with self._changed:
                self._busy.discard(batch.room)
                self._changed.notify()

    def _take(self, wait: bool) -> TransferJob | None:
        with self._changed:
            while not self._closed:
                room = self._choose()
                if room is not None:
                    self._busy.add(room)
                    return self._batch(room)
                if not wait:
                    return None
                self._changed.wait()
            return None

    def _choose(self) -> bytes | None:
        first: bytes | None = None
        for room, pending in self._pending.items():
            if room in self._busy:
                continue
            if pending.is_aux:
                return room
            if first is None:
                first = room
        return first

    def _batch(self, room: bytes) -> TransferJob:
        pending = self._pending[room]
        if pending.is_aux:
            pending.is_aux = False
            batch = TransferJob(room, True, ())
        elif pending.chunks:
            chunks = [pending.chunks.popleft()]
            units = chunks[0].num_units
            while pending.chunks and units + pending.chunks[0].num_units <= self.max_batch_units:
                chunks.append(pending.chunks.popleft())
                units += chunks[-1].num_units
            batch = TransferJob(room, False, tuple(chunks))
        else:
            pending.is_settle = False
            batch = TransferJob(room, False, (), is_settle=True)
        if pending.is_empty:
            del self._pending[room]
        return batch
