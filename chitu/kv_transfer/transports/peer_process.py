"""The process behind a peer's memory on this host: found by pid and start time, held by a pidfd, watched for its end.

Used by the transports that map another process's memory. A pid alone identifies no process: it is reused.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

from chitu.errors import TransferFailed
from chitu.net.process_deaths import pid_namespace, start_ticks


def host_id() -> str:
    """Return an id that is equal for processes that may open each other's memory (same boot, pid namespace and user),
    or an empty string."""
    namespace = pid_namespace()
    return f"{namespace}:{os.geteuid()}" if namespace else ""


def own_start_time() -> str:
    return str(start_ticks(os.getpid()))


@dataclass(frozen=True, slots=True)
class PeerProcess:
    pid: int
    pidfd: int

    @classmethod
    @contextlib.contextmanager
    def entered(cls, pid: int, start_time: str) -> Iterator[tuple[PeerProcess, int]]:
        """Yield the process and a descriptor of its /proc folder, which is closed at the end; an exception closes the
        process too. Raises TransferFailed if another process has the pid by now, OSError if none has it.

        Pidfd and folder stay bound to the process that had the pid before its start time was read. A process has its
        pid from its start on, so it is this one.
        """
        with contextlib.ExitStack() as on_failure:
            pidfd = os.pidfd_open(pid)
            on_failure.callback(os.close, pidfd)
            folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if str(start_ticks(pid)) != start_time:
                    raise TransferFailed(f"pid {pid} belongs to another process now")
                yield cls(pid, pidfd), folder
            finally:
                os.close(folder)
            on_failure.pop_all()

    def is_alive(self) -> bool:
        """Return whether the process runs: a pidfd becomes readable when its process ends, even before it is reaped."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self.pidfd)
