"""The folder that weights in memory were read from, as its files were before that: so others may have the same bytes
from there."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from chitu.config.model_files import TENSORS_MANIFEST
from chitu.errors import ConfigError
from chitu.models.config import weights_stamp

Stamp = tuple[tuple[object, ...], ...]
LOOKS = 256
"""Pages at which it is looked whether they are in memory."""
_mincore = ctypes.CDLL(None).mincore


def _residency(descriptor: int, count: int) -> list[bool]:
    """Return whether these pages of a file, evenly spread, are in memory. Touches none."""
    size = os.fstat(descriptor).st_size
    if not size:
        return []
    found, page = ctypes.c_ubyte(), mmap.PAGESIZE
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        base = np.frombuffer(mapped, np.uint8)
        address, answers = int(base.ctypes.data), []
        for at in range(count):
            place = size * (2 * at + 1) // (2 * count) // page * page
            failed = _mincore(ctypes.c_void_p(address + place), ctypes.c_size_t(1), ctypes.byref(found))
            answers.append(bool(failed) or bool(found.value & 1))
        del base
    return answers


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

    def share_in_memory(self, descriptors: Mapping[str, int]) -> float:
        """Return the share of its bytes that this host has in memory, by a look at a few pages; 1 if the kernel does
        not tell. `descriptors`: of its open files by name."""
        found = [each for name, file in descriptors.items() for each in _residency(file, self._looks(name))]
        return sum(found) / len(found) if found else 1.0

    def _looks(self, name: str) -> int:
        sizes = {str(entry[0]): entry[1] for entry in self.stamp if isinstance(entry[1], int)}
        return max(1, round(LOOKS * sizes.get(name, 0) / max(1, sum(sizes.values()))))

    def is_file_unchanged(self, name: str, descriptor: int) -> bool:
        """Return whether an open file of this name is as it was."""
        status = os.fstat(descriptor)
        return (name, status.st_size, status.st_mtime_ns) in self.stamp
