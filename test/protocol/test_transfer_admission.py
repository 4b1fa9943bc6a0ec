"""Checks of P and D on what arrives: a wrong registration, announcement, frame or setting affects only itself."""

from __future__ import annotations

import msgspec
import pytest
from pd_node import LAYOUT
from pd_world import Pair, World

from chitu.errors import (
    ConfigError,
    IncompatibleLayout,
    TransferFailed,
)
from chitu.kv_transfer.kv_manager import KVManager, KVManagerConfig
from chitu.kv_transfer.parts import RoleParts
from chitu.kv_transfer.sender import SenderState
from chitu.kv_transfer.transfer_table import TransferEventKind as Kind
from chitu.protocol import TransferInfo, TransferStatus, encode, pack_i32, peer_codec
from chitu.protocol.peer import KVPoll
from chitu.types import Role


def test_a_repeated_announcement_changes_nothing_and_a_different_one_is_refused() -> None:
    pair = Pair().join()
    pair.both_halves()
    pages = pair.d.requests[pair.room].pages
    slot = pair.d.requests[pair.room].aux_slot
    same = TransferInfo(pair.d.incarnation, pack_i32(pages), slot, 10)
    pair.p.sender.on_frame(pair.room, encode(same))
    assert not pair.world.frames and pair.p.sender.state(pair.room) is SenderState.WAITING
    other = msgspec.structs.replace(same, dst_kv_indices=pack_i32(pages[::-1]))
    pair.p.sender.on_frame(pair.room, encode(other))
    assert [(s.poll, s.settled) for s in pair.statuses()] == [(KVPoll.Failed, False)]
    assert pair.p.sender.state(pair.room) is SenderState.WAITING


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dst_kv_indices": pack_i32([0, 1])}, "2 pages announced"),
        ({"dst_kv_indices": pack_i32([0, 1, 24])}, "announced of 24"),
        ({"dst_kv_indices": pack_i32([0, 1, -1])}, "announced of 24"),
        ({"dst_kv_indices": pack_i32([0, 1, 1])}, "twice"),
        ({"dst_kv_indices": b"123"}, "multiple of 4"),
        ({"dst_aux_index": 4}, "aux slot 4"),
        ({"prefix_pages": 3}, "3 prefix pages of 2 full ones"),
        ({"prefix_pages": 1 << 63}, "prefix pages of 2 full ones"),
        ({"prefix_pages": -1}, "-1 prefix pages of 2"),
        ({"prefix_pages": 1, "dst_kv_indices": b""}, "1 prefix pages of 0 full ones"),
        ({"num_tokens": 9}, "9 prompt tokens"),
        ({"num_tokens": 0, "dst_kv_indices": b""}, "0 pages announced"),
    ],
)
def test_an_announcement_that_names_memory_wrongly_is_refused_and_nothing_is_written(
    change: dict[str, object], text: str
) -> None:
    pair = Pair().join()
    assert pair.p.prefill(pair.room, 10, pair.d)
    good = TransferInfo(pair.d.incarnation, pack_i32([0, 1, 2]), 0, 10)
    pair.p.sender.on_frame(pair.room, encode(msgspec.structs.replace(good, **change)))
    assert [status.poll for status in pair.statuses()] == [KVPoll.Failed]
    assert text in pair.statuses()[0].message
    pair.p.poll()
    assert pair.seen(pair.p) == [Kind.FAILED, Kind.RELEASED]
    pair.p.sender.on_frame(pair.room, encode(good))
    assert pair.p.sender.state(pair.room) is None and pair.world.fabric.num_writes == 0


@pytest.mark.parametrize("prefix_pages", [1.0, 1.5, True, "1", None, [1]])
def test_a_number_of_prefix_pages_that_is_no_integer_is_no_announcement(prefix_pages: object) -> None:
    pair = Pair().join()
    assert pair.p.prefill(pair.room, 10, pair.d)
    good = msgspec.msgpack.decode(encode(TransferInfo(pair.d.incarnation, pack_i32([0, 1, 2]), 0, 10)))
    pair.p.sender.on_frame(pair.room, msgspec.msgpack.encode(good | {"prefix_pages": prefix_pages}))
    assert pair.p.sender.unknown_frames == 1 and pair.p.sender.state(pair.room) is SenderState.REQUESTED


@pytest.mark.parametrize(
    ("pages", "slot", "prefix_pages", "text"),
    [
        ([3, 4, 5], 0, 0, "aux slot 0 is announced for room"),
        ([2, 3, 4], 1, 0, "page 2 is announced for room"),
        ([2, 3, 4], 1, 1, "page 2 is announced for room"),  # D cannot have this page already
        ([5, 3, 4], 1, 1, None),
    ],
)
def test_what_is_announced_for_one_room_is_not_written_for_another(
    pages: list[int], slot: int, prefix_pages: int, text: str | None
) -> None:
    pair = Pair().join()
    assert pair.p.prefill(pair.room, 10, pair.d)
    pair.p.sender.on_frame(pair.room, encode(TransferInfo(pair.d.incarnation, pack_i32([0, 1, 2]), 0, 10)))
    other = bytes(15) + b"x"
    assert pair.p.prefill(other, 10, pair.d)
    announcement = TransferInfo(pair.d.incarnation, pack_i32(pages), slot, 10, prefix_pages=prefix_pages)
    pair.p.sender.on_frame(other, encode(announcement))
    answers = [peer_codec.decode(frame.payload) for frame in pair.world.frames if frame.room == other]
    refusals = [message.message for message in answers if isinstance(message, TransferStatus)]
    assert [text in refusal for refusal in refusals if text] == ([True] if text else [])
    assert pair.p.sender.state(other) is (None if text else SenderState.WAITING)
    assert pair.p.sender.state(pair.room) is SenderState.WAITING, "the first one is not disturbed"


class CountedRooms(dict):  # type: ignore[type-arg]
    """A table that counts the rooms looked at."""

    looked_at = 0

    def get(self, *arguments: object) -> object:
        self.looked_at += 1
        return super().get(*arguments)

    def items(self) -> object:  # type: ignore[override]
        self.looked_at += len(self)
        return super().items()


def test_an_announcement_costs_by_its_own_pages_however_many_rooms_there_are() -> None:
    costs = []
    for num_others in (0, 1, 3):
        pair = Pair().join()
        for index in range(num_others + 1):
            room = bytes(15) + bytes([index + 1])
            assert pair.p.prefill(room, 10, pair.d)
            pages = pack_i32([3 * index, 3 * index + 1, 3 * index + 2])
            counted = pair.p.sender.machine.table._entries = CountedRooms(pair.p.sender.machine.table._entries)
            pair.p.sender.on_frame(room, encode(TransferInfo(pair.d.incarnation, pages, index, 10)))
            assert pair.p.sender.state(room) is SenderState.WAITING
        costs.append(counted.looked_at)
    assert len(set(costs)) == 1


def test_an_incompatible_layout_is_refused_at_registration_and_its_rooms_fail_with_that_code() -> None:
    pair = Pair()
    pair.d.receiver.machine.prefills.registration = msgspec.structs.replace(
        pair.d.receiver.machine.prefills.registration, layout=msgspec.structs.replace(LAYOUT, head_dim=2)
    )
    pair.join()
    assert pair.d.decode(pair.room, 5, pair.p)
    error = pair.error(pair.d)
    assert isinstance(error, IncompatibleLayout) and "head_dim: 1 != 2" in error.message
    assert not pair.p.sender.decode_kv_args_table


def test_a_registration_whose_regions_leave_the_arena_is_refused() -> None:
    pair = Pair()
    registration = pair.d.receiver.machine.prefills.registration
    bad = msgspec.structs.replace(registration.ranks[0], num_pages=10_000)
    pair.d.receiver.machine.prefills.registration = msgspec.structs.replace(registration, ranks=(bad,))
    pair.join()
    assert not pair.p.sender.decode_kv_args_table and not pair.d.receiver.machine.prefills.registered()


def test_garbage_frames_are_counted_and_cost_nothing() -> None:
    pair = Pair().join()
    pair.both_halves()
    for frame in (b"", b"\xff", encode(LAYOUT), encode(TransferStatus(1, 4))):
        pair.p.sender.on_frame(pair.room, frame)
    pair.d.receiver.on_frame(pair.room, encode(TransferInfo(1, b"", 0, 1)))
    pair.d.receiver.on_frame(b"short", encode(TransferStatus(1, 4)))
    assert pair.p.kv.unknown_frames == 4 and pair.d.kv.unknown_frames == 2
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


def test_a_manager_without_a_usable_transport_or_with_several_ranks_says_so_at_once() -> None:
    world = World(0)
    node = world.of(Role.PREFILL)[0]

    def build(role: Role, tp_size: int) -> KVManager:
        layout = msgspec.structs.replace(LAYOUT, tp_size=tp_size)
        config = KVManagerConfig(0, 1, "h", 1, layout)
        return KVManager(role, config, RoleParts(node.memory, node.memory.aux, [], world.link, bool, world.clock))

    with pytest.raises(TransferFailed, match="none was given"):
        build(Role.PREFILL, 1)
    with pytest.raises(ConfigError, match="tp_size 2"):
        build(Role.PREFILL, 2)
    with pytest.raises(ConfigError, match="unified"):
        build(Role.UNIFIED, 1)
