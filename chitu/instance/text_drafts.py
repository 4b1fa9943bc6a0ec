"""Drafts from the text (prompt lookup): what followed the newest tokens where they occurred before, in the prompt or
the answer. Copied, corrected and quoted text, code and JSON are full of such places.

Each place in the text has a link to the newest place before it behind the same two tokens (by hash), and a table has
the newest of all. So an index costs 12 bytes a token; numpy makes that of a prompt, 128k tokens in a tenth of a second.
Of the newest `MOST_PLACES` places the one with the longest match counts, and among equals the newest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from chitu.instance.draft_source import Proposal

LEAST = 2
"""Tokens of the shortest match."""
LONGEST = 16
"""Longest match that is told from longer ones."""
MOST_PLACES = 32
SURENESS = (2, 3, 5, 8)
"""Edges of the classes of matches by their length."""
NAME = "text"
NONE = Proposal((), NAME)
FEW_TOKENS = 32
"""So many new tokens are indexed one by one: numpy would take longer."""
_LEAST_CELLS = 1 << 8
_FACTOR, _SHIFT = 0x9E3779B1, 15


class TextDrafts:
    """A `DraftSource` of one request."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._before = array("i")
        """By place, which is behind as many tokens: the place before it behind equal ones; 0: none."""
        self._newest = array("i", bytes(4 * _LEAST_CELLS))
        """Newest place by hash; 0: none."""

    def take(self, tokens: Sequence[int]) -> None:
        # The place at the end of the text is what is looked up next; the tokens after it make it one to be found.
        first = max(LEAST, len(self._tokens))
        self._tokens.extend(tokens)
        self._before.extend([0] * len(tokens))
        if len(self._tokens) > len(self._newest):
            self._newest = array("i", bytes(4 << len(self._tokens).bit_length()))
            first = LEAST
        if len(self._tokens) - first > FEW_TOKENS:
            self._link_all(first)
            return
        for place in range(first, len(self._tokens)):
            key = self._hash(place)
            self._before[place], self._newest[key] = self._newest[key], place

    def _hash(self, place: int) -> int:
        mixed = (self._tokens[place - 2] * _FACTOR + self._tokens[place - 1]) * _FACTOR
        return mixed >> _SHIFT & len(self._newest) - 1

    def _link_all(self, first: int) -> None:
        """Link the places from `first` to before the end of the text, as `take` does."""
        tokens = np.frombuffer(self._tokens, np.int32).astype(np.uint64)
        places = np.arange(first, len(tokens))
        mixed = (tokens[places - 2] * np.uint64(_FACTOR) + tokens[places - 1]) * np.uint64(_FACTOR)
        keys = (mixed >> np.uint64(_SHIFT)).astype(np.int64) & len(self._newest) - 1
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_places = keys[order], places[order]
        newest, before = np.frombuffer(self._newest, np.int32), np.frombuffer(self._before, np.int32)
        is_first = np.ones(len(keys), bool)
        is_first[1:] = sorted_keys[1:] != sorted_keys[:-1]
        before[sorted_places[1:]] = sorted_places[:-1]
        before[sorted_places[is_first]] = newest[sorted_keys[is_first]]
        is_last = np.append(is_first[1:], True)
        newest[sorted_keys[is_last]] = sorted_places[is_last]

    def propose(self, most: int) -> Proposal:
        tokens, end = self._tokens, len(self._tokens)
        if most <= 0 or end < LEAST:
            return NONE
        best = length = 0
        place = self._newest[self._hash(end)]
        for _ in range(MOST_PLACES):
            if not place or length == LONGEST:
                break
            found = 0
            while found < LONGEST and found < place and tokens[place - 1 - found] == tokens[end - 1 - found]:
                found += 1
            if found > length:
                best, length = place, found
            place = self._before[place]
        return self._from(best, length, most) if length >= LEAST else NONE

    def _from(self, place: int, length: int, most: int) -> Proposal:
        """Return what is at a place, before which `length` tokens are the newest ones. A guess that runs into the
        newest tokens goes on with itself: the text repeats."""
        guess = self._tokens[place : place + most].tolist()
        while len(guess) < most:
            guess.append(guess[len(guess) - (len(self._tokens) - place)])
        return Proposal(guess, NAME, sum(length > edge for edge in SURENESS))
