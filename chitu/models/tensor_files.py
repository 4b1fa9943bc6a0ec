"""Reads tensors of safetensors files piece by piece, straight to their destination.

Files are read, not mapped: touched pages of a mapping count as memory of this process until it ends, so a checkpoint
that is converted, split or moved to a device would be in memory twice. Here the overhead is one staging buffer, pinned
for a GPU. Used by `weights.py`, on the thread that builds the service.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chitu.errors import ConfigError
from chitu.models.checkpoint import read_entries

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
