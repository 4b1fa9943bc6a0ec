"""Pages of 8-bit floats (e4m3): what lies where in them, and how rows get in and out. Triton's kernels do the same
(`kernels/fp8.py`), bit for bit.

A page of a KV head is `page_size` rows of `head_dim` e4m3 numbers, and behind them one float32 scale a row: one piece
of memory, so whoever copies pages or heads of pages copies the scales, too, and need not know of them. A row is one
token's K or V of one head. The tensor that stands for such pages, `x_PKSN`, is of the numbers alone; its strides step
over the scales, which `scales_of` shows.

A row's scale is its largest number without sign divided by 448, the largest of e4m3, which that number so becomes; the
others are divided by the scale and rounded to nearest, ties to even. The bytes are the same on every device: the
divisions are those of IEEE, and no conversion of a device is asked to round. A row of zeros has the scale 1. A row with
a NaN or an infinity has the scale NaN: its readers get NaN, as they would of wider numbers. Called by the step thread.
"""

from __future__ import annotations

import torch

from chitu.protocol.cluster import SCALE_BYTES

E4M3 = torch.float8_e4m3fn
ALIGNMENT_BYTES = 16
"""Kernels read this much at once: every head of a page begins at a multiple of it."""

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
"""Smaller numbers of float32 are no numbers on some devices."""


def is_fp8(pages_PKSN: torch.Tensor) -> bool:
    return pages_PKSN.dtype == E4M3


def values_of(raw_PKB: torch.Tensor, page_size: int, head_dim: int) -> torch.Tensor:
    """`[P, K, S, N]` e4m3, without the scales, of the bytes of heads of pages."""
    return raw_PKB.view(E4M3)[..., : page_size * head_dim].view(*raw_PKB.shape[:2], page_size, head_dim)


def scales_of(x_PKSN: torch.Tensor) -> torch.Tensor:
    """The float32 `[P, K, S]` behind the rows of `values_of`'s result (or of its first columns); the same memory."""
    pages, heads, page_size, _ = x_PKSN.shape
    page_stride, head_stride, row_stride = x_PKSN.stride()[:3]
    behind = x_PKSN.storage_offset() + page_size * row_stride
    raw = x_PKSN.view(torch.uint8).as_strided(
        (pages, heads, page_size * SCALE_BYTES), (page_stride, head_stride, 1), behind
    )
    return raw.view(torch.float32)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., N]` of any float dtype as e4m3 `[..., N]` and float32 scales `[...]`."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    is_finite = largest.isfinite()
    # By a tensor: CUDA multiplies with the reciprocal of a number, which is another division's last bit.
    quotients = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(largest == 0, 1.0, quotients.clamp(min=SMALLEST_SCALE))
    values = torch.where(is_finite.unsqueeze(-1), wide / scales.unsqueeze(-1), 0.0).to(E4M3)
    return values, torch.where(is_finite, scales, torch.nan)


def put_rows(x_PKSN: torch.Tensor, pages_T: torch.Tensor, offsets_T: torch.Tensor, rows_TKN: torch.Tensor) -> None:
    """Row t to row `offsets_T[t]` of page `pages_T[t]`, in whatever format the pages are."""
    if not is_fp8(x_PKSN):
        x_PKSN[pages_T, :, offsets_T] = rows_TKN.to(x_PKSN.dtype)
        return
    values_TKN, scales_TK = quantised(rows_TKN)
    # As bytes: not every operation knows this dtype.
    x_PKSN.view(torch.uint8)[pages_T, :, offsets_T] = values_TKN.view(torch.uint8)
    scales_of(x_PKSN)[pages_T, :, offsets_T] = scales_TK


def take_pages(x_PKSN: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pages of these numbers (any shape), `[..., K, S, N]`, as wide numbers: those of e4m3 times their scales in
    `dtype`, others as they are."""
    if not is_fp8(x_PKSN):
        return x_PKSN[pages]
    values = x_PKSN.view(torch.uint8)[pages].view(E4M3).float()
    return values.mul_(scales_of(x_PKSN)[pages].unsqueeze(-1)).to(dtype)
