"""Drafts from a predicted answer, as a client sends it along (OpenAI's `prediction`): a file that is to come back with
few changes.

A cursor follows the prediction. Behind a token that is not the predicted one it is lost, until the newest tokens occur
in what is left of the prediction, or anywhere in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chitu.instance.draft_source import Proposal
from chitu.protocol.account import OF_PREDICTION

NONE = Proposal((), OF_PREDICTION)
FOUND_AGAIN = 3
"""So many of the newest tokens tell the place where the answer goes on."""
BYTES = 4
"""Of a token."""


class PredictionDrafts:
    """A `DraftSource` of one request. `prediction`: int32 LE."""

    def __init__(self, prediction: bytes, prompt_len: int) -> None:
        self._bytes = prediction
        self._tokens = array("i", prediction)
        self._cursor = 0
        self._is_lost = False
        self._prompt_left = prompt_len
        self._newest = array("i")

    def take(self, tokens: Sequence[int]) -> None:
        answer = tokens[self._prompt_left :]
        self._prompt_left -= len(tokens) - len(answer)
        for token in answer:
            self._newest.append(token)
            if not self._is_lost and self._tokens[self._cursor : self._cursor + 1] == self._newest[-1:]:
                self._cursor += 1
            else:
                self._is_lost = True
        self._newest = self._newest[-FOUND_AGAIN:]
        if self._is_lost and len(self._newest) == FOUND_AGAIN:
            self._find_again()

    def _find_again(self) -> None:
        for start in (self._cursor, 0):
            at = self._bytes.find(self._newest.tobytes(), BYTES * start)
            while at % BYTES and at >= 0:
                at = self._bytes.find(self._newest.tobytes(), at + 1)
            if at >= 0:
                self._cursor, self._is_lost = at // BYTES + FOUND_AGAIN, False
                return

    def propose(self, most: int) -> Proposal:
        if self._is_lost or most <= 0:
            return NONE
        return Proposal(self._tokens[self._cursor : self._cursor + most], OF_PREDICTION)
