"""What P's step thread has computed, on its way into the transfer queue.

Owned by `PrefillSender`, called under its lock: `let_go` also from the comm thread, all else from the step thread.
Sendable pages: a page leaves when it is full, or when the prompt ends in it; the partly filled last page of a chunk
leaves with a later chunk, so every page is written exactly once per layer. Pages before the first chunk were cached:
they leave when that chunk begins. Invariant: nothing is queued for a room that
D did not announce; its chunks are kept as ranges (not bytes) and leave when both halves have met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chitu.clock import Clock
from chitu.kv_transfer.events import KVChunk
from chitu.kv_transfer.parts import KVManagerConfig
from chitu.kv_transfer.sender.send_rooms import OPEN_STATES, SENDING_STATES, SendEntry, SendRooms
from chitu.kv_transfer.sender.transfer_queue import TransferKVChunk, TransferQueue
from chitu.protocol.states import SenderEvent, SenderState
from chitu.types import Ready


@dataclass(slots=True)
class _StepChunk:
    """Pages of one room that the running step completes."""

    room: bytes
    first_page: int
    end_page: int
    layers_done: set[int] = field(default_factory=set)
    ready: Ready | None = None
    """Of the newest of these layers, behind all others."""


class ChunkFeed:
    def __init__(self, config: KVManagerConfig, clock: Clock, rooms: SendRooms, queue: TransferQueue) -> None:
        self._config = config
        self._num_layers = config.layout.num_layers
        self._clock = clock
        self._table = rooms.table
        self._queue = queue
        self._step: list[_StepChunk] = []

    # --------------------------------------------------------------------------------------------------------- the step

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        self._step = []
        for chunk in chunks:
            entry = self._table.get(chunk.room)
            if entry is None or entry.state not in OPEN_STATES:
                continue
            record, page_size = entry.data, self._config.layout.page_size
            if not record.pages:
                record.started_s, record.cached_tokens = self._clock.monotonic(), chunk.start
            record.pages = tuple(chunk.pages)
            num_cached = chunk.start // page_size
            if num_cached > record.next_page:
                self._hand_over(chunk.room, entry, TransferKVChunk(0, self._num_layers, record.next_page, num_cached))
                record.next_page = num_cached
            is_last = chunk.end >= record.num_tokens
            end_page = self._config.num_pages(chunk.end) if is_last else chunk.end // page_size
            if end_page > record.next_page:
                self._step.append(_StepChunk(chunk.room, record.next_page, end_page))

    def layer_done(self, layer: int, ready: Ready | None = None) -> None:
        for chunk in self._step:
            self._layer_of_chunk_done(chunk, layer, ready)

    def end_step(self) -> None:
        """Layers that the executor did not speak of are done too."""
        for chunk in self._step:
            for layer in range(self._num_layers):
                self._layer_of_chunk_done(chunk, layer, chunk.ready)
            entry = self._table.get(chunk.room)
            if entry is None:
                continue
            entry.data.next_page = chunk.end_page
            if entry.data.backlog:  # one range for all finished steps
                entry.data.backlog = [TransferKVChunk(0, self._num_layers, 0, chunk.end_page, chunk.ready)]
        self._step = []

    def _layer_of_chunk_done(self, chunk: _StepChunk, layer: int, ready: Ready | None) -> None:
        entry = self._table.get(chunk.room)
        if layer in chunk.layers_done or entry is None:
            return
        chunk.layers_done.add(layer)
        chunk.ready = ready
        self._hand_over(chunk.room, entry, TransferKVChunk(layer, layer + 1, chunk.first_page, chunk.end_page, ready))

    def _hand_over(self, room: bytes, entry: SendEntry, piece: TransferKVChunk) -> None:
        """It is computed: now, or when the room is announced, it leaves."""
        if entry.state is SenderState.REQUESTED:
            entry.data.backlog.append(piece)
        elif entry.state in SENDING_STATES:
            self._queue_chunk(room, entry, piece)

    # -------------------------------------------------------------------------------------------------------- the rooms

    def send_aux(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None) -> None:
        """The logits row is in `aux_slot`: it leaves as soon as the room is announced."""
        entry = self._table.get(room)
        if entry is None or entry.state not in OPEN_STATES or entry.data.aux_slot >= 0:
            return
        entry.data.aux_slot, entry.data.prompt_logprobs = aux_slot, prompt_logprobs
        entry.data.computed_s = self._clock.monotonic()
        if entry.state is not SenderState.REQUESTED:
            self._queue_aux(room)

    def let_go(self, room: bytes, entry: SendEntry) -> None:
        """Both halves are here: queue what was computed meanwhile."""
        backlog, entry.data.backlog = entry.data.backlog, []
        for chunk in backlog:
            self._queue_chunk(room, entry, chunk)
        if entry.data.aux_slot >= 0:
            self._queue_aux(room)

    def reset(self, room: bytes) -> bool:
        """Forget what was computed for a room that is not announced. False: it is (or is unknown)."""
        entry = self._table.get(room)
        if entry is None or entry.state is not SenderState.REQUESTED:
            return False
        record = entry.data
        record.backlog, record.pages, record.next_page, record.aux_slot = [], (), 0, -1
        self._step = [chunk for chunk in self._step if chunk.room != room]
        return True

    # -------------------------------------------------------------------------------------------------------- the queue

    def _queue_chunk(self, room: bytes, entry: SendEntry, chunk: TransferKVChunk) -> None:
        """An announced room's chunk, without the pages that D has or does not want, in pieces of at most one batch."""
        info = entry.data.info
        assert info is not None
        first_page = max(chunk.first_page, info.prefix_pages)
        if first_page >= chunk.end_page or not entry.data.dst_pages:
            return
        self._table.apply(room, SenderEvent.DATA, self._clock.monotonic())
        layers = max(1, self._queue.max_batch_units // (chunk.end_page - first_page))
        for layer in range(chunk.first_layer, chunk.end_layer, layers):
            end_layer = min(layer + layers, chunk.end_layer)
            self._queue.put_chunk(room, TransferKVChunk(layer, end_layer, first_page, chunk.end_page, chunk.ready))

    def _queue_aux(self, room: bytes) -> None:
        self._table.apply(room, SenderEvent.DATA, self._clock.monotonic())
        self._queue.put_aux(room)
