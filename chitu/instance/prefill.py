"""Chunked prefill: which prompts get pages, and which of their tokens are computed in the next step.

`by_urgency` and `select_chunks` are pure policy. `PrefillManager` applies it, in the roles of all instances, which
admit prompts and take them when they are computed (`PromptOwner`). Step thread only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from chitu.engine.executor import CopyState, KeepState, PrefillChunk, StepPlan
from chitu.instance.core import InstanceCore
from chitu.instance.decode import admit
from chitu.instance.load import LoadMeter
from chitu.instance.sequences import OPEN_STATES, Sequence, SequenceEvent, SequenceState
from chitu.kv_cache.tiers.pages import PageLoad

ESTIMATE_S = 0.25
"""Shortest time between two estimates of what is cached of the prompts that wait."""


class Chunk(NamedTuple):
    sequence: Sequence
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.sequence.prompt_len


def by_urgency(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences, announced before unannounced, each group by `Sequence.order`."""
    return sorted(waiting, key=lambda s: (not s.prompt.announced, s.order))


def select_chunks(
    computing: Iterable[Sequence], max_batched_tokens: int, chunk_size: int, whole_tokens: int = 0
) -> list[Chunk]:
    """Return the next chunk of each request, most urgent first, while the step's token budget lasts. The first chunk
    may have `whole_tokens`, if it would end inside an image that is computed as a whole."""
    chunks: list[Chunk] = []
    budget = max_batched_tokens
    for sequence in by_urgency(computing):
        if budget == 0:
            break
        if sequence.holds.load is not None:
            continue
        length = min(sequence.remaining_prompt, chunk_size, budget)
        if sequence.kv_len < sequence.prompt.keep_at:
            length = min(length, sequence.prompt.keep_at - sequence.kv_len)
        if sequence.images is not None:
            most = budget if chunks else max(budget, whole_tokens)
            length = sequence.images.chunk_length(sequence.kv_len, length, most)
            if not length:
                continue
        chunks.append(Chunk(sequence, sequence.kv_len, length))
        budget = max(0, budget - length)
    return chunks


class PromptOwner(Protocol):
    """The role that has prompts computed."""

    def leaves_row(self, sequence: Sequence) -> bool:
        """Return whether a prompt's logits go to an aux slot, and no token is sampled with its last chunk."""

    def on_computed(self, sequence: Sequence) -> None:
        """Take a prompt that left its row, once the step that completed it is read."""


class PrefillManager:
    """The prompts that an instance computes for `owner`."""

    def __init__(self, core: InstanceCore, load: LoadMeter, owner: PromptOwner) -> None:
        self._owner = owner
        self._load = load
        self._config = core.settings.config
        self._sequences = core.sequences
        self._resources = core.sequences.resources
        self._cache = self._resources.cache
        self._slots = self._resources.slots
        self._clock = core.clock
        self._trace = core.trace
        self._tiers = core.engine.tiers
        self._images = self._resources.images
        self._planned_s = 0.0
        self._unread_s: deque[float] = deque()
        """Planning times of the launched steps with chunks that are not read yet."""
        self._estimated_s = -math.inf

    def add(self, sequence: Sequence) -> None:
        asked = sequence.prompt.asked
        if asked.logprobs is not None or asked.pooling == "mean":
            sequence.holds.keys = None  # every position must be computed, none read from the cache
        self._estimate(sequence)
        self._sequences.add(sequence)

    # -------------------------------------------------------------------------------------------------------- estimates

    def estimate_again(self) -> None:
        """Estimate what is cached of the prompts that wait, from time to time: those before them add pages and evict
        others."""
        now_s = self._clock.monotonic()
        if now_s - self._estimated_s < ESTIMATE_S:
            return
        self._estimated_s = now_s
        for sequence in self._sequences.of(SequenceState.WAITING).values():
            if not sequence.from_peer:
                self._estimate(sequence)

    def _estimate(self, sequence: Sequence) -> None:
        """Set `known_tokens`. Takes constant time if the former value is still right: if a page is cached, so are all
        before it."""
        size, keys, prompt = self._cache.page_size, sequence.holds.keys, sequence.head.token_ids
        if not self._cache.accepts(keys):
            sequence.prompt.known_tokens = 0
            return
        if self._resources.has_state:
            sequence.prompt.known_tokens = self._cache.known_tokens(keys, prompt)
            return
        most, count = (sequence.prompt_len - 1) // size, sequence.prompt.known_tokens // size
        if count and not self._holds(keys.key_at(count - 1, prompt)):
            count = 0
        while count < most and self._holds(keys.key_at(count, prompt)):
            count += 1
        sequence.prompt.known_tokens = count * size

    def _holds(self, key: bytes) -> bool:
        return self._cache.holds(key) or self._tiers.holds(key)

    # ------------------------------------------------------------------------------------------------------- schedule

    def schedule(self, plan: StepPlan, most_tokens: int) -> list[Chunk]:
        """Put the chunks of the admitted prompts into the plan, `most_tokens` at most, and return them."""
        computing = self._sequences.queue(SequenceState.COMPUTING)
        self._take_loaded(computing, plan)
        if waiting := self._images.waiting:
            self._images.schedule(by_urgency(waiting.values()), plan, min(most_tokens, self._config.chunk_size))
        chunks = select_chunks(computing, most_tokens, self._config.chunk_size, self._config.max_batched_tokens)
        self._planned_s = self._clock.monotonic()
        for sequence, start, length in chunks:
            if start == sequence.prompt.cached_tokens:
                sequence.times.computing_since_s = self._planned_s
            if 0 < start == sequence.prompt.keep_at:
                self._keep_state(sequence, plan)
            last, asked = start + length == sequence.prompt_len, sequence.prompt.asked
            leaves_row = self._owner.leaves_row(sequence)
            plan.prefill.append(
                PrefillChunk(
                    sequence.slot,
                    start,
                    length,
                    sample=last and (not leaves_row or sequence.prompt.early is not None),
                    aux_slot=sequence.holds.aux_slot if last and leaves_row else -1,
                    logprobs=-1 if asked.logprobs is None else asked.logprobs,
                    pooling=asked.pooling if last or asked.pooling == "mean" else "",
                    pooled_ids=asked.pooled_ids,
                )
            )
        return chunks

    def after_launch(self, chunks: list[Chunk]) -> list[Sequence]:
        """Account for the chunks of a launched step, and return the prompts that it completes with a first token. Those
        that leave a row give up their slot."""
        done = []
        if chunks:
            self._unread_s.append(self._planned_s)
        if self._images.batch is not None:
            self._images.after_launch(self._resources.when_read)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.kv_len += chunk.length
            if sequence.images is not None:
                self._images.note_computed(sequence, self._resources.when_read)
            if sequence.remaining_prompt:
                continue
            self._load.note_prompt(sequence.prompt_len, sequence.prompt.cached_tokens)
            if self._owner.leaves_row(sequence):
                self._resources.free_slot(sequence)
                self._sequences.take(sequence, SequenceEvent.COMPUTED)
            else:
                done.append(sequence)
        return done

    def after_read(self, chunks: list[Chunk], slots: list[int], prompt_logprobs: dict[int, bytes]) -> None:
        """Account for a step that is done, and give the owner the prompts that it completed. `slots` are those of the
        chunks at its launch. `keep` follows, once the tokens of the step have left."""
        if chunks:
            seconds = self._clock.monotonic() - self._unread_s.popleft()
            self._tiers.note_prefill(sum(chunk.length for chunk in chunks), seconds)
        for chunk, slot in zip(chunks, slots, strict=True):
            sequence, prompt = chunk.sequence, chunk.sequence.prompt
            if sequence.state not in OPEN_STATES:
                continue
            if self._resources.has_state and 0 < chunk.start == prompt.keep_at:
                self._settle_state(sequence)
            if prompt.asked.logprobs is not None or prompt.asked.pooling:
                prompt.lines = (prompt.lines or b"") + prompt_logprobs.get(slot, b"")
            if self._is_computed(chunk) and not sequence.forks:
                self._owner.on_computed(sequence)

    def keep(self, chunks: list[Chunk]) -> None:
        """Cache what a step that is done computed for later prompts, unless the request is over. It takes a millisecond
        for a long prompt, so what others wait for goes first; forks share the cached pages, so they come behind it."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state not in OPEN_STATES:
                continue
            if not self._resources.has_state:
                self._commit(sequence, chunk.start + chunk.length)
            if self._is_computed(chunk) and sequence.forks:
                self._owner.on_computed(sequence)

    def _is_computed(self, chunk: Chunk) -> bool:
        return chunk.is_last and chunk.sequence.state is SequenceState.INFLIGHT

    def start(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give a waiting prompt its slot and pages, for which the caller has just found room. Called before `schedule`:
        a sequence that gives way to another one must be in no plan."""
        self._slots.take(sequence)
        if self._trace.rooms:
            self._trace.note_slot(sequence)
        if self._owner.leaves_row(sequence):
            sequence.holds.aux_slot = self._resources.take_aux()
        sequence.kv_len = sequence.prompt.cached_tokens = self._cache.begin(
            sequence.room, sequence.holds.keys, sequence.head.token_ids
        )
        self._take_state(sequence, plan)
        self._cache.reserve(sequence.room, sequence.prompt_len)
        self._sequences.hold_forks(sequence)
        pages = self._cache.get_page_indices(sequence.room)
        sequence.capacity_tokens = len(pages) * self._cache.page_size
        self._sequences.take(sequence, SequenceEvent.ADMIT)
        self._load.admissions += len(sequence.choices)
        sequence.holds.load = self._load_pages(sequence)
        if sequence.holds.load is None:
            sequence.prompt.known_tokens = 0  # it was an estimate, and `kv_len` is exact
            self._begin(sequence, plan)

    def _begin(self, sequence: Sequence, plan: StepPlan) -> None:
        """Put a prompt into its slot, whose cached tokens are known. So it is known which images it needs."""
        if sequence.images is not None:
            self._images.enter(sequence)
        admit(sequence, self._cache, plan)

    # ------------------------------------------------------------------------------------------------ recurrent states

    def _take_state(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take a state row, with the state behind the tokens that are cached, and choose where to keep the state: at
        the last page border of the prompt."""
        if not self._resources.has_state:
            return
        if not sequence.kv_len:
            self._resources.take_state(sequence)
        elif (source := self._resources.go_on_from_state(sequence)) >= 0:
            plan.copy_state.append(CopyState(sequence.slot, source))
        border = (sequence.prompt_len - 1) // self._cache.page_size * self._cache.page_size
        sequence.prompt.keep_at = border if self._cache.accepts(sequence.holds.keys) and border > sequence.kv_len else 0

    def _keep_state(self, sequence: Sequence, plan: StepPlan) -> None:
        """Have the plan copy the state before its next chunk, if a row is to spare."""
        snapshot = sequence.holds.snapshot = self._resources.keep_state(sequence)
        if snapshot is not None:
            plan.keep_state.append(KeepState(sequence.slot, snapshot.row, sequence.kv_len))

    def _settle_state(self, sequence: Sequence) -> None:
        """Let later prompts find the state of a prompt with its pages: the step that copied it is read. Pages that no
        state continues are of no use, and not cached."""
        if sequence.holds.snapshot is not None:
            self._resources.states.settle(sequence.holds.snapshot)
            sequence.holds.snapshot = None
        keys, num_pages = sequence.holds.keys, sequence.prompt.keep_at // self._cache.page_size
        if keys is not None and self._resources.states.holds(keys.key_at(num_pages - 1, sequence.head.token_ids)):
            self._commit(sequence, sequence.prompt.keep_at)

    def _commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the full pages of so many tokens of a prompt for later ones."""
        self._cache.commit(sequence.room, sequence.holds.keys, sequence.head.token_ids, num_tokens)

    # ---------------------------------------------------------------------------------------------------------- tiers

    def _load_pages(self, sequence: Sequence) -> PageLoad | None:
        """Load what the tiers hold of the prompt beyond the pages cached here. The last token is always computed."""
        keys = sequence.holds.keys
        if not self._cache.accepts(keys):
            return None
        num_full = (sequence.prompt_len - 1) // self._cache.page_size
        first = sequence.prompt.cached_tokens // self._cache.page_size
        pages = self._cache.get_page_indices(sequence.room)
        return self._tiers.load(keys.upto(num_full, sequence.head.token_ids), first, pages[first:num_full])

    def _take_loaded(self, computing: list[Sequence], plan: StepPlan) -> None:
        """Start the sequences whose pages are loaded, or late, with the pages that have arrived."""
        for sequence in computing:
            prompt, load = sequence.prompt, sequence.holds.load
            if load is not None and (load.is_done or self._clock.monotonic() >= load.end_s):
                prompt.cached_tokens += load.stop() * self._cache.page_size
                self._load.loaded_tokens += max(0, prompt.cached_tokens - max(sequence.kv_len, prompt.known_tokens))
                sequence.kv_len, prompt.known_tokens, sequence.holds.load = prompt.cached_tokens, 0, None
                self._commit(sequence, sequence.kv_len)
                self._begin(sequence, plan)
