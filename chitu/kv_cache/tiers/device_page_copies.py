"""`PageCopies` of a pool in tensors, on their own device. On CUDA the copies run on a stream of their own, so that no
step waits for them."""

from __future__ import annotations

import numpy as np
import torch

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import ConfigError
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.tiers.page_copies import HeadsOfRank, heads_of_rank
from chitu.ops.cuda_device import on_stream


class DevicePageCopies:
    def __init__(self, pool: KVPool, tp_rank: int = MAIN_RANK) -> None:
        self._parts = [
            (part, [pool.regions[index].flatten(2).view(torch.uint8) for index in part.regions])
            for part in heads_of_rank(pool.layout, tp_rank)
        ]
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        with on_stream(self._stream):
            for part, regions_PHB in self._parts:
                if not part.is_first:
                    continue
                content_RHB = _heads_in(content, part)
                on_device_RHB = torch.stack([region_PHB[page] for region_PHB in regions_PHB])
                if content_RHB.is_contiguous():
                    content_RHB.copy_(on_device_RHB, non_blocking=True)
                else:  # torch would copy through memory that is not pinned
                    for content_HB, on_device_HB in zip(content_RHB, on_device_RHB, strict=True):
                        content_HB.copy_(on_device_HB, non_blocking=True)
        self._wait()

    @torch.inference_mode()
    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        with on_stream(self._stream):
            for part, regions_PHB in self._parts:
                on_device_RHB = _heads_in(content, part).to(regions_PHB[0].device, non_blocking=True)
                for region, region_PHB in enumerate(regions_PHB):
                    region_PHB[page] = on_device_RHB[region]
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _heads_in(content: memoryview, part: HeadsOfRank) -> torch.Tensor:
    return torch.frombuffer(content[part.place], dtype=torch.uint8).view(part.shape)[:, part.heads]


def pin(memory: memoryview) -> None:
    """Pin memory by registering it; torch's allocator of pinned memory would round up to a power of two. Raise
    ConfigError if the driver refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, 0))
    if code:
        raise ConfigError(f"cache.host_bytes: CUDA does not pin {memory.nbytes} bytes of host memory (error {code})")
