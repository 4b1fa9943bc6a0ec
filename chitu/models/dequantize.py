"""The arithmetic of quantised weights: from what a file holds to numbers. Pure; called by `weights.py`.

A number is computed as the programs that published the weights do it: in float32, `(number - zero) * scale`, rounded
once to the model's dtype at the end. `number - zero` is exact, and so is its product with a scale of 16 bits or a power
of 2. With a scale over all scales (NVFP4) the scale of a block is their product, or quotient, rounded to float32 first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from chitu.models.logical_tensors import PackedTensor
from chitu.ops.kept import KeptBlocks

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the lower three bits of a 4-bit float; the highest bit is the sign."""
WORD_BITS = 32


class Quantized(NamedTuple):
    """A part of a quantised matrix, in the orientation of its file."""

    packed: PackedTensor
    data: torch.Tensor
    """As stored: numbers, bytes or words."""
    scales: torch.Tensor
    """Of the blocks that the part touches, float32 `[block rows, block columns]`, without the factor over all."""
    zeros: torch.Tensor | None
    """Like `scales`."""
    shape: tuple[int, int]
    """Rows and columns, in numbers."""
    first: tuple[int, int] = (0, 0)
    """Row and column of the part within its first block."""
    skipped: int = 0
    """Numbers before the part in the first word of `data`."""
    order: torch.Tensor | None = None
    """Group of each input of the part, int64; None if the groups are runs."""
    factor: torch.Tensor | None = None
    """Over all scales; a divisor if the packed weight `divides`."""

    @property
    def whole_scales(self) -> torch.Tensor:
        """Return the scales with the factor over all."""
        return scales_of(self.scales, self.factor, self.packed.divides)


def dequantise(part: Quantized) -> torch.Tensor:
    """Return the part, float32, as a file without quantisation has it: outputs x inputs."""
    numbers = _numbers(part)
    if part.zeros is not None:
        numbers = numbers.sub_(_per_number(part.zeros, part))
    numbers = numbers.mul_(_per_number(part.whole_scales, part))
    return numbers.t() if part.packed.is_transposed else numbers


def kept_of(part: Quantized, has_half_scales: bool) -> KeptBlocks | None:
    """Return the part, of one of `LogicalTensors.kept` and from the begin of a group of inputs on, as a weight that
    stays small; None if its numbers are not those of such. `has_half_scales`: whether the file's scales are float16."""
    packed, inputs = part.packed, 0 if part.packed.is_transposed else 1
    run = packed.block[inputs]
    if part.order is not None:
        groups = torch.arange(part.shape[inputs], device=part.order.device) // run
        if not torch.equal(part.order, groups + part.order[0]):
            return None
        own = inputs, int(part.order[0]), int(groups[-1]) + 1
        zeros = None if part.zeros is None else part.zeros.narrow(*own)
        part = part._replace(scales=part.scales.narrow(*own), zeros=zeros)
    scales_OR = _by_output(part.whole_scales, part)
    if packed.code == "number":
        codes = part.data.view(torch.uint8)
        if part.data.dtype == torch.int8:
            return KeptBlocks("int8", codes, scales_OR, run)
        has_nan = bool(((codes & 0x7F) == 0x7F).any())
        return None if has_nan else KeptBlocks("e4m3", codes, scales_OR, run)
    if packed.code == "e2m1":
        pairs = part.data.contiguous().view(torch.uint8)
        codes = torch.stack((pairs & 0xF, pairs >> 4), dim=2).flatten(1).narrow(1, part.skipped, part.shape[1])
        over_O = None
        if packed.has_factor_apart and part.factor is not None:
            scales_OR, over_O = _by_output(part.scales, part).half(), part.factor.expand(len(codes)).contiguous()
        return KeptBlocks("e2m1", codes, scales_OR, run, table=(*E2M1, *(-x for x in E2M1)), over_O=over_O)
    numbers = integers(part.data, packed.bits, packed.lanes, packed.packed_dim)
    numbers = numbers.narrow(packed.packed_dim, part.skipped, part.shape[packed.packed_dim])
    numbers = numbers.t() if packed.is_transposed else numbers
    middle = 128 if packed.bits > 4 else 8
    added_OR = None
    if part.zeros is not None:  # both products are exact, since scales have 16 bits
        added_OR = (middle - _by_output(part.zeros, part)).mul_(scales_OR)
    elif has_half_scales and packed.has_half_scales("F16"):
        scales_OR = scales_OR.half()
    if packed.bits > 4:
        return KeptBlocks("int8", (numbers - middle).to(torch.int8).view(torch.uint8), scales_OR, run, added_OR)
    middle = packed.middle if part.zeros is None else middle
    table = tuple(float(code - middle) for code in range(16))
    return KeptBlocks("int4", numbers.to(torch.uint8), scales_OR, run, added_OR, table)


def _by_output(grid: torch.Tensor, part: Quantized) -> torch.Tensor:
    """Return the numbers of blocks for each output and group of inputs."""
    outputs = 1 if part.packed.is_transposed else 0
    if part.packed.block[outputs] > 1:
        grid = grid.repeat_interleave(part.packed.block[outputs], outputs)
        grid = grid.narrow(outputs, part.first[outputs], part.shape[outputs])
    return (grid if outputs == 0 else grid.t()).contiguous()


def _numbers(part: Quantized) -> torch.Tensor:
    packed, size = part.packed, part.shape[part.packed.packed_dim]
    if packed.code == "number":
        return _floats(part.data)
    if packed.code == "e2m1":
        numbers = halves(part.data)
    else:
        numbers = integers(part.data, packed.bits, packed.lanes, packed.packed_dim).to(torch.float32)
        if part.zeros is None:
            numbers = numbers.sub_(packed.middle)
    return numbers.narrow(packed.packed_dim, part.skipped, size)


def _floats(data: torch.Tensor) -> torch.Tensor:
    """Return numbers of 8 bits as float32. On a CPU by a table: torch's conversion takes ten times as long."""
    if data.device.type != "cpu" or not data.dtype.is_floating_point:
        return data.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(data.dtype).to(torch.float32)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().to(torch.int32)).view(data.shape)


def halves(data: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit floats of bytes `[R, C]` as float32 `[R, 2 C]`; the low half of a byte is first."""
    numbers = torch.tensor((*E2M1, *(-x for x in E2M1)), dtype=torch.float32, device=data.device)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    both = pairs.view(torch.int64).flatten()  # two numbers at once, which is faster
    chosen = both.index_select(0, data.contiguous().view(torch.uint8).flatten().to(torch.int32))
    return chosen.view(torch.float32).view(data.shape[0], -1)


def integers(words: torch.Tensor, bits: int, lanes: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return the unsigned integers of 32-bit words, int32, with `len(lanes)` times the size in `dim`."""
    shifts = torch.tensor([lanes.index(place) * bits for place in range(len(lanes))], device=words.device)
    shape = (len(lanes), 1) if dim == 0 else (len(lanes),)
    spread = (words.unsqueeze(dim + 1) >> shifts.to(torch.int32).view(shape)) & ((1 << bits) - 1)
    return spread.flatten(dim, dim + 1)


def scales_of(scales: torch.Tensor, factor: torch.Tensor | None, divides: bool) -> torch.Tensor:
    """Return scales as float32. Bytes are powers of two, with 127 for 1."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    scales = scales.to(torch.float32)
    if factor is None:
        return scales
    return scales / factor.float() if divides else scales * factor.float()


def _per_number(grid: torch.Tensor, part: Quantized) -> torch.Tensor:
    """Return a block's number for each number of the part; a dimension of 1 means that all have the same."""
    inputs = 0 if part.packed.is_transposed else 1
    for dim in (1, 0):
        if part.order is not None and dim == inputs:
            grid = grid.index_select(dim, part.order)
        elif grid.shape[dim] > 1 and part.packed.block[dim] > 1:
            grid = grid.repeat_interleave(part.packed.block[dim], dim).narrow(dim, part.first[dim], part.shape[dim])
    return grid
