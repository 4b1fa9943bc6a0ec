"""The ranks of an instance end together: each watches the others' processes and ends at once when one of them has died.

torchrun does that too, but politely and later; meanwhile the main rank would go on promising work, and a follower
could still write. A thread that sleeps in `poll` on pidfds; made before the engine serves.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chitu.net.threads import EXIT_DEAD_THREAD, ServiceThread

logger = logging.getLogger(__name__)

NOTICE_S = 0.5
"""A connection of a rank that dies can break before its process is gone."""


class ProcessWatch:
    """`pids`: of the other ranks, which run. A pid that is gone already ends this process too."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._disarmed = threading.Event()
        self._pids = list(pids)
        ServiceThread("watch", self._run).start()

    def disarm(self) -> None:
        """The others are about to end because they were told to."""
        self._disarmed.set()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If what raises in this block is the death of another rank, the watch has the time to say so, and to end this
        process; else the error goes on."""
        try:
            yield
        except Exception:
            time.sleep(NOTICE_S)
            raise

    def _run(self) -> None:
        poll = select.poll()
        pid_of: dict[int, int] = {}
        for pid in self._pids:
            try:
                pid_of[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self._end(pid)
        for pidfd in pid_of:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll():
            self._end(pid_of[pidfd])

    def _end(self, pid: int) -> None:
        if self._disarmed.is_set():
            return
        logger.critical("another rank of this instance (pid %d) has ended; ending too", pid)
        logging.shutdown()
        os._exit(EXIT_DEAD_THREAD)
