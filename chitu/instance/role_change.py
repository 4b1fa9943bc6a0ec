"""When an instance that is asked to change its role begins its next life. Pure: states and a time come in.

The main thread's, which looks every few milliseconds; the step thread then begins the next life (`pd_service.py`).
Invariants: a life begins only after nothing of the one before is left, here or at a peer, for `QUIET_S`: by then no
request from a router is in flight. A process that was stopped itself takes no peer for silent.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from chitu.config.schema import DeadlineConfig
from chitu.protocol import InstanceInfo
from chitu.types import new_incarnation, place_of, place_text

QUIET_S = 1.0
"""Time without work after which an instance that was drained leaves, or begins its next life."""
LOOK_S = 0.5
"""Most that the time between two looks counts. More passes only while the process, or its machine, is stopped: then no
answer of a peer is read, and no request."""
KEPT_FORMER = 64
"""Incarnations that an instance remembers of itself: no peer has pages in quarantine for as many changes of role."""


class ChangeStep(Enum):
    WAIT = auto()
    GIVE_BACK = auto()
    """Give its requests back to the router: they have had `role_change_s`."""
    BEGIN = auto()
    UNANSWERED = auto()
    """A peer that may still access pages, or is still written to, does not answer: the process has to end."""


class QuietTime:
    """How long an instance has had no open request, in time in which it looked."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._quiet_s = 0.0

    def look(self, now_s: float, is_done: bool) -> float:
        """Return the seconds since a request was open. Call it every few milliseconds."""
        self._quiet_s = self._quiet_s + min(now_s - self._looked_s, LOOK_S) if is_done else 0.0
        self._looked_s = now_s
        return self._quiet_s


class RoleChange:
    def __init__(self, deadlines: DeadlineConfig, now_s: float, quiet_s: float = QUIET_S) -> None:
        self._deadlines = deadlines
        self._quiet_s = quiet_s
        self._quiet = QuietTime(now_s)
        self._give_back_s = now_s + deadlines.role_change_s

    def turn(self, now_s: float, *, is_done: bool, is_idle: bool) -> ChangeStep:
        """Return what to do now. `is_done`: no request is open; `is_idle`: nothing of them is left at a peer either."""
        quiet_s = self._quiet.look(now_s, is_done)
        if is_done and is_idle:
            return ChangeStep.BEGIN if quiet_s >= self._quiet_s else ChangeStep.WAIT
        if quiet_s >= self._deadlines.transfer_s:
            return ChangeStep.UNANSWERED
        if now_s >= self._give_back_s and not is_done:
            self._give_back_s = now_s + self._quiet_s  # some may have been on their way
            return ChangeStep.GIVE_BACK
        return ChangeStep.WAIT


def next_life(info: InstanceInfo, becomes: str) -> InstanceInfo:
    """Return the record of the next incarnation of an instance, which has the place `becomes` (`place_text`)."""
    role, rank = place_of(becomes)
    home = info.home or place_text(info.role, info.engine_rank)
    return msgspec.structs.replace(
        info,
        role=role,
        engine_rank=rank,
        incarnation=new_incarnation(),
        former=(*info.former, info.incarnation)[-KEPT_FORMER:],
        home="" if home == becomes else home,
    )
