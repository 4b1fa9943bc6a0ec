"""From a checkpoint's tensors to the *logical* ones: which of them together hold one weight. No torch.

A quantised weight has one name (`x.weight`), and the shape that it has when it is dequantised. Its scales, zero points
and packed forms are hidden. `dequantize.py` has the arithmetic. The headers of the files decide whether a tensor is
quantised, since lists of modules that are not converted are written in many dialects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.gguf import BLOCKS
from chitu.models.gguf_names import GgufTensor
from chitu.models.quantization import AWQ_LANES, EIGHT_BITS, QUANTISED, WITHOUT_EFFECT, Code, Quantization
from chitu.ops.kept_on_cards import keeps_on_cards

if TYPE_CHECKING:
    from chitu.ops.kept import Form

WIDE_BYTES = 4
"""Of a number of float32."""
KEPT_BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 34), "Q5_1": (32, 36), "Q8_0": (32, 34), "Q2_K": (16, 16),
    "Q3_K": (16, 12), "Q4_K": (32, 24), "Q5_K": (32, 40), "Q6_K": (16, 20), "IQ4_NL": (32, 18), "IQ4_XS": (32, 20),
    "MXFP4": (32, 20),
}  # fmt: skip
"""ggml's types that kernels keep: the numbers that have a common scale, and their bytes in memory, where codes have 4
or 8 bits and the K types have float32 scales."""
WIDE_CODES = ("Q5", "Q6", "Q8")
"""Begins of those whose codes have 8 bits."""


class Header(Protocol):
    """A tensor of a file by its header."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Tensors that together hold one weight.

    `data` holds a matrix of numbers, or several (experts), in the orientation of the file: `rows x columns`. `scales`
    and `zeros` hold a number a block. A weight is `(number - zero) * scale`, with `factor` over all scales.
    """

    shape: tuple[int, ...]
    """Of the dequantised weight."""
    code: Code
    """Meaning of `data`: numbers of their dtype; 4-bit floats, two a byte, the low half first; integers in words;
    blocks of a type of ggml, which have their scales in them."""
    data: str
    scales: str
    block: tuple[int, int]
    """Rows and columns, as stored, with a common scale."""
    bits: int = 8
    is_transposed: bool = False
    """Whether `data` has the weight's columns as rows."""
    packed_dim: int = 1
    """Dimension, 0 for rows, of which a word of `data` holds several integers."""
    lanes: tuple[int, ...] = ()
    """Position among the integers of a word of the one in bits 0, of that in the bits behind it, ..."""
    middle: int = 0
    """Integer that stands for 0; unless there are `zeros`."""
    zeros: str = ""
    zeros_dim: int = 1
    """Dimension of which a word of `zeros` holds several; words have the lanes of `data`."""
    adds_one: bool = False
    """Whether stored zeros are one too small; the largest one means 0."""
    factor: str = ""
    divides: bool = False
    """Whether scales are divided by `factor`, not multiplied."""
    has_factor_apart: bool = False
    """Whether `factor` stays beside scales where the weight is kept small on a GPU: those in e4m3 then take 2 bytes. A
    quotient is not the product with an inverse, so none that divides."""
    order: str = ""
    """Tensor with the group of each input, if groups are not runs; inputs are rows if `is_transposed`."""
    pair: str = ""
    """Tensor whose rows alternate with those of `data`, which has the first."""
    head_rows: int = 0
    """Rows of a head, of which the two halves are interleaved in the file; 0: they are in order."""
    added: float = 0.0
    """What the file has added to each number."""
    is_list: bool = False
    """Whether each of its rows is a single number, without a dimension of its own."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Return rows and columns as stored, in numbers."""
        rows, columns = (*self.shape, 1)[-2:] if self.is_list else self.shape[-2:]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def has_half_scales(self, dtype: str) -> bool:
        """Return whether scales stored in this dtype stay float16 where the weight is kept small."""
        return dtype == "F16" and self.code == "integer" and not self.zeros

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of its tensors."""
        return tuple(filter(None, (self.data, self.pair, self.scales, self.zeros, self.factor, self.order)))


class Kept(NamedTuple):
    """A matrix that kernels can keep small (`ops/kept.py`)."""

    run: int
    """Inputs with a common scale: a part of its columns must begin with a run."""
    num_bytes: int
    """In a CPU's memory."""
    form: Form
    """Of its codes."""
    card_bytes: int
    """In a GPU's memory, if that keeps it."""


@dataclass(frozen=True, slots=True)
class LogicalTensors:
    """The tensors of a checkpoint as a model sees them."""

    plain: Mapping[str, tuple[int, ...]]
    """Shapes of those that are stored as they are."""
    packed: Mapping[str, PackedTensor]
    kept: Mapping[str, Kept]
    """Of the packed ones, those that CPUs keep as small as they are."""
    cpu_bytes: int = 0
    """Of all in a CPU's memory under float32, if kernels keep what they can."""

    @property
    def on_cards(self) -> Mapping[str, Kept]:
        """Return those that GPUs keep."""
        shapes = {name: self.packed[name].shape for name in self.kept}
        return {name: each for name, each in self.kept.items() if keeps_on_cards(each.form, each.run, shapes[name][1])}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**self.plain, **{name: each.shape for name, each in self.packed.items()}}

    def count(self) -> int:
        """Return the count of numbers, as memory holds them when they are dequantised."""
        return sum(map(math.prod, self.shapes.values()))


def logical_tensors(entries: Mapping[str, Header], quantization: Quantization | None, where: str) -> LogicalTensors:
    """Return the logical tensors. `where`: begins the messages. Raises ConfigError for scales that do not fit their
    weight, UnsupportedModel for quantised tensors that the config does not explain."""
    packed: dict[str, PackedTensor] = {}
    if quantization is not None:
        for name in entries:
            found = _packed(name, entries, quantization, where)
            if found is not None:
                packed[found[0]] = found[1]
        if not packed:
            raise ConfigError(
                f"{where}: quantization_config says {quantization.words}, but no tensor is quantised; remove it from "
                "config.json if the weights were converted"
            )
    packed |= _of_gguf(entries, where)
    hidden = {part for each in packed.values() for part in each.parts}
    plain = {}
    for name, entry in entries.items():
        if name in hidden or (quantization is not None and name.endswith(WITHOUT_EFFECT)):
            continue
        if name.endswith(QUANTISED) or entry.dtype in ("F8_E8M0",):
            why = "has no quantization_config" if quantization is None else f"says {quantization.words}"
            raise UnsupportedModel(
                f"{where}: tensor {name!r} belongs to quantised weights, but config.json {why}, and nothing uses it"
            )
        if quantization is not None and entry.dtype in EIGHT_BITS and len(entry.shape) > 1:
            raise UnsupportedModel(f"{where}: tensor {name!r} is stored in 8 bits ({entry.dtype}) and has no scale")
        plain[name] = entry.shape
    kept = {name: small for name, each in packed.items() if (small := _kept(each, entries)) is not None}
    sizes = {name: _wide_bytes(shape, entries[name].dtype) for name, shape in plain.items()}
    sizes |= {name: _wide_bytes(each.shape, entries[each.data].dtype) for name, each in packed.items()}
    sizes |= {name: each.num_bytes for name, each in kept.items()}
    return LogicalTensors(plain, packed, kept, sum(sizes.values()))


def _wide_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor in a CPU's memory if it is not kept in blocks: matrices of 16 bits stay so."""
    return math.prod(shape) * (2 if dtype in ("BF16", "F16") and len(shape) == 2 else WIDE_BYTES)


def _kept(packed: PackedTensor, entries: Mapping[str, Header]) -> Kept | None:
    """Return how kernels keep a weight; None if they do not."""
    dtype, count = entries[packed.data].dtype, math.prod(packed.shape)
    if len(packed.shape) == 3 and not packed.is_list:
        return _kept_stack(packed, entries)
    if len(packed.shape) != 2 or packed.is_list:
        return None
    if packed.code == "ggml":
        if dtype not in KEPT_BLOCKS or packed.is_transposed or packed.pair or packed.added:
            return None
        run, nbytes = KEPT_BLOCKS[dtype]
        form: Form = "int8" if dtype[:2] in WIDE_CODES else "table4"
        return Kept(run, count // run * nbytes, form, count // run * nbytes)
    run, scale_dtype = packed.block[0 if packed.is_transposed else 1], entries[packed.scales].dtype
    if packed.code == "number" and (dtype not in ("F8_E4M3", "I8") or packed.zeros):
        return None
    if packed.zeros and scale_dtype not in ("F16", "BF16"):  # a product with a zero point would be rounded
        return None
    bits = 8 if packed.code == "number" or packed.bits > 4 else 4
    factor_bytes = 2 * WIDE_BYTES if packed.zeros else 2 if packed.has_half_scales(scale_dtype) else WIDE_BYTES
    form = "e4m3" if dtype == "F8_E4M3" else "int8" if bits == 8 else "e2m1" if packed.code == "e2m1" else "int4"
    num_scales, codes_bytes = packed.shape[0] * -(-packed.shape[1] // run), count * bits // 8
    num_bytes = card_bytes = codes_bytes + num_scales * factor_bytes
    if packed.has_factor_apart:
        card_bytes = codes_bytes + num_scales * 2 + packed.shape[0] * WIDE_BYTES
    return Kept(run, num_bytes, form, card_bytes)


def _kept_stack(packed: PackedTensor, entries: Mapping[str, Header]) -> Kept | None:
    """Return how kernels keep joined experts, whose files have a row an output (`joined_experts.py`)."""
    count, dtypes = math.prod(packed.shape), {entries[name].dtype for name in (packed.data, packed.pair) if name}
    if not packed.is_transposed or packed.added or len(dtypes) > 1:
        return None
    if packed.code == "ggml":
        (dtype,) = dtypes
        if dtype not in KEPT_BLOCKS:
            return None
        run, nbytes = KEPT_BLOCKS[dtype]
        form: Form = "int8" if dtype[:2] in WIDE_CODES else "table4"
        return Kept(run, count // run * nbytes, form, count // run * nbytes)
    if packed.code != "e2m1" or packed.factor:
        return None
    run = packed.block[1]
    num_bytes = count // 2 + count // run * WIDE_BYTES
    return Kept(run, num_bytes, "e2m1", num_bytes)


def _of_gguf(entries: Mapping[str, Header], where: str) -> dict[str, PackedTensor]:
    """Return the weights of GGUF files that are not stored as safetensors has them."""
    found: dict[str, PackedTensor] = {}
    for name, entry in entries.items():
        if not isinstance(entry, GgufTensor) or entry.is_plain or entry.order.is_second:
            continue
        order, shape = entry.order, entry.shape
        is_list = len(shape) == 1 or (bool(order.target) and not order.is_transposed)
        if is_list:
            shape = (*shape, 1)
        if order.pair:
            other = _need(order.pair, name, entries, where)
            if other.shape != entry.shape or not isinstance(other, GgufTensor):
                raise ConfigError(f"{where}: {name!r} has shape {entry.shape}, {order.pair!r} {other.shape}")
            shape = (*shape[:-2], 2 * shape[-2], shape[-1])
        if order.is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        found[order.target or name] = PackedTensor(
            shape[:-1] if is_list else shape,
            "ggml",
            name,
            "",
            (1, BLOCKS[entry.dtype][0]),
            is_transposed=order.is_transposed,
            pair=order.pair,
            head_rows=order.head_rows,
            added=order.added,
            is_list=is_list,
        )
    return found


def _packed(
    name: str, entries: Mapping[str, Header], quantization: Quantization, where: str
) -> tuple[str, PackedTensor] | None:
    """Return the logical name and the weight of which this tensor is the `data`, or None."""
    entry, stem = entries[name], name.rpartition(".")[0]
    if name.endswith(".qweight"):
        return f"{stem}.weight", _integers_by_input(stem, entries, quantization, where)
    if name.endswith("_blocks") and len(entry.shape) >= 3:
        return name.removesuffix("_blocks"), _blocks(name, entries, where)
    if name.endswith(".weight_packed"):
        scales = _need(f"{stem}.weight_scale", name, entries, where)
        if entry.dtype == "I32":
            return f"{stem}.weight", _integers_by_output(stem, entries, quantization, where)
        return f"{stem}.weight", _halves(name, f"{stem}.weight_scale", scales, entries, where)
    for scales_name in (f"{name}_scale_inv", f"{name}_scale"):
        if scales_name not in entries or name.endswith(QUANTISED):
            continue
        if entry.dtype == "U8":
            return name, _halves(name, scales_name, entries[scales_name], entries, where)
        if entry.dtype in EIGHT_BITS:
            block = quantization.format_of(stem).block
            zeros = f"{name}_zero_point" if f"{name}_zero_point" in entries else ""
            blocks = _block(name, entry.shape, entries[scales_name].shape, block, where)
            return name, PackedTensor(entry.shape, "number", name, scales_name, blocks, zeros=zeros)
    return None


def _need(wanted: str, name: str, entries: Mapping[str, Header], where: str) -> Header:
    if wanted not in entries:
        raise ConfigError(f"{where}: the quantised tensor {name!r} lacks {wanted!r}")
    return entries[wanted]


def _block(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], wanted: tuple[int, int] | None, where: str
) -> tuple[int, int]:
    """Return rows and columns of a block: one scale for all, one a row or column, or one a block of the config."""
    if len(shape) < 2:
        raise ConfigError(f"{where}: tensor {name!r} of shape {shape} is quantised, but no matrix")
    grid = _grid(scales, shape)
    if grid is None:
        raise _misfit(name, shape, scales, where)
    found = []
    for dim, (size, count) in enumerate(zip(shape[-2:], grid, strict=True)):
        if wanted is not None and count == math.ceil(size / wanted[dim]):
            found.append(wanted[dim])
        elif count == 1:
            found.append(size)
        elif wanted is None and count == size:
            found.append(1)
        elif wanted is None and size % count == 0:
            found.append(size // count)
        else:
            raise _misfit(name, shape, scales, where, wanted)
    return found[0], found[1]


def _grid(scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return rows and columns of the scales, or None if they do not fit. One a row may lack the second dimension, and
    modelopt's blocks have dimensions of 1 between and behind."""
    if math.prod(scales) == 1:
        return 1, 1
    if len(shape) == 2:
        if len(scales) == 1:
            return (scales[0], 1) if scales[0] == shape[0] else None
        if len(scales) == 4 and scales[1] == scales[3] == 1:
            return scales[0], scales[2]
        return (scales[0], scales[1]) if len(scales) == 2 else None
    if len(scales) == len(shape) - 1 and scales == shape[:-1]:
        return shape[-2], 1
    if len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return None
    return scales[-2], scales[-1]


def _misfit(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], where: str, block: tuple[int, int] | None = None
) -> ConfigError:
    of = f" in blocks of {block[0]} x {block[1]}" if block is not None else ""
    return ConfigError(f"{where}: the scales of {name!r} have shape {scales}, which does not fit {shape}{of}")


def _halves(name: str, scales_name: str, scales: Header, entries: Mapping[str, Header], where: str) -> PackedTensor:
    """Return a weight of 4-bit floats, two a byte: NVFP4 (scales in e4m3, and one over all) or MXFP4 (powers of 2)."""
    *lead, rows, half = entries[name].shape
    shape = (*lead, rows, 2 * half)
    stem = name.rpartition(".")[0]
    if scales.shape[:-1] != shape[:-1] or not scales.shape or shape[-1] % scales.shape[-1]:
        raise _misfit(name, shape, scales.shape, where)
    block = (1, shape[-1] // scales.shape[-1])
    if scales.dtype in ("U8", "F8_E8M0"):
        return PackedTensor(shape, "e2m1", name, scales_name, block, bits=4)
    divides = name.endswith("_packed")
    factor = f"{stem}.weight_global_scale" if divides else f"{name}_scale_2"
    _need(factor, name, entries, where)
    apart = not divides and scales.dtype == "F8_E4M3"
    packed = PackedTensor(shape, "e2m1", name, scales_name, block, bits=4, factor=factor, divides=divides)
    return replace(packed, has_factor_apart=apart)


def _blocks(name: str, entries: Mapping[str, Header], where: str) -> PackedTensor:
    """Return experts in MXFP4 as gpt-oss has them: `[E, outputs, groups, 16]` bytes; the weight is `[E, inputs,
    outputs]`."""
    *lead, outputs, groups, size = entries[name].shape
    scales_name = f"{name.removesuffix('_blocks')}_scales"
    scales, shape = _need(scales_name, name, entries, where), (*lead, groups * 2 * size, outputs)
    if scales.shape != (*lead, outputs, groups):
        raise _misfit(name, shape, scales.shape, where)
    return PackedTensor(shape, "e2m1", name, scales_name, (1, 2 * size), bits=4, is_transposed=True)


def _integers_by_output(
    stem: str, entries: Mapping[str, Header], quantization: Quantization, where: str
) -> PackedTensor:
    """Return a weight of packed integers, as compressed-tensors has them: words along the inputs."""
    name, form = f"{stem}.weight_packed", quantization.format_of(stem)
    data, scales = entries[name], entries[f"{stem}.weight_scale"]
    if form.bits not in (2, 4, 8) or len(data.shape) != 2:
        raise ConfigError(f"{where}: tensor {name!r} has words of integers, but quantization_config says {form.words}")
    per_word = 32 // form.bits
    shape = (data.shape[0], data.shape[1] * per_word)
    groups = 1 if form.group_size is None else math.ceil(shape[1] / form.group_size)
    if scales.shape not in ((shape[0], groups), (shape[0],) if groups == 1 else ()):
        raise _misfit(name, shape, scales.shape, where, (1, form.group_size or shape[1]))
    zeros = f"{stem}.weight_zero_point"
    if not form.is_symmetric:
        _need(zeros, name, entries, where)
    return PackedTensor(
        shape,
        "integer",
        name,
        f"{stem}.weight_scale",
        (1, form.group_size or shape[1]),
        bits=form.bits,
        lanes=tuple(range(per_word)),
        middle=1 << (form.bits - 1),
        zeros=zeros if zeros in entries else "",
        zeros_dim=0,
        order=f"{stem}.weight_g_idx" if f"{stem}.weight_g_idx" in entries else "",
    )


def _integers_by_input(
    stem: str, entries: Mapping[str, Header], quantization: Quantization, where: str
) -> PackedTensor:
    """Return a weight of AWQ or GPTQ: a row an input; AWQ has words along the outputs, GPTQ along the inputs."""
    name, form, is_gptq = f"{stem}.qweight", quantization.formats[0], quantization.method == "gptq"
    if quantization.method not in ("awq", "gptq"):
        raise ConfigError(f"{where}: tensor {name!r} is of AWQ or GPTQ, but quantization_config says {form.words}")
    data, scales = entries[name], _need(f"{stem}.scales", name, entries, where)
    per_word = 32 // form.bits
    if len(data.shape) != 2 or data.dtype != "I32":
        raise ConfigError(f"{where}: tensor {name!r} of shape {data.shape} and dtype {data.dtype} holds no words")
    rows, columns = data.shape
    rows, columns = (rows * per_word, columns) if is_gptq else (rows, columns * per_word)
    group = form.group_size or rows
    zeros = _need(f"{stem}.qzeros", name, entries, where)
    grid = (math.ceil(rows / group), columns)
    if scales.shape != grid or zeros.shape != (grid[0], math.ceil(columns / per_word)):
        raise _misfit(name, (columns, rows), scales.shape, where, (1, group))
    return PackedTensor(
        (columns, rows),
        "integer",
        name,
        f"{stem}.scales",
        (group, 1),
        bits=form.bits,
        is_transposed=True,
        packed_dim=0 if is_gptq else 1,
        lanes=tuple(range(per_word)) if is_gptq else AWQ_LANES,
        zeros=f"{stem}.qzeros",
        adds_one=quantization.adds_one,
        order=f"{stem}.g_idx" if is_gptq and f"{stem}.g_idx" in entries else "",
    )
