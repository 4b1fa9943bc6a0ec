"""Weights that stay smaller than float32 in memory: which forms there are, and the float32 numbers that they stand for.

A number is `code * scale`, or `code * scale + added`, in float32, with a scale for each output and run of inputs. Codes
of 4 bits are places in a table of 16 numbers. The kernels (`native.c`) compute with exactly these numbers. Whether a
compiler fuses the product and the sum does not matter: who makes a weight with `added` sees to it that the product is
exact, as that of a code of 8 bits and a scale of 16 bits is. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

Form = Literal["e4m3", "int8", "int4", "e2m1", "table4"]
"""Of codes: floats and integers of 8 bits; of 4 bits integers of -8 to 7, floats, or any 16 numbers."""
WIDE_ROWS = 64
"""Rows that are compared at a time."""


class KeptBlocks(NamedTuple):
    """A weight `[out, in]` that stays small, for operations that keep such."""

    form: Form
    codes_OI: torch.Tensor
    """A byte a number, uint8: e4m3 without NaN, int8, or a place in the table."""
    scales_OR: torch.Tensor
    """Factor of each output and run of inputs, float16 or float32; that of e4m3 is float32."""
    run: int
    """Inputs of a run."""
    added_OR: torch.Tensor | None = None
    """What is added behind the product, in the dtype of the scales."""
    table: tuple[float, ...] = ()
    """The 16 numbers of codes of 4 bits: of `int4` consecutive ones, of `e2m1` those of the codes."""
    dtype: torch.dtype = torch.float32
    """Of the model, to which a weight is rounded if it is dequantised after all."""
    over_O: torch.Tensor | None = None
    """Float32 factor of each output's scales, whose products with it are rounded to float32."""

    def dequantise(self) -> torch.Tensor:
        """Return the weight in the model's dtype."""
        numbers = self._numbers().mul_(self._by_input(self.with_scales_alone().scales_OR))
        if self.added_OR is not None:
            numbers = numbers.add_(self._by_input(self.added_OR))
        return numbers.to(self.dtype)

    def rows(self, rows: slice) -> KeptBlocks:
        """Return these outputs."""
        return self._replace(
            codes_OI=self.codes_OI[rows],
            scales_OR=self.scales_OR[rows],
            added_OR=None if self.added_OR is None else self.added_OR[rows],
            over_O=None if self.over_O is None else self.over_O[rows],
        )

    def with_scales_alone(self) -> KeptBlocks:
        """Return the same numbers without factors of outputs."""
        if self.over_O is None:
            return self
        return self._replace(scales_OR=self.scales_OR.float() * self.over_O.unsqueeze(1), over_O=None)

    def part(self, first: int, count: int) -> KeptBlocks:
        """Return these inputs of all outputs. `first`: of a run."""
        runs = slice(first // self.run, -(-(first + count) // self.run))
        return self._replace(
            codes_OI=self.codes_OI[:, first : first + count],
            scales_OR=self.scales_OR[:, runs],
            added_OR=None if self.added_OR is None else self.added_OR[:, runs],
        )

    def in_runs_of(self, run: int) -> KeptBlocks:
        """Return the same numbers with shorter runs, whose length divides that of the runs. Nothing may be added."""
        num_runs, times = -(-self.codes_OI.shape[1] // run), self.run // run
        return self._replace(scales_OR=self.scales_OR.repeat_interleave(times, 1)[:, :num_runs], run=run)

    def _numbers(self) -> torch.Tensor:
        if self.form == "e4m3":
            return self.codes_OI.view(torch.float8_e4m3fn).float()
        if self.form == "int8":
            return self.codes_OI.view(torch.int8).float()
        table = torch.tensor(self.table, dtype=torch.float32, device=self.codes_OI.device)
        return table[self.codes_OI.int()]

    def _by_input(self, factors_OR: torch.Tensor) -> torch.Tensor:
        return factors_OR.float().repeat_interleave(self.run, 1)[:, : self.codes_OI.shape[1]]


Matrix = torch.Tensor | KeptBlocks
Weights = torch.Tensor | Sequence[KeptBlocks]
"""One matrix for each expert."""


def dequantised(weight: Matrix) -> torch.Tensor:
    """Return the weight as numbers of the model's dtype."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantise()


def stack_of(weights: Weights) -> torch.Tensor:
    """Return the matrices as one tensor, dequantised."""
    return weights if isinstance(weights, torch.Tensor) else torch.stack([each.dequantise() for each in weights])


def below(parts: Sequence[Matrix]) -> Matrix:
    """Return the rows of these matrices one below the other: small if all are and have the same form."""
    kept = [each for each in parts if isinstance(each, KeptBlocks)]
    if len(kept) == len(parts) and len({_kind(each) for each in kept}) > 1:
        kept = _alike(kept)
    if len(kept) < len(parts):
        return torch.cat([dequantised(each) for each in parts])
    added = [each.added_OR for each in kept if each.added_OR is not None]
    over = [each.over_O for each in kept if each.over_O is not None]
    return kept[0]._replace(
        codes_OI=torch.cat([each.codes_OI for each in kept]),
        scales_OR=torch.cat([each.scales_OR for each in kept]),
        added_OR=torch.cat(added) if added else None,
        over_O=torch.cat(over) if over else None,
    )


def _alike(parts: Sequence[KeptBlocks]) -> list[KeptBlocks]:
    """Return weights of several forms as int8 with the shortest of their runs; none if they cannot be so."""
    run = min(each.run for each in parts)
    wide = [each for each in parts if each.form == "e4m3" or each.run % run or not _is_whole(each.table)]
    adds = any(each.added_OR is not None for each in parts)
    return [] if wide else [_as_int8(each, run, adds) for each in parts]


def _is_whole(table: Sequence[float]) -> bool:
    return all(number == int(number) for number in table)


def _as_int8(weight: KeptBlocks, run: int, adds: bool) -> KeptBlocks:
    """Return the same numbers: a table's as codes, a run as several, nothing added as zeros."""
    num_runs = -(-weight.codes_OI.shape[1] // run)

    def spread(factors_OR: torch.Tensor) -> torch.Tensor:
        return factors_OR.float().repeat_interleave(weight.run // run, 1)[:, :num_runs]

    codes, scales, added = weight.codes_OI, spread(weight.with_scales_alone().scales_OR), None
    if weight.table:
        codes = torch.tensor(weight.table, device=codes.device).to(torch.int8)[codes.int()]
    if adds:
        added = torch.zeros_like(scales) if weight.added_OR is None else spread(weight.added_OR)
    return KeptBlocks("int8", codes.view(torch.uint8), scales, run, added, dtype=weight.dtype)


def _kind(weight: KeptBlocks) -> tuple[object, ...]:
    given = weight.added_OR is None, weight.over_O is None
    return weight.form, weight.scales_OR.dtype, weight.run, *given, weight.table


def in_16_bits(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Return a float32 weight in bfloat16 or float16 if that has exactly its numbers, else None. A weight that is
    stored so has, and one that was computed has not within the first rows."""
    for dtype in (torch.bfloat16, torch.float16):
        small = torch.empty(weight_OI.shape, dtype=dtype)
        for first in range(0, weight_OI.shape[0], WIDE_ROWS):
            part, wide = small[first : first + WIDE_ROWS], weight_OI[first : first + WIDE_ROWS]
            part.copy_(wide)
            if not torch.equal(part.float(), wide):
                break
        else:
            return small
    return None
