"""All that this project needs of libcuda (stable C interface): interprocess handles of device memory, and pinned host
memory that a device can reach. Any thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from chitu.errors import MissingDependency, TransferFailed

HANDLE_BYTES, UUID_BYTES = 64, 16
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: another GPU's memory is reached over NVLink or PCIe if possible."""
_PORTABLE, _DEVICE_MAP = 1, 2
"""cudaHostRegisterPortable and Mapped: kernels of any context read and write the pinned memory in place."""
_ATTRIBUTE_MEMORY_TYPE, _MEMORY_TYPE_DEVICE = 2, 2


class Exported(NamedTuple):
    handle: bytes
    """Handle of the allocation."""
    offset: int
    """Offset of the address in the allocation."""
    nbytes: int
    """Size of the allocation."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * UUID_BYTES),)


class CudaDriver:
    """Implements `IpcDriver` and `PinDriver`. Raises MissingDependency without an NVIDIA driver. The calls work in the
    thread's current context, so each first makes `device`'s primary context current, as torch's first CUDA call
    does."""

    def __init__(self, device: int) -> None:
        self._cuda = _library()
        self._context, number = ctypes.c_void_p(), ctypes.c_int()
        self._check(self._cuda.cuInit(0), "cuInit")
        self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
        self._number = number.value
        self._check(
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number), "cuDevicePrimaryCtxRetain"
        )

    @classmethod
    def of_uuid(cls, uuid: str) -> CudaDriver:
        """Return the driver of the device with this uuid (see `uuid`). Raises TransferFailed if the process sees none,
        and takes no memory of the others."""
        cuda, count, number = _library(), ctypes.c_int(), ctypes.c_int()
        _check(cuda, cuda.cuInit(0), "cuInit")
        _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        for index in range(count.value):
            _check(cuda, cuda.cuDeviceGet(ctypes.byref(number), index), "cuDeviceGet")
            if _uuid_of(cuda, number.value) == uuid:
                return cls(index)
        raise TransferFailed(f"cuda: none of the {count.value} GPUs that this process sees has the uuid {uuid}")

    @property
    def uuid(self) -> str:
        """32 hex digits, whichever number the device has in a process."""
        return _uuid_of(self._cuda, self._number)

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

    def copy_to_host(self, host: int, device: int, nbytes: int) -> None:
        """Copy from an address of the device to one of this process, and return when it is done."""
        self._enter()
        found = self._cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(host), ctypes.c_uint64(device), ctypes.c_size_t(nbytes))
        self._check(found, "device memory cannot be copied")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Enter the device's context, and leave the thread in the one that it had."""
        before = ctypes.c_void_p()
        self._check(self._cuda.cuCtxGetCurrent(ctypes.byref(before)), "cuCtxGetCurrent")
        self._enter()
        try:
            yield
        finally:
            self._cuda.cuCtxSetCurrent(before)

    def is_device_memory(self, address: int, nbytes: int) -> bool:
        self._enter()
        for at in (address, address + nbytes - 1):
            kind = ctypes.c_uint()
            code = self._cuda.cuPointerGetAttribute(
                ctypes.byref(kind), ctypes.c_int(_ATTRIBUTE_MEMORY_TYPE), ctypes.c_uint64(at)
            )
            if code != 0 or kind.value != _MEMORY_TYPE_DEVICE:  # the driver does not recognise plain host memory
                return False
        return True

    def pin(self, address: int, nbytes: int) -> int:
        found = ctypes.c_uint64()
        self._enter()
        code = self._cuda.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE | _DEVICE_MAP)
        )
        self._check(code, f"{nbytes} bytes of host memory cannot be pinned (ulimit -l?)")
        code = self._cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        self._check(code, "the device does not reach pinned host memory")
        return found.value

    def unpin(self, address: int) -> None:
        self._enter()
        self._check(self._cuda.cuMemHostUnregister(ctypes.c_void_p(address)), "cuMemHostUnregister")

    def _enter(self) -> None:
        self._check(self._cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _check(self, code: int, what: str) -> None:
        _check(self._cuda, code, what)


def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingDependency(f"there is no NVIDIA driver here ({error}): memory of GPUs needs it") from error


def _uuid_of(cuda: Any, number: int) -> str:
    uuid = _Uuid()
    _check(cuda, cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), ctypes.c_int(number)), "cuDeviceGetUuid")
    return ctypes.string_at(ctypes.byref(uuid), UUID_BYTES).hex()


def _check(cuda: Any, code: int, what: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"code {code}"
        raise TransferFailed(f"cuda: {what}: {reason}")
