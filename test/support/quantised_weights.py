"""Quantised weights in each published form, written number by number after the published layouts, and what they stand
for in float64. Shares no code with `chitu.models`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Encoded(NamedTuple):
    """Tensors of one module, by the ends of their names, and the weight `[outputs, inputs]` in float64."""

    tensors: dict[str, torch.Tensor]
    weight: np.ndarray
    config: dict[str, Any]


def e4m3(byte: int) -> float:
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def e2m1(half: int) -> float:
    return -E2M1[half & 7] if half & 8 else E2M1[half]


def as_words(numbers: list[int], bits: int) -> list[int]:
    """Pack numbers into signed 32-bit words, the first in the lowest bits."""
    per_word = 32 // bits
    words = []
    for first in range(0, len(numbers), per_word):
        word = sum(number << (bits * place) for place, number in enumerate(numbers[first : first + per_word]))
        words.append(word - (1 << 32) if word >> 31 else word)
    return words


def rounded(scales: np.ndarray, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Return scales as stored in this dtype and what they are then, in float64."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = np.clip(np.round(np.log2(scales)) + 127, 0, 254).astype(np.uint8)
        stored = torch.from_numpy(exponents)
        return stored.view(dtype), 2.0 ** (exponents.astype(np.float64) - 127)
    stored = torch.from_numpy(scales).to(dtype)
    return stored, stored.to(torch.float64).numpy()


def _scales(source: np.random.Generator, deviation: float, *shape: int) -> np.ndarray:
    """Return scales by which numbers of this deviation get one of about 0.12."""
    return source.uniform(0.04, 0.2, shape) / deviation


def _float8_numbers(source: np.random.Generator, rows: int, columns: int) -> tuple[torch.Tensor, np.ndarray]:
    numbers = source.integers(0, 0x7F, (rows, columns)).astype(np.uint8) | (
        source.integers(0, 2, (rows, columns)).astype(np.uint8) << 7
    )
    values = np.array([[e4m3(int(byte)) for byte in row] for row in numbers])
    return torch.from_numpy(numbers).view(torch.float8_e4m3fn), values


def float8(
    source: np.random.Generator,
    rows: int,
    columns: int,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
    end: str = "weight_scale_inv",
) -> Encoded:
    data, values = _float8_numbers(source, rows, columns)
    scales, exact = rounded(_scales(source, 110, -(-rows // block[0]), -(-columns // block[1])), dtype)
    weight = np.array(
        [[values[r, c] * exact[r // block[0], c // block[1]] for c in range(columns)] for r in range(rows)]
    )
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Encoded({"weight": data, end: scales}, weight, config)


def _of_groups(bits: int, kind: str, packing: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax", **more}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


def float8_rows(source: np.random.Generator, rows: int, columns: int) -> Encoded:
    """FP8-dynamic of compressed-tensors: a scale a row."""
    data, values = _float8_numbers(source, rows, columns)
    scales, exact = rounded(_scales(source, 110, rows, 1), torch.bfloat16)
    config = _of_groups(8, "float", "float-quantized", strategy="channel")
    return Encoded({"weight": data, "weight_scale": scales}, values * exact, config)


def float8_tensor(source: np.random.Generator, rows: int, columns: int) -> Encoded:
    """FP8 of modelopt: one scale, and scales of activations and of a KV cache beside it."""
    data, values = _float8_numbers(source, rows, columns)
    scale = torch.tensor(0.00123)
    tensors = {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.5), "k_scale": torch.tensor(0.25)}
    return Encoded(tensors, values * float(scale), {"quant_method": "modelopt", "quant_algo": "FP8"})


def int8_rows(source: np.random.Generator, rows: int, columns: int, zeros: bool = False) -> Encoded:
    numbers = source.integers(-128, 128, (rows, columns)).astype(np.int8)
    scales, exact = rounded(_scales(source, 74, rows, 1), torch.bfloat16)
    tensors, middle = {"weight": torch.from_numpy(numbers), "weight_scale": scales}, np.zeros((rows, 1))
    if zeros:
        points = source.integers(-9, 9, (rows, 1)).astype(np.int8)
        tensors["weight_zero_point"], middle = torch.from_numpy(points), points.astype(np.float64)
    return Encoded(
        tensors,
        (numbers.astype(np.float64) - middle) * exact,
        _of_groups(8, "int", "int-quantized", strategy="channel", symmetric=not zeros),
    )


def packed_integers(
    source: np.random.Generator,
    rows: int,
    columns: int,
    bits: int = 4,
    group: int = 32,
    zeros: bool = False,
    ordered: bool = False,
) -> Encoded:
    """pack-quantized of compressed-tensors (Kimi-K2-Thinking): words along the inputs, for zero points the outputs."""
    half, groups = 1 << (bits - 1), -(-columns // group)
    numbers = source.integers(-half, half, (rows, columns))
    scales, exact = rounded(_scales(source, half / 1.7, rows, groups), torch.bfloat16)
    of_input = np.arange(columns) // group
    if ordered:
        of_input = source.permutation(of_input)
    points = source.integers(-half, half, (rows, groups)) if zeros else np.zeros((rows, groups), int)
    weight = np.array(
        [
            [(numbers[r, c] - points[r, of_input[c]]) * exact[r, of_input[c]] for c in range(columns)]
            for r in range(rows)
        ]
    )
    words = [as_words([int(n) + half for n in row], bits) for row in numbers]
    tensors = {
        "weight_packed": torch.tensor(words, dtype=torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        lines = [as_words([int(n) + half for n in points[:, g]], bits) for g in range(groups)]
        tensors["weight_zero_point"] = torch.tensor(lines, dtype=torch.int32).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = torch.tensor(of_input, dtype=torch.int32)
    kind = {"strategy": "group", "group_size": group, "symmetric": not zeros}
    return Encoded(tensors, weight, _of_groups(bits, "int", "pack-quantized", **kind))


def awq(source: np.random.Generator, rows: int, columns: int, group: int = 32) -> Encoded:
    """AWQ in the order of its GEMM kernels: a row an input, eight outputs a word in an order of its own."""
    groups = -(-columns // group)
    numbers, points = source.integers(0, 16, (columns, rows)), source.integers(0, 16, (groups, rows))
    scales, exact = rounded(_scales(source, 6.5, groups, rows), torch.float16)

    def words(lines: np.ndarray) -> torch.Tensor:
        ordered = [[int(line[first + place]) for first in range(0, rows, 8) for place in AWQ_ORDER] for line in lines]
        return torch.tensor([as_words(line, 4) for line in ordered], dtype=torch.int32)

    weight = np.array(
        [[(numbers[c, r] - points[c // group, r]) * exact[c // group, r] for c in range(columns)] for r in range(rows)]
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Encoded({"qweight": words(numbers), "qzeros": words(points), "scales": scales}, weight, config)


def gptq(
    source: np.random.Generator,
    rows: int,
    columns: int,
    bits: int = 4,
    group: int = 32,
    version: str = "gptq",
    ordered: bool = False,
) -> Encoded:
    """GPTQ: a row of words has the same bits of `32 / bits` inputs; zero points are stored less one in version 1."""
    groups, most = -(-columns // group), (1 << bits) - 1
    numbers, points = source.integers(0, most + 1, (columns, rows)), source.integers(1, most + 1, (groups, rows))
    scales, exact = rounded(_scales(source, most / 2.4, groups, rows), torch.float16)
    of_input = np.arange(columns) // group
    if ordered:
        of_input = source.permutation(of_input)
    weight = np.array(
        [
            [(numbers[c, r] - points[of_input[c], r]) * exact[of_input[c], r] for c in range(columns)]
            for r in range(rows)
        ]
    )
    qweight = [as_words([int(n) for n in numbers[:, r]], bits) for r in range(rows)]
    stored = points - 1 if version == "gptq" else points
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor([as_words([int(n) for n in line], bits) for line in stored], dtype=torch.int32),
        "scales": scales,
        "g_idx": torch.tensor(of_input, dtype=torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return Encoded(tensors, weight, {**config, "checkpoint_format": version})


def halves(source: np.random.Generator, rows: int, columns: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return 4-bit floats, the first of two in the lower half of a byte, and their values."""
    numbers = source.integers(0, 16, (rows, columns))
    packed = [[int(row[c]) | int(row[c + 1]) << 4 for c in range(0, columns, 2)] for row in numbers]
    return torch.tensor(packed, dtype=torch.uint8), np.array([[e2m1(int(n)) for n in row] for row in numbers])


def nvfp4(source: np.random.Generator, rows: int, columns: int, maker: str = "modelopt") -> Encoded:
    """NVFP4: groups of 16 with scales in e4m3, and one over all: modelopt multiplies by it, compressed-tensors
    divides. Either rounds the scale of a group to float32."""
    data, values = halves(source, rows, columns)
    of_group = source.integers(0x20, 0x7F, (rows, columns // 16)).astype(np.uint8)
    over_all = np.float32(0.00031 if maker == "modelopt" else 1 / 0.00031)
    scale = np.array([[e4m3(int(byte)) for byte in row] for row in of_group])
    scale = scale * float(over_all) if maker == "modelopt" else scale / float(over_all)
    scale = scale.astype(np.float32).astype(np.float64)
    weight = np.array([[values[r, c] * scale[r, c // 16] for c in range(columns)] for r in range(rows)])
    scales = torch.from_numpy(of_group).view(torch.float8_e4m3fn)
    if maker == "modelopt":
        tensors = {"weight": data, "weight_scale": scales, "weight_scale_2": torch.tensor(over_all)}
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        return Encoded({**tensors, "input_scale": torch.tensor(0.5)}, weight, config)
    tensors = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": torch.tensor([over_all])}
    return Encoded(
        tensors, weight, _of_groups(4, "float", "nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
    )


def mxfp4(source: np.random.Generator, rows: int, columns: int) -> Encoded:
    data, values = halves(source, rows, columns)
    scales, exact = rounded(_scales(source, 2.7, rows, columns // 32), torch.uint8)
    weight = np.array([[values[r, c] * exact[r, c // 32] for c in range(columns)] for r in range(rows)])
    kind = {"strategy": "group", "group_size": 32}
    return Encoded(
        {"weight_packed": data, "weight_scale": scales}, weight, _of_groups(4, "float", "mxfp4-pack-quantized", **kind)
    )


FORMS: dict[str, Callable[[np.random.Generator, int, int], Encoded]] = {
    "fp8 block": lambda s, r, c: float8(s, r, c, (32, 16)),
    "fp8 block larger than the matrix": lambda s, r, c: float8(s, r, c, (128, 128)),
    "fp8 block that divides nothing": lambda s, r, c: float8(s, r, c, (7, 9)),
    "fp8 block bfloat16 scales": lambda s, r, c: float8(s, r, c, (16, 24), torch.bfloat16),
    "fp8 block ue8m0": lambda s, r, c: float8(s, r, c, (16, 24), torch.float8_e8m0fnu),
    "fp8 block ue8m0 as bytes": lambda s, r, c: float8(s, r, c, (16, 24), torch.uint8),
    "mxfp8": lambda s, r, c: float8(s, r, c, (1, 32), torch.uint8, "weight_scale"),
    "fp8 rows": float8_rows,
    "fp8 tensor": float8_tensor,
    "int8 rows": int8_rows,
    "int8 rows zeros": lambda s, r, c: int8_rows(s, r, c, zeros=True),
    "int4": packed_integers,
    "int4 zeros": lambda s, r, c: packed_integers(s, r, c, zeros=True),
    "int4 ordered": lambda s, r, c: packed_integers(s, r, c, zeros=True, ordered=True),
    "int8 packed": lambda s, r, c: packed_integers(s, r, c, bits=8, group=16, zeros=True),
    "awq": awq,
    "awq small groups": lambda s, r, c: awq(s, r, c, group=16),
    "gptq": gptq,
    "gptq v2": lambda s, r, c: gptq(s, r, c, version="gptq_v2"),
    "gptq ordered": lambda s, r, c: gptq(s, r, c, ordered=True),
    "gptq 8 bits": lambda s, r, c: gptq(s, r, c, bits=8, group=16),
    "gptq 2 bits": lambda s, r, c: gptq(s, r, c, bits=2),
    "nvfp4": nvfp4,
    "nvfp4 compressed-tensors": lambda s, r, c: nvfp4(s, r, c, "compressed-tensors"),
    "mxfp4": mxfp4,
}
"""Every form of a matrix whose rows are a multiple of 8 and columns of 32."""


def gpt_oss_experts(source: np.random.Generator, experts: int, rows: int, columns: int) -> tuple[Encoded, np.ndarray]:
    """MXFP4 of gpt-oss: `[experts, outputs, groups, 16]` bytes. The weight is `[experts, inputs, outputs]`."""
    each = [mxfp4(source, rows, columns) for _ in range(experts)]
    blocks = torch.stack([one.tensors["weight_packed"].view(rows, columns // 32, 16) for one in each])
    scales = torch.stack([one.tensors["weight_scale"] for one in each])
    weight = np.stack([one.weight.T for one in each])
    return Encoded({"blocks": blocks, "scales": scales}, weight, {"quant_method": "mxfp4"}), weight


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Write a folder with these tensors, which is no whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


LAYERS = tuple(f"{part}.weight" for part in ("proj", "_mqa", "_qkvz", "_qkv", "in_proj_z", ".w1", ".w2", ".w3"))
"""Ends of names of the matrices that published checkpoints quantise."""


def encode(
    form: str, tensors: dict[str, torch.Tensor], quantization: dict[str, Any], seed: int = 7
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint's tensors as published in this form, and with the numbers that they stand for, float32.

    The quantised numbers are random ones of the usual size, not the given ones. `form`: of `support/checkpoints.py`.
    `quantization`: the config's `quantization_config`, which may be empty.
    """
    source, block = np.random.default_rng(seed), tuple(quantization.get("weight_block_size") or (32, 32))
    scales = torch.float8_e8m0fnu if quantization.get("scale_fmt") == "ue8m0" else torch.float32
    makers: dict[str, Callable[[np.random.Generator, int, int], Encoded]] = {
        "fp8_block": lambda s, r, c: float8(s, r, c, (block[0], block[1]), scales),
        "fp8_channel": float8_rows,
        "fp8_tensor": float8_tensor,
        "nvfp4": nvfp4,
        "mxfp4": mxfp4,
        "awq": awq,
        "gptq": gptq,
        "mxfp4_packed": mxfp4,
        "int4_packed": packed_integers,
        "int4_zeros": lambda s, r, c: packed_integers(s, r, c, zeros=True),
        "int8": int8_rows,
    }
    skipped = [*(quantization.get("ignore") or ()), *(quantization.get("modules_to_not_convert") or ())]
    small, large = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if any(_is_named(pattern, module) for pattern in skipped):
            continue
        if form == "mxfp4" and tensor.dim() == 3 and name.endswith("_proj"):
            encoded, weight = gpt_oss_experts(source, tensor.shape[0], tensor.shape[2], tensor.shape[1])
            found = {f"{name}_{end}": each for end, each in encoded.tensors.items()}
        elif form != "mxfp4" and tensor.dim() == 2 and name.endswith(LAYERS) and _fits(form, *tensor.shape):
            encoded = makers[form](source, *tensor.shape)
            weight, found = encoded.weight, {f"{module}.{end}": each for end, each in encoded.tensors.items()}
        else:
            continue
        del small[name]
        small |= found
        large[name] = torch.from_numpy(weight).float()
    return small, large


def _is_named(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    words = pattern.replace(".", r"\.").replace("*", ".*")
    return re.search(rf"(^|\.){words}(\.|$)", module) is not None


def _fits(form: str, rows: int, columns: int) -> bool:
    per_row = {"nvfp4": 16, "mxfp4_packed": 32, "int4_packed": 8, "int4_zeros": 8, "gptq": 8}.get(form, 1)
    if form == "int4_zeros" and rows % 8:
        return False
    return columns % per_row == 0 and (form not in ("awq", "gptq") or rows % 8 == 0)


def quantise_folder(
    plain: Path, quantised: Path, dequantised: Path, form: str, quantization: dict[str, Any]
) -> list[str]:
    """Write a checkpoint's copy with quantised layers, and one with the numbers that they stand for, float32. Returns
    the names of the tensors that are quantised."""
    tensors: dict[str, torch.Tensor] = load_file(plain / "model.safetensors")
    small, large = encode(form, tensors, quantization)
    for folder, kept in ((quantised, small), (dequantised, large)):
        folder.mkdir(parents=True)
        for file in plain.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file({name: each.contiguous().clone() for name, each in kept.items()}, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return [name for name in tensors if name not in small or small[name].dtype != tensors[name].dtype]
