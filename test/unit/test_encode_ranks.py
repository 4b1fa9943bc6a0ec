"""Features that an E writes to a P of several ranks: every rank gets every row, and what one of them lacks is found."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from encode_world import EncodeWorld, region_of
from image_world import text
from support.fake_transport import Fault, FaultKind
from support.images import feature, image
from test_image_pulls import KEYS, PROMPT, ask, shifted

from chitu.kv_transfer.transports.transport import CopyList, PeerHandle


@pytest.fixture
def world() -> Iterator[EncodeWorld]:
    world = EncodeWorld(2, has_ranks=True)
    yield world
    assert world.rank is not None
    world.rank.close()


def rows_here(world: EncodeWorld) -> list[np.ndarray]:
    """Return the kept rows of every image, on the main rank and on the other one."""
    assert world.rank is not None
    rows = [row for key in KEYS if (kept := world.p.gate.store.find(key)) is not None for row in kept.rows.tolist()]
    return [region_of(pool)[rows] for pool in (world.pool, world.rank.pool)]


def test_every_rank_has_every_row(world: EncodeWorld) -> None:
    ask(world, 0)
    assert not world.p.executor.encoded and world.pulls.num_filled == 3
    main, other = rows_here(world)
    wanted = [
        feature(key, row)
        for key, kept in ((k, world.p.gate.store.find(k)) for k in KEYS)
        if kept
        for row in range(len(kept.rows))
    ]
    assert main.tolist() == other.tolist() == wanted and len(wanted) == 18
    ask(world, 1)
    assert world.pulls.num_filled == 3, "all were here"
    world.check_empty()


def test_rows_shifted_by_one_on_the_other_rank_alone_are_found(world: EncodeWorld) -> None:
    for each in world.encoders:
        plain = each.transport.write

        def bent(peer: PeerHandle, copies: CopyList, timeout_s: float, plain=plain) -> None:  # type: ignore[no-untyped-def]
            plain(peer, shifted(copies) if getattr(peer, "session_id", "") == "P.1" else copies, timeout_s)

        each.transport.write = bent  # type: ignore[method-assign]
    ask(world, 0)
    assert world.pulls.num_failed and not world.pulls.num_filled
    assert sorted(world.p.executor.encoded) == sorted(KEYS)
    world.check_empty()


@pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.DROP])
def test_a_write_to_the_other_rank_that_fails_fails_the_image_there(world: EncodeWorld, kind: FaultKind) -> None:
    world.fabric.inject(Fault(kind, "P.1", 5))
    ask(world, 0)
    assert world.pulls.num_failed == 1 and world.pulls.num_filled == 3, "another E was asked"
    main, other = rows_here(world)
    assert main.tolist() == other.tolist()
    world.check_empty()


def test_a_rank_that_does_not_answer_fails_the_image_and_p_encodes(
    world: EncodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chitu.kv_transfer.ranks.SUM_TIMEOUT_S", 0.05)
    assert world.rank is not None
    world.rank.fan_out.sum_lane._send = lambda order: None  # type: ignore[method-assign]
    world.p.submit(0, PROMPT, (image(1, 6, 6, side=2),))
    world.run()
    world.p.check(0, text(0, 30), (image(1, 6, 6, side=2),))
    assert not world.pulls.num_filled and world.p.executor.encoded == [KEYS[0]]
    del world.rank.fan_out.sum_lane._send
    world.check_empty()
