"""Rows to and from e4m3 with a scale (format: `ops/fp8_pages.py`), for the kernels that append and attend.

Rounding uses integers instead of the device's conversion, and division follows IEEE: the bytes are the same on every
device, also under Triton's interpreter, whose conversion rounds differently. The conversion back is exact on any
device, so it uses the device's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """Return the bits of float32 numbers without their sign. As integers they have the order of the numbers, then
    infinity, then NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest):
    """Return the scale of rows with this largest `magnitude`."""
    scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
    return tl.where(largest < 0x7F800000, tl.where(largest == 0, 1.0, scale), float("nan"))


@triton.jit
def to_e4m3(x, scale):
    """Divide x by its row's scale and round to e4m3, to nearest, ties to even; 0 if the scale is NaN."""
    y = tl.div_rn(x, scale)
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 e4m3 has steps of 2**-9, which are those of float32 from 2**14 on.
    small = magnitude(tl.abs(y) + 16384.0) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(scale == scale, code, 0).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def scale_at(pages_ptr, head_start, row_in_page, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Return the address of a row's scale in the head that begins `head_start` bytes behind `pages_ptr`. Scales are
    behind the numbers of all rows of the page."""
    scales_ptr = (pages_ptr + PAGE * DIM).to(tl.pointer_type(tl.float32))
    return scales_ptr + (head_start >> 2) + row_in_page


@triton.jit
def mix(shares, values, scales, dtype: tl.constexpr):
    """Return shares `[M, T]` times e4m3 values `[T, N]` with scales `[T]`: products in `dtype`, sums in float32."""
    if dtype == tl.float16:
        # A share times a scale may underflow float16, so scales are taken relative to the largest one.
        largest = tl.max(scales, 0)
        relative = (shares * (scales / largest)[None, :]).to(dtype)
        mixed = tl.dot(relative, values.to(dtype), input_precision="ieee") * largest
    else:
        mixed = tl.dot((shares * scales[None, :]).to(dtype), values.to(dtype), input_precision="ieee")
    return mixed
