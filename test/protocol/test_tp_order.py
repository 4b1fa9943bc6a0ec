"""An offload on two ranks with a slower follower: its pages are announced only when both ranks have copied.

The main rank and the follower run the real executor shells over a broadcast in this process. Their only computation is
a copy of pages to host memory, in which the follower can be held.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from chitu.engine.executor import DoneStep, LayerCallback, Offload, StepPlan, StepResult

pytest.importorskip("torch")  # the shells name the real model runner

from chitu.engine.tp_executor import TensorParallelExecutor, run_follower

OLD, NEW = 7, 9


class Runner:
    """The parts of a `ModelRunner` that the shells need: pages, and an offload that copies them."""

    def __init__(self, before_copy: Callable[[], None]) -> None:
        self.pages = np.full(4, OLD)
        self.saved: dict[int, np.ndarray] = {}
        self._before_copy = before_copy

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        for offload in plan.offload:
            self._before_copy()
            self.saved[offload.key] = self.pages.copy()
        return StepResult([], [])

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        return DoneStep(self.execute(plan, on_layer))

    def append_tokens(self, slots: list[int], tokens: list[int]) -> None:
        assert not slots and not tokens

    def close(self) -> None: ...


class Group:
    """Broadcast and barrier of two threads."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._barrier = threading.Barrier(2, timeout=20)

    def send(self, data: bytes) -> None:
        self._orders.put(data)

    def receive(self) -> bytes:
        return self._orders.get(timeout=20)

    def barrier(self) -> None:
        self._barrier.wait()

    def close(self) -> None: ...


class NoWatch:
    """The `ProcessWatch` and `Lifeline` of ranks that are threads."""

    def disarm(self) -> None: ...

    def close(self) -> None: ...


def test_pages_that_a_slow_follower_still_copies_are_not_free_yet() -> None:
    is_copying, may_copy = threading.Event(), threading.Event()

    def slowly() -> None:
        is_copying.set()
        assert may_copy.wait(20)

    group, main, slow = Group(), Runner(lambda: None), Runner(slowly)
    executor = TensorParallelExecutor(main, group, NoWatch())  # type: ignore[arg-type]
    follower = threading.Thread(target=run_follower, args=(slow, group, NoWatch()), daemon=True)
    follower.start()
    step_is_over = threading.Event()

    def step() -> None:
        """Run D's step thread: the step that offloads, and the next, which announces the pages to P, which writes."""
        executor.execute(StepPlan(offload=[Offload(slot=0, key=1)]))
        step_is_over.set()
        for runner in (main, slow):
            runner.pages[:] = NEW

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    assert is_copying.wait(20)
    assert not step_is_over.wait(0.2), "the main rank did not wait for its follower"
    may_copy.set()
    stepping.join(20)
    executor.execute(StepPlan())
    executor.close()
    follower.join(20)
    assert not follower.is_alive()
    assert (main.saved[1] == OLD).all() and (slow.saved[1] == OLD).all()


def test_a_follower_that_hangs_does_not_hold_up_the_end() -> None:
    answers = threading.Event()

    class HangingGroup(Group):
        def barrier(self) -> None:
            assert answers.wait(20)

        def close(self) -> None:
            raise AssertionError("a rank may still use it")

    executor = TensorParallelExecutor(Runner(lambda: None), HangingGroup(), NoWatch(), 0.01)  # type: ignore[arg-type]
    executor.close()
    answers.set()
