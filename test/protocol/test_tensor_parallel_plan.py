"""Every byte that the ranks of D need is written once, by a rank of P that has it, for all combinations of TP sizes."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_pools import AUX_ROW_BYTES, HEAD_BYTES, NUM_AUX, NUM_PAGES, Ranks, layout_of

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank, share_of, why_not
from chitu.errors import BadFrame, IncompatibleLayout, TransferFailed
from chitu.kv_transfer.layout import check_compatible
from chitu.kv_transfer.registration import check_registration
from chitu.kv_transfer.shard_writer import PageSlice, TransferKVChunk, head_copy, open_shards, plan_page_copies
from chitu.kv_transfer.transports.transport import CopyList
from chitu.testing.fake_transport import FakeFabric


def tp_sizes(num_kv_heads: int) -> list[int]:
    return [tp for tp in range(1, 9) if not why_not(tp * num_kv_heads, num_kv_heads, tp)]


sizes = st.integers(1, 8).flatmap(
    lambda heads: st.tuples(st.just(heads), st.sampled_from(tp_sizes(heads)), st.sampled_from(tp_sizes(heads)))
)


@given(sizes)
def test_every_head_of_every_rank_of_d_has_exactly_one_writer_and_the_work_is_even(sizes: tuple[int, int, int]) -> None:
    heads, src_size, dst_size = sizes
    written = [0] * src_size
    for dst_rank in range(dst_size):
        got: Counter[int] = Counter()
        mine = kv_heads_of(heads, dst_size, dst_rank)
        for src_rank in range(src_size):
            copy = head_copy(heads, src_size, src_rank, dst_size, dst_rank)
            if copy is None:
                continue
            source = kv_heads_of(heads, src_size, src_rank)
            for i in range(copy.num_heads):
                assert source[copy.src_first + i] == mine[copy.dst_first + i]
                got[mine[copy.dst_first + i]] += 1
            written[src_rank] += copy.num_heads
        assert got == Counter(mine)
    assert head_copy(heads, src_size, 0, dst_size, 0) is not None, "the logits rows take this way"
    # If P has more copies of a head than D needs, some ranks of P are idle; the rest share evenly.
    assert max(written) - min(n for n in written if n) <= 1
    if dst_size >= src_size:
        assert min(written) > 0


@settings(max_examples=50)
@given(sizes, st.data())
def test_every_byte_lands_once_in_its_place(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    heads, src_size, dst_size = sizes
    fabric = FakeFabric()
    prefill, decode = (Ranks(fabric, name, layout_of(heads, tp)) for name, tp in (("p", src_size), ("d", dst_size)))
    for pool in prefill.pools:
        pool.fill()
    num_pages = data.draw(st.integers(1, 6))
    src_pages, dst_pages = (data.draw(st.permutations(range(NUM_PAGES)))[:num_pages] for _ in range(2))
    layers = data.draw(st.sampled_from([range(1), range(1, 2), range(2)]))
    written: Counter[int] = Counter()

    def count(_peer: str, copies: CopyList) -> None:
        for dst, length in zip(copies.dst, copies.length, strict=True):
            written.update(range(dst, dst + length, 4))

    fabric.on_write = count
    chunk = TransferKVChunk(layers.start, layers.stop, 0, num_pages)
    moved = 0
    for rank, (pool, transport) in enumerate(zip(prefill.pools, prefill.transports, strict=True)):
        writer = open_shards(decode.registration(), prefill.layout, rank, pool, [transport])
        moved += sum(writer.write_pages([chunk], src_pages, dst_pages, 1.0))
        assert writer.settle(0.1)
    decode.check(dst_pages, src_pages, layers)
    assert set(written.values()) == {1}
    assert moved == num_pages * 2 * len(layers) * dst_size * kv_heads_per_rank(heads, dst_size) * HEAD_BYTES


def test_whole_pages_still_move_as_runs_and_slices_move_page_by_page() -> None:
    fabric = FakeFabric()
    one, two = Ranks(fabric, "one", layout_of(4, 1)), Ranks(fabric, "two", layout_of(4, 2))
    whole = plan_page_copies(two.pools[0], two.pools[1], [0, 1, 2], [5, 6, 7], range(1))
    assert list(whole.length) == [3 * two.pools[0].page_bytes] * 2
    half = PageSlice(0, 2 * HEAD_BYTES, 2 * HEAD_BYTES)
    sliced = plan_page_copies(two.pools[0], one.pools[0], [0, 1, 2], [5, 6, 7], range(1), half)
    assert list(sliced.length) == [2 * HEAD_BYTES] * 6
    with pytest.raises(TransferFailed, match="bytes from byte"):
        plan_page_copies(one.pools[0], two.pools[0], [0], [0], range(1), half)


def test_the_logits_row_goes_from_main_rank_to_main_rank() -> None:
    fabric = FakeFabric()
    prefill, decode = Ranks(fabric, "p", layout_of(2, 4)), Ranks(fabric, "d", layout_of(2, 2))
    prefill.pools[0].rows[1] = 9
    writer = open_shards(decode.registration(), prefill.layout, 0, prefill.pools[0], prefill.transports[:1])
    assert writer.write_aux(1, NUM_AUX - 1, 1.0) == AUX_ROW_BYTES
    assert (decode.pools[0].rows[-1] == 9).all() and (decode.pools[0].rows[0] == 255).all()


def test_tp_sizes_may_differ_but_must_fit_the_heads() -> None:
    check_compatible(layout_of(4, 2), layout_of(4, 8))
    check_compatible(layout_of(6, 3), layout_of(6, 2))
    for tp_size in (3, 0, -1, 6):
        with pytest.raises(IncompatibleLayout, match=f"4 KV heads cannot be cut for {tp_size} ranks"):
            check_compatible(layout_of(4, 2), layout_of(4, tp_size))


def test_a_registration_needs_sound_memory_of_every_rank() -> None:
    fabric = FakeFabric()
    prefill, decode = Ranks(fabric, "p", layout_of(4, 1)), Ranks(fabric, "d", layout_of(4, 2))
    info = decode.registration()
    assert check_registration(info, prefill.layout, prefill.pools[0]) == info.ranks[0]

    def refusal(*ranks: object) -> str:
        wrong = msgspec.structs.replace(info, ranks=ranks)
        with pytest.raises(BadFrame) as caught:
            check_registration(wrong, prefill.layout, prefill.pools[0])
        return caught.value.message

    main, other = info.ranks
    assert "1 ranks of memory for tp_size 2" in refusal(main)
    assert "2 ranks of memory for tp_size 2" in refusal(main, msgspec.structs.replace(other, tp_rank=0))
    whole = msgspec.structs.replace(other, page_bytes=4 * HEAD_BYTES)
    assert f"page_bytes is {4 * HEAD_BYTES} there and {2 * HEAD_BYTES} here" in refusal(main, whole)
    assert "the ranks have [11, 12] pages" in refusal(main, msgspec.structs.replace(other, num_pages=11))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "words"),
    [(8, 4, 3, "8 attention heads"), (12, 4, 6, "4 KV heads"), (12, 6, 4, "6 KV heads"), (6, 2, 3, "2 KV heads")],
)
def test_what_cannot_be_cut_says_why(heads: int, kv_heads: int, tp_size: int, words: str) -> None:
    assert words in why_not(heads, kv_heads, tp_size)


@given(st.integers(1, 1000), st.integers(1, 16))
def test_shares_follow_each_other_and_differ_by_one_at_most(total: int, tp_size: int) -> None:
    shares = [share_of(total, tp_size, rank) for rank in range(tp_size)]
    assert [row for share in shares for row in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
