"""Every state of a room on P and on D, and of a request on its instance: which deadline ends it, and with which
message.

Each state is reached with the real parts and left alone. A new state without a line here fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest
from cluster import TURN_S
from cluster_process import DEADLINES as CLUSTER_DEADLINES
from cluster_process import REQUEST_TIMEOUT_S, Process
from cluster_world import ClusterWorld
from pd_node import DEADLINES, Node, logits_of
from pd_world import Pair
from support.fake_transport import Fault, FaultKind

from chitu.errors import BootstrapTimeout, ChituError, TransferStalled, TransferTimeout
from chitu.instance.sequences import OPEN_STATES, SequenceState
from chitu.kv_transfer.both_sides import TICK_INTERVAL_S, Deadline
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.receiver import RECEIVER_DEADLINES, Received, ReceiverState
from chitu.kv_transfer.sender import FenceWrites, JobDequeued, Write
from chitu.kv_transfer.sender_table import SENDER_DEADLINES, SenderState
from chitu.protocol import AuxReady, PeerMessage, TransferStatus, encode, peer_codec
from chitu.protocol.peer import KVPoll
from chitu.types import Role, new_room


def p_requested(pair: Pair) -> None:
    assert pair.p.prefill(pair.room, 10, pair.d)


def d_waiting(pair: Pair) -> None:
    pair.join()
    assert pair.d.decode(pair.room, 10, pair.p)


def p_announced(pair: Pair) -> None:
    d_waiting(pair)
    pair.pump()


def p_waiting(pair: Pair) -> None:
    pair.join().both_halves()


def p_computed(pair: Pair) -> None:
    """Bring the room to a state in which P has computed some of it and written nothing."""
    p_waiting(pair)
    pair.world.churn = lambda turns: None  # type: ignore[method-assign]
    while not len(pair.p.sender.queue):
        pair.p.compute()


def p_transferring(pair: Pair) -> None:
    p_computed(pair)
    assert pair.p.sender.queue.run_one()


def p_succeeded(pair: Pair) -> None:
    p_transferring(pair)
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    while pair.p.sender.queue.run_one():
        pass
    pair.world.frames.clear()


def p_writing(pair: Pair) -> None:
    p_computed(pair)
    begin_visit(pair)


def begin_visit(pair: Pair) -> Write | FenceWrites | None:
    """Let a transfer thread enter a write or an attempt to fence, and stay there."""
    job = pair.p.sender.queue._dequeue(wait=False)
    assert job is not None
    return next(iter(pair.p.sender._handle(JobDequeued(job))), None)


def end_visit(pair: Pair, visit: Write | FenceWrites) -> None:
    """Let the thread return from it."""
    sender = pair.p.sender
    is_fence = isinstance(visit, FenceWrites)
    sender._handle(sender._writer.fence(visit) if is_fence else sender._writer.write(visit))
    sender.queue._busy.clear()


def p_stopping(pair: Pair) -> None:
    p_writing(pair)
    pair.p.abort(pair.room)


def p_unfenced(pair: Pair) -> None:
    p_waiting(pair)
    pair.world.fabric.inject(Fault(FaultKind.LATE))
    pair.compute_all()


def p_fencing(pair: Pair) -> None:
    p_unfenced(pair)
    tick(pair, pair.p, DEADLINES.retry_interval_s)
    begin_visit(pair)


def p_released(pair: Pair) -> None:
    p_transferring(pair)
    pair.p.abort(pair.room)
    pair.world.frames.clear()


def d_bootstrapping(pair: Pair) -> None:
    assert pair.d.decode(pair.room, 10, pair.p)


def d_checking(pair: Pair) -> None:
    p_waiting(pair)
    unseen(pair, AuxReady(pair.p.incarnation))


def d_written(pair: Pair) -> None:
    p_waiting(pair)
    unseen(pair, TransferStatus(pair.p.incarnation, KVPoll.Success, bytes_per_rank=(expected_bytes(pair),)))


def d_verifying(pair: Pair) -> None:
    pair.d.receiver.machine._verifies_kv = True
    d_logits(pair)
    unseen(pair, TransferStatus(pair.p.incarnation, KVPoll.Success, bytes_per_rank=(expected_bytes(pair),)))


def unseen(pair: Pair, message: PeerMessage) -> None:
    """Give D's machine a message, and do not run the verification that it asks for."""
    pair.d.receiver.machine.handle(Received(pair.room, message), pair.world.clock.monotonic())


def expected_bytes(pair: Pair) -> int:
    entry = pair.d.receiver.machine.table.get(pair.room)
    assert entry is not None
    return entry.data.expected_bytes


def d_logits(pair: Pair) -> None:
    p_waiting(pair)
    slot = pair.d.requests[pair.room].aux_slot
    pair.d.memory.aux.get(slot)[:] = logits_of(pair.room)
    pair.d.memory.aux.seal(slot, pair.room)
    pair.d.receiver.on_frame(pair.room, encode(AuxReady(pair.p.incarnation)))


def d_quarantined(pair: Pair) -> None:
    p_waiting(pair)
    pair.d.abort(pair.room)
    pair.world.frames.clear()


REACH: dict[Enum, Callable[[Pair], None]] = {
    SenderState.REQUESTED: p_requested,
    SenderState.ANNOUNCED: p_announced,
    SenderState.WAITING: p_waiting,
    SenderState.TRANSFERRING: p_transferring,
    SenderState.WRITING: p_writing,
    SenderState.SUCCEEDED: p_succeeded,
    SenderState.STOPPING: p_stopping,
    SenderState.UNFENCED: p_unfenced,
    SenderState.FENCING: p_fencing,
    SenderState.RELEASED: p_released,
    ReceiverState.BOOTSTRAPPING: d_bootstrapping,
    ReceiverState.WAITING: d_waiting,
    ReceiverState.CHECKING: d_checking,
    ReceiverState.LOGITS: d_logits,
    ReceiverState.WRITTEN: d_written,
    ReceiverState.VERIFYING: d_verifying,
    ReceiverState.QUARANTINED: d_quarantined,
}
WORDS: dict[Enum, tuple[type[ChituError], str]] = {
    SenderState.REQUESTED: (BootstrapTimeout, "P0 waited 2.0 s in REQUESTED for D0's announcement"),
    SenderState.ANNOUNCED: (
        TransferTimeout,
        "P0 waited 3.0 s in ANNOUNCED for the router's half of the request that D0 announced",
    ),
    SenderState.WAITING: (
        TransferTimeout,
        "P0 waited 3.0 s in WAITING for its computation and the first byte to D0",
    ),
    SenderState.TRANSFERRING: (TransferStalled, "P0 waited 3.0 s in TRANSFERRING for the last byte to reach D0"),
    SenderState.WRITING: (TransferStalled, "P0 waited 3.0 s in WRITING for a write to D0"),
    ReceiverState.BOOTSTRAPPING: (
        BootstrapTimeout,
        "D0 waited 1.0 s in BOOTSTRAPPING for P0 to accept its registration",
    ),
    ReceiverState.WAITING: (TransferTimeout, "D0 waited 3.0 s in WAITING for P0's logits"),
    ReceiverState.CHECKING: (
        TransferTimeout,
        "D0 waited 3.0 s in CHECKING for its check of P0's logits row",
    ),
    ReceiverState.LOGITS: (TransferTimeout, "D0 waited 3.0 s in LOGITS for P0's last KV"),
    ReceiverState.WRITTEN: (
        TransferTimeout,
        "D0 waited 3.0 s in WRITTEN for its check of P0's logits row",
    ),
    ReceiverState.VERIFYING: (
        TransferTimeout,
        "D0 waited 3.0 s in VERIFYING for its check of P0's KV",
    ),
}
BEHIND: dict[type[ChituError], str] = {
    BootstrapTimeout: "",
    TransferTimeout: " (deadlines.transfer_s)",
    TransferStalled: " (deadlines.transfer_s); it had advanced before",
}
"""What is behind the words."""
DEADLINE_OF: dict[Enum, Deadline] = dict((*SENDER_DEADLINES.items(), *RECEIVER_DEADLINES.items()))
LIMITS_S = {Deadline.TRANSFER: DEADLINES.transfer_s, Deadline.REPEAT: DEADLINES.transfer_s}
BOOTSTRAP_S = {SenderState: DEADLINES.queue_s + DEADLINES.bootstrap_s, ReceiverState: DEADLINES.bootstrap_s}


def test_every_state_that_is_not_terminal_has_its_line_here() -> None:
    for states in (SENDER_DEADLINES, RECEIVER_DEADLINES):
        for state, deadline in states.items():
            assert (state in REACH) == (deadline is not Deadline.TERMINAL)
            assert (state in WORDS) == (deadline in (Deadline.BOOTSTRAP, Deadline.TRANSFER))


def side(pair: Pair, state: Enum) -> Node:
    return pair.p if isinstance(state, SenderState) else pair.d


def tick(pair: Pair, node: Node, seconds: float) -> None:
    """Advance the time; only this side checks its clock, and no message is delivered."""
    pair.world.clock.advance(seconds)
    node.kv.side.tick(pair.world.clock.monotonic())


def limit_s(state: Enum) -> float:
    deadline = DEADLINE_OF[state]
    return BOOTSTRAP_S[type(state)] if deadline is Deadline.BOOTSTRAP else LIMITS_S[deadline]


@pytest.mark.parametrize("state", WORDS, ids=str)
def test_a_room_ends_at_its_states_deadline_and_not_before_and_the_error_says_all(state: Enum) -> None:
    pair = Pair()
    REACH[state](pair)
    node = side(pair, state)
    role = node.kv.side
    assert role is not None and role.state(pair.room) is state
    tick(pair, node, TICK_INTERVAL_S)  # sees what was computed on the way to this state
    pair.world.frames.clear()
    entry = role.machine.table.get(pair.room)
    assert entry is not None
    left_s = entry.deadline_s - pair.world.clock.monotonic()
    assert limit_s(state) - TICK_INTERVAL_S <= left_s + 1e-9 and left_s <= limit_s(state)
    tick(pair, node, left_s - 0.05)
    assert role.state(pair.room) is state
    pair.world.frames.clear()
    tick(pair, node, 0.05)
    assert role.state(pair.room) is not state
    kind, text = WORDS[state]
    text += BEHIND[kind]
    if state is SenderState.ANNOUNCED:  # P's step thread never received it; D gets the error
        (status,) = (m for m in map(decoded, pair.world.frames) if isinstance(m, TransferStatus))
        assert (status.code, status.message) == (kind.code, text)
    else:
        error = pair.error(node)
        assert isinstance(error, kind) and error.message == text


def decoded(frame: object) -> object:
    return peer_codec.decode(frame.payload)  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", [SenderState.SUCCEEDED, SenderState.RELEASED], ids=str)
def test_a_status_that_nobody_acknowledges_is_repeated_for_a_while_and_then_forgotten(state: SenderState) -> None:
    pair = Pair()
    REACH[state](pair)
    assert pair.p.sender.state(pair.room) is state
    for _ in range(4):
        pair.world.frames.clear()
        tick(pair, pair.p, DEADLINES.retry_interval_s)
        assert len(pair.statuses()) == 1
    tick(pair, pair.p, DEADLINES.transfer_s)
    assert pair.p.sender.state(pair.room) is None


@pytest.mark.parametrize("state", [s for s in REACH if DEADLINE_OF[s] is Deadline.HANDSHAKE], ids=str)
def test_no_time_frees_memory_that_a_peer_may_touch(state: Enum) -> None:
    pair = Pair()
    REACH[state](pair)
    node = side(pair, state)
    for _ in range(50):
        tick(pair, node, 100.0)
        while pair.p.sender.queue.run_one():
            pass
        node.poll()
    role = node.kv.side
    assert role is not None and role.state(pair.room) is state
    assert Kind.RELEASED not in pair.seen(node)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.LATE], ids=str)
def test_a_write_that_fails_behind_its_rooms_end_is_not_told_again(kind: FaultKind) -> None:
    pair = Pair()
    p_transferring(pair)
    visit = begin_visit(pair)
    assert visit is not None
    tick(pair, pair.p, TICK_INTERVAL_S)
    tick(pair, pair.p, DEADLINES.transfer_s)
    assert pair.p.sender.state(pair.room) is SenderState.STOPPING
    pair.world.fabric.inject(Fault(kind))
    end_visit(pair, visit)
    is_late = kind is FaultKind.LATE
    assert pair.p.sender.state(pair.room) is (SenderState.UNFENCED if is_late else SenderState.RELEASED)
    kinds = [event.kind for event in pair.p.sender.poll()]
    assert kinds == ([Kind.FAILED] if is_late else [Kind.FAILED, Kind.RELEASED])


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_what_is_computed_while_a_thread_writes_is_written_behind_it(is_asked_again: bool) -> None:
    """Covers pages and the logits row; D, which gets no answer, announces again meanwhile."""
    pair = Pair()
    p_transferring(pair)
    assert pair.p.requests[pair.room].computed < 10
    visit, sender = begin_visit(pair), pair.p.sender
    assert visit is not None
    if is_asked_again:
        tick(pair, pair.d, DEADLINES.retry_interval_s)
        assert pair.world.frames
        while pair.world.frames:
            pair.world.deliver_one()
    while pair.p.requests[pair.room].computed < 10:
        pair.p.compute()
    assert sender.state(pair.room) is SenderState.WRITING
    end_visit(pair, visit)
    pair.pump()
    assert pair.seen(pair.p)[-1] is pair.seen(pair.d)[-1] is Kind.SUCCESS


def test_an_unfenced_room_is_released_when_its_d_is_dead() -> None:
    pair = Pair()
    p_unfenced(pair)
    pair.world.kill(pair.d)
    pair.world.publish_view()
    tick(pair, pair.p, DEADLINES.retry_interval_s)
    pair.p.poll()
    assert pair.p.sender.state(pair.room) is None and pair.seen(pair.p)[-1] is Kind.RELEASED


def test_of_one_d_one_attempt_to_fence_runs_at_a_time_and_it_is_for_all_rooms_that_waited() -> None:
    pair = Pair()
    p_computed(pair)
    sender, rooms = pair.p.sender, [pair.room, new_room()]
    pair.room = rooms[1]
    pair.both_halves()
    while len(sender.queue) < 2:
        pair.p.compute()
    for visit in [begin_visit(pair), begin_visit(pair)]:
        assert visit is not None
        pair.world.fabric.inject(Fault(FaultKind.LATE))
        end_visit(pair, visit)
    assert [sender.state(room) for room in rooms] == [SenderState.UNFENCED] * 2
    for _ in range(3):
        tick(pair, pair.p, DEADLINES.retry_interval_s)
        assert len(sender.queue) == 1
    visit = begin_visit(pair)
    assert visit is not None
    assert [sender.state(room) for room in rooms] == [SenderState.FENCING, SenderState.UNFENCED]
    end_visit(pair, visit)
    assert [sender.state(room) for room in rooms] == [SenderState.UNFENCED] * 2, "they may still land"
    pair.world.fabric.release_late_writes()
    tick(pair, pair.p, DEADLINES.retry_interval_s)
    visit = begin_visit(pair)
    assert visit is not None and sender.suspended_ranks == (0,)
    end_visit(pair, visit)
    assert [sender.state(room) for room in rooms] == [SenderState.RELEASED] * 2 and not sender.suspended_ranks


# --------------------------------------------------------------------------------------- a request on its instance


def only(world: ClusterWorld, role: Role, state: SequenceState) -> Process:
    """Return the process of this role, once its only request is in `state`."""
    (process,) = world.of(role)
    for _ in range(200):
        if [s.state for s in process.sequences().values()] == [state]:
            return process
        world.turns(1)
    raise AssertionError(f"{state} was never reached: {process.sequences()}")


WHERE = {
    SequenceState.WAITING: Role.DECODE,
    SequenceState.COMPUTING: Role.PREFILL,
    SequenceState.INFLIGHT: Role.PREFILL,
    SequenceState.TRANSFER: Role.DECODE,
    SequenceState.STARTED: Role.DECODE,
    SequenceState.RUNNING: Role.DECODE,
    SequenceState.RETRACTED: Role.DECODE,
}


@pytest.mark.parametrize("state", WHERE, ids=str)
def test_a_request_that_the_router_forgot_ends_on_its_instance_too(state: SequenceState) -> None:
    world = ClusterWorld(1, 1)
    if state is SequenceState.INFLIGHT:
        world.fabric.inject(*[Fault(FaultKind.LATE)] * 9)
    if state is SequenceState.WAITING:
        while world.of(Role.DECODE)[0].memory.aux.allocate() is not None:
            pass
    if state is SequenceState.INFLIGHT:
        world.of(Role.PREFILL)[0].write = lambda: False  # type: ignore[method-assign]
    if state is SequenceState.STARTED:  # the row is sent, and no page
        p = world.of(Role.PREFILL)[0]
        queue, write = p.kv.side.queue, p.write
        p.write = lambda: any(job.is_aux for job in queue._pending.values()) and write()  # type: ignore[method-assign]
    world.ask(0, 22, 30)
    if state is SequenceState.RETRACTED:
        process = only(world, Role.DECODE, SequenceState.RUNNING)
        sequence = next(iter(process.sequences().values()))
        process.cache.reserve(b"another", process.cache.allocator.num_free * process.cache.page_size)
        del process.cache._rooms[b"another"]  # its pages have no owner now: the next growth gets none
        while sequence.state is SequenceState.RUNNING:
            process.step()
    else:
        process = only(world, WHERE[state], state)
    world.clock.advance(REQUEST_TIMEOUT_S + 0.1 if state is not SequenceState.WAITING else CLUSTER_DEADLINES.queue_s)
    process.step()
    assert [s.state for s in process.sequences().values()] in ([], [SequenceState.CLOSING])
    process.step()
    assert not process.executor.saved_keys and not process.executor.live_slots
    while world.reports:
        world.reports.popleft()()
    (asked,) = world.requests.values()
    assert asked.end == ("queue_timeout" if state is SequenceState.WAITING else "request_timeout")
    assert f"{process.name} waited 1" in asked.message and f"s in {state.name} for" in asked.message


def test_every_state_of_a_request_is_reached_above() -> None:
    passed_in_a_turn = {SequenceState.LOGITS, SequenceState.LANDED}
    of_forks = {SequenceState.FORK_WAITING, SequenceState.FORK_HELD}
    assert OPEN_STATES - WHERE.keys() == passed_in_a_turn | of_forks


def test_requests_of_a_router_that_never_comes_back_end_on_both_sides_and_give_everything_back() -> None:
    world = ClusterWorld(1, 1)
    world.ask(0, 22, 30)
    only(world, Role.DECODE, SequenceState.RUNNING)
    world.ask(0, 22, 30)
    world.op_router(0, 0)
    for process in world.processes:
        process.is_slow = True  # otherwise running requests would simply finish
    beat_s = CLUSTER_DEADLINES.heartbeat_interval_s
    world.turns(round((CLUSTER_DEADLINES.router_s - beat_s) / TURN_S))
    assert only(world, Role.DECODE, SequenceState.RUNNING)
    world.turns(round(2 * beat_s / TURN_S))  # silence is counted in heartbeats
    for process in world.processes:
        process.is_slow = False
    world.turns(2)
    assert not [s for p in world.processes for s in p.sequences().values() if s.state is not SequenceState.CLOSING]
    for _ in range(400):
        world.turns(1)
    assert not world.is_router_alive and not [left for left in world.leftovers() if left != "messages"]
    for process in world.processes:
        process.check_empty()
