"""Decoding: admission, growth, retraction, first tokens and ends of the requests that an instance decodes.

`GrowthReserve`, `may_admit` and `victims_for_growth` are pure policy. `DecodeManager` applies it, in the roles of D and
of unified instances: it moves sequences between states and writes the step plan. Step thread only.

Why running requests cannot deadlock over pages: a request that could not fit the pool alone is refused on arrival.
Every running request can be retracted to host memory, the last in `Sequence.order` first, so the first always gets
pages. A transfer ends within a deadline, and its pages then belong to a running (retractable) request. Retracted
requests resume before anything new starts. State slots cannot deadlock: a request takes all that it needs with its
pages, or none, and never another one.

A plan may be made before the tokens of the newest launched step are read. So it relies on what was launched
(`Sequence.kv_len`, `.launched`), not on what was emitted. A sequence with one more token in flight takes its next step
anyway, unless that token is its last by length. If it turns out to have ended (EOS, a stop id, a cancellation), its
surplus row writes to a page that it still holds, and the token of that row is dropped.

A step with drafts is read before the next one is planned, and so is the step before it: a draft follows the newest
token. Its rows take pages that are free, never one that has to be taken from the cache or from a request. What is
behind the last accepted token stays in the sequence's own pages until its next tokens overwrite it, and nothing counts
it: what is cached, saved, summed or sent ends at `kv_len`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter

from chitu.cache_manager import PagedKVCacheManager
from chitu.engine.executor import (
    Admit,
    AppendPages,
    CopyPage,
    CopyState,
    Draft,
    FirstToken,
    Offload,
    Restore,
    StepPlan,
)
from chitu.instance.core import InstanceCore
from chitu.instance.load import LoadMeter
from chitu.instance.sequences import AT_PEER_STATES, Sequence, SequenceEvent, SequenceState

_HOLDING = (
    SequenceState.FORK_HELD,
    SequenceState.TRANSFER,
    SequenceState.LOGITS,
    SequenceState.STARTED,
    SequenceState.LANDED,
    SequenceState.RUNNING,
)
"""States in which a sequence holds pages and decodes, or will decode, here."""


class GrowthReserve:
    """Pages to keep back for requests that are admitted already. Adding one takes constant time.

    Each gets what it may still need, at most `reserved_decode_tokens`. In any case the neediest one can run to its end:
    the rest can be retracted to host memory.
    """

    def __init__(self, page_size: int, reserved_decode_tokens: int, num_shared: int = 0) -> None:
        """Start empty. `num_shared`: extra references to shared pages, subtracted so that each counts once."""
        self._page_size = page_size
        self._reserved_decode_tokens = reserved_decode_tokens
        self._soon = 0
        self._held = -num_shared
        """Pages held by all of the requests."""
        self._longest = 0
        """Pages that the neediest request holds at its end."""
        self.is_empty = True

    def add(self, sequence: Sequence, held: int, num_shared: int = 0) -> None:
        """Add an admitted sequence that holds `held` pages, `num_shared` of which other requests hold, too."""
        in_the_end = -(-sequence.final_len // self._page_size)
        soon_tokens = min(sequence.final_len, sequence.kv_len + self._reserved_decode_tokens)
        self._soon += max(0, -(-soon_tokens // self._page_size) - held)
        self._held += held - num_shared
        self._longest = max(self._longest, in_the_end, held)
        self.is_empty = False

    @property
    def pages(self) -> int:
        # If all others are retracted, the neediest can use the pages that all of them hold.
        return max(self._soon, self._longest - self._held)


def may_admit(free_pages: int, wanted_pages: int, reserve: int, nothing_active: bool) -> bool:
    """Return whether a new or a retracted request gets its pages now. If no request is active, none needs a reserve."""
    return wanted_pages <= free_pages if nothing_active else wanted_pages + reserve <= free_pages


def victims_for_growth(
    running: Iterable[Sequence], needy: set[Sequence], free_pages: int, coming_back: Callable[[bytes], int]
) -> list[Sequence]:
    """Return the sequences to retract, the last in order first, so that all others can take their next step.
    `coming_back` counts the pages that a room frees, in addition to the rooms passed to it before.

    A needy request that is retracted itself no longer needs its page.
    """
    by_order = sorted(running, key=lambda s: s.order)
    victims: list[Sequence] = []
    demand = len(needy)
    while by_order and demand > free_pages:
        victim = by_order.pop()
        victims.append(victim)
        free_pages += coming_back(victim.room)
        demand -= victim in needy
    return victims


def admit(sequence: Sequence, cache: PagedKVCacheManager, plan: StepPlan) -> None:
    """Put the sequence into its slot, with its pages and the KV that they hold."""
    sequence.holds.admitted = True
    plan.admit.append(
        Admit(
            sequence.slot,
            sequence.token_ids(),
            sequence.client_prompt_len,
            sequence.kv_len,
            tuple(cache.get_page_indices(sequence.room)),
            sequence.sampling or sequence.prompt.early,
            state_slot=sequence.holds.state_slot,
            adapter=sequence.adapter,
            images=() if sequence.images is None else tuple(sequence.images.spans),
        )
    )


class DecodeManager:
    """The sequences that decode on an instance."""

    def __init__(self, core: InstanceCore, load: LoadMeter) -> None:
        self._config = core.settings.config
        self._load = load
        self._sequences = core.sequences
        self._resources = core.sequences.resources
        self._cache = self._resources.cache
        self._slots = self._resources.slots
        self._offload_keys = itertools.count()
        self._adapters = core.weights.adapters
        self._drafts = core.drafts
        self._checks_rows = core.engine.executor.info.checks_rows
        self._guesses = core.engine.executor.info.guesses

    # ------------------------------------------------------------------------------------------------------- schedule

    def make_room(self, plan: StepPlan) -> bool:
        """Give every running sequence the page for its next step, by retracting others if pages are short, and resume
        retracted ones. Return False, with nothing done, if the step in flight has to be read before a sequence is
        retracted: one that ended in it needs no page, and frees some."""
        if not self._grow(plan):
            return False
        plan.drop.extend(self._sequences.take_dropped_keys())
        self._resume(plan)
        return True

    def schedule(self, plan: StepPlan) -> tuple[list[Sequence], list[Sequence]]:
        """Return (sequences whose first token the step samples, sequences that decode), in plan order."""
        first_tokens = self._sample_first_tokens(plan)
        decoding = [s for s in self._sequences.queue(SequenceState.RUNNING) if s.launched < s.max_new_tokens]
        if self._adapters.has_any:  # rows of one adapter side by side, those without one first
            decoding.sort(key=attrgetter("adapter"))
        plan.decode.extend([s.slot for s in decoding])
        return first_tokens, decoding

    def would_draft(self) -> bool:
        """Return whether the next step would have drafts, by the tokens that are read."""
        if not self._drafts.is_on:
            return False
        running = self._sequences.queue(SequenceState.RUNNING)
        return bool(self._drafts.choose(running, self._load.pace.rates, self._load.pace.drafted_steps))

    def draft(
        self, plan: StepPlan, first_tokens: list[Sequence], decoding: list[Sequence]
    ) -> dict[Sequence, list[int]]:
        """Add drafts to the plan, and return them. Does nothing while a step is unread."""
        if not self._drafts.is_on or self._resources.num_unread_steps:
            return {}
        pace = self._load.pace
        drafts = self._drafts.choose(decoding, pace.rates, pace.drafted_steps)
        for sequence, tokens in list(drafts.items()):
            del tokens[self._grow_for_draft(sequence, len(tokens), plan, len(decoding)) :]
            if tokens:
                plan.drafts.append(Draft(sequence.slot, tuple(tokens)))
            else:
                del drafts[sequence]
        if self._guesses:
            self._grow_for_guesses(plan, first_tokens, decoding, drafts)
        return drafts

    def _grow_for_guesses(
        self,
        plan: StepPlan,
        first_tokens: list[Sequence],
        decoding: list[Sequence],
        drafts: dict[Sequence, list[int]],
    ) -> None:
        """Reserve pages for the tokens that the step draws, and for all but the last that the model drafts behind them:
        it drafts at once behind a token with a page."""
        further = self._guesses - 1
        for sequence in first_tokens:
            if sequence.max_new_tokens > 1 and sequence.state is SequenceState.LANDED:
                self._grow_for_draft(sequence, min(further, sequence.max_new_tokens - 2), plan, len(decoding))
        for sequence in decoding:
            most = len(drafts.get(sequence, ())) + 1 + further
            most = min(most, sequence.max_new_tokens - sequence.launched - 1)
            if most > 0:
                self._grow_for_draft(sequence, most, plan, len(decoding))

    def _grow_for_draft(self, sequence: Sequence, num_tokens: int, plan: StepPlan, num_decoding: int) -> int:
        """Reserve pages for a draft, as far as they are free and no request may need them for its next token. Return
        for how many tokens there is room."""
        wanted, page_size = sequence.kv_len + 1 + num_tokens, self._cache.page_size
        missing = self._cache.pages_for(wanted) - sequence.capacity_tokens // page_size
        spare = self._cache.allocator.num_free - num_decoding
        if missing > 0 and spare > 0:
            end = min(wanted, sequence.capacity_tokens + spare * page_size)
            pages = self._cache.reserve(sequence.room, end)
            sequence.capacity_tokens += len(pages) * page_size
            plan.append.append(AppendPages(sequence.slot, tuple(pages)))
        return min(num_tokens, sequence.capacity_tokens - sequence.kv_len - 1)

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Account for a draft of a step that is read."""
        sequence.kv_len += accepted
        sequence.launched += accepted
        self._drafts.note(sequence, drafted, accepted)

    def open_admission(self, others: Iterable[Sequence] = ()) -> Callable[[Sequence, int, int, int], bool]:
        """Return the admission check of this turn: may a sequence take `pages` now, `num_shared` of which are in use,
        and so many state slots? A sequence that passes is counted from then on, so the caller must admit it. `others`
        hold pages too and decode here later."""
        if not self._slots.num_free:
            return lambda sequence, pages, num_shared, num_states: False
        reserve = GrowthReserve(
            self._cache.page_size, self._config.reserved_decode_tokens, self._cache.num_shared_pages
        )
        for active in (*self._sequences.queue(*_HOLDING), *others):
            reserve.add(active, len(self._cache.get_page_indices(active.room)))

        def may_start(sequence: Sequence, pages: int, num_shared: int, num_states: int) -> bool:
            available, num_forks = self._cache.num_available_pages, len(sequence.forks)
            num_own = self._cache.pages_for(sequence.prompt_len % self._cache.page_size)  # of each fork
            wanted = pages - num_shared + num_forks * num_own
            if max(1, num_forks) > self._slots.num_free or num_states > self._resources.states.num_free:
                return False
            if not may_admit(available, wanted, reserve.pages, reserve.is_empty):
                return False
            reserve.add(sequence, pages, num_shared)
            for fork in sequence.forks:
                reserve.add(fork, num_own)
            return True

        return may_start

    def _grow(self, plan: StepPlan) -> bool:
        needy = self._needy()
        if len(needy) > self._cache.num_available_pages:
            if self._resources.num_unread:
                return False
            available, coming_back = self._cache.num_available_pages, self._cache.pages_coming_back()
            running = self._sequences.queue(SequenceState.RUNNING)
            for victim in victims_for_growth(running, needy, available, coming_back):
                self._retract(victim, plan)
                needy.discard(victim)
        for sequence in needy:
            pages = self._cache.reserve(sequence.room, sequence.kv_len + 1)
            sequence.capacity_tokens += len(pages) * self._cache.page_size
            plan.append.append(AppendPages(sequence.slot, tuple(pages)))
        return True

    def _needy(self) -> set[Sequence]:
        """Return the running sequences whose next step writes beyond their pages."""
        running = self._sequences.queue(SequenceState.RUNNING)
        return {s for s in running if s.kv_len >= s.capacity_tokens and s.launched < s.max_new_tokens}

    def _retract(self, sequence: Sequence, plan: StepPlan) -> None:
        """Move the sequence's KV to host memory. No token is lost: all that were launched have been read."""
        sequence.holds.offload_key = next(self._offload_keys)
        plan.offload.append(Offload(sequence.slot, sequence.holds.offload_key))
        self._resources.vacate(sequence, is_offloaded=True)
        self._sequences.take(sequence, SequenceEvent.RETRACT)
        self._load.retractions += 1

    def _resume(self, plan: StepPlan) -> None:
        retracted = self._sequences.queue(SequenceState.RETRACTED)
        if not retracted:
            return
        may_start = self.open_admission()
        for sequence in sorted(retracted, key=lambda s: s.order):
            num_pages = self._cache.pages_for(sequence.kv_len + 1)
            if not may_start(sequence, num_pages, 0, self._resources.states_wanted(sequence)):
                return
            self._slots.take(sequence)
            self._resources.take_state(sequence)
            self._cache.reserve(sequence.room, sequence.kv_len + 1)
            sequence.capacity_tokens = num_pages * self._cache.page_size
            admit(sequence, self._cache, plan)
            plan.restore.append(Restore(sequence.slot, sequence.holds.offload_key))
            self._sequences.take(sequence, SequenceEvent.RESUME)

    def _sample_first_tokens(self, plan: StepPlan) -> list[Sequence]:
        early = self._sequences.queue(SequenceState.LOGITS)
        ready = [s for s in early if s.draws_from_row]
        ready += self._sequences.queue(SequenceState.LANDED)
        for sequence in ready:
            source = sequence.source or sequence
            has_kv = sequence.needs_kv and sequence.state is SequenceState.LANDED
            is_checked = self._checks_rows and sequence.state is SequenceState.LOGITS
            sequence.kv_len = sequence.prompt_len
            admit(sequence, self._cache, plan)
            if source is not sequence and sequence.needs_kv and sequence.prompt_len % self._cache.page_size:
                last = sequence.prompt_len // self._cache.page_size
                pages = [self._cache.get_page_indices(each.room)[last] for each in (source, sequence)]
                plan.copy.append(CopyPage(sequence.slot, *pages))
            if source is not sequence and sequence.holds.state_slot >= 0:
                plan.copy_state.append(CopyState(sequence.slot, source.holds.state_slot))
            plan.first_tokens.append(FirstToken(sequence.slot, source.holds.aux_slot, has_kv, is_checked))
        return ready

    def fork(self, source: Sequence) -> None:
        """Start the forks of a prompt whose KV and logits are here. It keeps what it holds until the step in which the
        last of them starts is read."""
        self._sequences.close(source)
        for fork in source.forks:
            if fork.slot < 0:
                self._slots.take(fork)
            self._cache.fork(fork.room, source.room, source.prompt_len)
            fork.capacity_tokens = len(self._cache.get_page_indices(fork.room)) * self._cache.page_size
            fork.holds.keys = None if source.holds.keys is None else source.holds.keys.copy()
            fork.prompt.cached_tokens = source.prompt.cached_tokens
            fork.times = replace(source.times)
            self._sequences.take(fork, SequenceEvent.KV_HERE)
        first, moved = source.forks[0].output, source.output
        first.kv_bytes, first.transfer_sums = moved.kv_bytes, moved.transfer_sums

    def _leave_source(self, fork: Sequence) -> None:
        """Detach a fork that has started or ended from its prompt; free the prompt after its last fork."""
        source = fork.source
        if source is not None and fork in source.forks:
            source.forks.remove(fork)
            if not source.forks and source.state is SequenceState.CLOSING:
                self._sequences.free(source)

    def after_launch(self, first_tokens: list[Sequence], decoding: list[Sequence]) -> None:
        """Account for a launched step: one more token sampled for each sequence, and one more in the KV cache for those
        that decode. If its KV is here, a first token makes a sequence RUNNING: its next input is on the device."""
        for sequence in decoding:
            sequence.kv_len += 1
            sequence.launched += 1
        for sequence in first_tokens:
            sequence.launched += 1
            self.go_on(sequence, SequenceEvent.START)

    def go_on(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Apply an event. The sequence runs once its KV is here and its first token is launched."""
        self._sequences.take(sequence, event)
        if sequence.state is SequenceState.RUNNING:
            self._resources.free_aux(sequence)
            self._leave_source(sequence)

    # ----------------------------------------------------------------------------------------------------------- ends

    def finish(self, sequence: Sequence) -> None:
        """End a request that has all of its tokens, and cache its full pages for later prompts. With recurrent state
        there is none to go on from behind its answer."""
        if sequence.state is SequenceState.RUNNING and not self._resources.has_state:
            # K and V of the newest token are missing or being computed.
            num_settled = sequence.prompt_len + len(sequence.emitted) - 1
            self._cache.commit(sequence.room, sequence.holds.keys, sequence.token_ids(), num_settled)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Close a request. What a peer may still write to is kept until the peer is done."""
        waits_for_peer = sequence.state in AT_PEER_STATES
        self._sequences.close(sequence)
        if not waits_for_peer:
            self._sequences.free(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a request early, to which no peer writes. A prompt ends with the last fork that waits for it; the caller
        ends it."""
        if sequence.source is not None and sequence in sequence.source.forks:
            self.end_fork(sequence)
        else:
            self._end(sequence)

    def end_fork(self, fork: Sequence) -> None:
        """End a fork that has not started: no peer has access to its page."""
        self._sequences.close(fork)
        self._sequences.free(fork)
        self._leave_source(fork)
