"""Copies between the page pools of several ranks and the shared memory of the tiers: real lanes to the followers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
from shard_pools import Ranks, layout_of

from chitu.errors import Internal
from chitu.kv_cache.checksum import HostPageSums
from chitu.kv_cache.pool import shared_file
from chitu.kv_cache.tiers.page_copies import HostPageCopies, host_memory, page_content_bytes
from chitu.kv_transfer import ranks as fan_out_module
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TierMemory, TPPageCopies, TPPageSums
from chitu.testing.fake_transport import FakeFabric

HEADS = 4
SIZES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 8), (8, 4), (8, 1)]


def thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


class Instance:
    """All ranks of an instance with room for three pages in host memory, which each rank maps for itself."""

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        layout = layout_of(HEADS, size)
        self.ranks = Ranks(FakeFabric(), "p", layout)
        self.page_bytes = page_content_bytes(layout)
        self._file = shared_file("chitu-tiers", 3 * self.page_bytes, "a test")
        self.memory = self._map()
        self._fan_out = FanOut(size - 1, 0)
        self._followers = [
            ShardFollower(
                layout,
                rank,
                self.ranks.pools[rank],
                [],
                self._fan_out.base,
                self._fan_out.num_lanes,
                tiers=TierMemory(self._map(), HostPageCopies(self.ranks.pools[rank], rank)),
            )
            for rank in range(1, size)
        ]
        for follower in self._followers:
            follower.start(thread)
        self.copies = TPPageCopies(self._fan_out, HostPageCopies(self.ranks.pools[0]), self.memory, timeout_s)

    def _map(self) -> memoryview:
        return host_memory(3 * self.page_bytes, "cpu", self._file)

    def content(self, place: int) -> memoryview:
        return self.memory[place * self.page_bytes : (place + 1) * self.page_bytes]

    def close(self) -> None:
        self._fan_out.close()
        for follower in self._followers:
            follower.close()
        os.close(self._file)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def test_a_page_of_one_instance_is_a_page_of_another_however_both_divide_the_heads(sizes: tuple[int, int]) -> None:
    source, target = map(Instance, sizes)
    for pool in source.ranks.pools:
        pool.fill()
    from_pages, to_pages = [7, 2], [3, 10]
    for place, (from_page, to_page) in enumerate(zip(from_pages, to_pages, strict=True), start=1):
        source.copies.extract_from_kvpool(from_page, source.content(place))
        target.content(place)[:] = source.content(place)  # as a store does
        target.copies.restore_to_kvpool(to_page, target.content(place))
    target.ranks.check(to_pages, from_pages, range(2))
    assert not any(source.content(0)), "a copy beside its place"
    source.close()
    target.close()


def test_a_copy_may_have_the_longest_time_of_a_topology() -> None:
    instance = Instance(2, timeout_s=1e9)
    instance.copies.extract_from_kvpool(7, instance.content(1))
    instance.close()


def test_a_rank_that_does_not_answer_ends_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank may write later to an unknown place, so these pages cannot be used again."""
    monkeypatch.setattr(fan_out_module, "SEND_TIMEOUT_MS", 10)
    layout = layout_of(HEADS, 2)
    pool, memory = Ranks(FakeFabric(), "p", layout).pools[0], host_memory(page_content_bytes(layout), "cpu")
    fan_out = FanOut(1, 0)
    copies = TPPageCopies(fan_out, HostPageCopies(pool), memory, timeout_s=0.05)
    for copy in (copies.extract_from_kvpool, copies.restore_to_kvpool):
        with pytest.raises(Internal, match="TP rank 1 did not answer"):
            copy(3, memory)
    fan_out.close()


def test_pages_are_summed_up_while_a_rank_copies_one() -> None:
    """A copy may take longer than a transfer may wait for its sums."""
    layout, begun, go_on = layout_of(HEADS, 2), threading.Event(), threading.Event()
    pools, memory = Ranks(FakeFabric(), "p", layout).pools, host_memory(page_content_bytes(layout), "cpu")

    class SlowCopies(HostPageCopies):
        def extract_from_kvpool(self, page: int, content: memoryview) -> None:
            begun.set()
            assert go_on.wait(60.0)
            super().extract_from_kvpool(page, content)

    sums = [
        HostPageSums(layout, rank, pool.region_bases, pool.num_pages, pool.page_bytes)
        for rank, pool in enumerate(pools)
    ]
    fan_out = FanOut(1, 0)
    tiers = TierMemory(memory, SlowCopies(pools[1], 1))
    follower = ShardFollower(layout, 1, pools[1], [], fan_out.base, fan_out.num_lanes, sums[1], tiers)
    follower.start(thread)
    copies = TPPageCopies(fan_out, HostPageCopies(pools[0]), memory, 60.0)
    copying = thread("tiers", lambda: copies.extract_from_kvpool(3, memory))
    copying.start()
    assert begun.wait(60.0)
    assert len(TPPageSums(fan_out, sums[0], 1, count_all=False).sums(range(1), [1, 2])) == 2
    go_on.set()
    copying.join(60.0)
    assert not copying.is_alive()
    fan_out.close()
    follower.close()
