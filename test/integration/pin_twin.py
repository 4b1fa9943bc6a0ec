"""Twins of the GPU parts that staging in pinned host memory needs. "Device memory" is memory declared as such. The
device has other addresses for pinned memory than the host, as is allowed: the same pages are mapped a second time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cuda_ipc_twin import HostCopier

from chitu.errors import TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.segments import HostArena
from chitu.kv_transfer.transports.shm import PinnedShmTransport
from chitu.kv_transfer.transports.transport import Int64s
from chitu.types import Ready

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAY_MOVE = 1


class SecondMappings:
    """Implements `PinDriver`. Counts its mappings, so that tests see what is left pinned."""

    def __init__(self, pool: PagedMemory | None = None) -> None:
        self._device_memory = [(pool.arena_base, pool.arena_bytes)] if pool is not None else []
        self._pinned: dict[int, tuple[int, int]] = {}

    def is_device_memory(self, address: int, nbytes: int) -> bool:
        return any(base <= address and address + nbytes <= base + size for base, size in self._device_memory)

    def pin(self, address: int, nbytes: int) -> int:
        if address in self._pinned:
            raise TransferFailed("pinned already")
        second = _libc.mremap(address, 0, nbytes, _MAY_MOVE)  # old size 0 maps the same pages again, see mremap(2)
        if second is None or second == ctypes.c_void_p(-1).value:
            raise TransferFailed(f"this memory cannot be pinned (errno {ctypes.get_errno()})")
        self._pinned[address] = second, nbytes
        return int(second)

    def unpin(self, address: int) -> None:
        _libc.munmap(*self._pinned.pop(address))

    def knows(self, address: int, nbytes: int) -> bool:
        """Return whether the device can access these addresses."""
        return self.is_device_memory(address, nbytes) or any(
            second <= address and address + nbytes <= second + size for second, size in self._pinned.values()
        )

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)


class DeviceBlocks(HostCopier):
    """Block copies of a device, which faults at addresses that it cannot access, such as the host's own for host
    memory."""

    def __init__(self, driver: SecondMappings) -> None:
        self._driver = driver

    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, after: Sequence[Ready] = ()) -> None:
        for address_N in (src_N, dst_N):
            for address, length in zip(address_N.tolist(), length_N.tolist(), strict=True):
                if not self._driver.knows(address, length):
                    raise RuntimeError(f"an illegal memory access at {address:#x}")
        super().copy(src_N, dst_N, length_N, after)


def pinned_twin(pool: PagedMemory) -> tuple[PinnedShmTransport, SecondMappings]:
    """Return the transport of a process whose pool counts as device memory."""
    driver = SecondMappings(pool)
    return PinnedShmTransport(driver, DeviceBlocks(driver)), driver


def arena_twin(nbytes: int, pool: PagedMemory | None = None) -> tuple[HostArena, SecondMappings]:
    """Return host memory for segments, and the driver of a device with this pool that can access it."""
    driver = SecondMappings(pool)
    return HostArena(nbytes, driver), driver
