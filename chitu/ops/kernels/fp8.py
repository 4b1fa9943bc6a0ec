"""Rows to and from e4m3 with a scale (`ops/fp8_pages.py` says what they are), for the kernels that append and attend.

Rounding is done in integers instead of by the device's conversion, and division is IEEE's: the same bytes on every
device, also under Triton's interpreter, whose conversion rounds differently. The way back is exact however it is done,
so it is the device's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of float32 numbers without their sign: as integers they have the order of the numbers, then infinity,
    then NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest):
    """Of rows whose largest `magnitude` this is."""
    scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
    return tl.where(largest < 0x7F800000, tl.where(largest == 0, 1.0, scale), float("nan"))


@triton.jit
def to_e4m3(x, scale):
    """x divided by its row's scale, as e4m3, rounded to nearest, ties to even; 0 where the scale is NaN."""
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
    """Where the scale of a row lies, of the head that begins `head_start` bytes behind `pages_ptr`: behind the numbers
    of all rows of the page."""
    scales_ptr = (pages_ptr + PAGE * DIM).to(tl.pointer_type(tl.float32))
    return scales_ptr + (head_start >> 2) + row_in_page


@triton.jit
def mix(shares, values, scales, dtype: tl.constexpr):
    """The shares `[M, T]` of values `[T, N]` e4m3 with scales `[T]`, summed in float32, multiplied in `dtype`."""
    if dtype == tl.float16:
        # A share times a scale may be smaller than float16 can say; relative to the largest scale it is as ever.
        largest = tl.max(scales, 0)
        relative = (shares * (scales / largest)[None, :]).to(dtype)
        mixed = tl.dot(relative, values.to(dtype), input_precision="ieee") * largest
    else:
        mixed = tl.dot((shares * scales[None, :]).to(dtype), values.to(dtype), input_precision="ieee")
    return mixed
