"""Transports that map a peer's memory into this process and copy the bytes themselves: the common part of `shm` and
`cuda_ipc`. A write is over when `write` returns, so nothing can land later and `settle` is always True.

`MappedPeers` has the peers and the writes that run into them. Owned by a transport, any thread; no lock is held while a
write runs or a mapping is removed. Invariant: a mapping lives until its peer was removed and the last write to it has
returned; then the peer is closed, once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from chitu.kv_transfer.transports.copies import require_inside
from chitu.kv_transfer.transports.peer_process import PeerProcess, host_id, own_start_time
from chitu.kv_transfer.transports.transport import CopyList, Int64s, LaunchedCopies, PeerHandle, WriteError
from chitu.protocol import TransportSession
from chitu.types import Ready


@dataclass(slots=True, eq=False)
class MappedPeer:
    """A mapped arena of another process. It is equal to itself only."""

    session_id: str
    arena_base: int
    """Address of the arena in the peer's address space."""
    arena_bytes: int
    process: PeerProcess
    local_base: int
    """Address of the arena for our own copies."""
    unmap: Callable[[], None]
    reaches_pages: bool = True
    """See `transports/transport.py`, also for `reaches_host_segments`."""
    reaches_host_segments: bool = False

    def close(self) -> None:
        self.process.close()
        self.unmap()


class MappedPeers:
    """Mapped peers of one transport. `transport`: its name, for errors."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._writes: dict[MappedPeer, int] = {}
        """Number of running writes of each peer whose mapping exists."""
        self._removed: set[MappedPeer] = set()
        """Removed peers, which are closed after their last write."""

    def add(self, peer: MappedPeer) -> None:
        with self._lock:
            self._writes[peer] = 0

    @contextmanager
    def writing(self, peer: MappedPeer) -> Iterator[None]:
        """Surround a write. Raises WriteError if the peer was removed before it, or if its process has ended
        afterwards: then no process reads what was written."""
        with self._lock:
            if peer not in self._writes or peer in self._removed:
                raise WriteError(f"{self._transport}: {peer.session_id} was disconnected", settled=True)
            self._writes[peer] += 1
        try:
            yield
            is_alive = peer.process.is_alive()
        finally:
            self._written(peer)
        if not is_alive:
            raise WriteError(f"{self._transport}: the process of {peer.session_id} has ended", settled=True)

    def remove(self, peer: MappedPeer) -> None:
        """Close a peer, once its last write has returned. Idempotent."""
        with self._lock:
            if peer not in self._writes:
                return
            self._removed.add(peer)
            is_over = self._forget_if_over(peer)
        if is_over:
            peer.close()

    def remove_all(self) -> None:
        for peer in list(self._writes):
            self.remove(peer)

    def _written(self, peer: MappedPeer) -> None:
        with self._lock:
            self._writes[peer] -= 1
            is_over = self._forget_if_over(peer)
        if is_over:
            peer.close()

    def _forget_if_over(self, peer: MappedPeer) -> bool:
        if peer not in self._removed or self._writes[peer]:
            return False
        self._removed.remove(peer)
        del self._writes[peer]
        return True


class MappedTransport:
    """A `Transport` without its registered memory and its sessions."""

    gathers = True
    """True, because a piece costs next to nothing (see `transports/transport.py`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host_id = host_id()
        self._peers = MappedPeers(name)

    def is_here(self, session: TransportSession) -> bool:
        """Return whether it is a session of a process of this host and user, by the same transport."""
        is_here = self._host_id != "" and session.attributes.get("host_id") == self._host_id
        return session.transport == self.name and is_here

    def session_of(self, memory: object, attributes: Mapping[str, str]) -> TransportSession:
        """Return a session of this process. `memory` names what it reaches."""
        pid = os.getpid()
        own = {"host_id": self._host_id, "pid": str(pid), "start_time": own_start_time()}
        return TransportSession(self.name, f"{self._host_id}/{pid}/{memory}", {**own, **attributes})

    def placed(
        self, peer: MappedPeer, copies: CopyList, registered: Iterable[tuple[int, int]]
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Return copies as columns, their destinations in our address space. Raises WriteError, settled, if one leaves
        the peer's arena or our registered ranges."""
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        require_inside(self.name, (src_N, dst_N, length_N), (peer.arena_base, peer.arena_bytes), registered)
        return src_N, dst_N + (peer.local_base - peer.arena_base), length_N

    def settle(self, peer: PeerHandle, timeout_s: float) -> bool:
        return True

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, MappedPeer)
        self._peers.remove(peer)

    def close(self) -> None:
        self._peers.remove_all()


class LaunchingTransport(MappedTransport):
    """One whose copies are launches on the device, which wait there for their sources: an `OrderedTransport`."""

    def __init__(self, name: str, copier: LaunchedCopies) -> None:
        super().__init__(name)
        self._copier = copier
        self._sources: list[tuple[int, int]] = []
        """Base and bytes of registered device memory."""

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self.write_after(peer, copies, (), timeout_s)

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """Implement `OrderedTransport`. `timeout_s` bounds nothing: a launch ends by itself and cannot be cancelled."""
        assert isinstance(peer, MappedPeer)
        columns = self.placed(peer, copies, self._sources)
        try:
            with self._peers.writing(peer):
                self._copier.copy(*columns, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise WriteError(f"{self.name}: writing to {peer.session_id}: {error}", settled=True) from error

    def close(self) -> None:
        super().close()
        self._sources.clear()
