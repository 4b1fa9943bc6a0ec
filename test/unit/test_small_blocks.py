"""Blocks of ggml's formats are kept with the numbers that their layouts mean, number by number."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from chitu.models.gguf import BLOCKS
from chitu.models.gguf_blocks import E2M1_DOUBLED, IQ4_LEVELS, dequantise_blocks
from chitu.models.logical_tensors import KEPT_BLOCKS
from chitu.models.small_blocks import FORMATS, kept_of_ggml

NUM_BLOCKS = 3


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def nibble(pairs: bytes, i: int) -> int:
    """Return number i of a run of twice as many: first the low halves of all bytes, then the high ones."""
    return pairs[i] & 15 if i < len(pairs) else pairs[i - len(pairs)] >> 4


def bit(data: bytes, i: int) -> int:
    return data[i // 8] >> i % 8 & 1


def k_scale(packed: bytes, run: int) -> tuple[int, int]:
    """Return scale and minimum of a run of a K block, 6 bits each."""
    if run < 4:
        return packed[run] & 63, packed[run + 4] & 63
    low = packed[run + 4]
    return low & 15 | packed[run - 4] >> 6 << 4, low >> 4 | packed[run] >> 6 << 4


def q4_k(block: bytes, i: int) -> float:
    scale, minimum = k_scale(block[4:16], i // 32)
    code = nibble(block[16 + i // 64 * 32 :][:32], i % 64)
    return half(block, 0) * scale * code - half(block, 2) * minimum


def q5_k(block: bytes, i: int) -> float:
    scale, minimum = k_scale(block[4:16], i // 32)
    code = nibble(block[48 + i // 64 * 32 :][:32], i % 64) + 16 * (block[16 + i % 32] >> i // 32 & 1)
    return half(block, 0) * scale * code - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    part, within = divmod(i, 128)
    low = nibble(block[part * 64 : part * 64 + 64], within)
    high = block[128 + part * 32 + within % 32] >> within // 32 * 2 & 3
    scale = struct.unpack_from("b", block, 192 + i // 16)[0]
    return half(block, 208) * scale * ((low | high << 4) - 32)


def iq4_xs(block: bytes, i: int) -> float:
    run = i // 32
    scale = block[4 + run // 2] >> run % 2 * 4 & 15 | (struct.unpack_from("<H", block, 2)[0] >> 2 * run & 3) << 4
    return half(block, 0) * (scale - 32) * IQ4_LEVELS[nibble(block[8 + run * 16 :][:16], i % 32)]


def q2_k(block: bytes, i: int) -> float:
    code = block[16 + i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3
    factors = block[i // 16]
    return half(block, 80) * (factors & 15) * code - half(block, 82) * (factors >> 4)


def q3_k(block: bytes, i: int) -> float:
    code = block[32 + i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3
    code += 4 * (block[i % 32] >> i // 32 & 1) - 4
    run = i // 16
    scale = nibble(block[96:104], run) | (block[104 + run % 4] >> run // 4 * 2 & 3) << 4
    return half(block, 108) * (scale - 32) * code


MEANING: dict[str, Callable[[bytes, int], float]] = {
    "Q4_0": lambda b, i: half(b, 0) * (nibble(b[2:], i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * nibble(b[4:], i) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * (nibble(b[6:], i) + 16 * bit(b[2:6], i) - 16),
    "Q5_1": lambda b, i: half(b, 0) * (nibble(b[8:], i) + 16 * bit(b[4:8], i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * struct.unpack_from("b", b, 2 + i)[0],
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": lambda b, i: half(b, 0) * IQ4_LEVELS[nibble(b[2:], i)],
    "IQ4_XS": iq4_xs,
    "MXFP4": lambda b, i: 2.0 ** (b[0] - 128) * E2M1_DOUBLED[nibble(b[1:], i)],
}
HALF_PLACES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_blocks(form: str) -> np.ndarray:
    """Return two rows of random blocks whose scales are finite; some are denormal in float16."""
    generator, nbytes = np.random.default_rng(len(form)), BLOCKS[form][1]
    blocks = generator.integers(0, 256, (2, NUM_BLOCKS, nbytes), dtype=np.uint8)
    for at in HALF_PLACES.get(form, (0,)):
        blocks[:, :, at + 1] &= 0xBF  # no infinity
        blocks[0, 0, at + 1] &= 0x83
    return blocks


def numbers_of(form: str, blocks: np.ndarray) -> Iterator[float]:
    """Yield every number of the rows. Python computes in float64, where all products and sums are exact."""
    size = BLOCKS[form][0]
    for block in blocks.reshape(-1, blocks.shape[2]):
        yield from (MEANING[form](block.tobytes(), i) for i in range(size))


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_are_kept_with_exactly_their_numbers(form):
    blocks = random_blocks(form)
    expected = torch.tensor(list(numbers_of(form, blocks)), dtype=torch.float64).float().view(2, -1)
    found = kept_of_ggml(form, torch.from_numpy(blocks.reshape(2, -1)))
    assert torch.equal(found.dequantise(), expected) and len(expected.unique()) > 40
    if found.added_OR is not None:  # so it does not matter whether a compiler fuses product and sum
        products = found._replace(added_OR=None)
        codes = products._replace(scales_OR=torch.ones_like(found.scales_OR)).dequantise().double()
        scales = found.scales_OR.double().repeat_interleave(found.run, 1)
        assert torch.equal(products.dequantise().double(), codes * scales), "exact in float32"


@pytest.mark.parametrize("form", FORMATS)
def test_kept_blocks_are_what_is_dequantised_and_as_large_as_planned(form):
    data = torch.from_numpy(random_blocks(form).reshape(2, -1))
    found, expected = kept_of_ggml(form, data), dequantise_blocks(data, form)
    assert torch.equal(found.dequantise(), expected)
    run, nbytes = KEPT_BLOCKS[form]
    factors = [found.scales_OR] if found.added_OR is None else [found.scales_OR, found.added_OR]
    held = found.codes_OI.numel() // (2 if found.form == "table4" else 1) + sum(each.nbytes for each in factors)
    assert found.run == run and held == expected.numel() // run * nbytes
    part = found.part(run, 2 * run - 3)
    assert torch.equal(part.dequantise(), expected[:, run : 3 * run - 3])
