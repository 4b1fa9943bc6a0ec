"""Shape of an aux row (one logits row with its header), for code that must not import torch; what rows lie in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

AUX_HEADER_BYTES = 64
"""A cache line of header (see `kv_transfer.metadata_buffers`) ahead of the logits."""


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
