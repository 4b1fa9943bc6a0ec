"""Log files of a launcher's processes: their permissions, their size limit, and their last lines.

Called by `Supervisor` and `ChildProcess`; one thread. A child, including its native libraries, writes its file through
the inherited descriptors 1 and 2, so only the launcher can limit its size: it copies the file and truncates it. The
descriptors append, so the next line starts the file again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from chitu.errors import ConfigError
from chitu.lock_files import claim

TAIL_BYTES = 64 << 10
"""Size of the end of a log in which a process's last lines are looked for."""


class LogTaken(ConfigError):
    """Another launcher that runs has this log."""


def make_log_dir(folder: str | None) -> Path:
    """Return `folder`, made if missing, or for None a new one in the temporary folder. Only this user can read a folder
    made here."""
    try:
        path = Path(os.path.expanduser(folder)).absolute() if folder else Path(tempfile.mkdtemp(prefix="chitu-"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        where = f"the folder {folder} for the logs" if folder else "a temporary folder for the logs"
        raise ConfigError(f"{where} cannot be made ({error.strerror or error}): give another with --log-dir") from error
    return path


def open_private(path: Path, *, append: bool = True) -> BinaryIO:
    """Open a file for writing and make it accessible to this user only, even if it existed before."""
    mode = os.O_APPEND if append else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | mode, 0o600)
    os.set_blocking(descriptor, True)  # a FIFO that nobody reads is an error, and no wait
    with contextlib.suppress(OSError):  # another user's file that we may write
        os.fchmod(descriptor, 0o600)
    return open(descriptor, "ab" if append else "wb", buffering=0)


def claim_log(path: Path) -> BinaryIO | None:
    """Claim a log until the returned file is closed. Raise LogTaken if another launcher has it: they would take each
    other's ports and progress from the files beside it."""
    try:
        return claim(path.with_suffix(".lock"))
    except BlockingIOError:
        raise LogTaken(f"another launcher writes {path}: give this one another --log-dir (log.dir)") from None
    except OSError:  # a network file system without locks; another error is reported by the start of its process
        return None


def cut(path: Path, kept: Path, max_bytes: int) -> bool:
    """Copy a log that is beyond its limit to `kept` and empty it. Return whether it did. Lines written in between are
    lost; so is the whole log if the copy cannot be written, since the limit protects against full disks.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        with contextlib.suppress(OSError), path.open("rb") as source:
            kept.unlink(missing_ok=True)  # logrotate may have renamed the log itself to this
            with open_private(kept) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        os.truncate(path, 0)
    except OSError:  # a log error must not end the launcher
        return False
    return True


def last_text(path: Path, start: int) -> str:
    """Return what was written since `start` (a size of the file), `TAIL_BYTES` at most, or why it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a FIFO would block
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"
