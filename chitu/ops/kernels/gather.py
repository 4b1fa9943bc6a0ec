"""Gathers K and V of one sequence from its pages, head by head, for kernels without page tables.

One launch reads and writes both once; torch's indexing, which must also swap heads and tokens, takes four passes that
move two bytes a thread. Pages of e4m3 (`ops/fp8_pages.py`) are multiplied by their scales. Rows behind the last token
are zeros, whatever the pages hold there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.kernels.fp8 import scale_at

VALUES_AT_ONCE = 2048
"""Values that a program copies: a page of 16 tokens of a head of 128."""


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_pages(
    k_ptr,
    v_ptr,
    pages_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Program (page of the sequence, head, part of the page): copy the same part of K and of V. Does not look up pages
    without a token."""
    page = tl.program_id(0)
    head = tl.program_id(1)
    PAGE: tl.constexpr = VALUES // DIM
    part = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = page * PAGE + part // DIM
    is_token = (part < VALUES) & (row < num_tokens)
    is_row = (part < VALUES) & (row < num_rows)
    number = tl.load(pages_ptr + page, mask=page * PAGE < num_tokens, other=0).to(tl.int64)
    head_start = number * page_stride + head * head_stride
    source = head_start + part
    target = head.to(tl.int64) * num_rows * DIM + page * VALUES + part
    v_out_ptr = out_ptr + num_rows.to(tl.int64) * (HEADS * DIM)
    k = tl.load(k_ptr + source, mask=is_token, other=0.0)
    v = tl.load(v_ptr + source, mask=is_token, other=0.0)
    if IS_FP8:
        k_scales = tl.load(scale_at(k_ptr, head_start, part // DIM, PAGE, DIM), mask=is_token, other=0.0)
        v_scales = tl.load(scale_at(v_ptr, head_start, part // DIM, PAGE, DIM), mask=is_token, other=0.0)
        k = k.to(tl.float32) * k_scales
        v = v.to(tl.float32) * v_scales
    tl.store(out_ptr + target, k.to(out_ptr.dtype.element_ty), mask=is_row)
    tl.store(v_out_ptr + target, v.to(out_ptr.dtype.element_ty), mask=is_row)


def gather_pages(
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    pages_L: torch.Tensor,
    num_tokens: int,
    num_rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return K and V as `[2, K, num_rows, N]` in `dtype`: the first `num_tokens` tokens of these pages (int64, device)
    in order, then zeros."""
    _, kv_heads, page_size, dim = k_PKSN.shape
    values = page_size * dim
    block = min(VALUES_AT_ONCE, triton.next_power_of_2(values))
    out = k_PKSN.new_empty(2, kv_heads, num_rows, dim, dtype=dtype)
    kernel: Any = _gather_pages[(triton.cdiv(num_rows, page_size), kv_heads, triton.cdiv(values, block))]
    kernel(
        k_PKSN,
        v_PKSN,
        pages_L,
        out,
        num_tokens,
        num_rows,
        k_PKSN.stride(0),
        k_PKSN.stride(1),
        HEADS=kv_heads,
        VALUES=values,
        BLOCK=block,
        DIM=dim,
        IS_FP8=is_fp8(k_PKSN),
        num_warps=4,
    )
    return out
