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
from dataclasses import replace
from functools import partial

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.transports.arenas import MEMORY, NOTHING, STAGING, writable_arenas
from chitu.kv_transfer.transports.cuda_ipc.driver import PinDriver
from chitu.kv_transfer.transports.mapped_peers import LaunchingTransport, MappedPeer
from chitu.kv_transfer.transports.shm.transfer_engine import NAME, SharedFile, find_range, open_peer
from chitu.kv_transfer.transports.transport import LaunchedCopies
from chitu.protocol import RankMemory, TransportSession


class PinnedShmTransport(LaunchingTransport):
    """Implements `Transport` and `OrderedTransport` of `kv_transfer.transports.transport`."""

    def __init__(self, driver: PinDriver, copier: LaunchedCopies) -> None:
        super().__init__(NAME, copier)
        self._driver = driver
        self._files: list[SharedFile] = []

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
        if not self._files:
            return self.session_of("", {MEMORY: NOTHING})
        return self.session_of(self._files[0].fd, {**self._files[0].attributes(), MEMORY: STAGING})

    def can_reach(self, session: TransportSession) -> bool:
        return self.is_here(session) and session.attributes.get(MEMORY) == STAGING

    def connect(self, memory: RankMemory, session: TransportSession) -> MappedPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"shm: {session.session_id} has no staging memory for a process of this host and user")
        arenas = writable_arenas(memory, session)
        if not arenas:
            raise TransferFailed(f"shm: {session.session_id} announced no staging memory")
        mapped = open_peer(session, *arenas[0])
        try:
            device_base = self._driver.pin(mapped.local_base, mapped.arena_bytes)
        except ChituError:
            mapped.close()
            raise
        unmap = partial(self._unpin, mapped)
        peer = replace(mapped, local_base=device_base, unmap=unmap, reaches_pages=False, reaches_host_segments=True)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        super().close()
        for known in self._files:
            os.close(known.fd)
        self._files.clear()

    def _unpin(self, mapped: MappedPeer) -> None:
        with contextlib.suppress(TransferFailed):  # a device that failed unpins nothing; the mapping goes in any case
            self._driver.unpin(mapped.local_base)
        mapped.unmap()
