"""Start progress of a process, reported to the supervisor through a file that has one line of JSON.

The supervisor names the file in `CHITU_PROGRESS_FILE`; an instance writes `{"state": "warmup"}`, `{"state": "ready",
"incarnation": ..., "is_member": ...}` (so that the router's reports on an instance can be matched to this process, not
an earlier one; written again when it joins, drains, or is no member any more),
at its end `{"state": "drained"}` if an operator drained it, `{"state": "taken"}` if another process has its rank, and
while it reads weights `{"state": "loading", "done": bytes, "total": bytes}`. The router writes `{"state": "ready",
"ports": ...}`. It is a file, not a pipe, so that it works through torchrun, and a process started by hand needs none.
Written by the main thread of the process, read by the supervisor. Each record takes the place of the last one, and the
file is kept for the next process, so that a report needs no space on a full disk. Of a group each member has a file of
its own beside that of the first (`file_of`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from chitu.config.load import progress_file
from chitu.known_types import known

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.1
BEAT_S = 1.0
RECORD_BYTES = 512
"""Size of a record with the spaces behind it, more than any has."""
STATES = ("starting", "loading", "warmup", "ready")
"""The states of a start, in order."""
DRAINED = "drained"
TAKEN = "taken"
"""State of a process that the router refused, since another process has its rank."""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a process. `state` is `starting`, `loading`, `warmup`, `ready`, `drained` or `taken`; `done` and
    `total` are bytes while loading."""

    state: str = "starting"
    done: int = 0
    total: int = 0
    incarnation: int = 0
    """Incarnation of a ready instance."""
    is_member: bool = False
    """Whether a ready instance is in the router's newest cluster view and does not drain."""
    place: str = ""
    """Its role and rank there (`prefill:2`), if it has changed its role."""
    ports: Mapping[str, int] = {}
    """Actual ports of a ready router, by short key name."""


def file_of(path: Path, data_rank: int) -> Path:
    """Return the file of a member of a group. `path`: that of its first."""
    return path.with_name(f"{path.name}.{data_rank}") if data_rank else path


def joined(parts: Sequence[Progress]) -> Progress:
    """Return the progress of a group: that of the member that is furthest behind, or of one whose place was taken."""
    taken = [part for part in parts if part.state == TAKEN]
    return taken[0] if taken else min(parts, key=lambda part: STATES.index(part.state) if part.state in STATES else 9)


class ProgressWriter:
    """Writes to the file that the environment names; does nothing if it names none."""

    def __init__(self, path: Path | None = None, data_rank: int = 0) -> None:
        path = path or progress_file()
        self._path = path and file_of(path, data_rank)
        self._last_s = 0.0

    def state(self, state: str) -> None:
        self._write(Progress(state))

    def ready(
        self, incarnation: int = 0, ports: Mapping[str, int] = {}, *, is_member: bool = False, place: str = ""
    ) -> None:
        self._write(Progress("ready", incarnation=incarnation, is_member=is_member, place=place, ports=ports))

    def loading(self, done: int, total: int) -> None:
        """Report the bytes of weights read so far. It may be called often: it writes at most every MIN_INTERVAL_S."""
        now_s = time.monotonic()
        if done < total and now_s - self._last_s < MIN_INTERVAL_S:
            return
        self._last_s = now_s
        self._write(Progress("loading", done, total))

    def beat(self) -> None:
        """Show that this process does not hang. It may be called often: it touches the file once a second."""
        now_s = time.monotonic()
        if self._path is not None and now_s - self._last_s >= BEAT_S:
            self._last_s = now_s
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _write(self, record: Progress) -> None:
        if self._path is None:
            return
        try:
            write_progress(self._path, record)
        except OSError as error:  # the process can still serve
            logger.warning("cannot report %s to the launcher: %s", record, error)


def write_progress(path: Path, record: Progress) -> None:
    """Write a record in place of the last one. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        file.write(msgspec.json.encode(record).ljust(RECORD_BYTES - 1) + b"\n")


def read_progress(path: Path) -> Progress:
    """Return the record, or `starting` if there is no complete one yet."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        line, end, _ = path.read_bytes().partition(b"\n")
        if end:
            return msgspec.json.decode(line, type=known(Progress))
    return Progress()
