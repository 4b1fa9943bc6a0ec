"""Aux rows in device memory, which `MetadataBuffers` seals and verifies there: only headers cross to the host. The
stream is its own and does not wait for a step's kernels: P seals what a finished step wrote, D verifies what a finished
transfer wrote. Any thread. On a CPU tensor the same code runs with plain copies, for tests. `RowSums` is what a step of
D launches for the rows that it draws from, so that nobody waits for the device to check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, CHECKED_BYTES, CHECKSUM_AT, COVERED_FROM, WORD_BYTES, row_weights
from chitu.ops.cuda_device import on_stream
from chitu.types import Ready


class RowSums:
    """Headers and checksums of rows of `row_bytes` on one device."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self._weights = torch.from_numpy(row_weights(row_bytes)).to(device)

    def sums(self, rows_RB: torch.Tensor, end: int) -> torch.Tensor:
        """Return the checksum of each row up to byte `end`, int64 `[R, 1]`."""
        words = rows_RB[:, COVERED_FROM:end].view(torch.int32)
        return (words * self._weights[: (end - COVERED_FROM) // WORD_BYTES]).sum(1, keepdim=True)

    def checked(self, rows_RB: torch.Tensor, end: int) -> torch.Tensor:
        """Return header and checksum of each row, int64 `[R, CHECKED_BYTES / 8]`."""
        return torch.cat([rows_RB[:, :AUX_HEADER_BYTES].view(torch.int64), self.sums(rows_RB, end)], dim=1)


class DeviceRows:
    """`kv_cache.aux_row.RowMemory` over uint8 `[rows, row_bytes]` of a device."""

    def __init__(self, rows: torch.Tensor) -> None:
        if rows.ndim != 2 or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(f"aux rows must be contiguous uint8 [rows, bytes], not {rows.dtype} {tuple(rows.shape)}")
        self._rows = rows
        self._sums = RowSums(rows.shape[1], rows.device)
        self._is_cuda = rows.device.type == "cuda"
        self._stream = torch.cuda.Stream(rows.device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def num_rows(self) -> int:
        return self._rows.shape[0]

    @property
    def row_bytes(self) -> int:
        return self._rows.shape[1]

    @property
    def is_on_device(self) -> bool:
        return True

    @torch.inference_mode()
    def read(self, row: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of bytes `[start, end)` of a row."""
        host = self._host(end - start)
        with self._finished():
            host.copy_(self._rows[row, start:end], non_blocking=True)
        return cast("NDArray[np.uint8]", host.numpy())

    @torch.inference_mode()
    def write(self, row: int, data: bytes) -> None:
        """Write `data` to the start of the row; complete when this returns."""
        with self._finished():
            self._write(row, data)

    @torch.inference_mode()
    def seal(self, row: int, header: bytes, end: int) -> Ready | None:
        with on_stream(self._stream):
            self._write(row, header)
            checksum = self._sums.sums(self._rows[row : row + 1], end)[0]
            self._rows[row, CHECKSUM_AT : CHECKSUM_AT + 8].view(torch.int64).copy_(checksum)
            if self._stream is None:
                return None
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return ready

    @torch.inference_mode()
    def checked(self, row: int, end: int) -> bytes:
        host = self._host(CHECKED_BYTES)
        with self._finished():
            found = self._sums.checked(self._rows[row : row + 1], end)
            host.view(torch.int64).copy_(found[0], non_blocking=True)
        return host.numpy().tobytes()

    def _write(self, row: int, data: bytes) -> None:
        host = self._host(len(data))
        host.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._rows[row, : len(data)].copy_(host, non_blocking=True)

    def _host(self, nbytes: int) -> torch.Tensor:
        # Pinned, or the copy would go through a driver buffer. torch caches such memory for the next call.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    @contextmanager
    def _finished(self) -> Iterator[None]:
        """Work on our stream, and wait for its end."""
        with on_stream(self._stream):
            yield
        if self._stream is not None:
            self._stream.synchronize()
