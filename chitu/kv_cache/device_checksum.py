"""The page checksum of `checksum.py` and that of state rows (`state_sums.py`) over a pool's tensors, on their own
device: same numbers, no copy to the host. Used like `HostPageSums` and `HostStateSeals`. On CUDA the work runs on a
stream of its own and does not wait for a step's kernels (P sums what a finished step wrote, D what the transport
wrote)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.kv_cache.checksum import page_weights
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_row import STAMP_BYTES, StateRow
from chitu.kv_cache.state_sums import sealed, state_weights, unit_bytes_of
from chitu.ops.cuda_device import on_stream
from chitu.protocol import StateSeal

UNIT_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class DevicePageSums:
    def __init__(self, pool: KVPool, tp_rank: int, counts_copies: bool = True) -> None:
        self._first_regions = pool.layout.first_regions
        weights = page_weights(pool.layout, tp_rank, pool.page_bytes, counts_copies)
        regions_R4 = np.array(
            [
                (base, nbytes, len(each.salt_H), len(each.low_W))
                for base, nbytes, each in zip(pool.region_bases, pool.page_bytes, weights, strict=True)
            ]
        )
        salts_RH = np.zeros((len(weights), int(regions_R4[:, 2].max())), np.int64)
        for salt_H, each in zip(salts_RH, weights, strict=True):
            salt_H[: len(each.salt_H)] = each.salt_H
        widest = max(weights, key=lambda each: len(each.low_W))  # the words of all regions have the same weights
        self._regions_R4, self._salts_RH, self._low_W, self._high_W = (
            torch.from_numpy(part.copy()).to(pool.device)
            for part in (regions_R4, salts_RH, widest.low_W, widest.high_W)
        )
        self._device = pool.device
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]

        if self._stream is not None:  # compiles the kernel before a transfer waits for it
            self.sums(range(pool.layout.num_layers), [0])

    @torch.inference_mode()
    def sums(self, layers: range, pages: Sequence[int]) -> NDArray[np.int64]:
        """Return the sums of our heads of these pages, over all regions of these consecutive layers: `[len(pages)]`, on
        the host."""
        from chitu.ops.kernels.sums import page_sums  # Triton: only with a GPU

        if not len(pages):
            return np.zeros(0, np.int64)
        with on_stream(self._stream):
            pages_N = torch.as_tensor(np.asarray(pages, dtype=np.int64), device=self._device)
            own = slice(self._first_regions[layers.start], self._first_regions[layers.stop])
            return (
                page_sums(self._regions_R4[own], self._salts_RH[own], self._low_W, self._high_W, pages_N).cpu().numpy()
            )


class DeviceStateSeals:
    def __init__(self, pool: KVPool, tp_rank: int, counts_copies: bool = True) -> None:
        self._rows = pool.state_rows
        self._parts = [(part, UNIT_DTYPES[unit_bytes_of(part)]) for part in StateRow.of(pool.layout).parts]
        self._weights = [
            tuple(torch.from_numpy(each.copy()).to(pool.device) for each in weights)
            for weights in state_weights(pool.layout, tp_rank, counts_copies)
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
