"""Single situations of a transfer with a state row, each from start to end."""

from __future__ import annotations

import pytest
from pd_node import NUM_STATES, PAGE_BYTES, STATE_LAYOUT, prompt_of, state_of
from pd_world import Pair
from support.fake_transport import Fault, FaultKind

from chitu.errors import ChituError, Integrity, PrefillLost
from chitu.kv_cache.state_row import STAMP_BYTES, StateStamp, digest_of
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.layout import VerifyKV
from chitu.kv_transfer.transports.staged import TransferWay
from chitu.protocol import TransferInfo, encode, pack_i32

STATE_BYTES = STATE_LAYOUT.state_bytes


def pair(verify_kv: VerifyKV = "off", way: TransferWay = "direct") -> Pair:
    return Pair(verify_kv=verify_kv, way=way, has_state=True).join()


def compute_without_network(pair: Pair) -> None:
    """Compute the room's prompt; nothing is written or delivered meanwhile."""
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while pair.p.requests[pair.room].computed < pair.p.requests[pair.room].num_tokens:
        pair.p.compute()


@pytest.mark.parametrize("way", ["direct", "staged", "auto"])
@pytest.mark.parametrize("verify_kv", ["off", "sample", "all"])
@pytest.mark.parametrize("is_announced_late", [False, True])
def test_a_room_succeeds_with_its_state(way: TransferWay, verify_kv: VerifyKV, is_announced_late: bool) -> None:
    """SUCCESS on D checks every byte."""
    made = pair(verify_kv, way)
    if is_announced_late:
        assert made.p.prefill(made.room, 23, made.d)
        made.compute_all()
        assert made.d.decode(made.room, 23, made.p)
    else:
        made.both_halves(23)
        made.compute_all()
    made.world.settle_down()
    assert made.seen(made.d) == [Kind.LOGITS_READY, Kind.SUCCESS]
    moved = 6 * 6 * PAGE_BYTES + made.d.memory.aux_row_bytes + STATE_BYTES
    assert made.d.receiver.machine.bytes_moved == moved
    made.world.check_all_returned()


def test_the_state_leaves_behind_the_logits_and_all_kv() -> None:
    made = pair()
    sizes: list[int] = []
    made.world.fabric.on_write = lambda peer, copies: sizes.append(copies.nbytes)
    made.both_halves()
    compute_without_network(made)
    made.pump()
    assert sizes[0] == made.p.memory.aux_row_bytes and sizes[-1] == STATE_BYTES


def test_of_a_request_for_one_token_no_state_moves() -> None:
    made = pair()
    made.both_halves(needs_kv=False)
    made.compute_all()
    made.world.settle_down()
    assert made.d.receiver.machine.bytes_moved == made.d.memory.aux_row_bytes
    assert made.seen(made.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_a_p_that_dies_behind_the_kv_and_before_the_state_costs_the_room_and_no_row() -> None:
    made = pair()
    made.both_halves()
    compute_without_network(made)
    pending = made.p.sender.queue._pending[made.room]
    while pending.is_aux or pending.chunks:
        assert made.p.sender.queue.run_one()
    assert pending.is_state
    while made.world.frames:
        made.world.deliver_one()
    made.d.poll()
    assert made.seen(made.d) == [Kind.LOGITS_READY]
    made.world.kill(made.p)
    made.world.publish_view()
    assert isinstance(made.error(made.d), PrefillLost)
    made.world.settle_down()
    assert made.seen(made.d) == [Kind.LOGITS_READY, Kind.FAILED, Kind.RELEASED]
    made.world.check_all_returned()


@pytest.mark.parametrize("fault", [FaultKind.DROP, FaultKind.LATE, FaultKind.CORRUPT])
def test_a_write_of_the_state_that_goes_wrong_fails_the_room(fault: FaultKind) -> None:
    made = pair()
    made.both_halves()
    compute_without_network(made)
    pending = made.p.sender.queue._pending[made.room]
    while pending.is_aux or pending.chunks:
        assert made.p.sender.queue.run_one()
    made.world.fabric.inject(Fault(fault, byte=17))
    made.pump()
    made.world.settle_down()
    assert Kind.FAILED in made.seen(made.d) and Kind.SUCCESS not in made.seen(made.d)
    if fault is FaultKind.CORRUPT:
        assert isinstance(made.error(made.d), Integrity) and "the state" in str(made.error(made.d))
    made.world.check_all_returned()


def planted(made: Pair, change: str) -> None:
    """Make P's row wrong once the prompt is computed."""
    request = made.p.requests[made.room]
    row = made.p.memory.states[request.state_slot]
    if change == "no state":
        row[:] = 0
    elif change == "one chunk old":
        row[:] = state_of(made.room, request.num_tokens - 3)
    elif change == "of another room":
        row[:] = state_of(bytes(16), request.num_tokens)
    elif change == "another room's slot":
        other = next(slot for slot in range(NUM_STATES) if slot != request.state_slot)
        made.p.memory.states[other] = state_of(bytes(16), request.num_tokens)
        made.p.sender.feed._rooms[made.room].state_slot = other


@pytest.mark.parametrize("change", ["no state", "one chunk old", "of another room", "another room's slot"])
def test_a_wrong_state_on_p_never_reaches_a_decode(change: str) -> None:
    """The checksum of a wrong row is right; what it was computed of is in its stamp."""
    made = pair()
    made.both_halves()
    compute_without_network(made)
    planted(made, change)
    made.pump()
    assert Kind.FAILED in made.seen(made.d) and Kind.SUCCESS not in made.seen(made.d)
    words = "is of other tokens" if "another" in change else "has taken in"
    error = made.error(made.d)
    assert isinstance(error, ChituError) and words in error.message
    if change == "another room's slot":
        made.p.memory.states[made.p.sender.feed._rooms.get(made.room, made.p.requests[made.room]).state_slot] = 0xEE
    made.world.settle_down()


@pytest.mark.parametrize("change", ["lost", "half"])
def test_a_row_that_d_has_not_got_is_found(change: str) -> None:
    """Planted: P reports a state as written that was not, or only in part."""
    made = pair()
    made.both_halves()
    compute_without_network(made)
    before = made.d.memory.states[made.d.requests[made.room].state_slot].copy()
    made.world.fabric.on_land = lambda session, copies: None
    writer = made.p.sender.decode_kv_args_table[made.d.incarnation].writer
    assert writer is not None
    write = writer.write_state

    def lose(src_slot: int, dst_slot: int, timeout_s: float) -> tuple[int, ...]:
        moved = write(src_slot, dst_slot, timeout_s)
        row = made.d.memory.states[dst_slot]
        row[STAMP_BYTES + (32 if change == "half" else 0) :] = before[STAMP_BYTES + (32 if change == "half" else 0) :]
        return moved

    writer.write_state = lose  # type: ignore[method-assign]
    made.pump()
    error = made.error(made.d)
    assert isinstance(error, Integrity) and "checksum of the state" in error.message


def test_a_cancelled_room_keeps_its_row_until_p_has_stopped() -> None:
    made = pair()
    made.both_halves()
    compute_without_network(made)
    slot = made.d.requests[made.room].state_slot
    made.d.abort(made.room)
    assert slot not in made.d.memory.free_states
    made.pump()
    made.world.settle_down()
    assert slot in made.d.memory.free_states
    made.world.check_all_returned()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dst_state_index": -1}, "state slot -1 announced of 3"),
        ({"dst_state_index": NUM_STATES}, "state slot 3 announced of 3"),
        ({"dst_state_index": 1 << 40}, "announced of 3"),
        ({"prefix_pages": 1}, "1 prefix pages of 0 full ones"),
        ({"dst_kv_indices": b""}, "state slot 0 announced of 3"),
    ],
)
def test_an_announcement_that_names_rows_wrongly_is_refused(changes: dict[str, object], words: str) -> None:
    made = pair()
    info = TransferInfo(made.d.incarnation, pack_i32([1, 2, 3]), 0, 10, dst_state_index=0)
    assert made.p.prefill(made.room, 10, made.d)
    values = {name: changes.get(name, getattr(info, name)) for name in info.__struct_fields__}
    made.world.fabric.on_write = lambda peer, copies: pytest.fail("a write")
    made.p.sender.on_frame(made.room, encode(TransferInfo(**values)))  # type: ignore[arg-type]
    compute_without_network(made)
    assert made.p.sender.queue.run_one() is False
    assert words in str(made.error(made.p))


def test_a_row_that_may_still_be_written_is_not_announced_for_another_room() -> None:
    made = pair()
    made.both_halves()
    slot = made.d.requests[made.room].state_slot
    other = made.room[::-1]
    assert made.p.prefill(other, 4, made.d)
    free = next(page for page in made.d.memory.free)
    info = TransferInfo(made.d.incarnation, pack_i32([free]), 3, 4, dst_state_index=slot)
    made.p.sender.on_frame(other, encode(info))
    made.p.poll()
    assert f"state slot {slot} is announced for room" in str(made.p.requests[other].error)


def test_the_stamp_is_of_the_prompt_that_d_got_itself() -> None:
    made = pair()
    made.both_halves()
    entry = made.d.receiver.machine.table.get(made.room)
    assert entry is not None
    assert entry.data.state == StateStamp(10, digest_of(prompt_of(made.room, 10)))
