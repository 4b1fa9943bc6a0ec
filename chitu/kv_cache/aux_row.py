"""Shape of an aux row (one logits row with its header), for code that must not import torch; what rows lie in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.types import Role

AUX_HEADER_BYTES = 64
"""A cache line of header (see `kv_transfer.metadata_buffers`) ahead of the logits."""


UNIFIED_AUX_ROWS = 8
"""A prompt with forks has a row on a unified instance for as long as it is computed; the ninth of them waits."""


def aux_row_bytes(vocab_size: int) -> int:
    """Header plus one float32 per vocabulary entry, in whole cache lines."""
    return AUX_HEADER_BYTES + (4 * vocab_size + 63) // 64 * 64


class RowMemory(Protocol):
    """Rows wherever they are: host memory, or a device's. Any thread."""

    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes `[start, end)` of a row, on the host: a view where the row is there, else a copy."""
        ...

    def write(self, row: int, data: bytes) -> None:
        """Put `data` at the row's begin; there when this returns."""
        ...


class HostRows:
    """`RowMemory` over uint8 `[rows, row_bytes]` of this process."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        if rows.ndim != 2 or rows.dtype != np.uint8 or not rows.flags.c_contiguous or not rows.flags.writeable:
            raise ValueError(f"aux rows must be writable contiguous uint8 [rows, bytes], not {rows.dtype} {rows.shape}")
        self._rows = rows

    @property
    def num_rows(self) -> int:
        return int(self._rows.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self._rows.shape[1])

    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        return self._rows[row, start:end]

    def write(self, row: int, data: bytes) -> None:
        self._rows[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)


def num_aux_rows(configured: int | None, num_slots: int, role: Role) -> int:
    """Of the main rank of an instance: for requests between P and D, and on a unified one for prompts with forks.
    `configured`: `cache.num_aux_slots`."""
    if role is Role.UNIFIED:
        return min(num_slots, UNIFIED_AUX_ROWS)
    return configured or 2 * num_slots
