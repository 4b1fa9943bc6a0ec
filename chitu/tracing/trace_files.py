"""Trace files: `NAME.jsonl` of each process in one folder of the router's machine, and how records are found in them.

Written by each process of the router (its own records, and those that instances send to it), read for `GET /trace/ID`
and by `chitu trace --dir`. `write` returns at once; a thread of its own writes. Bounded: beyond `max_bytes` a file
starts again empty, and `NAME.jsonl.1` keeps its content until the next time. A record that finds no room on its way, or
cannot be written, is dropped and counted; a `TraceLoss` after it reports the count.

`RouterTrace` is what a process of the router records of the requests that are traced (`level` decides which). Loop
thread.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from chitu.clock import Clock
from chitu.config.schema import TraceConfig
from chitu.errors import InvalidRequest
from chitu.net.threads import JobThread, ServiceThread
from chitu.protocol import TraceLevel
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.trace import MAX_FRAME_BYTES, AnyTraceRecord, TraceFrame, TraceLoss, TraceRequest
from chitu.types import room_text

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 16 << 20
"""Bytes of records that wait to be written. Beyond it records are dropped: a disk may be slow or full."""
MAX_FOUND_BYTES = 8 << 20
"""Bytes of records of one request that are read."""
BLOCK_BYTES = 256 << 10
"""Bytes that are searched at a time."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyTraceRecord] = msgspec.json.Decoder(AnyTraceRecord)
HEADER = "X-Chitu-Trace"
LEVELS: dict[bytes, TraceLevel] = {b"0": "", b"1": "records", b"frames": "frames"}


class FoundRecords(msgspec.Struct, frozen=True):
    records: list[AnyTraceRecord]
    """Records in the order of each file."""
    num_unreadable: int = 0
    """Lines that are not records of this version."""
    is_cut: bool = False
    """Whether there are more than `MAX_FOUND_BYTES`."""


class TraceFiles:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Write to `folder`, which is created with the first record; only this user can access it."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._files: dict[str, BinaryIO] = {}
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped: dict[str, int] = {}
        self._failed: set[str] = set()
        """Processes whose last records could not be written."""
        self._writer: JobThread[tuple[str, bytes, int]] = JobThread("trace-files", self._write)
        self._is_started = False

    def add(self, record: AnyTraceRecord) -> None:
        """Write a record of this process. Never blocks."""
        self.write(record.instance, _encoder.encode(record) + b"\n")

    def write(self, name: str, lines: bytes, num_dropped: int = 0) -> None:
        """Write records of the process `name`, which dropped `num_dropped` before these. Never blocks."""
        if not self._is_started:
            self._is_started = True
            self._writer.start(ServiceThread)
        with self._lock:
            num_dropped += self._dropped.pop(name, 0)
            if self._waiting_bytes + len(lines) > MAX_WAITING_BYTES:
                self._dropped[name] = num_dropped + lines.count(b"\n")
                return
            self._waiting_bytes += len(lines)
        self._writer.put((name, lines, num_dropped))

    def close(self) -> None:
        if self._is_started:
            self._writer.close(1.0)

    def _write(self, job: tuple[str, bytes, int]) -> None:
        name, lines, num_dropped = job
        try:
            file = self._files.get(name)
            if file is None or not os.fstat(file.fileno()).st_nlink:  # a cleaner deleted it
                file = self._open(name)
            if num_dropped:
                logger.warning("%d trace records of %s were dropped", num_dropped, name)
                loss = TraceLoss(request_id="", room="", instance=name, at_s=time.monotonic(), num_records=num_dropped)
                file.write(_encoder.encode(loss) + b"\n")
            file.write(lines)
            if file.tell() > self._max_bytes:
                self._begin_again(self._files.pop(name), self.folder / f"{name}.jsonl")
            self._failed.discard(name)
        except OSError as error:
            if name not in self._failed:
                logger.warning("trace records of %s cannot be written: %s", name, error)
            self._failed.add(name)
            with self._lock:
                self._dropped[name] = self._dropped.get(name, 0) + num_dropped + lines.count(b"\n")
        finally:
            with self._lock:
                self._waiting_bytes -= len(lines)

    def _open(self, name: str) -> BinaryIO:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"{name}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = open(os.open(path, flags, 0o600), "ab", 0)  # noqa: SIM115 - open until rotated
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        file.seek(0, os.SEEK_END)
        self._files[name] = file
        return file

    def _begin_again(self, file: BinaryIO, path: Path) -> None:
        """Keep the file as `NAME.jsonl.1`; if that cannot be, begin again without it: the size is bounded."""
        with file:
            try:
                os.replace(path, path.with_name(f"{path.name}.1"))
            except FileNotFoundError:  # a cleaner deleted it
                pass
            except OSError:
                file.truncate(0)
                raise


def find_records(
    folder: Path, request_id: str, is_wanted: Callable[[AnyTraceRecord], bool] = lambda record: True
) -> FoundRecords:
    """Return the wanted records of a request and its choices, and every report of missing records. Blocks."""
    text = _encoder.encode(request_id)[1:-1]
    needles = (b'"request_id":"' + text, b'"kind":"loss"')
    records: list[AnyTraceRecord] = []
    num_unreadable = num_bytes = 0
    for path in sorted(folder.glob("*.jsonl.1")) + sorted(folder.glob("*.jsonl")):
        for line in _lines_with(path, needles):
            try:
                record = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                num_unreadable += 1
                continue
            if not (isinstance(record, TraceLoss) or (is_of(record.request_id, request_id) and is_wanted(record))):
                continue
            num_bytes += len(line)
            if num_bytes > MAX_FOUND_BYTES:
                return FoundRecords(records, num_unreadable, is_cut=True)
            records.append(record)
    return FoundRecords(records, num_unreadable)


def is_of(name: str, request_id: str) -> bool:
    """Return whether a record's `request_id` is that of the request, or of one of its choices."""
    return name == request_id or (name.startswith(f"{request_id}-") and name[len(request_id) + 1 :].isdigit())


def _lines_with(path: Path, needles: Sequence[bytes]) -> Iterator[bytes]:
    """Yield whole lines that contain a needle. Blocks of the file without any are only scanned, which is fast."""
    rest = b""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a FIFO would block
            while block := file.read(BLOCK_BYTES):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline and any(needle in whole for needle in needles):
                    yield from (line for line in whole.split(b"\n") if any(needle in line for needle in needles))
    except OSError as error:  # just rotated away, or not readable
        logger.warning("%s cannot be read: %s", path, error.strerror or error)


def trace_folder(config: TraceConfig) -> Path:
    """Return the configured folder, or a new name under the temporary folder. Creates nothing."""
    if config.dir:
        return Path(config.dir).expanduser().absolute()
    return Path(tempfile.gettempdir()) / f"chitu-trace-{secrets.token_hex(8)}"


class RouterTrace:
    def __init__(self, config: TraceConfig, files: TraceFiles, name: str, clock: Clock) -> None:
        """`name` is that of this process: `router`, `router.1`."""
        self._config = config
        self._name = name
        self._clock = clock
        self.files = files
        self.framed: dict[bytes, str] = {}
        """Rooms whose token messages are recorded, with their request ids; empty if there are none."""

    def level(self, given: bytes | None) -> TraceLevel:
        """Return the level of a new request, by its header `X-Chitu-Trace`. Raises InvalidRequest if that is invalid or
        not allowed."""
        if given is None:
            return "records" if self._config.sample and random.random() < self._config.sample else ""
        level = LEVELS.get(given)
        if level is None:
            text = given[:40].decode("latin-1")
            raise InvalidRequest(f"{HEADER}: {text!r} is none of {', '.join(x.decode() for x in LEVELS)}", HEADER)
        if level and not self._config.by_header:
            raise InvalidRequest(f"{HEADER}: this server traces nothing for clients (trace.by_header)", HEADER)
        return level

    def note_request(
        self,
        request_id: str,
        path: str,
        tenant: str,
        arrived_s: float,
        received_s: float,
        error: str,
        choices: list[list[RequestSnapshot]],
    ) -> None:
        """Record a request whose answer is over."""
        record = TraceRequest(
            request_id=request_id,
            room="",
            instance=self._name,
            at_s=self._clock.monotonic(),
            path=path,
            tenant=tenant,
            arrived_s=arrived_s,
            received_s=received_s,
            error=error,
            choices=tuple(tuple(attempts) for attempts in choices),
        )
        self.files.add(record)

    def note_frame(self, request_id: str, room: bytes, direction: str, port: str, frame: bytes) -> None:
        record = TraceFrame(
            request_id=request_id,
            room=room_text(room),
            instance=self._name,
            at_s=self._clock.monotonic(),
            direction="sent" if direction == "sent" else "received",
            port=port,
            num_bytes=len(frame),
            data=frame if len(frame) <= MAX_FRAME_BYTES else b"",
        )
        self.files.add(record)
