"""P's admission. A request may be computed before D announced it: that is speculation, and it gives way.

Owned by `PDScheduler`, step thread only. Which one gives way is policy (`prefill.py`); here it does. Why there is such
a rule is said there, too.
"""

from __future__ import annotations

from collections.abc import Callable

from chitu.instance.scheduling.prefill import speculation_to_undo
from chitu.instance.scheduling.sequence import Sequence
from chitu.instance.scheduling.sequences import Sequences
from chitu.kv_transfer.events import PrefillSenderLike
from chitu.protocol.sequence_states import SequenceEvent, SequenceState


class SpeculativeAdmission:
    def __init__(self, sequences: Sequences, sender: PrefillSenderLike) -> None:
        self._sequences = sequences
        self._resources = sequences.resources
        self._cache = self._resources.cache
        self._sender = sender

    def open(self) -> Callable[[Sequence], bool]:
        """Of one turn: whether a sequence may start now. The one that may does."""
        return self._may_start

    def _may_start(self, sequence: Sequence) -> bool:
        """Pages, an aux slot and an executor slot; announced requests may take speculative ones."""
        pages, aux = self._missing(sequence)
        if (pages > 0 or aux > 0) and sequence.announced:
            self._undo_speculation(sequence)
            pages, aux = self._missing(sequence)
        return pages <= 0 and aux <= 0 and self._resources.slots.num_free > 0

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Pages and aux slots that it lacks."""
        pages = self._cache.pages_wanted(sequence.keys, sequence.prompt) - self._cache.num_available_pages
        return pages, 1 - self._resources.aux.num_free

    def _undo_speculation(self, wanting: Sequence) -> None:
        if not self._speculators(wanting):
            return
        self._resources.sync_step()  # a step in flight may compute for those that give way
        for sequence in self._speculators(wanting):
            if not self._sender.reset_chunks(sequence.room):
                continue  # announced in this very moment: it is urgent itself now
            sequence.stop_load()
            self._resources.vacate(sequence, is_offloaded=False)
            sequence.kv_len, sequence.prompt_lines = 0, None
            self._sequences.take(sequence, SequenceEvent.GIVE_WAY)

    def _speculators(self, wanting: Sequence) -> list[Sequence]:
        """The sequences that must give way so that it fits."""
        holders = self._sequences.queue(SequenceState.COMPUTING, SequenceState.INFLIGHT)
        return speculation_to_undo(holders, self._cache.pages_coming_back(), *self._missing(wanting))
