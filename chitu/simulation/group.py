"""`SimulatedGroup`: the members of an instance of several data ranks, in virtual time.

With experts that are spread, all members take each turn at the same moment: one event begins the turns of all, and one
ends them once the slowest is done. A member without work waits for the others, as one that lends. What waves, bells and
agreements do between real processes is this one loop; what they cost is in the profile (`exchange`). The weights of
such a group do not change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chitu.engine.executor import StepHandle, StepSizes
from chitu.errors import Internal
from chitu.protocol import GroupPlace
from chitu.simulation.engine import LaunchedStep, TimedExecutor, TimedStep
from chitu.simulation.events import Events, InstanceClock
from chitu.simulation.profile import EngineProfile


class GroupMember(Protocol):
    """An instance of the group (`SimulatedInstance`)."""

    is_gone: bool
    is_frozen: bool
    is_slow: bool
    clock: InstanceClock
    speed: float
    executor: TimedExecutor

    def begin_turn(self) -> StepHandle | None: ...

    def end_turn(self) -> bool: ...

    def pump(self) -> None: ...


class GroupWorld(Protocol):
    @property
    def events(self) -> Events: ...


class SimulatedGroup:
    """`profile`: of all members."""

    def __init__(self, world: GroupWorld, profile: EngineProfile) -> None:
        self._world = world
        self._profile = profile
        self.members: list[GroupMember] = []
        self._id = 0
        self._launched: dict[TimedExecutor, LaunchedStep] = {}
        self._others: dict[TimedExecutor, list[StepSizes]] = {}
        """What the other members compute in this turn: known once all have begun it."""
        self._free_s = 0.0
        self._is_busy = self._is_due = False
        self.num_turns = 0

    @property
    def steps_together(self) -> bool:
        return self._profile.experts == "spread"

    def place(self, incarnation: int) -> GroupPlace:
        """Return the place of the next member, which has this incarnation."""
        self._id = self._id or incarnation
        return GroupPlace(self._id, len(self.members), self._profile.dp_size, self.steps_together)

    def on_launch(self, executor: TimedExecutor, step: LaunchedStep) -> None:
        """Take the step that a member has launched in this turn."""
        if executor in self._launched:
            raise Internal("a member of a group has launched two steps in one turn")
        self._launched[executor] = step
        executor.lockstep.others = self._others[executor] = []

    # ------------------------------------------------------------------------------------------------------- the turns

    def wake(self) -> None:
        """Begin a turn of all members now, or after the one that runs."""
        if not (self._is_busy or self._is_due):
            self._is_due = True
            begins_s = max(member.clock.monotonic() for member in self.members)
            self._world.events.at(begins_s, self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_due = False
        members = [member for member in self.members if not member.is_gone]
        if not members or any(member.is_frozen or member.is_slow for member in members):
            return  # all wait for the one that is stopped
        self._is_busy = True
        self._launched.clear()
        self._others.clear()
        waited = [member.begin_turn() for member in members]
        if self._launched:
            self._settle(members)
            self.num_turns += 1
        for member in members:
            member.pump()
        now_s = self._world.events.clock.now_s
        ends_s = [step.end_s for step in waited if isinstance(step, TimedStep)]
        self._world.events.at(max([now_s, *ends_s]), self._end_turn)

    def _settle(self, members: Sequence[GroupMember]) -> None:
        """Say how long the step takes that the members have launched in this turn, and to each what the others
        compute."""
        steps = list(self._launched.values())
        seconds = self._profile.seconds([step.load for step in steps])
        seconds += self._profile.images.row_s * max(step.image_rows for step in steps)
        seconds /= min(member.speed for member in members)
        begins_s = max(member.clock.monotonic() for member in members) + self._profile.cost.turn_s
        begins_s = max(begins_s, self._free_s)
        self._free_s = begins_s + seconds
        sizes = {executor: step.load.sizes for executor, step in self._launched.items()}
        for member in members:
            executor = member.executor
            others = [sizes.get(other.executor, StepSizes()) for other in members if other is not member]
            if executor in self._launched:
                self._others[executor].extend(others)
                executor.settle(self._launched[executor], begins_s, seconds)
            else:
                executor.lockstep.others = others

    def _end_turn(self) -> None:
        self._is_busy = False
        members = [member for member in self.members if not member.is_gone]
        if any([member.end_turn() for member in members]):
            self.wake()
