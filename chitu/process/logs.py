"""The logs of the processes of one machine: their folder, their files, and standard output in their place.

With `log.dir: "-"`, as containers want it, a launcher and all its processes write to stdout, a JSON object a line
(`StdoutLog`): a thread for each process passes its lines on, and puts what is none (a traceback, torchrun) into such an
object. A reader of stdout that stands still costs lines, not the launcher (`chitu/log.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from chitu.errors import ConfigError
from chitu.lock_files import claim
from chitu.log import JSON_START, JsonFormatter, setup_logging

logger = logging.getLogger(__name__)

TAIL_BYTES = 64 << 10
"""Size of the end of a log in which a process's last lines are looked for."""
STDOUT = "-"
"""Value of `log.dir` and `--log-dir` that means this log."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is cut into pieces."""
KEPT_LINES = 200
"""Last lines of a process that are kept, to tell how it ended."""
END_S = 1.0


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


@dataclass(slots=True)
class Captured:
    """The output of one process."""

    descriptor: int
    """The pipe's end for the process, which its starter closes."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class StdoutLog:
    """The log; it sets up `logging` for this process."""

    def __init__(self) -> None:
        self._handler = setup_logging("launcher", form="json", descriptor=1)
        self._threads: list[threading.Thread] = []

    def say(self, text: str) -> None:
        logger.info("%s", text.strip())

    def capture(self, name: str) -> Captured:
        """Return the output for a process that is about to start."""
        source, target = os.pipe()
        captured = Captured(target)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._read, args=(name, source, captured), name=f"log-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return captured

    def flush(self) -> None:
        """Wait until everything is passed on that ended processes wrote, for a second at most."""
        for thread in self._threads:
            thread.join(END_S)

    def _read(self, name: str, source: int, captured: Captured) -> None:
        formatter = JsonFormatter(name)
        rest = b""
        with open(source, "rb", buffering=0) as pipe:
            while chunk := pipe.read(READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._pass_on(formatter, lines, captured)
        if rest:
            self._pass_on(formatter, [rest], captured)

    def _pass_on(self, formatter: JsonFormatter, lines: list[bytes], captured: Captured) -> None:
        texts = [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
        captured.lines.extend(texts)
        with self._handler.lock or contextlib.nullcontext():
            with contextlib.suppress(OSError):
                self._handler.stream.writelines(f"{_as_json(formatter, text)}\n" for text in texts if text)
            self._handler.flush()


def _as_json(formatter: JsonFormatter, text: str) -> str:
    if text.startswith(JSON_START):
        return text
    return formatter.format(logging.makeLogRecord({"name": "output", "msg": text, "levelname": "INFO"}))
