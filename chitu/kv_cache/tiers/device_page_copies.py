"""`PageCopies` of a pool in tensors, on the device where they are. On CUDA the copies go to a stream of their own, so
that no step waits for them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.errors import ConfigError
from chitu.kv_cache.pool import KVPool
from chitu.ops.cuda_device import on_stream


class DevicePageCopies:
    def __init__(self, pool: KVPool) -> None:
        self._regions_PB = [region.flatten(1).view(torch.uint8) for region in pool.regions]
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        content_RB = self._of(content)
        with on_stream(self._stream):
            content_RB.copy_(torch.stack([region_PB[page] for region_PB in self._regions_PB]), non_blocking=True)
        self._wait()

    @torch.inference_mode()
    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        content_RB = self._of(content)
        with on_stream(self._stream):
            on_device_RB = content_RB.to(self._regions_PB[0].device, non_blocking=True)
            for region, region_PB in enumerate(self._regions_PB):
                region_PB[page] = on_device_RB[region]
        self._wait()

    def _of(self, content: memoryview) -> torch.Tensor:
        return torch.frombuffer(content, dtype=torch.uint8).view(len(self._regions_PB), -1)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def pinned_memory(nbytes: int) -> memoryview:
    """Zeros. Registered, not taken from torch, whose allocator of pinned memory rounds up to a power of two.
    ConfigError where the driver refuses."""
    memory: NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.ctypes.data, nbytes, 0))
    if code:
        raise ConfigError(f"cache.host_bytes: CUDA does not pin {nbytes} bytes of host memory (error {code})")
    return memory.data
