"""From the blocks of ggml's formats to weights that stay small (`ops/kept.py`), with the same numbers to the bit. Pure.

A row is a run of blocks. Most have a float16 `d` as scale, some an `m` that is added; the K formats have blocks of 256
numbers whose runs have scales of 4 to 8 bits, times `d`. Products of codes and scales are exact in float32, and so is
`d` times the scale of a run, so only the sum with what is added is rounded, as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chitu.models.gguf import BLOCKS
from chitu.models.gguf_blocks import E2M1_DOUBLED, IQ4_LEVELS
from chitu.ops.kept import KeptBlocks

UNSIGNED = tuple(map(float, range(16)))


def kept_of_ggml(dtype: str, data: torch.Tensor) -> KeptBlocks:
    """Return the weight of rows of blocks, uint8 `[out, bytes]`. `dtype`: one of `FORMATS`."""
    return FORMATS[dtype](data.reshape(data.shape[0], -1, BLOCKS[dtype][1]))


def _half(data: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at this byte of each block, `[out, blocks]`."""
    return data[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the last dimension's bytes, then the high ones."""
    return torch.cat((pairs & 0xF, pairs >> 4), dim=-1)


def _split(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return the last dimension as parts of this size, `[out, blocks, parts, size]`."""
    return data.reshape(*data.shape[:2], -1, size)


def _fifth_bits(data: torch.Tensor, at: int) -> torch.Tensor:
    """Return bit i of the four bytes from `at` on for number i of each block, in place 4."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (data[:, :, at : at + 4].unsqueeze(3) >> shifts & 1).flatten(2) << 4


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    return (codes.view(torch.int8) - middle).flatten(1)


def _q4_0(data: torch.Tensor) -> KeptBlocks:
    table = tuple(code - 8.0 for code in UNSIGNED)
    return KeptBlocks("table4", _nibbles(data[:, :, 2:]).flatten(1), _half(data, 0), 32, table=table)


def _q4_1(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(data[:, :, 4:]).flatten(1)
    return KeptBlocks("table4", codes, _half(data, 0), 32, _half(data, 2), UNSIGNED)


def _q5_0(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(data[:, :, 6:]) | _fifth_bits(data, 2)
    return KeptBlocks("int8", _signed(codes, 16), _half(data, 0), 32)


def _q5_1(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(data[:, :, 8:]) | _fifth_bits(data, 4)
    return KeptBlocks("int8", _signed(codes, 0), _half(data, 0), 32, _half(data, 2))


def _q8_0(data: torch.Tensor) -> KeptBlocks:
    return KeptBlocks("int8", data[:, :, 2:].flatten(1), _half(data, 0), 32)


def _iq4_nl(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(data[:, :, 2:]).flatten(1)
    return KeptBlocks("table4", codes, _half(data, 0), 32, table=tuple(map(float, IQ4_LEVELS)))


def _mxfp4(data: torch.Tensor) -> KeptBlocks:
    scales = torch.ldexp(torch.ones(data.shape[:2]), data[:, :, 0].int() - 128)
    return KeptBlocks("table4", _nibbles(data[:, :, 1:]).flatten(1), scales, 32, table=tuple(map(float, E2M1_DOUBLED)))


def _iq4_xs(data: torch.Tensor) -> KeptBlocks:
    low = data[:, :, 4:8].repeat_interleave(2, 2) >> torch.tensor((0, 4) * 4, dtype=torch.uint8) & 0xF
    high = data[:, :, 2:4].repeat_interleave(4, 2) >> torch.tensor((0, 2, 4, 6) * 2, dtype=torch.uint8) & 3
    scales = _half(data, 0).float().unsqueeze(2) * ((low | high << 4).float() - 32)
    codes = _nibbles(_split(data[:, :, 8:], 16)).flatten(1)
    return KeptBlocks("table4", codes, scales.flatten(1), 32, table=tuple(map(float, IQ4_LEVELS)))


def _k_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the eight runs of each block and what is added: 6 bits of each are in 12 bytes from 4 on."""
    first, second, rest = data[:, :, 4:8], data[:, :, 8:12], data[:, :, 12:16]
    scales = torch.cat((first & 63, rest & 0xF | first >> 6 << 4), dim=2)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=2)
    scales_OR = (_half(data, 0).float().unsqueeze(2) * scales.float()).flatten(1)
    return scales_OR, (_half(data, 2).float().unsqueeze(2) * minima.float()).neg_().flatten(1)


def _q4_k(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(_split(data[:, :, 16:], 32)).flatten(1)
    scales, added = _k_scales(data)
    return KeptBlocks("table4", codes, scales, 32, added, UNSIGNED)


def _q5_k(data: torch.Tensor) -> KeptBlocks:
    codes = _nibbles(_split(data[:, :, 48:], 32)).flatten(2)
    bits = data[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8).unsqueeze(1) & 1
    scales, added = _k_scales(data)
    return KeptBlocks("int8", _signed(codes | bits.flatten(2) << 4, 0), scales, 32, added)


def _q6_k(data: torch.Tensor) -> KeptBlocks:
    low = _nibbles(_split(data[:, :, :128], 64)).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    high = (_split(data[:, :, 128:192], 32).unsqueeze(3) >> shifts & 3).flatten(2)
    scales = _half(data, 208).float().unsqueeze(2) * data[:, :, 192:208].contiguous().view(torch.int8).float()
    return KeptBlocks("int8", _signed(low | high << 4, 32), scales.flatten(1), 16)


def _q2_k(data: torch.Tensor) -> KeptBlocks:
    codes = (
        _split(data[:, :, 16:80], 32).unsqueeze(3) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    ).flatten(1)
    factors = data[:, :, :16]
    scales = _half(data, 80).float().unsqueeze(2) * (factors & 15).float()
    minima = _half(data, 82).float().unsqueeze(2) * (factors >> 4).float()
    return KeptBlocks("table4", codes, scales.flatten(1), 16, minima.neg_().flatten(1), UNSIGNED)


def _q3_k(data: torch.Tensor) -> KeptBlocks:
    low = (_split(data[:, :, 32:96], 32).unsqueeze(3) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(
        2
    )
    high = (data[:, :, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(2)
    nibbles, rest = _nibbles(data[:, :, 96:104]), data[:, :, 104:108]
    pairs = (rest.unsqueeze(2) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(2)
    scales = _half(data, 108).float().unsqueeze(2) * ((nibbles | pairs << 4).float() - 32)
    table = tuple(code - 4.0 for code in UNSIGNED)
    return KeptBlocks("table4", (low | high << 2).flatten(1), scales.flatten(1), 16, table=table)


FORMATS: Mapping[str, Callable[[torch.Tensor], KeptBlocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
