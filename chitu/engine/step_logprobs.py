"""Logprobs of a step's tokens: computed on the device, for the rows that asked, from the model's unmodified logits.

Owned by `ModelRunner`, step thread only. A row is one line of int64, so that one copy brings it to the host with the
tokens: the bits of the token's own logprob (float32), then ids and logprob bits of the most likely tokens. Invariants:
nothing here waits for the device; a step without logprobs costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chitu.engine.upload import upload

ROWS_AT_ONCE = 64
"""Rows computed together. Bounds the temporary memory: two float32 a row and vocabulary entry."""


class Lines(NamedTuple):
    """Logprobs of some of a step's tokens."""

    places: list[int]
    """Indices into the step's tokens."""
    counts: list[int]
    """Number of most likely tokens that each gets of those in its line."""
    lines_MC: Tensor
    """The lines, int64 on the device."""


def logprob_lines(logits_RV: Tensor, tokens_R: Tensor, most: int) -> Tensor:
    """Return lines, int64 `[R, 1 + 2 * most]`, of float32 logits and the tokens taken. `most` is at most V."""
    lines = []
    for start in range(0, logits_RV.shape[0], ROWS_AT_ONCE):
        rows_RV, tokens = logits_RV[start : start + ROWS_AT_ONCE], tokens_R[start : start + ROWS_AT_ONCE]
        total_R1 = rows_RV.logsumexp(dim=-1, keepdim=True)
        top_RK, ids_RK = rows_RV.topk(most, dim=-1)
        pairs = torch.stack([ids_RK, _bits(top_RK - total_R1)], dim=-1).flatten(1)
        lines.append(torch.cat([_bits(rows_RV.gather(1, tokens[:, None]) - total_R1), pairs], dim=1))
    return torch.cat(lines)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long()


def packed_lines(lines_MC: Tensor, counts: Sequence[int]) -> list[bytes]:
    """Pack lines on the host, each with its count of most likely tokens, for `protocol/logprobs.py`."""
    numbers = lines_MC.numpy().astype("<i4")
    return [line[: 1 + 2 * count].tobytes() for line, count in zip(numbers, counts, strict=True)]


def packed_matrix(lines_TC: Tensor) -> bytes:
    """Pack the lines of a prompt, each in full."""
    return lines_TC.numpy().astype("<i4").tobytes()


class StepLogprobs:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[int, int] = {}
        """Most likely tokens wanted, by slot, for slots that ask for logprobs."""

    def admit(self, slot: int, count: int | None) -> None:
        """Note what the slot asks for. `count`: `SamplingParams.logprobs`."""
        self.release(slot)
        if count is not None:
            self._counts[slot] = min(count, self._vocab_size)

    def release(self, slot: int) -> None:
        """Forget what the slot asked for, if anything."""
        self._counts.pop(slot, None)

    def lines(self, logits_RV: Tensor, slots: list[int], tokens_R: Tensor, first_place: int) -> Lines | None:
        """Return lines of a step's tokens from index `first_place` on. `tokens_R[i]` is for `slots[i]`, from row i."""
        if not self._counts:
            return None
        rows = [row for row, slot in enumerate(slots) if slot in self._counts]
        if not rows:
            return None
        if len(rows) < len(slots):
            where = upload(rows, self._device)
            logits_RV, tokens_R = logits_RV.index_select(0, where), tokens_R.index_select(0, where)
        # As wide as the widest of all slots, so that parts of one step can be concatenated. NO_TOKEN has no logprob.
        lines_MC = logprob_lines(logits_RV, tokens_R.clamp(min=0), max(self._counts.values()))
        return Lines([first_place + row for row in rows], [self._counts[slots[row]] for row in rows], lines_MC)


def joined(parts: list[Lines]) -> Lines | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    places = [place for part in parts for place in part.places]
    counts = [count for part in parts for count in part.counts]
    return Lines(places, counts, torch.cat([part.lines_MC for part in parts]))
