"""Grammar masks, from a matcher on the host to the logits of each row. Owned by the sampler; step thread.

A matcher must have consumed a row's newest token before the next mask can be made. If steps overlap, that token may
still be on its way to the host when the next step has been launched up to its logits. It is copied behind its own step,
and `PendingTokens` waits for it before the masks are made, while the device computes.

A mask has one bit a token. The host combines it with the row's other limits: `allowed_token_ids` (the request fails if
they leave no token that the grammar allows), and the eos and stop ids that `min_tokens` masks, which the grammar
overrides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chitu.engine.upload import upload, upload_tensor
from chitu.errors import InvalidRequest
from chitu.grammars import Matcher
from chitu.protocol import SamplingParams

Bits = npt.NDArray[np.uint32]
"""One bit a token, the first token in the lowest bit."""


def bits_of(ids: Iterable[int], vocab_size: int) -> Bits:
    """Return a mask with the bits of these ids. Leaves out ids outside the vocabulary."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


@dataclass(slots=True)
class GrammarState:
    """Grammar state of one slot."""

    matcher: Matcher
    allowed: Bits | None
    """Mask of `allowed_token_ids`."""
    held_back: Bits | None
    """Mask of eos and stop ids, until min_tokens."""

    @classmethod
    def of(cls, matcher: Matcher, params: SamplingParams, masked: Sequence[int], vocab_size: int) -> GrammarState:
        return cls(
            matcher,
            bits_of(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None,
            bits_of(masked, vocab_size) if masked else None,
        )

    def mask(self) -> Bits:
        """Return the mask of the next token, with at least one bit. Raises InvalidRequest if no token is allowed."""
        bits = self.matcher.mask()
        if self.allowed is not None:
            bits &= self.allowed
            if not bits.any():
                raise InvalidRequest("allowed_token_ids leave no token that the grammar of this request allows here")
        if self.held_back is not None and (bits & ~self.held_back).any():
            bits &= ~self.held_back
        return bits


@dataclass(slots=True)
class GrammarRows:
    """Grammar states of the edited rows of a batch."""

    rows: list[int]
    """Rows of the work matrix that have a grammar."""
    rows_R: Tensor
    slots: list[int]
    courses: list[GrammarState]

    @classmethod
    def of(cls, rows: Sequence[GrammarState | None], slots: Sequence[int], device: torch.device) -> GrammarRows | None:
        """Return the states, `rows[i]` and `slots[i]` being those of work row i, or None if no row has a grammar."""
        places = [row for row, course in enumerate(rows) if course is not None]
        if not places:
            return None
        courses = [course for course in rows if course is not None]
        return cls(places, upload(places, device), [slots[row] for row in places], courses)

    def apply_(self, work: Tensor) -> dict[int, str]:
        """Set forbidden tokens of the edited rows `[rows, vocab]` to -inf. Return, by slot, why no token is allowed;
        such a row stays as it is."""
        failures: dict[int, str] = {}
        num_words = -(-work.shape[1] // 32)
        masks = np.full((len(self.rows), num_words), 0xFFFFFFFF, np.uint32)
        for i, course in enumerate(self.courses):
            try:
                masks[i] = course.mask()
            except InvalidRequest as error:
                failures[self.slots[i]] = error.message
        packed_RW = upload_tensor(torch.from_numpy(masks.view(np.int32)), work.device)
        logits_RV = work.index_select(0, self.rows_R)
        logits_RV.masked_fill_(forbidden(packed_RW, work.shape[1]), -torch.inf)
        work.index_copy_(0, self.rows_R, logits_RV)
        return failures


def forbidden(packed_RW: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens have no bit in packed masks (int32), as bool `[R, V]`."""
    bits_32 = torch.arange(32, dtype=torch.int32, device=packed_RW.device)
    return ((packed_RW[:, :, None] >> bits_32) & 1).view(packed_RW.shape[0], -1)[:, :vocab_size] == 0


class PendingTokens:
    """Tokens that matchers have not consumed yet: those of the newest step."""

    def __init__(self, device: torch.device) -> None:
        self._is_async = device.type == "cuda"
        self._owed: list[tuple[list[GrammarState], Tensor, torch.cuda.Event | None]] = []

    def note(self, rows: GrammarRows, order_R: Tensor, tokens_N: Tensor) -> None:
        """Start the copy of these rows' tokens to the host. `order_R`: each work row's index in `tokens_N`."""
        tokens = tokens_N.index_select(0, order_R.index_select(0, rows.rows_R))
        event = None
        if self._is_async:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._owed.append((rows.courses, tokens, event))

    def settle(self) -> None:
        for courses, tokens, event in self._owed:
            if event is not None:
                event.synchronize()
            for course, token in zip(courses, tokens.tolist(), strict=True):
                course.matcher.consume([token])
        self._owed = []
