"""Ends the ranks of an instance together: each rank watches the other processes and exits at once when one has died.

torchrun does that too, but gracefully and later; meanwhile the main rank would accept more work, and a follower could
still write. Runs a thread that sleeps in `poll` on pidfds, started before the engine serves.
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
"""Time for the watch to notice a death: a connection of a dying rank can break before its process is gone."""


class ProcessWatch:
    """The watch of one rank. `pids`: processes of the other ranks; one that is already gone ends this process too."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._disarmed = threading.Event()
        self._pids = list(pids)
        ServiceThread("watch", self._run).start()

    def disarm(self) -> None:
        """Ignore deaths from now on: the other ranks are about to shut down in order."""
        self._disarmed.set()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Delay errors of this block. If another rank's death caused one, the watch has time to log it and to end this
        process; else the error propagates."""
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
