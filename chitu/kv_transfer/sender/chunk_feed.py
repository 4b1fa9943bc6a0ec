"""What P's step thread has computed, on its way into the transfer queue.

Owned by `PrefillSender`, whose lock guards it. The step thread calls the methods of the step, which take the lock; the
sender, which has it, carries out the effects of its machine by `take`, `start_sending` and `stop`. A page leaves when
it is full, or when the prompt ends in it. The partly filled last page of a chunk leaves with a later chunk, so every
page is written exactly once per layer. Pages before the first chunk were cached: they leave when that chunk begins.
Invariant: nothing is queued for a room that D did not announce; its chunks are held as ranges (not bytes) until the
machine lets it go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from chitu.clock import Clock
from chitu.kv_transfer.events import KVChunk
from chitu.kv_transfer.parts import KVManagerConfig
from chitu.kv_transfer.sender.events import ComputedPrompt
from chitu.kv_transfer.sender.transfer_queue import TransferKVChunk, TransferQueue
from chitu.types import Ready


@dataclass(slots=True)
class _StepChunk:
    """Pages of one room that the running step completes."""

    room: bytes
    first_page: int
    end_page: int
    layers_done: set[int] = field(default_factory=set)
    ready: Ready | None = None
    """Event of the newest of these layers; it passes after those of all other layers."""


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
        self._step: list[_StepChunk] = []

    # --------------------------------------------------------------------------------------------- calls of the machine

    def take(self, room: bytes, computed: ComputedPrompt) -> None:
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
            self._queue.put_aux(room)

    def stop(self, room: bytes) -> None:
        self._rooms.pop(room, None)
        self._first_pages.pop(room, None)
        self._queue.drop(room)

    # --------------------------------------------------------------------------------------------------------- the step

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        """Begin a step whose forward pass computes these chunks; `layer_done` then refers to them."""
        page_size = self._config.layout.page_size
        with self._lock:
            self._step = []
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
                    self._step.append(_StepChunk(chunk.room, computed.next_page, end_page))

    def layer_done(self, layer: int, ready: Ready | None = None) -> None:
        """Send `layer` of the announced chunks of this step: its K and V are in the pages once `ready` has passed.
        Returns at once."""
        with self._lock:
            for chunk in self._step:
                self._layer_of_chunk_done(chunk, layer, ready)

    def end_step(self) -> None:
        """End the step. Layers that the executor did not report are done too; chunks of rooms not announced yet are
        kept for later."""
        with self._lock:
            for chunk in self._step:
                for layer in range(self._num_layers):
                    self._layer_of_chunk_done(chunk, layer, chunk.ready)
                computed = self._rooms.get(chunk.room)
                if computed is None:
                    continue
                computed.next_page = chunk.end_page
                if computed.backlog:  # one range for all finished steps
                    computed.backlog = [TransferKVChunk(0, self._num_layers, 0, chunk.end_page, chunk.ready)]
            self._step = []

    def send_aux(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        """Send the logits row of the room's last token, which is in `aux_slot`, once the room is let go, ahead of all
        KV still queued. `prompt_logprobs` leave with Success."""
        with self._lock:
            computed = self._rooms.get(room)
            if computed is None or computed.aux_slot >= 0:
                return
            computed.aux_slot, computed.prompt_logprobs = aux_slot, prompt_logprobs
            computed.computed_s = self._clock.monotonic()
            if room in self._first_pages:
                self._queue.put_aux(room)

    def reset(self, room: bytes) -> bool:
        """Forget what was computed for a room that is not announced, to free its pages. Return False if it is announced
        or unknown."""
        with self._lock:
            computed = self._rooms.get(room)
            if computed is None or room in self._first_pages:
                return False
            computed.backlog, computed.pages, computed.next_page, computed.aux_slot = [], (), 0, -1
            self._step = [chunk for chunk in self._step if chunk.room != room]
            return True

    # -------------------------------------------------------------------------------------------------------- the queue

    def _layer_of_chunk_done(self, chunk: _StepChunk, layer: int, ready: Ready | None) -> None:
        computed = self._rooms.get(chunk.room)
        if layer in chunk.layers_done or computed is None:
            return
        chunk.layers_done.add(layer)
        chunk.ready = ready
        piece = TransferKVChunk(layer, layer + 1, chunk.first_page, chunk.end_page, ready)
        self._hand_over(chunk.room, computed, piece)

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
