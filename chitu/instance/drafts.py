"""How many tokens of which drafts a step computes. Owned by `DecodeManager`, step thread only.

A draft is more decode rows of its sequence (`engine/executor.py`), and an accepted token is the one that would have
been drawn anyway: drafts change no token, only the number of steps. So the choice is one of price alone. Each further
token of a draft raises the tokens that the step is expected to give and its time; it is computed if the first grows by
a larger share than the second:

    gain / tokens > added seconds / seconds

`gain` is the chance that it and all before it are right, as measured for guesses of this source and sureness; the
seconds are those of the line through measured steps (`pace.py`). On a machine whose steps take as long as the weights
take to read, rows are cheap, and drafts long; with many requests in a step their rows are its time, and drafts fade.

Neither price nor chance is known of what is never tried: a step in `EXPLORE` computes a few tokens of a draft whatever
they promise.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from chitu.instance.draft_source import Drafting, DraftSource, Proposal
from chitu.instance.grammar_drafts import GrammarDrafts
from chitu.instance.model_drafts import ModelDrafts
from chitu.instance.prediction_drafts import PredictionDrafts
from chitu.instance.sequences import Sequence
from chitu.instance.text_drafts import TextDrafts
from chitu.protocol import StepRates

EXPLORE = 32
EXPLORED_TOKENS = 4
"""Tokens of a draft that is computed to find out."""
PRICED_STEPS = 8
"""Steps with drafts that were measured before the measured price counts; `ROW_SHARE` does until then."""
ROW_SHARE = 0.04
"""Share of a step's time that one more row adds, while it is not known."""
MEMORY_TOKENS = 64.0
"""A draft's token that was drawn so many drafted tokens ago counts by 1/e."""


@dataclass(slots=True)
class _Chance:
    """How often the guesses of one source and sureness are right, a token."""

    right: float = 1.0
    tried: float = 2.0

    def note(self, drafted: int, accepted: int) -> None:
        tried = accepted + (accepted < drafted)
        kept = max(0.0, 1 - tried / MEMORY_TOKENS)
        self.right = self.right * kept + accepted
        self.tried = self.tried * kept + tried

    @property
    def rate(self) -> float:
        return self.right / self.tried


class FirstOf:
    """The guess of the first source that has one."""

    def __init__(self, *sources: DraftSource) -> None:
        self._sources = sources

    def take(self, tokens: Tokens[int]) -> None:
        for source in self._sources:
            source.take(tokens)

    def propose(self, most: int) -> Proposal:
        for source in self._sources:
            guess = source.propose(most)
            if guess.tokens:
                break
        return guess


def source_of(sequence: Sequence) -> DraftSource:
    """Return what guesses for a request: the model, if it drafts; its prediction, if it has one; its text; and its
    grammar."""
    source: DraftSource = TextDrafts()
    if sequence.prediction:
        source = FirstOf(PredictionDrafts(sequence.prediction, sequence.client_prompt_len), source)
    source = ModelDrafts(sequence, source)
    grammar = sequence.output.grammar
    if grammar is not None:
        source = GrammarDrafts(grammar.guessing_matcher(), source, sequence.client_prompt_len)
    return source


class Drafts:
    """`most`: most tokens of a draft; 0: there are none. `most_rows`: most rows of requests that decode, with their
    drafts. `source`: makes what guesses for a request."""

    def __init__(
        self,
        most: int,
        most_rows: int,
        vocab_size: int,
        source: Callable[[Sequence], DraftSource] = source_of,
    ) -> None:
        self._most = most
        self._most_rows = most_rows
        self._vocab_size = vocab_size
        self._source = source
        self._chances: dict[tuple[str, int], _Chance] = {}
        self._planned: dict[Sequence, Proposal] = {}
        """Guesses of the newest plan."""
        self._num_choices = 0
        self.counts: dict[str, tuple[int, int]] = {}
        """As in `Drafting`, of all requests since the start."""

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def choose(self, decoding: Collection[Sequence], rates: StepRates, measured: int) -> dict[Sequence, list[int]]:
        """Return drafts for the next step of these sequences, all of whose tokens are read. `measured`: steps with
        drafts behind `rates`."""
        self._planned = {}
        for sequence in decoding:
            most = min(self._most, sequence.max_new_tokens - len(sequence.emitted) - 1)
            if most > 0 and sequence.emitted and sequence.head.options.is_drafted:
                guess = self._guess(sequence, most)
                if guess.tokens:
                    self._planned[sequence] = guess
        if not self._planned:
            return {}
        self._num_choices += 1
        lengths = self.lengths(decoding, self._planned, rates if measured >= PRICED_STEPS else StepRates())
        return {
            sequence: list(self._planned[sequence].tokens[:length]) for sequence, length in lengths.items() if length
        }

    def _guess(self, sequence: Sequence, most: int) -> Proposal:
        drafting = sequence.drafting
        if drafting is None:
            drafting = sequence.drafting = Drafting(self._source(sequence))
            drafting.source.take(array("i", sequence.head.token_ids))
        if drafting.num_taken < len(sequence.emitted):
            drafting.source.take(sequence.emitted[drafting.num_taken :])
            drafting.num_taken = len(sequence.emitted)
        tokens, name, sureness = drafting.source.propose(most)
        for place, token in enumerate(tokens[:most]):
            if not 0 <= token < self._vocab_size:
                return Proposal(tokens[:place], name, sureness)
        return Proposal(tokens[:most], name, sureness)

    def lengths(
        self, decoding: Collection[Sequence], guesses: dict[Sequence, Proposal], rates: StepRates
    ) -> dict[Sequence, int]:
        """Return how many tokens of each guess pay."""
        tokens = float(len(decoding))
        step_s, row_s = rates.step_s(tokens, sum(sequence.kv_len for sequence in decoding)), rates.row_s
        if not step_s:
            step_s, row_s = 1.0, ROW_SHARE
        lengths = dict.fromkeys(guesses, 0)
        heap = [(-self._chance(guess).rate, place) for place, guess in enumerate(guesses.values())]
        heapq.heapify(heap)
        order, free = list(guesses), self._most_rows - len(decoding)
        while heap and free > 0:
            gain, place = -heap[0][0], heap[0][1]
            sequence = order[place]
            guess = guesses[sequence]
            added_s = row_s + rates.context_token_s * sequence.kv_len
            if gain * step_s <= added_s * tokens:
                break
            lengths[sequence] += 1
            tokens, step_s, free = tokens + gain, step_s + added_s, free - 1
            if lengths[sequence] < len(guess.tokens):
                heapq.heapreplace(heap, (-gain * self._chance(guess).rate, place))
            else:
                heapq.heappop(heap)
        if not self._num_choices % EXPLORE and free > 0:
            at_least = min(EXPLORED_TOKENS, free, len(guesses[order[0]].tokens))
            lengths[order[0]] = max(lengths[order[0]], at_least)
        return lengths

    def _chance(self, guess: Proposal) -> _Chance:
        return self._chances.setdefault((guess.source, guess.sureness), _Chance())

    def note(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft of the newest plan were computed, and how many of them were drawn."""
        guess, drafting = self._planned[sequence], sequence.drafting
        assert drafting is not None
        self._chance(guess).note(drafted, accepted)
        for counts in (self.counts, drafting.counts):
            before = counts.get(guess.source, (0, 0))
            counts[guess.source] = before[0] + drafted, before[1] + accepted
