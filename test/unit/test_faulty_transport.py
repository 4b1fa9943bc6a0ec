"""A broken page arrives as zeros, every other byte as it was sent, and everybody is told that faults are on."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from chitu.config.load import load_topology
from chitu.config.schema import FaultConfig, PDDisaggregationConfig
from chitu.config.topology import warn_of_faults
from chitu.kv_transfer.fake.transfer_engine import FakeFabric, FakeTransport, Fault, FaultKind
from chitu.kv_transfer.faulty.transfer_engine import FaultyTransport, split_at_pages
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.plan import join, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.select import choose, open_transports
from chitu.kv_transfer.transport import CopyList, Transport, WriteError
from chitu.messages import RankMemory

LAYERS, NUM_PAGES, PAGE_BYTES, AUX_BYTES, AUX_SLOTS = 3, 12, 48, 40, 2
PAGED_BYTES = 2 * LAYERS * NUM_PAGES * PAGE_BYTES


class Memory:
    """A pool's addresses over a numpy array; pages as `[region, page, byte]`."""

    def __init__(self, value: int | None) -> None:
        self.arena_bytes = PAGED_BYTES + AUX_SLOTS * AUX_BYTES
        if value is None:  # never 0, so a zero that arrives is the fault's
            self.arena = np.random.default_rng(3).integers(1, 256, self.arena_bytes, np.uint8)
        else:
            self.arena = np.full(self.arena_bytes, value, np.uint8)
        self.arena_base = int(self.arena.ctypes.data)
        self.region_bases = tuple(self.arena_base + r * NUM_PAGES * PAGE_BYTES for r in range(2 * LAYERS))
        self.page_bytes, self.num_pages = PAGE_BYTES, NUM_PAGES
        self.aux_base = self.arena_base + PAGED_BYTES
        self.aux_row_bytes, self.num_aux_slots = AUX_BYTES, AUX_SLOTS

    @property
    def pages(self) -> NDArray[np.uint8]:
        return self.arena[:PAGED_BYTES].reshape(2 * LAYERS, NUM_PAGES, PAGE_BYTES)


class Pair:
    """P, whose transport has these faults, and a D whose memory is all 255."""

    def __init__(self, faults: FaultConfig) -> None:
        self.fabric = FakeFabric()
        self.source, self.target = Memory(None), Memory(255)
        self.p: Transport = FaultyTransport(FakeTransport(self.fabric, "P"), faults)
        d = FakeTransport(self.fabric, "D")
        self.p.register(self.source.arena_base, self.source.arena_bytes)
        d.register(self.target.arena_base, self.target.arena_bytes)
        self.memory: RankMemory = rank_memory(self.target, 0, [d.local_session()])
        transport, session = choose([self.p], self.memory)
        self.peer = transport.connect(self.memory, session)

    def write_pages(self, src: list[int], dst: list[int], layers: range = range(LAYERS)) -> CopyList:
        copies = plan_page_copies(self.source, self.memory, src, dst, layers)
        self.p.write(self.peer, copies, 1.0)
        return copies


def test_a_run_across_the_broken_page_leaves_zeros_there_and_nowhere_else() -> None:
    pair = Pair(FaultConfig(zero_page=5))
    copies = pair.write_pages([1, 2, 3, 4], [4, 5, 6, 7])
    assert len(copies.src) == 2 * LAYERS, "one run a region, so the cut is the transport's own"
    assert not pair.target.pages[:, 5].any()
    for src, dst in ((1, 4), (3, 6), (4, 7)):
        assert np.array_equal(pair.target.pages[:, dst], pair.source.pages[:, src])
    assert (pair.target.pages[:, [0, 1, 2, 3, 8, 9, 10, 11]] == 255).all()


@pytest.mark.parametrize("zero_page", [4, 7])
def test_the_broken_page_may_be_the_first_or_the_last_of_a_run(zero_page: int) -> None:
    pair = Pair(FaultConfig(zero_page=zero_page))
    pair.write_pages([1, 2, 3, 4], [4, 5, 6, 7])
    for src, dst in ((1, 4), (2, 5), (3, 6), (4, 7)):
        expected = np.zeros_like(pair.source.pages[:, src]) if dst == zero_page else pair.source.pages[:, src]
        assert np.array_equal(pair.target.pages[:, dst], expected)


def test_scattered_pages_of_some_layers_and_the_aux_row_in_one_write() -> None:
    pair = Pair(FaultConfig(zero_page=0))
    pages = plan_page_copies(pair.source, pair.memory, [9, 2, 3], [3, 0, 1], range(1, 3))
    pair.p.write(pair.peer, join(pages, plan_aux_copy(pair.source, pair.memory, 1, 0)), 1.0)
    assert not pair.target.pages[2:, 0].any()
    assert np.array_equal(pair.target.pages[2:, [3, 1]], pair.source.pages[2:, [9, 3]])
    assert (pair.target.pages[:2] == 255).all(), "layer 0 was not sent"
    aux = pair.source.arena[PAGED_BYTES + AUX_BYTES :]
    assert np.array_equal(pair.target.arena[PAGED_BYTES : PAGED_BYTES + AUX_BYTES], aux)


def test_a_write_of_only_the_broken_page_travels_too() -> None:
    pair = Pair(FaultConfig(zero_page=6))
    moved: list[int] = []
    pair.fabric.on_write = lambda target, copies: moved.append(copies.nbytes)
    copies = pair.write_pages([2], [6])
    assert not pair.target.pages[:, 6].any()
    assert moved == [copies.nbytes], "as many bytes as a sound transport moves, in one write"


@pytest.mark.parametrize("zero_page", [None, 3, NUM_PAGES, 10**6])
def test_nothing_changes_where_the_page_is_not_written_or_does_not_exist(zero_page: int | None) -> None:
    pair = Pair(FaultConfig(zero_page=zero_page))
    pair.write_pages([0, 1, 2, 5], [4, 5, 6, 8])
    assert np.array_equal(pair.target.pages[:, [4, 5, 6, 8]], pair.source.pages[:, [0, 1, 2, 5]])
    assert (pair.target.pages[:, [0, 1, 2, 3, 7, 9, 10, 11]] == 255).all()
    assert pair.fabric.num_writes == 1


def test_a_page_that_the_peer_does_not_have_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Pair(FaultConfig(zero_page=NUM_PAGES))
    assert f"D has no page {NUM_PAGES}, only {NUM_PAGES}" in caplog.text


def test_a_failure_of_the_second_part_fails_the_write() -> None:
    pair = Pair(FaultConfig(zero_page=5))
    pair.fabric.on_write = lambda target, copies: (
        pair.fabric.inject(Fault(FaultKind.LATE)) if pair.fabric.num_writes == 2 else None
    )
    with pytest.raises(WriteError) as caught:
        pair.write_pages([1, 2], [4, 5])
    assert not caught.value.settled and not pair.p.settle(pair.peer, 1.0)
    assert pair.fabric.release_late_writes() == 1
    assert pair.p.settle(pair.peer, 1.0) and not pair.target.pages[:, 5].any()


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_split_has_the_same_bytes_and_no_piece_crosses_a_border(seed: int, page_bytes: int) -> None:
    rng = random.Random(seed)
    bases = sorted(rng.sample(range(0, 20), rng.randrange(4)))
    bases = [page_bytes * base for base in bases]
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(5))]
    copies = CopyList([1000 * i for i in range(len(lengths))], [rng.randrange(200) for _ in lengths], lengths)
    broken = {base + i for base in bases for i in range(page_bytes)}
    outside, inside = split_at_pages(copies, bases, page_bytes)
    assert all(length <= page_bytes for length in inside.length)
    assert not {address for _, address in moves(outside)} & broken
    assert {address for _, address in moves(inside)} <= broken
    assert sorted(moves(outside) + moves(inside)) == sorted(moves(copies))


def moves(copies: CopyList) -> list[tuple[int, int]]:
    """`(source, destination)` of every byte."""
    return [
        (src + i, dst + i)
        for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True)
        for i in range(length)
    ]


def test_faults_are_off_by_default_and_wrap_every_transport_when_on() -> None:
    (plain,) = open_transports(PDDisaggregationConfig(transport="shm"), "127.0.0.1")
    assert not isinstance(plain, FaultyTransport)
    config = PDDisaggregationConfig(transport="shm", faults=FaultConfig(zero_page=0))
    (faulty,) = open_transports(config, "127.0.0.1")
    assert isinstance(faulty, FaultyTransport) and faulty.name == plain.name
    for transport in (plain, faulty):
        transport.close()


def test_a_process_with_faults_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_faults(load_topology("pd_disagg_1p1d_local"))
        assert caplog.text == ""
        warn_of_faults(load_topology("pd_disagg_1p1d_local", ["dp_config.router.pd_disaggregation.faults.zero_page=0"]))
    assert "FAULTS ARE ON (zero_page=0)" in caplog.text
