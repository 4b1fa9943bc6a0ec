"""Page lists become the fewest copies, and nothing out of range becomes an address."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import BadFrame, IncompatibleLayout, TransferFailed
from chitu.kv_transfer.layout import check_compatible, check_rank_memory, rank_memory
from chitu.kv_transfer.shard_writer import join, layer_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.mapped import require_inside
from chitu.kv_transfer.transports.transport import CopyList, WriteError
from chitu.protocol import KVLayout, RankMemory, TransportSession

LAYOUT = KVLayout("m", num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype="float32", vocab_size=100)


@dataclasses.dataclass
class Memory:
    """A made-up pool: regions one after the other, aux rows last."""

    arena_base: int
    num_pages: int = 40
    num_layers: int = 2
    page_bytes: int = 256
    aux_row_bytes: int = 128
    num_aux_slots: int = 3

    @property
    def region_bases(self) -> tuple[int, ...]:
        return tuple(self.arena_base + r * self.num_pages * self.page_bytes for r in range(2 * self.num_layers))

    @property
    def aux_base(self) -> int:
        return self.arena_base + 2 * self.num_layers * self.num_pages * self.page_bytes

    @property
    def arena_bytes(self) -> int:
        return self.aux_base + self.num_aux_slots * self.aux_row_bytes - self.arena_base


SRC, DST = Memory(1 << 20), Memory(1 << 30, num_pages=60)


def bytes_of(copies: CopyList) -> list[tuple[int, int]]:
    """Return (source, destination) of every 256 byte page that the list moves, in order."""
    pairs = []
    for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True):
        assert length % 256 == 0 and length > 0
        pairs += [(src + offset, dst + offset) for offset in range(0, length, 256)]
    return pairs


def check_inside(copies: CopyList, src: Memory, dst: Memory) -> None:
    """Check the copies as each transport does before it writes."""
    columns = tuple(np.asarray(column, dtype=np.int64) for column in copies)
    require_inside("x", columns, (dst.arena_base, dst.arena_bytes), [(src.arena_base, src.arena_bytes)])  # type: ignore[arg-type]


page_lists = st.integers(0, 40).flatmap(
    lambda n: st.tuples(
        st.permutations(range(40)).map(lambda pages: pages[:n]), st.permutations(range(60)).map(lambda pages: pages[:n])
    )
)
sorted_page_lists = page_lists.map(lambda lists: (sorted(lists[0]), sorted(lists[1])))


@given(st.one_of(page_lists, sorted_page_lists), st.integers(0, 2), st.integers(0, 2))
def test_every_page_of_every_region_moves_once_in_the_fewest_copies(
    lists: tuple[list[int], list[int]], first: int, count: int
) -> None:
    src_pages, dst_pages = lists
    layers = range(first, min(2, first + count))
    copies = plan_page_copies(SRC, DST, src_pages, dst_pages, layers)
    expected = [
        (SRC.region_bases[r] + s * 256, DST.region_bases[r] + d * 256)
        for r in range(2 * layers.start, 2 * layers.stop)
        for s, d in zip(src_pages, dst_pages, strict=True)
    ]
    assert bytes_of(copies) == expected
    check_inside(copies, SRC, DST)
    per_region = len(copies.src) // max(1, len(layer_regions(layers)))
    breaks = sum(
        src_pages[i] != src_pages[i - 1] + 1 or dst_pages[i] != dst_pages[i - 1] + 1 for i in range(1, len(src_pages))
    )
    assert per_region == (breaks + 1 if src_pages and layers else 0)
    assert copies.nbytes == len(expected) * 256


def test_runs_break_where_either_side_breaks() -> None:
    copies = plan_page_copies(SRC, DST, [0, 1, 2, 3, 10], [5, 6, 7, 20, 21], range(1))
    assert list(copies.length) == [3 * 256, 256, 256] * 2
    assert list(copies.src)[:3] == [SRC.arena_base, SRC.arena_base + 3 * 256, SRC.arena_base + 10 * 256]


@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "error", "words"),
    [
        ([40], [0], TransferFailed, "source page 40 of 40"),
        ([-1], [0], TransferFailed, "source page -1 of 40"),
        ([0], [60], BadFrame, "destination page 60 of 60"),
        ([0], [-7], BadFrame, "destination page -7 of 60"),
        ([0], [1 << 70], BadFrame, "no page indices"),
        ([0, 1], [3], BadFrame, "2 source pages for 1 destination"),
        ([0, 1], [3, 3], BadFrame, "destination page 3 is listed twice"),
        ([2, 2], [3, 4], TransferFailed, "source page 2 is listed twice"),
    ],
)
def test_a_page_out_of_range_is_refused_with_its_value(
    src_pages: list[int], dst_pages: list[int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_page_copies(SRC, DST, src_pages, dst_pages, range(2))


def test_layers_and_page_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TransferFailed, match="layers 1 to 2"):
        plan_page_copies(SRC, DST, [0], [0], range(1, 3))
    with pytest.raises(TransferFailed, match="256 bytes here and 512"):
        plan_page_copies(SRC, Memory(1 << 30, page_bytes=512), [0], [0], range(1))


def test_aux_rows_are_one_copy_and_range_checked() -> None:
    copies = plan_aux_copy(SRC, DST, 2, 1)
    assert copies == CopyList((SRC.aux_base + 256,), (DST.aux_base + 128,), (128,))
    check_inside(copies, SRC, DST)
    with pytest.raises(TransferFailed, match="source aux slot 3 of 3"):
        plan_aux_copy(SRC, DST, 3, 0)
    with pytest.raises(BadFrame, match="destination aux slot -1 of 3"):
        plan_aux_copy(SRC, DST, 0, -1)


def test_joined_lists_keep_order() -> None:
    pages = plan_page_copies(SRC, DST, [1], [2], range(1))
    joined = join(pages, plan_aux_copy(SRC, DST, 0, 0))
    assert list(joined.src) == [*pages.src, SRC.aux_base] and joined.nbytes == 2 * 256 + 128


@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_that_leaves_an_arena_is_found(side: str, offset: int) -> None:
    src, dst = [SRC.arena_base, SRC.arena_base], [DST.arena_base, DST.arena_base]
    addresses, memory = (src, SRC) if side == "source" else (dst, DST)
    addresses[1] = memory.arena_base - 1 if offset < 0 else memory.arena_base + memory.arena_bytes - 7
    with pytest.raises(WriteError, match="copy 1 .*peer's arena" if side == "destination" else "a source lies outside"):
        check_inside(CopyList(src, dst, [8, 8]), SRC, DST)
    addresses[1] -= offset
    check_inside(CopyList(src, dst, [8, 8]), SRC, DST)


def test_pages_of_a_long_prompt_that_do_not_touch_are_a_piece_each_in_every_region() -> None:
    src, dst = Memory(1 << 30, 1000, 32, 16384), Memory(1 << 40, 1000, 32, 16384)
    src_pages, dst_pages = [7 * i % 1000 for i in range(100)], [11 * i % 1000 for i in range(100)]
    copies = plan_page_copies(src, dst, src_pages, dst_pages, range(32))
    check_inside(copies, src, dst)
    assert len(copies.src) == 6400 and copies.nbytes == 6400 * 16384


def received(**changes: object) -> RankMemory:
    memory = rank_memory(DST, 0, [TransportSession("fake", "d")])
    return msgspec.structs.replace(memory, **changes)


def test_a_sound_registration_passes_and_survives_the_wire() -> None:
    memory = received()
    check_rank_memory(memory, SRC)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=RankMemory) == memory
    assert memory.sessions[0].session_id == "d" and memory.region_bases == DST.region_bases


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arena_base": -1}, "arena_base is -1"),
        ({"arena_bytes": 1 << 63}, "arena_bytes is"),
        ({"arena_base": (1 << 63) - 10}, "ends beyond"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"num_pages": 61}, "overlaps"),
        ({"num_aux_slots": 4}, "aux rows .* outside the arena"),
        ({"num_pages": 1 << 62}, "outside the arena"),
        ({"page_bytes": 128}, "page_bytes is 128 there and 256 here"),
        ({"aux_row_bytes": 64}, "aux_row_bytes is 64"),
        ({"region_bases": DST.region_bases[:3]}, "3 regions there and 4 here"),
        ({"region_bases": (*DST.region_bases[:3], DST.arena_base - 256)}, "region 3 .* outside"),
        ({"region_bases": (*DST.region_bases[:3], DST.region_bases[0])}, "overlaps"),
        ({"aux_base": DST.arena_base}, "overlaps"),
        ({"tp_rank": 1}, "tp_rank is 1 with tp_size 1"),
        ({"tp_rank": -1}, "tp_rank is -1"),
    ],
)
def test_a_registration_with_wrong_addresses_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadFrame, match=words):
        check_rank_memory(received(**changes), SRC)


def test_layouts_that_differ_are_refused_with_both_printed() -> None:
    check_compatible(LAYOUT, msgspec.structs.replace(LAYOUT))
    other = msgspec.structs.replace(LAYOUT, page_size=32, dtype="bfloat16")
    with pytest.raises(IncompatibleLayout, match="page_size: 4 != 32; dtype: float32 != bfloat16") as caught:
        check_compatible(LAYOUT, other)
    assert str(LAYOUT) in caught.value.message and str(other) in caught.value.message


def test_a_latent_cache_has_one_region_a_layer():
    """It has four layers in the regions that would be K and V of two."""
    assert list(layer_regions(range(1, 3), 1)) == [1, 2]
    copies = plan_page_copies(SRC, DST, [7], [9], range(1, 3), regions_per_layer=1)
    expected = [(SRC.region_bases[r] + 7 * 256, DST.region_bases[r] + 9 * 256) for r in (1, 2)]
    assert bytes_of(copies) == expected
    with pytest.raises(TransferFailed, match="layers 4 to 4 of memories with 4 and 4 layers"):
        plan_page_copies(SRC, DST, [7], [9], range(4, 5), regions_per_layer=1)


def test_a_latent_cache_and_one_of_keys_and_values_do_not_fit_each_other():
    latent = msgspec.structs.replace(LAYOUT, num_kv_heads=1, regions_per_layer=1)
    with pytest.raises(IncompatibleLayout, match="regions_per_layer: 1 != 2"):
        check_compatible(latent, msgspec.structs.replace(latent, regions_per_layer=2))
    for tp_size in (1, 2, 3, 8):  # every rank holds the whole latent
        check_compatible(latent, msgspec.structs.replace(latent, tp_size=tp_size))
