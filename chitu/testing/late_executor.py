"""A device that is late, for tests: a step computes some time after it was launched, when the test or somebody's wait
says so.

Wraps an executor that computes at once (`FakeExecutor`, or one with KV of real bytes). Called by the step thread alone.
As on a device, steps run in the order of their launches, layers are handed over before they are computed (with an event
that passes when they are), and what is offloaded is in host memory when `launch` returns. What the wrapped executor
finds wrong with a plan it says when the step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from chitu.engine.executor import MAX_UNREAD_STEPS, ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.testing.fake_executor import InvariantViolation


class EagerExecutor(Protocol):
    """What computes a step at once."""

    @property
    def info(self) -> ExecutorInfo: ...

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult: ...

    def forget(self, slots: Collection[int]) -> None: ...

    @property
    def saved_keys(self) -> frozenset[int]: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class LateStep:
    """Implements `StepHandle`, and `Ready` of all of its layers."""

    executor: LateExecutor
    plan: StepPlan
    slots: frozenset[int]
    """Those that take part."""
    pages: frozenset[int]
    """All that these hold: what the step may read or write."""
    aux_slots: frozenset[int]
    tokens: StepResult | None = None
    """None until it has run."""

    def is_done(self) -> bool:
        return self.tokens is not None

    def result(self) -> StepResult:
        tokens = self._wait()
        self.executor.take(self)
        return tokens

    def _wait(self) -> StepResult:
        while self.tokens is None:
            if not self.executor.run_next():
                raise InvariantViolation("a step is waited for in the middle of itself")
        return self.tokens

    def synchronize(self) -> None:
        self._wait()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class LateExecutor:
    """`unread`: launched steps whose result nobody took; the first of them may have run already."""

    def __init__(self, inner: EagerExecutor) -> None:
        self.inner = inner
        self.unread: deque[LateStep] = deque()
        self.is_running = False
        """In the middle of a step: a caller that waits for it now would wait for ever."""
        self._waiting: deque[LateStep] = deque()
        self._tables: dict[int, list[int]] = {}
        """Pages of each slot, behind the newest launched step."""

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        if len(self.unread) >= MAX_UNREAD_STEPS:
            raise InvariantViolation(f"a step was launched with {MAX_UNREAD_STEPS} unread")
        step = self._step(plan)
        self.unread.append(step)
        self._waiting.append(step)
        if on_layer is not None:
            for layer in range(self.info.num_layers):
                on_layer(layer, step)
        if plan.offload:
            step.synchronize()
        return step

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
        if self.unread:
            raise InvariantViolation("slots are forgotten with a step in flight")
        for slot in slots:
            self._tables.pop(slot, None)
        self.inner.forget(slots)

    @property
    def saved_keys(self) -> frozenset[int]:
        return self.inner.saved_keys

    def run_next(self) -> bool:
        """The device does one step; False where it has none, or is in the middle of one."""
        if not self._waiting or self.is_running:
            return False
        step = self._waiting.popleft()
        self.is_running = True
        step.tokens = self.inner.execute(step.plan)
        self.is_running = False
        return True

    def take(self, step: LateStep) -> None:
        """Its result is read."""
        if step is not self.unread[0]:
            raise InvariantViolation("a step was read before the one launched ahead of it")
        self.unread.popleft()

    def warmup(self) -> None:
        """Nothing to run once."""

    def close(self) -> None:
        self.inner.close()
