"""The page checksum on a device (torch) is that of the host (numpy), over a real pool."""

from __future__ import annotations

import pytest
import torch

from chitu.kv_cache.checksum import HostPageSums, page_sums_of
from chitu.kv_cache.device_checksum import DevicePageSums
from chitu.kv_cache.pool import KVPool
from chitu.protocol import KVLayout

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tp_size", "tp_rank"), [("float32", 1, 0), ("bfloat16", 1, 0), ("bfloat16", 2, 1)])
def test_a_device_sums_as_the_host_does(device: str, dtype: str, tp_size: int, tp_rank: int) -> None:
    layout = KVLayout("m", 3, 4, 8, 4, dtype, 16, tp_size)
    host, other = KVPool(layout, 10, 1), KVPool(layout, 10, 1, device)
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip((*host.k, *host.v), (*other.k, *other.v), strict=True):
        mine.copy_(torch.randn(mine.shape, generator=generator))
        theirs.copy_(mine)
    on_host = page_sums_of(host, tp_rank)
    assert isinstance(on_host, HostPageSums)
    on_device = DevicePageSums(other, tp_rank)
    on_device._chunk_pages = 4  # more than one chunk
    pages = [3, 1, 9, 0, 2]
    for layers in (range(3), range(1, 2)):
        sums = on_host.sums(layers, pages)
        assert sums.all() and (on_device.sums(layers, pages) == sums).all()
