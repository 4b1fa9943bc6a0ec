"""Single situations of the transfer protocol that the random tests reach only by luck, each from start to end."""

from __future__ import annotations

import logging
import threading
import uuid

import msgspec
import pytest
from pd_node import DEADLINES, LAYOUT, PAGE_BYTES, DeviceQueue
from pd_world import Pair, World
from support.fake_transport import Fault, FaultKind

from chitu.errors import (
    BootstrapTimeout,
    ConfigError,
    DecodeLost,
    IncompatibleLayout,
    Integrity,
    PrefillLost,
    TransferFailed,
    TransferTimeout,
)
from chitu.kv_transfer.both_sides import OwnMemory, TransferContext
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.kv_manager import KVManager, KVManagerConfig, manager_of_prefill
from chitu.kv_transfer.layout import VerifyKV
from chitu.kv_transfer.receiver import ReceiverState
from chitu.kv_transfer.sender_table import SenderState
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.staged import TransferWay
from chitu.protocol import TransferInfo, TransferStatus, encode, pack_i32, peer_codec
from chitu.protocol.peer import KVPoll
from chitu.types import Role, new_room


def test_each_log_anchor_appears_exactly_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair().join()
    pair.both_halves()
    pair.compute_all()
    pair.world.settle_down()
    name = pair.room.hex()[:6]
    messages = [record.getMessage() for record in caplog.records]
    for anchor in (
        f"finished kv cache transfer for {name}",
        f"finished aux transfer for {name}",
        f"received kv cache for {name}",
        "decode endpoint registered to prefill (engine_rank=0)",
    ):
        assert messages.count(anchor) == 1, anchor


def test_the_logits_row_arrives_before_kv_that_was_still_waiting() -> None:
    pair = Pair().join()
    pair.both_halves()
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    assert pair.p.sender.queue.run_one()
    while pair.world.frames:
        pair.world.deliver_one()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY]
    pair.pump()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_layers_that_wait_together_leave_in_few_writes_and_every_page_is_written_once() -> None:
    pair = Pair().join()
    pair.world.max_batch_bytes = 1 << 20
    written: list[int] = []
    pair.world.fabric.on_write = lambda peer, copies: written.append(copies.nbytes)
    pair.both_halves(num_tokens=10)
    pair.compute_all()
    assert pair.seen(pair.p)[-1] is Kind.SUCCESS
    assert sum(written) == 6 * 3 * PAGE_BYTES + pair.p.memory.aux_row_bytes


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("verify_kv", ["off", "all"])
@pytest.mark.parametrize("is_announced_late", [False, True])
def test_of_a_request_for_one_token_the_logits_row_moves_alone(
    is_announced_late: bool, verify_kv: VerifyKV, way: TransferWay
) -> None:
    pair = Pair(way=way, verify_kv=verify_kv).join()
    written: list[int] = []
    pair.world.fabric.on_write = lambda peer, copies: written.append(copies.nbytes)
    if is_announced_late:  # what P computes before the announcement is kept, and never sent
        assert pair.p.prefill(pair.room, 23, pair.d)
        pair.compute_all()
        assert pair.d.decode(pair.room, 23, pair.p, needs_kv=False)
    else:
        pair.both_halves(num_tokens=23, needs_kv=False)
        pair.compute_all()
    pair.world.settle_down()
    assert pair.seen(pair.p)[-1] is Kind.SUCCESS
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]
    assert sum(written) == pair.p.memory.aux_row_bytes == pair.d.receiver.machine.bytes_moved


@pytest.mark.parametrize("is_announced_late", [False, True])
def test_layers_that_a_device_has_yet_to_compute_are_sent_when_it_has(is_announced_late: bool) -> None:
    """SUCCESS on D checks every byte; without the wait it would find the poison of fresh pages."""
    pair = Pair().join()
    device = pair.p.device = DeviceQueue()
    if not is_announced_late:
        pair.both_halves(num_tokens=23)
    else:
        assert pair.p.prefill(pair.room, 23, pair.d)
        pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while pair.p.requests[pair.room].computed < 23:
        pair.p.compute()
    assert device.num_waiting, "steps did not wait"
    if is_announced_late:
        assert pair.d.decode(pair.room, 23, pair.p)
    pair.compute_all()
    pair.world.settle_down()
    assert pair.seen(pair.p)[-1] is pair.seen(pair.d)[-1] is Kind.SUCCESS
    assert not device.num_waiting


def test_p_fails_a_room_that_d_never_announces_and_d_one_whose_p_is_never_found() -> None:
    pair = Pair()
    assert pair.p.prefill(pair.room, 5, pair.d) and pair.d.decode(pair.room, 5, pair.p)
    pair.world.clock.advance(DEADLINES.bootstrap_s)
    pair.d.receiver.tick(pair.world.clock.monotonic())
    assert isinstance(pair.error(pair.d), BootstrapTimeout)
    pair.world.clock.advance(DEADLINES.queue_s)
    pair.p.sender.tick(pair.world.clock.monotonic())
    assert isinstance(pair.error(pair.p), BootstrapTimeout)
    assert not len(pair.p.sender.machine.table) and not len(pair.d.receiver.machine.table)


def test_a_transfer_that_takes_too_long_fails_on_both_sides_and_is_released_by_the_handshake() -> None:
    pair = Pair().join()
    pair.both_halves()
    pair.world.clock.advance(DEADLINES.transfer_s)
    pair.d.receiver.tick(pair.world.clock.monotonic())
    assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED
    assert isinstance(pair.error(pair.d), TransferTimeout)
    pair.pump()
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED]
    assert pair.seen(pair.p)[1:] == [Kind.FAILED, Kind.RELEASED]


def test_a_late_write_keeps_both_sides_pages_until_it_landed() -> None:
    pair = Pair().join()
    pair.both_halves()
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    pair.compute_all()
    assert pair.seen(pair.p) == [Kind.ANNOUNCED, Kind.FAILED] and pair.seen(pair.d) == [Kind.FAILED]
    for _ in range(100):
        pair.world.advance(1.0)
        pair.pump()
    assert pair.p.sender.state(pair.room) is SenderState.UNFENCED
    assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED
    assert pair.world.fabric.release_late_writes() == 1
    pair.world.advance(1.0)
    pair.pump()
    assert pair.seen(pair.p)[-1] is Kind.RELEASED and pair.seen(pair.d)[-1] is Kind.RELEASED


@pytest.mark.parametrize("checks_in_steps", [False, True], ids=["checked before", "checked by the step that draws"])
def test_a_corrupted_logits_row_is_an_integrity_failure_and_never_a_token(checks_in_steps: bool) -> None:
    pair = Pair()
    pair.world.checks_in_steps = checks_in_steps
    pair.join()
    pair.both_halves(num_tokens=1)
    pair.world.fabric.on_write = lambda peer, copies: (
        pair.world.fabric.inject(Fault(FaultKind.CORRUPT, byte=70))
        if copies.nbytes == pair.p.memory.aux_row_bytes
        else None
    )
    pair.p.compute()
    while pair.p.requests[pair.room].computed < 1:
        pair.p.compute()
    while pair.world.frames or pair.p.sender.queue.run_one():
        if pair.world.frames:
            pair.world.deliver_one()
    pair.d.poll()
    assert isinstance(pair.error(pair.d), Integrity)
    assert (Kind.LOGITS_READY in pair.seen(pair.d)) == checks_in_steps and Kind.SUCCESS not in pair.seen(pair.d)


@pytest.mark.parametrize("verify_kv", ["off", "all"])
def test_success_waits_for_the_step_that_checks_the_row(verify_kv: VerifyKV) -> None:
    pair = Pair(verify_kv=verify_kv)
    pair.world.checks_in_steps = True
    pair.join()
    pair.both_halves()
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    draw, drawn = pair.d._draw, []
    pair.d._draw = drawn.append  # type: ignore[method-assign]
    for _ in range(3):
        pair.pump()
    assert pair.d.receiver.state(pair.room) is ReceiverState.WRITTEN and drawn
    assert pair.seen(pair.d) == [Kind.LOGITS_READY] and Kind.SUCCESS in pair.seen(pair.p), "P waits for nobody"
    draw(drawn[0])
    pair.pump()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_a_killed_p_fails_its_rooms_and_gives_ds_pages_back_once_the_process_is_gone() -> None:
    pair = Pair().join()
    pair.both_halves()
    pair.p.is_in_view = False
    pair.world.publish_view()
    assert isinstance(pair.error(pair.d), PrefillLost)
    pair.world.frames.clear()
    pair.world.clock.advance(50.0)
    pair.d.receiver.tick(pair.world.clock.monotonic())
    assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED, "a frozen writer may still write"
    pair.world.kill(pair.p)
    pair.world.advance(0.1)
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED]


def test_a_killed_d_fails_its_rooms_on_p_which_serves_the_next_d_without_a_restart() -> None:
    pair = Pair().join()
    pair.both_halves()
    old = pair.d
    fresh = pair.world.restart(old)
    pair.world.publish_view()
    assert isinstance(pair.error(pair.p), DecodeLost)
    pair.p.poll()
    assert pair.seen(pair.p)[-1] is Kind.RELEASED
    pair.d = fresh
    pair.room = uuid.uuid4().bytes
    pair.pump()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(fresh)[-1] is Kind.SUCCESS
    pair.world.settle_down()
    assert list(pair.p.sender.decode_kv_args_table) == [fresh.incarnation]


def test_after_an_abort_only_released_follows_even_where_success_was_waiting() -> None:
    pair = Pair().join()
    pair.both_halves()
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    while pair.world.frames or pair.p.sender.queue.run_one():
        if pair.world.frames:
            pair.world.deliver_one()
    pair.p.abort(pair.room)
    pair.d.abort(pair.room)
    pair.pump()
    assert pair.seen(pair.p)[-1] is Kind.RELEASED and Kind.SUCCESS not in pair.seen(pair.p)
    assert pair.seen(pair.d)[-1] is Kind.RELEASED and Kind.SUCCESS not in pair.seen(pair.d)
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_real_transfer_threads_deliver_what_the_pump_delivers() -> None:
    pair = Pair().join()
    done = threading.Event()
    pair.p.wake = done.set
    pair.p.kv.start()
    assert pair.d.decode(pair.room, 10, pair.p) and pair.p.prefill(pair.room, 10, pair.d)
    while pair.world.frames:
        pair.world.deliver_one()
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    while Kind.SUCCESS not in pair.seen(pair.p):
        assert done.wait(10)
        done.clear()
        pair.p.poll()
    while pair.world.frames:
        pair.world.deliver_one()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]
    pair.p.kv.close()


def test_an_abort_that_overtakes_its_announcement_keeps_the_room_from_ever_starting() -> None:
    pair = Pair().join()
    assert pair.d.decode(pair.room, 10, pair.p)
    announcement = pair.world.frames.pop()
    pair.d.abort(pair.room)
    pair.pump()
    assert pair.seen(pair.d) == [Kind.RELEASED]
    pair.world.frames.append(announcement)
    pair.pump()
    assert pair.p.sender.state(pair.room) is None
    assert pair.p.prefill(pair.room, 10, pair.d)
    pair.pump()
    assert pair.seen(pair.p) == [Kind.FAILED, Kind.RELEASED]


def test_an_abort_in_the_middle_of_a_write_releases_nothing_before_the_write_has_ended() -> None:
    pair = Pair().join()
    pair.both_halves()
    during: list[object] = []

    def abort_now(peer: str, copies: object) -> None:
        if not during:
            pair.d.abort(pair.room)
            for frame in list(pair.world.frames):
                if frame.port == pair.p.port:
                    pair.p.sender.on_frame(frame.room, frame.payload)
            pair.p.sender.tick(pair.world.clock.monotonic() + 1.0)
            during.append(pair.p.sender.state(pair.room))
            during.append(any(event.kind is Kind.RELEASED for event in pair.p.sender._out._events))

    pair.world.fabric.on_write = abort_now
    pair.compute_all()
    assert during == [SenderState.STOPPING, False]
    pair.world.settle_down()
    assert pair.seen(pair.p)[-1] is Kind.RELEASED and pair.seen(pair.d) == [Kind.RELEASED]


def test_no_lock_is_held_while_frames_leave_bytes_are_written_or_lines_are_logged() -> None:
    pair = Pair()
    left: list[str] = []

    def leaves(what: str) -> None:
        assert not pair.p.sender._lock.locked() and not pair.d.receiver._lock.locked(), f"{what} under the lock"
        left.append(what)

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            leaves("log")

    def link(host: str, port: int, room: bytes, payload: bytes) -> None:
        leaves("frame")
        pair.world.link(host, port, room, payload)

    for role in (pair.p.sender, pair.d.receiver):
        role._out._send_frame = link
        role._out._wake = lambda: leaves("wake")
    pair.world.fabric.on_write = lambda peer, copies: leaves("write")
    watch, root = Watch(), logging.getLogger("chitu.kv_transfer")
    level = root.level
    root.addHandler(watch)
    root.setLevel(logging.INFO)
    try:
        pair.join().both_halves()
        pair.compute_all()
        assert pair.seen(pair.d)[-1] is Kind.SUCCESS
        pair.room = new_room()
        pair.both_halves()
        pair.p.sender.add_request(pair.room, "again", 10, pair.d.rank, pair.d.incarnation)
        pair.world.fabric.inject(Fault(FaultKind.DROP))
        pair.compute_all()
        assert pair.seen(pair.d)[-1] is Kind.RELEASED
    finally:
        root.removeHandler(watch)
        root.setLevel(level)
    assert set(left) == {"frame", "wake", "write", "log"}


# ----------------------------------------------------------------------------------------------------------------------
# Checks of P and D on what arrives: a wrong registration, announcement, frame or setting affects only itself.


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
    (group,) = LAYOUT.groups
    wider = msgspec.structs.replace(LAYOUT, groups=(msgspec.structs.replace(group, head_dims=(2, 2)),))
    pair.d.receiver.machine.prefills.registration = msgspec.structs.replace(
        pair.d.receiver.machine.prefills.registration, layout=wider
    )
    pair.join()
    assert pair.d.decode(pair.room, 5, pair.p)
    error = pair.error(pair.d)
    assert isinstance(error, IncompatibleLayout) and "1 x 1 and 1 != layers 0" in error.message
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

    def build(tp_size: int) -> KVManager[PrefillSender]:
        layout = msgspec.structs.replace(LAYOUT, tp_size=tp_size)
        config = KVManagerConfig(0, 1, "h", 1, layout)
        own = OwnMemory(node.memory, node.memory.aux, [])
        return manager_of_prefill(config, own, TransferContext(world.link, lambda: None, world.clock))

    with pytest.raises(TransferFailed, match="none was given"):
        build(1)
    with pytest.raises(ConfigError, match="tp_size 2"):
        build(2)
