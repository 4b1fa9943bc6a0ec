"""Weights that stay small as numbers of a wider dtype, for products of so many rows that torch's are faster than ours.

A number is `code * scale + added` in float32, rounded once: what a weight is that was dequantised when it was read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.kept_on_cards import WIDE_NUMBERS
from chitu.ops.kernels.codes import is_packed, launched, load_block
from chitu.ops.scaled_weights import Scales

NUMBERS_AT_ONCE = 1024


@triton.jit
def _widen(
    weight_ptr,
    scales_ptr,
    added_ptr,
    over_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_OVER: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Program (outputs, inputs): BLOCK inputs of one output. The outputs are the first dimension of the grid, which has
    no bound that a weight reaches. IS_SCALED: whether numbers are scaled as they are read."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    o = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    start = tl.program_id(1) * BLOCK
    c = start + tl.arange(0, BLOCK)
    is_in = (c < WIDTH)[None, :]
    numbers = load_block(
        weight_ptr,
        scales_ptr,
        added_ptr,
        over_ptr,
        o,
        0,
        o >= 0,
        start,
        dtype,
        WIDTH,
        1,
        BLOCK,
        RUNS,
        RUN,
        UNIT,
        HAS_ADDED,
        HAS_OVER,
    )
    if not IS_SCALED:
        factors = tl.load(scales_ptr + (o * RUNS)[:, None] + (c // RUN)[None, :], mask=is_in, other=0.0)
        numbers = (numbers.to(tl.float32) * factors).to(dtype)
    tl.store(out_ptr + (o * WIDTH)[:, None] + c[None, :], numbers, mask=is_in)


def widened(codes_OI: torch.Tensor, scales: Scales, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight of so many inputs that stays small in this dtype."""
    num_out = codes_OI.shape[0]
    out_OI = torch.empty(num_out, inputs, dtype=dtype, device=codes_OI.device)
    kernel: Any = _widen[(num_out, triton.cdiv(inputs, NUMBERS_AT_ONCE))]
    of_weight: dict[str, Any] = launched(codes_OI, scales, inputs, NUMBERS_AT_ONCE)
    kernel(
        out_ptr=out_OI,
        WIDTH=inputs,
        BLOCK=NUMBERS_AT_ONCE,
        IS_SCALED=is_packed(codes_OI),
        **of_weight,
        num_warps=4,
    )
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
    num_out, width = out_TO.shape[1], x_TI.shape[1]
    if bias is not None and is_added:
        out_TO.add_(bias)
    step = max(1, at_once // width)
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        part_TO, weight_OI = out_TO[:, rows], widened(codes_OI[rows], scales.rows(rows), width, x_TI.dtype)
        if is_added:
            part_TO.addmm_(x_TI, weight_OI.T)
        elif bias is not None:
            torch.addmm(bias[rows], x_TI, weight_OI.T, out=part_TO)
        else:
            torch.mm(x_TI, weight_OI.T, out=part_TO)
