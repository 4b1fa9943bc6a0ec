"""Checksums of the pages that a request leaves: which pages are summed, and what the first difference shows."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import pytest
from numpy.typing import NDArray

from chitu.cache_manager import PagedKVCacheManager
from chitu.client.verify.pages import UNKNOWN_LAYER, Place, damage_of, first_unlike
from chitu.client.verify.parity import Judgement
from chitu.client.verify.probe import CheckedRequest, MovedSums, Served
from chitu.client.verify.report import FORCED, Judged, wrong_pages
from chitu.instance.page_sums import MAX_SUMMED_BYTES, FinishedPages
from chitu.instance.sequences import Sequence, SequenceState
from chitu.protocol import KVLayout, SamplingParams, pack_i32

LAYOUT = KVLayout("hash", 2, 2, 16, 4, "float32", 500)
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
    sequence = Sequence(ROOM, "r", 0, 0.0, pack_i32(range(num_prompt)), sampling, state=state)
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
    layout = KVLayout("hash", num_layers, 2, 16, 4, "float32", 500)
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
    wide = KVLayout("hash", 2, 2, 16, 4, "float32", 500, tp_size=2)
    assert damage_of(served(["abc", "def"], ["abc", "def"], ["XX", "XX"]), wide) is None
    assert damage_of(served(["abc", "def"], ["abc", "dXf"]), wide) == Place(1, 1, True, "transfer")


def judged(pair: tuple[str, str], sums: str, kind: str = FORCED, wrong: bool = False) -> Judged:
    served = Served(*pair, 9, 3, 0, 0, 1, 0.1, sums)
    return Judged(CheckedRequest(0, served=served), served, kind, Judgement("wrong" if wrong else "same"))


def test_a_wrong_pair_is_compared_with_right_ones_of_its_layout_else_with_the_engine() -> None:
    right, broken, wide = hexed("ab", "cd"), hexed("ab", "cX"), hexed("YY", "YY")
    layouts = {name: LAYOUT for name in ("D0", "D1")}
    layouts["D2"] = KVLayout("hash", 2, 2, 16, 4, "float32", 500, tp_size=2)
    bad = [judged(("P0", "D1"), broken), judged(("P0", "D1"), "", "greedy", wrong=True)]
    found = wrong_pages([judged(("P0", "D0"), right), judged(("P0", "D2"), wide), *bad], layouts, {}, None)
    assert [(one.pair, one.place) for one in found] == [("P0-D1", Place(1, 1, True))]
    assert wrong_pages([judged(("P0", "D2"), wide), *bad], layouts, {0: right}, layouts["D2"]) == []
    (alone,) = wrong_pages([judged(("P0", "D2"), wide), *bad], layouts, {0: right}, LAYOUT)
    assert alone.place == Place(1, 1, True)
    assert wrong_pages([judged(("P0", "D0"), right), judged(("P0", "D1"), broken)], layouts, {}, None) == [], (
        "sums accuse nobody"
    )
