"""A thread of its own for jobs that may take long (checksums, scatters), done one after the other in order.

Each thread has one owner; `put` returns at once. Without `start`, `run_one` does one job in the caller's thread
(tests).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Spawn = Callable[[str, Callable[[], None]], threading.Thread]
"""Makes a thread of this name that runs this function; its death must end the process."""


class JobThread(Generic[Job]):
    """Calls `work(job)` for each job, holding no lock; an exception in it ends the thread, and so the process."""

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._name = name
        self._work = work
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queue a job. Any thread may call it."""
        self._waiting.put(job)

    def start(self, spawn: Spawn) -> None:
        self._thread = spawn(self._name, self._loop)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the jobs that wait. A thread that does not end in time is reported."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s did not stop within %g s", self._thread.name, timeout_s)

    def run_one(self) -> bool:
        """Do one job in this thread; return False if none waits."""
        try:
            job = self._waiting.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            self._work(job)
        return job is not None

    def _loop(self) -> None:
        while (job := self._waiting.get()) is not None:
            self._work(job)
