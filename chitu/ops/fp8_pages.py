"""Pages of 8-bit floats (e4m3): their layout, and how rows are written and read. Triton's kernels do the same
(`kernels/fp8.py`), bit for bit.

A page of a KV head is `page_size` rows of `head_dim` e4m3 numbers, and behind them one float32 scale a row. It is one
piece of memory, so code that copies pages or heads of pages also copies the scales, without special treatment. A row is
one token's K or V of one head. The tensor of such pages, `x_PKSN`, holds only the numbers; its strides skip the scales,
which `scales_of` returns.

A row's scale is its largest absolute value divided by 448, the largest e4m3 number. All numbers of the row are divided
by the scale and rounded to nearest, ties to even. The bytes are the same on every device: divisions follow IEEE, and
no conversion of a device does the rounding. A row of zeros has the scale 1. A row with a NaN or an infinity has the
scale NaN: its readers get NaN, as they would with wider numbers. Called by the step thread.
"""

from __future__ import annotations

import torch

from chitu.protocol.cluster import SCALE_BYTES

E4M3 = torch.float8_e4m3fn

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
"""Smallest scale: the smallest normal float32, since some devices flush smaller numbers to zero."""


def is_fp8(pages_PKSN: torch.Tensor) -> bool:
    return pages_PKSN.dtype == E4M3


def values_of(raw_PKB: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """Return the e4m3 numbers `[P, K, S, N]`, without the scales, from the bytes of heads of pages."""
    return raw_PKB.view(E4M3)[..., : page_size * head_dim].view(*raw_PKB.shape[:2], page_size, head_dim)


def scales_of(x_PKSN: torch.Tensor) -> torch.Tensor:
    """Return the scales, float32 `[P, K, S]`, of `values_of`'s result or its first columns, as a view of its memory."""
    pages, heads, page_size, _ = x_PKSN.shape
    page_stride, head_stride, row_stride = x_PKSN.stride()[:3]
    behind = x_PKSN.storage_offset() + page_size * row_stride
    raw = x_PKSN.view(torch.uint8).as_strided(
        (pages, heads, page_size * SCALE_BYTES), (page_stride, head_stride, 1), behind
    )
    return raw.view(torch.float32)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[..., N]` of any float dtype to e4m3 `[..., N]` and float32 scales `[...]`."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    # Divide by a tensor: for a number CUDA multiplies by its reciprocal, which differs in the last bit.
    quotients = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(largest == 0, 1.0, quotients.clamp(min=SMALLEST_SCALE))
    values = torch.where(is_finite.unsqueeze(-1), wide / scales.unsqueeze(-1), 0.0).to(E4M3)
    return values, torch.where(is_finite, scales, torch.nan)


def put_rows(x_PKSN: torch.Tensor, pages_T: torch.Tensor, offsets_T: torch.Tensor, rows_TKN: torch.Tensor) -> None:
    """Write row t to row `offsets_T[t]` of page `pages_T[t]`, in the format of the pages."""
    if not is_fp8(x_PKSN):
        x_PKSN[pages_T, :, offsets_T] = rows_TKN.to(x_PKSN.dtype)
        return
    values_TKN, scales_TK = quantised(rows_TKN)
    # As bytes: not every operation supports this dtype.
    x_PKSN.view(torch.uint8)[pages_T, :, offsets_T] = values_TKN.view(torch.uint8)
    scales_of(x_PKSN)[pages_T, :, offsets_T] = scales_TK


def take_pages(x_PKSN: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the pages with these indices (of any shape), `[..., K, S, N]`. Converts e4m3 pages, with their scales, to
    `dtype`; other pages keep theirs."""
    if not is_fp8(x_PKSN):
        return x_PKSN[pages]
    values = x_PKSN.view(torch.uint8)[pages].view(E4M3).float()
    return values.mul_(scales_of(x_PKSN)[pages].unsqueeze(-1)).to(dtype)
