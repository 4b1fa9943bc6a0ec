"""Aux rows in device memory, which `MetadataBuffers` seals and verifies there: only headers cross to the host. The
stream is its own and does not wait for a step's kernels: P seals what a finished step wrote, D verifies what a finished
transfer wrote. Any thread. On a CPU tensor the same code runs with plain copies, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, CHECKSUM_AT, COVERED_FROM, row_weights
from chitu.ops.cuda_device import on_stream


class DeviceRows:
    """`kv_cache.aux_row.RowMemory` over uint8 `[rows, row_bytes]` of a device."""

    def __init__(self, rows: torch.Tensor) -> None:
        if rows.ndim != 2 or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(f"aux rows must be contiguous uint8 [rows, bytes], not {rows.dtype} {tuple(rows.shape)}")
        self._rows = rows
        self._weights = torch.from_numpy(row_weights(rows.shape[1])).to(rows.device)
        self._is_cuda = rows.device.type == "cuda"
        self._stream = torch.cuda.Stream(rows.device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def num_rows(self) -> int:
        return self._rows.shape[0]

    @property
    def row_bytes(self) -> int:
        return self._rows.shape[1]

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
    def seal(self, row: int, header: bytes, end: int) -> None:
        with self._finished():
            self._write(row, header)
            self._rows[row, CHECKSUM_AT : CHECKSUM_AT + 8].view(torch.int64).copy_(self._checksum(row, end))

    @torch.inference_mode()
    def header_and_checksum(self, row: int, end: int) -> tuple[bytes, int]:
        host = self._host(AUX_HEADER_BYTES + 8)
        with self._finished():
            header = self._rows[row, :AUX_HEADER_BYTES].view(torch.int64)
            host.view(torch.int64).copy_(torch.cat([header, self._checksum(row, end)]), non_blocking=True)
        found = host.numpy().tobytes()
        return found[:AUX_HEADER_BYTES], int.from_bytes(found[AUX_HEADER_BYTES:], "little", signed=True)

    def _checksum(self, row: int, end: int) -> torch.Tensor:
        words = self._rows[row, COVERED_FROM:end].view(torch.int32)
        return (words * self._weights[: len(words)]).sum(0, keepdim=True)

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
