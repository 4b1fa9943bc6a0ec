"""KV checksums with several ranks on P and D, in equal or different numbers: real lanes to the followers, real writes
between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shard_pools import NUM_LAYERS, RankPool, Ranks, layout_of

from chitu.errors import ConfigError, Integrity, TransferFailed
from chitu.kv_cache.checksum import HostPageSums
from chitu.kv_transfer.checksums import PageSums, RoomSums, compare, head_copies
from chitu.kv_transfer.kv_manager import KVManager, KVManagerConfig
from chitu.kv_transfer.parts import RoleParts
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TPPageSums
from chitu.kv_transfer.shard_writer import TransferKVChunk, open_shards
from chitu.protocol import KVLayout
from chitu.testing.fake_transport import FakeFabric
from chitu.types import Role

HEADS = 4
LAYERS = range(NUM_LAYERS)
SRC_PAGES, DST_PAGES = [3, 1, 2], [8, 9, 4]


def thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def own_sums(layout: KVLayout, tp_rank: int, pool: RankPool) -> HostPageSums:
    return HostPageSums(layout, tp_rank, pool.region_bases, pool.num_pages, pool.page_bytes)


class Instance:
    """All ranks of a P or D, and the object that its main rank calls to sum their pages."""

    def __init__(self, ranks: Ranks, is_decode: bool, deaf: bool = False) -> None:
        self.ranks = ranks
        layout, pools = ranks.layout, ranks.pools
        self.fan_out = FanOut(layout.tp_size - 1, 0, answer_grace_s=0.0)
        self.followers = [
            ShardFollower(layout, rank, pools[rank], [], self.fan_out.base, self.fan_out.num_lanes, sums)
            for rank, sums in enumerate(self._sums(deaf), start=1)
        ]
        for follower in self.followers:
            follower.start(thread)
        own = own_sums(layout, 0, pools[0])
        self.sums: PageSums = TPPageSums(self.fan_out, own, head_copies(layout), is_decode)

    def _sums(self, deaf: bool) -> list[HostPageSums | None]:
        layout, pools = self.ranks.layout, self.ranks.pools
        return [None if deaf else own_sums(layout, rank, pools[rank]) for rank in range(1, layout.tp_size)]

    def close(self) -> None:
        self.fan_out.close()
        for follower in self.followers:
            follower.close()


class Pair:
    """A P that wrote three pages to a D, all heads of all layers."""

    def __init__(self, src_size: int, dst_size: int) -> None:
        fabric = FakeFabric()
        self.p = Instance(Ranks(fabric, "p", layout_of(HEADS, src_size)), is_decode=False)
        self.d = Instance(Ranks(fabric, "d", layout_of(HEADS, dst_size)), is_decode=True)
        info = self.d.ranks.registration()
        for rank, (pool, transport) in enumerate(zip(self.p.ranks.pools, self.p.ranks.transports, strict=True)):
            pool.fill()
            writer = open_shards(info, self.p.ranks.layout, rank, pool, [transport])
            writer.write_pages([TransferKVChunk(0, NUM_LAYERS, 0, len(SRC_PAGES))], SRC_PAGES, DST_PAGES, 5.0)
        self.expected = RoomSums.of([0, 1, 2], "fake")
        for layer in LAYERS:  # like layer-wise batches
            self.expected.sums += self.p.sums.sums(range(layer, layer + 1), SRC_PAGES)

    def verify(self) -> None:
        compare(self.expected, self.d.sums.sums(LAYERS, DST_PAGES), head_copies(self.d.ranks.layout))

    def close(self) -> None:
        self.p.close()
        self.d.close()


SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 4), (4, 8), (8, 8), (1, 8), (8, 1)]


@pytest.fixture(params=SIZES, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(*request.param)
    yield made
    made.close()


def test_what_arrived_verifies_however_both_sides_divide_the_heads_and_any_flip_on_any_rank_does_not(
    pair: Pair,
) -> None:
    pair.verify()
    whole = Instance(Ranks(FakeFabric(), "w", layout_of(HEADS, 1)), is_decode=False)
    whole.ranks.pools[0].fill()
    assert (pair.expected.sums == whole.sums.sums(LAYERS, SRC_PAGES)).all(), "every head counts once"
    whole.close()
    for rank, pool in enumerate(pair.d.ranks.pools):
        region, position, head = rank % (2 * NUM_LAYERS), rank % 3, rank % len(pool.heads)
        pool.kv[region, DST_PAGES[position], head, 5] ^= 1 << 30
        with pytest.raises(Integrity, match=rf"1 of 3 verified KV pages \(pages {position} of"):
            pair.verify()
        pool.kv[region, DST_PAGES[position], head, 5] ^= 1 << 30
    pair.verify()


def test_heads_that_changed_places_between_ranks_are_found() -> None:
    pair = Pair(1, 2)
    first, second = pair.d.ranks.pools
    mine, theirs = first.kv[0, DST_PAGES[1], 0].copy(), second.kv[0, DST_PAGES[1], 0].copy()
    first.kv[0, DST_PAGES[1], 0], second.kv[0, DST_PAGES[1], 0] = theirs, mine
    with pytest.raises(Integrity, match="pages 1 of"):
        pair.verify()
    pair.close()


def test_a_follower_that_cannot_sum_up_is_a_failed_transfer_that_names_the_rank() -> None:
    deaf = Instance(Ranks(FakeFabric(), "d", layout_of(HEADS, 2)), is_decode=True, deaf=True)
    with pytest.raises(TransferFailed, match="TP rank 1: TP rank 1 was not set up for verify_kv"):
        deaf.sums.sums(LAYERS, DST_PAGES)
    deaf.close()


def test_a_manager_that_must_verify_but_cannot_says_so_at_once() -> None:
    ranks = Ranks(FakeFabric(), "d", layout_of(HEADS, 1))
    pool = ranks.pools[0]
    with pytest.raises(ConfigError, match="verify_kv all without a way"):
        KVManager(
            Role.DECODE,
            KVManagerConfig(0, 1, "h", 1, ranks.layout, verify_kv="all"),
            RoleParts(
                memory=pool,
                aux=None,  # type: ignore[arg-type]
                transports=list(ranks.transports),
                link=lambda *frame: None,
                wake=lambda: None,
                clock=None,  # type: ignore[arg-type]
            ),
        )
    assert np.all(pool.kv == -1)
