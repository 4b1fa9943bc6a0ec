"""An instance that is asked to change its role ends its life in time, and never because it was stopped itself."""

from __future__ import annotations

import pytest

from chitu.config.schema import DeadlineConfig
from chitu.instance.role_change import ChangeStep, QuietTime, RoleChange

DEADLINES = DeadlineConfig(transfer_s=3.0, role_change_s=2.0)


def steps(change: RoleChange, *looks: tuple[float, bool, bool]) -> list[ChangeStep]:
    return [change.turn(now_s, is_done=is_done, is_idle=is_idle) for now_s, is_done, is_idle in looks]


def test_a_life_begins_once_nothing_has_been_left_for_the_quiet_time() -> None:
    change = RoleChange(DEADLINES, 0.0, quiet_s=1.0)
    looks = [(0.4, False, False), (0.8, True, True), (1.0, True, True), (1.5, True, True)]
    assert steps(change, *looks) == [*[ChangeStep.WAIT] * 3, ChangeStep.BEGIN]


def test_requests_are_given_back_after_their_time_and_once_more_if_some_were_on_their_way() -> None:
    change = RoleChange(DEADLINES, 0.0, quiet_s=1.0)
    looks = [(at / 2, False, False) for at in range(8)]
    assert [step is ChangeStep.GIVE_BACK for step in steps(change, *looks)] == [at in (4, 6) for at in range(8)]


def test_a_peer_that_does_not_answer_for_the_time_of_a_transfer_ends_the_process() -> None:
    change = RoleChange(DEADLINES, 0.0)
    looks = [(at / 2, True, False) for at in range(8)]
    assert steps(change, *looks) == [*[ChangeStep.WAIT] * 6, *[ChangeStep.UNANSWERED] * 2]


@pytest.mark.parametrize("was_done", [False, True], ids=["its last request open", "a peer about to answer"])
def test_a_process_that_was_stopped_itself_takes_no_peer_for_silent(was_done: bool) -> None:
    """Found by a script of faults: nothing had a turn for 3.1 s, and P ended although D answered at once."""
    change = RoleChange(DEADLINES, 0.0)
    assert steps(change, (0.1, was_done, False), (3.2, True, False), (3.3, True, False)) == [ChangeStep.WAIT] * 3


def test_a_stop_is_no_time_in_which_a_request_could_have_come_in() -> None:
    change = RoleChange(DEADLINES, 0.0, quiet_s=1.0)
    assert steps(change, (0.1, True, True), (9.0, True, True)) == [ChangeStep.WAIT] * 2


def test_the_quiet_time_starts_anew_with_every_request() -> None:
    quiet = QuietTime(10.0)
    looks = [(10.25, True), (10.5, True), (10.75, False), (11.0, True)]
    assert [quiet.look(now_s, is_done) for now_s, is_done in looks] == [0.25, 0.5, 0.0, 0.25]
