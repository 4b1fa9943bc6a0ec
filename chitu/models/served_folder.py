"""The folder that weights in memory were read from, as its files were before that: so others may have the same bytes
from there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from chitu.config.model_files import TENSORS_MANIFEST
from chitu.errors import ConfigError
from chitu.models.config import weights_stamp

Stamp = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ServedFolder:
    """It is equal to itself only: each load has its own."""

    path: str
    model_hash: str
    stamp: Stamp
    """`weights_stamp` before the files were read."""

    @property
    def files(self) -> list[str]:
        return [str(name) for name, *_ in self.stamp]

    @property
    def is_plain(self) -> bool:
        """Whether its files alone have the tensors, at the same places as those of each folder of its hash. Those that
        a manifest names may be anywhere."""
        return TENSORS_MANIFEST not in self.files

    def is_unchanged(self) -> bool:
        """Return whether all files are as they were."""
        try:
            return weights_stamp(self.path) == self.stamp
        except (ConfigError, OSError):
            return False

    def is_file_unchanged(self, name: str, descriptor: int) -> bool:
        """Return whether an open file of this name is as it was."""
        status = os.fstat(descriptor)
        return (name, status.st_size, status.st_mtime_ns) in self.stamp
