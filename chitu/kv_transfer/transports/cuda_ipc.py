"""Transport `cuda_ipc`: the peer is a process of this host whose pool lies in GPU memory that our GPU can reach.

Its arena is mapped once, by CUDA's interprocess handle. A handle stands for a whole allocation of its process, so an
address inside it travels as handle and offset. A write is one launch that copies all pieces at once, on a stream of its
own, and `write` returns when it is over. So nothing can land later and `fence` is always True. The peer's process is
watched by pidfd: a write to a mapping whose owner has ended is read by no process, and is an error.

`CudaDriver` is all that transports need of libcuda (stable C interface): these handles, and pinned host memory that a
device can reach, which `shm` between GPUs uses.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, NamedTuple, Protocol

from chitu.errors import MissingDependency, TransferFailed
from chitu.kv_transfer.transports.mapped import LaunchingTransport, MappedPeer, PeerProcess
from chitu.kv_transfer.transports.transport import LaunchedCopies
from chitu.protocol import RankMemory, TransportSession

HANDLE_BYTES = 64
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


class IpcDriver(Protocol):
    """What the transport needs of a device; CPU tests have a stand-in over shared files."""

    def export(self, address: int) -> Exported:
        """Return the handle for an address. Raises TransferFailed if it is not device memory or cannot be shared."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its address in ours. Raises TransferFailed if that fails."""
        ...

    def close(self, address: int) -> None: ...


class PinDriver(Protocol):
    """What staging in host memory needs of a device; CPU tests have a stand-in."""

    def is_device_memory(self, address: int, nbytes: int) -> bool: ...

    def pin(self, address: int, nbytes: int) -> int:
        """Make host memory reachable for the device and return its address there. Raises TransferFailed if that is
        impossible (it is pinned already, too much is pinned, or it is not host memory)."""
        ...

    def unpin(self, address: int) -> None:
        """Unpin memory by its host address. Nothing may copy there any more."""
        ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """Implements `IpcDriver` and `PinDriver`. Raises MissingDependency without an NVIDIA driver. The calls work in the
    thread's current context, so each first makes `device`'s primary context current, as torch's first CUDA call
    does."""

    def __init__(self, device: int) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MissingDependency(f"there is no NVIDIA driver here ({error}): transports of GPUs need it") from error
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
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"code {code}"
            raise TransferFailed(f"cuda: {what}: {reason}")


NAME = "cuda_ipc"


class CudaIpcTransport(LaunchingTransport):
    """Implements `Transport` and `OrderedTransport` of `kv_transfer.transports.transport`."""

    def __init__(self, driver: IpcDriver, copier: LaunchedCopies) -> None:
        super().__init__(NAME, copier)
        self._driver = driver
        self._session: TransportSession | None = None

    def register(self, base: int, nbytes: int) -> None:
        if (base, nbytes) in self._sources:
            return
        exported = self._driver.export(base)
        if nbytes <= 0 or exported.offset + nbytes > exported.nbytes:
            raise TransferFailed(f"cuda_ipc: {nbytes} bytes at {base:#x} are more than their allocation")
        self._sources.append((base, nbytes))
        if self._session is None:
            named = {"handle": exported.handle.hex(), "offset": str(exported.offset), "nbytes": str(exported.nbytes)}
            self._session = self.session_of(f"{base:#x}", named)

    def local_session(self) -> TransportSession:
        if self._session is None:
            raise TransferFailed("cuda_ipc: no memory is registered")
        return self._session

    def can_reach(self, session: TransportSession) -> bool:
        return self.is_here(session)

    def connect(self, memory: RankMemory, session: TransportSession) -> MappedPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"cuda_ipc: {session.session_id} is not a process of this host and user")
        try:
            pid, offset, nbytes = (int(session.attributes[name]) for name in ("pid", "offset", "nbytes"))
            handle = bytes.fromhex(session.attributes["handle"])
        except (KeyError, ValueError) as error:
            raise TransferFailed(f"cuda_ipc: malformed session {session.session_id}: {error}") from error
        if min(pid, offset) < 0 or offset + memory.arena_bytes > nbytes:
            raise TransferFailed(f"cuda_ipc: session {session.session_id} has numbers that do not fit its arena")
        try:
            with PeerProcess.entered(pid, session.attributes.get("start_time", "")) as (process, _):
                mapping = self._driver.open(handle)
        except (OSError, OverflowError) as error:
            raise TransferFailed(f"cuda_ipc: cannot reach the process of {session.session_id}: {error}") from error
        unmap = partial(self._driver.close, mapping)
        peer = MappedPeer(session.session_id, memory.arena_base, memory.arena_bytes, process, mapping + offset, unmap)
        self._peers.add(peer)
        return peer
