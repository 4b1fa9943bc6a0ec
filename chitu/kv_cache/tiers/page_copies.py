"""Copies of single pages between a rank's pool and host memory. Called by the thread `tiers`, never by a step thread.

The content of a page is its part of each region (K and V of every layer), one after the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from chitu.kv_cache.pool import KVPool


class PagedRegions(Protocol):
    """What of a pool is copied."""

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


class HostPageCopies:
    """Of a pool in this process's own memory, which must outlive it."""

    def __init__(self, pool: PagedRegions) -> None:
        self._shape = (len(pool.region_bases), pool.page_bytes)
        self._regions_PB = []
        for base in pool.region_bases:
            region = (ctypes.c_uint8 * (pool.num_pages * pool.page_bytes)).from_address(base)
            self._regions_PB.append(np.ctypeslib.as_array(region).reshape(pool.num_pages, pool.page_bytes))

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        content_RB = np.frombuffer(content, np.uint8).reshape(self._shape)
        for region, region_PB in enumerate(self._regions_PB):
            content_RB[region] = region_PB[page]

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        content_RB = np.frombuffer(content, np.uint8).reshape(self._shape)
        for region, region_PB in enumerate(self._regions_PB):
            region_PB[page] = content_RB[region]


def page_content_bytes(pool: PagedRegions) -> int:
    """Of a page in all regions, on this rank."""
    return len(pool.region_bases) * pool.page_bytes


def page_copies_of(pool: PagedRegions, device: str) -> PageCopies:
    """Of a rank's pool, where its memory is. `device`: its kind."""
    if device == "cpu":
        return HostPageCopies(pool)
    from chitu.kv_cache.tiers.device_page_copies import DevicePageCopies

    return DevicePageCopies(cast("KVPool", pool))


def host_memory(nbytes: int, device: str) -> memoryview:
    """Zeros. Pinned where the pool is a GPU's, so that copies need no detour; else the system's until it is touched."""
    if device == "cpu":
        return np.zeros(nbytes, np.uint8).data
    from chitu.kv_cache.tiers.device_page_copies import pinned_memory

    return pinned_memory(nbytes)
