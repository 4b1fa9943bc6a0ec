"""P's machine: every event in every state does what the table defines; a pair without an entry changes nothing."""

from __future__ import annotations

import pytest

from chitu.errors import TransferFailed
from chitu.kv_transfer.both_sides import Aborted, Deadline, KVManagerConfig, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.chunks import TransferJob, TransferKVChunk
from chitu.kv_transfer.peers import DecodePeer, PeerView
from chitu.kv_transfer.sender import (
    REPEAT_BYTES,
    DecodeDead,
    Effect,
    Event,
    FenceResult,
    FenceWrites,
    FrameReceived,
    JobDequeued,
    LayersComputed,
    QueueFence,
    Requested,
    SenderMachine,
    Stop,
    Write,
    Written,
)
from chitu.kv_transfer.sender_table import OPEN_STATES, SENDER_DEADLINES, SENDER_NO_STATUS_OWED, SENDER_TRANSITIONS
from chitu.kv_transfer.sender_table import SenderEvent as E
from chitu.kv_transfer.sender_table import SenderState as S
from chitu.kv_transfer.transports.transport import WriteError
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    ClusterView,
    InstanceInfo,
    KVArgsRegisterInfo,
    KVLayout,
    RankMemory,
    StatusAck,
    TransferInfo,
    TransferProgress,
    TransferStatus,
    pack_i32,
)
from chitu.protocol.peer import KVPoll
from chitu.types import Role

ROOM, OTHER_ROOM = b"r" * 16, b"s" * 16
P, OTHER_D, D = 7, 8, 9
"""Incarnations of P, of another D and of D."""
LAYOUT = KVLayout.uniform("m", 1, 2, 8, 4, "float32", 100)
MEMORY = RankMemory(0, (), 0, 1 << 20, (0, 0), (100, 100), 50, 0, 64, 4)
INFO = TransferInfo(D, pack_i32([3, 5]), 0, 8)
PAGES, FIRST_PAGE = TransferKVChunk(0, 1, 0, 2), TransferKVChunk(0, 1, 0, 1)
ROW_JOB, PAGES_JOB, FENCE_JOB = (
    TransferJob(ROOM, is_aux=True),
    TransferJob(ROOM, chunks=[PAGES]),
    TransferJob(ROOM, is_fence=True),
)
VISITS = frozenset({S.WRITING, S.STOPPING})
"""States in which a thread is inside a write, which will end."""


def peer_of(incarnation: int) -> DecodePeer:
    return DecodePeer(KVArgsRegisterInfo(9, 0, incarnation, "d", 1, LAYOUT, (MEMORY,)), MEMORY, None)


class World:
    def __init__(self) -> None:
        config = KVManagerConfig(0, P, "p", 1, LAYOUT)
        deadlines = config.deadlines
        self.limit_s = deadlines.queue_s + deadlines.bootstrap_s + deadlines.transfer_s
        self.view = PeerView(Role.DECODE, "p", lambda pid: True)
        self.machine = SenderMachine(config, self.view)
        self.peer, self.another = peer_of(D), peer_of(OTHER_D)
        self.effects: list[Effect] = []
        self.now_s = 100.0
        self.view.update(ClusterView(1, 1, (InstanceInfo(Role.DECODE, 0, D, "d", 1, 2, LAYOUT, 100),)))
        fence = FenceWrites(ROOM, self.peer, (ROOM,))
        self.inputs: dict[str, tuple[Event, E | None]] = {
            "requested": (Requested(ROOM, "r1", 8, 0, D), E.ADD_REQUEST),
            "requested_otherwise": (Requested(ROOM, "r1", 9, 0, D), E.ADD_REQUEST),
            "announced": (FrameReceived(ROOM, INFO, self.peer), E.ANNOUNCE),
            "announced_wrongly": (
                FrameReceived(ROOM, TransferInfo(D, pack_i32([3, 50]), 0, 8), self.peer),
                E.REFUSED,
            ),
            "announced_by_another": (
                FrameReceived(ROOM, TransferInfo(OTHER_D, INFO.dst_kv_indices, 0, 8), self.another),
                None,
            ),
            "abort": (Aborted(ROOM, TransferFailed("gone")), E.ABORT),
            "abort_of_d": (FrameReceived(ROOM, AbortTransfer(D), self.peer), E.PEER_ABORT),
            "abort_of_another": (FrameReceived(ROOM, AbortTransfer(OTHER_D), self.another), None),
            "d_lost": (ViewChanged(), E.PEER_LOST),
            "deadline": (Tick(), E.DEADLINE),
            "time": (Tick(), None),
            "visit": (JobDequeued(PAGES_JOB), E.WRITE_BEGAN),
            "visit_to_fence": (JobDequeued(FENCE_JOB), None),
            "row_written": (Written(ROW_JOB, (10,)), E.WRITE_ENDED),
            "page_written": (Written(TransferJob(ROOM, chunks=[FIRST_PAGE]), (50,)), E.WRITE_ENDED),
            "pages_written": (Written(PAGES_JOB, (100,)), E.LANDED),
            "write_failed": (Written(PAGES_JOB, error=TransferFailed("reset")), E.WRITE_FAILED),
            "write_late": (Written(PAGES_JOB, error=WriteError("slow", fenced=False)), E.WRITE_UNFENCED),
            "not_fenced": (FenceResult(fence, False), E.FENCE_FAILED),
            "fenced": (FenceResult(fence, True), E.FENCED),
            "d_dead": (DecodeDead(self.peer), E.FENCED),
            "another_d_dead": (DecodeDead(self.another), None),
            "ack_of_success": (FrameReceived(ROOM, StatusAck(D, KVPoll.Success), self.peer), E.ACKNOWLEDGED),
            "ack_of_failed": (FrameReceived(ROOM, StatusAck(D, KVPoll.Failed), self.peer), E.ACKNOWLEDGED),
            "ack_of_another": (FrameReceived(ROOM, StatusAck(OTHER_D, KVPoll.Failed), self.another), None),
        }

    def give(self, name: str) -> list[Effect]:
        if name == "d_lost":
            self.view.update(ClusterView(1, 2, ()))
        if name == "deadline":
            self.now_s += self.limit_s
        effects = self.machine.handle(self.inputs[name][0], self.now_s)
        self.effects += effects
        return effects

    @property
    def state(self) -> S | None:
        entry = self.machine.table.get(ROOM)
        return entry.state if entry is not None else None


INPUTS = tuple(World().inputs)
WAITING = ("requested", "announced")
TRANSFERRING = (*WAITING, "visit", "row_written")
WRITING = (*TRANSFERRING, "visit")
ROAD: dict[S, tuple[str, ...]] = {
    S.REQUESTED: ("requested",),
    S.ANNOUNCED: ("announced",),
    S.WAITING: WAITING,
    S.TRANSFERRING: TRANSFERRING,
    S.WRITING: WRITING,
    S.SUCCEEDED: (*WRITING, "pages_written"),
    S.STOPPING: (*WRITING, "abort"),
    S.UNFENCED: (*WRITING, "write_late"),
    S.FENCING: (*WRITING, "write_late", "time"),
    S.RELEASED: (*WRITING, "write_failed"),
}


def in_state(state: S) -> World:
    world = World()
    for name in ROAD[state]:
        world.give(name)
    assert world.state is state
    return world


def kinds(effects: list[Effect]) -> list[Kind]:
    return [effect.kind for effect in effects if isinstance(effect, TransferEvent)]


def event_of(state: S, name: str) -> E | None:
    """Return what an input means in a state, given the data that came with it."""
    event = World().inputs[name][1]
    if name in ("time", "deadline") and state is S.UNFENCED:
        return E.FENCE_BEGAN
    if name == "requested_otherwise" and state is S.ANNOUNCED:
        return E.REFUSED
    if name == "announced_wrongly" and state is not S.REQUESTED:
        return None  # it was announced already
    if name.startswith("ack_of_") and (state, name) not in (
        (S.SUCCEEDED, "ack_of_success"),
        (S.RELEASED, "ack_of_failed"),
    ):
        return None
    return event


PAIRS = [
    (state, name)
    for state in ROAD
    for name in INPUTS
    if state in VISITS or not isinstance(World().inputs[name][0], Written)
]


@pytest.mark.parametrize(("state", "name"), PAIRS)
def test_every_event_in_every_state_is_a_pair_of_the_table_or_absorbed(state: S, name: str) -> None:
    world, event = in_state(state), event_of(state, name)
    target = SENDER_TRANSITIONS.get((state, event)) if event is not None else None
    effects = world.give(name)
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    statuses = [(m.poll, m.settled) for m in sent if isinstance(m, TransferStatus)]
    acks = sum(isinstance(message, AbortAck) for message in sent)
    if name == "deadline" and state in (S.STOPPING, S.UNFENCED, S.FENCING):
        assert statuses == [(KVPoll.Failed, False)], "no clock ends these: what D was told is repeated"
        statuses = []
    if target is None:
        is_refused = "announced_" in name
        assert world.state is state and kinds(effects) == [] and bool(statuses) == is_refused
        assert acks == (name == "abort_of_another")
        return
    assert world.state is (None if target is S.FORGOTTEN else target)
    ends = state in OPEN_STATES and target not in OPEN_STATES
    is_heard_of = state is not S.ANNOUNCED or name == "requested_otherwise"
    told = [Kind.ANNOUNCED] if target is S.WAITING else [Kind.SUCCESS] if target is S.SUCCEEDED else []
    told += [Kind.FAILED] if ends and target is not S.SUCCEEDED and event is not E.ABORT and is_heard_of else []
    told += [Kind.RELEASED] if target is S.RELEASED or (ends and target is S.FORGOTTEN and is_heard_of) else []
    assert kinds(effects) == told
    stops = [effect for effect in effects if isinstance(effect, Stop)]
    assert len(stops) == ends
    is_told_early = ends and target in (S.STOPPING, S.UNFENCED) and event not in SENDER_NO_STATUS_OWED
    is_known = state in (S.ANNOUNCED, S.WAITING) or name == "announced_wrongly"
    is_told_once = target is S.FORGOTTEN and ends and is_known and event not in SENDER_NO_STATUS_OWED
    expected = [(KVPoll.Success, True)] if target is S.SUCCEEDED else []
    expected += [(KVPoll.Failed, False)] if is_told_early else []
    expected += [(KVPoll.Failed, True)] if target is S.RELEASED or is_told_once else []
    assert statuses == expected
    assert acks == (name == "abort_of_d" and target is S.FORGOTTEN)
    assert any(isinstance(effect, Write) for effect in effects) == (event is E.WRITE_BEGAN)
    assert any(isinstance(effect, QueueFence) for effect in effects) == (event is E.FENCE_BEGAN)
    assert world.peer.is_suspended == (target in (S.UNFENCED, S.FENCING))


def reports(effects: list[Effect]) -> list[int]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.number for message in sent if isinstance(message, TransferProgress)]


def test_the_routers_half_has_time_while_a_step_runs_and_no_longer() -> None:
    world = in_state(S.ANNOUNCED)
    limit_s = KVManagerConfig(0, P, "p", 1, LAYOUT).deadlines.transfer_s
    num_layers = 2 * (1 + LAYOUT.num_layers)
    for layer in range(1, num_layers + 1):
        world.now_s += 0.9 * limit_s
        world.machine.handle(LayersComputed(layer), world.now_s)
        world.give("time")
        assert world.state is S.ANNOUNCED
    world.now_s += 0.9 * limit_s
    world.machine.handle(LayersComputed(num_layers + 1), world.now_s)
    world.give("time")
    assert world.state is S.ANNOUNCED
    world.now_s += 0.1 * limit_s
    world.give("time")
    assert world.state is None, "P computes on, and the half did not come"


@pytest.mark.parametrize("state", [S.WAITING, S.TRANSFERRING, S.WRITING], ids=str)
def test_a_prompt_that_is_not_computed_yet_has_time_while_layers_of_any_prompt_are(state: S) -> None:
    world = in_state(state)
    limit_s, told = KVManagerConfig(0, P, "p", 1, LAYOUT).deadlines.transfer_s, []
    for layer in range(1, 60):
        world.now_s += limit_s / 4
        world.machine.handle(LayersComputed(layer), world.now_s)
        told += reports(world.give("time"))
        assert world.state is state
    assert told == sorted(set(told)) and len(told) > 50
    world.now_s += limit_s - 0.1
    assert reports(world.give("time")) == [] and world.state is state
    world.now_s += 0.1
    world.effects.clear()
    world.give("time")
    assert world.state is not state
    codes = [effect.error.code for effect in world.effects if isinstance(effect, TransferEvent) and effect.error]
    assert codes == ["transfer_stalled"]


def test_a_prompt_that_is_computed_has_time_while_pages_are_written_and_not_while_others_compute() -> None:
    world = in_state(S.WAITING)
    entry = world.machine.table.get(ROOM)
    assert entry is not None
    world.give("time")
    entry.data.computed.computed_s = world.now_s
    world.give("time")
    limit_s = KVManagerConfig(0, P, "p", 1, LAYOUT).deadlines.transfer_s
    for _ in range(10):
        world.now_s += limit_s / 2
        world.machine._num_writes += 1  # a page of another room landed
        world.give("time")
        assert world.state is S.WAITING
    for layer in range(10):
        world.now_s += limit_s / 9
        world.machine.handle(LayersComputed(layer), world.now_s)
        world.give("time")
    assert world.state is None


def test_d_hears_of_progress_a_few_times_within_its_patience_and_never_without() -> None:
    world = in_state(S.WAITING)
    deadlines = KVManagerConfig(0, P, "p", 1, LAYOUT).deadlines
    told = 0
    for tick in range(1, 1001):
        world.now_s += deadlines.transfer_s / 1000
        world.machine.handle(LayersComputed(tick // 2), world.now_s)
        told += len(reports(world.give("time")))
    assert told == 10
    for _ in range(900):
        world.now_s += deadlines.transfer_s / 1000
        told += len(reports(world.give("time")))
    assert told <= 11 and world.state is S.WAITING


def test_every_pair_of_the_table_is_one_that_an_event_brings() -> None:
    found = {(state, event_of(state, name)) for state, name in PAIRS} | {(None, E.ADD_REQUEST), (None, E.ANNOUNCE)}
    suspended = {(state, E.WRITE_FAILED) for state in (S.WAITING, S.TRANSFERRING)}  # a visit, tested below
    missing = {
        (state, event)
        for state, event in SENDER_TRANSITIONS.keys() - found - suspended
        if state is None or event not in (E.REFUSED, E.WRITE_FAILED)  # the table takes these failures in every state
    }
    assert not missing
    assert set(ROAD) == {state for state in S if SENDER_DEADLINES[state] is not Deadline.TERMINAL}


@pytest.mark.parametrize("name", [name for name in INPUTS if not name.startswith(("requested", "abort", "announced"))])
@pytest.mark.parametrize("end", ["ack_of_success", "abort_of_d"])
def test_a_room_that_is_over_stays_over(end: str, name: str) -> None:
    world = in_state(S.SUCCEEDED if end == "ack_of_success" else S.WAITING)
    world.give(end)
    effects = world.give(name)
    assert world.state is None and kinds(effects) == [] and not [e for e in effects if isinstance(e, Send)]
    assert kinds(world.give("requested")) == [Kind.FAILED, Kind.RELEASED]
    refused = [e.message for e in world.give("announced") if isinstance(e, Send)]
    assert [type(message) for message in refused] == [TransferStatus] and world.state is None
    acks = [e.message for e in world.give("abort_of_d") if isinstance(e, Send)]
    assert [type(message) for message in acks] == [AbortAck]


@pytest.mark.parametrize("state", [S.WAITING, S.TRANSFERRING])
def test_a_d_that_is_suspended_is_not_written_to(state: S) -> None:
    world = in_state(state)
    world.peer.unfenced.add(OTHER_ROOM)
    effects = world.give("visit")
    assert not [effect for effect in effects if isinstance(effect, Write)]
    assert kinds(effects) == [Kind.FAILED, Kind.RELEASED]


@pytest.mark.parametrize("ending", ["pages_written", "write_failed"])
def test_nobody_is_told_how_a_room_of_a_lost_d_ended(ending: str) -> None:
    world = in_state(S.WRITING)
    effects = world.give("d_lost") + world.give(ending)
    assert kinds(effects) == [Kind.FAILED, Kind.RELEASED] and world.state is None
    assert not [effect for effect in effects if isinstance(effect, Send)]


def test_what_d_has_announced_is_of_no_other_room_while_it_may_be_written() -> None:
    world = in_state(S.UNFENCED)
    info = TransferInfo(D, pack_i32([5, 7]), 1, 8)
    effects = world.machine.handle(FrameReceived(OTHER_ROOM, info, world.peer), world.now_s)
    assert world.machine.table.get(OTHER_ROOM) is None
    (status,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(status, TransferStatus) and "page 5 is announced for room" in status.message
    world.give("d_dead")
    world.machine.handle(FrameReceived(OTHER_ROOM, info, world.peer), world.now_s)
    assert world.machine.table.get(OTHER_ROOM) is not None


@pytest.mark.parametrize(("num_bytes", "num_sent"), [(100, 10), (4 * REPEAT_BYTES, 2)])
def test_a_large_status_is_repeated_as_often_as_a_slow_link_can_carry_it(num_bytes: int, num_sent: int) -> None:
    world = in_state(S.SUCCEEDED)
    entry = world.machine.table.get(ROOM)
    assert entry is not None
    entry.data.computed.prompt_logprobs = bytes(num_bytes)
    interval_s = KVManagerConfig(0, P, "p", 1, LAYOUT).deadlines.retry_interval_s
    sent = []
    for _ in range(10):
        world.now_s += interval_s
        effects = world.machine.handle(Tick(), world.now_s)
        sent += [e for e in effects if isinstance(e, Send) and isinstance(e.message, TransferStatus)]
    assert len(sent) == num_sent
