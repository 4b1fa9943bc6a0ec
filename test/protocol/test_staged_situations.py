"""Single situations of staged transfers: who may touch what, who is told, and what is done once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from pd_node import DEADLINES, NUM_LAYERS, NUM_SEGMENTS, PAGE_BYTES, POISON, Node
from pd_world import Frame, Pair, World, busy_segments

from chitu.config.schema import FaultConfig
from chitu.errors import Integrity, PrefillLost, TransferFailed, TransferTimeout
from chitu.kv_transfer.events import TransferEventKind as Kind
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    KVArgsRegisterInfo,
    Scattered,
    Staged,
    TransferStatus,
    encode,
    peer_codec,
)
from chitu.protocol.states import ReceiverState, SegmentState, SenderState
from chitu.testing.fake_transport import Fault, FaultKind
from chitu.types import Role, new_room


def staged_pair(seed: int = 1, **options: object) -> Pair:
    return Pair(seed, way="staged", **options).join()  # type: ignore[arg-type]


def compute(pair: Pair) -> None:
    """The prompt is computed; nothing is written or delivered yet."""
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while pair.p.requests[pair.room].computed < pair.p.requests[pair.room].num_tokens:
        pair.p.compute()


def write(pair: Pair) -> None:
    while pair.p.sender.queue.run_one():
        pass


def frames_of(pair: Pair, kind: type) -> list[Frame]:
    return [frame for frame in pair.world.frames if isinstance(peer_codec.decode(frame.payload), kind)]


def deliver_to(pair: Pair, node: Node, kind: type) -> int:
    """Deliver the frames of one kind that wait for this node; how many there were."""
    chosen = [frame for frame in frames_of(pair, kind) if frame.port == node.port]
    for frame in chosen:
        pair.world.frames.remove(frame)
        node.kv.comm_side.on_frame(frame.room, frame.payload)
    return len(chosen)


def count_copies(node: Node) -> list[int]:
    calls = [0]

    def meanwhile() -> None:
        calls[0] += 1

    node.copier.meanwhile = meanwhile
    return calls


# ----------------------------------------------------------------------------------------------- aborts and late writes


def test_a_late_write_after_an_abort_hits_its_segment_and_not_the_pages_that_came_back_at_once() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    assert pair.p.sender.queue.run_one()
    pages = list(pair.d.requests[pair.room].pages)
    pair.world.frames.clear()  # P says nothing
    pair.d.abort(pair.room)
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.RELEASED] and set(pages) <= set(pair.d.memory.free)
    assert pair.p.sender.state(pair.room) is SenderState.SETTLING, "P's segment may still be written"
    assert busy_segments(pair.p.sender) == [SegmentState.QUARANTINED]
    assert pair.p.sender.num_quarantined_segments == 1
    assert pair.world.fabric.release_late_writes() == 1
    for page in pages:
        pair.d.memory.check_poison(page)
    area = pair.d.memory.area
    assert area is not None and (pair.d.memory.arena[-area.nbytes :] != POISON).any(), "it did land"
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_what_was_given_back_serves_the_next_room_while_p_still_settles_the_old_one() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    assert pair.p.sender.queue.run_one()
    pair.d.abort(pair.room)
    pair.d.poll()
    old, pair.room = pair.room, new_room()
    pair.pump()
    assert pair.d.decode(pair.room, 80, pair.p), "it has pages and a row for it"
    shared = set(pair.d.requests[old].pages) & set(pair.d.requests[pair.room].pages)
    assert shared and pair.p.sender.state(old) is SenderState.SETTLING
    pair.pump()
    assert pair.p.sender.state(pair.room) is SenderState.ANNOUNCED, "P does not refuse pages that it cannot reach"


def test_an_abort_in_the_middle_of_a_scatter_gives_nothing_back_before_the_scatter_is_over() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    assert pair.p.sender.queue.run_one()
    assert deliver_to(pair, pair.d, Staged) == 1
    during: list[tuple[object, list[Kind]]] = []

    def abort_now() -> None:
        pair.d.abort(pair.room)
        pair.d.poll()
        during.append((pair.d.receiver.state(pair.room), list(pair.seen(pair.d))))

    pair.d.copier.meanwhile = abort_now
    assert pair.d.scatter_one()
    assert during == [(ReceiverState.QUARANTINED, [])] * 2
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.RELEASED]
    assert pair.d.receiver.state(pair.room) is ReceiverState.DISOWNED
    assert len(frames_of(pair, Scattered)) == 1
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_where_writes_may_be_direct_too_pages_wait_for_the_writer_and_for_the_scatter() -> None:
    pair = Pair(3, way="auto").join()
    pair.both_halves(18)
    compute(pair)
    write(pair)
    sender = pair.p.sender
    assert sender.bytes_moved - sender.bytes_staged >= pair.d.memory.aux_row_bytes, "a row is one piece"
    assert deliver_to(pair, pair.d, Staged), "many pieces are staged"
    during: list[list[Kind]] = []

    def abort_and_hear_of_p() -> None:
        pair.d.abort(pair.room)
        assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED
        deliver_to(pair, pair.p, AbortTransfer)
        during.append([Kind.RELEASED] * deliver_to(pair, pair.d, AbortAck))
        pair.d.poll()
        assert pair.seen(pair.d) == []

    pair.d.copier.meanwhile = abort_and_hear_of_p
    assert pair.d.scatter_one()
    assert during[0] == [Kind.RELEASED], "P had stopped before the scatter was over"
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.RELEASED] and pair.d.receiver.state(pair.room) is None
    pair.d.copier.meanwhile = lambda: None
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_where_writes_may_be_direct_too_an_abort_alone_gives_nothing_back() -> None:
    pair = Pair(3, way="auto").join()
    pair.both_halves(18)
    compute(pair)
    write(pair)
    pair.world.frames.clear()
    pair.d.abort(pair.room)
    pair.d.poll()
    assert pair.d.receiver.state(pair.room) is ReceiverState.QUARANTINED and pair.seen(pair.d) == []
    pair.pump()
    assert pair.seen(pair.d) == [Kind.RELEASED]


def test_a_group_of_a_room_that_ended_is_answered_and_not_scattered() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    write(pair)
    pair.d.abort(pair.room)
    pair.d.poll()
    copies = count_copies(pair.d)
    num_groups = deliver_to(pair, pair.d, Staged)
    assert num_groups
    while pair.d.scatter_one():
        pass
    assert copies == [0] and len(frames_of(pair, Scattered)) == num_groups
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_a_frozen_writer_that_left_the_view_keeps_no_pages_of_d() -> None:
    """Written directly they would be quarantined until it is dead."""
    pair = staged_pair()
    pair.both_halves()
    pair.p.is_in_view, pair.p.is_frozen = False, True
    pair.world.publish_view()
    assert isinstance(pair.error(pair.d), PrefillLost)
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED]
    pair.p.is_frozen = False
    pair.p.is_in_view = True
    compute(pair)
    write(pair)
    pair.pump()
    pair.world.settle_down()
    pair.world.check_all_returned()


# ----------------------------------------------------------------------------------------- lost, doubled, out of order


def test_a_lost_group_message_is_repeated_and_the_request_succeeds() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    write(pair)
    assert frames_of(pair, Staged)
    pair.world.frames.clear()
    pair.world.advance(DEADLINES.retry_interval_s)
    pair.pump()
    assert pair.seen(pair.p)[-1] is Kind.SUCCESS and pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_a_lost_answer_is_given_again_without_a_second_scatter() -> None:
    pair = staged_pair()
    pair.both_halves(4)
    compute(pair)
    assert pair.p.sender.queue.run_one()
    (frame,) = frames_of(pair, Staged)
    copies = count_copies(pair.d)
    for _ in range(3):
        pair.d.receiver.on_frame(frame.room, frame.payload)
    while pair.d.scatter_one():
        pass
    assert copies == [2] and len(frames_of(pair, Scattered)) == 1, "one copy; the repeats came before it was over"
    pair.d.receiver.on_frame(frame.room, frame.payload)
    assert not pair.d.scatter_one()
    assert copies == [2] and len(frames_of(pair, Scattered)) == 2
    pair.pump()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS, "the doubled answer did not count twice"


def test_a_message_of_a_segments_last_group_that_comes_late_does_not_scatter_the_new_one() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    assert pair.p.sender.queue.run_one()
    (late,) = frames_of(pair, Staged)
    old = peer_codec.decode(late.payload)
    assert isinstance(old, Staged)
    copies = count_copies(pair.d)
    for _ in range(200):
        deliver_to(pair, pair.d, Staged)
        pair.d.scatter_one()
        deliver_to(pair, pair.p, Scattered)
        pair.p.sender.queue.run_one()
        again = [peer_codec.decode(frame.payload) for frame in frames_of(pair, Staged)]
        if any(isinstance(m, Staged) and m.segment == old.segment and m.number > old.number for m in again):
            break
    before = list(copies)
    pair.d.receiver.on_frame(late.room, late.payload)  # its successor is written, but D was not told of it
    assert not pair.d.scatter_one() and copies == before
    assert deliver_to(pair, pair.d, Staged)
    while pair.d.scatter_one():
        pass
    before = list(copies)
    pair.d.receiver.on_frame(late.room, late.payload)
    assert not pair.d.scatter_one() and copies == before
    pair.pump()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


def test_success_before_the_last_scatter_is_refused() -> None:
    """P never says so; a message that claims it does not become a request with holes."""
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    write(pair)
    pair.world.frames.clear()
    memory = pair.d.memory
    total = memory.aux_row_bytes + 3 * PAGE_BYTES * 2 * NUM_LAYERS
    pair.d.memory.aux.get(pair.d.requests[pair.room].aux_slot)[:] = np.zeros(8, np.float32)
    pair.d.memory.aux.seal(pair.d.requests[pair.room].aux_slot, pair.room)
    status = TransferStatus(pair.p.incarnation, 4, bytes_per_rank=(total,), num_staged=3)
    pair.d.receiver.on_frame(pair.room, encode(status))
    error = pair.error(pair.d)
    assert isinstance(error, Integrity) and "0 were scattered" in str(error)
    assert Kind.SUCCESS not in pair.seen(pair.d)


# --------------------------------------------------------------------------------------------------------- segments


def test_a_segment_is_not_written_again_before_d_is_done_with_it_and_rooms_wait_without_a_thread() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    write(pair)
    assert busy_segments(pair.p.sender) == [SegmentState.STAGED] * NUM_SEGMENTS
    assert len({peer_codec.decode(f.payload).segment for f in frames_of(pair, Staged)}) == NUM_SEGMENTS  # type: ignore[union-attr]
    assert not pair.p.sender.queue.run_one() and len(pair.p.sender.queue) == 1, "it is parked"
    pair.pump()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS and not busy_segments(pair.p.sender)


def test_a_room_that_waits_for_segments_ends_at_its_deadline() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    write(pair)
    pair.world.frames.clear()
    pair.world.clock.advance(DEADLINES.transfer_s)
    pair.p.sender.tick(pair.world.clock.monotonic())
    assert isinstance(pair.error(pair.p), TransferTimeout)
    pair.p.poll()
    assert pair.seen(pair.p)[-1] is Kind.RELEASED, "its own pages wait for nobody"
    pair.world.settle_down()
    pair.world.check_all_returned()


def test_with_every_segment_in_quarantine_the_d_is_suspended_until_one_settled() -> None:
    world = World(1, num_prefill=2, way="staged")
    p, _, d = world.nodes
    num_granted = NUM_SEGMENTS // 2
    pairs = []
    for n in range(num_granted + 1):
        pair = Pair(way="staged")
        pair.world, pair.p, pair.d, pair.room = world, p, d, new_room()
        if not n:
            pair.join()
        pair.world.churn = lambda turns: None  # type: ignore[method-assign]
        if n < num_granted:
            world.fabric.inject(Fault(FaultKind.LATE))
        pair.both_halves(1)
        pair.compute_all()
        pairs.append(pair)
        (peer,) = p.sender.decode_kv_args_table.values()
        assert peer.is_suspended == (n + 1 >= num_granted), n
    assert "does not take writes" in str(pairs[-1].error(p)), "no write was tried"
    assert world.fabric.num_late_writes == num_granted
    assert world.fabric.release_late_writes() == num_granted
    world.settle_down()
    assert not busy_segments(p.sender)
    again = Pair(way="staged")
    again.world, again.p, again.d = world, p, d
    again.both_halves()
    again.compute_all()
    assert again.seen(d)[-1] is Kind.SUCCESS


@pytest.mark.parametrize("fault", [FaultKind.DROP, FaultKind.LATE])
def test_a_write_that_failed_ends_its_own_room_alone(fault: FaultKind) -> None:
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
    assert ends == (["RELEASED", "SUCCESS"] if fault is FaultKind.DROP else ["FAILED", "SUCCESS"])


# ----------------------------------------------------------------------------------------- who takes part, and restarts


def test_each_p_is_granted_segments_of_its_own_and_a_restarted_one_gets_those_of_its_predecessor() -> None:
    world = World(1, num_prefill=2, way="staged")
    world.publish_view()
    world.settle_down()
    granted = [set(next(iter(p.sender.decode_kv_args_table.values())).info.segments) for p in world.of(Role.PREFILL)]
    assert [len(segments) for segments in granted] == [NUM_SEGMENTS // 2] * 2 and not granted[0] & granted[1]
    fresh = world.restart(world.of(Role.PREFILL)[1])
    world.publish_view()
    world.settle_down()
    assert set(next(iter(fresh.sender.decode_kv_args_table.values())).info.segments) == granted[1]


def test_a_group_of_a_p_that_was_replaced_is_dropped_and_the_new_ones_numbers_begin_anew() -> None:
    pair = staged_pair()
    pair.both_halves()
    compute(pair)
    assert pair.p.sender.queue.run_one()
    (stale,) = frames_of(pair, Staged)
    fresh = pair.world.restart(pair.p)
    pair.world.publish_view()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.FAILED, Kind.RELEASED]
    before = pair.d.receiver.stale_frames
    pair.world.frames.clear()
    pair.world.advance(1.0)
    pair.p, pair.room = fresh, new_room()
    pair.pump()
    pair.d.receiver.on_frame(stale.room, stale.payload)
    assert pair.d.receiver.stale_frames == before + 1 and not pair.d.scatter_one()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


def test_a_restarted_d_starts_with_free_segments_and_p_forgets_those_of_the_dead_one() -> None:
    pair = staged_pair()
    pair.both_halves(80)
    compute(pair)
    write(pair)
    assert busy_segments(pair.p.sender)
    fresh = pair.world.restart(pair.d)
    pair.world.publish_view()
    pair.world.frames.clear()
    pair.world.advance(1.0)
    pair.d, pair.room = fresh, new_room()
    pair.pump()
    assert not busy_segments(pair.p.sender)
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(fresh)[-1] is Kind.SUCCESS
    pair.world.settle_down()


def test_a_p_that_cannot_stage_is_told_so_by_its_own_refusal() -> None:
    pair = Pair()
    pair.world.way, pair.world.segment_bytes = "staged", 1024
    fresh = pair.world.restart(pair.d)
    pair.d = fresh
    pair.join()
    assert pair.d.decode(pair.room, 10, pair.p)
    error = pair.error(pair.d)
    assert isinstance(error, TransferFailed) and "takes staged transfers alone" in error.message


def test_a_direct_d_is_written_directly_by_a_p_that_could_stage() -> None:
    pair = staged_pair()
    pair.world.way, pair.world.segment_bytes = "direct", 0
    pair.d = pair.world.restart(pair.d)
    pair.join()
    pair.both_halves()
    pair.compute_all()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS
    assert pair.p.sender.bytes_staged == 0 < pair.p.sender.bytes_moved


# ------------------------------------------------------------------------------------------------- what makes no sense

WRONG = [
    {"segment": NUM_SEGMENTS},
    {"segment": -1},
    {"length": 0},
    {"length": 1 << 40},
]
WRONG_OF_ROOM = [
    {"end_layer": NUM_LAYERS + 1},
    {"first_layer": -1},
    {"end_page": 99},
    {"first_page": -1},
    {"end_page": 0},
    {"length": 8},
    {"aux_slot": 3},
]


def staged_group(pair: Pair) -> tuple[Frame, Staged]:
    """A group of pages that waits to be delivered."""
    pair.both_halves(4)
    compute(pair)
    write(pair)
    for frame in frames_of(pair, Staged):
        message = peer_codec.decode(frame.payload)
        if isinstance(message, Staged) and message.aux_slot < 0:
            return frame, message
    raise AssertionError("no group of pages")


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_group_that_no_p_may_send_is_a_bad_frame_and_touches_nothing(change: dict[str, int]) -> None:
    pair = staged_pair()
    frame, message = staged_group(pair)
    pair.d.receiver.on_frame(frame.room, encode(msgspec.structs.replace(message, **change)))
    assert pair.d.receiver.unknown_frames == 1 and not pair.d.scatter_one()
    pair.pump()
    assert pair.seen(pair.d)[-1] is Kind.SUCCESS


@pytest.mark.parametrize("change", WRONG_OF_ROOM, ids=str)
def test_a_group_that_contradicts_its_room_fails_the_room_and_the_segment_comes_back(change: dict[str, int]) -> None:
    pair = staged_pair()
    frame, message = staged_group(pair)
    copies = count_copies(pair.d)
    pair.d.receiver.on_frame(frame.room, encode(msgspec.structs.replace(message, **change)))
    assert pair.d.scatter_one() and copies == [0]
    assert isinstance(pair.error(pair.d), Integrity)
    assert frames_of(pair, Scattered) and frames_of(pair, AbortTransfer)
    pair.world.settle_down()
    pair.world.check_all_returned()


@pytest.mark.parametrize("segments", [(0, 0), (0, NUM_SEGMENTS), (-1,)], ids=str)
def test_a_registration_with_impossible_segments_is_refused(segments: tuple[int, ...]) -> None:
    pair = Pair(way="staged")
    pair.world.publish_view()
    (frame,) = frames_of(pair, KVArgsRegisterInfo)
    info = peer_codec.decode(frame.payload)
    pair.p.sender.on_frame(frame.room, encode(msgspec.structs.replace(info, segments=segments)))
    assert not pair.p.sender.decode_kv_args_table


@pytest.mark.parametrize("change", ["inside a page", "inside a row", "outside", "too small", "negative"])
def test_a_registration_with_impossible_segment_memory_is_refused(change: str) -> None:
    pair = Pair(way="staged")
    pair.world.publish_view()
    (frame,) = frames_of(pair, KVArgsRegisterInfo)
    info = peer_codec.decode(frame.payload)
    assert isinstance(info, KVArgsRegisterInfo)
    (memory,) = info.ranks
    staging = memory.staging
    assert staging is not None
    wrong = {
        "inside a page": {"base": memory.region_bases[-1]},
        "inside a row": {"base": memory.aux_base},
        "outside": {"base": staging.base + 1},
        "too small": {"segment_bytes": memory.aux_row_bytes - 1},
        "negative": {"num_segments": -1},
    }[change]
    memory = msgspec.structs.replace(memory, staging=msgspec.structs.replace(staging, **wrong))
    pair.p.sender.on_frame(frame.room, encode(msgspec.structs.replace(info, ranks=(memory,))))
    assert not pair.p.sender.decode_kv_args_table
    pair.p.sender.on_frame(frame.room, frame.payload)
    assert pair.p.sender.decode_kv_args_table


# ------------------------------------------------------------------------------------------------------------ integrity


def test_a_staged_row_that_was_corrupted_is_never_ready() -> None:
    pair = staged_pair()
    pair.both_halves(1)
    compute(pair)
    pair.world.fabric.inject(Fault(FaultKind.CORRUPT, byte=70))
    pair.pump()
    assert isinstance(pair.error(pair.d), Integrity) and Kind.LOGITS_READY not in pair.seen(pair.d)


def test_verify_kv_covers_gather_write_and_scatter() -> None:
    """A byte that is flipped in D's segment, and one that D's own copy breaks."""
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

    pair.d.copier.meanwhile = harm
    compute(pair)
    write(pair)
    deliver_to(pair, pair.d, Staged)
    while pair.d.scatter_one():
        pass
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
