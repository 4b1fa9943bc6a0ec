"""Paged attention: decoding rows by split-KV with the query heads of a KV head packed together, spans by tiles of rows.

Decoding reads every K and V of its sequence once, so it is bound by memory: a sequence is divided into splits until the
device is full, each split writes a partial result with its log-sum-exp, and the last one to do so joins them. Each adds
one to a counter behind its stores, and who finds all others counted reads what they stored. The number of splits
depends only on the number of rows, never on lengths, so a CUDA graph stays valid while sequences grow. Lengths are
`position + 1`, pages come from the slot's row of the page table; the device reads both.

The same launch norms and rotates q and k, and writes K and V of its rows (`append_attention`). A program takes those of
its own row, and of rows of the same sequence before it, from the projection, so none waits for another one's.

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
from chitu.ops.interface import TILE_ROWS, HeadSpec, RotaryTable
from chitu.ops.kernels.fp8 import magnitude, mix, row_scale, scale_at, to_e4m3

LOG2_E = math.log2(math.e)
PER_NAT = tl.constexpr(LOG2_E)
NO_SCORE = tl.constexpr(-1e30)
"""Below every score."""
DECODE_BLOCK = 64
"""Keys that a program of the decode kernel processes at once."""
MAX_SPLITS = 64
PROGRAMS_EACH = 4
"""Programs of a multiprocessor, up to which a decode launch has splits."""
OWN_ROWS = 16
"""Most rows of a sequence in a launch that appends them."""
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
def joined(partial_ptr, lse_ptr, row, num_splits, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Return the partial results of a row of a head, weighted by their share of the softmax's sum, `[DIM_PAD]`. They
    are loaded from the cache that multiprocessors share."""
    splits = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    from_lse = lse_ptr + row * num_splits + splits
    lse = tl.load(from_lse, mask=splits < num_splits, other=-float("inf"), cache_modifier=".cg")
    weights = tl.exp2(lse - tl.max(lse, 0))
    is_there = (lse != -float("inf"))[:, None] & (d[None, :] < DIM)
    from_partial = partial_ptr + (row * num_splits + splits)[:, None] * DIM + d[None, :]
    partial = tl.load(from_partial, mask=is_there, other=0.0, cache_modifier=".cg")
    return tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)


@triton.jit
def _mix_keys(
    q, k, v, k_scales, v_scales, is_key, scale, top, total, acc, IS_FP8: tl.constexpr
):  # fmt: skip
    """Return top score, sum and mixed values `[GROUP_PAD]`, `[GROUP_PAD]`, `[GROUP_PAD, DIM_PAD]` with some more keys.
    Scales of keys and values: of e4m3 only."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if IS_FP8:
        scores *= k_scales[None, :]
    scores = tl.where(is_key[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if IS_FP8:
        acc = acc * shrink[:, None] + mix(weights, v, v_scales, q.dtype)
    else:
        v = v.to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _rotated(
    from_ptr, norm_ptr, cos_ptr, sin_ptr, positions, is_in, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Load rows of heads `[M, DIM_PAD]`, norm and rotate them; float32. `from_ptr`: of each row's first number,
    `[M, 1]`; `positions`: `[M, 1]`. Each number is computed as `_rope_append` does."""
    HALF: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PAD)[None, :]
    other = tl.where(d < HALF, d + HALF, d - HALF)
    in_half = tl.where(d < HALF, d, d - HALF)
    is_there = is_in & (d < DIM)
    x = tl.load(from_ptr + d, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(from_ptr + other, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        low = tl.sum(tl.where(d < HALF, x * x, 0.0), 1)
        high = tl.sum(tl.where(d < HALF, 0.0, x * x), 1)
        factor = tl.rsqrt((low + high) / DIM + eps)[:, None]
        x = x * factor * tl.load(norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        y = y * factor * tl.load(norm_ptr + other, mask=d < DIM, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + positions * HALF + in_half, mask=is_there, other=0.0)
    sin = tl.load(sin_ptr + positions * HALF + in_half, mask=is_there, other=0.0)
    return tl.where(d < HALF, x * cos - y * sin, x * cos + y * sin)


@triton.jit
def _own_keys(
    from_k, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, head_start, position, is_own, eps,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Return K and V `[ROWS, DIM_PAD]` of a row and of those before it, as they are in pages, and their scales. Write
    those of the row to its place. `from_k`: of each row's K in the projection."""
    back = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)[None, :]
    positions = (position - back)[:, None]
    k = _rotated(from_k, k_norm_ptr, cos_ptr, sin_ptr, positions, is_own[:, None], eps, DIM, DIM_PAD, HAS_NORM)
    v = tl.load(from_k + KV_HEADS * DIM + d, mask=is_own[:, None] & (d < DIM), other=0.0).to(tl.float32)
    to = head_start + (position % PAGE) * DIM + d + back[:, None] * 0
    is_new = back == 0
    k_scales = back * 1.0
    v_scales = k_scales
    if IS_FP8:
        k_scales = row_scale(tl.max(magnitude(k), 1))
        v_scales = row_scale(tl.max(magnitude(v), 1))
        k = to_e4m3(k, k_scales[:, None])
        v = to_e4m3(v, v_scales[:, None])
        offsets = back * 0 + position % PAGE
        tl.store(scale_at(k_ptr, head_start, offsets, PAGE, DIM), k_scales, mask=is_new)
        tl.store(scale_at(v_ptr, head_start, offsets, PAGE, DIM), v_scales, mask=is_new)
    else:
        k = k.to(k_ptr.dtype.element_ty)
        v = v.to(v_ptr.dtype.element_ty)
    tl.store(k_ptr + to, k, mask=is_new[:, None] & (d < DIM))
    tl.store(v_ptr + to, v, mask=is_new[:, None] & (d < DIM))
    return k, v, k_scales, v_scales


# The rows of a batch begin anywhere in one upload: an alignment more would be a kernel more, compiled by a request.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _decode_split(
    q_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    out_ptr,
    sinks_ptr,
    eps,
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
    SPLITS_PAD: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (row, KV head, split): GROUP query heads over the split's keys. WINDOW: last keys that a row sees, 0 for
    all. With sinks, the sum of the first split begins with that of the head.

    OWN_ROWS > 0: `q` is the fused projection, of q, k and v. The first split has K and V of its row, and of rows of the
    same sequence before it, from there, and writes those of its row. So no program reads what another one writes."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    length = position + 1
    pages_ptr = table_ptr + slot * table_stride
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    keys = tl.arange(0, BLOCK)
    out_row = (row * KV_HEADS + head) * GROUP + g
    in_out = (g[:, None] < GROUP) & (d[None, :] < DIM)
    stored = length
    if OWN_ROWS == 0:
        q = tl.load(q_ptr + out_row[:, None] * DIM + d[None, :], mask=in_out, other=0.0)
    else:
        # Rows of a sequence follow each other, at consecutive positions.
        back = tl.arange(0, OWN_ROWS)
        own_slots = tl.load(slots_ptr + row - back, mask=back <= row, other=-1)
        own_positions = tl.load(positions_ptr + row - back, mask=back <= row, other=-1)
        is_own = (own_slots == slot) & (own_positions == position - back)
        stored = length - tl.sum(is_own.to(tl.int32), 0)
        ROW: tl.constexpr = (GROUP + 2) * KV_HEADS * DIM
        from_q = q_ptr + row * ROW + (head * GROUP + g)[:, None] * DIM
        q = _rotated(
            from_q, q_norm_ptr, cos_ptr, sin_ptr, position, (g < GROUP)[:, None], eps, DIM, DIM_PAD, HAS_NORM
        ).to(q_ptr.dtype.element_ty)
    unseen = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    per_split = tl.cdiv(tl.cdiv(tl.maximum(stored - unseen, 0), BLOCK), num_splits) * BLOCK
    first = unseen + split * per_split
    end = tl.minimum(stored, first + per_split)
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + head * GROUP + g, mask=g < GROUP, other=0.0) * PER_NAT
        top = tl.where(split == 0, sinks, top)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    if OWN_ROWS > 0:  # noqa: SIM102  # known when it is compiled
        if split == 0:
            if WINDOW > 0:
                is_own = is_own & (back < WINDOW)
            own_k, own_v, own_k_scales, own_v_scales = _own_keys(
                q_ptr + (row - back)[:, None] * ROW + (KV_HEADS * GROUP + head) * DIM, k_norm_ptr, cos_ptr, sin_ptr,
                k_ptr, v_ptr, tl.load(pages_ptr + position // PAGE).to(tl.int64) * page_stride + head * head_stride,
                position, is_own, eps, KV_HEADS, DIM, DIM_PAD, PAGE, OWN_ROWS, HAS_NORM, IS_FP8,
            )  # fmt: skip
            top, total, acc = _mix_keys(
                q, own_k, own_v, own_k_scales, own_v_scales, is_own, scale, top, total, acc, IS_FP8
            )
    for start in range(first, end, BLOCK):
        t = start + keys
        is_key = t < end
        page = tl.load(pages_ptr + t // PAGE, mask=is_key, other=0).to(tl.int64)
        head_start = page * page_stride + head * head_stride
        where = head_start + (t % PAGE) * DIM
        in_kv = is_key[:, None] & (d[None, :] < DIM)
        k = tl.load(k_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(v_ptr + where[:, None] + d[None, :], mask=in_kv, other=0.0)
        k_scales = 1.0
        v_scales = 1.0
        if IS_FP8:
            k_scales = tl.load(scale_at(k_ptr, head_start, t % PAGE, PAGE, DIM), mask=is_key, other=0.0)
            v_scales = tl.load(scale_at(v_ptr, head_start, t % PAGE, PAGE, DIM), mask=is_key, other=0.0)
        top, total, acc = _mix_keys(q, k, v, k_scales, v_scales, is_key, scale, top, total, acc, IS_FP8)
    if IS_SPLIT:
        # An empty split writes no partial result; who joins them skips it by its -inf.
        lse = tl.where(total == 0, -float("inf"), top + tl.log2(tl.maximum(total, 1e-38)))
        tl.store(lse_ptr + out_row * num_splits + split, lse, mask=g < GROUP)
        to = (out_row[:, None] * num_splits + split) * DIM + d[None, :]
        tl.store(partial_ptr + to, acc / tl.where(total == 0, 1.0, total)[:, None], mask=in_out & (total != 0)[:, None])
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived_ptr += row * KV_HEADS + head
        others = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if others == num_splits - 1:
            tl.store(arrived_ptr, 0)
            for h in range(GROUP):
                at = (row * KV_HEADS + head) * GROUP + h
                mixed = joined(partial_ptr, lse_ptr, at, num_splits, DIM, DIM_PAD, SPLITS_PAD)
                tl.store(out_ptr + at * DIM + d, mixed.to(out_ptr.dtype.element_ty), mask=d < DIM)
    else:
        tl.store(
            out_ptr + out_row[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), in_out
        )


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
        and num_rows * kv_heads * splits < PROGRAMS_EACH * num_multiprocessors
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
    arrived: torch.Tensor,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compute decoding rows into `out_BHN`: row b attends to positions 0 .. `positions_B[b]` of its slot. `window` and
    `sinks_H` as in `HeadSpec`. `arrived`: zeros, int32, one for each row and KV head if there are splits; zeros again
    behind the launch, so no two with the same ones run at once."""
    spec = HeadSpec(q_BHN.shape[1], k_PKSN.shape[1], q_BHN.shape[2], 0.0, window=window, sinks_H=sinks_H)
    _decode(q_BHN, spec, None, k_PKSN, v_PKSN, slots_B, positions_B, page_table, out_BHN, splits, arrived)


def append_attention(
    qkv_BC: torch.Tensor,
    heads: HeadSpec,
    rotary: RotaryTable,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    page_table: torch.Tensor,
    out_BHN: torch.Tensor,
    splits: int,
    arrived: torch.Tensor,
) -> None:
    """Do what `rope_append` and `decode_attention` do, in one launch, for the fused projection of decoding rows. Those
    of one slot, at most `OWN_ROWS`, follow each other at consecutive positions. Either both q and k have norms, or
    neither has."""
    _decode(qkv_BC, heads, rotary, k_PKSN, v_PKSN, slots_B, positions_B, page_table, out_BHN, splits, arrived)


def _decode(
    q: torch.Tensor,
    heads: HeadSpec,
    rotary: RotaryTable | None,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    page_table: torch.Tensor,
    out_BHN: torch.Tensor,
    splits: int,
    arrived: torch.Tensor,
) -> None:
    """Launch `_decode_split`. `rotary`: None if `q` is `[B, H, N]` and K and V of the rows are in the pages."""
    num_rows, dim, group = q.shape[0], heads.head_dim, heads.num_heads // heads.num_kv_heads
    scratch = decode_scratch(num_rows, heads.num_heads, dim, splits, q.device) if splits > 1 else (q, q)
    has_norm = rotary is not None and heads.q_norm_N is not None
    _launch(_decode_split, (num_rows, heads.num_kv_heads, splits))(
        q,
        heads.q_norm_N if has_norm else q,
        heads.k_norm_N if has_norm else q,
        rotary.cos if rotary is not None else q,
        rotary.sin if rotary is not None else q,
        k_PKSN,
        v_PKSN,
        slots_B,
        positions_B,
        page_table,
        *scratch,
        arrived,
        out_BHN,
        heads.sinks_H if heads.sinks_H is not None else q,
        heads.eps,
        dim**-0.5 * LOG2_E,
        k_PKSN.stride(0),
        k_PKSN.stride(1),
        page_table.stride(0),
        splits,
        KV_HEADS=heads.num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PAGE=k_PKSN.shape[2],
        BLOCK=DECODE_BLOCK,
        SPLITS_PAD=MAX_SPLITS,
        OWN_ROWS=OWN_ROWS if rotary is not None else 0,
        HAS_NORM=has_norm,
        IS_SPLIT=splits > 1,
        IS_FP8=is_fp8(k_PKSN),
        WINDOW=heads.window or 0,
        HAS_SINKS=heads.sinks_H is not None,
        num_warps=4,
        num_stages=3,
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
