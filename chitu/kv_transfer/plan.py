"""Plans the fewest copies for page lists and regions. Pure integers; called by transfer threads and by tests.

A *run* is a stretch of the page lists in which both the source and the destination pages are consecutive, so it is one
copy per region. If the two sides hold different KV heads (other TP sizes), a *slice* of each page moves, and each page
is its own copy: heads are the outer dimension of a page and tokens the inner one, so the slice is contiguous. Every
index is range-checked here, on both sides, because it becomes an address next: an own page that is out of range is a
bug (`TransferFailed`), a peer's page is a bad message of that peer (`BadFrame`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chitu.errors import BadFrame, ProtocolError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.mapped import as_array
from chitu.kv_transfer.transports.transport import CopyList, Int64s


class PageSlice(NamedTuple):
    """The part of a page that moves, in bytes: its offset in a source page and in a destination page, and its size."""

    src_offset: int
    dst_offset: int
    nbytes: int

    def is_whole(self, src: PagedMemory, dst: PagedMemory) -> bool:
        """Return whether it is the whole page on both sides, so that neighbouring pages can move as one copy."""
        return self.nbytes == src.page_bytes == dst.page_bytes


def layer_regions(layers: range, regions_per_layer: int = 2) -> range:
    """Return the regions of these (consecutive) layers: K and V of each, or the one latent region."""
    if layers.step != 1:
        raise ValueError(f"layers {layers} are not consecutive")
    return range(regions_per_layer * layers.start, regions_per_layer * layers.stop)


def plan_page_copies(
    src: PagedMemory,
    dst: PagedMemory,
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
    layers: range,
    part: PageSlice | None = None,
    regions_per_layer: int = 2,
) -> CopyList:
    """Return the copies that bring `src_pages[i]` to `dst_pages[i]` for all regions of `layers`, region by region.

    `part`: the slice of each page that moves; None: all of it. Raises TransferFailed if our side is out of range or the
    memories do not match, BadFrame if the peer's side is out of range.
    """
    if len(src_pages) != len(dst_pages):
        raise BadFrame(f"{len(src_pages)} source pages for {len(dst_pages)} destination pages")
    if part is None:
        if src.page_bytes != dst.page_bytes:
            raise TransferFailed(f"pages of {src.page_bytes} bytes here and {dst.page_bytes} bytes there")
        part = PageSlice(0, 0, src.page_bytes)
    regions = layer_regions(layers, regions_per_layer)
    if regions.start < 0 or regions.stop > min(len(src.region_bases), len(dst.region_bases)):
        raise TransferFailed(
            f"layers {layers.start} to {layers.stop - 1} of memories with {len(src.region_bases) // regions_per_layer}"
            f" and {len(dst.region_bases) // regions_per_layer} layers"
        )
    if not len(src_pages) or not regions:
        return CopyList((), (), ())
    src_P = checked_pages(src_pages, src.num_pages, "source", TransferFailed)
    dst_P = checked_pages(dst_pages, dst.num_pages, "destination", BadFrame)
    if part.is_whole(src, dst):
        starts, run_pages = merge_runs(src_P, dst_P)
        src_P, dst_P, length_P = src_P[starts], dst_P[starts], run_pages * src.page_bytes
    else:
        _check_slice(part, src, dst)
        length_P = np.full(len(src_P), part.nbytes, dtype=np.int64)
    src_R = np.asarray(src.region_bases[regions.start : regions.stop], dtype=np.int64) + part.src_offset
    dst_R = np.asarray(dst.region_bases[regions.start : regions.stop], dtype=np.int64) + part.dst_offset
    return CopyList(
        as_array(np.add.outer(src_R, src_P * src.page_bytes)),
        as_array(np.add.outer(dst_R, dst_P * dst.page_bytes)),
        as_array(np.tile(length_P, len(regions))),
    )


def _check_slice(part: PageSlice, src: PagedMemory, dst: PagedMemory) -> None:
    for offset, page_bytes in ((part.src_offset, src.page_bytes), (part.dst_offset, dst.page_bytes)):
        if offset < 0 or part.nbytes < 1 or offset + part.nbytes > page_bytes:
            raise TransferFailed(f"{part.nbytes} bytes from byte {offset} on of pages of {page_bytes} bytes")


def merge_runs(src_pages_P: Int64s, dst_pages_P: Int64s) -> tuple[Int64s, Int64s]:
    """Return `(starts, lengths)` of the longest runs that are contiguous in both lists, in list order."""
    breaks_P = (np.diff(src_pages_P) != 1) | (np.diff(dst_pages_P) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks_P) + 1)).astype(np.int64)
    return starts, np.diff(np.append(starts, len(src_pages_P))).astype(np.int64)


def plan_aux_copy(src: PagedMemory, dst: PagedMemory, src_slot: int, dst_slot: int) -> CopyList:
    """Return the one copy that brings aux row `src_slot` to `dst_slot`. Raises the errors of `plan_page_copies`."""
    if src.aux_row_bytes != dst.aux_row_bytes:
        raise TransferFailed(f"aux rows of {src.aux_row_bytes} bytes here and {dst.aux_row_bytes} bytes there")
    if not 0 <= src_slot < src.num_aux_slots:
        raise TransferFailed(f"source aux slot {src_slot} of {src.num_aux_slots}")
    if not 0 <= dst_slot < dst.num_aux_slots:
        raise BadFrame(f"destination aux slot {dst_slot} of {dst.num_aux_slots}")
    return CopyList(
        (src.aux_base + src_slot * src.aux_row_bytes,),
        (dst.aux_base + dst_slot * dst.aux_row_bytes,),
        (src.aux_row_bytes,),
    )


def join(*parts: CopyList) -> CopyList:
    """Return the copies of all parts, in order, as one list."""
    src, dst, length = array("q"), array("q"), array("q")
    for part in parts:
        src.extend(part.src)
        dst.extend(part.dst)
        length.extend(part.length)
    return CopyList(src, dst, length)


def checked_pages(
    pages: Sequence[int], num_pages: int, side: str, error: type[TransferFailed] | type[ProtocolError]
) -> Int64s:
    """Return the pages as int64. Raise `error` if one is out of range or listed twice."""
    try:
        pages_P = np.asarray(pages, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as cause:
        raise error(f"{side} pages are no page indices: {cause}") from cause
    low, high = int(pages_P.min()), int(pages_P.max())
    if low < 0 or high >= num_pages:
        raise error(f"{side} page {low if low < 0 else high} of {num_pages}")
    if len(pages_P) > 1 and np.bincount(pages_P - low).max() > 1:
        raise error(f"{side} page {low + int(np.bincount(pages_P - low).argmax())} is listed twice")
    return pages_P
