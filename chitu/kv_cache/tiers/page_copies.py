"""Copies of single pages between a rank's pool and host memory. Called by the thread `tiers`, never by a step thread.

The content of a page is its part of each region (K and V of every layer), one after the other, shape by shape
(`KVLayout.shapes`), each with the KV heads of the whole model, so that instances of different `tp_size` can exchange
pages. A rank copies the heads that it holds to and from their places: a piece a region, since the heads of a page lie
together in both. If several ranks hold a head, the first of them copies it out and all of them copy it in.

On a GPU one launch copies all pieces of a page, between the pool and pinned host memory that the device reaches in
place, on a stream of the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of
from chitu.errors import ConfigError, TransferFailed
from chitu.protocol import KVLayout

Int64s = NDArray[np.int64]
CopyPieces = Callable[[Int64s, Int64s, Int64s], None]
"""Copies `length[i]` bytes from address `source[i]` to `target[i]`; returns when they have arrived."""


class PagedRegions(Protocol):
    """The part of a pool that copies need."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> Sequence[int]:
        """Bytes of a page on this rank, by region."""
        ...

    @property
    def region_bases(self) -> Sequence[int]: ...


class PageCopies(Protocol):
    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        """Copy the page to `content`. If another thread writes to the page meanwhile, the copy is undefined."""
        ...

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        """Copy `content` to the page, which has no other user. Steps launched after this returns read it."""
        ...


class Pins(Protocol):
    """What pins host memory for a device: see `PinDriver`."""

    def pin(self, address: int, nbytes: int) -> int: ...
    def unpin(self, address: int) -> None: ...


def move(source_N: Int64s, target_N: Int64s, length_N: Int64s) -> None:
    """Copy pieces within this process's own memory."""
    for source, target, length in zip(source_N.tolist(), target_N.tolist(), length_N.tolist(), strict=True):
        ctypes.memmove(target, source, length)


class PoolPageCopies:
    """`PageCopies` of a rank's pool, which must outlive this object. `copy_pieces` knows host memory by addresses that
    are `shift` above the host's."""

    def __init__(
        self, pool: PagedRegions, tp_rank: int = MAIN_RANK, copy_pieces: CopyPieces = move, shift: int = 0
    ) -> None:
        layout, pieces, start = pool.layout, [], 0
        for num_kv_heads, head_dim, regions in layout.shapes:
            head_bytes = layout.head_bytes(head_dim)
            heads = kv_heads_of(num_kv_heads, layout.tp_size, tp_rank)
            is_first = tp_rank == 0 or heads != kv_heads_of(num_kv_heads, layout.tp_size, tp_rank - 1)
            for index in regions:
                at = start + heads.start * head_bytes
                pieces.append((pool.region_bases[index], pool.page_bytes[index], at, is_first))
                start += num_kv_heads * head_bytes
        base_R, self._length_R, self._at_R, is_first_R = np.array(pieces, np.int64).T.copy()
        self._base_R = base_R
        self._first = np.flatnonzero(is_first_R)
        """Pieces that no lower rank copies out."""
        self._copy_pieces = copy_pieces
        self._shift = shift

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        first = self._first
        if len(first):
            in_content_R = self._address(content) + self._at_R[first]
            self._copy_pieces(self._in_pool(page)[first], in_content_R, self._length_R[first])

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        self._copy_pieces(self._address(content) + self._at_R, self._in_pool(page), self._length_R)

    def _in_pool(self, page: int) -> Int64s:
        in_pool_R: Int64s = self._base_R + page * self._length_R
        return in_pool_R

    def _address(self, content: memoryview) -> int:
        return int(np.frombuffer(content, np.uint8).ctypes.data) + self._shift


def page_content_bytes(layout: KVLayout) -> int:
    """Return the bytes of a page in all regions, with the KV heads of all ranks."""
    return sum(len(regions) * heads * layout.head_bytes(head_dim) for heads, head_dim, regions in layout.shapes)


def page_copies_of(pool: PagedRegions, device: str, memory: memoryview, tp_rank: int = MAIN_RANK) -> PageCopies:
    """Return the copies between a rank's pool on `device` (`cpu`, `cuda:0`) and `memory`, which a GPU's driver pins.
    Raise ConfigError if it does not."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return PoolPageCopies(pool, tp_rank)
    from chitu.ops.cuda_driver import CudaDriver
    from chitu.ops.kernels.blocks import BlockCopier

    copier = BlockCopier(device)
    copier.warm_up()
    return pinned_copies(pool, CudaDriver(int(index or 0)), copier.copy, memory, tp_rank)


def pinned_copies(
    pool: PagedRegions, driver: Pins, copy_pieces: CopyPieces, memory: memoryview, tp_rank: int = MAIN_RANK
) -> PageCopies:
    """Pin `memory` as long as the copies exist, which keep it alive: a driver that still takes freed memory for pinned
    refuses whatever is mapped at its addresses next. Raise ConfigError if it cannot be pinned."""
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    try:
        pinned = driver.pin(address, memory.nbytes)
    except TransferFailed as error:
        raise ConfigError(f"cache.host_bytes: {error.message}") from error
    copies = PoolPageCopies(pool, tp_rank, copy_pieces, pinned - address)
    weakref.finalize(copies, _unpin, driver, address, memory).atexit = False  # the end of a process unpins by itself
    return copies


def _unpin(driver: Pins, address: int, memory: memoryview) -> None:
    with contextlib.suppress(TransferFailed):  # a device that failed unpins nothing
        driver.unpin(address)
    del memory  # kept until here


def host_memory(nbytes: int, file: int = -1) -> memoryview:
    """Map new zeroed memory, or the file of this descriptor. The system allocates its pages when they are touched, or
    pinned for a GPU."""
    return memoryview(mmap.mmap(file, nbytes))
