"""Transport `cuda_ipc`: the peer is a process of the same host whose pool lies in device memory, on this GPU or on one
that this GPU can reach.

Its arena is mapped once, by CUDA's interprocess handle. A write is one launch that copies all pieces at once, on a
stream of its own, and `write` returns when it is over. So nothing can land later and `settle` is always True. The
peer's process is watched by pidfd: a write to a mapping whose owner has ended is read by no process, and is an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.copies import require_inside
from chitu.kv_transfer.transports.cuda_ipc.driver import IpcDriver
from chitu.kv_transfer.transports.mapped_peers import MappedPeers
from chitu.kv_transfer.transports.peer_process import PeerProcess, host_id, own_start_time
from chitu.kv_transfer.transports.transport import CopyList, LaunchedCopies, PeerHandle, WriteError
from chitu.protocol import RankMemory, TransportSession
from chitu.types import Ready

NAME = "cuda_ipc"


@dataclass(slots=True, eq=False)
class CudaPeer:
    session_id: str
    arena_base: int
    """Address of the arena in the peer's address space."""
    arena_bytes: int
    process: PeerProcess
    mapping: int
    """Address of the peer's allocation in our address space."""
    local_base: int
    """Address of the arena in our address space."""


class CudaIpcTransport:
    """Implements `kv_transfer.transports.transport.Transport`."""

    name = NAME
    gathers = True
    """True, because a launch copies any number of pieces (see `transports/transport.py`)."""

    def __init__(self, driver: IpcDriver, copier: LaunchedCopies) -> None:
        self._driver = driver
        self._copier = copier
        self._host_id = host_id()
        self._ranges: list[tuple[int, int]] = []
        self._session: TransportSession | None = None
        self._peers = MappedPeers(NAME, self._unmap)

    def register(self, base: int, nbytes: int) -> None:
        if (base, nbytes) in self._ranges:
            return
        exported = self._driver.export(base)
        if nbytes <= 0 or exported.offset + nbytes > exported.nbytes:
            raise TransferFailed(f"cuda_ipc: {nbytes} bytes at {base:#x} are more than their allocation")
        self._ranges.append((base, nbytes))
        if self._session is None:
            self._session = TransportSession(
                transport=NAME,
                session_id=f"{self._host_id}/{os.getpid()}/{base:#x}",
                attributes={
                    "host_id": self._host_id,
                    "pid": str(os.getpid()),
                    "start_time": own_start_time(),
                    "handle": exported.handle.hex(),
                    "offset": str(exported.offset),
                    "nbytes": str(exported.nbytes),
                },
            )

    def local_session(self) -> TransportSession:
        if self._session is None:
            raise TransferFailed("cuda_ipc: no memory is registered")
        return self._session

    def can_reach(self, session: TransportSession) -> bool:
        return session.transport == NAME and self._host_id != "" and session.attributes.get("host_id") == self._host_id

    def connect(self, memory: RankMemory, session: TransportSession) -> CudaPeer:
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
        peer = CudaPeer(
            session.session_id, memory.arena_base, memory.arena_bytes, process, mapping, local_base=mapping + offset
        )
        self._peers.add(peer)
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self.write_after(peer, copies, (), timeout_s)

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """Implement `OrderedTransport`: the launch is made ahead and waits on the device. `timeout_s` bounds nothing: a
        launch ends by itself and cannot be cancelled."""
        assert isinstance(peer, CudaPeer)
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        require_inside(NAME, (src_N, dst_N, length_N), (peer.arena_base, peer.arena_bytes), self._ranges)
        try:
            with self._peers.writing(peer):
                self._copier.copy(src_N, dst_N + (peer.local_base - peer.arena_base), length_N, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise WriteError(f"cuda_ipc: writing to {peer.session_id}: {error}", settled=True) from error

    def settle(self, peer: PeerHandle, timeout_s: float) -> bool:
        """Return True always: a copy is over when `write` returns."""
        return True

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, CudaPeer)
        self._peers.remove(peer)

    def close(self) -> None:
        self._peers.remove_all()
        self._ranges.clear()

    def _unmap(self, peer: CudaPeer) -> None:
        peer.process.close()
        self._driver.close(peer.mapping)
