"""Time as a value: the shell passes a clock in, tests pass a fake one and never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class RealClock:
    def monotonic(self) -> float:
        return time.monotonic()


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
