"""How a write is cut into groups, and how a group lies in a segment."""

from __future__ import annotations

import random

import pytest

from chitu.kv_transfer.transports.segments import share_of
from chitu.kv_transfer.transports.staged import groups_of, packed
from chitu.kv_transfer.transports.transport import CopyList


def bytes_of(copies: CopyList) -> list[tuple[int, int]]:
    """Return source and destination of each byte, in order."""
    return [(src + i, dst + i) for src, dst, length in zip(*copies, strict=True) for i in range(length)]


def test_pieces_lie_behind_each_other_in_their_order_without_gaps() -> None:
    copies = packed(CopyList([1000, 50, 7], [5, 6, 7], [10, 20, 5]), 9000)
    assert (list(copies.src), list(copies.dst), list(copies.length)) == ([1000, 50, 7], [9000, 9010, 9030], [10, 20, 5])


@pytest.mark.parametrize("nbytes", [1, 3, 8, 16, 17, 100, 10_000])
def test_groups_cover_each_byte_once_in_order_and_fit_a_segment(nbytes: int) -> None:
    rng = random.Random(nbytes)
    lengths = [rng.choice([1, 4, 8, 16, 40]) for _ in range(30)]
    src, dst = ([rng.randrange(1 << 40) for _ in lengths] for _ in range(2))
    copies = CopyList(src, dst, lengths)
    groups = list(groups_of(copies, nbytes))
    assert [pair for group in groups for pair in bytes_of(group)] == bytes_of(copies)
    assert all(0 < group.nbytes <= nbytes for group in groups)
    if nbytes >= max(lengths):
        assert sum(len(group.src) for group in groups) == len(lengths), "no piece is cut that fits"


def test_nothing_is_no_group() -> None:
    assert list(groups_of(CopyList([], [], []), 8)) == []


@pytest.mark.parametrize(
    ("num_segments", "owners", "rank", "share"),
    [
        (4, [0], 0, range(0, 4)),
        (5, [0, 1], 0, range(0, 2)),
        (5, [1, 0], 1, range(2, 4)),
        (8, [0, 2], 2, range(4, 8)),
        (8, [0, 2], 1, range(0)),
        (1, [0, 1], 1, range(1, 1)),
        (8, [], 0, range(0)),
    ],
)
def test_the_segments_of_a_d_are_shared_out_by_engine_rank(
    num_segments: int, owners: list[int], rank: int, share: range
) -> None:
    assert share_of(num_segments, owners, rank) == share
