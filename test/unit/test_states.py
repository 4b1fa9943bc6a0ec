"""The tables of both roles, checked as graphs: no state without an exit, no change after the end."""

from __future__ import annotations

import ast
import runpy
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import chitu
from chitu.instance.sequences import OPEN_STATES, SEQUENCE_AWAITS
from chitu.kv_transfer import receiver, sender_table
from chitu.kv_transfer.both_sides import NO_CLOCK, Deadline
from chitu.protocol.peer import KVPoll
from chitu.router.generation import GENERATION_AWAITS, RUNNING, GenerationState
from chitu.types import waited_text

ROLES = {
    "sender": (
        sender_table.SenderState,
        sender_table.SENDER_TRANSITIONS,
        sender_table.SENDER_DEADLINES,
        {
            sender_table.SenderState.STOPPING,
            sender_table.SenderState.UNFENCED,
            sender_table.SenderState.FENCING,
            sender_table.SenderState.RELEASED,
        },
        sender_table.SENDER_FAILURES,
    ),
    "receiver": (
        receiver.ReceiverState,
        receiver.RECEIVER_TRANSITIONS,
        receiver.RECEIVER_DEADLINES,
        {
            receiver.ReceiverState.QUARANTINED,
            receiver.ReceiverState.RELEASED,
        },
        receiver.RECEIVER_FAILURES,
    ),
}
both_roles = pytest.mark.parametrize("role", ROLES)


def reachable(transitions: dict[Any, Any], start: Enum | None) -> set[Any]:
    found, border = {start}, [start]
    while border:
        state = border.pop()
        for (source, _), target in transitions.items():
            if source == state and target not in found:
                found.add(target)
                border.append(target)
    return found


def test_kv_poll_has_the_values_that_ranks_merge_with_min() -> None:
    assert [poll.value for poll in KVPoll] == [0, 1, 2, 3, 4]
    assert min(KVPoll.Failed, KVPoll.Success) is KVPoll.Failed


@both_roles
def test_every_state_can_be_reached_from_an_unknown_room(role: str) -> None:
    states, transitions, *_ = ROLES[role]
    assert reachable(transitions, None) == {None, *states}


@both_roles
def test_from_every_state_a_terminal_one_can_be_reached(role: str) -> None:
    states, transitions, deadlines, *_ = ROLES[role]
    terminal = {state for state in states if deadlines[state] is Deadline.TERMINAL}
    for state in states:
        assert reachable(transitions, state) & terminal


@both_roles
def test_terminal_states_absorb_every_event(role: str) -> None:
    _, transitions, deadlines, *_ = ROLES[role]
    assert not [source for source, _ in transitions if source and deadlines[source] is Deadline.TERMINAL]


@both_roles
def test_a_room_that_failed_never_succeeds_and_one_that_succeeded_never_fails(role: str) -> None:
    states, transitions, _, failed, _ = ROLES[role]
    for state in failed:
        assert states.SUCCEEDED not in reachable(transitions, state)
    assert not reachable(transitions, states.SUCCEEDED) & failed


@both_roles
def test_no_event_leads_back_but_the_end_of_a_threads_visit(role: str) -> None:
    _, transitions, *_ = ROLES[role]
    back = {sender_table.SenderEvent.WRITE_ENDED, sender_table.SenderEvent.FENCE_FAILED}
    forward = {pair: target for pair, target in transitions.items() if pair[1] not in back}
    for source, target in {(source, target) for (source, _), target in forward.items()}:
        assert source is None or source not in reachable(forward, target), (source, target)


@both_roles
def test_every_open_state_that_has_a_deadline_fails_by_it_and_by_every_other_failure(role: str) -> None:
    """After P's Success D no longer depends on P, which has written everything."""
    all_states, transitions, deadlines, failed, failures = ROLES[role]
    for state in all_states:
        if deadlines[state] in (Deadline.BOOTSTRAP, Deadline.TRANSFER):
            is_written = state in (receiver.ReceiverState.WRITTEN, receiver.ReceiverState.VERIFYING)
            for failure in receiver.RECEIVER_OWN_FAILURES if is_written else failures:
                assert transitions[state, failure] in failed | {sender_table.SenderState.FORGOTTEN}


@both_roles
def test_no_clock_event_leaves_a_state_whose_memory_a_peer_may_still_touch(role: str) -> None:
    states, transitions, deadlines, *_ = ROLES[role]
    for (source, event), target in transitions.items():
        if source is not None and deadlines[source] is Deadline.HANDSHAKE:
            writer_stopped = ("FENCED", "STOPPED", "SUCCESS", "WRITER_DEAD", "WRITE_ENDED", "WRITE_FAILED", "LANDED")
            assert event.name in writer_stopped or deadlines[target] is Deadline.HANDSHAKE
    assert set(deadlines) == set(states)


@pytest.mark.parametrize(
    ("deadlines", "awaits"),
    [
        (sender_table.SENDER_DEADLINES, sender_table.SENDER_AWAITS),
        (receiver.RECEIVER_DEADLINES, receiver.RECEIVER_AWAITS),
    ],
    ids=["sender", "receiver"],
)
def test_every_state_has_a_deadline_and_what_a_clock_ends_has_words(
    deadlines: dict[Enum, Deadline], awaits: dict[Enum, str]
) -> None:
    assert set(deadlines) == set(type(next(iter(deadlines))))
    assert set(awaits) == {state for state, deadline in deadlines.items() if deadline not in NO_CLOCK}


def test_what_a_request_waits_for_has_words_unless_a_peer_may_touch_its_pages_or_it_is_over() -> None:
    assert set(SEQUENCE_AWAITS) == OPEN_STATES
    assert set(GENERATION_AWAITS) == {*RUNNING, GenerationState.RETRYING}


def test_the_words_of_a_deadline_name_who_state_seconds_and_peer() -> None:
    what = sender_table.SENDER_AWAITS[sender_table.SenderState.REQUESTED].format(peer="D1")
    text = waited_text("P0", 10.04, sender_table.SenderState.REQUESTED, what)
    assert text == "P0 waited 10.0 s in REQUESTED for D1's announcement"
    for awaits in (sender_table.SENDER_AWAITS, receiver.RECEIVER_AWAITS, GENERATION_AWAITS):
        assert all("{peer}" in text for text in awaits.values())


def test_the_diagrams_in_the_docs_are_those_of_the_tables() -> None:
    tool = runpy.run_path(str(Path(__file__).resolve().parents[2] / "script" / "state_diagrams.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"](), "call script/state_diagrams.py"


# ----------------------------------------------------------------------------------------------------------------------
# The state machines of P, D and the router use no thread, socket, clock, lock or log.


ROOT = Path(chitu.__file__).parent
PURE = (
    "kv_transfer/receiver.py",
    "kv_transfer/sender.py",
    "kv_transfer/sender_table.py",
    "router/generation.py",
    "router/request.py",
    "router/retry.py",
)


@pytest.mark.parametrize("name", PURE)
def test_a_machine_knows_no_thread_socket_clock_lock_or_log(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.split(".")[0] for module in imported}
    assert not roots & {"threading", "asyncio", "time", "queue", "zmq", "socket", "random", "secrets"}
    assert not {module for module in imported if module.startswith(("chitu.net", "chitu.clock", "chitu.log"))}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & {"getLogger", "monotonic", "acquire", "release", "new_room"}
