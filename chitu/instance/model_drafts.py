"""Drafts by the model: what its drafting layer guessed behind the newest token, in the step that drew it
(`StepResult.drafts`). Another source's guess goes on from there, if it begins alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chitu.instance.draft_source import DraftSource, Proposal

NAME = "mtp"


class Guessed(Protocol):
    """The request."""

    @property
    def guess(self) -> Sequence[int]:
        """What the model drafts behind the newest token that was read; empty: nothing."""
        ...


class ModelDrafts:
    """A `DraftSource` of one request. `inner`: the source of other guesses."""

    def __init__(self, request: Guessed, inner: DraftSource) -> None:
        self._request = request
        self._inner = inner

    def take(self, tokens: Sequence[int]) -> None:
        self._inner.take(tokens)

    def propose(self, most: int) -> Proposal:
        own, other = self._request.guess, self._inner.propose(most)
        if not own or most <= 0 or list(other.tokens[: len(own)]) == list(own):
            return other
        return Proposal(own[:most], NAME)
