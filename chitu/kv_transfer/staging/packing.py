"""How a group lies in a segment, on both sides: region by region (K of the first layer, V of it, K of the next, ...),
in each region the group's pages in the order of the room's page list, without gaps. Or one logits row.

Pure integers. P packs (`pack_pages`: pool -> segment), D scatters the same list turned round (`turned`). Pages that
follow each other in the pool are one piece. Called by transfer threads and by D's scattering thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chitu.errors import TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.plan import as_array, checked_pages, layer_regions, merge_runs
from chitu.kv_transfer.transports.transport import CopyList


def unit_bytes(memory: PagedMemory, regions_per_layer: int) -> int:
    """One page of one layer: the least that can be staged."""
    return regions_per_layer * memory.page_bytes


def pack_pages(
    memory: PagedMemory, pages: Sequence[int], layers: range, base: int, regions_per_layer: int = 2
) -> CopyList:
    """Copies of `pages` of all regions of `layers` to `base` and behind it. Raises TransferFailed for indices that the
    pool does not have."""
    regions = layer_regions(layers, regions_per_layer)
    if regions.start < 0 or regions.stop > len(memory.region_bases):
        raise TransferFailed(f"layers {layers.start} to {layers.stop - 1} of {len(memory.region_bases)} regions")
    if not len(pages) or not regions:
        return CopyList((), (), ())
    pages_P = checked_pages(pages, memory.num_pages, "own", TransferFailed)
    place_P = np.arange(len(pages_P), dtype=np.int64)
    starts, run_pages = merge_runs(pages_P, place_P)
    region_R = np.asarray(memory.region_bases[regions.start : regions.stop], dtype=np.int64)
    into_R = base + np.arange(len(regions), dtype=np.int64) * (len(pages_P) * memory.page_bytes)
    return CopyList(
        as_array(np.add.outer(region_R, pages_P[starts] * memory.page_bytes)),
        as_array(np.add.outer(into_R, place_P[starts] * memory.page_bytes)),
        as_array(np.tile(run_pages * memory.page_bytes, len(regions))),
    )


def pack_row(memory: PagedMemory, slot: int, base: int) -> CopyList:
    """The copy of a logits row to `base`. Raises TransferFailed."""
    if not 0 <= slot < memory.num_aux_slots:
        raise TransferFailed(f"aux slot {slot} of {memory.num_aux_slots}")
    return CopyList((memory.aux_base + slot * memory.aux_row_bytes,), (base,), (memory.aux_row_bytes,))


def turned(copies: CopyList) -> CopyList:
    """The same pieces the other way."""
    return CopyList(copies.dst, copies.src, copies.length)
