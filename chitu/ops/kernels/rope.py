"""Norm, rotate and store: one launch moves q, k and v of every row from the fused projection to their destination.

Numbers and scales of e4m3 pages (`ops/fp8_pages.py`) are computed directly from float32, after norm and rotation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.interface import HeadSpec, RotaryTable
from chitu.ops.kernels.fp8 import magnitude, row_scale, scale_at, to_e4m3

HEADS_AT_ONCE = 8


# The rows of a batch begin anywhere in one upload: an alignment more would be a kernel more, compiled by a request.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _rope_append(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    page_stride,
    head_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Program (row, group of heads); the groups of q come first, then those of k, then those of v."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    KV_GROUPS: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    first = tl.where(is_q, group, tl.where(is_v, group - Q_GROUPS - KV_GROUPS, group - Q_GROUPS)) * AT_ONCE
    count = tl.where(is_q, HEADS, KV_HEADS)
    before = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    heads = first + tl.arange(0, AT_ONCE)
    d = tl.arange(0, HALF_PAD)
    mask = (heads[:, None] < count) & (d[None, :] < HALF)
    source = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + before + heads[:, None]).to(tl.int64) * DIM + d[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + row)
    if group < Q_GROUPS + KV_GROUPS:
        if HAS_NORM:
            # tl.where cannot choose a pointer, so the weight of the other kind is masked and never read.
            q_mask = d < tl.where(group < Q_GROUPS, HALF, 0)
            k_mask = d < tl.where(group < Q_GROUPS, 0, HALF)
            low_weight = tl.load(q_norm_ptr + d, mask=q_mask, other=0.0).to(tl.float32)
            high_weight = tl.load(q_norm_ptr + HALF + d, mask=q_mask, other=0.0).to(tl.float32)
            low_weight += tl.load(k_norm_ptr + d, mask=k_mask, other=0.0).to(tl.float32)
            high_weight += tl.load(k_norm_ptr + HALF + d, mask=k_mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)
            low = low * scale[:, None] * low_weight[None, :]
            high = high * scale[:, None] * high_weight[None, :]
        cos = tl.load(cos_ptr + position * HALF + d, mask=d < HALF, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + d, mask=d < HALF, other=0.0)
        rotated = low * cos[None, :] - high * sin[None, :]
        high = high * cos[None, :] + low * sin[None, :]
        low = rotated
    if group < Q_GROUPS:
        target = q_ptr + (row * HEADS + heads[:, None]).to(tl.int64) * DIM + d[None, :]
        tl.store(target, low.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + row)
        page = tl.load(table_ptr + slot * table_stride + position // PAGE).to(tl.int64)
        head_start = page * page_stride + heads * head_stride
        offset = head_start[:, None] + (position % PAGE) * DIM + d[None, :]
        if IS_FP8:
            largest = tl.maximum(tl.max(magnitude(low), 1), tl.max(magnitude(high), 1))
            row_scales = row_scale(largest)
            low_code = to_e4m3(low, row_scales[:, None])
            high_code = to_e4m3(high, row_scales[:, None])
            if is_v:
                tl.store(v_ptr + offset, low_code, mask=mask)
                tl.store(v_ptr + offset + HALF, high_code, mask=mask)
                tl.store(scale_at(v_ptr, head_start, position % PAGE, PAGE, DIM), row_scales, mask=heads < count)
            else:
                tl.store(k_ptr + offset, low_code, mask=mask)
                tl.store(k_ptr + offset + HALF, high_code, mask=mask)
                tl.store(scale_at(k_ptr, head_start, position % PAGE, PAGE, DIM), row_scales, mask=heads < count)
        else:
            if is_v:
                tl.store(v_ptr + offset, low.to(v_ptr.dtype.element_ty), mask=mask)
                tl.store(v_ptr + offset + HALF, high.to(v_ptr.dtype.element_ty), mask=mask)
            else:
                tl.store(k_ptr + offset, low.to(k_ptr.dtype.element_ty), mask=mask)
                tl.store(k_ptr + offset + HALF, high.to(k_ptr.dtype.element_ty), mask=mask)


def rope_append(
    qkv_TC: torch.Tensor,
    heads: HeadSpec,
    rotary: RotaryTable,
    slots_T: torch.Tensor,
    positions_T: torch.Tensor,
    page_table: torch.Tensor,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    q_THN: torch.Tensor,
) -> None:
    """Write q of every row to `q_THN`, k and v to the pages. Either both q and k have norms, or neither has."""
    groups = sum(
        triton.cdiv(count, HEADS_AT_ONCE) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    kernel: Any = _rope_append[(qkv_TC.shape[0], groups)]
    kernel(
        qkv_TC,
        heads.q_norm_N if heads.q_norm_N is not None else qkv_TC,
        heads.k_norm_N if heads.k_norm_N is not None else qkv_TC,
        rotary.cos,
        rotary.sin,
        slots_T,
        positions_T,
        page_table,
        q_THN,
        k_PKSN,
        v_PKSN,
        heads.eps,
        k_PKSN.stride(0),
        k_PKSN.stride(1),
        page_table.stride(0),
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        DIM=heads.head_dim,
        HALF_PAD=triton.next_power_of_2(heads.head_dim // 2),
        PAGE=k_PKSN.shape[2],
        AT_ONCE=HEADS_AT_ONCE,
        HAS_NORM=heads.q_norm_N is not None,
        IS_FP8=is_fp8(k_PKSN),
        num_warps=4,
    )
