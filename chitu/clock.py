"""Time as a value: the shell passes a clock in, tests pass `testing.clock.FakeClock` and never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...


class RealClock:
    monotonic = staticmethod(time.monotonic)


class Silence:
    """How long a counter has stood still, counted in the caller's own turns of `interval_s`, so that a process that was
    stopped itself blames no peer for it."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._count: int | None = None
        self._turns = 0

    def seconds(self, count: int) -> float:
        """Return how long the counter has stood still. Call it every `interval_s`."""
        self._turns = self._turns + 1 if count == self._count else 0
        self._count = count
        return self._turns * self._interval_s
