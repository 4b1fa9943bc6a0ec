"""Deaths of processes of this machine, detected at once: a pidfd per process, watched by the event loop.

Owned by `Membership`; loop thread. A pid alone proves nothing: it may be a process of another machine or of
another pid namespace (a container behind the same address), or it may be reused. So a process reports the namespace of
its pid (`pid_namespace`) and its start time (`start_ticks`), and is watched only if both match what is found here.
Everything else is left to the leases, and so is a process that is only stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

PidAlive = Callable[[int], bool]
K = TypeVar("K", bound=Hashable)


class ProcessName(NamedTuple):
    """One process of one machine, for all time."""

    pid_namespace: str
    """`pid_namespace()` in that process; empty: unknown."""
    pid: int
    start_ticks: int
    """`start_ticks(pid)` in that process."""


def pid_namespace() -> str:
    """Return a text that is equal for processes with the same pids and start times: same boot, same pid and time
    namespaces. Empty: unknown."""
    spaces = [name for name in ("/proc/self/ns/pid", "/proc/self/ns/time") if os.path.lexists(name)]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return ":".join([file.read().strip(), *map(os.readlink, spaces)])
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot (field 22 of /proc/PID/stat); 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name, in brackets, may hold spaces and brackets itself.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def pid_alive(pid: int) -> bool:
    """Return whether a process of this host (and pid namespace) exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        # The first thread of a process is a zombie as soon as it has ended; other threads may still run.
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (OSError, IndexError):
        return True


class ProcessDeaths(Generic[K]):
    """Calls `on_death(key)` once for each followed process that ends, at the earliest in the loop's next turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[K], None]) -> None:
        self._loop = loop
        self._on_death = on_death
        self._namespace = pid_namespace()
        self._pidfds: dict[K, int] = {}
        self._followed: set[K] = set()

    def follow(self, key: K, process: ProcessName) -> None:
        """Watch a process from now on. A key means the same process for ever."""
        if key not in self._followed:
            self._followed.add(key)
            self._watch(key, process)

    def forget(self, key: K) -> None:
        self._followed.discard(key)
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for key in list(self._followed):
            self.forget(key)

    def _watch(self, key: K, process: ProcessName) -> None:
        if not self._namespace or process.pid_namespace != self._namespace or process.pid <= 0:
            return
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._died, key)
            return
        except OSError as error:
            logger.warning("cannot watch pid %d (%s): its end is detected when its lease expires", process.pid, error)
            return
        # Once the pidfd is open the pid cannot be reused, so the answer is about the process that is watched.
        if start_ticks(process.pid) != process.start_ticks:
            os.close(pidfd)
            self._loop.call_soon(self._died, key)
            return
        self._pidfds[key] = pidfd
        self._loop.add_reader(pidfd, self._died, key)

    def _died(self, key: K) -> None:
        if key in self._followed:
            self.forget(key)
            # The caller follows it still, and it must not be reported again.
            self._followed.add(key)
            self._on_death(key)
