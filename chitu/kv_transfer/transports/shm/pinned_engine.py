"""Transport `shm` for pools in GPU memory: through host memory, for GPUs of one host that cannot map each other's
memory.

D has its segments in an anonymous shared file (`staged/host_area.py`) and scatters from there. P maps that file and
pins its mapping too, and its GPU gathers straight into D's segment: one launch and one transfer over PCIe, no segment
of its own and no copy by the host. Only segments can be written, pages and logits rows cannot (`reaches_pages`). A
write is over when `write` returns, so `settle` is always True. A mapping stays pinned as long as it exists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.transports.arenas import MEMORY, NOTHING, STAGING, writable_arenas
from chitu.kv_transfer.transports.copies import require_inside
from chitu.kv_transfer.transports.cuda_ipc.driver import PinDriver
from chitu.kv_transfer.transports.mapped_peers import MappedPeers
from chitu.kv_transfer.transports.peer_process import PeerProcess, host_id, own_start_time
from chitu.kv_transfer.transports.shm.transfer_engine import NAME, SharedFile, ShmPeer, find_range, open_peer, unmap
from chitu.kv_transfer.transports.transport import CopyList, LaunchedCopies, PeerHandle, WriteError
from chitu.protocol import RankMemory, TransportSession
from chitu.types import Ready


@dataclass(slots=True, eq=False)
class PinnedPeer:
    """A mapped and pinned staging arena of another process."""

    mapped: ShmPeer
    device_base: int
    """Address of its arena on our device."""
    reaches_pages: bool = False
    """See `transports/transport.py`, also for `reaches_host_segments`."""
    reaches_host_segments: bool = True

    @property
    def session_id(self) -> str:
        return self.mapped.session_id

    @property
    def process(self) -> PeerProcess:
        return self.mapped.process


class PinnedShmTransport:
    """Implements `Transport` and `OrderedTransport` of `kv_transfer.transports.transport`."""

    name = NAME
    gathers = True

    def __init__(self, driver: PinDriver, copier: LaunchedCopies) -> None:
        self._driver = driver
        self._copier = copier
        self._host_id = host_id()
        self._sources: list[tuple[int, int]] = []
        """Base and bytes of registered device memory."""
        self._files: list[SharedFile] = []
        self._peers = MappedPeers(NAME, self._unmap)

    def register(self, base: int, nbytes: int) -> None:
        """Register device memory as a source, or a shared file as memory that peers may write."""
        if any((known.base, known.nbytes) == (base, nbytes) for known in self._files):
            return
        if (base, nbytes) in self._sources:
            return
        if nbytes > 0 and self._driver.is_device_memory(base, nbytes):
            self._sources.append((base, nbytes))
            return
        found = find_range(base, nbytes)
        if found.fd < 0:
            raise TransferFailed(f"shm: {nbytes} bytes at {base:#x} are neither device memory nor a shared file")
        self._files.append(found)

    def local_session(self) -> TransportSession:
        attributes = {"host_id": self._host_id, "pid": str(os.getpid()), "start_time": own_start_time()}
        if not self._files:
            return TransportSession(NAME, f"{self._host_id}/{os.getpid()}/", {**attributes, MEMORY: NOTHING})
        return TransportSession(
            NAME,
            f"{self._host_id}/{os.getpid()}/{self._files[0].fd}",
            {**attributes, **self._files[0].attributes(), MEMORY: STAGING},
        )

    def can_reach(self, session: TransportSession) -> bool:
        attributes = session.attributes
        is_here = self._host_id != "" and attributes.get("host_id") == self._host_id
        return session.transport == NAME and is_here and attributes.get(MEMORY) == STAGING

    def connect(self, memory: RankMemory, session: TransportSession) -> PinnedPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"shm: {session.session_id} has no staging memory for a process of this host and user")
        arenas = writable_arenas(memory, session)
        if not arenas:
            raise TransferFailed(f"shm: {session.session_id} announced no staging memory")
        mapped = open_peer(session, *arenas[0])
        try:
            device_base = self._driver.pin(mapped.local_base, mapped.arena_bytes)
        except ChituError:
            unmap(mapped)
            raise
        peer = PinnedPeer(mapped, device_base)
        self._peers.add(peer)
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self.write_after(peer, copies, (), timeout_s)

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """Implement `OrderedTransport`. `timeout_s` bounds nothing: a launch ends by itself and cannot be cancelled."""
        assert isinstance(peer, PinnedPeer)
        mapped = peer.mapped
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        require_inside(NAME, (src_N, dst_N, length_N), (mapped.arena_base, mapped.arena_bytes), self._sources)
        try:
            with self._peers.writing(peer):
                self._copier.copy(src_N, dst_N + (peer.device_base - mapped.arena_base), length_N, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise WriteError(f"shm: gathering for {peer.session_id}: {error}", settled=True) from error

    def settle(self, peer: PeerHandle, timeout_s: float) -> bool:
        """Return True always: a copy is over when `write` returns."""
        return True

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, PinnedPeer)
        self._peers.remove(peer)

    def close(self) -> None:
        self._peers.remove_all()
        for known in self._files:
            os.close(known.fd)
        self._files.clear()
        self._sources.clear()

    def _unmap(self, peer: PinnedPeer) -> None:
        with contextlib.suppress(TransferFailed):  # a device that failed unpins nothing; the mapping goes in any case
            self._driver.unpin(peer.mapped.local_base)
        unmap(peer.mapped)
