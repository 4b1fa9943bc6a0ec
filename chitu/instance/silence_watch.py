"""Failures that only the instance itself can detect. Heartbeat thread."""

from __future__ import annotations

from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import Internal


class SilenceWatch:
    """Detector of a router that is gone for good, and of a step thread that hangs while heartbeats continue."""

    def __init__(self, deadlines: DeadlineConfig) -> None:
        self._deadlines = deadlines
        self._router = Silence(deadlines.heartbeat_interval_s)
        self._step = Silence(deadlines.heartbeat_interval_s)
        self._is_router_silent = False

    def look(self, num_views: int, step_turns: int) -> float:
        """Return the seconds without a view once per silence, when they reach `router_s`; else 0. Raise Internal for a
        step of `step_s`, which ends the process. Called every `heartbeat_interval_s`."""
        step_s = self._step.seconds(step_turns)
        if step_s >= self._deadlines.step_s:
            raise Internal(f"the step thread has stood still for {step_s:.1f} s (deadlines.step_s)")
        silence_s = self._router.seconds(num_views)
        was_silent, self._is_router_silent = self._is_router_silent, silence_s >= self._deadlines.router_s
        return silence_s if self._is_router_silent and not was_silent else 0.0
