"""Lock files: one process of a machine, or of a shared file system, has what a file stands for until it ends.

Used for logs and for folders of pages; any thread. The lock is on a file of its own, since on SMB no other descriptor
can write to a locked file. Invariant: the file under the path is the one that is locked, also if others delete it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def claim(path: Path, mode: int = 0o600) -> BinaryIO:
    """Return the file at `path`, made with `mode` if missing and locked until it is closed. Raise BlockingIOError if
    another process has it, and another OSError if the file system has no locks or the path cannot be such a file."""
    while True:
        file = _locked(path, mode)
        if is_ours(file, path):
            return file
        file.close()  # it was deleted before it was locked


def is_ours(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` is still this file: others may have deleted it, and claimed a new one."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: another host deleted it, on NFS
            raise
        return False


def _locked(path: Path, mode: int) -> BinaryIO:
    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for access in (os.O_RDONLY, os.O_RDWR):  # a file open for writing keeps its disk from being remounted read-only
        file = open(os.open(path, flags | access, mode), "rb", 0)  # noqa: SIM115 - the caller's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            file.close()
            if error.errno != errno.EBADF or access != os.O_RDONLY:  # what NFS says to a file that cannot be written
                raise
    raise AssertionError
