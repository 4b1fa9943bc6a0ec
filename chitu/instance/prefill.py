"""Chunked prefill: which prompt tokens are computed in the next step, and which sequences get pages for it.

Pure policy over an ordered queue: no clock, no socket, no tensor. Used by P and by unified instances.

On P, a request may be computed before D announces it. That is speculation: D may not have room for its pages yet.
Announced requests come first, and take the pages of unannounced ones if pages are short. Without that rule P's pages
could all belong to requests whose D waits for another P in the same state: a deadlock across instances.

The prefill half of an instance: queue, pages, chunks, and on P the hand-over to the transfer layer.

Owned by `PDScheduler`, step thread only. On P a sequence ends here: its pages and aux slot come back with the transfer
layer's SUCCESS or RELEASED. On a unified instance it goes to the `DecodeManager` after its last chunk is launched or,
if it has forks, read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from chitu.engine.executor import PrefillChunk, StepPlan
from chitu.errors import ChituError
from chitu.instance.decode import admit
from chitu.instance.scheduler_parts import PDSchedulerParts
from chitu.instance.scheduler_trace import SchedulerTrace
from chitu.instance.sequences import OPEN_STATES, Sequence, SequenceEvent, Sequences, SequenceState
from chitu.kv_cache.tiers.pages import PageLoad
from chitu.kv_transfer.chunks import KVChunk
from chitu.kv_transfer.transfer_table import TransferEvent, TransferEventKind


class Chunk(NamedTuple):
    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.sequence.prompt_len


def by_urgency(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences, announced before unannounced, each group by `Sequence.order`."""
    return sorted(waiting, key=lambda s: (not s.announced, s.order))


def select_chunks(computing: Iterable[Sequence], max_batched_tokens: int, chunk_size: int) -> list[Chunk]:
    """Return the next chunk of each request, most urgent first, while the step's token budget lasts."""
    chunks: list[Chunk] = []
    budget = max_batched_tokens
    for sequence in by_urgency(computing):
        if budget == 0:
            break
        if sequence.load is not None:
            continue
        length = min(sequence.remaining_prompt, chunk_size, budget)
        chunks.append(Chunk(sequence, sequence.kv_len, length))
        budget -= length
    return chunks


def speculation_to_undo(
    holders: Iterable[Sequence], coming_back: Callable[[bytes], int], pages_wanted: int, aux_wanted: int
) -> list[Sequence]:
    """Return the unannounced holders of pages, youngest first, that must give way so that an announced request fits.
    Return [] if none must, or if all together hold too little. `coming_back` is as in `victims_for_growth`."""
    victims: list[Sequence] = []
    for sequence in sorted((s for s in holders if not s.announced), key=lambda s: s.order, reverse=True):
        if pages_wanted <= 0 and aux_wanted <= 0:
            break
        victims.append(sequence)
        pages_wanted -= coming_back(sequence.room)
        aux_wanted -= 1
    return victims if pages_wanted <= 0 and aux_wanted <= 0 else []


NEWEST = 16
"""About how many of the newest prompts `cached_share` covers."""
ESTIMATE_S = 0.25
"""Shortest time between two estimates of what is cached of the prompts that wait."""


class PrefillManager:
    """The prompts that an instance computes. `open_admission` returns the admission check of a turn; a sequence that
    passes it must start. On a unified instance `on_prompt` is called when a prompt with forks is computed."""

    def __init__(
        self,
        parts: PDSchedulerParts,
        sequences: Sequences,
        open_admission: Callable[[], Callable[[Sequence], bool]],
        on_prompt: Callable[[Sequence], None],
        trace: SchedulerTrace | None,
    ) -> None:
        self._config = parts.config
        self._sequences = sequences
        self._resources = sequences.resources
        self._cache = self._resources.cache
        self._slots = self._resources.slots
        self._clock = parts.clock
        self._sender = parts.sender
        """P's sender; None on a unified instance."""
        self._on_prompt = on_prompt
        self._trace = trace
        self._open_admission = open_admission
        self._tiers = parts.tiers
        self._planned_s = 0.0
        self._unread_s: deque[float] = deque()
        """Planning times of the launched steps with chunks that are not read yet."""
        self._estimated_s = -math.inf
        self._newest_tokens = self._newest_cached = 0.0
        self.admissions = 0
        """Choices of the prompts that were admitted since the start."""
        self.loaded_tokens = 0
        """Prompt tokens since the start that came from a tier, of which it was not known before that it had them."""

    def add(self, sequence: Sequence) -> None:
        if sequence.prompt_logprobs is not None:
            sequence.keys = None  # every position must be computed, none read from the cache
        self._estimate(sequence)
        self._sequences.add(sequence)

    # -------------------------------------------------------------------------------------------------------- estimates

    @property
    def cached_share(self) -> float:
        """Share of the tokens of the newest prompts that were cached."""
        return self._newest_cached / self._newest_tokens if self._newest_tokens else 0.0

    def _estimate_again(self) -> None:
        """Estimate what is cached of the prompts that wait, from time to time: those before them add pages and evict
        others."""
        if self._planned_s - self._estimated_s < ESTIMATE_S:
            return
        self._estimated_s = self._planned_s
        for sequence in self._sequences.of(SequenceState.WAITING).values():
            self._estimate(sequence)

    def _estimate(self, sequence: Sequence) -> None:
        """Set `known_tokens`. Takes constant time if the former value is still right: if a page is cached, so are all
        before it."""
        if sequence.keys is None:
            sequence.known_tokens = 0
            return
        size, keys, prompt = self._cache.page_size, sequence.keys, sequence.prompt
        most, count = (sequence.prompt_len - 1) // size, sequence.known_tokens // size
        if count and not self._holds(keys.key_at(count - 1, prompt)):
            count = 0
        while count < most and self._holds(keys.key_at(count, prompt)):
            count += 1
        sequence.known_tokens = count * size

    def _holds(self, key: bytes) -> bool:
        return self._cache.holds(key) or (self._tiers is not None and self._tiers.holds(key))

    def _note_prompt(self, sequence: Sequence) -> None:
        """Note how much of a prompt that is computed now was cached."""
        kept = 1 - 1 / NEWEST
        self._newest_tokens = self._newest_tokens * kept + sequence.prompt_len
        self._newest_cached = self._newest_cached * kept + sequence.cached_tokens

    # ------------------------------------------------------------------------------------------------------- schedule

    def schedule(self, plan: StepPlan) -> list[Chunk]:
        """Admit what fits and put the step's chunks into the plan. Return the chunks."""
        self._admit(plan)  # first: a sequence that gives way to an announced request must be in no plan yet
        self._take_loaded(plan)
        chunks = select_chunks(
            self._sequences.queue(SequenceState.COMPUTING), self._config.max_batched_tokens, self._config.chunk_size
        )
        self._planned_s = self._clock.monotonic()
        self._estimate_again()
        for sequence, start, length in chunks:
            if start == sequence.cached_tokens:
                sequence.computing_since_s = self._planned_s
            last = start + length == sequence.prompt_len
            leaves_row = self._sender is not None or bool(sequence.forks)
            plan.prefill.append(
                PrefillChunk(
                    sequence.slot,
                    start,
                    length,
                    sample=last and not leaves_row,
                    aux_slot=sequence.aux_slot if last and leaves_row else -1,
                    logprobs=-1 if sequence.prompt_logprobs is None else sequence.prompt_logprobs,
                )
            )
        if self._sender is not None and chunks:
            self._sender.feed.begin_step(
                [
                    KVChunk(c.sequence.room, self._cache.get_page_indices(c.sequence.room), c.start, c.start + c.length)
                    for c in chunks
                ]
            )
        return chunks

    def after_launch(self, chunks: list[Chunk]) -> list[Sequence]:
        """Account for the chunks of a launched step. On a unified instance, return the prompts that it completes. On P
        these give up their slot and wait until their KV has left. Prompts with forks wait for the end of the step."""
        done = []
        if chunks:
            self._unread_s.append(self._planned_s)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.kv_len += chunk.length
            if sequence.remaining_prompt:
                continue
            self._note_prompt(sequence)
            if self._sender is None and not sequence.forks:
                done.append(sequence)
            else:
                self._resources.free_slot(sequence)
                self._sequences.take(sequence, SequenceEvent.COMPUTED)
        if self._sender is not None and chunks:
            self._sender.feed.end_step()
        return done

    def after_read(self, chunks: list[Chunk], slots: list[int], prompt_logprobs: dict[int, bytes]) -> None:
        """Account for a step that is done: cache what it computed for later prompts, unless the request is over. On P,
        send the logits rows of the prompts that it completed. `slots` are those of the chunks at its launch."""
        if chunks:
            seconds = self._clock.monotonic() - self._unread_s.popleft()
            if self._tiers is not None:
                self._tiers.note_prefill(sum(chunk.length for chunk in chunks), seconds)
        for chunk, slot in zip(chunks, slots, strict=True):
            sequence = chunk.sequence
            if sequence.state not in OPEN_STATES:
                continue
            self._cache.commit(sequence.room, sequence.keys, sequence.prompt, chunk.start + chunk.length)
            if sequence.prompt_logprobs is not None:
                sequence.prompt_lines = (sequence.prompt_lines or b"") + prompt_logprobs.get(slot, b"")
            if not chunk.is_last or sequence.state is not SequenceState.INFLIGHT:
                continue
            if self._sender is not None:
                self._sender.feed.send_aux(sequence.room, sequence.aux_slot, sequence.prompt_lines)
            else:
                self._on_prompt(sequence)

    def _admit(self, plan: StepPlan) -> None:
        waiting = self._sequences.queue(SequenceState.WAITING)
        if not waiting:
            return
        may_start = self._open_admission()
        for sequence in by_urgency(waiting):
            if not may_start(sequence):
                return  # strictly in order, so small requests cannot starve a large one
            self._slots.take(sequence)
            if self._trace is not None and self._trace.rooms:
                self._trace.note_slot(sequence)
            if self._sender is not None or sequence.forks:
                sequence.aux_slot = self._resources.take_aux()
            sequence.kv_len = sequence.cached_tokens = self._cache.begin(sequence.room, sequence.keys, sequence.prompt)
            self._cache.reserve(sequence.room, sequence.prompt_len)
            self._sequences.hold_forks(sequence)
            pages = self._cache.get_page_indices(sequence.room)
            sequence.capacity_tokens = len(pages) * self._cache.page_size
            self._sequences.take(sequence, SequenceEvent.ADMIT)
            self.admissions += len(sequence.choices)
            sequence.load = self._load(sequence)
            if sequence.load is None:
                sequence.known_tokens = 0  # it was an estimate, and `kv_len` is exact
                admit(sequence, self._cache, plan)

    # ---------------------------------------------------------------------------------------------------------- tiers

    def _load(self, sequence: Sequence) -> PageLoad | None:
        """Load what the tiers hold of the prompt beyond the pages cached here. The last token is always computed."""
        if self._tiers is None or sequence.keys is None:
            return None
        num_full = (sequence.prompt_len - 1) // self._cache.page_size
        first = sequence.cached_tokens // self._cache.page_size
        pages = self._cache.get_page_indices(sequence.room)
        return self._tiers.load(sequence.keys.upto(num_full, sequence.prompt), first, pages[first:num_full])

    def _take_loaded(self, plan: StepPlan) -> None:
        """Start the sequences whose pages are loaded, or late, with the pages that have arrived."""
        if self._tiers is None:
            return
        now_s = self._clock.monotonic()
        for sequence in self._sequences.queue(SequenceState.COMPUTING):
            if sequence.load is not None and (sequence.load.is_done or now_s >= sequence.load.end_s):
                sequence.cached_tokens += sequence.load.stop() * self._cache.page_size
                self.loaded_tokens += max(0, sequence.cached_tokens - max(sequence.kv_len, sequence.known_tokens))
                sequence.kv_len, sequence.known_tokens, sequence.load = sequence.cached_tokens, 0, None
                self._cache.commit(sequence.room, sequence.keys, sequence.prompt, sequence.kv_len)
                admit(sequence, self._cache, plan)

    def flush(self) -> None:
        """Flush the tiers and stop all loads from them; the rest of those prompts is computed."""
        if self._tiers is None:
            return
        self._tiers.flush()
        for sequence in self._sequences.queue(SequenceState.COMPUTING):
            if sequence.load is not None:
                sequence.load.stop()
                sequence.load = PageLoad.none()

    # ----------------------------------------------------------------------------------------------------------- ends

    def on_event(self, event: TransferEvent) -> None:
        """Apply a transfer event on P. The caller reports FAILED to the router."""
        sequence = self._sequences.get(event.room)
        if sequence is None:
            return
        if event.kind is TransferEventKind.ANNOUNCED:
            sequence.announced = True
        elif event.kind is TransferEventKind.FAILED:
            self._sequences.close(sequence)
        elif event.kind in (TransferEventKind.SUCCESS, TransferEventKind.RELEASED):
            self._sequences.close(sequence)
            self._sequences.free(sequence)

    def cancel(self, sequence: Sequence, error: ChituError) -> None:
        """End a request. P keeps its pages until the sender has released the room; a unified instance frees them."""
        self._sequences.close(sequence)
        if self._sender is not None:
            self._sender.abort(sequence.room, error)
        else:
            self._sequences.free(sequence)
