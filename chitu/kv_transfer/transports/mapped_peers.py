"""Peers whose memory is mapped into this process, and the writes that run into it: the common part of `shm` and
`cuda_ipc`, where this process copies the bytes itself and a write is over when it returns.

Owned by a transport, any thread; no lock is held while a write runs or a mapping is removed. Invariant: a mapping lives
until its peer was removed and the last write to it has returned; then `unmap` is called, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from chitu.kv_transfer.transports.peer_process import PeerProcess
from chitu.kv_transfer.transports.transport import WriteError


class MappedPeer(Protocol):
    """A peer with mapped memory. It is equal to itself only."""

    @property
    def session_id(self) -> str: ...

    @property
    def process(self) -> PeerProcess: ...


Peer = TypeVar("Peer", bound=MappedPeer)


class MappedPeers(Generic[Peer]):
    """Mapped peers of one transport. `transport`: its name, for errors."""

    def __init__(self, transport: str, unmap: Callable[[Peer], None]) -> None:
        self._transport = transport
        self._unmap = unmap
        self._lock = threading.Lock()
        self._writes: dict[Peer, int] = {}
        """Number of running writes of each peer whose mapping exists."""
        self._removed: set[Peer] = set()
        """Removed peers, which are unmapped after their last write."""

    def add(self, peer: Peer) -> None:
        with self._lock:
            self._writes[peer] = 0

    @contextmanager
    def writing(self, peer: Peer) -> Iterator[None]:
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

    def remove(self, peer: Peer) -> None:
        """Unmap a peer, once its last write has returned. Idempotent."""
        with self._lock:
            if peer not in self._writes:
                return
            self._removed.add(peer)
            is_over = self._forget_if_over(peer)
        if is_over:
            self._unmap(peer)

    def remove_all(self) -> None:
        for peer in list(self._writes):
            self.remove(peer)

    def _written(self, peer: Peer) -> None:
        with self._lock:
            self._writes[peer] -= 1
            is_over = self._forget_if_over(peer)
        if is_over:
            self._unmap(peer)

    def _forget_if_over(self, peer: Peer) -> bool:
        if peer not in self._removed or self._writes[peer]:
            return False
        self._removed.remove(peer)
        del self._writes[peer]
        return True
