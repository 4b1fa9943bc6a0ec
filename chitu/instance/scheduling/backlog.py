"""How fast a queue moves while requests wait in it, from which the router predicts waits.

Owned by `PDScheduler`, step thread only. Pure: totals and times in, totals out. A rate over all time would not measure
capacity, because an instance without a queue works only as fast as requests arrive. So only the time counts in which
work waited that a step could not take, and only the work done in it.
"""

from __future__ import annotations


class BacklogMeter:
    """Time and work of a queue: `seconds` and `work` grow while something waits. The caller picks the unit of work."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self.work = 0
        self._last_s = now_s
        self._last_work = 0
        self._waits = False

    def update(self, now_s: float, total_work: int, waits: bool) -> None:
        """Note the work done since the start, and whether something `waits` from now on. Called once a turn."""
        if self._waits:
            self.seconds += now_s - self._last_s
            self.work += total_work - self._last_work
        self._last_s, self._last_work, self._waits = now_s, total_work, waits
