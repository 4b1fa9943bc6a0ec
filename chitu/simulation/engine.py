"""An engine without torch in virtual time: an executor whose steps take the seconds of a profile and compute nothing.

The executor knows of a slot only how many tokens it holds, which with the plan gives the cost of a step. A token is the
number of those before it, on whatever instance: one that is lost, doubled or put elsewhere is seen. Drafts are
those of a model that guesses, in which each token is right with the same chance behind right ones. Steps run one after
the other; `TimedStep.end_s` is known at the launch, so whoever drives the virtual clock waits for it. In a group that
steps together it is known once all members have begun their turns (`group.py`). Only the simulation's one thread calls
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from chitu.engine.executor import MAX_DRAFT, ExecutorInfo, LayerCallback, StepPlan, StepResult, StepSizes
from chitu.engine.waves import NO_OFFER
from chitu.errors import Internal
from chitu.simulation.events import InstanceClock
from chitu.simulation.profile import EngineProfile, StepLoad

NO_TOKEN = 0
"""Drawn by no step, so wrong in a draft."""


def _num_right(draft: Sequence[int], first: int) -> int:
    """Return how many tokens of a draft are those that are drawn: numbers from `first` on."""
    return next((place for place, token in enumerate(draft) if token != first + place), len(draft))


@dataclass(slots=True, eq=False)
class Moment:
    """When a layer of a step is computed (`Ready`)."""

    clock: InstanceClock
    end_s: float

    def is_done(self) -> bool:
        return self.clock.monotonic() >= self.end_s

    def synchronize(self) -> None:
        self.clock.ahead_s = max(self.clock.ahead_s, self.end_s)

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


@dataclass(slots=True, eq=False)
class TimedStep(Moment):
    """A launched step (`StepHandle`) and its end."""

    tokens: StepResult

    def result(self) -> StepResult:
        self.synchronize()
        return self.tokens


class LaunchedStep(NamedTuple):
    """A step whose time is to be set."""

    load: StepLoad
    step: TimedStep
    layers: Sequence[Moment]
    image_rows: float = 0.0
    """Feature rows that it encodes before all else; in a turn of the tower its share of them."""


class Together(Protocol):
    """A group whose members step together (`SimulatedGroup`)."""

    def on_launch(self, executor: TimedExecutor, step: LaunchedStep) -> None:
        """Take a step; set its time once all members have begun the turn."""
        ...


class SimulatedLockstep:
    """`Lockstep` of a member. Its group takes the turns of all members, so that none waits for another one."""

    must_step = False
    is_agreed = False

    def __init__(self) -> None:
        self.others: Sequence[StepSizes] = ()

    def lend(self) -> None:
        raise Internal("the members of a simulated group take their turns together")

    def offer(self, weights: int) -> None:
        if weights != NO_OFFER:
            raise Internal("the weights of a simulated group do not change")


class TimedExecutor:
    """`Executor` whose steps take the seconds of `profile`, divided by `speed`; those of a group that steps `together`
    when that says so."""

    def __init__(
        self,
        info: ExecutorInfo,
        profile: EngineProfile,
        clock: InstanceClock,
        speed: Callable[[], float] = lambda: 1.0,
        together: Together | None = None,
    ) -> None:
        self.info = info
        self._acceptance = profile.draft_acceptance
        self._random = random.Random(0)
        self._speed = speed
        self._profile = profile
        self._together = together
        self.lockstep = SimulatedLockstep()
        """Of a member of a group that steps together."""
        self._clock = clock
        self._kv_len = [0] * info.num_slots
        self._saved: dict[int, int] = {}
        self._tower_rows, self._tower_share = 0, 0.0
        """Feature rows of the images that the tower computes, and the share of their blocks that is done."""
        self._free_s = 0.0
        self.steps = 0
        self.busy_s = 0.0
        """Seconds that all steps took."""

    @property
    def saved_keys(self) -> frozenset[int]:
        return frozenset(self._saved)

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> TimedStep:
        kv_len = self._kv_len
        for offload in plan.offload:
            self._saved[offload.key] = kv_len[offload.slot]
        for key in plan.drop:
            self._saved.pop(key, None)
        for admit in plan.admit:
            kv_len[admit.slot] = admit.kv_len
        for restore in plan.restore:
            kv_len[restore.slot] = self._saved.pop(restore.key)
        prompt_tokens, pairs, context_tokens = 0, 0.0, 0
        slots = [first.slot for first in plan.first_tokens]
        for chunk in plan.prefill:
            prompt_tokens += chunk.length
            pairs += chunk.length * (chunk.start + (chunk.length + 1) / 2)
            kv_len[chunk.slot] = chunk.start + chunk.length
            if chunk.sample:
                slots.append(chunk.slot)
        tokens = [kv_len[slot] for slot in slots]
        drafts, rows = {draft.slot: draft.tokens for draft in plan.drafts}, len(plan.decode)
        for slot in plan.decode:
            drawn = range(kv_len[slot] + 1, kv_len[slot] + 2 + _num_right(drafts.get(slot, ()), kv_len[slot] + 1))
            num_drafted = len(drafts.get(slot, ()))
            rows += num_drafted
            context_tokens += (1 + num_drafted) * drawn[0]
            kv_len[slot] = drawn[-1]
            slots += [slot] * len(drawn)
            tokens += drawn
        guesses = {slot: self._guess(kv_len[slot]) for slot in slots} if self.info.guesses else {}
        step = TimedStep(self._clock, math.nan, StepResult(slots, tokens, drafts=guesses))
        layers = [] if on_layer is None else [Moment(self._clock, math.nan) for _ in range(self.info.num_layers)]
        load = StepLoad(prompt_tokens, pairs, rows, context_tokens)
        launched = LaunchedStep(load, step, layers, image_rows := self._encode(plan))
        if self._together is not None:
            self._together.on_launch(self, launched)
        else:
            start_s = max(self._clock.monotonic() + self._profile.cost.turn_s, self._free_s)
            seconds = self._profile.seconds([launched.load]) + self._profile.images.row_s * image_rows
            self.settle(launched, start_s, seconds / self._speed())
        if on_layer is not None:
            for layer, moment in enumerate(layers):
                on_layer(layer, moment)
        return step

    def _encode(self, plan: StepPlan) -> float:
        """Return how many feature rows a plan encodes, or the share of them that its turn of the tower does."""
        if plan.encode:
            self._tower_rows, self._tower_share = sum(len(image.rows) // 4 for image in plan.encode), 0.0
        before = self._tower_share
        if plan.turn:
            self._tower_share = plan.turn[0].blocks / plan.turn[0].of
        elif plan.encode:
            self._tower_share = 1.0
        return self._tower_rows * max(0.0, self._tower_share - before)

    def settle(self, launched: LaunchedStep, start_s: float, seconds: float) -> None:
        """Set when a step begins, and how long it takes."""
        launched.step.end_s = self._free_s = start_s + seconds
        self.steps += 1
        self.busy_s += seconds
        for layer, moment in enumerate(launched.layers):
            moment.end_s = start_s + seconds * (layer + 1) / len(launched.layers)

    def _guess(self, newest: int) -> list[int]:
        """Return a draft behind this token, right up to a random place."""
        count = 0
        while count < MAX_DRAFT and self._random.random() < self._acceptance:
            count += 1
        right = list(range(newest + 1, newest + 1 + count))
        return right + [NO_TOKEN] * (MAX_DRAFT - count)

    def forget(self, slots: Collection[int]) -> None:
        """Do nothing: an admission sets all that is known of a slot."""

    def warmup(self) -> None:
        """Do nothing: no step is slower than another of its kind."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
