"""How long the steps of an instance take: measured, fitted to a line, and used to bound the prompt tokens of a step.

Owned by `LoadMeter`, step thread only. Each step with prompt tokens is measured, and one in `DECODE_SAMPLES` of
those without. The two kinds have fits of their own, so that none forgets while only the other kind is computed. A step
counts from its planning, or from the end of the step before if that was later: with overlap, what a stream waits.

A step of a group that shares experts takes as long for all members: as long as the largest chunk of a prompt, beside
the rows of all. So rates are those of such a step, a chunk is bounded beside the streams of all, and a step whose
largest chunk is another member's is not measured: what that one attends to is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from chitu.engine.executor import StepSizes
from chitu.instance.sequences import Sequence as Request
from chitu.protocol import StepRates

DECODE_SAMPLES = 8
"""One in so many steps without prompt tokens is measured; a quarter of that once `FEW` were."""
FEW = 16
MEMORY_STEPS = 64
"""A step that was measured so many measured steps ago counts by 1/e."""
FIRST_TOKENS = 64
"""Prompt tokens of the first step with streams beside them, while nothing is known of their cost."""
GROWTH = 2
"""A step has at most so many times the prompt tokens of the largest measured one: no line holds far beyond that."""
NO_DRAFTS: Mapping[Request, Sequence[int]] = {}
_SCALE = np.array((1.0, 1 / 256, 1 / (1 << 18)))
_RIDGE = np.array((1e-3, 1e-6, 1e-6))
"""Doubt in each coefficient; most in the constant, if all steps had the same size."""


class StepWork(NamedTuple):
    """What a measured step has to do."""

    prompt_tokens: int
    """Of a group: those of the member that has the most."""
    prompt_pairs: int
    """Pairs of a prompt token and one before it: what attention of the chunks reads."""
    rows: int
    """Rows that decode, in a group of all members: one of each request, and those of its draft."""
    context_tokens: int
    """Tokens of KV that those rows read that are computed here."""
    has_drafts: bool = False

    def beside(self, others: Sequence[StepSizes]) -> StepWork | None:
        """Return what the step has to do together with the other members of a group; None if one of these has a larger
        chunk."""
        if any(other.prompt_rows > self.prompt_tokens for other in others):
            return None
        return self._replace(rows=self.rows + _decode_rows(others))


class _Fit:
    """A line through the measured steps, with coefficients of at least 0: the relative errors are least."""

    def __init__(self, scale: Sequence[float]) -> None:
        self._scale = np.array(scale)
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self.count = 0
        self.coefficients = (0.0, 0.0, 0.0)

    def add(self, features: Sequence[float], seconds: float, weight_s: float) -> None:
        x, kept = np.array(features) * self._scale / weight_s, math.exp(-1 / MEMORY_STEPS)
        self._squares *= kept
        self._squares += np.outer(x, x)
        self._products *= kept
        self._products += x * (seconds / weight_s)
        self.count += 1
        if self.count <= DECODE_SAMPLES or self.count % 4 == 0:
            self._solve()

    def _solve(self) -> None:
        used = [0, 1, 2]
        solution = np.zeros(3)
        while used:
            squares = self._squares[np.ix_(used, used)]
            doubt = np.diag(_RIDGE[used] * max(float(np.trace(squares)), 1e-30))
            found = np.linalg.solve(squares + doubt, self._products[used])
            if found.min() >= 0:
                solution[used] = found
                break
            del used[int(found.argmin())]
        self.coefficients = tuple((solution * self._scale).tolist())


class StepPace:
    def __init__(self, tpot_s: float = math.inf, max_tokens: int = 1 << 30) -> None:
        """`tpot_s` is the longest time of a step with prompt tokens beside streams, `max_tokens` the bound of prompt
        tokens without one."""
        self._tpot_s, self._max_tokens = tpot_s, max_tokens
        self._decode = _Fit((1.0, 1 / 16, 1 / 4096))
        self._prompt = _Fit(_SCALE.tolist())
        self._largest = FIRST_TOKENS // GROWTH
        self._chunk_tokens = 0.0
        self._skipped = DECODE_SAMPLES
        self.rates = StepRates()
        self.drafted_steps = 0
        """Steps with drafts that were measured."""
        self._draft_rows, self._tokens_a_row = 0.0, 1.0

    def work_of(
        self,
        chunks: Sequence[tuple[Request, int, int]],
        decoding: Collection[Request],
        drafted: Mapping[Request, Sequence[int]] = NO_DRAFTS,
    ) -> StepWork | None:
        """Return what a step has to do that is to be measured, with its chunks (sequence, start, length) and drafts;
        None for any other."""
        if not chunks:
            self._skipped += 1
            is_rare = drafted and self.drafted_steps < FEW
            is_due = is_rare or self._skipped > DECODE_SAMPLES * (1 if self._decode.count < FEW else 4)
            if not is_due or not decoding:
                return None
            self._skipped = 0
        tokens = sum([length for _, _, length in chunks])
        pairs = sum([length * start + length * (length + 1) // 2 for _, start, length in chunks])
        return StepWork(tokens, pairs, *_rows(decoding, drafted), bool(drafted))

    def note_drafts(self, num_decoding: int, drafted: int, accepted: int) -> None:
        """Take the drafts of a step in which so many requests decoded."""
        self._draft_rows += (drafted / num_decoding - self._draft_rows) / MEMORY_STEPS
        self._tokens_a_row += (1 + accepted / num_decoding - self._tokens_a_row) / MEMORY_STEPS

    def note(self, own: StepWork, seconds: float, others: Sequence[StepSizes] = ()) -> None:
        """Take the time of a step, in which the other members of a group compute so much."""
        work = own.beside(others)
        if work is None:
            self._skipped += DECODE_SAMPLES * 4  # the next one is measured in its place
        if work is None or seconds <= 0:
            return
        if not work.prompt_tokens:
            self._decode.add((1, work.rows, work.context_tokens), seconds, seconds)
            self.drafted_steps += work.has_drafts
        else:
            beside_s = self.rates.step_s(work.rows, work.context_tokens)
            features = (1, work.prompt_tokens, work.prompt_pairs)
            self._prompt.add(features, max(0.0, seconds - beside_s), seconds)
            self._largest = max(self._largest, work.prompt_tokens)
            self._chunk_tokens += (work.prompt_tokens - self._chunk_tokens) / min(self._prompt.count, MEMORY_STEPS)
        self.rates = StepRates(
            *self._decode.coefficients,
            *self._prompt.coefficients,
            self._chunk_tokens,
            self._decode.count,
            self._prompt.count,
            self._draft_rows,
            self._tokens_a_row,
        )

    def most_prompt_tokens(
        self,
        decoding: Collection[Request],
        start: int,
        drafted: Mapping[Request, Sequence[int]] = NO_DRAFTS,
        others: Sequence[StepSizes] = (),
    ) -> int:
        """Return how many prompt tokens the next step may have, the first of them behind `start` others, so that it
        takes `tpot_s` at most with these drafts. `others`: what the other members of a group computed in the last step;
        their streams wait for this one, too. Without streams beside it, or without `tpot_s`, only the bound of all
        steps counts."""
        rows, context = _rows(decoding, drafted)
        rows += _decode_rows(others)
        if not rows or self._tpot_s == math.inf:
            return self._max_tokens
        most = self.rates.prompt_tokens_within(self._tpot_s, rows, context, start)
        return int(min(most, GROWTH * self._largest, self._max_tokens))


def _decode_rows(others: Sequence[StepSizes]) -> int:
    return sum([other.decode_rows for other in others])


def _rows(decoding: Collection[Request], drafted: Mapping[Request, Sequence[int]]) -> tuple[int, int]:
    """Return the rows of these requests and their drafts, and the tokens of KV that they read."""
    rows, context = len(decoding), sum([sequence.kv_len for sequence in decoding])
    for sequence, draft in drafted.items():
        rows += len(draft)
        context += len(draft) * sequence.kv_len
    return rows, context
