"""Blocks of a weight, as every kernel that multiplies by one or widens one reads them (`ops/scaled_weights.py`).

Numbers of 8 bits and more come as they are stored. Codes of 4 bits become numbers in registers: `code * scale + added`
in float32, rounded once to the dtype of the rows, which is what a weight is that was dequantised when it was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chitu.ops.scaled_weights import E2M1_UNIT, Scales

_UNIT = tl.constexpr(E2M1_UNIT)


@triton.jit
def load_block(
    weight_ptr,
    scales_ptr,
    added_ptr,
    over_ptr,
    o,
    below,
    is_out,
    start,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_OVER: tl.constexpr,
):
    """Return the IN numbers from `start` on of the outputs `below` rows under `o`, `[OUT, IN]`, 0 where `is_out` is not
    set: of their own type, or of `dtype` if they are stored in 4 bits. UNIT: inputs of which all have the same scale.
    """
    if weight_ptr.dtype.element_ty == tl.uint8 or weight_ptr.dtype.element_ty == tl.int8:
        BYTES: tl.constexpr = (WIDTH + 1) // 2
        b = start // 2 + tl.arange(0, IN // 2)
        in_weight = is_out[:, None] & (b < BYTES)[None, :]
        pairs = tl.load(weight_ptr + (o * BYTES)[:, None] + below * BYTES + b[None, :], mask=in_weight, other=0)
        if weight_ptr.dtype.element_ty == tl.int8:
            codes = tl.join((pairs << 4) >> 4, pairs >> 4)
            numbers = codes.to(tl.float32)
        else:
            codes = tl.join(pairs & 15, pairs >> 4).to(tl.int32)
            numbers = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * _UNIT
        numbers = tl.reshape(numbers, [OUT, IN // UNIT, UNIT])
        first = start + tl.arange(0, IN // UNIT) * UNIT
        at = (o * RUNS)[:, None] + below * RUNS + (first // RUN)[None, :]
        in_scales = is_out[:, None] & (first < WIDTH)[None, :]
        factors = tl.load(scales_ptr + at, mask=in_scales, other=0.0).to(tl.float32)
        if HAS_OVER:
            factors *= tl.load(over_ptr + o + below, mask=is_out, other=0.0)[:, None]
        numbers *= factors[:, :, None]
        if HAS_ADDED:
            numbers += tl.load(added_ptr + at, mask=in_scales, other=0.0).to(tl.float32)[:, :, None]
        block = tl.reshape(numbers, [OUT, IN]).to(dtype)
    else:
        c = start + tl.arange(0, IN)
        in_weight = is_out[:, None] & (c < WIDTH)[None, :]
        block = tl.load(weight_ptr + (o * WIDTH)[:, None] + below * WIDTH + c[None, :], mask=in_weight, other=0.0)
    return block


def is_packed(codes: torch.Tensor) -> bool:
    """Return whether a byte has two codes."""
    return codes.dtype in (torch.uint8, torch.int8)


def unit_of(scales: Scales, width: int) -> int:
    """Return the inputs of a block of so many of which all have the same scale."""
    return width if scales.runs == 1 else min(width, scales.run & -scales.run)


def launched(codes: torch.Tensor, scales: Scales | None, inputs: int, width: int) -> dict[str, object]:
    """Return what a launch says of a weight that it reads in blocks of `width` inputs."""
    if scales is None:
        given = dict.fromkeys(("weight_ptr", "scales_ptr", "added_ptr", "over_ptr"), codes)
        return {**given, "RUNS": 0, "RUN": inputs, "UNIT": width, "HAS_ADDED": False, "HAS_OVER": False}
    added, over = scales.added, scales.over
    return {
        "weight_ptr": codes,
        "scales_ptr": scales.factors,
        "added_ptr": scales.factors if added is None else added,
        "over_ptr": scales.factors if over is None else over,
        "RUNS": scales.runs,
        "RUN": scales.run,
        "UNIT": unit_of(scales, width) if is_packed(codes) else width,
        "HAS_ADDED": added is not None,
        "HAS_OVER": over is not None,
    }
