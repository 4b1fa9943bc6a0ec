"""Process entry of instances whose drafts are as bad as drafts can be: all that there is room for, in every step, from
the text, near it, or at random, by request. `python -m support.drafting_scheduler`"""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.drafts import AllDrafts, Guesses

from chitu.instance import core
from chitu.instance.draft_source import DraftSource, Proposal
from chitu.instance.drafts import Drafts
from chitu.instance.sequences import Sequence as SequenceOfInstance
from chitu.instance.text_drafts import TextDrafts
from chitu.net.threads import end_process
from chitu.serve.scheduler import main


class Spoilt:
    """Drafts from the text, of which about one in four tokens is another one."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._text, self._rng, self._vocab_size = TextDrafts(), rng, vocab_size

    def take(self, tokens: Sequence[int]) -> None:
        self._text.take(tokens)

    def propose(self, most: int) -> Proposal:
        tokens, name, sureness = self._text.propose(most)
        guess = [self._rng.randrange(self._vocab_size) if self._rng.random() < 0.25 else token for token in tokens]
        return Proposal(guess, name, sureness)


def drafts_of(_most: int, most_rows: int, vocab_size: int) -> Drafts:
    def source(sequence: SequenceOfInstance) -> DraftSource:
        rng = random.Random(sequence.room)
        sources = (TextDrafts(), Spoilt(rng, vocab_size), Guesses(sequence.prompt_len, (), 0.0, rng, vocab_size))
        return rng.choice(sources)

    return AllDrafts(source, most_rows, vocab_size)


if __name__ == "__main__":
    core.Drafts = drafts_of  # type: ignore[assignment, attr-defined]
    end_process(main())
