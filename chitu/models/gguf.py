"""The header of a GGUF file: its metadata, and where its tensors are. No torch; no weights are read.

Called by launchers, which make a checkpoint folder of it (`launch/gguf_folder.py`), and by `checkpoint.py`.
`gguf_names.py` has the names that Hugging Face gives these tensors, `gguf_config.py` the config, `gguf_blocks.py` the
arithmetic.

The file is somebody else's: every count and length is compared with the bytes that are there before anything of that
size is made, and what does not fit is an error that names it.

Format, little endian: `GGUF`, version, count of tensors, count of keys; the keys with a type and a value; the tensors
with a name, sizes (the fastest running first), type and offset; padding; the data.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from chitu.config.model_files import refuse_lfs_pointer
from chitu.errors import ConfigError, UnsupportedModel

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_VALUES = 4 << 20
"""Most values in all lists of a header; a vocabulary of 262,144 tokens needs 1.5 million."""
MAX_KEYS, MAX_TENSORS, MAX_NAME_BYTES = 1 << 16, 1 << 20, 1 << 10
MAX_DEPTH = 2
"""Of lists in lists."""
CHUNK_BYTES = 1 << 20
MAX_ALIGNMENT = 1 << 20
FIRST_TENSOR_BYTES, FIRST_KEY_BYTES = 24, 13
"""Least bytes of a tensor's and of a key's record."""
MAX_DIMS = 4
SHOWN_CHARS = 60
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one of several files of a model."""
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
"""ggml's number of a type -> its name."""
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Types without code here, for messages."""
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17), "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
}  # fmt: skip
"""Type -> numbers and bytes of a block. A row is whole blocks."""
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Type -> bytes of a block at which it has float16 numbers. MXFP4 has a power of 2, which is always finite."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


class TensorPlace(NamedTuple):
    """Where a tensor is in its file."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    """Rows first, as in safetensors."""

    @property
    def num_bytes(self) -> int:
        numbers, num_bytes = BLOCKS[self.dtype]
        return math.prod(self.shape) // numbers * num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    file: Path
    metadata: Mapping[str, Any]
    """Of one of several files: that of the first."""
    tensors: Mapping[str, TensorPlace]
    """By the file's own names."""
    num_bytes: int
    """Of the header itself."""


class _HeaderReader:
    """The bytes of a header, from the first on; only as much of the file as was asked for is in memory."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream, self._where = stream, where
        self._size = os.fstat(stream.fileno()).st_size
        self._data, self.at = bytearray(), 0
        self._values = 0

    def need(self, count: int, what: str) -> None:
        """Raise ConfigError unless `count` more bytes are there."""
        if self.at + count > self._size:
            raise ConfigError(
                f"{self._where} is cut off or damaged: {what} needs {count} bytes at byte {self.at}, and the file has "
                f"{self._size}; download it again"
            )
        if self.at + count > MAX_HEADER_BYTES:
            raise ConfigError(f"{self._where} is damaged: {what} ends behind the first {MAX_HEADER_BYTES} bytes")

    def take(self, form: str, what: str) -> tuple[Any, ...]:
        form = f"<{form}"
        count = struct.calcsize(form)
        self.need(count, what)
        self._load(count)
        found = struct.unpack_from(form, self._data, self.at)
        self.at += count
        return found

    def _load(self, count: int) -> None:
        while len(self._data) < self.at + count:
            piece = self._stream.read(CHUNK_BYTES)
            if not piece:
                raise ConfigError(f"{self._where} became shorter while it was read")
            self._data += piece

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        (length,) = self.take("Q", what)
        if length > most:
            raise ConfigError(f"{self._where} is damaged: {what} has {length} bytes")
        self.need(length, what)
        self._load(length)
        self.at += length
        try:
            return self._data[self.at - length : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._where} is damaged: {what} is no UTF-8") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self.text(what)
        if kind in _SCALARS:
            return self.take(_SCALARS[kind], what)[0]
        if kind != _LIST or depth == MAX_DEPTH:
            raise ConfigError(f"{self._where} is damaged: {what} has a value of type {kind}")
        inner, count = self.take("IQ", what)
        least = struct.calcsize(f"<{_SCALARS.get(inner, 'Q')}")
        self.need(count * least, what)
        self._values += count
        if self._values > MAX_VALUES:
            raise ConfigError(f"{self._where} is damaged: its lists have more than {MAX_VALUES} values, with {what}")
        if inner in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[inner]}", what))
        return [self.value(inner, what, depth + 1) for _ in range(count)]


def read_header(file: Path) -> GgufHeader:
    """Return the header. Raises ConfigError for a file that is no whole GGUF file, UnsupportedModel for a version or a
    type of numbers that is not read here."""
    where = f"model.path: {file}"
    try:
        refuse_lfs_pointer(file)
        with file.open("rb") as stream:
            return _read(_HeaderReader(stream, where), file, where)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _read(reader: _HeaderReader, file: Path, where: str) -> GgufHeader:
    reader.need(len(MAGIC), "its mark")
    if bytes(reader.take("4s", "its mark")[0]) != MAGIC:
        raise ConfigError(f"{where} is no GGUF file")
    (version,) = reader.take("I", "its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        words = f"{swapped}, big endian," if swapped in VERSIONS else str(version)
        raise UnsupportedModel(f"{where}: version {words} of GGUF is not supported (known: 2 and 3, little endian)")
    num_tensors, num_keys = reader.take("QQ", "its counts")
    for count, most, least, what in (
        (num_keys, MAX_KEYS, FIRST_KEY_BYTES, "keys"),
        (num_tensors, MAX_TENSORS, FIRST_TENSOR_BYTES, "tensors"),
    ):
        if count > most:
            raise ConfigError(f"{where} is damaged: it has {count} {what}")
        reader.need(count * least, f"the list of {count} {what}")
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = reader.text(f"the name of key {index}", MAX_NAME_BYTES)
        if key in metadata:
            raise ConfigError(f"{where} is damaged: it has the key {key!r} twice")
        metadata[key] = reader.value(reader.take("I", f"the type of {key!r}")[0], f"the key {key!r}")
    found: dict[str, TensorPlace] = {}
    for index in range(num_tensors):
        name = reader.text(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in found:
            raise ConfigError(f"{where} is damaged: it has the tensor {name!r} twice")
        found[name] = _place(reader, name, where)
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 0 < align <= MAX_ALIGNMENT or align & (align - 1):
        raise ConfigError(f"{where} is damaged: general.alignment is {shown(align)}, not a power of 2")
    begin = -(-reader.at // align) * align
    return GgufHeader(file, metadata, _placed(found, begin, align, file, where), reader.at)


def _place(reader: _HeaderReader, name: str, where: str) -> TensorPlace:
    what = f"the tensor {name!r}"
    (dims,) = reader.take("I", what)
    if not 0 < dims <= MAX_DIMS:
        raise ConfigError(f"{where} is damaged: {what} has {dims} dimensions")
    shape = tuple(reversed(reader.take(f"{dims}Q", what)))
    kind, offset = reader.take("IQ", what)
    if kind not in TYPES:
        words = UNREAD_TYPES.get(kind, f"number {kind}")
        raise UnsupportedModel(
            f"{where}: {what} is stored in ggml's type {words}, which is not supported (known: "
            f"{', '.join(TYPES.values())}); take a file with one of these"
        )
    numbers = BLOCKS[TYPES[kind]][0]
    if 0 in shape or shape[-1] % numbers:
        raise ConfigError(f"{where} is damaged: {what} of shape {shape} has no whole blocks of {numbers}")
    return TensorPlace(offset, TYPES[kind], shape)


def _placed(found: Mapping[str, TensorPlace], begin: int, align: int, file: Path, where: str) -> dict[str, TensorPlace]:
    """Return the tensors with their places in the file, which must not overlap nor end behind the file."""
    size, end = file.stat().st_size, 0
    for name, place in sorted(found.items(), key=lambda item: item[1].offset):
        if place.offset % align or place.offset < end:
            raise ConfigError(f"{where} is damaged: the offset {place.offset} of the tensor {name!r} does not fit")
        end = place.offset + place.num_bytes
        if begin + end > size:
            raise ConfigError(
                f"{where} is cut off: the tensor {name!r} ends at byte {begin + end}, and the file has {size}; "
                "download it again"
            )
    return {name: place._replace(offset=begin + place.offset) for name, place in found.items()}


def shown(value: object) -> str:
    """Return a value of a file for a message: its beginning, if it is long."""
    text = repr(value[:SHOWN_CHARS] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def split_files(file: Path) -> list[Path]:
    """Return all files of the model of which this is one. ConfigError if one is missing."""
    found = SPLIT.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count:
        raise ConfigError(f"model.path: {file} is file {int(found['number'])} of {count}, by its name")
    files = [file.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for each in files:  # ends at the first that is missing: the count is only a name's
        if not each.is_file():
            raise ConfigError(f"model.path: {each} is missing: it is one of the {count} files of {found['stem']}")
    return files


def read_headers(files: Sequence[Path]) -> list[GgufHeader]:
    """Return the headers of the files of one model, all with the metadata of the first. ConfigError if they are not the
    files of one model."""
    headers = [read_header(file) for file in files]
    first = headers[0].metadata
    if first.get("split.count", 1) not in (0, 1) or len(headers) > 1:
        for number, header in enumerate(headers):
            stated = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
            if stated != (number, len(headers)):
                raise ConfigError(
                    f"model.path: {header.file} is file {shown(stated[0])} (from 0 on) of {shown(stated[1])} by its "
                    f"header, not file {number} of {len(headers)}"
                )
        wanted, found = first.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
        if wanted not in (None, found):
            raise ConfigError(
                f"model.path: {files[0]} and its other files have {found} tensors instead of {shown(wanted)}"
            )
    return [GgufHeader(each.file, first, each.tensors, each.num_bytes) for each in headers]
