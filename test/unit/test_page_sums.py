"""Checksums of the pages that a request leaves: which pages are summed, and what the first difference shows."""

from __future__ import annotations

from collections.abc import Sequence as Values

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.tensor_parallel import kv_heads_of
from chitu.errors import ConfigError, Integrity
from chitu.instance.page_sums import MAX_SUMMED_BYTES, FinishedPages
from chitu.instance.sequences import Sequence, SequenceState, SequenceTimes
from chitu.kv_cache.checksum import HostPageSums, head_copies, page_weights
from chitu.kv_transfer.layout import (
    SAMPLE_DIVISOR,
    RoomSums,
    VerifyKV,
    choose_pages,
    compare,
    read_sums,
)
from chitu.protocol import KVLayout, KVSums, RequestHead, SamplingParams, pack_i32
from chitu.tools.verify.parity import UNKNOWN_LAYER, Judgement, Place, damage_of, first_unlike
from chitu.tools.verify.probe import CheckedRequest, MovedSums, Served
from chitu.tools.verify.report import FORCED, Judged, wrong_pages

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 4, "float32", 500)
ROOM = b"r" * 16


class NamedSums:
    """Page sums that name the page: the sum contains its layer and its number."""

    def sums(self, layers: range, pages: Values[int]) -> NDArray[np.int64]:
        (layer,) = layers
        return np.asarray([1000 * layer + page for page in pages], np.int64)


def sums_of(
    num_prompt: int,
    num_emitted: int,
    layout: KVLayout = LAYOUT,
    page_sums: bool = True,
    state: SequenceState = SequenceState.RUNNING,
) -> list[list[int]]:
    cache = PagedKVCacheManager(64, layout.page_size)
    cache.reserve(ROOM, num_prompt + num_emitted)
    sampling = SamplingParams(max_tokens=num_emitted, page_sums=page_sums)
    sequence = Sequence(
        RequestHead(ROOM, "r", pack_i32(range(num_prompt))), 0, SequenceTimes(0.0), sampling, state=state
    )
    sequence.emitted.extend([7] * num_emitted)
    data = FinishedPages(NamedSums(), cache, layout).sums_of(sequence)
    return np.frombuffer(data, "<i8").reshape(layout.num_layers, -1).tolist() if data else []


def test_full_pages_are_summed_by_layer_and_the_newest_token_is_in_none() -> None:
    assert sums_of(5, 4) == [[0, 1], [1000, 1001]], "eight tokens have K and V"
    assert sums_of(5, 3) == [[0], [1000]]
    assert sums_of(2, 2) == []
    assert sums_of(9, 1, page_sums=False) == []
    assert sums_of(9, 1, state=SequenceState.TRANSFER) == [], "P may still write"


@pytest.mark.parametrize("pages", [3, 2])
def test_no_more_is_summed_than_the_bound(pages: int) -> None:
    """The layers are so large that three pages just fit the bound, or slightly exceed it."""
    num_layers = MAX_SUMMED_BYTES // (3 * LAYOUT.bytes_per_page // LAYOUT.num_layers) + (pages == 2)
    layout = KVLayout.uniform("hash", num_layers, 2, 16, 4, "float32", 500)
    found = sums_of(40, 1, layout)
    assert len(found) == num_layers and {len(layer) for layer in found} == {pages}


def hexed(*layers: str) -> str:
    """Return sums in hex, one page for each character."""
    return "".join(f"{ord(page):016x}" for layer in layers for page in layer)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (hexed("abc", "def", "ghi"), None),
        (hexed("abc", "dXf", "ghi"), Place(1, 1, True)),
        (hexed("abc", "dXf", "XXX"), Place(2, 0, True)),
        (hexed("abc", "XXX", "XXX"), Place(1, 0, False)),
        (hexed("abX", "deX", "ghX"), Place(0, 2, False)),
        (hexed("ab", "dX", "gh"), Place(1, 1, True)),  # the lengths differ: only pages that both have count
        ("", None),
        ("12", None),
    ],
)
def test_the_first_place_is_that_of_the_first_page(wrong: str, place: Place | None) -> None:
    right = hexed("abc", "def", "ghi")
    assert first_unlike(wrong, [right, right], 3) == place


def test_where_the_right_ones_differ_a_sum_tells_nothing() -> None:
    rounded = hexed("aYc", "def")
    assert first_unlike(hexed("aXc", "deX"), [hexed("abc", "def"), rounded], 2) == Place(1, 2, True)
    assert first_unlike(hexed("aXc", "def"), [hexed("abc", "def"), rounded], 2) is None
    assert first_unlike(hexed("aXc", "def"), [], 2) is None


def served(sent: list[str], landed: list[str], left: list[str] | None = None, first_page: int = 0) -> Served:
    """Return a request of 9 tokens, three pages of four. Checksums are given by layer, one character a page."""
    moved = MovedSums(first_page, len(sent), hexed(*sent), hexed(*landed))
    return Served("P0", "D0", 9, 3, 0, 0, 1, 0.1, hexed(*(left or [])), moved)


@pytest.mark.parametrize(
    ("one", "damage"),
    [
        (served(["abc", "def"], ["abc", "def"], ["ab", "de"]), None),
        (
            served(["abc", "def"], ["abX", "deX"], ["ab", "de"]),
            Place(0, 2, False, "transfer"),
        ),  # the last one is not full
        (served(["abc", "def"], ["abc", "dXX"], ["ab", "de"]), Place(1, 1, True, "transfer", 2)),
        (served(["abc", "def"], ["abc", "def"], ["ab", "dX"]), Place(1, 1, True, "memory")),
        (served(["abc", "def"], ["abc", "def"], ["abY", "deZ"]), None),  # D filled the last page
        (served(["bc", "ef"], ["bc", "Xf"], ["ab", "de"], 1), Place(1, 1, True, "transfer")),  # page 0 was cached
        (served(["bc", "ef"], ["bc", "ef"], ["ab", "dX"], 1), Place(1, 1, True, "memory")),
        (served(["abc"], ["aXc"], ["ab", "de"]), Place(UNKNOWN_LAYER, 1, False, "transfer")),  # one for all layers
        (served(["abc", "def"], ["abc", "def"]), None),
        (Served("P0", "D0", 9, 3, 0, 0, 1, 0.1), None),
    ],
)
def test_what_is_not_on_d_as_p_wrote_it_is_damage_whatever_the_answer(one: Served, damage: Place | None) -> None:
    found = damage_of(one, LAYOUT)
    assert found == damage
    if found is not None:
        assert f"page {found.page}" in found.says and ("layer" in found.says) == (found.layer != UNKNOWN_LAYER)


def test_with_several_ranks_the_sums_of_the_end_cover_one_and_are_not_compared() -> None:
    wide = KVLayout.uniform("hash", 2, 2, 16, 4, "float32", 500, tp_size=2)
    assert damage_of(served(["abc", "def"], ["abc", "def"], ["XX", "XX"]), wide) is None
    assert damage_of(served(["abc", "def"], ["abc", "dXf"]), wide) == Place(1, 1, True, "transfer")


def judged(pair: tuple[str, str], sums: str, kind: str = FORCED, wrong: bool = False) -> Judged:
    served = Served(*pair, 9, 3, 0, 0, 1, 0.1, sums)
    return Judged(CheckedRequest(0, served=served), served, kind, Judgement("wrong" if wrong else "same"))


def test_a_wrong_pair_is_compared_with_right_ones_of_its_layout_else_with_the_engine() -> None:
    right, broken, wide = hexed("ab", "cd"), hexed("ab", "cX"), hexed("YY", "YY")
    layouts = {name: LAYOUT for name in ("D0", "D1")}
    layouts["D2"] = KVLayout.uniform("hash", 2, 2, 16, 4, "float32", 500, tp_size=2)
    bad = [judged(("P0", "D1"), broken), judged(("P0", "D1"), "", "greedy", wrong=True)]
    found = wrong_pages([judged(("P0", "D0"), right), judged(("P0", "D2"), wide), *bad], layouts, {}, None)
    assert [(one.pair, one.place) for one in found] == [("P0-D1", Place(1, 1, True))]
    assert wrong_pages([judged(("P0", "D2"), wide), *bad], layouts, {0: right}, layouts["D2"]) == []
    (alone,) = wrong_pages([judged(("P0", "D2"), wide), *bad], layouts, {0: right}, LAYOUT)
    assert alone.place == Place(1, 1, True)
    assert wrong_pages([judged(("P0", "D0"), right), judged(("P0", "D1"), broken)], layouts, {}, None) == [], (
        "sums accuse nobody"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The checksum of KV pages: what it detects, that it adds up over layers and ranks, and which pages it covers.


LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 3, 4, 8, 4, 10
ALL = range(LAYERS)
SUMMED_LAYOUT = KVLayout.uniform("m", LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, "float32", 16)


class Pool:
    """A pool of random `bytes`: `[regions, pages, bytes of a page]`."""

    def __init__(self) -> None:
        page_bytes = HEADS * PAGE_SIZE * HEAD_DIM * 4
        self.bytes = np.random.default_rng(1).integers(0, 256, (2 * LAYERS, PAGES, page_bytes), dtype=np.uint8)
        self.host = device_sums_of(self.bytes)

    def sums(self) -> np.ndarray:
        return self.host.sums(ALL, range(PAGES))


def device_sums_of(
    regions: np.ndarray, layout: KVLayout = SUMMED_LAYOUT, tp_rank: int = 0, counts_copies: bool = True
) -> HostPageSums:
    bases = [int(region.ctypes.data) for region in regions]
    return HostPageSums(layout, tp_rank, bases, PAGES, [regions.shape[2]] * len(bases), counts_copies)


def test_every_flipped_byte_of_a_page_changes_the_sum_of_that_page_only() -> None:
    pool = Pool()
    before, arena = pool.sums(), pool.bytes
    for region in range(2 * LAYERS):
        for byte in range(arena.shape[2]):
            arena[region, 7, byte] ^= 1 << (byte % 8)
            changed = np.flatnonzero(pool.sums() != before).tolist()
            arena[region, 7, byte] ^= 1 << (byte % 8)
            assert changed == [7], (region, byte)


@given(st.data())
def test_any_set_of_flipped_sign_bits_is_found(data: st.DataObject) -> None:
    """Top bits are where a sum modulo 2**64 is weakest: two of them would cancel out in a sum of 64 bit words."""
    pool = Pool()
    before, arena = pool.sums(), pool.bytes
    tops = st.tuples(st.integers(0, 2 * LAYERS - 1), st.integers(0, arena.shape[2] // 4 - 1))
    for region, word in data.draw(st.sets(tops, min_size=1, max_size=6)):
        arena[region, 3, 4 * word + 3] ^= 0x80
    assert pool.sums()[3] != before[3]


def test_pages_regions_and_heads_that_changed_places_and_zeroed_ones_are_found() -> None:
    def swap_pages(arena: np.ndarray) -> None:
        arena[:, [2, 5]] = arena[:, [5, 2]]

    def swap_k_and_v(arena: np.ndarray) -> None:
        arena[[0, 1], 2] = arena[[1, 0], 2]

    def swap_layers(arena: np.ndarray) -> None:
        arena[[0, 2], 2] = arena[[2, 0], 2]

    def swap_heads(arena: np.ndarray) -> None:
        heads = arena.reshape(2 * LAYERS, PAGES, HEADS, -1)
        heads[:, 2, [0, 1]] = heads[:, 2, [1, 0]]

    def zero(arena: np.ndarray) -> None:
        arena[3, 2] = 0

    def swap_tokens(arena: np.ndarray) -> None:
        tokens = arena.reshape(2 * LAYERS, PAGES, HEADS, PAGE_SIZE, -1)
        tokens[1, 2, 0, [0, 1]] = tokens[1, 2, 0, [1, 0]]

    for harm in (swap_pages, swap_k_and_v, swap_layers, swap_heads, zero, swap_tokens):
        pool = Pool()
        before = pool.sums()
        harm(pool.bytes)
        assert pool.sums()[2] != before[2], harm.__name__


def test_layers_add_up_and_pages_come_in_the_order_asked_for() -> None:
    pool = Pool()
    whole, pages = pool.host, [9, 0, 4]
    by_layer = sum(whole.sums(range(layer, layer + 1), pages) for layer in ALL)
    assert (whole.sums(ALL, pages) == by_layer).all()
    assert (whole.sums(ALL, pages) == pool.sums()[pages]).all()
    assert len(whole.sums(ALL, [])) == 0


def test_a_chunk_of_pages_is_as_good_as_all_at_once() -> None:
    pool = Pool()
    chunked = device_sums_of(pool.bytes)
    chunked._chunk_pages = 3
    assert (chunked.sums(ALL, range(PAGES)) == pool.sums()).all()


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_add_up_to_the_whole_however_heads_are_divided(tp_size: int) -> None:
    """With more ranks than heads every head has several copies: P counts each head once, D counts every copy."""
    pool = Pool()
    heads = pool.bytes.reshape(2 * LAYERS, PAGES, HEADS, -1)
    cut = msgspec.structs.replace(SUMMED_LAYOUT, tp_size=tp_size)
    per_rank, once = [], []
    for rank in range(tp_size):
        mine = kv_heads_of(HEADS, tp_size, rank)
        shard = np.ascontiguousarray(heads[:, :, mine.start : mine.stop]).reshape(2 * LAYERS, PAGES, -1)
        per_rank.append(device_sums_of(shard, cut, rank).sums(ALL, range(PAGES)))
        once.append(device_sums_of(shard, cut, rank, counts_copies=False).sums(ALL, range(PAGES)))
    copies = head_copies(cut)
    assert (np.sum(once, axis=0) == pool.sums()).all()
    assert (np.sum(per_rank, axis=0) == copies * pool.sums()).all()


def test_the_weights_are_fixed_for_ever_and_odd() -> None:
    """P and D may be different builds, so a change of the formula needs a new protocol version."""
    weights = page_weights(SUMMED_LAYOUT, 0, [64] * (2 * LAYERS))
    assert (weights[5].low_W[0], weights[5].high_W[0], weights[5].salt_H[3]) == (GOLDEN_LOW, GOLDEN_HIGH, GOLDEN_SALT)
    assert all((part & 1).all() for region in weights for part in region)
    with pytest.raises(ConfigError, match="multiple of 8"):
        page_weights(SUMMED_LAYOUT, 0, [12] * (2 * LAYERS))


GOLDEN_LOW, GOLDEN_HIGH, GOLDEN_SALT = 1816945705467351923, 324473359974991427, -4727467792216840533


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_all_pages_or_a_sample_that_nobody_can_foretell_with_both_ends() -> None:
    assert choose_pages("off", 0, 9) == [] == choose_pages("all", 3, 3) == choose_pages("sample", 3, 3)
    assert choose_pages("all", 2, 6) == [2, 3, 4, 5]
    assert choose_pages("sample", 4, 5) == [4]
    samples = [choose_pages("sample", 2, 162) for _ in range(200)]
    for sample in samples:
        assert sample == sorted(set(sample)) and {2, 161} <= set(sample)
        assert len(sample) <= 160 // SAMPLE_DIVISOR + 2
    assert len({tuple(sample) for sample in samples}) > 190
    assert set().union(*samples) == set(range(2, 162))


def test_sums_survive_the_wire_and_name_the_pages_that_differ() -> None:
    room = RoomSums.of([0, 2, 5], "shm")
    room.sums += np.array([-1, 1 << 62, 7])
    assert room.within(1, 5) == slice(1, 2) and room.within(6, 9) == slice(3, 3)
    read = read_sums(room.message(), "sample", 0, 6, 3)
    assert (read.positions.tolist(), read.sums.tolist(), read.transport) == ([0, 2, 5], [[-1, 1 << 62, 7]], "shm")
    compare(read, room.sums, 1)
    compare(read, 2 * room.sums, 2)
    with pytest.raises(Integrity, match=r"1 of 3 verified KV pages \(pages 2 .* over shm"):
        compare(read, room.sums ^ np.array([0, 1, 0]), 1)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (None, "no KV checksums"),
        (KVSums(b"123", b"", ""), "not a multiple of 4"),
        (KVSums(bytes(4), bytes(9), ""), "9 bytes"),
        (RoomSums.of([0, 1, 2], "").message(), "do not cover"),
        (RoomSums.of([1, 2, 3], "").message(), "do not cover"),
        (RoomSums.of([0, 3, 3], "").message(), "do not cover"),
        (RoomSums.of([0, 3, 2, 1], "").message(), "do not cover"),
        (RoomSums.of([0, 1, 2, 3, 4], "").message(), "do not cover"),
        (RoomSums.of([-1, 0, 1, 2, 3], "").message(), "do not cover"),
        (RoomSums.of([], "").message(), "do not cover"),
    ],
)
def test_sums_that_do_not_cover_what_must_be_verified_are_refused(message: KVSums | None, text: str) -> None:
    modes: list[VerifyKV] = ["all", "sample"]
    for verify_kv in modes:
        with pytest.raises(Integrity, match=text):
            read_sums(message, verify_kv, 0, 4, 3)


def test_a_sample_does_not_do_where_all_are_wanted() -> None:
    message = RoomSums.of([0, 3], "").message()
    assert read_sums(message, "sample", 0, 4, 3).positions.tolist() == [0, 3]
    with pytest.raises(Integrity, match="do not cover"):
        read_sums(message, "all", 0, 4, 3)
