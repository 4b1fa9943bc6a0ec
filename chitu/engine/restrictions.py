"""Which tokens a request may emit: `allowed_token_ids` and `bad_words`. Owned by the sampler; step thread.

A bad word is a sequence of tokens: its last one is forbidden if the request has just emitted the ones before it. The
device tracks emitted tokens, because a token may not have been read yet when the next one is drawn. `allowed_token_ids`
override bad words: if these forbid all allowed tokens, an allowed one is drawn all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chitu.engine.upload import upload, upload_tensor
from chitu.protocol import MAX_BAD_WORD_TOKENS, SamplingParams

NEVER = -1e28
"""Added to the logit of a forbidden token, so that its weight is 0 beside that of any other token. Finite and small
enough for float32, even if every bad word of a request adds it and the lowest temperature divides the sum."""
HISTORY = MAX_BAD_WORD_TOKENS - 1
"""Number of newest emitted tokens that bad words can depend on."""
ANY, NONE = -1, -2
"""In a history: ANY matches every token, NONE is no token."""


@dataclass(slots=True)
class Restriction:
    """Restrictions of one request, on the host."""

    allowed: npt.NDArray[np.int64]
    """Allowed token ids; empty means all."""
    before_EH: npt.NDArray[np.int64]
    """For each bad word, the tokens before its last one; shorter words begin with ANY."""
    last_E: npt.NDArray[np.int64]


def restriction_of(params: SamplingParams, vocab_size: int) -> Restriction | None:
    """Return the restriction, or None if every token is allowed. Leaves out ids outside the vocabulary."""
    allowed = sorted({t for t in params.allowed_token_ids if 0 <= t < vocab_size})
    words = [word for word in params.bad_words if word and min(word) >= 0 and max(word) < vocab_size]
    if not allowed and not words:
        return None
    before = [[ANY] * (HISTORY + 1 - len(word)) + list(word[:-1]) for word in words]
    return Restriction(
        np.array(allowed, np.int64),
        np.array(before, np.int64).reshape(len(words), HISTORY),
        np.array([word[-1] for word in words], np.int64),
    )


@dataclass(slots=True)
class _Words:
    """Bad words of a batch."""

    slots_E: Tensor
    before_EH: Tensor
    cells_E: Tensor
    """`work row * vocab_size + last token`."""
    followed: Tensor
    """Work rows whose emitted tokens go into the history."""


@dataclass(slots=True)
class Restrictions:
    """Restrictions of the edited rows of a batch, on the device."""

    open_rows: Tensor | None
    """Work rows with allowed tokens."""
    open_cells: Tensor | None
    words: _Words | None

    def apply_(self, work: Tensor, history: Tensor) -> None:
        """Apply to the edited rows `[rows, vocab]`. `history` `[slots, HISTORY]`: the newest tokens of each slot."""
        flat = work.view(-1)
        if self.open_rows is not None and self.open_cells is not None:
            kept = flat.take(self.open_cells)
            work.index_fill_(0, self.open_rows, -torch.inf)
            flat[self.open_cells] = kept
        if self.words is not None:
            words = self.words
            is_before = (words.before_EH == history.index_select(0, words.slots_E)).logical_or_(words.before_EH == ANY)
            flat.index_add_(0, words.cells_E, is_before.all(dim=1).to(flat.dtype).mul_(NEVER))


def restrictions_of(
    rows: Sequence[Restriction | None], slots: Sequence[int], vocab_size: int, device: torch.device
) -> Restrictions | None:
    """Return the restrictions, `rows[i]` and `slots[i]` being those of work row i, or None if there are none."""
    if not any(rows):
        return None
    allowed = [(row, one.allowed) for row, one in enumerate(rows) if one is not None and len(one.allowed)]
    worded = [(row, one) for row, one in enumerate(rows) if one is not None and len(one.last_E)]

    def placed(array: npt.NDArray[np.int64]) -> Tensor:
        return upload_tensor(torch.from_numpy(array), device)

    words = None
    if worded:
        words = _Words(
            slots_E=placed(np.repeat([slots[row] for row, _ in worded], [len(one.last_E) for _, one in worded])),
            before_EH=placed(np.concatenate([one.before_EH for _, one in worded])),
            cells_E=placed(np.concatenate([one.last_E + row * vocab_size for row, one in worded])),
            followed=upload([row for row, _ in worded], device),
        )
    return Restrictions(
        open_rows=upload([row for row, _ in allowed], device) if allowed else None,
        open_cells=placed(np.concatenate([ids + row * vocab_size for row, ids in allowed])) if allowed else None,
        words=words,
    )
