"""K and V of one sequence brought together from its pages, head by head, for kernels that know no pages.

One launch reads and writes both once; torch's indexing, which also has to turn heads and tokens around, takes four
passes that move two bytes a thread. Pages of e4m3 (`ops/fp8_pages.py`) come out multiplied by their scales.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.kernels.fp8 import scale_at

VALUES_AT_ONCE = 2048
"""A page of 16 tokens of a head of 128."""


@triton.jit
def _gather_pages(
    k_ptr,
    v_ptr,
    pages_ptr,
    out_ptr,
    num_pages,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Program (page of the sequence, head, part of the page): the same part of K and of V."""
    page = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    head_start = tl.load(pages_ptr + page).to(tl.int64) * page_stride + head * head_stride
    source = head_start + part
    target = (head * num_pages + page).to(tl.int64) * VALUES + part
    v_out_ptr = out_ptr + num_pages.to(tl.int64) * (HEADS * VALUES)
    k = tl.load(k_ptr + source, mask=part < VALUES)
    v = tl.load(v_ptr + source, mask=part < VALUES)
    if IS_FP8:
        PAGE: tl.constexpr = VALUES // DIM
        k = k.to(tl.float32) * tl.load(scale_at(k_ptr, head_start, part // DIM, PAGE, DIM), mask=part < VALUES)
        v = v.to(tl.float32) * tl.load(scale_at(v_ptr, head_start, part // DIM, PAGE, DIM), mask=part < VALUES)
    tl.store(out_ptr + target, k.to(out_ptr.dtype.element_ty), mask=part < VALUES)
    tl.store(v_out_ptr + target, v.to(out_ptr.dtype.element_ty), mask=part < VALUES)


def gather_pages(k_PKSN: torch.Tensor, v_PKSN: torch.Tensor, pages_L: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[2, K, L S, N]` in `dtype`, K's and V's: the tokens of these pages (int64, device) one after the other."""
    _, kv_heads, page_size, dim = k_PKSN.shape
    num_pages = pages_L.shape[0]
    values = page_size * dim
    block = min(VALUES_AT_ONCE, triton.next_power_of_2(values))
    out = k_PKSN.new_empty(2, kv_heads, num_pages * page_size, dim, dtype=dtype)
    kernel: Any = _gather_pages[(num_pages, kv_heads, triton.cdiv(values, block))]
    kernel(
        k_PKSN,
        v_PKSN,
        pages_L,
        out,
        num_pages,
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
