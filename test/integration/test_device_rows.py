"""Aux rows in device memory: `MetadataBuffers` seals and refuses exactly what it does over host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from support.operations import Operations

from chitu.errors import Integrity
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_cache.checksum import HostPageSums, page_sums_of
from chitu.kv_cache.device_checksum import DevicePageSums
from chitu.kv_cache.device_rows import DeviceRows
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.ops.cuda_device import on_stream
from chitu.protocol import CacheGroup, KVLayout
from chitu.types import new_room

LAYOUT = KVLayout.uniform("test", num_layers=1, num_kv_heads=1, head_dim=8, page_size=4, dtype="float32", vocab_size=37)
LOGITS_BYTES = 4 * LAYOUT.vocab_size


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request: pytest.FixtureRequest) -> KVPool:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return KVPool(LAYOUT, num_pages=2, num_aux_slots=3, device=request.param)


def test_a_row_sealed_on_a_device_is_bit_for_bit_that_of_host_memory(pool: KVPool) -> None:
    room, logits = new_room(), torch.randn(LAYOUT.vocab_size)
    host_rows = np.zeros((3, pool.aux_row_bytes), np.uint8)
    host, device = MetadataBuffers(host_rows, LOGITS_BYTES), MetadataBuffers(DeviceRows(pool.aux), LOGITS_BYTES)
    host.get(1)[:] = logits.numpy()
    pool.aux_logits[1] = logits
    host.seal(1, room)
    sealed = device.seal(1, room)
    assert (sealed is None) == (pool.device.type == "cpu")
    if sealed is not None:
        sealed.synchronize()
    assert (pool.aux[1].cpu().numpy() == host_rows[1]).all()
    assert not pool.aux[0].any() and not pool.aux[2].any()
    device.verify(1, room)
    np.testing.assert_array_equal(device.get(1), logits.numpy())


def test_of_a_row_only_the_header_crosses_to_the_host_and_back(pool: KVPool) -> None:
    """Sealing and verifying are a few launches each, whatever the vocabulary."""
    room, buffers = new_room(), MetadataBuffers(DeviceRows(pool.aux), LOGITS_BYTES)
    for work, most in ((lambda: buffers.seal(1, room), 4), (lambda: buffers.verify(1, room), 4)):
        with Operations() as operations:
            work()
        assert len(operations.names) <= most, operations.names
        assert sum(operations.copied) <= AUX_HEADER_BYTES + 8


def test_what_a_device_row_must_not_be_is_refused(pool: KVPool) -> None:
    room, buffers = new_room(), MetadataBuffers(DeviceRows(pool.aux), LOGITS_BYTES)
    pool.aux_logits.normal_()
    buffers.seal(2, room)
    with pytest.raises(Integrity, match="belongs to room"):
        buffers.verify(2, new_room())
    pool.aux[2, -64] ^= 1  # behind the header, within the logits
    with pytest.raises(Integrity, match="checksum"):
        buffers.verify(2, room)
    slot = buffers.allocate()
    assert slot == 0
    buffers.clear(2)
    with pytest.raises(Integrity, match="no row was written"):
        buffers.verify(2, room)
    with pytest.raises(ValueError, match="contiguous"):
        DeviceRows(pool.aux[:, ::2])


def test_a_pool_hands_out_rows_of_the_memory_that_it_has(pool: KVPool) -> None:
    buffers = MetadataBuffers(pool.aux_rows, LOGITS_BYTES)
    sealed = buffers.seal(1, new_room())
    if sealed is not None:
        sealed.synchronize()
    assert bytes(pool.aux[1, :8].cpu().numpy()) == b"chituAUX"
    assert isinstance(pool.aux_rows, np.ndarray) == (pool.device.type == "cpu")


def test_a_stream_is_entered_within_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On exit the thread's stream is restored on that device, in this order, and no other device is touched."""
    steps: list[tuple[str, object]] = []

    @contextmanager
    def noted(what: str, value: object) -> Iterator[None]:
        steps.append((what, value))
        yield
        steps.append((f"-{what}", value))

    monkeypatch.setattr(torch.cuda, "device", lambda device: noted("device", device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("stream", stream))
    stream = SimpleNamespace(device=torch.device("cuda:1"))
    with on_stream(cast("torch.cuda.Stream", stream)):
        assert steps == [("device", stream.device), ("stream", stream)]
    assert steps[2:] == [("-stream", stream), ("-device", stream.device)]
    with on_stream(None):
        assert len(steps) == 4


# ----------------------------------------------------------------------------------------------------------------------
# The page checksum on a device (torch) is that of the host (numpy), over a real pool.


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("layout", "tp_rank"),
    [
        (KVLayout.uniform("m", 3, 4, 8, 4, "bfloat16", 16), 0),
        (KVLayout("m", 4, "float16", 16, (CacheGroup((0, 2), 4, (8, 8)), CacheGroup((1,), 2, (24, 16))), tp_size=2), 1),
    ],
    ids=["alike", "layers that differ, the second rank"],
)
def test_a_device_sums_as_the_host_does(device: str, layout: KVLayout, tp_rank: int) -> None:
    host, other = KVPool(layout, 10, 1), KVPool(layout, 10, 1, device)
    generator = torch.Generator().manual_seed(1)
    for mine, theirs in zip(host.regions, other.regions, strict=True):
        mine.copy_(torch.randn(mine.shape, generator=generator))
        theirs.copy_(mine)
    on_host = page_sums_of(host, tp_rank)
    assert isinstance(on_host, HostPageSums)
    on_device = DevicePageSums(other, tp_rank)
    pages = [3, 1, 9, 0, 2]
    for layers in (range(3), range(1, 2)):
        sums = on_host.sums(layers, pages)
        assert sums.all() and (on_device.sums(layers, pages) == sums).all()
        with Operations() as operations:
            on_device.sums(layers, pages)
        assert operations.names.count("sum") == 1, "one launch, and a sum over regions, for any number of layers"
    assert not len(on_device.sums(range(3), []))
