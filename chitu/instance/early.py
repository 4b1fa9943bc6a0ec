"""P's admission. A request may be computed before D announces it, and gives way to announced ones.

D may not have room for the pages of an early request yet. So announced requests come first, and take the pages of
early ones if pages are short. Without that rule P's pages could all belong to requests whose D waits for another P in
the same state: a deadlock across instances. With recurrent state nothing is computed early: what gives way would be
computed anew from its first token, for each announcement. Owned by `PrefillRole`, step thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chitu.instance.sequences import Sequence, SequenceEvent, Sequences, SequenceState
from chitu.kv_transfer.sending import PrefillSender


def victims_for_announced(
    holders: Iterable[Sequence], coming_back: Callable[[bytes], int], pages_wanted: int, aux_wanted: int
) -> list[Sequence]:
    """Return the unannounced holders of pages, youngest first, that must give way so that an announced request fits.
    Return [] if none must, or if all together hold too little. `coming_back` is as in `victims_for_growth`."""
    victims: list[Sequence] = []
    for sequence in sorted((s for s in holders if not s.prompt.announced), key=lambda s: s.order, reverse=True):
        if pages_wanted <= 0 and aux_wanted <= 0:
            break
        victims.append(sequence)
        pages_wanted -= coming_back(sequence.room)
        aux_wanted -= 1
    return victims if pages_wanted <= 0 and aux_wanted <= 0 else []


class EarlyAdmission:
    def __init__(self, sequences: Sequences, sender: PrefillSender) -> None:
        self._sequences = sequences
        self._resources = sequences.resources
        self._cache = self._resources.cache
        self._sender = sender
        self.needs_read = False
        """Whether the newest check failed because a step in flight may compute for requests that must give way."""

    def may_start(self, sequence: Sequence) -> bool:
        """Return whether pages, the rows and an executor slot are free; the sequence must start then. An announced
        request may take those of early ones, but not before the step in flight is read."""
        self.needs_read = False
        if self._resources.has_state and not (sequence.prompt.announced and self._resources.states.num_free):
            return False
        pages, aux = self._missing(sequence)
        if (pages > 0 or aux > 0) and sequence.prompt.announced:
            self._make_way(sequence)
            pages, aux = self._missing(sequence)
        return pages <= 0 and aux <= 0 and self._resources.slots.num_free > 0

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many pages and aux slots the sequence lacks."""
        pages = self._cache.pages_wanted(sequence.holds.keys, sequence.head.token_ids) - self._cache.num_available_pages
        return pages, 1 - self._resources.aux.num_free

    def _make_way(self, wanting: Sequence) -> None:
        holders = self._sequences.queue(SequenceState.COMPUTING, SequenceState.INFLIGHT)
        victims = victims_for_announced(holders, self._cache.pages_coming_back(), *self._missing(wanting))
        if victims and self._resources.num_unread:
            self.needs_read = True
            return
        for sequence in victims:
            if not self._sender.feed.reset(sequence.room):
                continue  # it was announced just now, so it is urgent, too
            sequence.holds.stop_load()
            self._resources.vacate(sequence)
            sequence.kv_len, sequence.prompt.lines = 0, None
            self._sequences.take(sequence, SequenceEvent.GIVE_WAY)
