"""What the step thread records of traced requests: where their KV is, each token, and the end.

Used by `PDScheduler` and its parts, step thread only, and only while a request is traced (`rooms`).
"""

from __future__ import annotations

from collections.abc import Mapping

from chitu.cache_manager import PagedKVCacheManager
from chitu.errors import ChituError
from chitu.instance.sequences import Sequence
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.kv_transfer.both_sides import TransferEvent
from chitu.protocol.trace import TracedPages, TraceEnd, TraceRestored, TraceStep
from chitu.tracing.tracer import TracedRoom, Tracer


class SchedulerTrace:
    def __init__(self, tracer: Tracer | None, cache: PagedKVCacheManager) -> None:
        self._tracer = tracer
        self._cache = cache
        self.rooms: Mapping[bytes, TracedRoom] = {} if tracer is None else tracer.rooms
        """Traced rooms. If empty, nothing here need be called."""

    def note_slot(self, sequence: Sequence) -> None:
        """Record the executor slot of a traced request on P, for its transfer threads."""
        traced = self.rooms.get(sequence.room)
        if traced is not None:
            traced.slot = sequence.slot

    def note_restored(self, sequence: Sequence, event: TransferEvent, now_s: float) -> None:
        """Record on D that the KV of a prompt is here, before any later token is computed."""
        if self._tracer is None:
            return
        layout, pages = self._tracer.kv_layout, self._cache.get_page_indices(sequence.room)
        num_here = event.saved_bytes // (layout.bytes_per_page * layout.tp_size)
        num_came = len(pages) - num_here if sequence.needs_kv else 0
        self._note_pages(self._tracer, sequence, num_here * layout.page_size, num_came, now_s)

    def note_computed(self, sequence: Sequence) -> None:
        """Record on a unified instance that the KV of a prompt is here: its first token is known."""
        if self._tracer is not None and sequence.source is None:
            self._note_pages(self._tracer, sequence, sequence.prompt.cached_tokens, 0, sequence.times.first_token_s)

    def _note_pages(self, tracer: Tracer, sequence: Sequence, cached_tokens: int, num_came: int, now_s: float) -> None:
        layout = tracer.kv_layout
        pages = self._cache.get_page_indices(sequence.room)
        traced = self.rooms.get(sequence.room)
        is_moved, times = sequence.holds.aux_slot >= 0, sequence.times.stages(now_s)
        bytes_by_layer = tuple(num_came * nbytes * layout.tp_size for nbytes in layout.bytes_by_layer)
        tracer.add(
            sequence.room,
            TraceRestored,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=cached_tokens,
            slot=sequence.slot,
            aux_slot=sequence.holds.aux_slot,
            pages=TracedPages.of(pages),
            layout=tracer.layout,
            bytes_by_layer=bytes_by_layer,
            total_bytes=sum(bytes_by_layer) + (aux_row_bytes(layout.aux_numbers) if is_moved else 0),
            admission_s=times.admission_s,
            landed_s=times.total_s,
            times=times.prefill,
            hashes=None if traced is None else traced.hashes,
        )

    def note_token(self, sequence: Sequence, token: int, ended: str) -> None:
        """Record an emitted token."""
        traced, emitted = self.rooms.get(sequence.room), sequence.emitted
        if traced is None or self._tracer is None:
            return
        pages = self._cache.get_page_indices(sequence.room)
        if len(emitted) == 1:  # on D the token may come before the KV
            traced.num_pages = self._cache.pages_for(sequence.prompt_len)
        num_known = traced.num_pages if traced.num_pages <= len(pages) else 0  # 0: its KV was in host memory
        traced.num_pages = len(pages)
        last = emitted[-2] if len(emitted) > 1 else int.from_bytes(sequence.head.token_ids[-4:], "little", signed=True)
        self._tracer.add(
            sequence.room,
            TraceStep,
            index=len(emitted) - 1,
            last_token=last,
            next_token=token,
            new_pages=tuple(pages[num_known:]),
            ended=ended,
        )

    def note_end(self, sequence: Sequence, reason: str, error: ChituError | None = None) -> None:
        """Record the end of a request."""
        if sequence.room not in self.rooms or self._tracer is None:
            return
        self._tracer.add(
            sequence.room,
            TraceEnd,
            reason=reason,
            code=error.code if error is not None else "",
            message=error.message if error is not None else "",
            output_tokens=len(sequence.emitted),
            drafts=sequence.drafting.report() if sequence.drafting is not None else (),
        )
        self._tracer.end(sequence.room)

    def end(self, room: bytes) -> None:
        """Note that the room is gone from here. Idempotent."""
        if self._tracer is not None:
            self._tracer.end(room)
