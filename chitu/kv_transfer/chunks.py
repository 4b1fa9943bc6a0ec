"""From the tokens that a step computes to the jobs of the transfer threads.

The forms of a range of KV on P: `KVChunk` (tokens of a room, from the scheduler) -> `TransferKVChunk` (layers x
positions) -> `TransferJob` (what one thread writes at once) -> `CopyList` (bytes).

`ChunkFeed` belongs to `PrefillSender`, whose lock guards it. The step thread calls the methods of the step, which take
the lock; the sender, which has it, carries out the effects of its machine by `track`, `start_sending` and `stop`. A
page leaves when it is full, or when the prompt ends in it. The partly filled last page of a chunk leaves with a later
chunk, so every page is written exactly once per layer. Pages before the first chunk were cached: they leave when that
chunk begins. Invariant: nothing is queued for a room that D did not announce; its chunks are held as ranges (not bytes)
until the machine lets it go.

`TransferQueue` has a lock of its own. Order: aux rows of any room first (token 1 waits for them), then rooms first
come, first served. Chunks of one room leave in the order in which they came, and at most one thread works on a room, so
Success can never overtake data. Chunks of a room that wait together leave as one job (several layers become one write),
up to `max_batch_units` (pages times layers), so a long prompt does not hold up the next aux row. Without `start`,
`run_one` does one job in the caller's thread (tests).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chitu.clock import Clock
from chitu.kv_transfer.both_sides import KVManagerConfig
from chitu.kv_transfer.shard_writer import TransferKVChunk
from chitu.types import Ready

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class KVChunk:
    """Tokens `[start, end)` of a room are computed in this step; `pages` is the room's whole page list so far."""

    room: bytes
    pages: Sequence[int]
    start: int
    end: int


@dataclass(slots=True)
class TransferJob:
    """What a transfer thread does at once for a room: write its aux row, write KV chunks, write its state row, or try
    to fence its writes. In the queue: all that waits for the room."""

    room: bytes
    is_aux: bool = False
    chunks: list[TransferKVChunk] = field(default_factory=list)
    is_state: bool = False
    is_fence: bool = False

    @property
    def num_units(self) -> int:
        """Pages times layers; the aux row counts as one, and so does the state row."""
        return self.is_aux + self.is_state + sum(chunk.num_units for chunk in self.chunks)


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


@dataclass(slots=True)
class ComputedPrompt:
    """Progress of P on a room. `ChunkFeed` writes it; the machine only passes it on."""

    num_tokens: int
    pages: Sequence[int] = ()
    cached_tokens: int = 0
    """Start of its first chunk: KV before it was in the pages already."""
    next_page: int = 0
    """First page that finished steps have not handed out (of all layers)."""
    backlog: list[TransferKVChunk] = field(default_factory=list)
    """Chunks that were computed before the room was let go."""
    aux_slot: int = -1
    state_slot: int = -1
    """Row of its state, of which nothing changes any more; -1 until the prompt is computed, or without state."""
    prompt_logprobs: bytes | None = None
    """Logprobs of the whole prompt, for D; None if they were not requested."""
    is_uncached: bool = False
    """Whether D must not cache the prompt."""
    started_s: float = 0.0
    """Time at which its first chunk began to compute."""
    computed_s: float = 0.0
    """Time at which its logits row was complete."""


class TransferQueue:
    """Pending jobs by room. `work(batch)` is called without the queue's lock; it must not raise."""

    def __init__(self, work: Work, max_batch_units: int) -> None:
        self._work = work
        self.max_batch_units = max(1, max_batch_units)
        self._pending: OrderedDict[bytes, TransferJob] = OrderedDict()
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

    def put_state(self, room: bytes) -> None:
        with self._changed:
            self._of(room).is_state = True
            self._changed.notify()

    def put_fence(self, room: bytes) -> None:
        with self._changed:
            self._of(room).is_fence = True
            self._changed.notify()

    def drop(self, room: bytes) -> bool:
        """Drop the waiting chunks of a room. Return True if a thread works on it right now."""
        with self._changed:
            self._pending.pop(room, None)
            return room in self._busy

    def __len__(self) -> int:
        """Return the number of rooms with waiting jobs."""
        return len(self._pending)

    def run_one(self) -> bool:
        """Do one batch in this thread. Return False if nothing waits."""
        batch = self.begin()
        if batch is None:
            return False
        self._do(batch)
        return True

    def begin(self) -> TransferJob | None:
        """Return the batch that leaves next, or None. Nothing else of its room leaves before `end`."""
        return self._dequeue(wait=False)

    def end(self, batch: TransferJob) -> None:
        """Let other batches of its room leave."""
        with self._changed:
            self._busy.discard(batch.room)
            self._changed.notify()

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

    def _of(self, room: bytes) -> TransferJob:
        pending = self._pending.get(room)
        if pending is None:
            pending = self._pending[room] = TransferJob(room)
        return pending

    def _loop(self) -> None:
        while (batch := self._dequeue(wait=True)) is not None:
            self._do(batch)

    def _do(self, batch: TransferJob) -> None:
        try:
            self._work(batch)
        finally:
            self.end(batch)

    def _dequeue(self, wait: bool) -> TransferJob | None:
        with self._changed:
            while not self._closed:
                room = self._choose()
                if room is not None:
                    self._busy.add(room)
                    return self._cut(room)
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

    def _cut(self, room: bytes) -> TransferJob:
        """Return what leaves next of a room, and keep the rest of it."""
        pending = self._pending[room]
        if pending.is_aux:
            pending.is_aux = False
            job = TransferJob(room, is_aux=True)
        elif pending.chunks:
            count, units = 1, pending.chunks[0].num_units
            for chunk in pending.chunks[1:]:
                units += chunk.num_units
                if units > self.max_batch_units:
                    break
                count += 1
            job = TransferJob(room, chunks=pending.chunks[:count])
            del pending.chunks[:count]
        elif pending.is_state:
            pending.is_state = False
            job = TransferJob(room, is_state=True)
        else:
            pending.is_fence = False
            job = TransferJob(room, is_fence=True)
        if not (pending.is_aux or pending.chunks or pending.is_state or pending.is_fence):
            del self._pending[room]
        return job


class ChunkFeed:
    def __init__(self, config: KVManagerConfig, clock: Clock, queue: TransferQueue, lock: threading.Lock) -> None:
        self._config = config
        self._num_layers = config.layout.num_layers
        self._clock = clock
        self._queue = queue
        self._lock = lock
        self._rooms: dict[bytes, ComputedPrompt] = {}
        """Open rooms whose router's request has come."""
        self._first_pages: dict[bytes, int] = {}
        """First position that P writes, for each room that was let go."""
        self._step: dict[bytes, TransferKVChunk] = {}
        """Pages of each room that the running step completes, of all layers."""
        self._layers_done: set[int] = set()
        """Layers of them that are computed."""
        self._ready: Ready | None = None
        """Event of the newest of these layers; it passes after those of all other layers."""
        self.num_layers_done = 0
        """Layers that steps have reported, of whatever room, steps that ended, and what `note_advance` was told: a sign
        that P advances."""

    # --------------------------------------------------------------------------------------------- calls of the machine

    def track(self, room: bytes, computed: ComputedPrompt) -> None:
        """Track the computed chunks of this room from now on."""
        self._rooms[room] = computed

    def start_sending(self, room: bytes, first_page: int) -> None:
        """Queue what was computed so far, from position `first_page` on: request and announcement are both here."""
        self._first_pages[room] = first_page
        computed = self._rooms[room]
        backlog, computed.backlog = computed.backlog, []
        for chunk in backlog:
            self._queue_chunk(room, first_page, chunk)
        if computed.aux_slot >= 0:
            self._queue_rows(room, computed)

    def stop(self, room: bytes) -> None:
        self._rooms.pop(room, None)
        self._first_pages.pop(room, None)
        self._queue.drop(room)

    # --------------------------------------------------------------------------------------------------------- the step

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        """Begin a step whose forward pass computes these chunks; `layer_done` then refers to them."""
        page_size = self._config.layout.page_size
        with self._lock:
            self._step, self._layers_done, self._ready = {}, set(), None
            for chunk in chunks:
                computed = self._rooms.get(chunk.room)
                if computed is None:
                    continue
                if not computed.pages:
                    computed.started_s, computed.cached_tokens = self._clock.monotonic(), chunk.start
                computed.pages = tuple(chunk.pages)
                num_cached = chunk.start // page_size
                if num_cached > computed.next_page:
                    cached = TransferKVChunk(0, self._num_layers, computed.next_page, num_cached)
                    self._hand_over(chunk.room, computed, cached)
                    computed.next_page = num_cached
                is_last = chunk.end >= computed.num_tokens
                end_page = self._config.num_pages(chunk.end) if is_last else chunk.end // page_size
                if end_page > computed.next_page:
                    self._step[chunk.room] = TransferKVChunk(0, self._num_layers, computed.next_page, end_page)

    def layer_done(self, layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None:
        """Send `layer`, or all from `first_layer` to it, of the announced chunks of this step: their K and V are in the
        pages once `ready` has passed. Returns at once."""
        with self._lock:
            self.num_layers_done += 1
            self._layers_are_done(layer if first_layer is None else first_layer, layer + 1, ready)

    def note_advance(self) -> None:
        """Note that P has prepared an image, or computed a part of its features, for which a prompt may wait."""
        with self._lock:
            self.num_layers_done += 1

    def end_step(self) -> None:
        """End the step. Layers that the executor did not report are done too; chunks of rooms not announced yet are
        kept for later."""
        with self._lock:
            self.num_layers_done += 1
            for layer in range(self._num_layers):
                self._layers_are_done(layer, layer + 1, self._ready)
            for room, chunk in self._step.items():
                computed = self._rooms.get(room)
                if computed is None:
                    continue
                computed.next_page = chunk.end_page
                if computed.backlog:  # one range for all finished steps
                    computed.backlog = [TransferKVChunk(0, self._num_layers, 0, chunk.end_page, self._ready)]
            self._step = {}

    def send_rows(
        self,
        room: bytes,
        aux_slot: int,
        prompt_logprobs: bytes | None = None,
        state_slot: int = -1,
        is_uncached: bool = False,
    ) -> None:
        """Send the logits row of the room's last token, which is in `aux_slot`, once the room is let go, ahead of all
        KV still queued, and behind that the state row, if there is one. `prompt_logprobs` and `is_uncached` leave with
        Success."""
        with self._lock:
            computed = self._rooms.get(room)
            if computed is None or computed.aux_slot >= 0:
                return
            computed.aux_slot, computed.prompt_logprobs, computed.state_slot = aux_slot, prompt_logprobs, state_slot
            computed.is_uncached = is_uncached
            computed.computed_s = self._clock.monotonic()
            if room in self._first_pages:
                self._queue_rows(room, computed)

    def reset(self, room: bytes) -> bool:
        """Forget what was computed for a room that is not announced, to free its pages. Return False if it is announced
        or unknown."""
        with self._lock:
            computed = self._rooms.get(room)
            if computed is None or room in self._first_pages:
                return False
            computed.backlog, computed.pages, computed.next_page, computed.aux_slot = [], (), 0, -1
            computed.state_slot = -1
            self._step.pop(room, None)
            return True

    # -------------------------------------------------------------------------------------------------------- the queue

    def _queue_rows(self, room: bytes, computed: ComputedPrompt) -> None:
        """Queue the rows that D wants: the logits, and with KV the state."""
        self._queue.put_aux(room)
        num_pages = self._config.num_pages(computed.num_tokens) - self._first_pages[room]
        if self._config.has_state(num_pages):
            self._queue.put_state(room)

    def _layers_are_done(self, first_layer: int, end_layer: int, ready: Ready | None) -> None:
        end_layer = min(end_layer, self._num_layers)  # those behind have no KV
        if first_layer >= end_layer or first_layer in self._layers_done:
            return
        self._layers_done.update(range(first_layer, end_layer))
        self._ready = ready
        for room, chunk in self._step.items():
            computed = self._rooms.get(room)
            if computed is not None:
                piece = TransferKVChunk(first_layer, end_layer, chunk.first_page, chunk.end_page, ready)
                self._hand_over(room, computed, piece)

    def _hand_over(self, room: bytes, computed: ComputedPrompt, piece: TransferKVChunk) -> None:
        """Queue a computed piece if the room was let go, else keep it until then."""
        first_page = self._first_pages.get(room)
        if first_page is None:
            computed.backlog.append(piece)
        else:
            self._queue_chunk(room, first_page, piece)

    def _queue_chunk(self, room: bytes, first_page: int, chunk: TransferKVChunk) -> None:
        """Queue a chunk without the pages that D has or does not want, in pieces of at most one batch."""
        first_page = max(chunk.first_page, first_page)
        if first_page >= chunk.end_page:
            return
        layers = max(1, self._queue.max_batch_units // (chunk.end_page - first_page))
        for layer in range(chunk.first_layer, chunk.end_layer, layers):
            end_layer = min(layer + layers, chunk.end_layer)
            self._queue.put_chunk(room, TransferKVChunk(layer, end_layer, first_page, chunk.end_page, chunk.ready))
