"""Shape of an aux row (header, logits, and a hidden state if the model drafts by it), its checksum, and the memory of
rows, for code that must not import torch.

The checksum is the sum, modulo 2**64, of the row's signed 32 bit words from `COVERED_FROM` on, each times a fixed odd
random number: host and device get the same, so no row has to cross between them. It detects every change within a word,
and misses one in 2**32 of others at most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.kv_cache.checksum import odd_numbers
from chitu.types import Ready, Role

AUX_HEADER_BYTES = 64
"""Size of the header (see `kv_transfer/layout.py`) before the logits: one cache line."""
CHECKSUM_AT = 40
"""Place of the checksum in the header, int64."""
CHECKED_BYTES = AUX_HEADER_BYTES + 8
"""Size of what is compared of a row: its header as it is, and its checksum as it is, int64."""
COVERED_FROM = 60
"""First byte that it covers: the last number of the header."""
WORD_BYTES = 4

UNIFIED_AUX_ROWS = 8
"""Aux rows of a unified instance. A prompt with forks holds one while it is computed; the ninth such prompt waits."""


def aux_row_bytes(num_numbers: int) -> int:
    """Return the size of a row: header plus so many float32 (`KVLayout.aux_numbers`), in whole cache lines."""
    return AUX_HEADER_BYTES + (4 * num_numbers + 63) // 64 * 64


class RowMemory(Protocol):
    """Aux rows in host or device memory. Any thread."""

    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def is_on_device(self) -> bool:
        """Whether reading a row waits for a device."""
        ...

    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return bytes `[start, end)` of a row on the host: a view if the row is there, else a copy."""
        ...

    def write(self, row: int, data: bytes) -> None:
        """Write `data` to the start of the row; complete when this returns."""
        ...

    def seal(self, row: int, header: bytes, end: int) -> Ready | None:
        """Write the header, with the checksum of the row up to byte `end`. Return a point behind that which a reader
        waits for; None if it is complete."""
        ...

    def checked(self, row: int, end: int) -> bytes:
        """Return the header as it is, and the checksum of the row as it is, up to byte `end`: `CHECKED_BYTES`."""
        ...


def row_weights(row_bytes: int) -> NDArray[np.int64]:
    """Return the weight of each word that a checksum may cover."""
    return odd_numbers(0, (row_bytes - COVERED_FROM) // WORD_BYTES)


class HostRows:
    """`RowMemory` over uint8 `[rows, row_bytes]` of this process."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        if rows.ndim != 2 or rows.dtype != np.uint8 or not rows.flags.c_contiguous or not rows.flags.writeable:
            raise ValueError(f"aux rows must be writable contiguous uint8 [rows, bytes], not {rows.dtype} {rows.shape}")
        self._rows = rows
        self._weights = row_weights(self.row_bytes)

    @property
    def num_rows(self) -> int:
        return int(self._rows.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self._rows.shape[1])

    @property
    def is_on_device(self) -> bool:
        return False

    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        return self._rows[row, start:end]

    def write(self, row: int, data: bytes) -> None:
        self._rows[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)

    def seal(self, row: int, header: bytes, end: int) -> Ready | None:
        self.write(row, header)
        self._rows[row, CHECKSUM_AT : CHECKSUM_AT + 8] = np.array([self._checksum(row, end)]).view(np.uint8)
        return None

    def checked(self, row: int, end: int) -> bytes:
        checksum = self._checksum(row, end).to_bytes(8, "little", signed=True)
        return self._rows[row, :AUX_HEADER_BYTES].tobytes() + checksum

    def _checksum(self, row: int, end: int) -> int:
        words = self._rows[row, COVERED_FROM:end].view(np.int32).astype(np.int64)
        return int(words @ self._weights[: len(words)])


def num_aux_rows(configured: int | None, num_slots: int, role: Role) -> int:
    """Return the number of aux rows of an instance's main rank: for requests between P and D, or on a unified instance
    for prompts with forks. `configured` is `cache.num_aux_slots`."""
    if role is Role.UNIFIED:
        return min(num_slots, UNIFIED_AUX_ROWS)
    return configured or 2 * num_slots
