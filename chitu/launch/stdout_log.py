"""One log of a launcher and all its processes on stdout, a JSON object a line (`log.dir: "-"`), as containers want it.

Made by a launcher at its start. Its processes write JSON lines into pipes; a thread for each pipe passes them on, and
puts what is none (a traceback, torchrun, native libraries) into such an object, so that no line is without its time and
its process. A reader of stdout that stands still costs lines, not the launcher (`chitu/log.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, field

from chitu.log import JSON_START, JsonFormatter, setup_logging

STDOUT = "-"
"""Value of `log.dir` and `--log-dir` that means this log."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is cut into pieces."""
KEPT_LINES = 200
"""Last lines of a process that are kept, to tell how it ended."""
END_S = 1.0

log = logging.getLogger(__name__)


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
        log.info("%s", text.strip())

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
