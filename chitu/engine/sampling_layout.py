r"""Which work the rows of a batch need, and in which order the sampler does it. Host side, step thread.

Rows that need more than an argmax form the *work matrix*, sorted so that every kind of work is one slice of it:

    edited greedy | edited random | edited random, filtered | random, filtered | random
    \_____________ edited ________________________________/
                    \_____________ drawn ____________________________________________/
                                    \_____ filtered ______________________/

*Edited*: penalties, logit bias, masked stop ids or forbidden tokens change the logits. *Filtered*: by min-p, top-k or
top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chitu.engine.grammar_masks import GrammarRows, GrammarState
from chitu.engine.restrictions import Restriction, Restrictions
from chitu.engine.sampling_ops import FilterNeeds
from chitu.engine.upload import upload_tensor

ROWS_AT_ONCE = 64
"""Rows drawn together on an accelerator; bounds the temporary memory (about 32 bytes a row and vocabulary entry)."""
CPU_ENTRIES_AT_ONCE = 1 << 16
"""Logits drawn together on a CPU. They fit its cache (measured: twice as fast as 16 rows of 152 k)."""


@dataclass(slots=True)
class Edits:
    """Values to add to logits, as a flat list. The cost is proportional to the number of entries."""

    cells: Tensor
    """`row * vocab_size + token id`, int64."""
    values: Tensor
    """float32."""

    def add_to_(self, logits_RV: Tensor) -> None:
        logits_RV.view(-1).index_add_(0, self.cells, self.values)


Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Entries of one row: token ids, each once, and the values to add."""
NO_ENTRIES: Entries = (np.zeros(0, np.int64), np.zeros(0, np.float32))


def entries_of(values: dict[int, float]) -> Entries:
    return np.fromiter(values, np.int64, len(values)), np.fromiter(values.values(), np.float32, len(values))


def edits_of(rows: list[Entries], vocab_size: int, device: torch.device) -> Edits | None:
    """Return the edits with `rows[i]` for row i, or None if there is nothing to add."""
    if not any(len(ids) for ids, _ in rows):
        return None
    cells = np.concatenate([ids + row * vocab_size for row, (ids, _) in enumerate(rows)])
    values = np.concatenate([values for _, values in rows])
    return Edits(upload_tensor(torch.from_numpy(cells), device), upload_tensor(torch.from_numpy(values), device))


@dataclass(slots=True)
class SamplingSlot:
    """Host side state of an admitted slot: which work its rows need."""

    random: bool
    top_k: int
    top_p: float
    filtered: bool
    penalised: bool
    num_tokens: int
    """Prompt and emitted tokens at the last `admit`; if `penalised`, plus those emitted since."""
    bias: Entries
    masked: Entries
    restriction: Restriction | None
    masked_steps: int
    """Number of tokens still to emit before eos and stop ids (`masked`) are allowed."""
    course: GrammarState | None = None

    @property
    def edited(self) -> bool:
        is_limited = self.restriction is not None or self.course is not None
        return self.penalised or len(self.bias[0]) > 0 or self.masked_steps > 0 or is_limited

    @property
    def special(self) -> bool:
        return self.random or self.edited


@dataclass(slots=True)
class LayoutSegment:
    """Contiguous random rows of the work matrix that are drawn together."""

    start: int
    end: int
    filtered: bool
    needs: FilterNeeds


@dataclass(slots=True)
class BatchLayout:
    """Places of the special rows of one batch. Reused while the slots stay the same, so a steady batch plans once."""

    rows: Tensor
    """Rows of the logits that need more than an argmax, in the order of the work matrix."""
    slots: Tensor
    """Slots of `rows`."""
    num_greedy: int
    """Number of edited greedy rows, with which the work matrix begins; the other rows are drawn."""
    num_edited: int
    """Number of edited rows, greedy then random, with which the work matrix begins."""
    bias: Edits | None
    mask: Edits | None
    restrictions: Restrictions | None
    courses: GrammarRows | None
    penalised: Tensor | None
    """Work rows with penalties."""
    penalised_slots: list[int]
    """Slots of the work rows with penalties."""
    segments: list[LayoutSegment]
    masked: list[int]
    """Slots that have not reached min_tokens."""
    any_plain: bool
    sources: Tensor | None
    """For kernels, `[2, N]`: each row's index among the edited rows, and its slot; -1 if it has none."""
    is_cut: bool
    """Whether some row has a top-k or top-p."""

    @property
    def follows(self) -> bool:
        """Whether the tokens are kept here, for penalties, bad words or grammars."""
        has_words = self.restrictions is not None and self.restrictions.words is not None
        return self.penalised is not None or has_words or self.courses is not None


def place(state: SamplingSlot) -> int:
    """Return the sort key of a special row in the work matrix."""
    if not state.random:
        return 0
    if state.edited:
        return 2 if state.filtered else 1
    return 3 if state.filtered else 4


def sources_of(num_rows: int, order: list[int], slots: list[int], num_edited: int) -> list[list[int]]:
    """Return `BatchLayout.sources`. `order`: the special rows in the order of the work matrix."""
    edited, special = [-1] * num_rows, [-1] * num_rows
    for place_in_work, row in enumerate(order):
        special[row] = slots[row]
        if place_in_work < num_edited:
            edited[row] = place_in_work
    return [edited, special]


def rows_at_once(device: torch.device, vocab_size: int) -> int:
    """Return how many rows are drawn together."""
    return max(2, min(ROWS_AT_ONCE, CPU_ENTRIES_AT_ONCE // vocab_size)) if device.type == "cpu" else ROWS_AT_ONCE


def segments_of(ordered: list[SamplingSlot], start: int, most: int) -> list[LayoutSegment]:
    """Cut the random rows from `start` on into segments: where filtering begins or ends, and after `most` rows."""
    segments = []
    while start < len(ordered):
        filtered = ordered[start].filtered
        end = start + 1
        while end < len(ordered) and end - start < most and ordered[end].filtered == filtered:
            end += 1
        part = ordered[start:end]
        segments.append(
            LayoutSegment(
                start=start,
                end=end,
                filtered=filtered,
                needs=FilterNeeds(
                    largest_k=max(state.top_k for state in part),
                    top_p=any(state.top_p < 1.0 for state in part),
                    open_top_p=any(state.top_p < 1.0 and state.top_k == 0 for state in part),
                ),
            )
        )
        start = end
    return segments
