"""Tensors of a checkpoint folder, taken by name, each exactly once, and read straight to their destination.

`WeightSource` reads safetensors files tensor by tensor, in the wanted dtype and to the wanted device, checks shapes and
reports progress in bytes. A model that leaves tensors unread would compute something else than its checkpoint, so
`finish` refuses leftovers by name. On the thread that builds the service.

Files are read, not mapped: touched pages of a mapping count as memory of this process until it ends, so a checkpoint
that is converted, split or moved to a device would be in memory twice. Here the overhead is one staging buffer, pinned
for a GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import read_entries
from chitu.models.config import weight_files

STAGING_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Location, dtype and shape of a tensor in a file."""

    path: Path
    descriptor: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFiles:
    """Open files, with their tensors by name. Raises ConfigError as `read_entries` does."""

    def __init__(self, files: Sequence[Path], device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        self._staging_bytes = staging_bytes
        self._descriptors: list[int] = []
        self._staging: torch.Tensor | None = None
        self.tensors: dict[str, Stored] = {}
        opened: dict[Path, int] = {}
        for name, entry in read_entries(files).items():
            if entry.file not in opened:
                opened[entry.file] = self._open(entry.file)
            descriptor, dtype = opened[entry.file], DTYPES[entry.dtype]
            self.tensors[name] = Stored(entry.file, descriptor, entry.offset, dtype, entry.shape)

    def _open(self, file: Path) -> int:
        try:
            self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
        return self._descriptors[-1]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._staging = None

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        rows: range | None = None,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read the tensor, or these rows and columns of its first two dimensions, contiguous, to the device or `out`.

        Does not read other rows. Rows of which only some columns are wanted are read whole: one piece instead of many.
        """
        stored = self.tensors[name]
        shape = stored.shape or (1,)
        rows, width = rows or range(shape[0]), shape[1:]
        if out is None:
            part = (len(columns), *width[1:]) if columns is not None else width
            out = torch.empty((len(rows), *part), dtype=dtype, device=self._device)
        row_bytes = math.prod(width) * stored.dtype.itemsize
        begin = stored.offset + rows.start * row_bytes
        if self._device.type == "cpu" and dtype == stored.dtype and columns is None:
            _fill(out, stored, begin)
            return out if stored.shape else out[0]
        at_once = max(1, self._staging_bytes // max(1, row_bytes))
        for first in range(0, len(rows), at_once):
            count = min(at_once, len(rows) - first)
            piece = self._stage(count * row_bytes).view(stored.dtype).view(count, *width)
            _fill(piece, stored, begin + first * row_bytes)
            chosen = piece if columns is None else piece[:, columns.start : columns.stop]
            out[first : first + count].copy_(chosen)  # done when it returns, so the buffer is free again
        return out if stored.shape else out[0]

    def _stage(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            pinned = self._device.type == "cuda"
            self._staging = torch.empty(max(nbytes, self._staging_bytes), dtype=torch.uint8, pin_memory=pinned)
        return self._staging[:nbytes]


def _fill(target: torch.Tensor, stored: Stored, offset: int) -> None:
    """Read bytes from the file's `offset` on into a contiguous tensor on the host."""
    buffer: memoryview = target.view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(stored.descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise ConfigError(f"model.path: {stored.path} cannot be read: {error}") from error
        if not count:
            raise ConfigError(f"model.path: {stored.path} became shorter while it was read")
        done += count


Progress = Callable[[int, int], None]
"""Callback `progress(bytes_done, bytes_total)`."""


class Rows(NamedTuple):
    """Rows of a tensor of `total` rows; `rows` is None for all of them."""

    name: str
    total: int
    rows: range | None = None


class WeightSource:
    """An open checkpoint, to be used as a context manager."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self._path, self._dtype, self._device, self._progress = path, dtype, device, progress
        self._done = 0
        files = weight_files(path)
        self._total = sum(file.stat().st_size for file in files)
        self._files = TensorFiles(files, device)
        self._left = set(self._files.tensors)

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return tensor `name`, of exactly this shape, or only those rows (columns) of it. Does not read other rows.

        `dtype`: overrides the model's.

        Raises ConfigError if it is missing, already taken or of another shape.
        """
        return self._read(name, shape, rows, columns, dtype or self._dtype)

    def take_rows(self, parts: Sequence[Rows], *rest: int) -> torch.Tensor:
        """Return the parts' rows stacked along the first dimension. `rest`: the other dimensions."""
        counts = [len(part.rows) if part.rows is not None else part.total for part in parts]
        stacked = torch.empty((sum(counts), *rest), dtype=self._dtype, device=self._device)
        first = 0
        for part, count in zip(parts, counts, strict=True):
            place = stacked[first : first + count]
            self._read(part.name, (part.total, *rest), part.rows, None, self._dtype, place)
            first += count
        return stacked

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None,
        columns: range | None,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if name not in self._left:
            raise ConfigError(f"model.path: {self._path} has no tensor {name!r}")
        self._left.discard(name)
        stored = self._files.tensors[name]
        if stored.shape != shape:
            raise ConfigError(
                f"model.path: {stored.path}: tensor {name!r} has shape {stored.shape}, the config asks for {shape}"
            )
        tensor = self._files.read(name, dtype, rows, columns, out)
        # A rank that reads a part reports the same progress as one that reads all.
        self._done = min(self._done + math.prod(shape) * stored.dtype.itemsize, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def has(self, name: str) -> bool:
        return name in self._left

    def ignore(self, *suffixes: str) -> None:
        """Leave out tensors with these name endings, which hold nothing that the model needs."""
        self._left = {name for name in self._left if not name.endswith(suffixes)}

    def ignore_layers(self, layers: range) -> None:
        """Leave out whole layers, which are not computed."""
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raise UnsupportedModel if tensors are left: they would have changed the result."""
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            raise UnsupportedModel(
                f"the checkpoint has {len(self._left)} tensors that this model does not use: {names}"
            )
        if self._progress is not None:
            self._progress(self._total, self._total)
