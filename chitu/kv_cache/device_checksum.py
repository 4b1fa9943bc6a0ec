"""The page checksum of `checksum.py` and that of state rows (`state_sums.py`) over a pool's tensors, on their own
device: same numbers, no copy to the host. Used like `HostPageSums` and `HostStateSeals`. On CUDA the work runs on a
stream of its own and does not wait for a step's kernels (P sums what a finished step wrote, D what the transport
wrote)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.kv_cache.checksum import CHUNK_BYTES, page_weights
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_row import STAMP_BYTES, StateRow
from chitu.kv_cache.state_sums import sealed, state_weights, unit_bytes_of
from chitu.ops.cuda_device import on_stream
from chitu.protocol import StateSeal

DEVICE_CHUNK_BYTES = 64 * CHUNK_BYTES
"""Bytes summed at a time. Temporary device memory is at most three times as much."""


class DevicePageSums:
    def __init__(self, pool: KVPool, tp_rank: int, counts_copies: bool = True) -> None:
        self._first_regions = pool.layout.first_regions
        self._weights = [
            [torch.from_numpy(part.copy()).to(pool.device) for part in weights]
            for weights in page_weights(pool.layout, tp_rank, pool.page_bytes, counts_copies)
        ]
        self._regions_PHW = [region.flatten(2).view(torch.int64) for region in pool.regions]
        self._device = pool.device
        self._chunk_pages = max(1, DEVICE_CHUNK_BYTES // max(pool.page_bytes))
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def sums(self, layers: range, pages: Sequence[int]) -> NDArray[np.int64]:
        """Return the sums of our heads of these pages, over all regions of these consecutive layers: `[len(pages)]`, on
        the host."""
        with on_stream(self._stream):
            pages_N = torch.as_tensor(np.asarray(pages, dtype=np.int64), device=self._device)
            sums_N = torch.zeros_like(pages_N)
            for region in range(self._first_regions[layers.start], self._first_regions[layers.stop]):
                low_W, high_W, salt_H = self._weights[region]
                for start in range(0, len(pages), self._chunk_pages):
                    chunk = slice(start, start + self._chunk_pages)
                    words_CHW = self._regions_PHW[region][pages_N[chunk]]
                    heads_CH = (words_CHW * low_W).sum(-1) + ((words_CHW >> 32) * high_W).sum(-1)
                    sums_N[chunk] += (heads_CH * salt_H).sum(-1)
            return sums_N.cpu().numpy()


UNIT_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class DeviceStateSeals:
    def __init__(self, pool: KVPool, tp_rank: int) -> None:
        self._rows = pool.state_rows
        self._parts = [(part, UNIT_DTYPES[unit_bytes_of(part)]) for part in StateRow.of(pool.layout).parts]
        self._weights = [
            tuple(torch.from_numpy(each.copy()).to(pool.device) for each in weights)
            for weights in state_weights(pool.layout, tp_rank)
        ]
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def seal(self, slot: int) -> StateSeal:
        with on_stream(self._stream):
            row = self._rows[slot]
            totals = []
            for (part, dtype), (weight_U, salt_L) in zip(self._parts, self._weights, strict=True):
                units_LU = row[part.offset : part.offset + part.nbytes].view(dtype).view(part.shape[0], -1)
                totals.append(((units_LU * weight_U).sum(-1) * salt_L).sum())
            total = int(torch.stack(totals).sum().item())
            return sealed(row[:STAMP_BYTES].cpu().numpy().tobytes(), total)
