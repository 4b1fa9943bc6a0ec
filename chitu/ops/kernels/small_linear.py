"""Matrix products of few rows, fused with the operations before and behind them.

A decode step of a small batch reads each weight once for a few rows: it is bound by memory and by the number of
launches, not by arithmetic. So the RMS norm before a product (its factor is multiplied in after the sum), the gate
behind it and the residual are fused: five launches a layer and one or two for attention. The order of a row's sums
depends only on the size class of the batch.

A weight of e4m3 (`ops/scaled_weights.py`) is widened to the dtype of the rows in registers, which is exact. Its scales
multiply sums in float32: one of all inputs the whole sum, one of a run the sum of each block, which never crosses runs.
Numbers of 4 bits are scaled when a block is read (`codes.py`), since runs are as short as 16 inputs; from there on they
are like those of a weight without scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.kernels.attention import is_narrow
from chitu.ops.kernels.codes import is_packed, launched, load_block
from chitu.ops.scaled_weights import Scales

MAX_ROWS = 64
"""Most rows of these kernels. A general matrix product is faster for more."""
STAGES = 3
"""Blocks of the sum that a program loads at once."""
MAX_STAGES = 8
HOPPER_BYTES, SMALLEST_BYTES = 227 << 10, 99 << 10
"""Shared memory of a program: on sm_90 and sm_100, and the least of all devices since sm_80 (sm_86, sm_89)."""


@triton.jit
def _with_product(acc, w, x, scales_of, run, is_out, ROWS: tl.constexpr, RUNS: tl.constexpr):
    """Return the sums with the products of one block. `run`: that the block is in, if a row has several scales."""
    if ROWS == 1:
        part = w.to(tl.float32) * x.to(tl.float32)
    elif RUNS == 0:
        part = tl.dot(w, tl.trans(x), input_precision="ieee")
    else:
        part = tl.dot(w.to(x.dtype), tl.trans(x), input_precision="ieee")
    if RUNS > 1:
        part *= tl.load(scales_of + run, mask=is_out, other=0.0)[:, None]
    return acc + part


@triton.jit(do_not_specialize=["num_rows"])  # else a step with 33 prompts that end compiles what 32 and 48 did not
def _small_linear(
    x_ptr,
    weight_ptr,
    scales_ptr,
    added_ptr,
    over_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    eps,
    num_rows,
    num_out,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_OVER: tl.constexpr,
    ON_SUMS: tl.constexpr,
):
    """Program: OUT outputs of all rows. Gated: output o is `silu(gate_o) up_o`, the weight's rows o and num_out + o.
    RUNS: scales of a row of the weight, each of RUN inputs; 0 if it has none. ON_SUMS: those of them that multiply
    sums."""
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    r = tl.arange(0, ROWS)
    is_out = o < num_out
    gate_row = o.to(tl.int64)
    up_row = (o + num_out).to(tl.int64)
    scales_of = scales_ptr + o * RUNS
    up_scales_of = scales_ptr + (o + num_out) * RUNS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    squares = tl.zeros([ROWS, IN], tl.float32)  # summed once at the end: a sum synchronises all warps
    # One row: products are kept apart and summed once at the end; a tensor core would need 16 rows.
    if ROWS == 1:
        acc = tl.zeros([OUT, IN], tl.float32)
        up_acc = tl.zeros([OUT, IN], tl.float32)
    else:
        acc = tl.zeros([OUT, ROWS], tl.float32)
        up_acc = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, WIDTH, IN):
        c = start + tl.arange(0, IN)
        is_in = c < WIDTH
        x = tl.load(x_ptr + r[:, None] * WIDTH + c[None, :], mask=(r[:, None] < num_rows) & is_in[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + c, mask=is_in, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
        w = load_block(
            weight_ptr,
            scales_ptr,
            added_ptr,
            over_ptr,
            gate_row,
            0,
            is_out,
            start,
            dtype,
            WIDTH,
            OUT,
            IN,
            RUNS,
            RUN,
            UNIT,
            HAS_ADDED,
            HAS_OVER,
        )
        acc = _with_product(acc, w, x, scales_of, start // RUN, is_out, ROWS, ON_SUMS)
        if IS_GATED:
            w = load_block(
                weight_ptr,
                scales_ptr,
                added_ptr,
                over_ptr,
                up_row,
                0,
                is_out,
                start,
                dtype,
                WIDTH,
                OUT,
                IN,
                RUNS,
                RUN,
                UNIT,
                HAS_ADDED,
                HAS_OVER,
            )
            up_acc = _with_product(up_acc, w, x, up_scales_of, start // RUN, is_out, ROWS, ON_SUMS)
    if ROWS == 1:
        y = tl.sum(acc, 1)[:, None]
        up = tl.sum(up_acc, 1)[:, None]
    else:
        y = acc
        up = up_acc
    if ON_SUMS == 1:
        y *= tl.load(scales_of, mask=is_out, other=0.0)[:, None]
        if IS_GATED:
            up *= tl.load(up_scales_of, mask=is_out, other=0.0)[:, None]
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[None, :]
        y = y * factor
        up = up * factor
    if HAS_BIAS:
        y += tl.load(bias_ptr + o, mask=is_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + num_out + o, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        y = y * tl.sigmoid(y) * up
    to = out_ptr + r[None, :] * num_out + o[:, None]
    mask = (r[None, :] < num_rows) & is_out[:, None]
    if IS_ADDED:
        y += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, y.to(dtype).to(out_ptr.dtype.element_ty), mask=mask)  # logits are rounded, too


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a program's work. Depends only on the class of rows and the product, so that equal batches compute
    equally."""

    rows: int
    out: int
    width: int
    warps: int
    stages: int = STAGES


def tiles_for(
    num_rows: int,
    num_out: int,
    narrow: bool = False,
    *,
    has_norm: bool = False,
    is_gated: bool = False,
    shared_bytes: int = HOPPER_BYTES,
    is_hopper: bool = True,
) -> Tiles:
    """Return the fastest tiles of those that an H200 was measured with, for products of 1024 to 14336 numbers: many
    bytes in flight matter most, then that all multiprocessors read. `shared_bytes`: shared memory of a program."""
    if num_rows == 1:
        return Tiles(1, 4 if num_out <= 4096 else 8, 512, 4)
    rows = max(16, triton.next_power_of_2(num_rows))
    if narrow:
        return Tiles(rows, 16 if num_out <= 4096 else 32, 32, 4)
    is_long = num_out > 8192 and not is_gated  # the logits
    if num_out > 4096 and (has_norm or is_gated) and not is_long:
        rows = max(32, rows)  # tiles of 16 rows and 32 outputs took twice as long
    if rows == 16 and is_long:
        tiles = Tiles(rows, 64, 128, 4)
    elif rows == 16:
        tiles = Tiles(rows, 32, 128 if is_gated else 256 if has_norm else 512, 4)
    elif num_out <= 2048 and not is_gated:
        tiles = Tiles(rows, 16, 512 if rows == 32 else 256, 4)
    elif is_gated and not is_hopper:  # Triton 3.6 does not compile the tiles below for sm_100
        tiles = Tiles(rows, 32, 64, 4)
    elif is_gated or (has_norm and rows == 64 and not is_long):
        tiles = Tiles(rows, 64, 128, 8)
    elif is_long:
        tiles = Tiles(rows, 64, 128 if rows == 32 else 64, 4)
    else:
        tiles = Tiles(rows, 64, 256, 4)
    while STAGES * 2 * tiles.width * (tiles.rows + (1 + is_gated) * tiles.out) > shared_bytes:
        tiles = replace(tiles, width=tiles.width // 2)
    return tiles


def scaled_tiles(tiles: Tiles, scales: Scales, shared_bytes: int, is_gated: bool, packed: bool = False) -> Tiles:
    """Return tiles for a weight with scales: none is so wide that registers spill, and blocks of the sum end where runs
    end, unless the codes are `packed` in 4 bits. As many bytes are in flight as before, if memory allows: more stages
    of narrower blocks. Not measured."""
    width = min(tiles.width, scales.run & -scales.run) if scales.runs > 1 and not packed else tiles.width
    if tiles.rows * tiles.out > 1024 or (packed and tiles.rows > 1):
        width = min(width, 128)
    stages = min(MAX_STAGES, tiles.stages * tiles.width // width)
    weight_bytes = (1 + is_gated) * tiles.out // (2 if packed else 1)
    stage_bytes = width * (2 * tiles.rows + weight_bytes)
    return replace(tiles, width=width, stages=max(1, min(stages, shared_bytes // stage_bytes)))


@functools.cache
def chip_of(device: torch.device) -> tuple[int, bool]:
    """Return the shared memory that a program can have there, and whether it is sm_90."""
    if device.type != "cuda":
        return HOPPER_BYTES, True
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SMALLEST_BYTES)), found.major == 9


def small_linear(
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_TO: torch.Tensor,
    *,
    scales: Scales | None = None,
    norm_I: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_added: bool = False,
) -> None:
    """Compute `out = [norm](x) W^T + b`, gated or added to `out`, for at most `MAX_ROWS` rows. `scales`: of a weight
    that stays small. `out` may be float32: its numbers are rounded to the dtype of `x` all the same."""
    num_rows, num_out = out_TO.shape
    device = x_TI.device
    shared_bytes, is_hopper = chip_of(device)
    tiles = tiles_for(
        num_rows,
        num_out,
        is_narrow(x_TI.dtype, device),
        has_norm=norm_I is not None,
        is_gated=is_gated,
        shared_bytes=shared_bytes,
        is_hopper=is_hopper,
    )
    packed = is_packed(weight)
    if scales is not None:
        tiles = scaled_tiles(tiles, scales, shared_bytes, is_gated, packed)
    of_weight: dict[str, Any] = launched(weight, scales, x_TI.shape[1], tiles.width)
    kernel: Any = _small_linear[(triton.cdiv(num_out, tiles.out),)]
    kernel(
        x_ptr=x_TI,
        bias_ptr=bias if bias is not None else x_TI,
        norm_ptr=norm_I if norm_I is not None else x_TI,
        out_ptr=out_TO,
        eps=eps,
        num_rows=num_rows,
        num_out=num_out,
        **of_weight,
        WIDTH=x_TI.shape[1],
        ROWS=tiles.rows,
        OUT=tiles.out,
        IN=tiles.width,
        HAS_NORM=norm_I is not None,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_ADDED=is_added,
        ON_SUMS=0 if packed else of_weight["RUNS"],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
