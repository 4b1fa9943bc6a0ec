"""Paged attention: decoding rows by split-KV with the query heads of a KV head packed together, spans by tiles of rows.

Decoding reads every K and V of its sequence once, so it is bound by memory: a sequence is divided into splits until the
device is full, each split writes a partial result with its log-sum-exp, and a second kernel joins them. The number of
splits depends only on the number of rows, never on lengths, so a CUDA graph stays valid while sequences grow. Lengths
are `position + 1`, pages come from the slot's row of the page table; the device reads both.

A sink of a head is a score without a key: the sum of the softmax begins with it. Keys before a window are not read.

Pages of e4m3 (`ops/fp8_pages.py`) are widened in registers, which is exact. A key's scale multiplies its scores, a
value's scale its share, so the numbers of the cache are never scaled themselves.

Source of the method: Flash-Decoding (Dao et al., 2023) and FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.interface import TILE_ROWS
from chitu.ops.kernels.fp8 import mix, scale_at

LOG2_E = math.log2(math.e)
PER_NAT = tl.constexpr(LOG2_E)
NO_SCORE = tl.constexpr(-1e30)
"""Below every score."""
DECODE_BLOCK = 64
"""Keys that a program of the decode kernel processes at once."""
MAX_SPLITS = 64
PREFILL_KEYS = 64
FLOAT32_TILE = (32, 16)


def is_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels with products need smaller tiles. A GPU multiplies float32 without tensor cores, from
    registers. What does not fit is spilled, up to 20 KB a thread, and the driver reserves as much for every thread that
    the device can hold. Triton's interpreter has no registers, and its cost grows with the number of programs."""
    return dtype == torch.float32 and device.type == "cuda"


def prefill_tile(narrow: bool) -> tuple[int, int]:
    """Return the rows and keys that a program of the prefill kernel processes at once."""
    return FLOAT32_TILE if narrow else (TILE_ROWS, PREFILL_KEYS)


def prefill_stages(has_fp8_pages: bool) -> int:
    """Return the blocks of keys that a program of the prefill kernel has in flight. With pages of e4m3, a third one's
    addresses do not fit into registers (Triton 3.7)."""
    return 2 if has_fp8_pages else 3


@triton.jit
def _decode_split(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    page_stride,
    head_stride,
    table_stride,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (row, KV head, split): GROUP query heads over the split's keys. WINDOW: last keys that a row sees, 0 for
    all. With sinks, the sum of the first split begins with that of the head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions_ptr + row) + 1
    pages_ptr = table_ptr + tl.load(slots_ptr + row) * table_stride
    if WINDOW == 0:
        per_split = tl.cdiv(tl.cdiv(length, BLOCK), num_splits) * BLOCK
        first = split * per_split
    else:
        unseen = tl.maximum(length - WINDOW, 0)
        per_split = tl.cdiv(tl.cdiv(length - unseen, BLOCK), num_splits) * BLOCK
        first = unseen + split * per_split
    end = tl.minimum(length, first + per_split)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    keys = tl.arange(0, BLOCK)
    out_row = (row * KV_HEADS + head) * GROUP + g
    in_out = (g[:, None] < GROUP) & (d[None, :] < DIM)
    q = tl.load(q_ptr + out_row[:, None] * DIM + d[None, :], mask=in_out, other=0.0)
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + head * GROUP + g, mask=g < GROUP, other=0.0) * PER_NAT
        top = tl.where(split == 0, sinks, top)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(first, end, BLOCK):
        t = start + keys
        is_key = t < end
        page = tl.load(pages_ptr + t // PAGE, mask=is_key, other=0).to(tl.int64)
        head_start = page * page_stride + head * head_stride
        where = head_start + (t % PAGE) * DIM
        in_kv = is_key[:, None] & (d[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(v_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if IS_FP8:
            scores *= tl.load(scale_at(k_ptr, head_start, t % PAGE, PAGE, DIM), mask=is_key, other=0.0)[None, :]
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if IS_FP8:
            v_scales = tl.load(scale_at(v_ptr, head_start, t % PAGE, PAGE, DIM), mask=is_key, other=0.0)
            acc = acc * shrink[:, None] + mix(weights, v, v_scales, q.dtype)
        else:
            v = v.to(q.dtype)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    if IS_SPLIT:
        # An empty split writes no partial result; its -inf makes the second kernel skip it.
        lse = tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-38)), -float("inf"))
        tl.store(lse_ptr + out_row * num_splits + split, lse, mask=g < GROUP)
        if end > first:
            to = (out_row[:, None] * num_splits + split) * DIM + d[None, :]
            tl.store(partial_ptr + to, acc / total[:, None], mask=in_out)
    else:
        tl.store(
            out_ptr + out_row[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), in_out
        )


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, num_splits, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr
):
    """Program (row x query head): join partial results, weighted by their share of the softmax's sum."""
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    lse = tl.load(lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    is_there = (lse > -float("inf"))[:, None] & (d[None, :] < DIM)
    partial = tl.load(partial_ptr + (row * num_splits + splits)[:, None] * DIM + d[None, :], mask=is_there, other=0.0)
    joined = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * DIM + d, joined.to(out_ptr.dtype.element_ty), mask=d < DIM)


@triton.jit
def _prefill_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    table_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    page_stride,
    head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (tile, query head, ROWS of the tile): each row over its slot's keys up to its own position, or the last
    WINDOW of them."""
    # The last tiles of a prompt have the most keys. They start first, so that short ones fill the device at the end.
    tile_ptr = tiles_ptr + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    head = tl.program_id(1)
    part = tl.program_id(2) * ROWS
    first_row = tl.load(tile_ptr) + part
    num_rows = tl.load(tile_ptr + 1) - part
    pages_ptr = table_ptr + tl.load(tile_ptr + 2) * table_stride
    first_position = tl.load(tile_ptr + 3) + part
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    in_q = (r[:, None] < num_rows) & (d[None, :] < DIM)
    at = ((first_row + r[:, None]) * HEADS + head) * DIM + d[None, :]
    q = tl.load(q_ptr + at, mask=in_q, other=0.0)
    # A row may see no key of the first blocks of a window; so that its differences are numbers, its top is one.
    top = tl.full([ROWS], -float("inf") if WINDOW == 0 else NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([ROWS], tl.float32) + tl.load(sinks_ptr + head) * PER_NAT
        total += 1.0
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    # An empty tile pads a CUDA graph's list: it has no keys either.
    end = tl.where(num_rows > 0, first_position + tl.minimum(num_rows, ROWS), 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
    for first in range(begin, end, KEYS):
        t = first + tl.arange(0, KEYS)
        page = tl.load(pages_ptr + t // PAGE, mask=t < end, other=0).to(tl.int64)
        head_start = page * page_stride + (head // GROUP) * head_stride
        where = head_start + (t % PAGE) * DIM
        in_kv = (t < end)[:, None] & (d[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(v_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if IS_FP8:
            scores *= tl.load(scale_at(k_ptr, head_start, t % PAGE, PAGE, DIM), mask=t < end, other=0.0)[None, :]
        scores = tl.where(t[None, :] <= first_position + r[:, None], scores, -float("inf"))
        if WINDOW > 0:
            scores = tl.where(t[None, :] > first_position + r[:, None] - WINDOW, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if IS_FP8:
            v_scales = tl.load(scale_at(v_ptr, head_start, t % PAGE, PAGE, DIM), mask=t < end, other=0.0)
            acc = acc * shrink[:, None] + mix(weights, v, v_scales, q.dtype)
        else:
            v = v.to(q.dtype)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    total = tl.where(total > 0, total, 1.0)  # padding rows have no keys
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_q)


def num_splits_for(num_rows: int, kv_heads: int, max_len: int, num_multiprocessors: int) -> int:
    """Return the splits of a decode launch: programs for four times the device, with at least two blocks of keys each.

    `max_len`: the longest that a sequence can ever get, not its current length; the choice holds for a graph's life.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_rows * kv_heads * splits < 4 * num_multiprocessors
        and max_len // (splits * 2) >= DECODE_BLOCK * 2
    ):
        splits *= 2
    return splits


def decode_scratch(num_rows: int, heads: int, dim: int, splits: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocate partial results `[rows, heads, splits, dim]` and log-sum-exps `[rows, heads, splits]`, float32."""
    partial = torch.empty(num_rows, heads, splits, dim, dtype=torch.float32, device=device)
    return partial, torch.empty(num_rows, heads, splits, dtype=torch.float32, device=device)


def decode_attention(
    q_BHN: torch.Tensor,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    page_table: torch.Tensor,
    out_BHN: torch.Tensor,
    splits: int,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compute decoding rows into `out_BHN`: row b attends to positions 0 .. `positions_B[b]` of its slot. `window` and
    `sinks_H` as in `HeadSpec`."""
    num_rows, heads, dim = q_BHN.shape
    kv_heads, page_size = k_PKSN.shape[1], k_PKSN.shape[2]
    group = heads // kv_heads
    partial, lse = decode_scratch(num_rows, heads, dim, splits, q_BHN.device) if splits > 1 else (q_BHN, q_BHN)
    dim_pad = triton.next_power_of_2(dim)
    _launch(_decode_split, (num_rows, kv_heads, splits))(
        q_BHN,
        k_PKSN,
        v_PKSN,
        slots_B,
        positions_B,
        page_table,
        partial,
        lse,
        out_BHN,
        sinks_H if sinks_H is not None else q_BHN,
        dim**-0.5 * LOG2_E,
        k_PKSN.stride(0),
        k_PKSN.stride(1),
        page_table.stride(0),
        splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PAD=dim_pad,
        PAGE=page_size,
        BLOCK=DECODE_BLOCK,
        IS_SPLIT=splits > 1,
        IS_FP8=is_fp8(k_PKSN),
        WINDOW=window or 0,
        HAS_SINKS=sinks_H is not None,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _launch(_join_splits, (num_rows * heads,))(
            partial, lse, out_BHN, splits, DIM=dim, DIM_PAD=dim_pad, SPLITS_PAD=splits, num_warps=4
        )


def prefill_attention(
    q_THN: torch.Tensor,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    tiles_Y4: torch.Tensor,
    page_table: torch.Tensor,
    out_THN: torch.Tensor,
    tile: tuple[int, int] | None = None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compute the rows of all tiles (`Batch.tiles_Y4`) over their slots' keys up to their own positions, into the same
    rows of `out_THN`. `tile` overrides `prefill_tile`; `window` and `sinks_H` as in `HeadSpec`."""
    heads, dim = q_THN.shape[1:]
    kv_heads, page_size = k_PKSN.shape[1], k_PKSN.shape[2]
    rows, keys = tile or prefill_tile(is_narrow(q_THN.dtype, q_THN.device))
    _launch(_prefill_tiles, (tiles_Y4.shape[0], heads, TILE_ROWS // rows))(
        q_THN,
        k_PKSN,
        v_PKSN,
        tiles_Y4,
        page_table,
        out_THN,
        sinks_H if sinks_H is not None else q_THN,
        dim**-0.5 * LOG2_E,
        k_PKSN.stride(0),
        k_PKSN.stride(1),
        page_table.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PAGE=page_size,
        ROWS=rows,
        KEYS=keys,
        IS_FP8=is_fp8(k_PKSN),
        WINDOW=window or 0,
        HAS_SINKS=sinks_H is not None,
        num_warps=4,
        num_stages=prefill_stages(is_fp8(k_PKSN)),
    )


def _launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return kernel[grid]
