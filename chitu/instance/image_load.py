"""How fast an instance encodes images, as its load reports say: an E, and one that computes prompts.

What counts is the time from the order of an image until its features are there: with the fetch of its file, what
prepares it, and steps in between, because whoever chooses between two instances waits for all of it. As with prompts
(`BacklogMeter`), only time in which an image was wanted counts: an instance that has nothing to do is not slow.
"""

from __future__ import annotations

import math

from chitu.clock import Clock, RealClock

MEMORY_S = 30.0
"""Time constant of the rate: what was measured so many seconds of work ago counts by 1/e."""


class ImageMeter:
    """Seconds of a feature row. Step thread only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._last_s = self._clock.monotonic()
        self._is_busy = False
        self._seconds = self._rows = 0.0
        self._new_rows = 0
        self.busy_s = 0.0
        """Seconds since the start in which an image was wanted."""

    @property
    def row_s(self) -> float:
        """Seconds of a row; 0 before any was encoded."""
        return self._seconds / self._rows if self._rows else 0.0

    def note_encoded(self, num_rows: int) -> None:
        """Note that so many rows were encoded since the last call of `note`."""
        self._new_rows += num_rows

    def note(self, is_busy: bool) -> None:
        """Note whether an image is wanted from now on. Call it whenever that, or what was encoded, may have changed."""
        now_s = self._clock.monotonic()
        if self._is_busy:
            passed_s = now_s - self._last_s
            self.busy_s += passed_s
            kept = math.exp(-passed_s / MEMORY_S)
            self._seconds, self._rows = self._seconds * kept + passed_s, self._rows * kept + self._new_rows
        self._last_s, self._is_busy, self._new_rows = now_s, is_busy, 0
