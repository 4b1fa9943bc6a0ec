"""Virtual time: one heap of events orders everything. Nothing here sleeps.

Equal times keep the order in which they were planned, so a run is a function of its inputs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator


class VirtualClock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class InstanceClock:
    """The virtual clock as an instance reads it: ahead of the world's while it waits for a step within a turn."""

    def __init__(self, world: VirtualClock) -> None:
        self._world = world
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return max(self._world.now_s, self.ahead_s)


class Events:
    """What is going to happen, and the clock that it moves."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.count = 0
        """Events so far."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._numbers: Iterator[int] = itertools.count()

    def at(self, when_s: float, act: Callable[..., object], *values: object) -> None:
        """Call `act` with the values at a virtual moment; in the past means now."""
        heapq.heappush(self._heap, (when_s, next(self._numbers), act, values))

    def run(self, goes_on: Callable[[], bool], until_s: float = math.inf) -> None:
        """Let events happen while `goes_on`, at most until a virtual moment."""
        heap, clock = self._heap, self.clock
        while heap and goes_on():
            when_s, _, act, values = heap[0]
            if when_s > until_s:
                break
            heapq.heappop(heap)
            if when_s > clock.now_s:
                clock.now_s = when_s
            act(*values)
            self.count += 1
        if until_s < math.inf:
            clock.now_s = max(clock.now_s, until_s)
