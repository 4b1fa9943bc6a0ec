"""How fast a queue moves while it is one: what the router predicts waits by.

Owned by `PDScheduler`, step thread only. Pure: totals and times in, totals out. A rate over all time would say nothing
of capacity, because an instance without a queue works as slowly as requests come; so only the time counts in which
something waited that a step could not take, and only the work done in it.
"""

from __future__ import annotations


class BacklogMeter:
    """`seconds` and `work` grow while something waits. Work is whatever unit the caller counts in."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self.work = 0
        self._last_s = now_s
        self._last_work = 0
        self._waits = False

    def update(self, now_s: float, total_work: int, waits: bool) -> None:
        """Once a step: the work done since the start, and whether something still `waits` from here on."""
        if self._waits:
            self.seconds += now_s - self._last_s
            self.work += total_work - self._last_work
        self._last_s, self._last_work, self._waits = now_s, total_work, waits
