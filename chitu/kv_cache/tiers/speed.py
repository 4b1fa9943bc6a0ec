"""A speed from recent measurements. One thread notes them, any thread asks."""

from __future__ import annotations

from chitu.clock import Clock

MEMORY_S = 60.0
"""A speed is forgotten after this long without a measurement, so that what was slow once is tried again."""
SHORTEST_S = 1e-6


class MeasuredSpeed:
    """A speed in units per second; the last measurements count most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured = (0.0, 0.0, 0.0)
        """Units, the seconds that they took, and the time of the last measurement."""

    def note(self, units: float, seconds: float) -> None:
        now_s = self._clock.monotonic()
        past_units, past_seconds, at_s = self._measured
        kept = 0.5 if now_s - at_s < MEMORY_S else 0.0
        self._measured = (kept * past_units + units, kept * past_seconds + max(seconds, SHORTEST_S), now_s)

    def per_s(self) -> float | None:
        """Return the speed, or None if nothing was measured lately."""
        units, seconds, at_s = self._measured
        return units / seconds if seconds and self._clock.monotonic() - at_s < MEMORY_S else None
