"""An asynchronous device for tests: a step runs some time after its launch, when the test says so or a caller waits for
it. Wraps an executor that computes at once (`FakeExecutor`, or one with KV of real bytes). Only the step thread calls
it. As on a device, steps run in the order of their launches, layers are handed over before they are computed (with an
event that completes when they are), and offloaded KV is in host memory when `launch` returns. The wrapped executor
raises its errors about a plan when the step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from chitu.engine.executor import (
    MAX_UNREAD_STEPS,
    ExecutorInfo,
    LayerCallback,
    StepPlan,
    StepResult,
)
from chitu.fake.executor import FakeExecutor, InvariantViolation


@dataclass(slots=True, eq=False)
class LateStep:
    """A launched step. Implements `StepHandle`, and `Ready` of all of its layers."""

    executor: LateExecutor
    plan: StepPlan
    slots: frozenset[int]
    """Slots that take part in the step."""
    pages: frozenset[int]
    """Pages of these slots, which the step may read or write."""
    aux_slots: frozenset[int]
    tokens: StepResult | None = None
    """Result of the step; None until it has run."""
    behind: LateStep | None = None
    """In the lane of prompts: the step that has admitted its slots, behind which it runs at any time."""

    def is_done(self) -> bool:
        return self.tokens is not None

    def result(self) -> StepResult:
        tokens = self._wait()
        self.executor.take(self)
        return tokens

    def _wait(self) -> StepResult:
        while self.tokens is None:
            if not (self.executor.run_beside() if self.behind is not None else self.executor.run_next()):
                raise InvariantViolation("a step waits for itself while it runs")
        return self.tokens

    def synchronize(self) -> None:
        self._wait()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class LateExecutor:
    """Executor whose steps run late. `unread` has the launched steps whose result was not read; the first may have run
    already."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.unread: deque[LateStep] = deque()
        self.beside: LateStep | None = None
        """Step in the lane of prompts that was not read."""
        self.is_running = False
        """Whether a step is running; waiting for it now would never return."""
        self._waiting: deque[LateStep] = deque()
        self._tables: dict[int, list[int]] = {}
        """Pages of each slot after the newest launched step."""

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        if len(self.unread) >= MAX_UNREAD_STEPS:
            raise InvariantViolation(f"a step was launched with {MAX_UNREAD_STEPS} unread")
        step = self._step(plan)
        if self.beside is not None and (plan.prefill or step.slots & self.beside.slots):
            raise InvariantViolation("a step has chunks, or a slot of those in the lane of prompts")
        self.unread.append(step)
        self._waiting.append(step)
        if on_layer is not None:
            for layer in range(self.info.num_layers):
                on_layer(layer, step)
        if plan.offload:
            step.synchronize()
        return step

    def launch_beside(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> tuple[LateStep, LateStep]:
        if self.beside is not None:
            raise InvariantViolation("two steps in the lane of prompts")
        step = self.launch(msgspec.structs.replace(plan, prefill=[]))
        self.beside = self._step(StepPlan(prefill=plan.prefill))
        self.beside.behind = step
        return step, self.beside

    def _step(self, plan: StepPlan) -> LateStep:
        for offload in plan.offload:
            self._tables.pop(offload.slot, None)
        for slot in plan.release:
            self._tables.pop(slot, None)
        for admit in plan.admit:
            self._tables[admit.slot] = list(admit.pages)
        for append in plan.append:
            self._tables[append.slot] += append.pages
        slots = {restore.slot for restore in plan.restore} | {first.slot for first in plan.first_tokens}
        slots |= {chunk.slot for chunk in plan.prefill} | set(plan.decode)
        aux_slots = {first.aux_slot for first in plan.first_tokens} | {chunk.aux_slot for chunk in plan.prefill}
        pages = frozenset(page for slot in slots for page in self._tables.get(slot, ()))
        pages |= {copy.source for copy in plan.copy}
        return LateStep(self, plan, frozenset(slots), pages, frozenset(aux_slots - {-1}))

    def forget(self, slots: Collection[int]) -> None:
        if self.unread or self.beside is not None:
            raise InvariantViolation("slots are forgotten with a step in flight")
        for slot in slots:
            self._tables.pop(slot, None)
        self.inner.forget(slots)

    @property
    def saved_keys(self) -> frozenset[int]:
        return self.inner.saved_keys

    def run_next(self) -> bool:
        """Run one step. Return False if there is none, or one is running."""
        if not self._waiting or self.is_running:
            return False
        step = self._waiting.popleft()
        self.is_running = True
        step.tokens = self.inner.execute(step.plan)
        self.is_running = False
        return True

    def run_beside(self) -> bool:
        """Run the step in the lane of prompts, behind the one that it follows. Return False if it has run, there is
        none, or one is running."""
        step = self.beside
        if step is None or step.tokens is not None or self.is_running:
            return False
        assert step.behind is not None
        while step.behind.tokens is None:
            self.run_next()
        self.is_running = True
        step.tokens = self.inner.execute(step.plan)
        self.is_running = False
        return True

    def take(self, step: LateStep) -> None:
        """Remove a step whose result was read."""
        if step is self.beside:
            self.beside = None
            return
        if step is not self.unread[0]:
            raise InvariantViolation("a step was read before the one launched ahead of it")
        self.unread.popleft()

    def warmup(self) -> None:
        """Do nothing: there is nothing to warm up."""

    def close(self) -> None:
        self.inner.close()
