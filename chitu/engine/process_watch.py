"""Ends the ranks of an instance together: the main rank exits at once when a follower has died, and with the main rank
the kernel kills the followers.

torchrun ends them too, but gracefully and later: it gives a rank that hangs or is stopped 30 s. Meanwhile the main rank
would accept more work, and a follower could still write. The main rank's watch is a thread that sleeps in `poll` on
pidfds, started before the engine serves.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from chitu.net.threads import EXIT_DEAD_THREAD, ServiceThread

logger = logging.getLogger(__name__)

NOTICE_S = 0.5
"""Time for the watch to notice a death: a connection of a dying rank can break before its process is gone."""


@contextmanager
def explaining() -> Iterator[None]:
    """Delay errors of this block. If another rank's death caused one, the main rank's watch has time to log it and to
    end the instance; else the error propagates."""
    try:
        yield
    except Exception:
        time.sleep(NOTICE_S)
        raise


def end_now(text: str, *arguments: object) -> NoReturn:
    """Log why, and end this process without a further step."""
    logger.critical(text, *arguments)
    logging.shutdown()
    os._exit(EXIT_DEAD_THREAD)


def open_lifelines(num_followers: int) -> tuple[int, ...]:
    """Return a descriptor for the `Lifeline` of each follower; all of them close with this process, the main rank."""
    return tuple(os.pipe()[1] for _ in range(num_followers))


class Lifeline:
    """Has the kernel kill this process, even if it is stopped, when the process `pid` with that `descriptor` ends."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Take effect at once: if the process has just ended, this one ends too."""
        self._pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        with suppress(BlockingIOError):  # raised while the other end is open
            os.read(self._pipe, 1)
            os._exit(EXIT_DEAD_THREAD)

    def close(self) -> None:
        """Survive that process from now on: it is about to shut down in order."""
        os.close(self._pipe)


class ProcessWatch:
    """The main rank's watch. `pids`: processes of its followers, or of the other members' main ranks; one that is
    already gone ends this process too."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._disarmed = threading.Event()
        self._pids = list(pids)
        ServiceThread("watch", self._run).start()

    def disarm(self) -> None:
        """Ignore deaths from now on: the followers are about to shut down in order."""
        self._disarmed.set()

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
        end_now("another rank of this instance or group (pid %d) has ended; ending too", pid)
