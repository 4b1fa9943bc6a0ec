"""A broken page arrives as zeros, every other byte as it was sent, and the log warns that faults are on."""

from __future__ import annotations

import logging
import random
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.fake_transport import FakeFabric, FakeTransport, Fault, FaultKind
from support.faults import ENVIRONMENT, FaultConfig, FaultyTransport, split_at_pages, with_faults

from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.shard_writer import join, pair_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.transport import CopyList, Transport, WriteError
from chitu.protocol import RankMemory

LAYERS, NUM_PAGES, PAGE_BYTES, AUX_BYTES, AUX_SLOTS = 3, 12, 48, 40, 2
PAGED_BYTES = 2 * LAYERS * NUM_PAGES * PAGE_BYTES


class Memory:
    """A pool's addresses over a numpy array; `pages` is `[region, page, byte]`."""

    def __init__(self, value: int | None) -> None:
        self.arena_bytes = PAGED_BYTES + AUX_SLOTS * AUX_BYTES
        if value is None:  # never 0, so a zero that arrives is the fault's
            self.arena = np.random.default_rng(3).integers(1, 256, self.arena_bytes, np.uint8)
        else:
            self.arena = np.full(self.arena_bytes, value, np.uint8)
        self.arena_base = int(self.arena.ctypes.data)
        self.region_bases = tuple(self.arena_base + r * NUM_PAGES * PAGE_BYTES for r in range(2 * LAYERS))
        self.page_bytes, self.num_pages = (PAGE_BYTES,) * (2 * LAYERS), NUM_PAGES
        self.aux_base = self.arena_base + PAGED_BYTES
        self.aux_row_bytes, self.num_aux_slots = AUX_BYTES, AUX_SLOTS
        self.state_base = self.state_row_bytes = self.num_state_slots = 0

    @property
    def pages(self) -> NDArray[np.uint8]:
        return self.arena[:PAGED_BYTES].reshape(2 * LAYERS, NUM_PAGES, PAGE_BYTES)


class Pair:
    """A P whose transport has these faults, and a D whose memory is all 255."""

    def __init__(self, faults: FaultConfig) -> None:
        self.fabric = FakeFabric()
        self.source, self.target = Memory(None), Memory(255)
        self.p: Transport = FaultyTransport(FakeTransport(self.fabric, "P"), faults)
        d = FakeTransport(self.fabric, "D")
        self.p.register(self.source.arena_base, self.source.arena_bytes)
        d.register(self.target.arena_base, self.target.arena_bytes)
        self.memory: RankMemory = rank_memory(self.target, 0, [d.local_session()])
        self.peer = self.p.connect(self.memory, self.memory.sessions[0])

    def write_pages(self, src: list[int], dst: list[int], layers: range = range(LAYERS)) -> CopyList:
        copies = plan_page_copies(
            pair_regions(self.source, self.memory), src, dst, range(2 * layers.start, 2 * layers.stop)
        )
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


def test_a_neighbours_page_arrives_in_place_of_the_right_one() -> None:
    """The page behind the last one of our own memory is none, so the one before it comes."""
    pair = Pair(FaultConfig(neighbour_page=5))
    pair.write_pages([1, 2, 3], [4, 5, 6])
    for src, dst in ((1, 4), (3, 5), (3, 6)):
        assert np.array_equal(pair.target.pages[:, dst], pair.source.pages[:, src])
    last = NUM_PAGES - 1
    pair.write_pages([last], [5])
    expected = [*(pair.source.pages[region + 1, 0] for region in range(2 * LAYERS - 1))]
    assert np.array_equal(pair.target.pages[:-1, 5], expected)
    both = Pair(FaultConfig(neighbour_page=5, zero_page=4))
    both.write_pages([1, 2, 3], [4, 5, 6])
    assert not both.target.pages[:, 4].any() and np.array_equal(both.target.pages[:, 5], both.source.pages[:, 3])


@pytest.mark.parametrize("zero_page", [4, 7])
def test_the_broken_page_may_be_the_first_or_the_last_of_a_run(zero_page: int) -> None:
    pair = Pair(FaultConfig(zero_page=zero_page))
    pair.write_pages([1, 2, 3, 4], [4, 5, 6, 7])
    for src, dst in ((1, 4), (2, 5), (3, 6), (4, 7)):
        expected = np.zeros_like(pair.source.pages[:, src]) if dst == zero_page else pair.source.pages[:, src]
        assert np.array_equal(pair.target.pages[:, dst], expected)


def test_scattered_pages_of_some_layers_and_the_aux_row_in_one_write() -> None:
    pair = Pair(FaultConfig(zero_page=0))
    pages = plan_page_copies(pair_regions(pair.source, pair.memory), [9, 2, 3], [3, 0, 1], range(2, 6))
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
    assert not caught.value.fenced and not pair.p.fence(pair.peer, 1.0)
    assert pair.fabric.release_late_writes() == 1
    assert pair.p.fence(pair.peer, 1.0) and not pair.target.pages[:, 5].any()


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_split_has_the_same_bytes_and_no_piece_crosses_a_border(seed: int, page_bytes: int) -> None:
    rng = random.Random(seed)
    bases = sorted(rng.sample(range(0, 20), rng.randrange(4)))
    bases = [page_bytes * base for base in bases]
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(5))]
    copies = CopyList([1000 * i for i in range(len(lengths))], [rng.randrange(200) for _ in lengths], lengths)
    broken = {base + i for base in bases for i in range(page_bytes)}
    outside, inside = split_at_pages(copies, [range(base, base + page_bytes) for base in bases])
    assert all(length <= page_bytes for length in inside.length)
    assert not {address for _, address in moves(outside)} & broken
    assert {address for _, address in moves(inside)} <= broken
    assert sorted(moves(outside) + moves(inside)) == sorted(moves(copies))


def moves(copies: CopyList) -> list[tuple[int, int]]:
    """Return `(source, destination)` of every byte."""
    return [
        (src + i, dst + i)
        for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True)
        for i in range(length)
    ]


def test_a_process_with_faults_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain: Transport = FakeTransport(FakeFabric(), "P")
    assert with_faults([plain]) == [plain] and caplog.text == ""
    monkeypatch.setenv(ENVIRONMENT, '{"zero_page": 0}')
    (faulty,) = with_faults([plain])
    assert isinstance(faulty, FaultyTransport) and faulty.name == plain.name
    assert "FAULTS ARE ON (zero_page=0)" in caplog.text


# ------------------------------------------------------------------------------------------ flipped bytes, slow writes


def flipped(pair: Pair, src: list[int], dst: list[int]) -> list[tuple[int, int, int]]:
    """Return (region, page, byte) of every byte that did not arrive as it was sent."""
    difference = pair.source.pages[:, src] ^ pair.target.pages[:, dst]
    assert set(np.unique(difference)) <= {0, 0xFF}
    return [(int(r), dst[p], int(b)) for r, p, b in np.argwhere(difference)]


def test_every_nth_kv_write_has_one_byte_flipped_that_matters_and_its_source_stays() -> None:
    pair = Pair(FaultConfig(flip_byte_every=3))
    before = pair.source.arena.copy()
    seen = []
    for turn in range(1, 13):
        pair.write_pages([1, 2, 4], [4, 5, 9])
        found = flipped(pair, [1, 2, 4], [4, 5, 9])
        assert len(found) == (turn % 3 == 0)
        seen += found
    assert np.array_equal(pair.source.arena, before)
    assert len(set(seen)) > 1 and all(byte % 4 == 3 for _, _, byte in seen)
    assert (pair.target.pages[:, [0, 1, 2, 3, 6, 7, 8, 10, 11]] == 255).all()


def test_logits_rows_are_counted_and_flipped_apart_from_kv() -> None:
    pair = AuxPair(FaultConfig(flip_logits_every=2))
    pair.write_pages([1], [4])
    assert not flipped(pair, [1], [4])
    differences = [pair.write_aux() for _ in range(4)]
    assert [len(difference) for difference in differences] == [0, 1, 0, 1]
    pair = AuxPair(FaultConfig(flip_byte_every=1))
    assert not len(pair.write_aux())
    pair.write_pages([1], [4])
    assert len(flipped(pair, [1], [4])) == 1


class AuxPair(Pair):
    """A pair with aux rows of 64 bytes of header, 128 of logits and 64 of padding."""

    def __init__(self, faults: FaultConfig) -> None:
        super().__init__(faults)
        self.rows = [np.random.default_rng(side).integers(1, 256, 256, np.uint8) for side in (1, 2)]
        mine, theirs = (int(row.ctypes.data) for row in self.rows)
        self.p.register(mine, 256)
        self.fabric._endpoints["D"].ranges.append((theirs, 256))
        self.memory = msgspec.structs.replace(self.memory, aux_base=theirs, aux_row_bytes=256, num_aux_slots=1)
        self.peer = self.p.connect(self.memory, self.memory.sessions[0])
        self.row = CopyList([mine], [theirs], [256])

    def write_aux(self) -> list[int]:
        """Write the row and return which of its bytes arrived flipped: bytes of the logits, never of header or
        padding."""
        self.p.write(self.peer, self.row, 1.0)
        wrong = np.flatnonzero(self.rows[0] != self.rows[1]).tolist()
        assert all(64 <= byte < 192 and byte % 4 == 3 for byte in wrong)
        return wrong


def test_a_stalled_write_fails_at_its_timeout_fenced_and_nothing_arrives() -> None:
    pair = Pair(FaultConfig(stall_every=2))
    pair.write_pages([1], [4])
    copies = plan_page_copies(pair_regions(pair.source, pair.memory), [2], [5], range(2 * LAYERS))
    with pytest.raises(WriteError, match=r"the write to D was stalled for 0\.0 s") as caught:
        pair.p.write(pair.peer, copies, 0.01)
    assert caught.value.fenced and (pair.target.pages[:, 5] == 255).all()
    pair.p.write(pair.peer, copies, 1.0)
    assert np.array_equal(pair.target.pages[:, 5], pair.source.pages[:, 2])


def test_a_delayed_write_arrives_later_and_one_past_its_timeout_fails() -> None:
    pair = Pair(FaultConfig(delay_ms=20.0))
    begun_s = time.monotonic()
    pair.write_pages([1], [4])
    assert time.monotonic() - begun_s >= 0.02
    assert np.array_equal(pair.target.pages[:, 4], pair.source.pages[:, 1])
    copies = plan_page_copies(pair_regions(pair.source, pair.memory), [2], [5], range(2 * LAYERS))
    with pytest.raises(WriteError, match="was delayed"):
        pair.p.write(pair.peer, copies, 0.005)
    assert (pair.target.pages[:, 5] == 255).all()


def test_a_transport_that_is_closed_lets_go_of_a_stalled_write() -> None:
    pair = Pair(FaultConfig(stall_every=1))
    copies = plan_page_copies(pair_regions(pair.source, pair.memory), [2], [5], range(2 * LAYERS))
    failures: list[WriteError] = []

    def write() -> None:
        try:
            pair.p.write(pair.peer, copies, 60.0)
        except WriteError as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    pair.p.close()
    thread.join(10)
    assert len(failures) == 1
