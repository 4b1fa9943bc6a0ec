"""How fast something is, by what was measured lately. One thread notes, any thread asks."""

from __future__ import annotations

from chitu.clock import Clock

MEMORY_S = 60.0
"""A speed that nothing has confirmed for so long is forgotten, so that what was slow once is tried again."""
SHORTEST_S = 1e-6


class MeasuredSpeed:
    """Units a second; the last measurements count most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured = (0.0, 0.0, 0.0)
        """Units, the seconds that they took, and when that was noted."""

    def note(self, units: float, seconds: float) -> None:
        now_s = self._clock.monotonic()
        past_units, past_seconds, at_s = self._measured
        kept = 0.5 if now_s - at_s < MEMORY_S else 0.0
        self._measured = (kept * past_units + units, kept * past_seconds + max(seconds, SHORTEST_S), now_s)

    def per_s(self) -> float | None:
        """None where nothing was measured lately."""
        units, seconds, at_s = self._measured
        return units / seconds if seconds and self._clock.monotonic() - at_s < MEMORY_S else None
