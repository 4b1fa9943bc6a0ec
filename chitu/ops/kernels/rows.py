"""Row-wise kernels: RMS norm, and the gated activation of the MLP."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

SILU_BLOCK = 1024


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_PAD)
    x = tl.load(x_ptr + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + c, y.to(out_ptr.dtype.element_ty), mask=c < WIDTH)


@triton.jit
def _silu_mul(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + c, mask=c < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + c, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=c < width)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_TD: torch.Tensor) -> None:
    width = x_TD.shape[1]
    kernel: Any = _rms_norm[(x_TD.shape[0],)]
    kernel(x_TD, weight_D, out_TD, eps, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=4)


def silu_mul(gate_up_T2I: torch.Tensor, out_TI: torch.Tensor) -> None:
    """Write `silu(gate) * up` to `out`; gate is the first half of a row."""
    width = out_TI.shape[1]
    kernel: Any = _silu_mul[(out_TI.shape[0], triton.cdiv(width, SILU_BLOCK))]
    kernel(gate_up_T2I, out_TI, width, BLOCK=SILU_BLOCK, num_warps=4)
