"""A clock for tests."""

from __future__ import annotations


class FakeClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
