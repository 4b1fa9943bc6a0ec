"""A mixture of experts in four launches: a sort of (row, expert) pairs by expert, two grouped products over tiles of
one expert's pairs, and the weighted sum of each row's results in the order of its experts.

Nothing waits for the device and no size depends on the routing, so a step with it can be recorded: there are as many
tiles as the worst routing needs, and unneeded tiles end at once. Pairs of nobody (`Ops.mixture`) get no tile. A row's
result depends only on the row and the size class of the batch. Called by `triton_ops.py` on the step thread.

Experts of e4m3 have scales, which are used as in `small_linear.py`; those of 4 bits are scaled as they are read.

Shapes as in `routing.py`: R = T A pairs; pair r belongs to row r / A. G = 2 I, gate rows first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.interface import ExpertBiases
from chitu.ops.kernels.attention import is_narrow
from chitu.ops.kernels.codes import is_packed, launched, load_block
from chitu.ops.routing_rule import ClampedGate
from chitu.ops.scaled_weights import Scales

PAIRS_AT_ONCE = 1024
COLUMNS = 64
"""Outputs of one program of a product, but for the largest and the smallest products."""
MIN_COLUMNS = 16
LARGE_TILE = 128
"""Pairs of a tile if experts have many."""


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_pairs(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program e: write the pairs of expert e, ascending, to their place in `order`, and its tiles to `tiles`
    (`[tiles, 3]`: expert, first place, pairs). The program behind the last expert writes the unneeded tiles, without
    pairs. Each program counts all pairs itself: they are few bytes, and no program waits for another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, EXPERTS_PAD)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        r = start + tl.arange(0, PAIRS)
        of = tl.load(experts_ptr + r, mask=r < num_pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(of, EXPERTS_PAD)
    tiles_of = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles_of, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    own_tiles = (count + ROWS - 1) // ROWS
    if expert == EXPERTS:
        count = 0
        own_tiles = num_tiles - first_tile
    for start in range(0, own_tiles, TILES):
        t = start + tl.arange(0, TILES)
        to = tiles_ptr + (first_tile + t) * 3
        tl.store(to, tl.zeros([TILES], tl.int32) + expert, mask=t < own_tiles)
        tl.store(to + 1, first + t * ROWS, mask=t < own_tiles)
        tl.store(to + 2, tl.maximum(tl.minimum(count - t * ROWS, ROWS), 0), mask=t < own_tiles)
    if count > 0:
        place = first
        for start in range(0, num_pairs, PAIRS):
            r = start + tl.arange(0, PAIRS)
            of = tl.load(experts_ptr + r, mask=r < num_pairs, other=EXPERTS).to(tl.int32)
            is_own = of == expert
            rank = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(order_ptr + place + rank - 1, r, mask=is_own)
            place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _with_product(acc, x, w, scales_of, run, is_out, RUNS: tl.constexpr):
    """Return the sums with the products of one block, as in `small_linear.py`."""
    if RUNS == 0:
        part = tl.dot(x, tl.trans(w), input_precision="ieee")
    else:
        part = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
    if RUNS > 1:
        part *= tl.load(scales_of + run, mask=is_out, other=0.0)[None, :]
    return acc + part


@triton.jit
def _grouped_product(
    x_ptr,
    weight_ptr,
    scales_ptr,
    added_ptr,
    over_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    bias_ptr,
    per_row,
    num_out,
    alpha,
    limit,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    IS_GATED: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_OVER: tl.constexpr,
    ON_SUMS: tl.constexpr,
):
    """Program (columns, tile): OUT outputs of a tile's pairs by their expert's weight, to the pairs' rows of `out`.
    Gated: input is the pair's row, output o is `silu(gate_o) up_o`, or what `ClampedGate` says. Else the input is the
    first product's result."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    count = tl.load(tile_ptr + 2)
    if count > 0:
        expert = tl.load(tile_ptr).to(tl.int64)
        place = tl.load(tile_ptr + 1)
        m = tl.arange(0, ROWS)
        pair = tl.load(order_ptr + place + m, mask=m < count, other=0)
        row = pair
        if IS_GATED:
            row = pair // per_row
        o = tl.program_id(0) * OUT + tl.arange(0, OUT)
        is_out = o < num_out
        x_of = row.to(tl.int64) * WIDTH
        rows_of_expert = num_out
        if IS_GATED:
            rows_of_expert = 2 * num_out
        weight_row = expert * rows_of_expert + o
        scales_of = scales_ptr + weight_row * RUNS
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        acc = tl.zeros([ROWS, OUT], tl.float32)
        up_acc = tl.zeros([ROWS, OUT], tl.float32)
        for start in range(0, WIDTH, IN):
            c = start + tl.arange(0, IN)
            is_in = c < WIDTH
            x = tl.load(x_ptr + x_of[:, None] + c[None, :], mask=(m < count)[:, None] & is_in[None, :], other=0.0)
            w = load_block(
                weight_ptr,
                scales_ptr,
                added_ptr,
                over_ptr,
                weight_row,
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
            acc = _with_product(acc, x, w, scales_of, start // RUN, is_out, ON_SUMS)
            if IS_GATED:
                w = load_block(
                    weight_ptr,
                    scales_ptr,
                    added_ptr,
                    over_ptr,
                    weight_row,
                    num_out,
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
                up_acc = _with_product(up_acc, x, w, scales_of + num_out * RUNS, start // RUN, is_out, ON_SUMS)
        if ON_SUMS == 1:
            acc *= tl.load(scales_of, mask=is_out, other=0.0)[None, :]
            if IS_GATED:
                up_acc *= tl.load(scales_of + num_out, mask=is_out, other=0.0)[None, :]
        if HAS_BIAS:
            bias_of = bias_ptr + expert * rows_of_expert + o
            acc += tl.load(bias_of, mask=is_out, other=0.0).to(tl.float32)[None, :]
            if IS_GATED:
                up_acc += tl.load(bias_of + num_out, mask=is_out, other=0.0).to(tl.float32)[None, :]
        y = acc
        if IS_GATED and IS_CLAMPED:
            # Comparisons, so that a NaN stays one.
            gate = tl.where(acc > limit, limit, acc)
            up = tl.where(up_acc > limit, limit, tl.where(up_acc < -limit, -limit, up_acc))
            y = gate * tl.sigmoid(gate * alpha) * (up + 1.0)
        if IS_GATED and not IS_CLAMPED:
            y = acc * tl.sigmoid(acc) * up_acc
        to = out_ptr + pair.to(tl.int64)[:, None] * num_out + o[None, :]
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=(m < count)[:, None] & is_out[None, :])


@triton.jit
def _weighted_sum(y_ptr, weights_ptr, out_ptr, per_row, width, BLOCK: tl.constexpr):
    """Program (row, columns): the weighted sum of the row's pairs. One of weight 0 may be of nobody: its row of `y` was
    never written."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(per_row):
        pair = row * per_row + index
        weight = tl.load(weights_ptr + pair)
        y = tl.load(y_ptr + pair * width + c, mask=c < width, other=0.0).to(tl.float32)
        total += tl.where(weight == 0, 0.0, y * weight)
    tl.store(out_ptr + row * width + c, total.to(out_ptr.dtype.element_ty), mask=c < width)


def tile_rows_for(num_pairs: int, num_experts: int, narrow: bool = False, is_scaled: bool = False) -> int:
    """Return the pairs of a tile: few if experts have few pairs, since padding of a tile is computed in vain. Sums of
    the largest need the registers that weights with scales have for these."""
    if narrow or num_pairs <= 16 * num_experts:
        return 16
    return 64 if num_pairs <= 64 * num_experts or is_scaled else LARGE_TILE


def columns_for(
    num_out: int, tile_rows: int, num_programs_a_column: int, num_multiprocessors: int, *, is_gated: bool
) -> int:
    """Return the outputs of a program, so that a large tile has 128 columns, and a few tiles of few pairs are enough
    programs for the device. A gated program computes as many gates as ups. `num_programs_a_column`: most tiles with
    pairs."""
    if tile_rows == LARGE_TILE:
        return COLUMNS if is_gated else 2 * COLUMNS
    columns = COLUMNS
    while (
        tile_rows == 16
        and columns > MIN_COLUMNS
        and num_programs_a_column * triton.cdiv(num_out, columns) < 2 * num_multiprocessors
    ):
        columns //= 2
    return columns


def product_warps(tile_rows: int, is_gated: bool, scales: Scales | None) -> int:
    """Return the warps of a program. With scales of blocks it holds two products more in registers, or numbers."""
    if tile_rows == LARGE_TILE:
        return 8
    return 8 if tile_rows == 64 and is_gated and scales is not None and scales.runs > 1 else 4


def product_width(tile_rows: int, scales: Scales | None, packed: bool, is_float32: bool) -> int:
    """Return the inputs of a block: of scales of sums no more than a run; few where numbers of 4 bits become float32
    operands, which would spill registers."""
    width = 128 if tile_rows == 16 else 64
    if packed:
        return 32 if is_float32 else width
    return min(width, scales.run & -scales.run) if scales is not None and scales.runs > 1 else width


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return the tiles that the worst routing needs: each expert with pairs may have one tile that is not full."""
    return num_pairs // tile_rows + min(num_pairs, num_experts)


def sort_pairs(experts_TA: torch.Tensor, num_experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `order`, int32 `[R]`, pairs by expert and then ascending, and `tiles`, int32 `[tiles, 3]`: expert, first
    place in `order`, number of pairs (0 if the tile is not needed)."""
    num_pairs = experts_TA.numel()
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    order_R = torch.empty(num_pairs, dtype=torch.int32, device=experts_TA.device)
    tiles_Y3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=experts_TA.device)
    kernel: Any = _sort_pairs[(num_experts + 1,)]
    kernel(
        experts_TA.contiguous(),
        order_R,
        tiles_Y3,
        num_pairs,
        num_tiles,
        EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts + 1),
        ROWS=tile_rows,
        PAIRS=PAIRS_AT_ONCE if num_pairs > PAIRS_AT_ONCE else max(16, triton.next_power_of_2(num_pairs)),
        TILES=16,
        num_warps=4,
    )
    return order_R, tiles_Y3


def mixture(
    x_TD: torch.Tensor,
    experts_TA: torch.Tensor,
    weights_TA: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDI: torch.Tensor,
    gate_up_scales: Scales | None = None,
    down_scales: Scales | None = None,
    biases: ExpertBiases | None = None,
    gate: ClampedGate | None = None,
    num_multiprocessors: int = 1,
) -> torch.Tensor:
    """Return `[T, D]`: for each row the sum of `weight * down(silu(gate(x)) up(x))` over its experts. The scales are of
    weights that stay small; `gate` takes the place of silu and product. `num_multiprocessors`: of the device, which
    small steps shall fill."""
    num_experts, hidden = down_EDI.shape[:2]
    inner = gate_up_EGD.shape[1] // 2
    num_pairs, per_row = experts_TA.numel(), experts_TA.shape[1]
    narrow, is_scaled = is_narrow(x_TD.dtype, x_TD.device), gate_up_scales is not None or down_scales is not None
    tile_rows = tile_rows_for(num_pairs, num_experts, narrow, is_scaled)
    order_R, tiles_Y3 = sort_pairs(experts_TA, num_experts, tile_rows)
    inner_RI, y_RD = x_TD.new_empty(num_pairs, inner), x_TD.new_empty(num_pairs, hidden)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    x_TD = x_TD.contiguous()
    of_gate_up, of_down = (None, None) if biases is None else biases
    sorted_pairs = order_R, tiles_Y3, per_row, tile_rows, min(num_pairs, num_experts), num_multiprocessors
    _product(x_TD, gate_up_EGD, gate_up_scales, of_gate_up, inner_RI, *sorted_pairs, is_gated=True, gate=gate)
    _product(inner_RI, down_EDI, down_scales, of_down, y_RD, *sorted_pairs, is_gated=False)
    block = min(1024, triton.next_power_of_2(hidden))
    kernel: Any = _weighted_sum[(x_TD.shape[0], triton.cdiv(hidden, block))]
    kernel(y_RD, weights_TA.contiguous(), out_TD, per_row, hidden, BLOCK=block, num_warps=4)
    return out_TD


def _product(
    x: torch.Tensor,
    weight_EOI: torch.Tensor,
    scales: Scales | None,
    bias_EO: torch.Tensor | None,
    out_RO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_Y3: torch.Tensor,
    per_row: int,
    tile_rows: int,
    most_experts: int,
    num_multiprocessors: int,
    *,
    is_gated: bool,
    gate: ClampedGate | None = None,
) -> None:
    num_out, packed = out_RO.shape[1], is_packed(weight_EOI)
    width = product_width(tile_rows, scales, packed, x.dtype == torch.float32)
    columns = columns_for(num_out, tile_rows, most_experts, num_multiprocessors, is_gated=is_gated)
    # Columns first: the programs that share a tile's rows run together, and so do those that share an expert.
    of_weight: dict[str, Any] = launched(weight_EOI, scales, x.shape[1], width)
    kernel: Any = _grouped_product[(triton.cdiv(num_out, columns), tiles_Y3.shape[0])]
    kernel(
        x_ptr=x,
        order_ptr=order_R,
        tiles_ptr=tiles_Y3,
        out_ptr=out_RO,
        bias_ptr=bias_EO if bias_EO is not None else x,
        per_row=per_row,
        num_out=num_out,
        alpha=gate.alpha if gate is not None else 0.0,
        limit=gate.limit if gate is not None else 0.0,
        **of_weight,
        WIDTH=x.shape[1],
        ROWS=tile_rows,
        OUT=columns,
        IN=width,
        IS_GATED=is_gated,
        HAS_BIAS=bias_EO is not None,
        IS_CLAMPED=gate is not None,
        ON_SUMS=0 if packed else of_weight["RUNS"],
        num_warps=product_warps(tile_rows, is_gated, scales),
        num_stages=3,
    )
