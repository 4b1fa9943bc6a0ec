"""The processes of a tree: found by a mark in their environment, and ended with their parent. Linux only.

torchrun puts its workers into their own sessions, so `CHITU_PROCESS`, not the process group, identifies the processes
of a tree. The kernel sends the signal of `PR_SET_PDEATHSIG` when the *thread* ends that started the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from chitu.config.load import process_mark, under_torchrun

PR_SET_PDEATHSIG = 1
MARK = "CHITU_PROCESS"
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. Call it first in a process entry.

    `parent_pid` is the parent's pid at the start of this process; if that parent is already gone, exit now.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_torchrun() -> None:
    """End with torchrun, even by SIGKILL; do nothing without torchrun. Call it first in a process entry."""
    if not under_torchrun():
        return
    die_with_parent()
    mark = process_mark()
    if mark is not None and os.getppid() not in processes_marked(mark):
        os._exit(1)  # torchrun ended before `prctl` took effect


def processes_marked(mark: str) -> list[int]:
    """Return the pids of live processes whose environment has `CHITU_PROCESS=<mark>`."""
    wanted = f"\0{MARK}={mark}\0".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        # Processes of other users cannot be read, and any process may end meanwhile.
        with contextlib.suppress(OSError):
            if wanted in b"\0%b\0" % _read(f"/proc/{name}/environ") and not _is_zombie(name):
                found.append(int(name))
    return sorted(found)


def _is_zombie(name: str) -> bool:
    return _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[0] == b"Z"


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
