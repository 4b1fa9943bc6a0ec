"""The weight files of a checkpoint by their headers: whether they are whole and have what the model takes.

Called by launchers, `chitu plan` and `chitu doctor` before any process starts, and by `tensor_files.py` in the
processes. No torch; no weights are read, except by `damaged_tensor`.

Format: 8 bytes header length (little endian), a JSON header with dtype, shape and offsets of each tensor, the data.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from chitu.config.model_files import refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import ModelSpec, weight_files
from chitu.models.registry import traits_of
from chitu.models.tensor_names import HEAD, UNUSED_SUFFIX, tensor_shapes

MAX_HEADER_BYTES = 100 << 20
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Known dtypes."""
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
QUANTISED = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax",
    ".quant_map", ".SCB",
)  # fmt: skip
"""Ends of names of tensors that only quantised checkpoints have."""
LOOK_BYTES = 1 << 30
"""Bytes of weights that `damaged_tensor` reads at most."""
BLOCK_BYTES = 64 << 10


class TensorEntry(NamedTuple):
    """Place, dtype and shape of a tensor in a file."""

    file: Path
    offset: int
    """Byte in the file."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_entries(files: Sequence[Path]) -> dict[str, TensorEntry]:
    """Return the tensors of these files by name. Raise ConfigError for a file that is no safetensors file or is not as
    long as its header says, and for a tensor that is in two of them."""
    found: dict[str, TensorEntry] = {}
    for file in files:
        try:
            entries = _entries_of(file)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
        for name, entry in entries.items():
            if name in found:
                first = found[name].file.name
                raise ConfigError(
                    f"model.path: tensor {name!r} is in {file} and in {first}; move one of them elsewhere"
                )
            found[name] = entry
    return found


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
    tensors = {name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in named.items()}
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


def count_weights(path: str | Path) -> int:
    """Count the numbers in all tensors of a checkpoint, from the file headers. ConfigError if one cannot be read."""
    return sum(math.prod(entry.shape) for entry in read_entries(weight_files(path)).values())


def check_checkpoint(path: str | Path, spec: ModelSpec) -> int:
    """Check, by the headers, that the checkpoint has the tensors of the model and no others, and return the count of
    their numbers. Raise ConfigError (UnsupportedModel) with what loading would refuse."""
    entries = read_entries(weight_files(path))
    wanted = dict(tensor_shapes(spec, traits_of(spec)))
    for name, entry in entries.items():
        if name.endswith(QUANTISED) or (name in wanted and entry.dtype not in FLOATS):
            raise UnsupportedModel(
                f"model.path: {path}: quantised weights are not supported ({entry.file.name}: tensor {name!r} of dtype "
                f"{entry.dtype})"
            )
    for name, shape in wanted.items():
        if name not in entries:
            raise ConfigError(f"model.path: {path} has no tensor {name!r}{_why_missing(name, wanted, entries)}")
        if entries[name].shape != shape:
            raise ConfigError(
                f"model.path: {entries[name].file}: tensor {name!r} has shape {entries[name].shape}, the config asks "
                f"for {shape}"
            )
    extra = tuple(f"model.layers.{spec.num_layers + layer}." for layer in range(spec.num_extra_layers))
    unused = [
        name
        for name in sorted(entries)
        if name not in wanted
        and not name.endswith(UNUSED_SUFFIX)
        and not (extra and name.startswith(extra))
        and not (name == HEAD and spec.tie_word_embeddings)  # loading compares it with the embedding
    ]
    if unused:
        raise UnsupportedModel(
            f"the checkpoint has {len(unused)} tensors that this model does not use: {', '.join(unused[:4])}"
        )
    return sum(math.prod(entry.shape) for entry in entries.values())


def _why_missing(name: str, wanted: Mapping[str, object], entries: Mapping[str, TensorEntry]) -> str:
    """Return what the names of the tensors say about one that is missing, or ""."""
    if name.startswith("model.") and name.removeprefix("model.") in entries:
        return ": its tensors lack the prefix 'model.' (of a model without its head, or saved by another program)"
    before = Counter(found.removesuffix(name) for found in entries if found.endswith(f".{name}"))
    if before:
        prefix = before.most_common(1)[0][0]
        return f": its tensors have {prefix!r} before their names, as parts of a larger model do"
    if name == HEAD and all(other in entries for other in wanted if other != HEAD):
        return ": only the head is missing (if it is the embedding, config.json says tie_word_embeddings: true)"
    num_missing = sum(other not in entries for other in wanted)
    return f", nor {num_missing - 1} others of the {len(wanted)} that the config asks for" if num_missing > 1 else ""


def damaged_tensor(path: str | Path, most_bytes: int = LOOK_BYTES) -> str:
    """Return the name of a tensor with numbers that are not finite (NaN or infinite), or "". Reads `most_bytes` of the
    weights at most, evenly spread; ConfigError if they cannot be read."""
    entries = read_entries(weight_files(path))
    total = sum(entry.num_bytes for entry in entries.values())
    for name, entry in entries.items():
        share = min(entry.num_bytes, max(BLOCK_BYTES, entry.num_bytes * most_bytes // max(1, total)))
        if entry.dtype in _EXPONENTS and not _is_finite(entry, share):
            return name
    return ""


_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
}
"""By dtype: integers of its size, and the bits of its exponent. All of them are set in NaN and infinity alone."""


def _is_finite(entry: TensorEntry, num_bytes: int) -> bool:
    kind, exponent = _EXPONENTS[entry.dtype]
    count = -(-num_bytes // BLOCK_BYTES)
    mask = np.array(exponent, dtype=kind)
    with entry.file.open("rb", buffering=0) as stream:
        for block in range(count):
            first = (entry.num_bytes - BLOCK_BYTES) * block // max(1, count - 1) if entry.num_bytes > BLOCK_BYTES else 0
            first -= first % mask.itemsize
            data = os.pread(stream.fileno(), min(BLOCK_BYTES, entry.num_bytes - first), entry.offset + first)
            numbers = np.frombuffer(data, kind)
            if bool(((numbers & mask) == mask).any()):
                return False
    return True
