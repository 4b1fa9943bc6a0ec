"""Staging memory: segments, and the copies into and out of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.segments import DeviceCopier, HostCopier, StagingArea
from chitu.kv_transfer.transports.transport import CopyList


class Later:
    """A `Ready` whose work is done when it is waited for."""

    def __init__(self, source: np.ndarray, value: int) -> None:
        self._source, self._value = source, value

    def synchronize(self) -> None:
        self._source[:] = self._value

    def wait(self, stream: object = None) -> None:
        raise AssertionError("host memory has no stream")


class ShiftedBlocks:
    """A stand-in for a device that knows host memory by other addresses; it shifts the addresses back."""

    def __init__(self, shift: int, lowest: int) -> None:
        self._shift, self._lowest = shift, lowest

    def copy(self, src_N, dst_N, length_N, after=()) -> None:
        back_src, back_dst = (np.where(a >= self._lowest, a - self._shift, a) for a in (src_N, dst_N))
        HostCopier().copy(CopyList(back_src.tolist(), back_dst.tolist(), length_N.tolist()), after)


class BrokenBlocks:
    def copy(self, src_N, dst_N, length_N, after=()) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Window:
    def __init__(self, memory: np.ndarray, device_base: int) -> None:
        self.base, self.nbytes = int(memory.ctypes.data), memory.nbytes
        self._device_base = device_base
        self.asked = 0

    def device_base(self) -> int:
        self.asked += 1
        return self._device_base


def test_segments_follow_each_other_and_stay_inside_the_arena() -> None:
    area = StagingArea(5096, 64, 3, arena_base=1000, arena_bytes=4096 + 192)
    assert [area.address(number) for number in range(3)] == [5096, 5160, 5224]
    assert area.nbytes == 192
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            area.address(wrong)


@pytest.mark.parametrize(("base", "segments"), [(999, 3), (5097, 3), (5096, 0), (5096, 4)])
def test_an_area_that_leaves_its_arena_is_refused(base: int, segments: int) -> None:
    with pytest.raises(ValueError, match="arena"):
        StagingArea(base, 64, segments, arena_base=1000, arena_bytes=4096 + 192)


def pieces(pool: np.ndarray, segment: np.ndarray, size: int, count: int, seed: int) -> tuple[CopyList, list[int]]:
    pages = random.Random(seed).sample(range(len(pool) // size), count)
    base, into = int(pool.ctypes.data), int(segment.ctypes.data)
    return CopyList([base + page * size for page in pages], [into + i * size for i in range(count)], [size] * count), (
        pages
    )


def test_gather_and_scatter_bring_every_page_to_its_place_and_touch_no_other() -> None:
    size, count = 96, 40
    rng = np.random.default_rng(0)
    own, theirs = rng.integers(0, 256, 100 * size, np.uint8), np.full(100 * size, 7, np.uint8)
    segment = np.zeros(count * size, np.uint8)
    gather, src_pages = pieces(own, segment, size, count, 1)
    scatter_back, dst_pages = pieces(theirs, segment, size, count, 2)
    scatter = CopyList(scatter_back.dst, scatter_back.src, scatter_back.length)
    copier = HostCopier()
    copier.copy(gather)
    copier.copy(scatter)
    expected = np.full((100, size), 7, np.uint8)
    expected[dst_pages] = own.reshape(100, size)[src_pages]
    assert (theirs.reshape(100, size) == expected).all()


def test_a_copy_waits_for_what_it_reads() -> None:
    source, target = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    copy = CopyList([int(source.ctypes.data)], [int(target.ctypes.data)], [64])
    HostCopier().copy(copy, [Later(source, 9)])
    assert (target == 9).all()


def test_host_copies_into_memory_that_is_not_there_are_an_error_and_no_crash() -> None:
    source = np.zeros(4096, np.uint8)
    base = int(source.ctypes.data)
    with pytest.raises(TransferFailed, match="pieces"):
        HostCopier().copy(CopyList([base, base + 8, base + 16], [4096, 8192, 12288], [8, 8, 8]))


def test_a_device_gets_the_addresses_by_which_it_knows_host_memory() -> None:
    shift = 1 << 50
    pool, host = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    window = Window(host, int(host.ctypes.data) + shift)
    copier = DeviceCopier(ShiftedBlocks(shift, shift), [window])
    inside, outside = int(host.ctypes.data), int(pool.ctypes.data)
    other = np.zeros(16, np.uint8)
    copier.copy(CopyList([outside], [int(other.ctypes.data)], [16]))
    assert window.asked == 0, "nothing is pinned for what does not go there"
    copier.copy(CopyList([outside + 128, outside], [inside, inside + 240], [100, 16]))
    assert (host[:100] == pool[128:228]).all() and (host[240:] == pool[:16]).all()
    copier.copy(CopyList([inside + 240], [outside + 64], [16]))
    assert (pool[64:80] == pool[:16]).all()
    assert window.asked == 2


def test_a_device_that_fails_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed, match="illegal memory access"):
        DeviceCopier(BrokenBlocks()).copy(CopyList([1], [2], [3]))
