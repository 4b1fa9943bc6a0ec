"""Tensors of a checkpoint folder, taken by name, each exactly once.

`WeightSource` reads safetensors files lazily, converts to the wanted dtype and device, checks shapes and reports
progress in bytes. A model that leaves tensors behind would compute something else than its checkpoint means, so
`finish` refuses leftovers by name. Used by the loader on the thread that starts the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import weight_files

Progress = Callable[[int, int], None]
"""`progress(bytes_done, bytes_total)`."""


class Rows(NamedTuple):
    """Rows of a tensor of `total` rows; None: all of them."""

    name: str
    total: int
    rows: range | None = None


class WeightSource:
    """Open checkpoint. Use as a context manager; the files stay mapped until its end."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self._dtype, self._device, self._progress = dtype, device, progress
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        self._left: set[str] = set()
        self._done = 0
        files = weight_files(path)
        self._total = sum(file.stat().st_size for file in files)
        try:
            for file in files:
                handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
                self._where.update(dict.fromkeys(handle.keys(), handle))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
        self._left.update(self._where)

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Tensor `name`, of exactly this shape, or only those rows (columns) of it: nothing else is read.

        `dtype`: another one than the model's.

        ConfigError where it is missing, taken already or of another shape.
        """
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name!r}")
        self._left.discard(name)
        stored = self._where[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"tensor {name!r} has shape {tuple(stored.get_shape())}, the config asks for {shape}")
        parts = [part or range(size) for part, size in zip((rows, columns), shape, strict=False)]
        is_whole = all(len(part) == size for part, size in zip(parts, shape, strict=False))
        tensor: torch.Tensor = (
            self._where[name].get_tensor(name)
            if is_whole
            else stored[tuple(slice(part.start, part.stop) for part in parts)]
        )
        # A rank that reads a part is as far as one that reads all.
        self._done = min(self._done + math.prod(shape) * tensor.itemsize, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)
        # A part of a row is strided; what keeps it must not keep the rest.
        return tensor.to(device=self._device, dtype=dtype or self._dtype).contiguous()

    def take_rows(self, parts: Sequence[Rows], *rest: int) -> torch.Tensor:
        """The parts' rows stacked along the first dimension; the others are `rest`."""
        return torch.cat([self.take(part.name, part.total, *rest, rows=part.rows) for part in parts])

    def has(self, name: str) -> bool:
        return name in self._left

    def ignore(self, *suffixes: str) -> None:
        """Tensors whose name ends so are known to carry nothing that we need."""
        self._left = {name for name in self._left if not name.endswith(suffixes)}

    def finish(self) -> None:
        """UnsupportedModel where tensors were left: they would have changed the result."""
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            raise UnsupportedModel(
                f"the checkpoint has {len(self._left)} tensors that this model does not use: {names}"
            )
        if self._progress is not None:
            self._progress(self._total, self._total)
