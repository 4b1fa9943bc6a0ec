"""A transport that breaks another one on purpose, so that tests show which damage chitu detects.

All bytes travel through the wrapped transport, and byte counts stay as they are. Threads as in
`kv_transfer.transports.transport`. An entry of tests wraps the transports of its process by `with_faults`.

`zero_page`: page n of every peer's pool is a broken page. K and V of all layers that are written into it arrive as
zeros, from a buffer that is registered like the pool itself. What the peer computes into that page on its own stays.
`neighbour_page`: the same page gets the bytes that lie one page further in our own pool.
`flip_byte_every`, `flip_logits_every`: after the correct write one byte of it is written again, flipped, from a small
buffer that the wrapped transport has registered; P's checksums are of the sound source. The byte is the upper one of a
4 byte word (sign and exponent of a float32, or of one of two bfloat16), so that a flip is no rounding error. For pools
in host memory only: the byte is read by its address. `delay_ms`, `stall_every`: a write that takes long, or as long as
its timeout. Writes are counted per transport and process.
Invariant: a byte that no fault names arrives as with the wrapped transport, however copies cross page borders.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, WriteError, gathers, reaches_pages
from chitu.protocol import RankMemory, TransportSession

logger = logging.getLogger(__name__)

ENVIRONMENT = "CHITU_TEST_FAULTS"
"""JSON of the `FaultConfig` of every P."""
WORD_BYTES = 4
AUX_PADDING_BYTES = 64
"""Bytes at the end of an aux row that may be padding, which is never read."""


class FaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults of the writes of a P; by default there is none."""

    zero_page: int | None = None
    """Page of D's pool (K and V of all layers) into which P's writes arrive as zeros."""
    neighbour_page: int | None = None
    """Page of D's pool into which P writes its neighbouring page."""
    flip_byte_every: int = 0
    """One byte of every Nth KV write of a P rank arrives with all bits flipped. 0: never."""
    flip_logits_every: int = 0
    """One byte of every Nth logits row arrives with all bits flipped. 0: never."""
    delay_ms: float = 0.0
    """Delay before every write begins; past its timeout the write fails."""
    stall_every: int = 0
    """Every Nth write, of KV or of logits, hangs until its timeout and fails; nothing of it arrives. 0: never."""

    def describe(self) -> str:
        """Return the faults that are on, as `key=value`, or "" if none is."""
        default = FaultConfig()
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return " ".join(f"{name}={value}" for name, value in values if value != getattr(default, name))


class EveryNth:
    """Counter that strikes at every Nth call, from any thread. 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        if not self._every:
            return False
        with self._lock:
            self._count += 1
            return self._count % self._every == 0


class ByteFlipper:
    """Flips bytes of finished writes. Several transfer threads call `flip`."""

    def __init__(self, inner: Transport, kv_every: int, logits_every: int) -> None:
        self._inner = inner
        self._kv_writes = EveryNth(kv_every)
        self._logits_writes = EveryNth(logits_every)
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._scratch = np.zeros(1, np.uint8)
        self._is_prepared = False

    def prepare(self) -> None:
        """Register the buffer, before the first write."""
        if not self._is_prepared:
            self._inner.register(int(self._scratch.ctypes.data), 1)
            self._is_prepared = True

    def flip(self, peer: PeerHandle, copies: CopyList, aux_rows: range, deadline_s: float) -> None:
        """Flip a byte of this write, which is over, if it is its turn. Raises errors of the wrapped transport."""
        if not len(copies.src):
            return
        is_aux = copies.dst[0] in aux_rows
        if not (self._logits_writes if is_aux else self._kv_writes).strikes():
            return
        with self._lock:
            index = self._random.randrange(len(copies.src))
            first, end = 0, copies.length[index]
            if is_aux:
                first, end = AUX_HEADER_BYTES, max(AUX_HEADER_BYTES + WORD_BYTES, end - AUX_PADDING_BYTES)
            word = self._random.randrange(max(1, (end - first) // WORD_BYTES))
            offset = min(first + word * WORD_BYTES + WORD_BYTES - 1, end - 1)
            self._scratch[0] = ctypes.c_uint8.from_address(copies.src[index] + offset).value ^ 0xFF
            one = CopyList([int(self._scratch.ctypes.data)], [copies.dst[index] + offset], [1])
            self._inner.write(peer, one, max(0.0, deadline_s - time.monotonic()))
        logger.warning("faults: flipped a byte of %s written to %s", "logits" if is_aux else "KV", peer.session_id)


@dataclass(slots=True, frozen=True)
class FaultyPeer:
    """The wrapped transport's handle, and the addresses of this peer's broken page and aux rows."""

    inner: PeerHandle
    zeroed: tuple[range, ...]
    """Addresses of the page that gets zeros, in every region, ascending."""
    shifted: tuple[range, ...]
    """The same of the page that gets its neighbour's bytes."""
    aux_rows: range
    """Addresses of the peer's aux rows."""

    @property
    def session_id(self) -> str:
        return self.inner.session_id

    @property
    def reaches_pages(self) -> bool:
        return reaches_pages(self.inner)

    @property
    def reaches_host_segments(self) -> bool:
        return bool(getattr(self.inner, "reaches_host_segments", False))


class FaultyTransport:
    """Implements `kv_transfer.transports.transport.Transport`. Keeps the wrapped one's name: peers choose by it."""

    def __init__(self, inner: Transport, faults: FaultConfig) -> None:
        self._inner = inner
        self._faults = faults
        self._zeros: dict[int, NDArray[np.uint8]] = {}
        """One page of zeros for each largest page of a peer, registered as a source; lives as long as that."""
        self._registered: list[range] = []
        self._stalled_writes = EveryNth(faults.stall_every)
        self._flipper: ByteFlipper | None = None
        if faults.flip_byte_every or faults.flip_logits_every:
            self._flipper = ByteFlipper(inner, faults.flip_byte_every, faults.flip_logits_every)
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def gathers(self) -> bool:
        return gathers(self._inner)

    def local_session(self) -> TransportSession:
        return self._inner.local_session()

    def register(self, base: int, nbytes: int) -> None:
        self._inner.register(base, nbytes)
        self._registered.append(range(base, base + nbytes))

    def can_reach(self, session: TransportSession) -> bool:
        return self._inner.can_reach(session)

    def connect(self, memory: RankMemory, session: TransportSession) -> FaultyPeer:
        inner = self._inner.connect(memory, session)
        if self._flipper is not None:
            self._flipper.prepare()
        aux_rows = range(memory.aux_base, memory.aux_base + memory.num_aux_slots * memory.aux_row_bytes)
        zeroed = _pages(memory, self._faults.zero_page, inner)
        shifted = _pages(memory, self._faults.neighbour_page, inner)
        most = max(map(len, zeroed), default=0)
        if most and most not in self._zeros:
            self._zeros[most] = np.zeros(most, np.uint8)
            self._inner.register(int(self._zeros[most].ctypes.data), most)
        return FaultyPeer(inner, zeroed, shifted, aux_rows)

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        """Write in several writes, one by one. A WriteError of one holds for all: the earlier ones have ended."""
        assert isinstance(peer, FaultyPeer)
        deadline_s = time.monotonic() + timeout_s
        self._hold_up(peer, timeout_s)
        self._write(peer, copies, deadline_s)
        if self._flipper is not None:
            self._flipper.flip(peer.inner, copies, peer.aux_rows, deadline_s)

    def _hold_up(self, peer: FaultyPeer, timeout_s: float) -> None:
        is_stalled = self._stalled_writes.strikes()
        delay_s = timeout_s if is_stalled else min(self._faults.delay_ms / 1000, timeout_s)
        if delay_s and (self._closed.wait(delay_s) or delay_s >= timeout_s):
            what = "stalled" if is_stalled else "delayed"
            raise WriteError(f"faults: the write to {peer.session_id} was {what} for {timeout_s:.1f} s", fenced=True)

    def _write(self, peer: FaultyPeer, copies: CopyList, deadline_s: float) -> None:
        healthy, zeroed = split_at_pages(copies, peer.zeroed)
        healthy, shifted = split_at_pages(healthy, peer.shifted)
        if len(healthy.src) or not len(zeroed.src) + len(shifted.src):
            self._inner.write(peer.inner, healthy, max(0.0, deadline_s - time.monotonic()))
        if len(zeroed.src):
            zeros = int(self._zeros[max(map(len, peer.zeroed))].ctypes.data)
            from_zeros = CopyList(array("q", [zeros]) * len(zeroed.src), zeroed.dst, zeroed.length)
            self._inner.write(peer.inner, from_zeros, max(0.0, deadline_s - time.monotonic()))
        if len(shifted.src):
            sizes = [len(peer.shifted[bisect_right(peer.shifted, dst, key=_start) - 1]) for dst in shifted.dst]
            sources = array("q", map(self._neighbour, shifted.src, sizes))
            from_neighbours = CopyList(sources, shifted.dst, shifted.length)
            self._inner.write(peer.inner, from_neighbours, max(0.0, deadline_s - time.monotonic()))

    def _neighbour(self, src: int, page_bytes: int) -> int:
        """Return the same place in the next page of our own memory, or in the one before if that is the last."""
        is_last = not any(src + page_bytes in memory and src in memory for memory in self._registered)
        return src - page_bytes if is_last else src + page_bytes

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        assert isinstance(peer, FaultyPeer)
        return self._inner.fence(peer.inner, timeout_s)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, FaultyPeer)
        self._inner.disconnect(peer.inner)

    def close(self) -> None:
        self._closed.set()
        self._inner.close()
        self._zeros.clear()


def _start(page: range) -> int:
    return page.start


def _pages(memory: RankMemory, page: int | None, peer: PeerHandle) -> tuple[range, ...]:
    """Return the addresses of a page of a peer in every region, ascending; none if there is no such page."""
    if page is not None and page >= memory.num_pages:
        logger.warning("faults: %s has no page %d, only %d", peer.session_id, page, memory.num_pages)
    if page is None or page >= memory.num_pages:
        return ()
    regions = sorted(zip(memory.region_bases, memory.page_bytes, strict=True))
    return tuple(range(base + page * nbytes, base + (page + 1) * nbytes) for base, nbytes in regions)


def split_at_pages(copies: CopyList, pages: Sequence[range]) -> tuple[CopyList, CopyList]:
    """Return `(outside, inside)`: the same bytes, cut where they cross a border of a page.

    `pages` ascend and do not overlap. A piece inside is at most as long as a page.
    """
    if not pages:
        return copies, CopyList((), (), ())
    outside, inside = ((array("q"), array("q"), array("q")) for _ in range(2))
    for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True):
        at, end = dst, dst + length
        index = max(0, bisect_right(pages, dst, key=_start) - 1)
        while at < end:
            page = pages[index] if index < len(pages) else range(end, end)
            if at < page.start:
                part, until = outside, min(page.start, end)
            elif at < page.stop:
                part, until = inside, min(page.stop, end)
            else:
                index += 1
                continue
            for values, value in zip(part, (src + at - dst, at, until - at), strict=True):
                values.append(value)
            at = until
    return CopyList(*outside), CopyList(*inside)


def with_faults(transports: list[Transport]) -> list[Transport]:
    """Return the transports, broken as the environment variable says."""
    faults = msgspec.json.decode(os.environ.get(ENVIRONMENT, "{}"), type=FaultConfig)
    if not (on := faults.describe()):
        return transports
    logger.warning("FAULTS ARE ON (%s): KV transfers are broken on purpose and answers will be wrong", on)
    return [FaultyTransport(transport, faults) for transport in transports]
