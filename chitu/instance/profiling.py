"""When an instance records what it computes: one profile at a time, bounded in steps and in seconds.

The comm thread calls `ask`, the step thread everything else. While nobody asks, a turn of the step thread pays a look
at one attribute.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Protocol

from chitu.clock import Clock
from chitu.protocol.profile import ProfileOrder

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    """Records what all ranks compute. Step thread; never raises."""

    def begin(self, stem: str, max_bytes: int) -> None: ...

    def end(self) -> None: ...


class Profiling:
    """`folder`: of the files; None: nothing is ever profiled here."""

    def __init__(self, profiler: Profiler | None, folder: str | None, max_bytes: int, clock: Clock) -> None:
        self._profiler = profiler
        self._folder = folder
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: tuple[ProfileOrder, str] | None = None
        self.is_due = False
        """Whether `turn` has something to do."""
        self._end_s = 0.0
        self._steps_left = 0
        self._is_on = False

    def ask(self, order: ProfileOrder, name: str) -> None:
        """Begin a profile with the next turn. `name`: of the instance. Ignored while there is another one."""
        if self._profiler is None or self._folder is None:
            logger.warning("a profile was asked for, but this instance takes none")
            return
        with self._lock:
            if self.is_due:
                logger.warning("a profile was asked for while another one is taken: ignored")
                return
            self._asked, self.is_due = (order, name), True

    def turn(self, has_stepped: bool) -> None:
        """Begin or end a profile behind a turn of the scheduler. `has_stepped`: whether it computed."""
        if self._profiler is None or self._folder is None:
            return
        now_s = self._clock.monotonic()
        if not self._is_on and self._asked is not None:
            order, name = self._asked
            self._is_on, self._end_s, self._steps_left = True, now_s + order.seconds, order.steps
            logger.info("profiling %d steps, at most %g s", order.steps, order.seconds)
            self._profiler.begin(str(Path(self._folder, f"{order.label}-{name}")), self._max_bytes)
            return
        self._steps_left -= has_stepped
        if self._steps_left <= 0 or now_s >= self._end_s:
            self.close()

    def close(self) -> None:
        """End the profile, if there is one."""
        if self._is_on and self._profiler is not None:
            self._profiler.end()
        with self._lock:
            self._asked, self._is_on, self.is_due = None, False, False
