"""Chunked prefill: which prompt tokens are computed in the next step, and which sequences get pages for it.

Pure policy over an ordered queue: no clock, no socket, no tensor. Used by P and by unified instances.

On P, a request may be computed before D announces it. That is speculation: D may not have room for its pages yet.
Announced requests come first, and take the pages of unannounced ones if pages are short. Without that rule P's pages
could all belong to requests whose D waits for another P in the same state: a deadlock across instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from chitu.instance.scheduling.sequence import Sequence


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
