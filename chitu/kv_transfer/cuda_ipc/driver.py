"""CUDA's interprocess handles, by the four driver calls that they need (libcuda, stable C interface).

A handle stands for a whole allocation of its process, so an address in the middle travels as handle and offset.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol

from chitu.errors import MissingDependency, TransferFailed

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: another GPU's memory is reached over NVLink or PCIe where it can be."""


class Exported(NamedTuple):
    handle: bytes
    """Of the allocation."""
    offset: int
    """Where the address lies in it."""
    nbytes: int
    """Of the allocation."""


class IpcDriver(Protocol):
    """What the transport needs of a device; CPU tests bring a twin over shared files."""

    def export(self, address: int) -> Exported:
        """TransferFailed for an address that is no device memory, or of a kind that cannot be shared."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; its address in ours. TransferFailed where that is impossible."""
        ...

    def close(self, address: int) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """Implements `IpcDriver`. MissingDependency without an NVIDIA driver. The calls work in the thread's current
    context, which torch's first CUDA call makes the device's primary one; `device` is made current before each."""

    def __init__(self, device: int) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MissingDependency(f"transport cuda_ipc: there is no NVIDIA driver here ({error})") from error
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check(self._cuda.cuInit(0), "cuInit")
        self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
        self._check(
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number), "cuDevicePrimaryCtxRetain"
        )

    def export(self, address: int) -> Exported:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._enter()
        found = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._check(found, f"{address:#x} is no device memory")
        self._check(
            self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), base),
            "this memory cannot be shared (it must come from cudaMalloc: no expandable segments)",
        )
        return Exported(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), address - base.value, size.value)

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise TransferFailed(f"cuda_ipc: a handle of {len(handle)} bytes")
        address, packed = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(packed), handle, HANDLE_BYTES)
        self._enter()
        found = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), packed, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._check(found, "the peer's memory cannot be mapped")
        return address.value

    def close(self, address: int) -> None:
        self._enter()
        self._check(self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address)), "cuIpcCloseMemHandle")

    def _enter(self) -> None:
        self._check(self._cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"code {code}"
            raise TransferFailed(f"cuda_ipc: {what}: {reason}")
