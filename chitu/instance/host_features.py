"""Images whose features have a copy in host memory: which, under which numbers, and which give way.

The tier behind the feature region. An image that gives up its rows is copied there, by the step that gives them to
another one, and a prompt that needs it later has it copied back in place of encoding it. The copies are the executor's;
plans name them by numbers, each of which is used once. Step thread only; no tensor.

Invariant: a plan never drops a copy that it saves or loads. So it drops first, and may be repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import LoadImage, SaveImage, StepPlan


class _Copy(NamedTuple):
    number: int
    num_rows: int


class HostFeatures:
    def __init__(self, num_rows: int = 0) -> None:
        """`num_rows`: feature rows that all copies have at most; 0: there are none."""
        self.num_rows = num_rows
        self.num_used = 0
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()
        """By key, the least recently used first."""
        self._dropped: list[int] = []
        """Numbers that the next plan drops."""
        self._held: set[int] = set()
        """Numbers that the present plan saves, loads or may load."""
        self._next = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._copies

    def begin_plan(self) -> None:
        """Note that a new plan begins."""
        self._held.clear()

    def save(self, key: bytes, rows: NDArray[np.int32], plan: StepPlan) -> None:
        """Have a plan copy an image whose rows it gives to another one, unless there is a copy, or no room."""
        if key in self._copies:
            self._copies.move_to_end(key)
            return
        if len(rows) > self.num_rows:
            return
        for other in list(self._copies):
            if self.num_used + len(rows) <= self.num_rows:
                break
            if self._copies[other].number not in self._held:
                self.forget(other)
        if self.num_used + len(rows) > self.num_rows:
            return
        self._next += 1
        self._held.add(self._next)
        self._copies[key] = _Copy(self._next, len(rows))
        self.num_used += len(rows)
        plan.save_images.append(SaveImage(self._next, rows.astype("<i4").tobytes()))

    def hold(self, key: bytes) -> bool:
        """Keep an image here as long as the present plan is made, which may load it. Return whether it is here."""
        if key not in self._copies:
            return False
        self._copies.move_to_end(key)
        self._held.add(self._copies[key].number)
        return True

    def load(self, key: bytes, rows: NDArray[np.int32], plan: StepPlan) -> None:
        """Have a plan copy an image that is held to these rows."""
        plan.load_images.append(LoadImage(self._copies[key].number, rows.astype("<i4").tobytes()))

    def forget(self, key: bytes) -> None:
        """Let an image be found no more. The next plan drops its copy."""
        copy = self._copies.pop(key)
        self.num_used -= copy.num_rows
        self._dropped.append(copy.number)

    def forget_numbers(self, numbers: set[int]) -> None:
        """Let these copies be found no more: they may not have been made, or are damaged."""
        for key in [key for key, copy in self._copies.items() if copy.number in numbers]:
            self.forget(key)

    def drop_all(self) -> None:
        """Let no image be found any more."""
        for key in list(self._copies):
            self.forget(key)

    def end_plan(self, plan: StepPlan) -> None:
        """Have a plan drop, before it saves and loads, what was forgotten."""
        plan.drop_images.extend(self._dropped)
        self._dropped = []
