"""Log set-up and the anchors: lines that tests, operators and the topology check search for.

Invariant: a log that cannot be written (a full disk, a reader that is gone or reads nothing) never harms the code that
logs. The line is lost, and the next one is tried again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PACKAGE = Path(__file__).parent
ROOM_S = 0.05
"""Time in which a reader makes room: a terminal takes a long traceback piece by piece."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

CREATED_PD_REQUEST = "created pd request: %s -> P%d-D%d"
PROCESSING_PREFILL = "processing prefill request: %s"
FINISHED_KV = "finished kv cache transfer for %s"
FINISHED_AUX = "finished aux transfer for %s"
PROCESSING_DECODE = "processing decode request: %s"
DECODE_REGISTERED = "decode endpoint registered to prefill (engine_rank=%d)"
RECEIVED_KV = "received kv cache for %s"
JSON_START = '{"time":'
"""Beginning of every line of `JsonFormatter`."""


class _Formatter(logging.Formatter):
    """`date time zone process level name: message`. Date, time and zone are formatted once a second: the router writes
    a line for every request."""

    _second = -1
    _date = _zone = ""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Format the time as RFC 3339 does, in the machine's own zone."""
        second = int(record.created)
        if second != self._second:
            local = time.localtime(second)
            zone = time.strftime("%z", local)
            self._second, self._date = second, time.strftime("%Y-%m-%d %H:%M:%S", local)
            self._zone = f"{zone[:3]}:{zone[3:]}"
        return f"{self._date}.{int(record.msecs):03d}{self._zone}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record)} {self.process} {record.levelname[:1]} {record.name}: {record.message}"

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        record.message = record.getMessage()
        return self.formatMessage(record)


class JsonFormatter(_Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record).replace(" ", "T"),
            "process": self.process,
            "level": record.levelname,
            "module": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def about(request_id: str) -> dict[str, str]:
    """Return `extra` for a line that is about one request."""
    return {"request_id": request_id}


class _LeanRecord(logging.LogRecord):
    """A log record with only the fields that the formatter reads; a full LogRecord costs more than writing the line."""

    def __init__(  # the parent's would compute the rest
        self,
        name: str,
        level: int,
        pathname: str,
        lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        sinfo: str | None = None,
        **_: object,
    ) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.pathname, self.lineno, self.funcName = pathname, lineno, func or ""
        # As the parent does: one mapping stands for the names in the message.
        single = args[0] if len(args) == 1 and isinstance(args[0], Mapping) and args[0] else args
        self.msg, self.args = msg, single
        self.exc_info, self.exc_text, self.stack_info = exc_info, None, sinfo
        self.created = time.time()
        self.msecs = int((self.created % 1) * 1000) + 0.0


class _Output(io.RawIOBase):
    """A descriptor. What a pipe or a terminal has no room for within `ROOM_S` is lost, and until its reader reads again
    at once: writing it would block."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = self._given = descriptor
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            # Opened once more: other processes have the file that was given, and would not expect O_NONBLOCK.
            with contextlib.suppress(OSError):  # such as another user's
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._is_read = True

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        view = rest = memoryview(data)
        end_s = time.monotonic() + (ROOM_S if self._is_read else 0.0)
        while rest:
            if count := self._write_some(rest):
                rest, self._is_read = rest[count:], True
            elif time.monotonic() < end_s:
                time.sleep(0.001)
            else:
                self._is_read = False
                break
        return len(view)

    def _write_some(self, view: memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            if self._poll.poll(0):
                return os.write(self._descriptor, view[: select.PIPE_BUF])  # a pipe with any room has room for this
        return 0

    def close(self) -> None:
        if not self.closed and self._descriptor != self._given:
            os.close(self._descriptor)
        super().close()


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes each line at once. Neither a line nor `flush` raises if the stream cannot be written."""

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # it is stderr itself that cannot be written
            super().handleError(record)


class DeferredHandler(LogHandler):
    """Leaves INFO and DEBUG lines in the stream's buffer until `flush`, which its owner calls from a timer. Lines from
    WARNING on are written at once, with all that wait before them; at exit `logging` flushes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.stream.write(self.format(record) + "\n")
            if record.levelno >= logging.WARNING:
                self.flush()
        except Exception:
            self.handleError(record)


def module_levels(entries: Iterable[str]) -> dict[str, str]:
    """Return the level by logger, from entries such as `kv_transfer=DEBUG`. Raises ValueError for an entry that is
    none."""
    levels = {}
    for entry in entries:
        name, _, level = entry.partition("=")
        if level not in LEVELS or not _is_part(name):
            raise ValueError(f"{entry!r} is not MODULE=LEVEL: a part of chitu, as kv_transfer, and {', '.join(LEVELS)}")
        levels[f"chitu.{name}"] = level
    return levels


def _is_part(name: str) -> bool:
    path = PACKAGE
    for part in name.split("."):
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if part not in names and f"{part}.py" not in names:
            return False
        path /= part
    return True


def rename_process(process: str) -> None:
    """Name the process differently in the lines from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.formatter.process = process


def setup_logging(
    process: str,
    level: str = "INFO",
    modules: Iterable[str] = (),
    form: str = "text",
    deferred: bool = False,
    descriptor: int | None = None,
) -> LogHandler:
    """Log one line per record to stderr, or to a descriptor: time, process name (`router`, `P0`), level, module,
    message. `modules` and `form` are as the keys of `log` have them. `deferred`: see `DeferredHandler`; the handler is
    returned for its `flush`."""
    # Do not collect what no line here shows: logging's own advice for speed.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    if sys.stderr is None:  # the starter has closed it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    output = io.BufferedWriter(_Output(sys.stderr.fileno() if descriptor is None else descriptor), 1 << 16)
    stream = io.TextIOWrapper(output, sys.stderr.encoding, "backslashreplace")
    handler = DeferredHandler(stream) if deferred else LogHandler(stream)
    if deferred:
        logging.setLogRecordFactory(_LeanRecord)
    handler.setFormatter(JsonFormatter(process) if form == "json" else _Formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, module_level in module_levels(modules).items():
        logging.getLogger(name).setLevel(module_level)
    return handler
