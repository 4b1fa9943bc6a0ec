"""Segments in host memory beside a pool in GPU memory: an anonymous shared file, which a process of the same host
can map (`shm`), and from which libraries send over TCP anyway.

Built by the service's main thread. The system allocates the memory when it is touched, and it is pinned at the first
copy of the device to or from it (0.7 ms per MiB, measured for 448 MiB), so an instance whose writes go another way pays
nothing. `device_base` may be called by several threads. Invariant: pinned once, and unpinned before the mapping is
removed.
"""

from __future__ import annotations

import ctypes
import threading

from chitu.kv_cache.shared_memory import shared_memory
from chitu.kv_transfer.transports.cuda_ipc.driver import PinDriver

PAGE_BYTES = 4096


class HostArena:
    """Implements `copier.Window`. Raises ConfigError if the memory cannot be allocated."""

    def __init__(self, nbytes: int, driver: PinDriver) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._driver = driver
        self._lock = threading.Lock()
        self._device_base: int | None = None
        self._map = shared_memory("chitu-staging", self.nbytes, "staging in host memory")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def is_pinned(self) -> bool:
        return self._device_base is not None

    def device_base(self) -> int:
        """Return the device address of `base`; pins the memory at the first call. Raises TransferFailed."""
        with self._lock:
            if self._device_base is None:
                self._device_base = self._driver.pin(self.base, self.nbytes)
            return self._device_base

    def close(self) -> None:
        """Unpin and release the memory; no copy may be in flight. Idempotent. Processes that mapped it keep it."""
        with self._lock:
            if self._device_base is not None:
                self._driver.unpin(self.base)
                self._device_base = None
            self._map.close()
