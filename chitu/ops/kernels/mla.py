"""Latent attention (`models/layers.py`) on paged rows of a latent and a rotated key: append, query, attention.

All heads attend to the same rows, which are both keys and values, so a program takes enough queries to fill a tensor
core: the heads of one decoding row, or one head of a tile's rows. It reads each row of the cache once for all of them.
Decoding rows are split over programs as in `attention.py`, whose second kernel joins them. Only the loops depend on
lengths, so all of it can be recorded. In pages of e4m3 (`ops/fp8_pages.py`) a row, latent and key together, has one
scale. Called by `triton_ops.py` on the step thread.

Shapes: H heads, L latent, R rotated part, C = L + R, N the part of q that goes through the key weight, S page size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.interface import TILE_ROWS, LatentHeads, RotaryTable
from chitu.ops.kernels.attention import LOG2_E, decode_scratch, is_narrow, joined
from chitu.ops.kernels.fp8 import magnitude, mix, row_scale, scale_at, to_e4m3

KEYS = 32
"""Rows of the cache that a program processes at once."""
FLOAT32_KEYS = 16
FLOAT32_QUERIES = 16
MAX_QUERIES = 32
"""Most heads of a decoding row, or rows of a tile, in one program. Their sums over a latent of 512 fill the registers
of eight warps; 64 would spill."""


@triton.jit
def _latent_append(
    kv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    pages_ptr,
    eps,
    row_stride,
    page_stride,
    table_stride,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Program (row): norm the latent, rotate the key, store one behind the other."""
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    page = tl.load(table_ptr + tl.load(slots_ptr + row) * table_stride + position // PAGE).to(tl.int64)
    to = pages_ptr + page * page_stride + (position % PAGE) * (LATENT + 2 * HALF)
    own_ptr = kv_ptr + row.to(tl.int64) * row_stride
    c = tl.arange(0, LATENT_PAD)
    x = tl.load(own_ptr + c, mask=c < LATENT, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + c, mask=c < LATENT, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * weight
    h = tl.arange(0, HALF_PAD)
    is_in = h < HALF
    cos = tl.load(cos_ptr + position * HALF + h, mask=is_in, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + h, mask=is_in, other=0.0)
    first = tl.load(own_ptr + LATENT + h, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(own_ptr + LATENT + HALF + h, mask=is_in, other=0.0).to(tl.float32)
    low = first * cos - second * sin
    high = second * cos + first * sin
    if IS_FP8:
        largest = tl.maximum(tl.max(magnitude(low), 0), tl.max(magnitude(high), 0))
        largest = tl.maximum(largest, tl.max(magnitude(normed), 0))
        own_scale = row_scale(largest)
        tl.store(to + c, to_e4m3(normed, own_scale), mask=c < LATENT)
        tl.store(to + LATENT + h, to_e4m3(low, own_scale), mask=is_in)
        tl.store(to + LATENT + HALF + h, to_e4m3(high, own_scale), mask=is_in)
        scale_ptr = scale_at(pages_ptr, page * page_stride, position % PAGE, PAGE, LATENT + 2 * HALF)
        tl.store(scale_ptr, own_scale)
    else:
        tl.store(to + c, normed.to(pages_ptr.dtype.element_ty), mask=c < LATENT)
        tl.store(to + LATENT + h, low.to(pages_ptr.dtype.element_ty), mask=is_in)
        tl.store(to + LATENT + HALF + h, high.to(pages_ptr.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def _latent_query(
    absorbed_ptr,
    q_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    out_ptr,
    row_stride,
    head_stride,
    num_rows,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Program (row, head): store the query's first part, already multiplied by the key weight, and its rotated rest."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to = out_ptr + (row * HEADS + head) * (LATENT + 2 * HALF)
    c = tl.arange(0, LATENT_PAD)
    absorbed = tl.load(absorbed_ptr + (head * num_rows + row) * LATENT + c, mask=c < LATENT, other=0.0)
    tl.store(to + c, absorbed, mask=c < LATENT)
    position = tl.load(positions_ptr + row)
    own_ptr = q_ptr + row * row_stride + head * head_stride + NOPE
    h = tl.arange(0, HALF_PAD)
    is_in = h < HALF
    cos = tl.load(cos_ptr + position * HALF + h, mask=is_in, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + h, mask=is_in, other=0.0)
    first = tl.load(own_ptr + h, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(own_ptr + HALF + h, mask=is_in, other=0.0).to(tl.float32)
    tl.store(to + LATENT + h, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(to + LATENT + HALF + h, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _latent_attend(
    q_ptr,
    pages_ptr,
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    scale,
    page_stride,
    table_stride,
    num_splits,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_PREFILL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Prefill: program (tile, head, part of the tile), queries are rows. Decode: (row, head block, split), heads."""
    m = tl.arange(0, QUERIES)
    if IS_PREFILL:
        # The last tiles of a prompt have the most keys, so they start first.
        tile_ptr = tiles_ptr + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
        num_rows = tl.load(tile_ptr + 1)
        first_position = tl.load(tile_ptr + 3)
        in_tile = tl.program_id(2) * QUERIES + m
        query = (tl.load(tile_ptr) + in_tile) * HEADS + tl.program_id(1)
        is_query = in_tile < num_rows
        slot = tl.load(tile_ptr + 2)
        last = first_position + in_tile
        first = first_position * 0
        # An empty tile pads a CUDA graph's list.
        is_needed = num_rows > tl.program_id(2) * QUERIES
        end = tl.where(is_needed, first_position + tl.minimum(num_rows, (tl.program_id(2) + 1) * QUERIES), 0)
    else:
        row = tl.program_id(0)
        head = tl.program_id(1) * QUERIES + m
        query = (row * HEADS + head).to(tl.int64)
        is_query = head < HEADS
        slot = tl.load(slots_ptr + row)
        position = tl.load(positions_ptr + row)
        last = position + m * 0
        per_split = tl.cdiv(tl.cdiv(position + 1, KEYS), num_splits) * KEYS
        first = tl.program_id(2) * per_split
        end = tl.minimum(position + 1, first + per_split)
    own_pages = table_ptr + slot * table_stride
    c = tl.arange(0, LATENT_PAD)
    r = tl.arange(0, ROPE_PAD)
    from_q = q_ptr + query[:, None] * (LATENT + ROPE)
    q = tl.load(from_q + c[None, :], mask=is_query[:, None] & (c < LATENT)[None, :], other=0.0)
    q_rope = tl.load(from_q + LATENT + r[None, :], mask=is_query[:, None] & (r < ROPE)[None, :], other=0.0)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, LATENT_PAD], tl.float32)
    for start in range(first, end, KEYS):
        t = start + tl.arange(0, KEYS)
        is_key = t < end
        page = tl.load(own_pages + t // PAGE, mask=is_key, other=0).to(tl.int64)
        page_start = page * page_stride
        from_page = pages_ptr + (page_start + (t % PAGE) * (LATENT + ROPE))[:, None]
        latent = tl.load(from_page + c[None, :], mask=is_key[:, None] & (c < LATENT)[None, :], other=0.0)
        key = tl.load(from_page + LATENT + r[None, :], mask=is_key[:, None] & (r < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent.to(q.dtype)), input_precision="ieee")
        scores = (scores + tl.dot(q_rope, tl.trans(key.to(q.dtype)), input_precision="ieee")) * scale
        if IS_FP8:
            row_scales = tl.load(scale_at(pages_ptr, page_start, t % PAGE, PAGE, LATENT + ROPE), mask=is_key, other=0.0)
            scores *= row_scales[None, :]
        is_seen = is_key[None, :] & (t[None, :] <= last[:, None])
        if FIRST > 0:  # less than KEYS, so each row sees a key of the first block; what only pads a tile is not stored
            is_seen &= (t >= FIRST)[None, :] | (t[None, :] == last[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if IS_FP8:
            acc = acc * shrink[:, None] + mix(weights, latent, row_scales, q.dtype)
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        top = new_top
    is_out = is_query[:, None] & (c < LATENT)[None, :]
    if IS_SPLIT:
        # An empty split writes no partial result; its -inf makes the second kernel skip it.
        split = tl.program_id(2)
        lse = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-38)), -float("inf"))
        tl.store(lse_ptr + query * num_splits + split, lse, mask=is_query)
        if end > first:
            to = (query[:, None] * num_splits + split) * LATENT + c[None, :]
            tl.store(partial_ptr + to, acc / total[:, None], mask=is_out)
    else:
        total = tl.where(total > 0, total, 1.0)  # padding rows have no keys
        to = out_ptr + query[:, None] * LATENT + c[None, :]
        tl.store(to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, num_splits, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr
):
    """Program (row x query head): join partial results. In a launch of its own: the last split would read those of all
    heads, 4 MiB for 16 heads and 64 splits, alone on its multiprocessor."""
    row = tl.program_id(0)
    d = tl.arange(0, DIM_PAD)
    mixed = joined(partial_ptr, lse_ptr, row, num_splits, DIM, DIM_PAD, SPLITS_PAD)
    tl.store(out_ptr + row * DIM + d, mixed.to(out_ptr.dtype.element_ty), mask=d < DIM)


def queries_for(heads: int, narrow: bool = False) -> int:
    """Return the heads of a decode program. A tensor core needs at least sixteen rows."""
    return FLOAT32_QUERIES if narrow else max(16, min(MAX_QUERIES, 1 << (heads - 1).bit_length()))


def latent_append(
    kv_TC: torch.Tensor,
    heads: LatentHeads,
    rotary: RotaryTable,
    slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    page_table: torch.Tensor,
    pages_PKSC: torch.Tensor,
) -> None:
    """Norm, rotate and store rows. Rows of `kv_TC` may have any stride."""
    half = heads.rope_dim // 2
    kernel: Any = _latent_append[(kv_TC.shape[0],)]
    kernel(
        kv_TC,
        heads.norm_L,
        rotary.cos,
        rotary.sin,
        slots_T,
        positions_T,
        page_table,
        pages_PKSC,
        heads.eps,
        kv_TC.stride(0),
        pages_PKSC.stride(0),
        page_table.stride(0),
        LATENT=heads.latent_dim,
        LATENT_PAD=triton.next_power_of_2(heads.latent_dim),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        PAGE=pages_PKSC.shape[2],
        IS_FP8=is_fp8(pages_PKSC),
        num_warps=4,
    )


def latent_query(
    q_THE: torch.Tensor,
    key_HNL: torch.Tensor,
    heads: LatentHeads,
    rotary: RotaryTable,
    positions_T: torch.Tensor,
    out_THC: torch.Tensor,
) -> None:
    """Multiply queries by the key weight and rotate the rest. Rows and heads of `q_THE` may have any stride."""
    num_rows, nope, half = q_THE.shape[0], key_HNL.shape[1], heads.rope_dim // 2
    absorbed_HTL = torch.bmm(q_THE[:, :, :nope].transpose(0, 1), key_HNL)
    kernel: Any = _latent_query[(num_rows, heads.num_heads)]
    kernel(
        absorbed_HTL.contiguous(),
        q_THE,
        rotary.cos,
        rotary.sin,
        positions_T,
        out_THC,
        q_THE.stride(0),
        q_THE.stride(1),
        num_rows,
        HEADS=heads.num_heads,
        NOPE=nope,
        LATENT=heads.latent_dim,
        LATENT_PAD=triton.next_power_of_2(heads.latent_dim),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        num_warps=1,
    )


def latent_prefill(
    q_THC: torch.Tensor,
    heads: LatentHeads,
    pages_PKSC: torch.Tensor,
    tiles_Y4: torch.Tensor,
    page_table: torch.Tensor,
    out_THL: torch.Tensor,
    first_position: int = 0,
) -> None:
    """Compute the rows of all tiles (`Batch.tiles_Y4`). `first_position`: as in `Batch`, less than `FLOAT32_KEYS`."""
    queries = FLOAT32_QUERIES if is_narrow(q_THC.dtype, q_THC.device) else MAX_QUERIES
    grid = (tiles_Y4.shape[0], heads.num_heads, TILE_ROWS // queries)
    tiles = None, None, tiles_Y4
    _attend(grid, q_THC, heads, pages_PKSC, *tiles, page_table, out_THL, None, None, 1, queries, first_position)


def latent_decode(
    q_BHC: torch.Tensor,
    heads: LatentHeads,
    pages_PKSC: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    page_table: torch.Tensor,
    out_BHL: torch.Tensor,
    splits: int,
    first_position: int = 0,
) -> None:
    """Compute decoding rows: row b attends to positions 0 .. `positions_B[b]` of its slot. `first_position`: as of
    `latent_prefill`."""
    num_rows, num_heads, latent = out_BHL.shape
    queries = queries_for(num_heads, is_narrow(q_BHC.dtype, q_BHC.device))
    grid = (num_rows, triton.cdiv(num_heads, queries), splits)
    partial = lse = None
    if splits > 1:
        partial, lse = decode_scratch(num_rows, num_heads, latent, splits, q_BHC.device)
    rows = slots_B, positions_B, None
    _attend(grid, q_BHC, heads, pages_PKSC, *rows, page_table, out_BHL, partial, lse, splits, queries, first_position)
    if splits > 1:
        kernel: Any = _join_splits[(num_rows * num_heads,)]
        pad = triton.next_power_of_2(latent)
        kernel(partial, lse, out_BHL, splits, DIM=latent, DIM_PAD=pad, SPLITS_PAD=splits, num_warps=4)


def _attend(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    heads: LatentHeads,
    pages: torch.Tensor,
    slots: torch.Tensor | None,
    positions: torch.Tensor | None,
    tiles: torch.Tensor | None,
    page_table: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor | None,
    lse: torch.Tensor | None,
    splits: int,
    queries: int,
    first_position: int,
) -> None:
    kernel: Any = _latent_attend[grid]
    kernel(
        q,
        pages,
        page_table if slots is None else slots,
        page_table if positions is None else positions,
        page_table if tiles is None else tiles,
        page_table,
        out if partial is None else partial,
        out if lse is None else lse,
        out,
        heads.softmax_scale * LOG2_E,
        pages.stride(0),
        page_table.stride(0),
        splits,
        HEADS=heads.num_heads,
        LATENT=heads.latent_dim,
        LATENT_PAD=triton.next_power_of_2(heads.latent_dim),
        ROPE=heads.rope_dim,
        ROPE_PAD=max(16, triton.next_power_of_2(heads.rope_dim)),
        PAGE=pages.shape[2],
        QUERIES=queries,
        KEYS=FLOAT32_KEYS if is_narrow(q.dtype, q.device) else KEYS,
        IS_PREFILL=tiles is not None,
        IS_SPLIT=splits > 1,
        IS_FP8=is_fp8(pages),
        FIRST=first_position,
        **schedule(queries, is_fp8(pages)),
    )


def schedule(queries: int, is_fp8_cache: bool) -> dict[str, int]:
    """Return enough warps to hold the sums in registers, and for e4m3 the widened numbers. Other values spill
    (`test/integration/compile_kernels.py`); which is fastest was not measured."""
    if is_fp8_cache:
        return {"num_warps": 8, "num_stages": 3}
    return {"num_warps": 8 if queries > 16 else 4, "num_stages": 2}
