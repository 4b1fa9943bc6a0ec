"""Single situations of staged transfers: a write means what a direct one does, whatever fails in the middle of it."""

from __future__ import annotations

import msgspec
import pytest
from pd_node import DEADLINES, NUM_LAYERS, NUM_SEGMENTS, PAGE_BYTES, POISON, Node
from pd_world import Frame, Pair, World, busy_segments
from support.fake_transport import Fault, FaultKind
from support.faults import FaultConfig

from chitu.errors import Integrity, TransferFailed
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.receiver import ReceiverState
from chitu.kv_transfer.sender_table import SenderState
from chitu.kv_transfer.transports.segments import Scattered, WriteGroup, decode, encode
from chitu.kv_transfer.transports.staged import StagedTransport
from chitu.kv_transfer.transports.transport import CopyList
from chitu.protocol import TransportMessage, peer_codec
from chitu.protocol import encode as encode_frame
from chitu.protocol.peer import KVPoll
from chitu.types import Role, new_room


def staged_pair(seed: int = 1, **options: object) -> Pair:
    pair = Pair(seed, way="staged", **options).join()  # type: ignore[arg-type]
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    return pair


def compute(pair: Pair) -> None:
    """Compute the prompt without writing or delivering anything."""
    while pair.p.requests[pair.room].computed < pair.p.requests[pair.room].num_tokens:
        pair.p.compute()


def messages(pair: Pair, kind: type[WriteGroup] | type[Scattered]) -> list[tuple[Frame, WriteGroup | Scattered]]:
    """Return the messages of this kind in flight between the transports."""
    found = []
    for frame in pair.world.frames:
        message = peer_codec.decode(frame.payload)
        if isinstance(message, TransportMessage) and isinstance(decode(message.payload), kind):
            found.append((frame, decode(message.payload)))
    return found


def statuses(pair: Pair) -> list[KVPoll]:
    return [KVPoll(status.poll) for status in pair.statuses()]


def transport_of(node: Node) -> StagedTransport:
    assert isinstance(node.transport, StagedTransport)
    return node.transport


def count_copies(node: Node) -> list[int]:
    calls = [0]

    def meanwhile() -> None:
        calls[0] += 1

    node.copier.meanwhile = meanwhile
    return calls


# ----------------------------------------------------------------------------------------------- aborts and late writes


def test_a_late_write_after_an_abort_hits_its_segment_and_the_pages_come_back_when_it_is_fenced() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    assert pair.p.sender.queue.run_one()
    pages = list(pair.d.requests[pair.room].pages)
    assert pair.p.sender.state(pair.room) is SenderState.UNFENCED and busy_segments(pair.p) == ["doubtful"]
    pair.d.abort(pair.room)
    pair.pump()
    assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED and pair.seen(pair.d) == []
    assert pair.world.fabric.release_late_writes() == 1
    for page in pages:
        assert (pair.d.memory.kv[:, page] == POISON).all(), "the late write hit a page"
    area = pair.d.memory.area
    assert area is not None and (pair.d.memory.arena[-area.nbytes :] != POISON).any(), "it did land"
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_a_segment_that_a_late_write_may_hit_is_not_written_before_the_d_is_fenced() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    assert pair.p.sender.queue.run_one()
    (peer,) = pair.p.sender.decode_kv_args_table.values()
    assert peer.is_suspended
    link = peer.writer._ranks[0]  # type: ignore[union-attr]
    (doubtful,) = link.handle.segments.doubtful  # type: ignore[attr-defined]
    written: list[int] = []
    pair.world.fabric.on_write = lambda target, copies: written.extend(copies.dst)
    memory = pair.d.memory
    # Directly at the transport: no upper layer prevents the write.
    row = memory.aux_base
    for _ in range(2 * NUM_SEGMENTS):
        link.transport.write(link.handle, _copy_of_a_row(pair.p, row), 1.0)
    assert memory.area is not None
    segments = {(address - memory.area.base) // memory.area.segment_bytes for address in written}
    assert segments == set(range(NUM_SEGMENTS)) - {doubtful}
    assert not link.transport.fence(link.handle, 0.0), "it has not landed yet"
    pair.world.fabric.release_late_writes()
    assert link.transport.fence(link.handle, 0.0)
    written.clear()
    for _ in range(NUM_SEGMENTS):
        link.transport.write(link.handle, _copy_of_a_row(pair.p, row), 1.0)
    segments = {(address - memory.area.base) // memory.area.segment_bytes for address in written}
    assert segments == set(range(NUM_SEGMENTS)), "it came back"


def _copy_of_a_row(p: Node, target: int) -> CopyList:
    return CopyList([p.memory.aux_base], [target], [p.memory.aux_row_bytes])


def test_an_abort_in_the_middle_of_a_scatter_gives_nothing_back_before_the_scatter_is_over() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    during: list[tuple[object, list[Kind]]] = []

    def abort_now() -> None:
        pair.d.abort(pair.room)
        for _ in range(len(pair.world.frames)):
            pair.world.deliver_one()  # P receives the abort in the middle of its write
        pair.d.poll()
        during.append((pair.d.receiver.state(pair.room), list(pair.seen(pair.d))))

    pair.d.copier.meanwhile = abort_now
    assert pair.p.sender.queue.run_one()
    assert during == [(ReceiverState.QUARANTINED, [])] * 2
    pair.d.copier.meanwhile = lambda: None
    pair.pump()
    assert pair.seen(pair.d) == [Kind.RELEASED] and pair.d.receiver.state(pair.room) is None
    pair.world.settle_down()
    pair.world.check_all_returned()


@pytest.mark.parametrize("is_inside", [True, False], ids=["in the middle of a scatter", "before it"])
def test_pages_of_a_p_that_died_come_back_when_no_scatter_of_its_groups_can_touch_them(is_inside: bool) -> None:
    """P's death is known at once, and what it put into a segment is still there."""
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    pair.world.wait_turn = lambda: None  # type: ignore[method-assign]
    assert pair.p.sender.queue.run_one()
    (frame, group), *_ = messages(pair, WriteGroup)
    pair.d.receiver.on_frame(frame.room, frame.payload)
    during: list[list[Kind]] = []

    def die() -> None:
        if pair.p in pair.world.nodes:
            pair.world.kill(pair.p)
            pair.world.publish_view()
        pair.world.advance(DEADLINES.retry_interval_s)
        during.append(list(pair.seen(pair.d)))

    pages = list(pair.d.requests[pair.room].pages)
    if is_inside:
        pair.d.copier.meanwhile = die
        assert pair.d.scatter_one()
        assert during == [[Kind.FAILED]] * 2, "its pages are still written"
    else:
        die()
        assert during == [[Kind.FAILED]], "the group waits for the scattering thread"
        copies = count_copies(pair.d)
        assert pair.d.scatter_one() and copies == [0], "it is dropped"
    pair.d.copier.meanwhile = lambda: None
    pair.world.advance(DEADLINES.retry_interval_s)
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED] and set(pages) <= set(pair.d.memory.free)
    copies = count_copies(pair.d)
    late = msgspec.structs.replace(group, number=group.number + 1)
    message = TransportMessage(pair.p.incarnation, "fake", encode(late))
    pair.d.receiver.on_frame(frame.room, encode_frame(message))
    assert not pair.d.scatter_one() and copies == [0], "a late message of a dead P"
    for page in pages:
        pair.d.memory.check_poison(page)


def test_a_d_that_does_not_scatter_in_time_is_suspended_and_gives_its_pages_back_when_it_has() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    turn, pair.world.wait_turn = pair.world.wait_turn, lambda: None  # type: ignore[method-assign]
    assert pair.p.sender.queue.run_one()
    assert statuses(pair) == [KVPoll.Failed] and not pair.statuses()[0].settled
    assert busy_segments(pair.p) == ["given up"] and pair.p.sender.suspended_ranks == (0,)
    while pair.world.frames:
        frame = pair.world.frames.pop(0)
        message = peer_codec.decode(frame.payload)
        if not isinstance(message, TransportMessage):
            node = pair.p if frame.port == pair.p.port else pair.d
            node.kv.side.on_frame(frame.room, frame.payload)
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.FAILED], "the group may still be scattered"
    pair.world.advance(DEADLINES.retry_interval_s)
    assert pair.p.sender.queue.run_one(), "P tries to fence"
    assert pair.p.sender.state(pair.room) is SenderState.UNFENCED and busy_segments(pair.p) == ["given up"]
    pair.world.wait_turn = turn  # type: ignore[method-assign]
    pair.world.settle_down()
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED] and not busy_segments(pair.p)
    assert pair.p.sender.suspended_ranks == ()
    pair.world.check_all_returned()


def test_success_never_comes_before_the_last_scatter() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    left: list[int] = []

    def check() -> None:
        assert KVPoll.Success not in statuses(pair) and Kind.SUCCESS not in pair.seen(pair.d)
        assert pair.p.sender.state(pair.room) is SenderState.WRITING
        left.append(len(messages(pair, WriteGroup)))

    pair.d.copier.meanwhile = check
    pair.pump()
    assert left and pair.seen(pair.d)[-1] is Kind.SUCCESS
    record = pair.d.memory
    assert pair.d.receiver.machine.bytes_moved == record.aux_row_bytes + 20 * PAGE_BYTES * 2 * NUM_LAYERS


# ----------------------------------------------------------------------------------------- lost, doubled, out of order


@pytest.mark.parametrize("kind", [WriteGroup, Scattered])
def test_a_lost_message_is_said_again_and_no_group_is_scattered_twice(kind: type[WriteGroup] | type[Scattered]) -> None:
    pair = staged_pair()
    pair.both_halves(4)
    compute(pair)
    copies, lost = count_copies(pair.d), set[int]()
    turn = pair.world.wait_turn

    def lossy() -> None:
        for frame, message in messages(pair, kind):
            if message.number not in lost:
                lost.add(message.number)
                pair.world.frames.remove(frame)
        turn()

    pair.world.wait_turn = lossy  # type: ignore[method-assign]
    pair.pump()
    assert pair.seen(pair.p)[-1] is Kind.SUCCESS and pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]
    assert lost and copies == [2 * len(lost)]


def test_a_message_of_a_segments_last_group_that_comes_late_does_not_scatter_the_new_one() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    turn, seen = pair.world.wait_turn, list[tuple[Frame, WriteGroup]]()
    again = [0]

    def late() -> None:
        """Deliver the last group of a segment again when the segment has a new one, both before and after that."""
        for frame, message in messages(pair, WriteGroup):
            assert isinstance(message, WriteGroup)
            for old, former in seen:
                if former.segment == message.segment and former.number < message.number:
                    again[0] += 1
                    pair.d.receiver.on_frame(old.room, old.payload)
            seen.append((frame, message))
        turn()
        for old, _ in seen:
            pair.d.receiver.on_frame(old.room, old.payload)

    copies = count_copies(pair.d)
    pair.world.wait_turn = late  # type: ignore[method-assign]
    pair.pump()
    assert again[0], "segments were used again"
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS
    assert copies == [2 * len({message.number for _, message in seen})], "each group once"


# --------------------------------------------------------------------------------------------------------- segments


def test_no_more_than_the_granted_segments_are_ever_in_use() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    turn, most = pair.world.wait_turn, [0]

    def count() -> None:
        waiting = {message.segment for _, message in messages(pair, WriteGroup)}
        most[0] = max(most[0], len(waiting))
        turn()

    pair.world.wait_turn = count  # type: ignore[method-assign]
    pair.pump()
    assert 1 <= most[0] <= NUM_SEGMENTS and pair.seen(pair.d)[-1] is Kind.SUCCESS


@pytest.mark.parametrize("fault", [FaultKind.DROP, FaultKind.LATE])
def test_a_write_that_failed_ends_its_own_room(fault: FaultKind) -> None:
    pair = staged_pair()
    pair.both_halves()
    other, pair.room = pair.room, new_room()
    pair.both_halves()
    pair.world.fabric.inject(Fault(fault))
    compute(pair)
    while pair.p.requests[other].computed < 10:
        pair.p.compute()
    pair.pump()
    ends = sorted(pair.p.requests[room].seen[-1].name for room in (other, pair.room))
    # While a write may still land, nothing else is written to that D, as with direct writes.
    assert ends == (["RELEASED", "SUCCESS"] if fault is FaultKind.DROP else ["FAILED", "RELEASED"])
    pair.world.settle_down()
    pair.world.check_all_returned()


# ----------------------------------------------------------------------------------------- who takes part, and restarts


def granted(p: Node) -> set[int]:
    (peer,) = p.sender.decode_kv_args_table.values()
    return set(peer.writer._ranks[0].handle.segments.free)  # type: ignore[union-attr, attr-defined]


def test_each_p_is_granted_segments_of_its_own_and_a_restarted_one_gets_those_of_its_predecessor() -> None:
    world = World(1, num_prefill=2, way="staged")
    world.publish_view()
    world.settle_down()
    shares = [granted(p) for p in world.of(Role.PREFILL)]
    assert [len(share) for share in shares] == [NUM_SEGMENTS // 2] * 2 and not shares[0] & shares[1]
    fresh = world.restart(world.of(Role.PREFILL)[1])
    world.publish_view()
    world.settle_down()
    assert granted(fresh) == shares[1]


def test_a_group_of_a_p_that_was_replaced_is_dropped_and_the_new_ones_numbers_begin_anew() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    pair.world.wait_turn, turn = lambda: None, pair.world.wait_turn  # type: ignore[method-assign]
    assert pair.p.sender.queue.run_one()
    (stale, _), *_ = messages(pair, WriteGroup)
    fresh = pair.world.restart(pair.p)
    pair.world.publish_view()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED]
    before = pair.d.receiver.stale_frames
    pair.world.frames.clear()
    pair.world.advance(1.0)
    pair.p, pair.room, pair.world.wait_turn = fresh, new_room(), turn  # type: ignore[method-assign]
    pair.pump()
    pair.d.receiver.on_frame(stale.room, stale.payload)
    assert pair.d.receiver.stale_frames == before + 1 and not pair.d.scatter_one()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


def test_a_restarted_d_starts_with_free_segments() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    fresh = pair.world.restart(pair.d)
    pair.world.publish_view()
    pair.world.frames.clear()
    pair.world.advance(1.0)
    pair.d, pair.room = fresh, new_room()
    pair.pump()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(fresh)[-1] is Kind.SUCCESS
    pair.world.settle_down()


@pytest.mark.parametrize("staging", ["P", "D"])
def test_a_p_and_a_d_of_which_one_alone_stages_write_directly(staging: str) -> None:
    pair = Pair(way="staged")
    pair.world.way, pair.world.segment_bytes = "direct", 0
    if staging == "P":
        pair.d = pair.world.restart(pair.d)
    else:
        pair.p = pair.world.restart(pair.p)
    pair.join()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS
    if staging == "P":
        assert transport_of(pair.p).bytes_staged == 0


def test_of_a_room_of_both_ways_the_row_is_one_piece_and_direct() -> None:
    pair = Pair(3, way="auto").join()
    pair.both_halves(18)
    pair.compute_all()
    pair.world.settle_down()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS
    moved = pair.p.sender.machine.bytes_moved
    assert 0 < transport_of(pair.p).bytes_staged <= moved - pair.d.memory.aux_row_bytes


# ------------------------------------------------------------------------------------------------- what makes no sense

OUT = (1 << 62).to_bytes(8, "little")
WRONG = {
    "no such segment": {"segment": NUM_SEGMENTS},
    "segment -1": {"segment": -1},
    "nothing": {"targets": b"", "lengths": b""},
    "half a number": {"targets": b"\0" * 7, "lengths": b"\0" * 7},
    "other counts": {"lengths": b"\0" * 8 * 99},
    "outside the pool": {"targets": OUT, "lengths": (8).to_bytes(8, "little")},
    "no bytes": {"lengths": bytes(8)},
    "too long": {"lengths": (1 << 40).to_bytes(8, "little")},
}


@pytest.mark.parametrize("name", [*WRONG, "into a segment", "longer than a segment", "another's segment"])
def test_a_group_that_no_p_may_send_is_a_bad_frame_and_touches_nothing(name: str) -> None:
    world = World(1, num_prefill=2, way="staged")
    pair = Pair(way="staged")
    pair.world, (pair.p, _, pair.d) = world, world.nodes
    pair.join()
    area = pair.d.memory.area
    assert area is not None
    row = pair.d.memory.aux_base.to_bytes(8, "little")
    values = {"number": 1, "segment": 0, "targets": row, "lengths": (8).to_bytes(8, "little")}
    values |= WRONG.get(name, {})
    if name == "into a segment":
        values["targets"] = area.base.to_bytes(8, "little")
    if name == "another's segment":
        values["segment"] = NUM_SEGMENTS // 2
    if name == "longer than a segment":
        count = area.segment_bytes // 8 + 1
        values |= {"targets": row * count, "lengths": (8).to_bytes(8, "little") * count}
    before = pair.d.memory.arena.copy()
    message = TransportMessage(pair.p.incarnation, "fake", encode(WriteGroup(**values)))  # type: ignore[arg-type]
    pair.d.receiver.on_frame(bytes(16), encode_frame(message))
    assert pair.d.receiver.unknown_frames == 1 and not pair.d.scatter_one()
    assert (pair.d.memory.arena == before).all()


def test_garbage_between_transports_is_counted_and_costs_nothing() -> None:
    pair = staged_pair()
    for payload in (b"", b"\x93", encode(Scattered(5, 0))):
        for node, other in ((pair.p, pair.d), (pair.d, pair.p)):
            for name in ("fake", "other"):
                message = TransportMessage(other.incarnation, name, payload)
                node.kv.side.on_frame(bytes(16), encode_frame(message))
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


# ------------------------------------------------------------------------------------------------------------ integrity


def test_a_staged_row_that_was_corrupted_is_never_ready() -> None:
    pair = staged_pair()
    pair.both_halves(1)
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.CORRUPT, byte=70))
    pair.pump()
    assert isinstance(pair.error(pair.d), Integrity) and Kind.LOGITS_READY not in pair.seen(pair.d)


def test_verify_kv_covers_gather_write_and_scatter() -> None:
    """A byte is flipped in D's segment, and another by D's own copy."""
    pair = staged_pair(verify_kv="all")
    pair.both_halves(4)
    compute(pair)
    assert pair.p.sender.queue.run_one()  # the row
    pair.world.fabric.inject(Fault(FaultKind.CORRUPT, byte=2))
    pair.pump()
    assert isinstance(pair.error(pair.d), Integrity)

    pair = staged_pair(verify_kv="all")
    pair.both_halves(4)
    page = pair.d.requests[pair.room].pages[0]

    def harm() -> None:
        pair.d.memory.kv[0, page, 1] ^= 1

    compute(pair)
    assert pair.p.sender.queue.run_one()  # the row
    pair.d.copier.meanwhile = harm
    pair.p.sender.queue.run_one()
    pair.d.copier.meanwhile = lambda: None
    pair.pump()
    assert isinstance(pair.error(pair.d), Integrity) and Kind.SUCCESS not in pair.seen(pair.d)


@pytest.mark.parametrize("every", [1, 2])
def test_flips_on_purpose_bite_in_segments_too(every: int) -> None:
    """The row is the first group of this room, its page the second. In a segment both count as KV."""
    pair = staged_pair(verify_kv="all", faults=FaultConfig(flip_byte_every=every))
    pair.both_halves(4)
    compute(pair)
    pair.pump()
    assert isinstance(pair.error(pair.d), Integrity) and Kind.SUCCESS not in pair.seen(pair.d)


def test_a_device_that_cannot_scatter_fails_the_room_and_the_next_one_is_served() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)

    def fail() -> None:
        raise TransferFailed("an illegal memory access")

    pair.d.copier.meanwhile = fail
    assert pair.p.sender.queue.run_one()
    pair.d.copier.meanwhile = lambda: None
    pair.pump()
    assert "illegal memory access" in str(pair.error(pair.p)) and not busy_segments(pair.p)
    pair.room = new_room()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS
