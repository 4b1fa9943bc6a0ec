"""Pages between a pool and host memory, on the host and by the kernel that a GPU has for it: one launch a page."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from pin_twin import SecondMappings

from chitu.config.tensor_parallel import kv_heads_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.tiers.page_copies import Int64s, PoolPageCopies, host_memory, page_content_bytes, pinned_copies
from chitu.protocol import FP8_E4M3, CacheGroup, KVLayout

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.kernels.blocks import BlockCopier

LAYOUTS = {
    "keys and values": KVLayout.uniform("m", 2, 2, 8, 4, "float16", 100),
    "one rank's share, scales in the page": KVLayout.uniform("m", 3, 4, 16, 4, FP8_E4M3, 100, tp_size=2),
    "a head that two ranks hold": KVLayout.uniform("m", 3, 2, 16, 4, "float32", 100, tp_size=4),
    "layers that differ": KVLayout(
        "m", 4, "float16", 100, (CacheGroup((0, 3), 4, (8, 8)), CacheGroup((1,), 2, (24, 16))), tp_size=2
    ),
    "latent, one region a layer": KVLayout.uniform("m", 3, 1, 24, 4, "bfloat16", 100, tp_size=2, regions_per_layer=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_page_is_copied_out_and_in_by_one_call_each(layout: KVLayout) -> None:
    """Checked for the first rank, and for another rank, which leaves out what its neighbour holds too. The calls go to
    the kernel that a GPU has for them, and it knows the content by another address than the host."""
    holders = max(1, layout.tp_size // layout.groups[0].num_kv_heads)
    for tp_rank in range(layout.tp_size):
        check_copies(layout, tp_rank, is_copied=tp_rank % holders == 0)


def check_copies(layout: KVLayout, tp_rank: int, is_copied: bool) -> None:
    pool = KVPool(layout, 5, 0, has_scratch=True)
    for number, region in enumerate(pool.regions):
        region.view(-1).view(torch.uint8).copy_(torch.arange(region.nbytes) * 7 + number)
    nbytes = page_content_bytes(pool.layout)
    whole = msgspec.structs.replace(layout, tp_size=1)
    assert nbytes == whole.bytes_per_page
    expected, driver, pieces = bytearray(nbytes), SecondMappings(), list[int]()
    for offset, part in own_parts(pool, tp_rank):
        expected[offset : offset + len(part)] = part
    memory = host_memory(nbytes)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    shift = driver.pin(address, nbytes) - address
    copier = BlockCopier("cpu")

    def launch(source_N: Int64s, target_N: Int64s, length_N: Int64s) -> None:
        pieces.append(len(length_N))
        copier.copy(source_N, target_N, length_N)

    on_host, on_device = PoolPageCopies(pool, tp_rank), PoolPageCopies(pool, tp_rank, launch, shift)
    content = memoryview(bytearray(nbytes))
    for copies, copied in ((on_host, content), (on_device, memory)):
        copies.extract_from_kvpool(3, copied)
        assert copied == (expected if is_copied else bytes(nbytes))
    content[:] = memory[:] = expected
    for target, copies in enumerate((on_host, on_device)):
        before = [region.clone() for region in pool.regions]
        copies.restore_to_kvpool(target, (content, memory)[target])
        for region, old in zip(pool.regions, before, strict=True):
            assert torch.equal(region[target].view(torch.uint8), old[3].view(torch.uint8))
            assert torch.equal(region[target + 1 :].view(torch.uint8), old[target + 1 :].view(torch.uint8))
    assert pieces == [len(pool.regions)] * (1 + is_copied)


def test_memory_is_unpinned_before_it_is_freed() -> None:
    """Else the driver refuses to pin what is mapped at its addresses next."""
    pool, driver = KVPool(LAYOUTS["keys and values"], 2, 0), SecondMappings()
    memory = host_memory(page_content_bytes(pool.layout))
    is_freed = weakref.ref(memory.obj)
    copies = pinned_copies(pool, driver, BlockCopier("cpu").copy, memory)
    copies.extract_from_kvpool(1, memory)
    del memory
    assert is_freed() is not None
    assert driver.num_pinned == 1
    del copies
    assert is_freed() is None
    assert driver.num_pinned == 0


def own_parts(pool: KVPool, tp_rank: int) -> Iterator[tuple[int, bytes]]:
    """Yield the place in the content, and the bytes, of each head that the rank holds of page 3."""
    start = 0
    for num_kv_heads, head_dim, regions in pool.layout.shapes:
        head_bytes = pool.layout.head_bytes(head_dim)
        for index in regions:
            heads = kv_heads_of(num_kv_heads, pool.layout.tp_size, tp_rank)
            for place, head in enumerate(heads):
                raw = pool.regions[index][3, place].contiguous().view(torch.uint8)
                yield start + head * head_bytes, raw.numpy().tobytes()
            start += num_kv_heads * head_bytes
