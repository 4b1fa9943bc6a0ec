"""Copies of single pages between a rank's pool and host memory. Called by the thread `tiers`, never by a step thread.

The content of a page is its part of each region (K and V of every layer), one after the other, each with the KV heads
of the whole model, so that instances of different `tp_size` can exchange pages. A rank copies the heads that it holds
to and from their places. If several ranks hold a head, the first of them copies it out and all of them copy it in.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of
from chitu.protocol import KVLayout

if TYPE_CHECKING:
    from chitu.kv_cache.pool import KVPool


class PagedRegions(Protocol):
    """The part of a pool that copies need."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one region, on this rank."""
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


class HeadsOfRank:
    """The KV heads of a page's content that a rank holds. `shape` is that of the content: region, head, byte."""

    def __init__(self, layout: KVLayout, tp_rank: int) -> None:
        heads = kv_heads_of(layout.num_kv_heads, layout.tp_size, tp_rank)
        self.shape = (layout.num_layers * layout.regions_per_layer, layout.num_kv_heads, layout.head_bytes)
        self.place = slice(heads.start, heads.stop)
        self.is_first = tp_rank == 0 or heads != kv_heads_of(layout.num_kv_heads, layout.tp_size, tp_rank - 1)
        """Whether this is the first of the ranks that hold these heads."""


class HostPageCopies:
    """`PageCopies` of a rank's pool in this process's own memory, which must outlive this object."""

    def __init__(self, pool: PagedRegions, tp_rank: int = MAIN_RANK) -> None:
        self._heads = HeadsOfRank(pool.layout, tp_rank)
        shape = (pool.num_pages, -1, pool.layout.head_bytes)
        self._regions_PHB = []
        for base in pool.region_bases:
            region = (ctypes.c_uint8 * (pool.num_pages * pool.page_bytes)).from_address(base)
            self._regions_PHB.append(np.ctypeslib.as_array(region).reshape(shape))

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        if not self._heads.is_first:
            return
        content_RHB = np.frombuffer(content, np.uint8).reshape(self._heads.shape)
        for region, region_PHB in enumerate(self._regions_PHB):
            content_RHB[region, self._heads.place] = region_PHB[page]

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        content_RHB = np.frombuffer(content, np.uint8).reshape(self._heads.shape)
        for region, region_PHB in enumerate(self._regions_PHB):
            region_PHB[page] = content_RHB[region, self._heads.place]


def page_content_bytes(layout: KVLayout) -> int:
    """Return the bytes of a page in all regions, with the KV heads of all ranks."""
    return layout.num_layers * layout.regions_per_layer * layout.num_kv_heads * layout.head_bytes


def page_copies_of(pool: PagedRegions, device: str, tp_rank: int = MAIN_RANK) -> PageCopies:
    """Return the page copies of a rank's pool; `device` is the kind of its device."""
    if device == "cpu":
        return HostPageCopies(pool, tp_rank)
    from chitu.kv_cache.tiers.device_page_copies import DevicePageCopies

    return DevicePageCopies(cast("KVPool", pool), tp_rank)


def host_memory(nbytes: int, device: str, file: int = -1) -> memoryview:
    """Map new zeroed memory, or the file of this descriptor. It is pinned if the pool is on a GPU, so that copies need
    no staging; else the system allocates pages when they are touched."""
    memory = memoryview(mmap.mmap(file, nbytes))
    if device != "cpu":
        from chitu.kv_cache.tiers.device_page_copies import pin

        pin(memory)
    return memory
