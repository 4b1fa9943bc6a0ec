"""The files of a checkpoint by their headers: whether they are whole, and have the names and shapes of the tensors that
the model takes. No torch; no weights are read, except by `damaged_tensor`.

Called by launchers, `chitu plan` and `chitu doctor` before any process starts, and by `weights.py` in the processes. A
test requires for every family that the names are those that `common.py` takes.

Format: 8 bytes header length (little endian), a JSON header with dtype, shape and offsets of each tensor, the data.
`gguf.py` has that of GGUF files, `trainer_tensors.py` that of tensors in a trainer's memory.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from chitu.config.model_files import TENSORS_MANIFEST, refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.byte_sources import ByteSource, DeviceBytes, DevicePlace, FileBytes, Seal
from chitu.models.config import ModelSpec, weight_files
from chitu.models.config_parts import ExpertSpec, IndexSpec, LatentSpec
from chitu.models.families import Traits, traits_of
from chitu.models.gguf import BLOCKS, SCALES, SUFFIX
from chitu.models.gguf_names import GgufTensor, read_gguf
from chitu.models.logical_tensors import WIDE_BYTES, LogicalTensors, logical_tensors
from chitu.models.quantization import Quantization
from chitu.models.trainer_tensors import published

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
DECODER, BARE_EMBEDDING = "model.", "embed_tokens.weight"
UNUSED_SUFFIX = "rotary_emb.inv_freq"
"""End of the names of tensors that hold nothing the model needs."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]
MAX_HEADER_BYTES = 100 << 20
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Known dtypes."""
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
LOOK_BYTES = 1 << 30
"""Bytes of weights that `damaged_tensor` reads at most."""
BLOCK_BYTES = 64 << 10
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E5M2": ("<u1", 0x1F << 2),
    "F8_E8M0": ("<u1", 0xFF),
}
"""By dtype: integers of its size, and the bits that are set in NaN and infinity alone: those of the exponent, of e4m3,
which has no infinity, also those of the fraction."""


def tensor_shapes(spec: ModelSpec, traits: Traits) -> Shapes:
    """Yield name and shape of each tensor that the model takes, except a head that is tied to the embedding."""
    hidden = spec.hidden_size
    yield EMBEDDING, (spec.vocab_size, hidden)
    if spec.has_draft_layer:
        prefix = f"model.layers.{spec.num_layers}"
        yield from ((f"{prefix}.{norm}.weight", (hidden,)) for norm in ("enorm", "hnorm", "shared_head.norm"))
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
    for index in range(spec.num_layers + spec.has_draft_layer):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        yield from (
            _attention(spec, traits, attention) if spec.latent is None else _latent(spec, spec.latent, index, attention)
        )
        if spec.experts is not None and index in spec.experts.layers:
            yield from _mixture(spec.experts, hidden, mlp)
        else:
            yield from _mlp(mlp, spec.intermediate_size, hidden, spec.mlp_bias)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_word_embeddings:
        yield HEAD, (spec.vocab_size, hidden)


def _linear(name: str, outputs: int, inputs: int, has_bias: bool = False) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _attention(spec: ModelSpec, traits: Traits, prefix: str) -> Shapes:
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _linear(f"{prefix}.q_proj", heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.k_proj", kv_heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.v_proj", kv_heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.o_proj", hidden, heads, traits.output_bias)
    if traits.qk_norm:
        yield f"{prefix}.q_norm.weight", (spec.head_dim,)
        yield f"{prefix}.k_norm.weight", (spec.head_dim,)
    if traits.sinks:
        yield f"{prefix}.sinks", (spec.num_heads,)


def _latent(spec: ModelSpec, latent: LatentSpec, layer: int, prefix: str) -> Shapes:
    hidden, has_bias, num_heads = spec.hidden_size, spec.attention_bias, spec.num_heads
    queries = num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear(f"{prefix}.q_proj", queries, hidden)
    else:
        yield from _linear(f"{prefix}.q_a_proj", latent.q_rank, hidden, has_bias)
        yield f"{prefix}.q_a_layernorm.weight", (latent.q_rank,)
        yield from _linear(f"{prefix}.q_b_proj", queries, latent.q_rank)
    if latent.index is not None and layer in latent.index.layers:
        yield from _index(latent.index, latent.q_rank or 0, hidden, f"{prefix}.indexer")
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, has_bias)
    yield f"{prefix}.kv_a_layernorm.weight", (latent.kv_rank,)
    yield from _linear(f"{prefix}.kv_b_proj", num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield from _linear(f"{prefix}.o_proj", hidden, num_heads * latent.value_dim, has_bias)


def _index(index: IndexSpec, q_rank: int, hidden: int, prefix: str) -> Shapes:
    yield from _linear(f"{prefix}.wq_b", index.num_heads * index.head_dim, q_rank)
    yield from _linear(f"{prefix}.wk", index.head_dim, hidden)
    yield f"{prefix}.k_norm.weight", (index.head_dim,)
    yield f"{prefix}.k_norm.bias", (index.head_dim,)
    yield from _linear(f"{prefix}.weights_proj", index.num_heads, hidden)


def _mixture(experts: ExpertSpec, hidden: int, prefix: str) -> Shapes:
    if experts.is_joined:
        count, inner = experts.num_experts, experts.intermediate_size
        yield from _linear(f"{prefix}.router", count, hidden, has_bias=True)
        for name, inputs, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
            yield f"{prefix}.experts.{name}", (count, inputs, outputs)
            yield f"{prefix}.experts.{name}_bias", (count, outputs)
        return
    yield f"{prefix}.gate.weight", (experts.num_experts, hidden)
    if experts.has_choice_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (experts.num_experts,)
    for index in range(experts.num_experts):
        yield from _mlp(f"{prefix}.experts.{index}", experts.intermediate_size, hidden)
    if experts.shared_intermediate_size:
        yield from _mlp(f"{prefix}.shared_experts", experts.shared_intermediate_size, hidden)


def _mlp(prefix: str, inner: int, hidden: int, has_bias: bool = False) -> Shapes:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, has_bias)


class TensorEntry(NamedTuple):
    """Place, dtype and shape of a tensor in a file."""

    file: Path
    offset: int
    """Byte in the file."""
    dtype: str
    shape: tuple[int, ...]
    device: DevicePlace | None = None
    """Where it is, if not in the file."""
    seal: Seal | None = None
    """What its bytes must be, if it is in a trainer's memory."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


Entry = TensorEntry | GgufTensor


def open_bytes(entry: Entry) -> ByteSource:
    """Open what holds a tensor. Raises ConfigError if that cannot be read."""
    if isinstance(entry, TensorEntry) and entry.device is not None:
        return DeviceBytes(entry.device)
    return FileBytes(entry.file, isinstance(entry, TensorEntry) and entry.seal is not None)


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_HeaderEntry)


def read_entries(files: Sequence[Path], prefix: str = "") -> dict[str, Entry]:
    """Return the tensors of these files by name; with `prefix`, of those alone that begin with it the names behind it
    (`ModelSpec.tensor_prefix`). Those of a decoder that was saved without its head, as models for
    embeddings are, get the names that they have beside a head. Raise ConfigError for a file that is no safetensors or
    GGUF file or is not as long as its header says, and for a tensor that is in two of them. A tensor that a manifest
    names is one like any other."""
    found: dict[str, Entry] = {}
    for name, entry in _entries_of_all(files):
        if name in found:
            first = found[name].file.name
            raise ConfigError(
                f"model.path: tensor {name!r} is in {entry.file} and in {first}; move one of them elsewhere"
            )
        found[name] = entry
    if prefix:
        return {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)}
    if BARE_EMBEDDING in found and not any(name.startswith(DECODER) for name in found):
        return {name if name == HEAD else DECODER + name: entry for name, entry in found.items()}
    return found


def _entries_of_all(files: Sequence[Path]) -> Iterator[tuple[str, Entry]]:
    if files and all(file.suffix == SUFFIX for file in files):
        yield from read_gguf(files)
        return
    for file in files:
        if file.name == TENSORS_MANIFEST:
            yield from _entries_of_manifest(file)
            continue
        try:
            yield from _entries_of(file).items()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from error


def _entries_of_manifest(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    def size_of(dtype: str, shape: tuple[int, ...]) -> int | None:
        return math.prod(shape) * BITS[dtype] // 8 if dtype in BITS else None

    for name, found in published(file, size_of):
        tensor = found.tensor
        yield name, TensorEntry(found.file, tensor.offset, tensor.dtype, tensor.shape, found.device, found.seal)


def _entries_of(file: Path) -> dict[str, TensorEntry]:
    refuse_lfs_pointer(file)
    with file.open("rb") as stream:
        size, prefix = os.fstat(stream.fileno()).st_size, stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise ConfigError(f"model.path: {file} is no safetensors file")
        header = stream.read(length)
    if len(header) < length:
        raise ConfigError(f"model.path: {file} is cut off: it ends within its header; download it again")
    begin, end = 8 + length, 0
    entries: dict[str, TensorEntry] = {}
    named = _header_decoder.decode(header)
    named.pop("__metadata__", None)
    tensors = {name: _entry_decoder.decode(raw) for name, raw in named.items()}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in BITS:
            raise ConfigError(f"model.path: {file}: tensor {name!r} has dtype {tensor.dtype}, which is not known here")
        entry = TensorEntry(file, begin + tensor.data_offsets[0], tensor.dtype, tuple(tensor.shape))
        if tensor.data_offsets != (end, end + entry.num_bytes):
            raise ConfigError(f"model.path: {file} is damaged: the header's offsets of tensor {name!r} do not fit")
        entries[name], end = entry, end + entry.num_bytes
    if begin + end > size:
        raise ConfigError(
            f"model.path: {file} is cut off: its tensors need {begin + end} bytes, and it has {size}; download it again"
        )
    if begin + end < size:
        raise ConfigError(f"model.path: {file} is damaged: its tensors need {begin + end} bytes, and it has {size}")
    return entries


def count_weights(path: str | Path, quantization: Quantization | None = None) -> int:
    """Count the numbers in all tensors of a checkpoint when they are dequantised, from the file headers. ConfigError if
    one cannot be read."""
    return logical_tensors(read_entries(weight_files(path)), quantization, f"model.path: {path}").count()


class WeightCount(NamedTuple):
    numbers: int = 0
    """Of all tensors when they are dequantised."""
    cpu_bytes: int = 0
    """Of all tensors in a CPU's memory under float32, where kernels keep small what is stored small; 0: not known."""
    card_numbers: int = 0
    """Those that GPUs keep in 8 or 4 bits."""
    card_bytes: int = 0
    """Of these in a GPU's memory, with their scales."""

    def bytes_on_card(self, itemsize: int) -> int:
        """Return the bytes of all tensors in a GPU's memory under a dtype of this size."""
        return (self.numbers - self.card_numbers) * itemsize + self.card_bytes


def check_checkpoint(path: str | Path, spec: ModelSpec, keeps: bool = True) -> WeightCount:
    """Check, by the headers, that the checkpoint has the tensors of the model and no others, and return the counts of
    their numbers. `keeps`: whether `model.weights` is `keep`. Raise ConfigError (UnsupportedModel)
    with what loading would refuse."""
    entries = read_entries(weight_files(path), spec.tensor_prefix)
    logical = logical_tensors(entries, spec.quantization, f"model.path: {path}")
    found = logical.shapes
    count = _count(logical, keeps and spec.code != "transformers")
    if spec.code == "transformers":  # only its modules tell names; loading refuses what does not fit
        return count
    wanted = dict(tensor_shapes(spec, traits_of(spec)))
    for name in logical.plain:
        if name in wanted and entries[name].dtype not in FLOATS:
            raise UnsupportedModel(
                f"model.path: {path}: quantised weights are not supported ({entries[name].file.name}: tensor {name!r} "
                f"of dtype {entries[name].dtype})"
            )
    for name, shape in wanted.items():
        if name not in found:
            raise ConfigError(f"model.path: {path} has no tensor {name!r}{_why_missing(name, wanted, found)}")
        if found[name] != shape:
            packed = logical.packed.get(name)
            file = entries[packed.data if packed is not None else name].file
            raise ConfigError(
                f"model.path: {file}: tensor {name!r} has shape {found[name]}, the config asks for {shape}"
            )
    extra = tuple(f"model.layers.{spec.num_layers + layer}." for layer in range(spec.num_extra_layers))
    is_gptq = spec.quantization is not None and spec.quantization.method == "gptq"
    unused = [
        name
        for name in sorted(found)
        if name not in wanted
        and not name.endswith(UNUSED_SUFFIX)
        and not (extra and name.startswith(extra))
        and not (name == HEAD and spec.tie_word_embeddings)  # loading compares it with the embedding
        and not (is_gptq and name.endswith(".bias"))  # loading looks whether it is zero
    ]
    if unused:
        raise UnsupportedModel(
            f"the checkpoint has {len(unused)} tensors that this model does not use: {', '.join(unused[:4])}"
        )
    return count


def _count(logical: LogicalTensors, keeps: bool) -> WeightCount:
    if keeps:
        on_cards = logical.on_cards
        numbers = sum(math.prod(logical.shapes[name]) for name in on_cards)
        return WeightCount(
            logical.count(), logical.cpu_bytes, numbers, sum(each.card_bytes for each in on_cards.values())
        )
    shapes = logical.shapes
    more = sum(math.prod(shapes[name]) * WIDE_BYTES - each.num_bytes for name, each in logical.kept.items())
    return WeightCount(logical.count(), logical.cpu_bytes + more)


def _why_missing(name: str, wanted: Mapping[str, object], entries: Mapping[str, object]) -> str:
    """Return what the names of the tensors say about one that is missing, or ""."""
    before = Counter(found.removesuffix(name) for found in entries if found.endswith(f".{name}"))
    if before:
        prefix = before.most_common(1)[0][0]
        return f": its tensors have {prefix!r} before their names, as parts of a larger model do"
    if name == HEAD and all(other in entries for other in wanted if other != HEAD):
        return ": only the head is missing (if it is the embedding, set tie_word_embeddings: true in config.json)"
    num_missing = sum(other not in entries for other in wanted)
    return f", nor {num_missing - 1} others of the {len(wanted)} that the config asks for" if num_missing > 1 else ""


def damaged_tensor(path: str | Path, most_bytes: int = LOOK_BYTES) -> str:
    """Return the name of a tensor with numbers that are not finite (NaN or infinite), or "". Reads `most_bytes` of the
    weights at most, evenly spread; ConfigError if they cannot be read."""
    entries = read_entries(weight_files(path))
    total = sum(entry.num_bytes for entry in entries.values())
    for name, entry in entries.items():
        share = min(entry.num_bytes, max(BLOCK_BYTES, entry.num_bytes * most_bytes // max(1, total)))
        if (entry.dtype in _EXPONENTS or entry.dtype in SCALES) and not _is_finite(entry, share):
            return name
    return ""


def _is_finite(entry: Entry, num_bytes: int) -> bool:
    kind, exponent = _EXPONENTS["F16" if entry.dtype in SCALES else entry.dtype]
    count = -(-num_bytes // BLOCK_BYTES)
    mask = np.array(exponent, dtype=kind)
    unit = BLOCKS[entry.dtype][1] if entry.dtype in SCALES else mask.itemsize
    with closing(open_bytes(entry)) as source:
        for block in range(count):
            first = (entry.num_bytes - BLOCK_BYTES) * block // max(1, count - 1) if entry.num_bytes > BLOCK_BYTES else 0
            first -= first % unit
            data = bytearray(min(BLOCK_BYTES, entry.num_bytes - first))
            source.read_into(memoryview(data), entry.offset + first)
            units = np.frombuffer(data, np.uint8, len(data) // unit * unit).reshape(-1, unit)
            places = SCALES.get(entry.dtype, (0,))
            numbers = np.stack([units[:, at : at + mask.itemsize] for at in places]).view(kind)
            if bool(((numbers & mask) == mask).any()):
                return False
    return True
