"""The engine of the router's batches and of `chitu batch`: read a line, send it, write the answer durably, go on. On an
event loop, with files in other threads.

A line is OpenAI's: `{"custom_id", "method": "POST", "url", "body"}`. Its answer is one line of an output file, in the
order of arrival. What is answered is known from the output files alone, so a batch that was killed anywhere goes on
where they end.

Invariants: of each line there is at most one answer in the files, and one that `Answers.put` has returned from survives
the machine. Memory is bounded by the lines in flight, and 16 bytes of each `custom_id`.
"""

from __future__ import annotations

import asyncio
import os
import random
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.wire.inner import Reply
from chitu.known_types import known

MAX_ID_CHARS = 512
MAX_ERRORS = 100
"""Errors of an input file that are reported; a file of another kind has one in each line."""
READ_BYTES, READ_LINES = 1 << 20, 64
"""What is read ahead of the input."""
_HEAD = b'{"id":"batch_req_'
"""Beginning of every line of an output file."""
LATER = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which a line is sent again, at most `MAX_FAILURES` times."""
BUSY_CODES = frozenset({"capacity", "overloaded", "queue_timeout", "no_instance", "rate_limited", "too_many_requests"})
"""Codes of errors that say nothing about the line: it is sent again as often as need be, as after any 429."""
MAX_FAILURES = 4
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 20.0


class BatchLine(NamedTuple):
    custom_id: str
    url: str
    body: bytes
    """A JSON object."""


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with an input file; a member of `errors` of OpenAI's batch object."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line, from 1 on."""


class CheckedLines(NamedTuple):
    ids: frozenset[bytes]
    """Digests of the `custom_id` of all lines."""
    errors: tuple[LineError, ...]


@dataclass(frozen=True, slots=True)
class LineLimits:
    max_lines: int
    max_line_bytes: int
    urls: Collection[str] | None
    """URLs that a line may have; None: any path."""


class _RawLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _LineBody(msgspec.Struct):
    stream: bool | None = None


_decode_line = msgspec.json.Decoder(_RawLine).decode
_decode_body = msgspec.json.Decoder(_LineBody).decode


def digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=16).digest()


def parse_line(raw: bytes, limits: LineLimits) -> BatchLine:
    """Return a line of an input file. Raise InvalidRequest, with the field as `param`."""
    if len(raw) > limits.max_line_bytes:
        raise InvalidRequest(f"the line is longer than {limits.max_line_bytes} bytes")
    try:
        raw.decode()  # parts that msgspec skips are not decoded
        line = _decode_line(raw)
        body = bytes(line.body)
        stream = _decode_body(body).stream
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the line is not UTF-8: byte {raw[error.start]:#04x} at {error.start}") from None
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the line is no request: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from None
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id must have 1 to {MAX_ID_CHARS} characters", "custom_id")
    if line.method != "POST":
        raise InvalidRequest(f"method must be 'POST', not {line.method[:40]!r}", "method")
    if limits.urls is not None and line.url not in limits.urls:
        known = " or ".join(map(repr, limits.urls))
        raise InvalidRequest(f"url must be {known} in this batch, not {line.url[:80]!r}", "url")
    if not (line.url.startswith("/") and line.url.isascii() and line.url.isprintable() and " " not in line.url):
        raise InvalidRequest(f"url must be a path such as '/v1/chat/completions', not {line.url[:80]!r}", "url")
    if stream:
        raise InvalidRequest("stream: an answer in a batch is not streamed", "body.stream")
    return BatchLine(line.custom_id, line.url, body)


def _raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number. Of one that is too long, only a longer beginning than
    allowed is returned."""
    number = 0
    while raw := file.readline(max_line_bytes + 2):
        number += 1
        if not raw.endswith(b"\n"):
            while (rest := file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                pass
        raw = raw.removeprefix(BOM_UTF8)  # files that were joined have some within, too
        if raw.strip():
            yield number, raw.rstrip(b"\r\n")


def check_lines(path: Path, limits: LineLimits) -> CheckedLines:
    """Return what is wrong with an input file. Blocks. OSError if it cannot be read."""
    ids: set[bytes] = set()
    errors: list[LineError] = []
    with open(path, "rb") as file:
        for number, raw in _raw_lines(file, limits.max_line_bytes):
            if len(ids) >= limits.max_lines:
                errors.append(LineError("too_many_lines", f"the file has more than {limits.max_lines} lines"))
                break
            try:
                key = digest(parse_line(raw, limits).custom_id)
                if key in ids:
                    raise InvalidRequest("custom_id is that of an earlier line, too", "custom_id")
                ids.add(key)
            except InvalidRequest as error:
                errors.append(LineError("invalid_line", error.message, error.param, number))
                if len(errors) >= MAX_ERRORS:
                    break
    if not ids and not errors:
        errors.append(LineError("empty_file", "the file has no lines"))
    return CheckedLines(frozenset(ids), tuple(errors))


# ------------------------------------------------------------------------------------------------------------- answers


class Unreachable(Exception):
    """No connection to the server: the line was not sent."""


class ConnectionBroke(Exception):
    """The connection ended before the answer was complete."""


class DamagedAnswers(Exception):
    """An output file has something else than answers."""


class _Response(msgspec.Struct):
    status_code: int


class _AnsweredLine(msgspec.Struct):
    custom_id: str
    response: _Response | None


_decode_answered = msgspec.json.Decoder(_AnsweredLine).decode


def answer_line(custom_id: str, reply: Reply) -> bytes:
    """Return the line of an output file. A body that is no JSON is kept as a string."""
    body = reply.body
    try:
        body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
        if b"\n" in body or b"\r" in body:
            body = msgspec.json.format(body, indent=-1)
    except (ValueError, RecursionError):
        body = msgspec.json.encode(body.decode("utf-8", "replace"))
    name, request_id = msgspec.json.encode(custom_id), msgspec.json.encode(reply.request_id)
    return b'%b%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        *(_HEAD, os.urandom(12).hex().encode(), name, reply.status, request_id, body),
    )


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an output file for a line that no server answered."""
    error = msgspec.json.encode({"code": code, "message": message})
    name = msgspec.json.encode(custom_id)
    return b'%b%b","custom_id":%b,"response":null,"error":%b}\n' % (_HEAD, os.urandom(12).hex().encode(), name, error)


@dataclass(slots=True)
class Counts:
    completed: int = 0
    """Lines whose answer has a status of 200 to 299."""
    failed: int = 0


def is_success(status: int | None) -> bool:
    return status is not None and 200 <= status < 300


class _Waiting(NamedTuple):
    """An answer that is to be written."""

    custom_id: str
    line: bytes
    status: int | None
    written: asyncio.Future[None]


class Answers:
    """The output files of a batch: `failures` may be the same path as `path`. `open` first; `close` at the end."""

    def __init__(self, path: Path, failures: Path) -> None:
        self._paths = (path,) if path == failures else (path, failures)
        self._files: list[BinaryIO] = []
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self.done: set[bytes] = set()
        """Digests of the `custom_id` of the answered lines."""
        self.counts = Counts()

    def open(self) -> None:
        """Read what is answered, and cut off a line that was not written to its end. Blocks. DamagedAnswers or
        OSError."""
        for path in self._paths:
            file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", 0)  # noqa: SIM115
            self._files.append(file)
            os.lseek(file.fileno(), self._read(path), os.SEEK_SET)
            file.truncate()
        if len(self._files) == 1:
            self._files.append(self._files[0])

    def _read(self, path: Path) -> int:
        """Return where the next answer begins."""
        end = 0
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if not (raw.startswith(_HEAD) or _HEAD.startswith(raw)):
                        raise DamagedAnswers(f"{path}: line {number} is no answer of a batch")
                    return end
                try:
                    answered = _decode_answered(raw)
                except ValueError as error:
                    raise DamagedAnswers(f"{path}: line {number} is no answer of a batch: {error}") from None
                self._note(answered.custom_id, answered.response.status_code if answered.response else None)
                end += len(raw)
        return end

    def _note(self, custom_id: str, status: int | None) -> None:
        key = digest(custom_id)
        if key in self.done:
            raise DamagedAnswers(f"{custom_id[:80]!r} is answered twice")
        self.done.add(key)
        if is_success(status):
            self.counts.completed += 1
        else:
            self.counts.failed += 1

    async def put(self, custom_id: str, line: bytes, status: int | None) -> None:
        """Write an answer and return once it is on the disk. `status`: None if no server answered. OSError. If the call
        is cancelled, the answer may be written, and counted, all the same: then open the files anew."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(custom_id, line, status, written))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_all())
        await asyncio.shield(written)

    async def _write_all(self) -> None:
        """Write what waits, as often as something waits: answers that come during one write share the next."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            parts = [
                b"".join([each.line for each in waiting if is_success(each.status) is kind]) for kind in (True, False)
            ]
            try:
                await asyncio.to_thread(self._append, parts)
            except BaseException as error:
                failure = error if isinstance(error, OSError) else OSError(0, f"the writer ended: {error!r}")
                for each in (*waiting, *self._waiting):
                    if not each.written.done():
                        each.written.set_exception(failure)
                self._waiting.clear()
                if not isinstance(error, OSError):
                    raise
                return
            for each in waiting:
                self._end(each)

    def _end(self, waiting: _Waiting) -> None:
        """Count an answer that is on the disk, whether or not somebody still waits for it."""
        try:
            self._note(waiting.custom_id, waiting.status)
        except DamagedAnswers as error:
            if not waiting.written.done():
                waiting.written.set_exception(error)
        else:
            if not waiting.written.done():
                waiting.written.set_result(None)

    def _append(self, parts: list[bytes]) -> None:
        """Append to the files; nothing stays in a file of what did not get into it whole."""
        for file, data in zip(self._files, parts, strict=True):
            if not data:
                continue
            start, view = file.tell(), memoryview(data)
            try:
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(start)
                    file.seek(start)
                raise

    async def close(self) -> None:
        """Close the files, behind a write that runs."""
        if self._writer is not None:
            with suppress(OSError):
                await self._writer
        for file in self._files:
            file.close()


# --------------------------------------------------------------------------------------------------------------- lines


class OpenLines:
    """The lines of a checked input file that are not answered yet, read ahead a little. `open` first, then `next`."""

    def __init__(self, path: Path, limits: LineLimits, done: Collection[bytes]) -> None:
        self._path = path
        self._limits = limits
        self._done = frozenset(done)
        self._ahead: deque[BatchLine] = deque()
        self._lock = asyncio.Lock()
        self._is_over = False

    def open(self) -> None:
        self._file = open(self._path, "rb")  # noqa: SIM115
        self._raw = _raw_lines(self._file, self._limits.max_line_bytes)

    async def next(self) -> BatchLine | None:
        """Return the next line; None at the end. OSError, or InvalidRequest if the file was changed since its check."""
        async with self._lock:
            if not self._ahead and not self._is_over:
                self._ahead.extend(await asyncio.to_thread(self._read))
                self._is_over = not self._ahead
            return self._ahead.popleft() if self._ahead else None

    def _read(self) -> list[BatchLine]:
        lines: list[BatchLine] = []
        num_bytes = 0
        for _, raw in self._raw:
            line = parse_line(raw, self._limits)
            if digest(line.custom_id) not in self._done:
                lines.append(line)
                num_bytes += len(raw)
                if num_bytes >= READ_BYTES or len(lines) >= READ_LINES:
                    break
        return lines

    def close(self) -> None:
        self._file.close()


Send = Callable[[BatchLine], Awaitable[Reply]]


class _Failure(msgspec.Struct):
    code: str | int | None = None


class _FailureBody(msgspec.Struct):
    error: _Failure


def verdict_on(reply: Reply) -> Literal["answer", "busy", "failure"]:
    """Return whether a reply answers a line, or the line has to be sent again: `failure` counts, `busy` does not."""
    if reply.status not in LATER or not reply.may_retry:
        return "answer"
    if reply.status == 429:
        return "busy"
    try:
        code = msgspec.json.decode(reply.body, type=known(_FailureBody)).error.code
    except (ValueError, RecursionError):
        code = None
    return "busy" if code in BUSY_CODES else "failure"


class GaveUp(Exception):
    """No line was answered for too long."""


@dataclass(slots=True)
class Runner:
    """Sends the lines, a bounded number at once, and writes the answers."""

    send: Send
    answers: Answers
    max_in_flight: int
    patience_s: float | None = None
    """Time without any answer after which it gives up; None: never."""
    on_answer: Callable[[], None] = lambda: None
    _last_answer_s: float = field(default=0.0, init=False)

    async def run(self, lines: OpenLines) -> None:
        """Return once all lines are answered. Raise the first error: OSError, GaveUp, what `send` raises. To stop it
        early, cancel it."""
        self._last_answer_s = asyncio.get_running_loop().time()
        workers = [asyncio.ensure_future(self._work(lines)) for _ in range(self.max_in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, lines: OpenLines) -> None:
        while (line := await lines.next()) is not None:
            reply = await self._answer_to(line)
            await self.answers.put(line.custom_id, answer_line(line.custom_id, reply), reply.status)
            self._last_answer_s = asyncio.get_running_loop().time()
            self.on_answer()

    async def _answer_to(self, line: BatchLine) -> Reply:
        failures, pause_s = 0, FIRST_PAUSE_S
        while True:
            why, wait_s = "", 0.0
            try:
                reply = await self.send(line)
                verdict = verdict_on(reply)
                failures += verdict == "failure"
                if verdict == "answer" or failures >= MAX_FAILURES:
                    return reply
                why, wait_s = f"status {reply.status}: {reply.body[:200].decode('utf-8', 'replace')}", 0.0
                wait_s = reply.retry_after_s or 0.0
            except Unreachable as error:
                why = str(error)
            except ConnectionBroke as error:
                failures += 1
                why = str(error)
                if failures >= MAX_FAILURES:
                    body = msgspec.json.encode({"error": {"code": "connection_broke", "message": why}})
                    return Reply(502, body)
            silent_s = asyncio.get_running_loop().time() - self._last_answer_s
            if self.patience_s is not None and silent_s > self.patience_s:
                raise GaveUp(f"no line was answered for {silent_s:.0f} s; last: {why}")
            await asyncio.sleep(max(wait_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def answer_rest(lines: OpenLines, answers: Answers, code: str, message: str) -> None:
    """Write an answer of this error to every line that has none."""
    while (line := await lines.next()) is not None:
        some = [line]
        while len(some) < READ_LINES and (more := await lines.next()) is not None:
            some.append(more)
        puts = [answers.put(each.custom_id, unanswered_line(each.custom_id, code, message), None) for each in some]
        await asyncio.gather(*puts)
