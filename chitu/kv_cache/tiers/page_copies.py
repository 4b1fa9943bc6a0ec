"""Copies of single pages between a rank's pool and host memory. Called by the thread `tiers`, never by a step thread.

The content of a page is its part of each region (K and V of every layer), one after the other, with the KV heads of the
whole model in each: instances of different `tp_size` exchange pages. A rank copies the heads that it holds to and from
their places; of a head that several ranks hold, the first of them copies it out and all of them copy it in.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of
from chitu.errors import ConfigError
from chitu.protocol import KVLayout

if TYPE_CHECKING:
    from chitu.kv_cache.pool import KVPool


class PagedRegions(Protocol):
    """What of a pool is copied."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Of a page in one region, on this rank."""
        ...

    @property
    def region_bases(self) -> Sequence[int]: ...


class PageCopies(Protocol):
    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        """Copy the page to `content`. Another thread may write to the page meanwhile, and then anything is copied."""
        ...

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        """Copy `content` into the page, which is nobody else's. Steps that are launched from then on read it."""
        ...


class HeadsOfRank:
    """Which KV heads of a page's content are a rank's. `shape`: of a content, in bytes: region, head, byte."""

    def __init__(self, layout: KVLayout, tp_rank: int) -> None:
        heads = kv_heads_of(layout.num_kv_heads, layout.tp_size, tp_rank)
        self.shape = (layout.num_layers * layout.regions_per_layer, layout.num_kv_heads, layout.head_bytes)
        self.place = slice(heads.start, heads.stop)
        self.is_first = tp_rank == 0 or heads != kv_heads_of(layout.num_kv_heads, layout.tp_size, tp_rank - 1)
        """Of the ranks that hold them."""


class HostPageCopies:
    """Of a rank's pool in this process's own memory, which must outlive it."""

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
    """Of a page in all regions, with the KV heads of all ranks."""
    return layout.num_layers * layout.regions_per_layer * layout.num_kv_heads * layout.head_bytes


def page_copies_of(pool: PagedRegions, device: str, tp_rank: int = MAIN_RANK) -> PageCopies:
    """Of a rank's pool, where its memory is. `device`: its kind."""
    if device == "cpu":
        return HostPageCopies(pool, tp_rank)
    from chitu.kv_cache.tiers.device_page_copies import DevicePageCopies

    return DevicePageCopies(cast("KVPool", pool), tp_rank)


def shared_file(nbytes: int) -> int:
    """A descriptor of memory for the ranks of an instance, zeros. ConfigError where there is none."""
    try:
        file = os.memfd_create("chitu-tiers", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
    except OSError as error:
        raise ConfigError(f"cache.host_bytes: no {nbytes} bytes of memory for all ranks: {error.strerror}") from error
    return file


def host_memory(nbytes: int, device: str, file: int = -1) -> memoryview:
    """Zeros, or what is in the file of this descriptor. Pinned where the pool is a GPU's, so that copies need no
    detour; else the system's until it is touched."""
    memory = memoryview(mmap.mmap(file, nbytes))
    if device != "cpu":
        from chitu.kv_cache.tiers.device_page_copies import pin

        pin(memory)
    return memory
