"""Tensors of a checkpoint folder, taken by name, each exactly once.

`WeightSource` reads safetensors files tensor by tensor, in the wanted dtype and to the wanted device, checks shapes and
reports progress in bytes. A model that leaves tensors unread would compute something else than its checkpoint, so
`finish` refuses leftovers by name. Used by the loader on the thread that starts the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import weight_files
from chitu.models.tensor_files import TensorFiles

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
