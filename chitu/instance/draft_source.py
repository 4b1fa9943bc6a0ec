"""What guesses the next tokens of one request. Whatever it guesses, the request's tokens stay the same: a guess only
saves steps where it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Proposal(NamedTuple):
    tokens: Sequence[int]
    """Guess of the next tokens; empty: there is none."""
    source: str
    """Name of the source, as in metrics."""
    sureness: int = 0
    """Class of guesses of this source that are right about equally often. How often is measured."""


class DraftSource(Protocol):
    """Step thread only. No torch: an instance without a model has some, too."""

    def take(self, tokens: Sequence[int]) -> None:
        """Take the tokens that were drawn since the last call. The first call has the prompt, too."""
        ...

    def propose(self, most: int) -> Proposal:
        """Return a guess of at most `most` tokens."""
        ...


@dataclass(slots=True, eq=False)
class Drafting:
    """The drafts of one request."""

    source: DraftSource
    num_taken: int = 0
    """Emitted tokens that the source has taken."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name of a source: tokens of its drafts that were computed, and those of them that were right."""

    def report(self) -> tuple[tuple[str, int, int], ...]:
        """Return the counts as `Finish` has them."""
        return tuple((name, *counts) for name, counts in self.counts.items())
