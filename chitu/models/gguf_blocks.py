"""The arithmetic of ggml's block formats: from the bytes of blocks to float32, in the order of ggml's own code, so that
the numbers are the same to the bit. Pure; called by `weights.py`.

A block holds 32 or 256 numbers of a row: small integers, and scales (minima) of the block or of runs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chitu.models.gguf import BLOCKS

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantise_blocks(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the numbers of rows of blocks: uint8 `[rows, bytes]` to float32 `[rows, numbers]`. `dtype`: ggml's type by
    name, of `gguf.BLOCKS`."""
    return _FORMATS[dtype](data.reshape(-1, BLOCKS[dtype][1])).view(len(data), -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at this byte of each block, as float32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int8).float()


def _fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return the fields of `bits` bits, uint8. Of each run of `width` bytes come all lowest fields, then all next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).view(-1, 1)
    return ((data.reshape(len(data), -1, 1, width) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _times(numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """Return numbers times the scale of their run, less its minimum."""
    runs = scales.unsqueeze(-1) * numbers.view(len(numbers), scales.shape[1], -1)
    return (runs if minima is None else runs - minima.unsqueeze(-1)).flatten(1)


def _levels(levels: tuple[int, ...], index: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(levels, dtype=torch.float32, device=index.device)
    return table.index_select(0, index.flatten().to(torch.int32)).view(index.shape)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes in their order, at the place of a fifth bit."""
    return _fields(data, 1, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _signed(blocks[:, 2:]) * _half(blocks, 0)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, numbers = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32).float()
    return _times(numbers, _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = (low | (high << 4)).float() - 32
    lacking = _fields(blocks[:, :32], 1, 32) ^ 1  # a bit that is not set takes 4 away
    numbers = _fields(blocks[:, 32:96], 2, 32).float() - (lacking << 2).float()
    return _times(numbers, _half(blocks, 108) * scales)


def _scales_and_minima(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight scales and eight minima of 6 bits, packed in 12 bytes."""
    scales, minima, both = data[:, :4], data[:, 4:8], data[:, 8:12]
    return (
        torch.cat((scales & 63, (both & 15) | ((scales >> 2) & 48)), dim=1).float(),
        torch.cat((minima & 63, (both >> 4) | ((minima >> 2) & 48)), dim=1).float(),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return _times(_fields(blocks[:, 16:], 4, 32).float(), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    numbers = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _times(numbers.float(), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    return _times(numbers.float() - 32, _half(blocks, 208) * _signed(blocks[:, 192:208]))


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _levels(IQ4_LEVELS, _fields(blocks[:, 2:], 4, 16))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = _fields(blocks[:, 2:4], 2, 1)
    scales = (low | (high << 4)).float() - 32
    return _times(_levels(IQ4_LEVELS, _fields(blocks[:, 8:], 4, 16)), _half(blocks, 0) * scales)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent = blocks[:, :1].to(torch.int32)  # of half the power, since the levels are doubled
    subnormal = torch.full_like(exponent, 1 << 21) << exponent.clamp(max=1)
    bits = torch.where(exponent < 2, subnormal, (exponent - 1) << 23)
    return bits.view(torch.float32) * _levels(E2M1_DOUBLED, _fields(blocks[:, 1:], 4, 16))


def _floats(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


_FORMATS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "F32": _floats(torch.float32), "F16": _floats(torch.float16), "BF16": _floats(torch.bfloat16),
}  # fmt: skip
