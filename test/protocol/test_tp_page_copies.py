"""Copies between the page pools of several ranks and the shared memory of the tiers: real lanes to the followers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shard_pools import NUM_LAYERS, RankPool, Ranks, layout_of, mixed_layout
from support.fake_transport import FakeFabric

from chitu.errors import ConfigError, Integrity, Internal, TransferFailed
from chitu.kv_cache.checksum import HostPageSums, head_copies
from chitu.kv_cache.pool import shared_file
from chitu.kv_cache.tiers.page_copies import PoolPageCopies, host_memory, page_content_bytes
from chitu.kv_transfer.both_sides import OwnMemory, TransferContext
from chitu.kv_transfer.kv_manager import KVManagerConfig, manager_of_decode
from chitu.kv_transfer.layout import PageSums, RoomSums, compare
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TierMemory, TPPageCopies, TPPageSums
from chitu.kv_transfer.shard_writer import TransferKVChunk, open_shards
from chitu.protocol import KVLayout

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
                tiers=TierMemory(self._map(), PoolPageCopies(self.ranks.pools[rank], rank)),
            )
            for rank in range(1, size)
        ]
        for follower in self._followers:
            follower.start(thread)
        self.copies = TPPageCopies(self._fan_out, PoolPageCopies(self.ranks.pools[0]), self.memory, timeout_s)

    def _map(self) -> memoryview:
        return host_memory(3 * self.page_bytes, self._file)

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


def test_a_rank_that_does_not_answer_ends_the_instance() -> None:
    """The rank may write later to an unknown place, so these pages cannot be used again."""
    layout = layout_of(HEADS, 2)
    pool, memory = Ranks(FakeFabric(), "p", layout).pools[0], host_memory(page_content_bytes(layout))
    fan_out = FanOut(1, 0)
    copies = TPPageCopies(fan_out, PoolPageCopies(pool), memory, timeout_s=0.05)
    for copy in (copies.extract_from_kvpool, copies.restore_to_kvpool):
        with pytest.raises(Internal, match="TP rank 1 did not answer"):
            copy(3, memory)
    fan_out.close()


def test_pages_are_summed_up_while_a_rank_copies_one() -> None:
    """A copy may take longer than a transfer may wait for its sums."""
    layout, begun, go_on = layout_of(HEADS, 2), threading.Event(), threading.Event()
    pools, memory = Ranks(FakeFabric(), "p", layout).pools, host_memory(page_content_bytes(layout))

    class SlowCopies(PoolPageCopies):
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
    copies = TPPageCopies(fan_out, PoolPageCopies(pools[0]), memory, 60.0)
    copying = thread("tiers", lambda: copies.extract_from_kvpool(3, memory))
    copying.start()
    assert begun.wait(60.0)
    assert len(TPPageSums(fan_out, sums[0]).sums(range(1), [1, 2])) == 2
    go_on.set()
    copying.join(60.0)
    assert not copying.is_alive()
    fan_out.close()
    follower.close()


# ----------------------------------------------------------------------------------------------------------------------
# KV checksums with several ranks on P and D, in equal or different numbers: real lanes to the followers, real writes
# between.


LAYERS = range(NUM_LAYERS)
SRC_PAGES, DST_PAGES = [3, 1, 2], [8, 9, 4]


def own_sums(layout: KVLayout, tp_rank: int, pool: RankPool, counts_copies: bool) -> HostPageSums:
    return HostPageSums(layout, tp_rank, pool.region_bases, pool.num_pages, pool.page_bytes, counts_copies)


def uniform_layout(tp_size: int) -> KVLayout:
    return layout_of(HEADS, tp_size)


class SummedInstance:
    """All ranks of a P or D, and the object that its main rank calls to sum their pages."""

    def __init__(self, ranks: Ranks, is_decode: bool, deaf: bool = False) -> None:
        self.ranks = ranks
        layout, pools = ranks.layout, ranks.pools
        self.fan_out = FanOut(layout.tp_size - 1, 0, answer_grace_s=0.0)
        self.followers = [
            ShardFollower(layout, rank, pools[rank], [], self.fan_out.base, self.fan_out.num_lanes, sums)
            for rank, sums in enumerate(self._sums(is_decode, deaf), start=1)
        ]
        for follower in self.followers:
            follower.start(thread)
        self.sums: PageSums = TPPageSums(self.fan_out, own_sums(layout, 0, pools[0], is_decode))

    def _sums(self, is_decode: bool, deaf: bool) -> list[HostPageSums | None]:
        layout, pools = self.ranks.layout, self.ranks.pools
        return [None if deaf else own_sums(layout, rank, pools[rank], is_decode) for rank in range(1, layout.tp_size)]

    def close(self) -> None:
        self.fan_out.close()
        for follower in self.followers:
            follower.close()


class Pair:
    """A P that wrote three pages to a D, all heads of all layers."""

    def __init__(self, src_size: int, dst_size: int, make: Callable[[int], KVLayout] = uniform_layout) -> None:
        fabric = FakeFabric()
        self.make, self.layers = make, range(make(1).num_layers)
        self.p = SummedInstance(Ranks(fabric, "p", make(src_size)), is_decode=False)
        self.d = SummedInstance(Ranks(fabric, "d", make(dst_size)), is_decode=True)
        info = self.d.ranks.registration()
        for rank, (pool, transport) in enumerate(zip(self.p.ranks.pools, self.p.ranks.transports, strict=True)):
            pool.fill()
            writer = open_shards(info, self.p.ranks.layout, rank, pool, [transport])
            writer.write_pages([TransferKVChunk(0, len(self.layers), 0, len(SRC_PAGES))], SRC_PAGES, DST_PAGES, 5.0)
        self.expected = RoomSums.of([0, 1, 2], "fake")
        for layer in self.layers:  # like layer-wise batches
            self.expected.sums += self.p.sums.sums(range(layer, layer + 1), SRC_PAGES)

    def verify(self) -> None:
        compare(self.expected, self.d.sums.sums(self.layers, DST_PAGES), head_copies(self.d.ranks.layout))

    def close(self) -> None:
        self.p.close()
        self.d.close()


SUMMED_SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 4), (4, 8), (8, 8), (1, 8), (8, 1)]


MIXED_SIZES = [(1, 1), (1, 2), (4, 2), (2, 4), (8, 1)]
CASES = [(*sizes, uniform_layout) for sizes in SUMMED_SIZES] + [(*sizes, mixed_layout) for sizes in MIXED_SIZES]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}to{case[1]}-{case[2].__name__}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*request.param)
    yield made
    made.close()


def test_what_arrived_verifies_however_both_sides_divide_the_heads_and_any_flip_on_any_rank_does_not(
    pair: Pair,
) -> None:
    pair.verify()
    whole = SummedInstance(Ranks(FakeFabric(), "w", pair.make(1)), is_decode=False)
    whole.ranks.pools[0].fill()
    assert (pair.expected.sums == whole.sums.sums(pair.layers, SRC_PAGES)).all(), "every head counts once"
    whole.close()
    for rank, pool in enumerate(pair.d.ranks.pools):
        region, position = rank % len(pool.kv), rank % 3
        head = rank % len(pool.heads[region])
        pool.kv[region][DST_PAGES[position], head, 5] ^= 1 << 30
        with pytest.raises(Integrity, match=rf"1 of 3 verified KV pages \(pages {position} of"):
            pair.verify()
        pool.kv[region][DST_PAGES[position], head, 5] ^= 1 << 30
    pair.verify()


def test_heads_that_changed_places_between_ranks_are_found() -> None:
    pair = Pair(1, 2)
    first, second = pair.d.ranks.pools
    mine, theirs = first.kv[0][DST_PAGES[1], 0].copy(), second.kv[0][DST_PAGES[1], 0].copy()
    first.kv[0][DST_PAGES[1], 0], second.kv[0][DST_PAGES[1], 0] = theirs, mine
    with pytest.raises(Integrity, match="pages 1 of"):
        pair.verify()
    pair.close()


def test_a_follower_that_cannot_sum_up_is_a_failed_transfer_that_names_the_rank() -> None:
    deaf = SummedInstance(Ranks(FakeFabric(), "d", layout_of(HEADS, 2)), is_decode=True, deaf=True)
    with pytest.raises(TransferFailed, match="TP rank 1: TP rank 1 was not set up for verify_kv"):
        deaf.sums.sums(LAYERS, DST_PAGES)
    deaf.close()


def test_a_manager_that_must_verify_but_cannot_says_so_at_once() -> None:
    ranks = Ranks(FakeFabric(), "d", layout_of(HEADS, 1))
    pool = ranks.pools[0]
    with pytest.raises(ConfigError, match="verify_kv all without a way"):
        manager_of_decode(
            KVManagerConfig(0, 1, "h", 1, ranks.layout, verify_kv="all"),
            OwnMemory(pool, None, list(ranks.transports)),  # type: ignore[arg-type]
            TransferContext(lambda *frame: None, lambda: None, None),  # type: ignore[arg-type]
        )
    assert all(np.all(region == -1) for region in pool.kv)
