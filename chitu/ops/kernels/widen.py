"""Weights of e4m3 as numbers of a wider dtype, for products of so many rows that torch's are faster than ours.

A number is `code * scale` in float32, rounded once: what a weight is that was dequantised when it was read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.e4m3 import WIDE_NUMBERS
from chitu.ops.scaled_weights import Scales

NUMBERS_AT_ONCE = 1024


@triton.jit
def _widen(codes_ptr, factors_ptr, out_ptr, RUNS, WIDTH: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (outputs, inputs): BLOCK inputs of one output. The outputs are the first dimension of the grid, which has
    no bound that a weight reaches."""
    o = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = c < WIDTH
    codes = tl.load(codes_ptr + o * WIDTH + c, mask=is_in, other=0.0)
    factors = tl.load(factors_ptr + o * RUNS + c // RUN, mask=is_in, other=0.0)
    tl.store(out_ptr + o * WIDTH + c, (codes.to(tl.float32) * factors).to(out_ptr.dtype.element_ty), mask=is_in)


def widened(codes_OI: torch.Tensor, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight of e4m3 in this dtype."""
    num_out, width = codes_OI.shape
    out_OI = torch.empty(num_out, width, dtype=dtype, device=codes_OI.device)
    kernel: Any = _widen[(num_out, triton.cdiv(width, NUMBERS_AT_ONCE))]
    sizes = {"WIDTH": width, "RUN": scales.run, "BLOCK": NUMBERS_AT_ONCE}
    kernel(codes_OI, scales.factors, out_OI, RUNS=scales.runs, **sizes, num_warps=4)
    return out_OI


def wide_linear(
    x_TI: torch.Tensor,
    codes_OI: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    out_TO: torch.Tensor,
    *,
    is_added: bool = False,
    at_once: int = WIDE_NUMBERS,
) -> None:
    """Compute `out = x W^T + b`, or add it to `out`, by products of torch: of as many outputs at once as have `at_once`
    numbers, so the wide weight needs little memory."""
    num_out, width = codes_OI.shape
    if bias is not None and is_added:
        out_TO.add_(bias)
    step = max(1, at_once // width)
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        part_TO, weight_OI = out_TO[:, rows], widened(codes_OI[rows], scales.rows(rows), x_TI.dtype)
        if is_added:
            part_TO.addmm_(x_TI, weight_OI.T)
        elif bias is not None:
            torch.addmm(bias[rows], x_TI, weight_OI.T, out=part_TO)
        else:
            torch.mm(x_TI, weight_OI.T, out=part_TO)
