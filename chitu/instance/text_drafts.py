"""Drafts from the text (prompt lookup): what followed the newest tokens where they occurred last, in the prompt or the
answer. Copied, corrected and quoted text, code and JSON are full of such places.

An index holds for each n-gram the place behind its newest occurrence, in a hash table of int32. numpy fills it with a
prompt, 128k tokens in some milliseconds; a step then costs some microseconds. N-grams that share a cell hide each
other, which costs a guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from chitu.instance.draft_source import Proposal

NGRAMS = (2, 3, 5)
"""Lengths that are looked up; the longest one that is found counts."""
LONGEST = 16
"""Longest match that is told from longer ones."""
SURENESS = (2, 3, 5, 8)
"""Edges of the classes of matches by their length."""
NONE = Proposal((), "text")
FEW_TOKENS = 32
"""So many new tokens are indexed one by one: numpy would take longer."""
_LEAST_CELLS = 1 << 8
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)
_SHIFT = 15


class TextDrafts:
    """A `DraftSource` of one request."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._cells = [array("i") for _ in NGRAMS]
        """Per length of n-grams: the place behind the newest one with this hash, or 0."""

    def take(self, tokens: Sequence[int]) -> None:
        # The n-gram that ends with the newest token is what is looked up next; the tokens after it bring it in.
        first = max(0, len(self._tokens) - 1)
        self._tokens.extend(tokens)
        end = max(0, len(self._tokens) - 1)
        if len(self._tokens) > len(self._cells[0]) // 2:
            size = max(_LEAST_CELLS, 1 << (4 * len(self._tokens)).bit_length())
            self._cells = [array("i", bytes(4 * size)) for _ in NGRAMS]
            first = 0
        if end - first > FEW_TOKENS:
            self._index_all(first, end)
            return
        for last in range(first, end):
            for cells, found in zip(self._cells, self._hashes(last), strict=False):
                cells[found & (len(cells) - 1)] = last + 1

    def _hashes(self, last: int) -> Iterator[int]:
        """Return the hashes of the n-grams whose last token is at `last`, as far as there are so many tokens."""
        tokens, total, num_taken = self._tokens, 0, 0
        for n in NGRAMS:
            if n > last + 1:
                return
            while num_taken < n:
                total += tokens[last - num_taken] * _FACTORS[num_taken]
                num_taken += 1
            yield total ^ total >> _SHIFT

    def _index_all(self, first: int, end: int) -> None:
        """Index what `_hashes` gives for the tokens in `[first, end)`."""
        tokens: NDArray[np.int64] = np.frombuffer(self._tokens, np.int32).astype(np.int64)
        for n, cells in zip(NGRAMS, self._cells, strict=True):
            lasts = np.arange(max(first, n - 1), end)
            total = np.zeros(len(lasts), np.int64)
            for back in range(n):
                total += tokens[lasts - back] * _FACTORS[back]
            # Of equal cells the last place stays.
            np.frombuffer(cells, np.int32)[(total ^ total >> _SHIFT) & (len(cells) - 1)] = lasts + 1

    def propose(self, most: int) -> Proposal:
        end = len(self._tokens)
        if most <= 0 or not end:
            return NONE
        looked_up = list(zip(NGRAMS, self._cells, self._hashes(end - 1), strict=False))
        for n, cells, key in reversed(looked_up):
            at = cells[key & (len(cells) - 1)]
            if at >= n and self._tokens[at - n : at] == self._tokens[end - n :]:
                return self._from(at, n, most)
        return NONE

    def _from(self, at: int, length: int, most: int) -> Proposal:
        """Return what is at place `at`, before which `length` tokens are the newest ones. A guess that runs into the
        newest tokens goes on with itself: the text repeats."""
        tokens, end = self._tokens, len(self._tokens)
        while length < LONGEST and at > length and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        guess = tokens[at : at + most].tolist()
        while len(guess) < most:
            guess.append(guess[len(guess) - (end - at)])
        return Proposal(guess, "text", sum(length > edge for edge in SURENESS))
