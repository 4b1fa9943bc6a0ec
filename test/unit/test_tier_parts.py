"""The parts of tiers, each alone: pages of host memory, records, copies of pages, measured speed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scheduler_world import Engine, Tiered
from support.clock import FakeClock

from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import HostPageCopies, PageCopies, page_content_bytes
from chitu.kv_cache.tiers.pages import HEADER_BYTES, MEMORY_S, MeasuredSpeed, is_whole, seal
from chitu.kv_cache.tiers.prefix_tiers import build_tiers
from chitu.protocol import (
    FP8_E4M3,
    KVLayout,
)


def host_of(num_slots: int) -> HostPages:
    return HostPages(memoryview(bytearray(num_slots * (HEADER_BYTES + 16) + 7)), 16)


def put(host: HostPages, *keys: bytes) -> None:
    for key in keys:
        taken = host.take()
        assert taken is not None and host.publish(key, taken)


def test_host_pages_give_up_the_least_recently_used_that_nobody_reads() -> None:
    host = host_of(3)
    put(host, b"a", b"b", b"c")
    pinned = host.pin(b"a")
    assert pinned is not None
    host.touch([b"b"])
    put(host, b"d")
    assert [key in host for key in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    assert (len(host), host.evictions, host.num_slots) == (3, 1, 3)
    others = [host.pin(key) for key in (b"b", b"d")]
    assert host.take() is None
    for slot in (pinned, *others):
        assert slot is not None
        host.unpin(slot)
    assert host.take() is not None


def test_host_pages_forget_all_and_what_is_filling_too() -> None:
    host = host_of(3)
    put(host, b"a", b"b")
    pinned, taken = host.pin(b"a"), host.take()
    assert pinned is not None and taken is not None
    host.clear()
    assert len(host) == 0 and host.pin(b"a") is None
    assert not host.publish(b"c", taken)
    free = [host.take() for _ in range(2)]
    assert None not in free and host.take() is None, "a slot that is read went to others"
    host.unpin(pinned)
    assert host.take() is not None


def test_a_key_is_kept_once() -> None:
    host = host_of(2)
    put(host, b"a")
    taken = host.take()
    assert taken is not None and not host.publish(b"a", taken)
    assert len(host) == 1 and host.take() is not None


@pytest.mark.parametrize("position", range(0, HEADER_BYTES + 16))
def test_a_changed_record_is_told_apart(position: int) -> None:
    key, record = bytes(range(16)), bytearray(HEADER_BYTES + 16)
    record[HEADER_BYTES:] = b"k and v of a pag"
    seal(memoryview(record), key)
    assert is_whole(memoryview(record), key) and not is_whole(memoryview(record), bytes(16))
    record[position] ^= 1
    is_padding = 36 <= position < HEADER_BYTES
    assert is_whole(memoryview(record), key) == is_padding


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + 15])
def test_a_record_that_was_cut_off_is_told_apart(length: int) -> None:
    record = bytearray(HEADER_BYTES + 16)
    seal(memoryview(record), bytes(16))
    assert not is_whole(memoryview(record)[:length], bytes(16))


LAYOUTS = {
    "keys and values": KVLayout("m", 2, 2, 8, 4, "float16", 100),
    "one rank's share, scales in the page": KVLayout("m", 3, 4, 16, 4, FP8_E4M3, 100, tp_size=2),
    "a head that two ranks hold": KVLayout("m", 3, 2, 16, 4, "float32", 100, tp_size=4),
    "latent, one region a layer": KVLayout("m", 3, 1, 24, 4, "bfloat16", 100, tp_size=2, regions_per_layer=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_tensors_are_copied_as_host_memory_is(layout: KVLayout) -> None:
    """Checked for the first rank, and for another rank, which leaves out what its neighbour holds too."""
    first = layout.num_kv_heads >= layout.tp_size
    for tp_rank in range(layout.tp_size):
        check_copies(layout, tp_rank, is_copied=first or tp_rank % (layout.tp_size // layout.num_kv_heads) == 0)


def check_copies(layout: KVLayout, tp_rank: int, is_copied: bool) -> None:
    from chitu.kv_cache.pool import KVPool
    from chitu.kv_cache.tiers.device_page_copies import DevicePageCopies

    pool = KVPool(layout, 5, 0, has_scratch=True)
    for number, region in enumerate(pool.regions):
        region.view(-1).view(torch.uint8).copy_(torch.arange(region.nbytes) * 7 + number)
    nbytes = page_content_bytes(pool.layout)
    holders = max(1, layout.tp_size // layout.num_kv_heads)
    assert nbytes * holders == layout.bytes_per_page * layout.tp_size
    contents = [bytearray(nbytes) for _ in range(2)]
    both: list[PageCopies] = [HostPageCopies(pool, tp_rank), DevicePageCopies(pool, tp_rank)]
    for copies, content in zip(both, contents, strict=True):
        copies.extract_from_kvpool(3, memoryview(content))
    assert contents[0] == contents[1] and (len(set(contents[0])) > 9) == is_copied
    if not is_copied:
        HostPageCopies(pool, tp_rank - 1).extract_from_kvpool(3, memoryview(contents[0]))
    for target, copies in enumerate(both):
        before = [region.clone() for region in pool.regions]
        copies.restore_to_kvpool(target, memoryview(contents[0]))
        for region, old in zip(pool.regions, before, strict=True):
            assert torch.equal(region[target].view(torch.uint8), old[3].view(torch.uint8))
            assert torch.equal(region[target + 1 :].view(torch.uint8), old[target + 1 :].view(torch.uint8))


def test_a_speed_is_that_of_the_last_measurements() -> None:
    clock = FakeClock()
    speed = MeasuredSpeed(clock)
    assert speed.per_s() is None
    for _ in range(20):
        speed.note(100, 1.0)
    for _ in range(20):
        speed.note(100, 10.0)
    measured = speed.per_s()
    assert measured is not None and measured == pytest.approx(10.0, rel=0.01)
    clock.advance(MEMORY_S)
    assert speed.per_s() is None


def test_memory_for_less_than_a_page_and_for_more_than_there_is_are_refused() -> None:
    instance = Tiered(16)
    assert isinstance(instance.executor, Engine)
    pool = instance.executor.pool
    page = HEADER_BYTES + page_content_bytes(pool.layout)

    def build(host_bytes: int, free_bytes: int) -> Sequence[object]:
        config = CacheConfig(host_bytes=host_bytes)
        return [
            build_tiers(
                config, "P0", "127.0.0.1", pool, "cpu", instance.cache, free_bytes, instance.clock, lambda: None
            )
        ]

    build(page, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page - 1}, less than one page of {page}"):
        build(page - 1, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page + 1}, but {page} bytes"):
        build(page + 1, page)
