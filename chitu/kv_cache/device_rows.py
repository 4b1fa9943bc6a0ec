"""Aux rows in device memory, which `MetadataBuffers` seals and verifies: one small copy each way, on a stream of its
own that does not wait for a step's kernels. P reads what a finished step wrote, D what a finished transfer wrote. Any
thread. On a CPU tensor the same code runs with plain copies, for tests.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.ops.cuda_device import on_stream


class DeviceRows:
    """`kv_cache.aux_row.RowMemory` over uint8 `[rows, row_bytes]` of a device."""

    def __init__(self, rows: torch.Tensor) -> None:
        if rows.ndim != 2 or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(f"aux rows must be contiguous uint8 [rows, bytes], not {rows.dtype} {tuple(rows.shape)}")
        self._rows = rows
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
        # Pinned, or the copy would go through a driver buffer. torch caches such memory for the next read.
        host = torch.empty(end - start, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._copy(host, self._rows[row, start:end])
        return cast("NDArray[np.uint8]", host.numpy())

    @torch.inference_mode()
    def write(self, row: int, data: bytes) -> None:
        """Write `data` to the start of the row; complete when this returns."""
        host = torch.empty(len(data), dtype=torch.uint8, pin_memory=self._is_cuda)
        host.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._copy(self._rows[row, : len(data)], host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with on_stream(self._stream):
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
