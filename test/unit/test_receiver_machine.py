"""D's machine: every event in every state does what the table defines; a pair without an entry changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from chitu.errors import Integrity, TransferFailed
from chitu.kv_transfer.both_sides import Aborted, Deadline, KVManagerConfig, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.peers import (
    REGISTRATION_TRANSITIONS,
    PeerView,
    PrefillPeer,
    RegistrationEvent,
    RegistrationState,
)
from chitu.kv_transfer.receiver import (
    RECEIVER_DEADLINES,
    RECEIVER_TRANSITIONS,
    Announced,
    CheckPages,
    CheckRow,
    Effect,
    Event,
    PagesChecked,
    Received,
    ReceiverEvent,
    ReceiverMachine,
    ReceiveRoom,
    ReceiverState,
    RowChecked,
    WriterDead,
)
from chitu.protocol import (
    AbortAck,
    AbortTransfer,
    AuxReady,
    ClusterView,
    InstanceInfo,
    KVArgsRegisterInfo,
    KVLayout,
    PeerMessage,
    RegisterReply,
    TransferInfo,
    TransferProgress,
    TransferStatus,
)
from chitu.protocol.peer import KVPoll
from chitu.types import REGISTRATION_ROOM, Role

ROOM = b"r" * 16
P, OTHER_P, D = 7, 8, 9
"""Incarnations of P, of another P and of D."""
NUM_BYTES = 100
LAYOUT = KVLayout.uniform("m", 1, 2, 8, 4, "float32", 100)
E, S = ReceiverEvent, ReceiverState
OPEN = [state for state in S if RECEIVER_DEADLINES[state] is not Deadline.TERMINAL]


def of_p(message: PeerMessage) -> Received:
    return Received(ROOM, message)


SUCCESS = of_p(TransferStatus(P, KVPoll.Success, bytes_per_rank=(NUM_BYTES,)))
LOST, PASSED = ViewChanged(), Tick()
"""Events whose meaning depends on earlier ones: P has left the view; the deadline is over."""
INPUTS: dict[str, tuple[Event, ReceiverEvent | None]] = {
    "abort": (Aborted(ROOM, TransferFailed("gone")), E.ABORT),
    "aux_ready": (of_p(AuxReady(P)), E.ROW_SENT),
    "success": (SUCCESS, E.SUCCESS),
    "success_of_other_bytes": (of_p(TransferStatus(P, KVPoll.Success, bytes_per_rank=(NUM_BYTES - 1,))), E.STOPPED),
    "failed": (of_p(TransferStatus(P, KVPoll.Failed, True, "transfer_failed", "x")), E.STOPPED),
    "failed_and_may_land": (of_p(TransferStatus(P, KVPoll.Failed, False, "transfer_failed", "x")), E.PEER_FAILED),
    "abort_ack": (of_p(AbortAck(P)), E.STOPPED),
    "abort_of_p": (of_p(AbortTransfer(P)), E.PEER_FAILED),
    "success_of_another": (of_p(TransferStatus(OTHER_P, KVPoll.Success, bytes_per_rank=(NUM_BYTES,))), None),
    "row_right": (RowChecked(ROOM, None, 3), E.LOGITS),
    "row_wrong": (RowChecked(ROOM, Integrity("row")), E.CORRUPT),
    "pages_right": (PagesChecked(ROOM, None), E.VERIFIED),
    "pages_wrong": (PagesChecked(ROOM, Integrity("pages")), E.CORRUPT),
    "p_lost": (LOST, E.PEER_LOST),
    "p_dead": (WriterDead(P), E.WRITER_DEAD),
    "another_p_dead": (WriterDead(OTHER_P), None),
    "deadline": (PASSED, E.DEADLINE),
    "time": (Tick(), None),
}
FRAMES_OF_A_ROOM = {name for name, (event, _) in INPUTS.items() if isinstance(event, Received)}
ROAD: dict[ReceiverState, tuple[str, ...]] = {
    S.WAITING: (),
    S.CHECKING: ("aux_ready",),
    S.LOGITS: ("aux_ready", "row_right"),
    S.WRITTEN: ("success",),
    S.VERIFYING: ("success", "row_right"),
    S.QUARANTINED: ("abort",),
}
"""Inputs that lead from WAITING to each state."""


class World:
    def __init__(self, verify_kv: Any = "all") -> None:
        config = KVManagerConfig(0, D, "d", 1, LAYOUT, verify_kv=verify_kv)
        self.limit_s = config.deadlines.bootstrap_s + config.deadlines.transfer_s
        self.view = PeerView(Role.PREFILL, "d", lambda pid: True)
        self.machine = ReceiverMachine(config, KVArgsRegisterInfo(7, 0, D, "d", 1, LAYOUT, ()), self.view)
        self.effects: list[Effect] = []
        self.now_s = 100.0
        instance = InstanceInfo(Role.PREFILL, 0, P, "p", 1, 2, LAYOUT, 100)
        self.view.update(ClusterView(1, 1, (instance,)))
        self.handle(ViewChanged())

    def handle(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now_s)
        self.effects += effects
        return effects

    def announce(self) -> None:
        info = TransferInfo(D, b"", 0, 4)
        self.handle(Announced(ROOM, ReceiveRoom("r1", info, 0, NUM_BYTES, 0, 0, P)))

    def register(self) -> None:
        self.handle(Received(REGISTRATION_ROOM, RegisterReply(0, P, D)))

    def reply(self, code: str) -> list[Effect]:
        return self.handle(Received(REGISTRATION_ROOM, RegisterReply(0, P, D, code, "a reason")))

    def give(self, name: str) -> list[Effect]:
        event, _ = INPUTS[name]
        if event is LOST:
            self.view.update(ClusterView(1, 2, ()))
        if event is PASSED:
            self.now_s += self.limit_s
        return self.handle(event)

    @property
    def state(self) -> ReceiverState | None:
        entry = self.machine.table.get(ROOM)
        return entry.state if entry is not None else None

    def kinds(self) -> list[Kind]:
        return [effect.kind for effect in self.effects if isinstance(effect, TransferEvent)]


def in_state(state: ReceiverState) -> World:
    world = World()
    world.announce()
    if state is not S.BOOTSTRAPPING:
        world.register()
        for name in ROAD[state]:
            world.give(name)
    assert world.state is state
    return world


@pytest.mark.parametrize("state", [S.WAITING, S.CHECKING, S.LOGITS], ids=str)
def test_a_room_that_advances_has_time_and_one_that_advanced_is_stalled_and_not_silent(state: ReceiverState) -> None:
    world = in_state(state)
    limit_s = KVManagerConfig(0, D, "d", 1, LAYOUT).deadlines.transfer_s
    for number in range(1, 10):
        world.now_s += 0.9 * limit_s
        world.handle(of_p(TransferProgress(P, number)))
        world.handle(Tick())
        assert world.state is state
    world.now_s += 0.9 * limit_s
    world.handle(of_p(TransferProgress(OTHER_P, 99)))
    world.handle(of_p(TransferProgress(P, 9)))
    world.now_s += 0.1 * limit_s
    world.effects.clear()
    world.handle(Tick())
    (failed,) = [effect for effect in world.effects if isinstance(effect, TransferEvent)]
    assert failed.error is not None and failed.error.code == "transfer_stalled"
    assert failed.error.message.endswith("(deadlines.transfer_s); it had advanced before")


def test_rooms_that_wait_for_the_check_of_another_have_time() -> None:
    world = in_state(S.VERIFYING)
    other = b"o" * 16
    limit_s = KVManagerConfig(0, D, "d", 1, LAYOUT).deadlines.transfer_s
    world.now_s += 0.9 * limit_s
    world.handle(PagesChecked(other, None))
    world.now_s += 0.9 * limit_s
    world.handle(Tick())
    assert world.state is S.VERIFYING
    world.now_s += 0.1 * limit_s
    world.handle(Tick())
    assert world.state is None


def end_of(target: ReceiverState) -> ReceiverState | None:
    return None if RECEIVER_DEADLINES[target] is Deadline.TERMINAL else target


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("state", OPEN, ids=lambda state: state.name)
def test_every_event_in_every_state_is_a_pair_of_the_table_or_absorbed(state: ReceiverState, name: str) -> None:
    world = in_state(state)
    before = world.kinds()
    # The room was not announced yet, so no P can mean it.
    is_stale = state is S.BOOTSTRAPPING and name in FRAMES_OF_A_ROOM
    event = None if is_stale else INPUTS[name][1]
    target = RECEIVER_TRANSITIONS.get((state, event)) if event is not None else None
    effects = world.give(name)
    told = world.kinds()[len(before) :]
    if target is None:
        assert world.state is state and told == []
        return
    assert world.state is end_of(target)
    is_first_failure = target in (S.QUARANTINED, S.RELEASED) and state is not S.QUARANTINED and event is not E.ABORT
    expected = [Kind.FAILED] if is_first_failure else []
    expected += [Kind.LOGITS_READY] if event is E.LOGITS else []
    expected += {S.RELEASED: [Kind.RELEASED], S.SUCCEEDED: [Kind.SUCCESS]}.get(target, [])
    assert told == expected
    sent = [effect.message for effect in effects if isinstance(effect, Send) and effect.room == ROOM]
    assert any(isinstance(message, AbortTransfer) for message in sent) == (target is S.QUARANTINED)
    checks = [type(effect) for effect in effects if isinstance(effect, CheckRow | CheckPages)]
    is_row_due = target is S.CHECKING or (state, target) == (S.WAITING, S.WRITTEN)
    assert checks == ([CheckRow] if is_row_due else [CheckPages] if target is S.VERIFYING else [])


def test_every_pair_of_the_table_is_one_that_an_event_brings() -> None:
    brought = {event for _, event in INPUTS.values()} | {E.ANNOUNCE, E.SENT, E.PEER_FAILED}
    assert {event for _, event in RECEIVER_TRANSITIONS} == brought - {None}
    assert set(ROAD) | {S.BOOTSTRAPPING} == set(OPEN)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("end", ["pages_right", "pages_wrong"])
def test_a_room_that_is_over_stays_over(end: str, name: str) -> None:
    world = in_state(S.VERIFYING)
    world.give(end)
    before = world.kinds()
    world.give(name)
    has_succeeded = end == "pages_right"
    assert world.state is None
    assert world.kinds()[len(before) :] == ([Kind.RELEASED] if has_succeeded and name == "abort" else [])
    with_announcement = len(world.kinds())
    world.announce()
    assert world.state is None and world.kinds()[with_announcement:] == [Kind.FAILED, Kind.RELEASED]


@pytest.mark.parametrize("road", [("success", "row_right"), ("aux_ready", "row_right", "success")])
def test_without_verify_kv_the_row_and_success_are_all(road: tuple[str, ...]) -> None:
    world = World(verify_kv="off")
    world.announce()
    world.register()
    for name in road:
        world.give(name)
    assert world.state is None and world.kinds() == [Kind.LOGITS_READY, Kind.SUCCESS]
    assert world.machine.bytes_moved == NUM_BYTES


@pytest.mark.parametrize("event", RegistrationEvent)
@pytest.mark.parametrize("state", RegistrationState)
def test_a_registration_moves_by_its_table_alone(state: RegistrationState, event: RegistrationEvent) -> None:
    peer = PrefillPeer(P, "p", 2, state)
    target = REGISTRATION_TRANSITIONS.get((state, event))
    assert peer.apply(event) is (target is not None) and peer.state is (target or state)


def test_a_p_that_cannot_reach_d_yet_is_asked_again_and_the_room_waits_for_it() -> None:
    world = World()
    world.announce()
    world.reply("peer_unreachable")
    assert world.state is S.BOOTSTRAPPING and world.machine.prefills.silent() == (P,)
    asked: list[Effect] = []
    while not asked:
        world.now_s += 0.5
        asked = [effect for effect in world.handle(Tick()) if isinstance(effect, Send)]
    assert isinstance(asked[0], Send) and asked[0].room == REGISTRATION_ROOM
    world.reply("")
    assert world.state is S.WAITING and world.machine.prefills.silent() == ()
    refused = World()
    refused.announce()
    refused.reply("incompatible_layout")
    assert refused.state is None, "a refusal is final"
