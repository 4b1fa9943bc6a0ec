"""The tables of both roles, checked as graphs: no state without an exit, no change after the end."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from chitu import lifecycle
from chitu.lifecycle import Deadline, KVPoll

ROLES = {
    "sender": (
        lifecycle.SenderState,
        lifecycle.SENDER_TRANSITIONS,
        lifecycle.SENDER_DEADLINES,
        lifecycle.SENDER_POLL,
        lifecycle.SENDER_FAILURES,
    ),
    "receiver": (
        lifecycle.ReceiverState,
        lifecycle.RECEIVER_TRANSITIONS,
        lifecycle.RECEIVER_DEADLINES,
        lifecycle.RECEIVER_POLL,
        lifecycle.RECEIVER_FAILURES,
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
def test_a_poll_value_never_goes_back_and_success_and_failed_never_change(role: str) -> None:
    _, transitions, _, polls, _ = ROLES[role]
    for (source, event), target in transitions.items():
        if source is None:
            continue
        for before in polls[source]:
            for after in polls[target]:
                if len(polls[target]) > 1:
                    continue  # a forgotten room keeps what it ended with
                if before in (KVPoll.Failed, KVPoll.Success):
                    assert after == before, (source, event)
                else:
                    assert after > before or after is KVPoll.Failed or after == before, (source, event)


@both_roles
def test_every_open_state_that_has_a_deadline_fails_by_it_and_by_every_other_failure(role: str) -> None:
    states, transitions, deadlines, polls, failures = ROLES[role]
    for state in states:
        if deadlines[state] in (Deadline.BOOTSTRAP, Deadline.TRANSFER):
            for failure in failures:
                assert polls[transitions[state, failure]] == {KVPoll.Failed}


@both_roles
def test_no_clock_event_leaves_a_state_whose_memory_a_peer_may_still_touch(role: str) -> None:
    states, transitions, deadlines, *_ = ROLES[role]
    for (source, event), _ in transitions.items():
        if source is not None and deadlines[source] is Deadline.HANDSHAKE:
            assert event.name in ("SETTLED", "WRITER_STOPPED", "UNTOUCHED")
    assert set(deadlines) == set(states)


def test_a_segment_is_used_again_only_after_an_answer_or_a_settle_and_always_comes_back() -> None:
    states, transitions = lifecycle.SegmentState, lifecycle.SEGMENT_TRANSITIONS
    assert set(lifecycle.SEGMENT_DEADLINES) == set(states)
    for state in states:
        assert states.FREE in reachable(dict(transitions), state)
        if lifecycle.SEGMENT_DEADLINES[state] is Deadline.HANDSHAKE:
            assert [event.name for source, event in transitions if source is state] in (["SCATTERED"], ["SETTLED"])


@pytest.mark.parametrize(
    ("deadlines", "awaits"),
    [
        (lifecycle.SENDER_DEADLINES, lifecycle.SENDER_AWAITS),
        (lifecycle.RECEIVER_DEADLINES, lifecycle.RECEIVER_AWAITS),
        (lifecycle.ATTEMPT_DEADLINES, lifecycle.ATTEMPT_AWAITS),
    ],
    ids=["sender", "receiver", "attempt"],
)
def test_every_state_has_a_deadline_and_what_a_clock_ends_has_words(
    deadlines: dict[Enum, Deadline], awaits: dict[Enum, str]
) -> None:
    assert set(deadlines) == set(type(next(iter(deadlines))))
    assert set(awaits) == {state for state, deadline in deadlines.items() if deadline not in lifecycle.NO_CLOCK}


def test_every_state_of_a_request_on_its_instance_is_ended_by_a_clock_unless_a_peer_may_touch_its_pages() -> None:
    assert set(lifecycle.SEQUENCE_DEADLINES) == set(lifecycle.SequenceState)
    for state, deadlines in lifecycle.SEQUENCE_DEADLINES.items():
        has_clock = bool(deadlines - lifecycle.NO_CLOCK)
        assert has_clock == (state is not lifecycle.SequenceState.CLOSING)
        assert has_clock == (state in lifecycle.SEQUENCE_AWAITS)


def test_the_words_of_a_deadline_name_who_state_seconds_and_peer() -> None:
    what = lifecycle.SENDER_AWAITS[lifecycle.SenderState.REQUESTED].format(peer="D1")
    text = lifecycle.waited_text("P0", 10.04, lifecycle.SenderState.REQUESTED, what)
    assert text == "P0 waited 10.0 s in REQUESTED for D1's announcement"
    for awaits in (lifecycle.SENDER_AWAITS, lifecycle.RECEIVER_AWAITS, lifecycle.ATTEMPT_AWAITS):
        assert all("{peer}" in text for text in awaits.values())
