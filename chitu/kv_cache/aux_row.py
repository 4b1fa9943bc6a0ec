"""Shape of an aux row (one logits row with its header), and the memory of rows, for code that must not import torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.types import Role

AUX_HEADER_BYTES = 64
"""Size of the header (see `kv_transfer.metadata_buffers`) before the logits: one cache line."""


UNIFIED_AUX_ROWS = 8
"""Aux rows of a unified instance. A prompt with forks holds one while it is computed; the ninth such prompt waits."""


def aux_row_bytes(vocab_size: int) -> int:
    """Return the size of a row: header plus one float32 per vocabulary entry, in whole cache lines."""
    return AUX_HEADER_BYTES + (4 * vocab_size + 63) // 64 * 64


class RowMemory(Protocol):
    """Aux rows in host or device memory. Any thread."""

    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return bytes `[start, end)` of a row on the host: a view if the row is there, else a copy."""
        ...

    def write(self, row: int, data: bytes) -> None:
        """Write `data` to the start of the row; complete when this returns."""
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
    """Return the number of aux rows of an instance's main rank: for requests between P and D, or on a unified instance
    for prompts with forks. `configured` is `cache.num_aux_slots`."""
    if role is Role.UNIFIED:
        return min(num_slots, UNIFIED_AUX_ROWS)
    return configured or 2 * num_slots
