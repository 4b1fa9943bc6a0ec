"""The checksum of KV pages: one formula for host memory (here) and for a device (`device_checksum.py`).

A page's checksum is the sum, modulo 2**64, over regions (K and V of each layer) and KV heads of

    salt[region, head] * sum over j of (word[j] * low[j] + (word[j] >> 32) * high[j])

where `word` are the signed 64 bit words of one head of the page in one region, and the weights are fixed odd random
numbers. As it is a sum over regions and heads, layers can be added as they are written, and TP ranks can add up what
each of them holds. P and D get the same number however they divide the heads.

It detects every change within one 32 bit word (any flipped byte). It misses about one in 2**32 of these: swapped pages,
heads, layers, or K and V; zeroed pages; pages of another request; torn writes. It does not detect deliberate changes
(the weights are no secret), nor what was wrong in P's own memory already.

Called by transfer threads and by D's verifying thread, never by a step thread. numpy releases the GIL in every call
over a chunk. Measured beside CRC-32 and memcpy in docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chitu.config.tensor_parallel import kv_heads_of
from chitu.errors import ConfigError
from chitu.protocol import KVLayout

if TYPE_CHECKING:
    from chitu.kv_cache.device_checksum import DevicePageSums
    from chitu.kv_cache.pool import KVPool

Int64s = NDArray[np.int64]

WORD_BYTES = 8
CHUNK_BYTES = 256 << 10
"""Bytes summed at a time: they fit a core's cache together with the copy of their upper halves."""


class PageWeights(NamedTuple):
    """The weights of one region of one rank, for its own heads: odd int64, except that a salt may be a multiple."""

    low_W: Int64s
    high_W: Int64s
    salt_H: Int64s


def head_copies(layout: KVLayout) -> int:
    """Return how often the sum over all ranks of a D counts each KV head: as many ranks hold it, and each time as often
    as it takes for the heads of all groups to count alike."""
    return math.lcm(*(_holders(layout, group.num_kv_heads) for group in layout.groups))


def _holders(layout: KVLayout, num_kv_heads: int) -> int:
    """Return how many ranks hold the same KV head."""
    return max(1, layout.tp_size // num_kv_heads)


def page_weights(
    layout: KVLayout, tp_rank: int, page_bytes: Sequence[int], counts_copies: bool = True
) -> list[PageWeights]:
    """Return the weights of a rank, by region. `page_bytes`: of a page on this rank, by region. `counts_copies`: on a
    D, where the sum over all ranks counts every head `head_copies` times; False on a P: only the first rank that holds
    a head counts it. Raise ConfigError unless KV heads have a multiple of 8 bytes."""
    regions, found = layout.regions, []
    all_salts, used = odd_numbers(3, sum(region.num_kv_heads for region in regions)), 0
    low_W, high_W = (odd_numbers(stream, max(page_bytes) // WORD_BYTES) for stream in (1, 2))
    for region, nbytes in zip(regions, page_bytes, strict=True):
        heads = kv_heads_of(region.num_kv_heads, layout.tp_size, tp_rank)
        head_bytes = nbytes // len(heads)
        if head_bytes % WORD_BYTES:
            raise ConfigError(f"verify_kv needs KV heads of a multiple of {WORD_BYTES} bytes a page, not {head_bytes}")
        holders, num_words = _holders(layout, region.num_kv_heads), head_bytes // WORD_BYTES
        times = head_copies(layout) // holders if counts_copies else int(tp_rank % holders == 0)
        salt_H = all_salts[used + heads.start : used + heads.stop] * np.int64(times)
        used += region.num_kv_heads
        found.append(PageWeights(low_W[:num_words], high_W[:num_words], salt_H))
    return found


def odd_numbers(stream: int, count: int) -> Int64s:
    """Return numbers of SplitMix64, which are the same in every build and on every machine."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


class HostPageSums:
    """Checksums of one rank's pages in this process's own memory, which must outlive this object. Any thread."""

    def __init__(
        self,
        layout: KVLayout,
        tp_rank: int,
        region_bases: Sequence[int],
        num_pages: int,
        page_bytes: Sequence[int],
        counts_copies: bool = True,
    ) -> None:
        """`page_bytes`, `counts_copies`: as for `page_weights`."""
        self._first_regions = layout.first_regions
        self._weights = page_weights(layout, tp_rank, page_bytes, counts_copies)
        self._regions_PHW = [
            _words_at(base, num_pages * nbytes).reshape(num_pages, len(weights.salt_H), len(weights.low_W))
            for base, nbytes, weights in zip(region_bases, page_bytes, self._weights, strict=True)
        ]
        self._chunk_pages = max(1, CHUNK_BYTES // max(page_bytes))

    def sums(self, layers: range, pages: Sequence[int]) -> Int64s:
        """Return the sums of our heads of these pages, over all regions of these consecutive layers: `[len(pages)]`."""
        pages_N = np.asarray(pages, dtype=np.int64)
        sums_N = np.zeros(len(pages_N), dtype=np.int64)
        for region in range(self._first_regions[layers.start], self._first_regions[layers.stop]):
            low_W, high_W, salt_H = self._weights[region]
            for start in range(0, len(pages_N), self._chunk_pages):
                chunk = slice(start, start + self._chunk_pages)
                words_CHW = self._regions_PHW[region][pages_N[chunk]]
                heads_CH = np.einsum("chw,w->ch", words_CHW, low_W)
                np.right_shift(words_CHW, 32, out=words_CHW)
                heads_CH += np.einsum("chw,w->ch", words_CHW, high_W)
                sums_N[chunk] += heads_CH @ salt_H
        return sums_N


def page_sums_of(pool: KVPool, tp_rank: int, counts_copies: bool = True) -> HostPageSums | DevicePageSums:
    """Return the checksums of a rank's pool, computed where its memory is. `counts_copies`: as for `page_weights`."""
    if pool.device.type == "cpu":
        return HostPageSums(pool.layout, tp_rank, pool.region_bases, pool.num_pages, pool.page_bytes, counts_copies)
    from chitu.kv_cache.device_checksum import DevicePageSums

    return DevicePageSums(pool, tp_rank, counts_copies)


def optional_page_sums_of(
    pool: KVPool, tp_rank: int, counts_copies: bool = True
) -> HostPageSums | DevicePageSums | None:
    """Return the same, or None if the layout allows no checksums."""
    if any(pool.layout.head_bytes(shape.head_dim) % WORD_BYTES for shape in pool.layout.shapes):
        return None
    return page_sums_of(pool, tp_rank, counts_copies)


def _words_at(address: int, nbytes: int) -> Int64s:
    words = (ctypes.c_int64 * (nbytes // WORD_BYTES)).from_address(address)
    return np.ctypeslib.as_array(words)
