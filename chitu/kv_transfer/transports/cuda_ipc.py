"""Transport `cuda_ipc`: the peer is a process of this host whose pool lies in GPU memory that our GPU can reach.

Its arena is mapped once, by CUDA's interprocess handle. A handle stands for a whole allocation of its process, so an
address inside it travels as handle and offset. A write is one launch that copies all pieces at once, on a stream of its
own, and `write` returns when it is over. So nothing can land later and `fence` is always True. The peer's process is
watched by pidfd: a write to a mapping whose owner has ended is read by no process, and is an error.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.mapped import LaunchingTransport, MappedPeer, PeerProcess
from chitu.kv_transfer.transports.transport import LaunchedCopies
from chitu.ops.cuda_driver import Exported
from chitu.protocol import RankMemory, TransportSession

NAME = "cuda_ipc"


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


class CudaIpcTransport(LaunchingTransport):
    """Implements `Transport` and `OrderedTransport` of `kv_transfer.transports.transport`."""

    batch_bytes = 256 << 20
    """Takes an H200 0.15 ms, less than the host needs for a write of any size."""

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
