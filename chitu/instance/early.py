"""P's admission. A request may be computed before D announces it. Such speculation gives way to announced requests.

Owned by `PDScheduler`, step thread only. The policy in `prefill.py` decides which request gives way, and explains why.
This module carries it out.
"""

from __future__ import annotations

from collections.abc import Callable

from chitu.instance.prefill import speculation_to_undo
from chitu.instance.sequences import Sequence, SequenceEvent, Sequences, SequenceState
from chitu.kv_transfer.sending import PrefillSender


class SpeculativeAdmission:
    def __init__(self, sequences: Sequences, sender: PrefillSender) -> None:
        self._sequences = sequences
        self._resources = sequences.resources
        self._cache = self._resources.cache
        self._sender = sender

    def open(self) -> Callable[[Sequence], bool]:
        """Return the admission check of one turn: may a sequence start now? One that passes must start."""
        return self._may_start

    def _may_start(self, sequence: Sequence) -> bool:
        """Return whether pages, an aux slot and an executor slot are free. An announced request may take those of
        speculative ones."""
        pages, aux = self._missing(sequence)
        if (pages > 0 or aux > 0) and sequence.announced:
            self._undo_speculation(sequence)
            pages, aux = self._missing(sequence)
        return pages <= 0 and aux <= 0 and self._resources.slots.num_free > 0

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many pages and aux slots the sequence lacks."""
        pages = self._cache.pages_wanted(sequence.keys, sequence.prompt) - self._cache.num_available_pages
        return pages, 1 - self._resources.aux.num_free

    def _undo_speculation(self, wanting: Sequence) -> None:
        if not self._speculators(wanting):
            return
        self._resources.sync_step()  # a step in flight may compute for those that give way
        for sequence in self._speculators(wanting):
            if not self._sender.feed.reset(sequence.room):
                continue  # it was announced just now, so it is urgent, too
            sequence.stop_load()
            self._resources.vacate(sequence)
            sequence.kv_len, sequence.prompt_lines = 0, None
            self._sequences.take(sequence, SequenceEvent.GIVE_WAY)

    def _speculators(self, wanting: Sequence) -> list[Sequence]:
        """Return the sequences that must give way so that `wanting` fits."""
        holders = self._sequences.queue(SequenceState.COMPUTING, SequenceState.INFLIGHT)
        return speculation_to_undo(holders, self._cache.pages_coming_back(), *self._missing(wanting))
