"""State rows between P and D of any TP sizes: what every rank writes, and what shows a wrong row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from shard_pools import COPIED_STATE, EMPTY, NUM_STATES, PROMPT, STATE, Ranks, layout_of
from support.fake_transport import FakeFabric, Fault, FaultKind

from chitu.errors import BadFrame, IncompatibleLayout, Integrity, TransferFailed
from chitu.kv_cache.state_row import STAMP_BYTES, StateStamp, digest_of, line_copies, lines_of, state_bytes_of
from chitu.kv_transfer.layout import check_compatible, check_state
from chitu.kv_transfer.peers import check_registration
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TPStateSeals
from chitu.kv_transfer.shard_writer import DecodeWriter, ShardWriter, open_shards, state_slices
from chitu.kv_transfer.transports.transport import CopyList, WriteError
from chitu.protocol import KVLayout, StateSeal, StateTensor

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4)]
STAMP = StateStamp(len(PROMPT) // 4, digest_of(PROMPT))


def thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


class Instances:
    """A P of `src_size` ranks, with its followers in threads, and a D of `dst_size`; 4 KV heads."""

    def __init__(self, src_size: int, dst_size: int, state: tuple[StateTensor, ...] = STATE) -> None:
        self.fabric = FakeFabric()
        self.p = Ranks(self.fabric, "p", layout_of(4, src_size, state))
        self.d = Ranks(self.fabric, "d", layout_of(4, dst_size, state))
        for pool in self.p.pools:
            pool.fill()
        self.fan_outs: list[FanOut] = []
        self.followers: list[ShardFollower] = []
        self._fan_out = self._lanes_of(self.p)
        self.p_seals = self._seals_of(self.p, self._fan_out, has_stamps=True)
        self.d_seals = self._seals_of(self.d, self._lanes_of(self.d), has_stamps=False)

    def _lanes_of(self, ranks: Ranks) -> FanOut | None:
        if len(ranks.pools) == 1:
            return None
        fan_out = FanOut(len(ranks.pools) - 1, transfer_threads=1)
        self.fan_outs.append(fan_out)
        for rank, pool in enumerate(ranks.pools[1:], start=1):
            of = ranks.layout, rank, pool, [ranks.transports[rank]], fan_out.base, fan_out.num_lanes
            self.followers.append(ShardFollower(*of, state_seals=pool.seals))
            self.followers[-1].start(thread)
        return fan_out

    def _seals_of(self, ranks: Ranks, fan_out: FanOut | None, has_stamps: bool) -> Callable[[int], StateSeal]:
        own = ranks.pools[0].seals
        assert own is not None
        return own.seal if fan_out is None else TPStateSeals(fan_out, own, has_stamps).seal

    def open(self) -> DecodeWriter:
        info = self.d.registration()

        def own() -> ShardWriter:
            return open_shards(info, self.p.layout, 0, self.p.pools[0], self.p.transports[:1])

        return own() if self._fan_out is None else self._fan_out.open(info, own)

    def close(self) -> None:
        for fan_out in self.fan_outs:
            fan_out.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture(params=SIZES, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(params=[STATE, COPIED_STATE], ids=["cut", "copied"])
def instances(request: pytest.FixtureRequest, sizes: tuple[int, int]) -> Iterator[Instances]:
    made = Instances(*sizes, request.param)
    yield made
    made.close()


def check_rows(instances: Instances, dst_slot: int, src_slot: int) -> None:
    """Check that D's row has what P's had, rank by rank, and that no other row was touched."""
    for pool in instances.d.pools:
        for slot in range(NUM_STATES):
            expected = np.full(pool.state_row_bytes, EMPTY, np.int64).astype(np.uint8)
            if slot == dst_slot:
                expected = pool.expected_state(src_slot)
            assert (pool.states[slot, STAMP_BYTES:] == expected[STAMP_BYTES:]).all()


def bytes_of(instances: Instances) -> int:
    """Return the bytes of a state on all ranks of D, by the shapes above."""
    num_ranks, line_bytes = len(instances.d.pools), 5 * 2
    if instances.d.layout.state is STATE:
        return 16 * 3 * 4 + 64 * line_bytes
    return 16 * 3 * 4 + (32 + 8 * max(2, num_ranks) + 8 * num_ranks) * line_bytes


def check_sums(instances: Instances, sent: StateSeal, dst_slot: int) -> None:
    check_state(sent, STAMP, instances.d_seals(dst_slot), line_copies(instances.d.layout))


def test_every_line_of_a_state_lands_once_in_its_place(instances: Instances) -> None:
    places: list[int] = []
    instances.fabric.on_write = lambda peer, copies: places.extend(
        place for dst, nbytes in zip(copies.dst, copies.length, strict=True) for place in range(dst, dst + nbytes)
    )
    moved = instances.open().write_state(2, 1, 5.0)
    check_rows(instances, 1, 2)
    assert sum(moved) == len(places) == len(set(places)) == bytes_of(instances)
    assert state_bytes_of(instances.d.layout) == bytes_of(instances)
    assert len(moved) == len(instances.p.pools)


def test_the_ranks_of_both_sides_have_the_same_checksum(instances: Instances) -> None:
    instances.open().write_state(0, 2, 5.0)
    sent = instances.p_seals(0)
    check_sums(instances, sent, 2)
    assert sent.sum != instances.p_seals(1).sum
    with pytest.raises(Integrity):
        check_sums(instances, instances.p_seals(1), 2)


@pytest.mark.parametrize("src_size", [1, 2, 4])
def test_the_sum_of_p_does_not_depend_on_its_copies(src_size: int) -> None:
    seals = []
    for size in (1, src_size):
        instances = Instances(size, 1, COPIED_STATE)
        seals.append(instances.p_seals(1))
        instances.close()
    assert seals[0] == seals[1]


def test_a_head_that_all_ranks_hold_has_one_writer_for_each_rank_of_d(sizes: tuple[int, int]) -> None:
    src_size, dst_size = sizes
    layout = layout_of(4, src_size, (StateTensor(0, "group", "float32", (8, 2), (8,), (1,)),))
    for dst in range(dst_size):
        moved = [state_slices(layout, src, dst_size, dst) for src in range(src_size)]
        (writer,) = (src for src, parts in enumerate(moved) if parts)
        assert writer == dst * src_size // dst_size
        assert [part.nbytes for part in moved[writer]] == [layout.state_bytes]


def test_equal_ranks_move_a_row_as_one_piece() -> None:
    layout = layout_of(4, 2, (STATE[0],))
    assert [part.nbytes for part in state_slices(layout, 1, 2, 1)] == [layout.state_bytes // 2]
    assert state_slices(layout, 1, 2, 0) == ()


def test_every_changed_unit_of_a_row_shows(instances: Instances) -> None:
    instances.open().write_state(0, 0, 5.0)
    sent = instances.p_seals(0)
    for pool in instances.d.pools:
        for place in range(STAMP_BYTES, pool.state_row_bytes, 37):
            before = pool.states[0, place]
            pool.states[0, place] ^= 0x40
            is_padding = not any(part.offset <= place < part.offset + part.nbytes for part in pool.row.parts)
            right = sent.sum * line_copies(instances.d.layout)
            assert ((instances.d_seals(0).sum - right) % (1 << 64) == 0) == is_padding
            pool.states[0, place] = before
    check_sums(instances, sent, 0)


# ---------------------------------------------------------------------------------------------------- planted mistakes


def swap_blocks(instances: Instances) -> None:
    """Swap the first two blocks of the convolution on every rank of D: keys for keys of another kind."""
    for pool in instances.d.pools:
        part = pool.row.parts[1]
        lines = pool.states[1, part.offset : part.offset + part.nbytes].reshape(part.shape[0], -1)
        size = min(len(block) for block in lines_of(part.tensor, len(instances.d.pools), pool.tp_rank)[:2])
        lines[: 2 * size] = np.roll(lines[: 2 * size], size, 0)


def zero(instances: Instances) -> None:
    for pool in instances.d.pools:
        pool.states[1] = 0


def other_slot(instances: Instances) -> None:
    instances.open().write_state(1, 1, 5.0)


def lose_a_rank(instances: Instances) -> None:
    instances.d.pools[-1].states[1] = 0xFF


def fill_with_nan(instances: Instances) -> None:
    for pool in instances.d.pools:
        pool.states[1] = 0xFF


@pytest.mark.parametrize("fault", [swap_blocks, zero, other_slot, lose_a_rank, fill_with_nan])
def test_a_wrong_row_on_d_is_found(instances: Instances, fault: Callable[[Instances], None]) -> None:
    instances.open().write_state(0, 1, 5.0)
    sent = instances.p_seals(0)
    check_sums(instances, sent, 1)
    fault(instances)
    with pytest.raises(Integrity, match="checksum of the state"):
        check_sums(instances, sent, 1)


def test_a_convolution_that_is_cut_as_one_piece_is_found() -> None:
    """P and D agree on the layout, so only a wrong plan can do that: here P's, for a D of two ranks."""
    instances = Instances(1, 2)
    whole = (STATE[0], msgspec.structs.replace(STATE[1], cut=()))
    writer = open_shards(
        instances.d.registration(), layout_of(4, 1, whole), 0, instances.p.pools[0], instances.p.transports
    )
    writer.write_state(0, 1, 5.0)
    with pytest.raises(Integrity, match="checksum of the state"):
        check_state(instances.p_seals(0), STAMP, instances.d_seals(1))
    instances.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (None, "no seal"),
        (StateSeal(STAMP.num_tokens - 3, STAMP.digest, 5), "has taken in 7 tokens, the prompt has 10"),
        (StateSeal(STAMP.num_tokens, STAMP.digest ^ 1, 5), "is of other tokens"),
        (StateSeal(STAMP.num_tokens, STAMP.digest, 4), "checksum of the state"),
    ],
)
def test_a_state_of_other_tokens_is_refused(sent: StateSeal | None, words: str) -> None:
    with pytest.raises(Integrity, match=words):
        check_state(sent, STAMP, StateSeal(0, 0, 5))


def test_ranks_of_p_with_states_of_different_tokens_send_nothing() -> None:
    instances = Instances(2, 2)
    stamp = StateStamp(STAMP.num_tokens - 1, 7).pack()
    instances.p.pools[1].states[0, : len(stamp)] = np.frombuffer(stamp, np.uint8)
    with pytest.raises(TransferFailed, match="differ in their tokens"):
        instances.p_seals(0)
    instances.close()


def test_a_follower_that_cannot_write_its_part_fails_the_write() -> None:
    instances = Instances(2, 2)
    writer = instances.open()

    def fail(peer: str, copies: CopyList) -> None:
        if peer.endswith("1"):
            raise WriteError("cut", fenced=False)

    instances.fabric.on_write = fail
    with pytest.raises(WriteError) as caught:
        writer.write_state(0, 1, 5.0)
    assert not caught.value.fenced
    instances.close()


# -------------------------------------------------------------------------------------------------------- what D offers


def test_a_state_that_a_peer_cannot_cut_is_refused_by_name() -> None:
    mine = layout_of(4, 1, (StateTensor(2, "conv", "float32", (12, 4), (4, 4, 4)),))
    with pytest.raises(IncompatibleLayout, match=r"4 \+ 4 \+ 4 rows of the state 'conv' of layer 2"):
        check_compatible(mine, msgspec.structs.replace(mine, tp_size=8))


def test_layouts_with_and_without_state_are_no_pair() -> None:
    with pytest.raises(IncompatibleLayout, match="layouts differ in state"):
        check_compatible(layout_of(4, 1, STATE), layout_of(4, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_base": -1}, "state_base is -1"),
        ({"state_base": 1 << 63}, "state_base is"),
        ({"num_state_slots": 1 << 62}, "the state rows .* outside the arena"),
        ({"num_state_slots": NUM_STATES + 1}, "the state rows .* outside the arena"),
        ({"num_state_slots": -1}, "num_state_slots is -1"),
        ({"num_state_slots": 1}, "the ranks have .1, 3. state slots"),
        ({"state_row_bytes": 64}, "state_row_bytes is 64 there"),
        ({"state_row_bytes": 0}, "state_row_bytes is 0 there"),
    ],
)
def test_state_rows_with_wrong_addresses_are_refused(changes: dict[str, int], words: str) -> None:
    fabric = FakeFabric()
    p, d = Ranks(fabric, "p", layout_of(4, 1, STATE)), Ranks(fabric, "d", layout_of(4, 2, STATE))
    good = d.registration()
    check_registration(good, p.layout, p.pools[0])
    bad = msgspec.structs.replace(good, ranks=(msgspec.structs.replace(good.ranks[0], **changes), good.ranks[1]))
    with pytest.raises(BadFrame, match=words):
        check_registration(bad, p.layout, p.pools[0])


def test_state_rows_over_the_pages_are_refused() -> None:
    fabric = FakeFabric()
    p, d = (Ranks(fabric, name, layout_of(4, 1, STATE)) for name in "pd")
    good = d.registration()
    for base in (good.ranks[0].arena_base, good.ranks[0].aux_base):
        bad = msgspec.structs.replace(good, ranks=(msgspec.structs.replace(good.ranks[0], state_base=base),))
        with pytest.raises(BadFrame, match="overlaps"):
            check_registration(bad, p.layout, p.pools[0])


def test_a_slot_out_of_range_is_refused(instances: Instances) -> None:
    writer = instances.open()
    with pytest.raises((BadFrame, WriteError), match=f"destination state slot {NUM_STATES} of {NUM_STATES}"):
        writer.write_state(0, NUM_STATES, 5.0)
    with pytest.raises(TransferFailed, match=f"source state slot -1 of {NUM_STATES}"):
        writer.write_state(-1, 0, 5.0)
    instances.fabric.on_write = lambda peer, copies: pytest.fail("a write")


def test_a_flipped_bit_on_the_way_is_found(instances: Instances) -> None:
    instances.fabric.inject(Fault(FaultKind.CORRUPT, byte=50))
    instances.open().write_state(0, 1, 5.0)
    with pytest.raises(Integrity, match="checksum of the state"):
        check_sums(instances, instances.p_seals(0), 1)


def layout_with_gap() -> KVLayout:
    return layout_of(4, 2, (StateTensor(0, "odd", "bfloat16", (4, 3)), STATE[0]))


def test_padding_between_tensors_does_not_move() -> None:
    slices = state_slices(layout_with_gap(), 0, 2, 0)
    assert len(slices) == 2 and sum(part.nbytes for part in slices) == layout_with_gap().state_bytes // 2
