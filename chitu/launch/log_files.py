"""The log files of a launcher's processes: their permissions, their bound, and their last lines.

Called by `Supervisor` and `ChildProcess`; one thread. A child writes its file through the descriptors 1 and 2 that it
inherited, native libraries too, so nobody but the launcher can bound it: it copies the file and cuts it. They are open
for appending, so what comes next begins the file anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from chitu.errors import ConfigError

TAIL_BYTES = 64 << 10
"""The end of a log in which last words are looked for."""


def make_log_dir(folder: str | None) -> Path:
    """`folder`, made where it is missing; None: a new one under the temporary folder. Others may not look into what is
    made here."""
    try:
        path = Path(os.path.expanduser(folder)).absolute() if folder else Path(tempfile.mkdtemp(prefix="chitu-"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        where = f"the folder {folder} for the logs" if folder else "a temporary folder for the logs"
        raise ConfigError(f"{where} cannot be made ({error.strerror or error}): give another with --log-dir") from error
    return path


def open_private(path: Path, *, append: bool = True) -> BinaryIO:
    """For writing, by this user alone, also where the file was there before."""
    mode = os.O_APPEND if append else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o600)
    with contextlib.suppress(OSError):  # another user's, writable for us
        os.fchmod(descriptor, 0o600)
    return open(descriptor, "ab" if append else "wb", buffering=0)


def cut(path: Path, max_bytes: int) -> bool:
    """Whether the log was beyond its bound: then NAME.log.1 has what was in it, and it is empty. Lines that are written
    in the moment between are lost; so is all of it where the copy cannot be written, since the bound is for full disks.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        kept = path.with_name(f"{path.name}.1")
        with contextlib.suppress(OSError), path.open("rb") as source, open_private(kept, append=False) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.truncate(path, 0)
    except OSError:  # nothing of a log may end the launcher
        return False
    return True


def last_text(path: Path, start: int) -> str:
    """What was written since `start` (a size of the file), `TAIL_BYTES` at most; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"
