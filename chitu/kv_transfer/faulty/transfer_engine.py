"""A transport that breaks another one on purpose, so that tests can show what they would notice.

`open_transports` wraps every transport in it where `pd_disaggregation.faults` is set; nobody else knows. All bytes
still travel through the wrapped transport, byte counts and the aux row stay as they are: only the answers can show the
fault. Threads as in `kv_transfer.transport`.

`zero_page`: page n of every peer's pool is a broken page. K and V of all layers that are written into it arrive as
zeros, from a buffer that is registered like the pool itself. What the peer computes into that page on its own stays.
Invariant: a byte outside the broken page arrives as with the wrapped transport, however copies cross its borders.
"""

from __future__ import annotations

import logging
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chitu.config.schema import FaultConfig
from chitu.kv_transfer.transport import CopyList, PeerHandle, Transport
from chitu.messages import RankMemory, TransportSession

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class FaultyPeer:
    """The wrapped transport's handle, and where this peer's broken page lies."""

    inner: PeerHandle
    broken_bases: tuple[int, ...]
    """Address of the broken page in every region, ascending."""
    page_bytes: int

    @property
    def session_id(self) -> str:
        return self.inner.session_id


class FaultyTransport:
    """See `kv_transfer.transport.Transport`. It goes by the wrapped transport's name, since peers choose by it."""

    def __init__(self, inner: Transport, faults: FaultConfig) -> None:
        self._inner = inner
        self._faults = faults
        self._zeros: dict[int, NDArray[np.uint8]] = {}
        """By size: one page of zeros, registered as a source; lives as long as the registration."""

    @property
    def name(self) -> str:
        return self._inner.name

    def local_session(self) -> TransportSession:
        return self._inner.local_session()

    def register(self, base: int, nbytes: int) -> None:
        self._inner.register(base, nbytes)

    def can_reach(self, session: TransportSession) -> bool:
        return self._inner.can_reach(session)

    def connect(self, memory: RankMemory, session: TransportSession) -> FaultyPeer:
        inner = self._inner.connect(memory, session)
        page = self._faults.zero_page
        if page is None:
            return FaultyPeer(inner, (), memory.page_bytes)
        if page >= memory.num_pages:
            logger.warning("faults.zero_page: %s has no page %d, only %d", inner.session_id, page, memory.num_pages)
            return FaultyPeer(inner, (), memory.page_bytes)
        if memory.page_bytes not in self._zeros:
            zeros = np.zeros(memory.page_bytes, np.uint8)
            self._inner.register(int(zeros.ctypes.data), memory.page_bytes)
            self._zeros[memory.page_bytes] = zeros
        bases = sorted(base + page * memory.page_bytes for base in memory.region_bases)
        return FaultyPeer(inner, tuple(bases), memory.page_bytes)

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        """Two writes, since sources of one write lie in one registered range. A WriteError of the second is also true
        of both: the first has ended by then."""
        assert isinstance(peer, FaultyPeer)
        deadline_s = time.monotonic() + timeout_s
        healthy, broken = split_at_pages(copies, peer.broken_bases, peer.page_bytes)
        if len(healthy.src) or not len(broken.src):
            self._inner.write(peer.inner, healthy, timeout_s)
        if len(broken.src):
            zeros = int(self._zeros[peer.page_bytes].ctypes.data)
            from_zeros = CopyList(array("q", [zeros]) * len(broken.src), broken.dst, broken.length)
            self._inner.write(peer.inner, from_zeros, max(0.0, deadline_s - time.monotonic()))

    def settle(self, peer: PeerHandle, timeout_s: float) -> bool:
        assert isinstance(peer, FaultyPeer)
        return self._inner.settle(peer.inner, timeout_s)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, FaultyPeer)
        self._inner.disconnect(peer.inner)

    def close(self) -> None:
        self._inner.close()
        self._zeros.clear()


def split_at_pages(copies: CopyList, bases: Sequence[int], page_bytes: int) -> tuple[CopyList, CopyList]:
    """`(outside, inside)`: the same bytes, cut where they cross a border of `[base, base + page_bytes)` of a base.

    `bases` ascend and do not overlap. A piece inside is at most `page_bytes` long.
    """
    outside, inside = ((array("q"), array("q"), array("q")) for _ in range(2))
    for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True):
        at, end = dst, dst + length
        index = max(0, bisect_right(bases, dst) - 1)
        while at < end:
            base = bases[index] if index < len(bases) else end
            if at < base:
                part, until = outside, min(base, end)
            elif at < base + page_bytes:
                part, until = inside, min(base + page_bytes, end)
            else:
                index += 1
                continue
            for values, value in zip(part, (src + at - dst, at, until - at), strict=True):
                values.append(value)
            at = until
    return CopyList(*outside), CopyList(*inside)
