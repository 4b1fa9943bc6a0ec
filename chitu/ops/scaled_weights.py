"""Weights with scales, as a GPU keeps them: the form of `triton_ops.py`, and its products of many rows.

Codes are `[out, in]` or `[experts, out, in]`: a byte a number of e4m3, or two a byte of 4 bits, the first in the low
half: 4-bit floats (e2m1) as uint8, integers of -8 to 7 as int8. So the dtype of the codes is their form, for kernels
and for who compares two models. Scales and what is added behind them (zero points) are float32 or float16, one for each
output and run of inputs, whatever the checkpoint has: a scale of a block of 128 x 128 is repeated for its 128 outputs,
which costs a 32nd of the codes, and that of a tensor for all of its outputs. So one kernel computes all forms, joined
matrices keep the scales of each, and a rank's part of a matrix may begin at any output. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from chitu.ops.kept import KeptBlocks, Matrix, Weights
from chitu.ops.kept_on_cards import keeps_on_cards

E2M1_UNIT = 2.0**126
"""A 4-bit float in the highest bits of exponent and fraction of a float32, times this, is its number."""


class Scales(NamedTuple):
    """How codes of a weight become its numbers."""

    factors: torch.Tensor
    """`[..., out, runs]`."""
    run: int
    """Inputs of a run; the last one may have fewer."""
    added: torch.Tensor | None = None
    """What is added behind the product, like `factors`."""
    over: torch.Tensor | None = None
    """Factor of each output's factors, `[..., out]`; their products are rounded to float32."""

    @property
    def runs(self) -> int:
        return self.factors.shape[-1]

    def rows(self, rows: slice) -> Scales:
        """Return those of these outputs."""
        added, over = (None if each is None else each[rows] for each in (self.added, self.over))
        return Scales(self.factors[rows], self.run, added, over)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight `[out, in]`."""

    weight: torch.Tensor
    """Its codes."""
    factors_OR: torch.Tensor
    added_OR: torch.Tensor | None
    over_O: torch.Tensor | None
    run: int
    in_features: int
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Of the rows that it multiplies."""

    @property
    def scales(self) -> Scales:
        return Scales(self.factors_OR, self.run, self.added_OR, self.over_O)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def rows_of(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Return these outputs as numbers, `[T, in]`."""
        factors_TR = self.factors_OR[rows_T].float()
        if self.over_O is not None:
            factors_TR *= self.over_O[rows_T].unsqueeze(1)
        numbers = _numbers(self.weight[rows_T])[:, : self.in_features].mul_(self._by_input(factors_TR))
        if self.added_OR is not None:
            numbers = numbers.add_(self._by_input(self.added_OR[rows_T]))
        return numbers.to(self.dtype)

    def _by_input(self, factors_TR: torch.Tensor) -> torch.Tensor:
        return factors_TR.float().repeat_interleave(self.run, 1)[:, : self.in_features]


@dataclass(frozen=True, slots=True)
class ScaledStack:
    """Weights `[experts, out, in]`."""

    weight: torch.Tensor
    """Their codes."""
    factors_EOR: torch.Tensor
    added_EOR: torch.Tensor | None
    over_EO: torch.Tensor | None
    run: int

    @property
    def scales(self) -> Scales:
        return Scales(self.factors_EOR, self.run, self.added_EOR, self.over_EO)


def is_kept(weight: Matrix, has_e4m3: bool = True) -> bool:
    """Return whether a weight stays small. `has_e4m3`: whether the kernels can read that on the device."""
    return (
        isinstance(weight, KeptBlocks)
        and (has_e4m3 or weight.form != "e4m3")
        and keeps_on_cards(weight.form, weight.run, weight.codes_OI.shape[1])
    )


def scaled_weight(weight: KeptBlocks, bias: torch.Tensor | None) -> ScaledWeight:
    """Return a weight for which `is_kept` holds in the kernels' form."""
    inputs, added_OR = weight.codes_OI.shape[1], weight.added_OR
    return ScaledWeight(
        weight=_codes(weight),
        factors_OR=weight.scales_OR.contiguous(),
        added_OR=None if added_OR is None else added_OR.contiguous(),
        over_O=weight.over_O,
        run=weight.run,
        in_features=inputs,
        bias=bias,
        dtype=weight.dtype,
    )


def scaled_stack(weights: Weights, has_e4m3: bool = True) -> ScaledStack | None:
    """Return the experts' weights in the kernels' form; None unless all stay small, in one form and with equal runs."""
    if isinstance(weights, torch.Tensor):
        return None
    kinds = {
        (each.form, each.run, each.scales_OR.dtype, each.added_OR is None, each.over_O is None) for each in weights
    }
    if len(kinds) != 1 or not all(is_kept(each, has_e4m3) for each in weights):
        return None
    codes_EOI = torch.stack([_codes(each) for each in weights])
    added = [each.added_OR for each in weights if each.added_OR is not None]
    over = [each.over_O for each in weights if each.over_O is not None]
    return ScaledStack(
        weight=codes_EOI,
        factors_EOR=torch.stack([each.scales_OR for each in weights]),
        added_EOR=torch.stack(added) if added else None,
        over_EO=torch.stack(over) if over else None,
        run=weights[0].run,
    )


def _codes(weight: KeptBlocks) -> torch.Tensor:
    """Return the codes in the kernels' form, contiguous."""
    codes_OI = weight.codes_OI
    if weight.form == "e4m3":
        return codes_OI.contiguous().view(torch.float8_e4m3fn)
    if codes_OI.shape[1] % 2:
        codes_OI = torch.nn.functional.pad(codes_OI, (0, 1))
    if weight.form == "int4":
        codes_OI = codes_OI.view(torch.int8) + int(weight.table[0])
    return (codes_OI[:, 0::2] & 0xF | codes_OI[:, 1::2] << 4).contiguous()


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    """Return what codes in the kernels' form stand for without scales, float32."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.float()
    if codes.dtype == torch.int8:
        return torch.stack((codes << 4 >> 4, codes >> 4), dim=2).flatten(1).float()
    halves = torch.stack((codes & 0xF, codes >> 4), dim=2).flatten(1).int()
    return ((halves & 7) << 22 | (halves & 8) << 28).view(torch.float32) * E2M1_UNIT
