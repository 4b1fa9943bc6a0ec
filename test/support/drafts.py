"""Drafts as no good source makes them: right, wrong and both, always as many as there may be."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from chitu.engine.executor import MAX_DRAFT
from chitu.instance.draft_source import DraftSource, Proposal
from chitu.instance.drafts import Drafts
from chitu.instance.sequences import Sequence as SequenceOfInstance
from chitu.protocol import StepRates


class AllDrafts(Drafts):
    """Computes every draft in full, whatever it promises."""

    def __init__(
        self,
        source: Callable[[SequenceOfInstance], DraftSource],
        most_rows: int,
        vocab_size: int,
        most: int = MAX_DRAFT,
    ) -> None:
        super().__init__(MAX_DRAFT, most_rows + MAX_DRAFT, vocab_size, source)

    def lengths(
        self,
        decoding: Collection[SequenceOfInstance],
        guesses: dict[SequenceOfInstance, Proposal],
        rates: StepRates,
    ) -> dict[SequenceOfInstance, int]:
        free, lengths = self._most_rows - len(decoding), dict[SequenceOfInstance, int]()
        for sequence, guess in guesses.items():
            lengths[sequence] = min(free, len(guess.tokens))
            free -= lengths[sequence]
        return lengths


class Guesses:
    """A source that knows the answer, and is right about each token with a chance of `rate`.

    `answer`: the tokens behind the prompt; may be shorter than what is asked for, then the rest is random.
    """

    def __init__(
        self, prompt_len: int, answer: Sequence[int], rate: float, rng: random.Random, vocab_size: int
    ) -> None:
        self._answer = answer
        self._known = -prompt_len
        self._rate = rate
        self._rng = rng
        self._vocab_size = vocab_size

    def take(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)

    def propose(self, most: int) -> Proposal:
        length, guess = self._rng.randint(0, most), list[int]()
        for token in self._answer[self._known : self._known + length]:
            is_right = self._rng.random() < self._rate
            guess.append(token if is_right else (token + self._rng.randrange(1, self._vocab_size)) % self._vocab_size)
        guess += [self._rng.randrange(self._vocab_size) for _ in range(length - len(guess))]
        return Proposal(guess, "guesses")
