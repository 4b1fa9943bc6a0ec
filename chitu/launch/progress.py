"""How far a scheduler process has come, told to the supervisor through a file of JSON lines.

The supervisor names the file in `CHITU_PROGRESS_FILE`; the process appends `{"state": "warmup"}`, `{"state": "ready",
"incarnation": ...}` (by which the router's word of an instance is known to mean this process, not the one before), at
its end `{"state": "drained"}` where an operator wanted it to leave, `{"state": "taken"}` where another process has its
rank, and while it reads weights `{"state": "loading",
"done": bytes, "total": bytes}`. A file, not a pipe: it survives torchrun in between, and a process started by hand
simply has none. Written by the main thread of the scheduler process, read by the supervisor.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from chitu.config.load import progress_file

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.1
DRAINED = "drained"
TAKEN = "taken"
"""The router refused it: another process has its rank."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`state`: `starting`, `loading`, `warmup`, `ready`, `drained` or `taken`. `done`, `total`: bytes while loading."""

    state: str = "starting"
    done: int = 0
    total: int = 0
    incarnation: int = 0
    """Of an instance that is ready."""


class ProgressWriter:
    """Appends to the file that the environment names; does nothing where it names none."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or progress_file()
        self._last_s = 0.0

    def state(self, state: str) -> None:
        self._write({"state": state})

    def ready(self, incarnation: int) -> None:
        self._write({"state": "ready", "incarnation": incarnation})

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights read so far; called as often as one likes."""
        now_s = time.monotonic()
        if done < total and now_s - self._last_s < MIN_INTERVAL_S:
            return
        self._last_s = now_s
        self._write({"state": "loading", "done": done, "total": total})

    def _write(self, record: dict[str, str | int]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # a full disk: it can serve all the same
            logger.warning("cannot report %s to the launcher: %s", record, error)


def read_progress(path: Path) -> Progress:
    """The last complete record; `starting` where there is none yet."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return Progress()
    for line in reversed(lines):
        try:
            record = json.loads(line)
            numbers = (int(record.get(name, 0)) for name in ("done", "total", "incarnation"))
            return Progress(str(record["state"]), *numbers)
        except (ValueError, TypeError, KeyError):
            continue
    return Progress()
