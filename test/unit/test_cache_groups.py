"""Layouts of layers that differ: regions, sizes, the pool, and what a retracted sequence keeps."""

from __future__ import annotations

import msgspec
import pytest
import torch

from chitu.errors import IncompatibleLayout
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import check_compatible
from chitu.protocol import FP8_E4M3, CacheGroup, KVLayout

PAGE_SIZE = 4
GROUPS = (CacheGroup((0, 4), 4, (8, 8)), CacheGroup((1,), 2, (24, 16), window=8), CacheGroup((3,), 1, (48, 8)))
"""Full attention, a window with other heads and a wider K, a layer without KV (2), and a latent row with an index
key."""


def layout_of(dtype: str = "float32", tp_size: int = 1) -> KVLayout:
    return KVLayout("m", PAGE_SIZE, dtype, 100, GROUPS, tp_size)


def test_regions_follow_the_layers_and_shapes_collect_those_that_are_alike() -> None:
    layout = layout_of()
    assert layout.num_layers == 5
    assert [(one.layer, one.num_kv_heads, one.head_dim) for one in layout.regions] == [
        *((0, 4, 8), (0, 4, 8), (1, 2, 24), (1, 2, 16), (3, 1, 48), (3, 1, 8), (4, 4, 8), (4, 4, 8))
    ]
    assert [layout.regions_of(range(layer, layer + 1)) for layer in range(5)] == [
        *(range(2), range(2, 4), range(4, 4), range(4, 6), range(6, 8))
    ]
    assert [shape.regions for shape in layout.shapes] == [(0, 1, 6, 7), (3,), (2,), (5,), (4,)]
    assert layout.bytes_by_layer == tuple(16 * n for n in (4 * 16, 2 * 40, 0, 56, 4 * 16))
    assert sum(layout.bytes_by_layer) == layout.bytes_per_page == sum(layout.page_bytes)
    assert [shape.regions for shape in KVLayout.uniform("m", 3, 2, 8, 4, "float32", 9).shapes] == [tuple(range(6))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FP8_E4M3])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_pool_has_each_region_with_its_own_heads_and_width_and_they_do_not_overlap(dtype: str, tp_size: int) -> None:
    layout = layout_of(dtype, tp_size)
    pool = KVPool(layout, 5, 2, has_scratch=True)
    ends = [base + 6 * nbytes for base, nbytes in zip(pool.region_bases, pool.page_bytes, strict=True)]
    assert all(end <= start for end, start in zip(ends, (*pool.region_bases[1:], pool.aux_base), strict=True))
    shapes = [tuple(x.shape[1:]) for layer in (0, 1, 3) for x in (pool.k[layer], pool.v[layer])]
    heads = [max(1, num // tp_size) for num in (4, 4, 2, 2, 1, 1)]
    assert shapes == [(n, PAGE_SIZE, width) for n, width in zip(heads, (8, 8, 24, 16, 48, 8), strict=True)]
    assert pool.k[2].numel() == pool.v[2].numel() == 0 and pool.k[2].shape[2] == PAGE_SIZE
    assert len(pool.k) == len(pool.v) == 5
    for index, region in enumerate(pool.regions):
        region.view(-1).view(torch.uint8).fill_(index + 1)
    for index, region in enumerate(pool.regions):
        assert (region.view(-1).view(torch.uint8) == index + 1).all()
        assert region[:1].nbytes == pool.page_bytes[index]
    assert not pool.aux.any()


def test_layouts_whose_groups_differ_are_refused_by_what_differs() -> None:
    mine, wider = layout_of(), msgspec.structs.replace(GROUPS[1], window=9)
    theirs = msgspec.structs.replace(mine, groups=(GROUPS[0], wider, GROUPS[2]))
    check_compatible(mine, layout_of(tp_size=4))
    with pytest.raises(IncompatibleLayout, match=r"layers 1: 2 x 24 and 16, window 8.* != .*window 9"):
        check_compatible(mine, theirs)
    with pytest.raises(IncompatibleLayout, match="KV heads cannot be cut for 3 ranks"):
        check_compatible(mine, layout_of(tp_size=3))
