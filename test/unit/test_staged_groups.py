"""What a segment carries: how a batch is cut, how a group lies in it, whose it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chitu.errors import TransferFailed
from chitu.kv_transfer.sender.transfer_queue import TransferJob, TransferKVChunk, TransferQueue, cut, merged
from chitu.kv_transfer.staging.granted import GrantedSegments, SegmentGroup
from chitu.kv_transfer.staging.grants import SegmentGrants
from chitu.kv_transfer.staging.packing import pack_pages, pack_row, turned
from chitu.protocol import Staged

POOL = SimpleNamespace(
    **{"arena_base": 1000, "arena_bytes": 500, "region_bases": (1000, 1100, 1200, 1300), "page_bytes": 10},
    **{"num_pages": 8, "aux_base": 1400, "aux_row_bytes": 20, "num_aux_slots": 2},
)


def test_a_group_lies_region_by_region_in_the_order_of_the_page_list_without_gaps() -> None:
    pieces = pack_pages(POOL, [5, 2, 3, 7], range(1, 2), 9000)
    assert list(pieces.src) == [1250, 1220, 1270, 1350, 1320, 1370]
    assert list(pieces.dst) == [9000, 9010, 9030, 9040, 9050, 9070]
    assert list(pieces.length) == [10, 20, 10] * 2, "pages that follow each other are one piece"
    back = turned(pieces)
    assert (back.src, back.dst) == (pieces.dst, pieces.src)


def test_with_one_region_a_layer_the_next_layer_follows_at_once() -> None:
    pieces = pack_pages(POOL, [0, 1], range(2, 4), 9000, regions_per_layer=1)
    assert (list(pieces.src), list(pieces.dst), list(pieces.length)) == ([1200, 1300], [9000, 9020], [20, 20])


def test_a_row_is_one_piece_and_what_the_pool_does_not_have_is_refused() -> None:
    assert pack_row(POOL, 1, 9000) == ((1420,), (9000,), (20,))
    with pytest.raises(TransferFailed, match="aux slot 2"):
        pack_row(POOL, 2, 9000)
    with pytest.raises(TransferFailed, match="page 8"):
        pack_pages(POOL, [8], range(1), 9000)
    with pytest.raises(TransferFailed, match="layers"):
        pack_pages(POOL, [0], range(1, 3), 9000)


@pytest.mark.parametrize("max_units", [1, 2, 3, 4, 5, 7, 12, 15, 100])
def test_a_chunk_is_cut_into_rectangles_that_fit_and_cover_it_once(max_units: int) -> None:
    whole = TransferKVChunk(3, 6, 10, 15)
    waiting, covered = [whole], []
    while waiting:
        first, *rest = cut(waiting.pop(0), max_units)
        assert 1 <= first.num_units <= max_units
        covered += [(layer, page) for layer in range(first.first_layer, first.end_layer)
                    for page in range(first.first_page, first.end_page)]  # fmt: skip
        waiting = rest + waiting
    assert sorted(covered) == [(layer, page) for layer in range(3, 6) for page in range(10, 15)]


def test_neighbouring_layers_of_the_same_pages_are_one_chunk() -> None:
    a, b, c = TransferKVChunk(0, 1, 0, 4), TransferKVChunk(1, 2, 0, 4), TransferKVChunk(2, 3, 0, 5)
    assert merged([a, b, c]) == [TransferKVChunk(0, 2, 0, 4), c]


def test_what_was_put_back_is_the_rooms_next_and_what_was_parked_waits_for_resume() -> None:
    done: list[TransferJob] = []
    queue = TransferQueue(done.append, 1)
    first, second = TransferKVChunk(0, 1, 0, 1), TransferKVChunk(1, 2, 0, 1)
    queue.put_chunk(b"r", second)
    queue.put_chunk(b"s", second)
    queue.put_back(TransferJob(b"r", False, (first,)), is_parked=True)
    queue.put_aux(b"r")
    while queue.run_one():
        pass
    assert [(batch.room, batch.is_aux) for batch in done] == [(b"r", True), (b"s", False)], "its row need not wait"
    queue.put_back(TransferJob(b"r", True, ()), is_parked=True)
    assert not queue.run_one() and len(queue) == 1
    queue.resume([b"r", b"gone"])
    done.clear()
    while queue.run_one():
        pass
    assert [batch.is_aux for batch in done] == [True, False, False]
    assert [batch.chunks for batch in done[1:]] == [(first,), (second,)]


def test_shares_are_equal_disjoint_and_by_rank() -> None:
    grants = SegmentGrants(7, [3, 0, 5])
    assert (grants.of(0), grants.of(3), grants.of(5)) == ((0, 1), (2, 3), (4, 5))
    assert grants.of(1) == () == SegmentGrants(0, [0]).of(0) == SegmentGrants(4, []).of(0)


def test_a_segment_serves_again_only_after_its_own_last_answer() -> None:
    granted = GrantedSegments.of([4, 6])
    group = SegmentGroup(b"r", None)
    one, two = granted.take(group), granted.take(group)
    assert one is not None and two is not None and {one.index, two.index} == {4, 6}
    assert granted.take(group) is None
    granted.written(one, Staged(1, one.number, one.index, 0, 0, 0, 0, 20, 0))
    assert granted.scattered(one.number, two.index) is None and granted.scattered(two.number, two.index) is None
    assert granted.scattered(one.number, 9) is None
    assert granted.scattered(one.number, one.index) is one
    assert granted.scattered(one.number, one.index) is None, "a doubled answer frees nothing"
    granted.write_failed(two)
    again = granted.take(group)
    assert again is one and again.number == 3
    granted.settled(b"another room")
    assert granted.take(group) is None
    granted.settled(b"r")
    assert granted.take(group) is two
