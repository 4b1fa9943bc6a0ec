"""Failures that only the instance itself can detect. Heartbeat thread."""

from __future__ import annotations

from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import Internal

ABANDONED = 20
"""An added instance has lost its cluster after so many times `router_s`: after 10 minutes with the default."""


class SilenceWatch:
    """Detector of a router that is gone for good, and of a step thread that hangs while heartbeats continue."""

    def __init__(self, deadlines: DeadlineConfig) -> None:
        self._deadlines = deadlines
        self._router = Silence(deadlines.heartbeat_interval_s)
        self._step = Silence(deadlines.heartbeat_interval_s)
        self.silence_s = 0.0
        """How long the router has been silent."""

    def look(self, num_views: int, step_turns: int) -> float:
        """Return the seconds without a view once per silence, when they reach `router_s`; else 0. Raise Internal for a
        step of `step_s`, which ends the process. Called every `heartbeat_interval_s`."""
        step_s = self._step.seconds(step_turns)
        if step_s >= self._deadlines.step_s:
            raise Internal(f"the step thread has stood still for {step_s:.1f} s (deadlines.step_s)")
        was_s, self.silence_s = self.silence_s, self._router.seconds(num_views)
        return self.silence_s if was_s < self._deadlines.router_s <= self.silence_s else 0.0

    @property
    def is_abandoned(self) -> bool:
        """Whether the cluster has probably ended: a router that is started again is back sooner."""
        return self.silence_s >= ABANDONED * self._deadlines.router_s
