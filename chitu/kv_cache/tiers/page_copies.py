"""Copies of single pages between a rank's pool and host memory. Called by the thread `tiers`, never by a step thread.

The content of a page is its part of each region (K and V of every layer), one after the other, shape by shape
(`KVLayout.shapes`), each with the KV heads of the whole model, so that instances of different `tp_size` can exchange
pages. A rank copies the heads that it holds to and from their places. If several ranks hold a head, the first of them
copies it out and all of them copy it in.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

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


class HeadsOfRank(NamedTuple):
    """The KV heads that a rank holds in the content of a page, for regions of one shape."""

    regions: tuple[int, ...]
    place: slice
    """Bytes of the content."""
    shape: tuple[int, int, int]
    """Of these bytes: region, head, byte."""
    heads: slice
    is_first: bool
    """Whether this is the first of the ranks that hold these heads."""


def heads_of_rank(layout: KVLayout, tp_rank: int) -> list[HeadsOfRank]:
    """Return the parts of a page's content, which follow each other."""
    parts, start = [], 0
    for num_kv_heads, head_dim, regions in layout.shapes:
        shape = len(regions), num_kv_heads, layout.head_bytes(head_dim)
        heads = kv_heads_of(num_kv_heads, layout.tp_size, tp_rank)
        is_first = tp_rank == 0 or heads != kv_heads_of(num_kv_heads, layout.tp_size, tp_rank - 1)
        end = start + math.prod(shape)
        parts.append(HeadsOfRank(regions, slice(start, end), shape, slice(heads.start, heads.stop), is_first))
        start = end
    return parts


class HostPageCopies:
    """`PageCopies` of a rank's pool in this process's own memory, which must outlive this object."""

    def __init__(self, pool: PagedRegions, tp_rank: int = MAIN_RANK) -> None:
        self._parts = []
        for part in heads_of_rank(pool.layout, tp_rank):
            shape = (pool.num_pages, -1, part.shape[-1])
            regions_PHB = []
            for index in part.regions:
                nbytes = pool.num_pages * pool.page_bytes[index]
                region = (ctypes.c_uint8 * nbytes).from_address(pool.region_bases[index])
                regions_PHB.append(np.ctypeslib.as_array(region).reshape(shape))
            self._parts.append((part, regions_PHB))

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        for part, regions_PHB in self._parts:
            if part.is_first:
                content_RHB = np.frombuffer(content[part.place], np.uint8).reshape(part.shape)
                for region, region_PHB in enumerate(regions_PHB):
                    content_RHB[region, part.heads] = region_PHB[page]

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        for part, regions_PHB in self._parts:
            content_RHB = np.frombuffer(content[part.place], np.uint8).reshape(part.shape)
            for region, region_PHB in enumerate(regions_PHB):
                region_PHB[page] = content_RHB[region, part.heads]


def page_content_bytes(layout: KVLayout) -> int:
    """Return the bytes of a page in all regions, with the KV heads of all ranks."""
    return sum(len(regions) * heads * layout.head_bytes(head_dim) for heads, head_dim, regions in layout.shapes)


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
