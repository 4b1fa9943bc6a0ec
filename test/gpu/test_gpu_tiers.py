"""Pages of a pool on the device go to pinned host memory and come back, byte for byte, while steps run."""

from __future__ import annotations

import pytest
import torch

from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.tiers.page_copies import host_memory, page_content_bytes, page_copies_of
from chitu.protocol import FP8_E4M3, KVLayout


@pytest.mark.parametrize("dtype", ["bfloat16", FP8_E4M3])
def test_pages_go_to_pinned_memory_and_back(card, dtype):
    pool = KVPool(KVLayout.uniform("m", 4, 8, 128, 16, dtype, 100), 9, 0, str(card.device), has_scratch=True)
    for region in pool.regions:
        region.view(torch.uint8).random_()
    wait(card)
    before = [region.clone() for region in pool.regions]
    nbytes = page_content_bytes(pool.layout)
    memory = host_memory(2 * nbytes)
    copies = page_copies_of(pool, str(card.device), memory)
    for place, page in enumerate((3, 7)):
        copies.extract_from_kvpool(page, memory[place * nbytes : (place + 1) * nbytes])
        copies.restore_to_kvpool(page + 1, memory[place * nbytes : (place + 1) * nbytes])
    wait(card)
    for region, old in zip(pool.regions, before, strict=True):
        for page in (3, 7):
            assert torch.equal(region[page + 1].view(torch.uint8), old[page].view(torch.uint8))
        for page in (0, 1, 2, 3, 5, 6, 7):
            assert torch.equal(region[page].view(torch.uint8), old[page].view(torch.uint8))


def wait(card) -> None:
    if card.device.type == "cuda":
        torch.cuda.synchronize(card.device)
