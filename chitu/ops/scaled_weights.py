"""Weights of e4m3 with scales, as a GPU keeps them: the form of `triton_ops.py`, and its products of many rows.

Codes are `[out, in]` or `[experts, out, in]` as in the checkpoint, a byte a number. Scales are float32, one for each
output and run of inputs, whatever the checkpoint has: a scale of a block of 128 x 128 is repeated for its 128 outputs,
which costs a 32nd of the codes, and that of a tensor for all of its outputs. So one kernel computes all forms, joined
matrices keep the scales of each, and a rank's part of a matrix may begin at any output. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from chitu.ops.e4m3 import keeps_e4m3
from chitu.ops.kept import KeptBlocks, Matrix, Weights


class Scales(NamedTuple):
    """Factors of a weight's numbers."""

    factors: torch.Tensor
    """Float32 `[..., out, runs]`."""
    run: int
    """Inputs of a run; the last one may have fewer."""

    @property
    def runs(self) -> int:
        return self.factors.shape[-1]

    def rows(self, rows: slice) -> Scales:
        """Return those of these outputs."""
        return Scales(self.factors[rows], self.run)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight of e4m3 `[out, in]`."""

    weight: torch.Tensor
    factors_OR: torch.Tensor
    run: int
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Of the rows that it multiplies."""

    @property
    def scales(self) -> Scales:
        return Scales(self.factors_OR, self.run)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def rows_of(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Return these outputs as numbers, `[T, in]`."""
        factors_TI = self.factors_OR[rows_T].repeat_interleave(self.run, 1)[:, : self.in_features]
        return self.weight[rows_T].float().mul_(factors_TI).to(self.dtype)


@dataclass(frozen=True, slots=True)
class ScaledStack:
    """Weights of e4m3 `[experts, out, in]`."""

    weight: torch.Tensor
    factors_EOR: torch.Tensor
    run: int

    @property
    def scales(self) -> Scales:
        return Scales(self.factors_EOR, self.run)


def is_kept(weight: Matrix) -> bool:
    """Return whether a weight stays in e4m3."""
    return isinstance(weight, KeptBlocks) and keeps_e4m3(weight.form, weight.run, weight.codes_OI.shape[1])


def scaled_weight(weight: KeptBlocks, bias: torch.Tensor | None) -> ScaledWeight:
    """Return a weight for which `is_kept` holds in the kernels' form."""
    codes_OI = weight.codes_OI.contiguous().view(torch.float8_e4m3fn)
    return ScaledWeight(codes_OI, weight.scales_OR.float().contiguous(), weight.run, bias, weight.dtype)


def scaled_stack(weights: Weights) -> ScaledStack | None:
    """Return the experts' weights in the kernels' form; None unless all stay in e4m3 with scales of equal runs."""
    if isinstance(weights, torch.Tensor):
        return None
    runs = {each.run for each in weights}
    if len(runs) != 1 or not all(map(is_kept, weights)):
        return None
    codes_EOI = torch.stack([each.codes_OI for each in weights]).view(torch.float8_e4m3fn)
    return ScaledStack(codes_EOI, torch.stack([each.scales_OR.float() for each in weights]), runs.pop())
