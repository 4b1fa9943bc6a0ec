"""Twins, over shared files, of the two GPU parts that transport `cuda_ipc` needs. The transport itself, its sessions,
checks, mappings and shutdown thus run between two processes without a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.cuda_ipc import CudaIpcTransport
from chitu.kv_transfer.transports.shm import find_range
from chitu.kv_transfer.transports.transport import Int64s
from chitu.ops.cuda_driver import HANDLE_BYTES, Exported
from chitu.ops.kernels.blocks import cut
from chitu.types import Ready


class FileDriver:
    """A driver whose allocations are shared files (as in a pool on a CPU); a handle holds pid and descriptor."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def export(self, address: int) -> Exported:
        found = find_range(address, 1)
        if found.fd < 0:
            raise TransferFailed("this memory cannot be shared")
        handle = struct.pack("<qq", os.getpid(), found.fd).ljust(HANDLE_BYTES, b"\0")
        return Exported(handle, found.offset, os.fstat(found.fd).st_size)

    def open(self, handle: bytes) -> int:
        pid, fd = struct.unpack_from("<qq", handle)
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise TransferFailed(f"the peer's memory cannot be mapped: {error}") from error
        mapping = mmap.mmap(file, 0)
        os.close(file)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mappings[address] = mapping
        return address

    def close(self, address: int) -> None:
        self._mappings.pop(address).close()

    def copy_to_host(self, host: int, device: int, nbytes: int) -> None:
        ctypes.memmove(host, device, nbytes)

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


class HostCopier:
    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, after: Sequence[Ready] = ()) -> None:
        for ready in after:
            ready.synchronize()
        for source, target, length in zip(*cut(src_N, dst_N, length_N).tolist(), strict=True):
            ctypes.memmove(target, source, length)


def cuda_ipc_twin() -> CudaIpcTransport:
    return CudaIpcTransport(FileDriver(), HostCopier())
