"""`chitu batch IN.jsonl OUT.jsonl`: answer a file of requests with any server of OpenAI's API. Main thread; requests
block in threads of a pool.

`http/batch/lines.py` does the work on the lines, as for the router's batches. What is answered is in the output file,
so the same command goes on after it was killed. Only one such command at a time has the file.
"""

from __future__ import annotations

import asyncio
import http.client
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chitu.errors import ChituError, ConfigError, InvalidRequest, ServiceError
from chitu.http.batch.lines import (
    Answers,
    BatchLine,
    ConnectionBroke,
    DamagedAnswers,
    GaveUp,
    LineLimits,
    OpenLines,
    Runner,
    Unreachable,
    check_lines,
)
from chitu.http.wire.inner import Reply
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.lock_files import claim
from chitu.net.client import ServerConnection
from chitu.protocol import MAX_PRIORITY

LIMITS = LineLimits(max_lines=10_000_000, max_line_bytes=64 << 20, urls=None)
SHOWN_ERRORS = 10
PROGRESS_S = 5.0
WITH_PRIORITY = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    concurrency: int
    """Lines sent at once."""
    timeout_s: float
    """Timeout of one answer."""
    patience_s: float
    """Time without any answer after which it gives up."""


class BatchGaveUp(ServiceError):
    """The server answered no line for too long; the same command goes on later."""

    code = "batch_gave_up"


class _Post:
    """One connection, kept open between requests. `post` blocks; `abort` ends it from another thread."""

    def __init__(self, client: RouterClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._connection: ServerConnection | None = None
        self._is_aborted = False

    def post(self, path: str, body: bytes) -> Reply:
        """Return what the server answers. Unreachable or ConnectionBroke."""
        if self._connection is not None:
            try:
                return self._ask(self._connection, path, body)
            except (ConnectionError, http.client.RemoteDisconnected):
                self.close()  # the server closed it while nothing was asked
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise ConnectionBroke(repr(error)) from error
        try:
            self._connection = self._client.server.connect(self._timeout_s)
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"{self._client.url}: {error}") from error
        try:
            return self._ask(self._connection, path, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ConnectionBroke(repr(error)) from error

    def _ask(self, connection: ServerConnection, path: str, body: bytes) -> Reply:
        if self._is_aborted:
            raise ConnectionAbortedError
        answer = connection.ask("POST", path, body, self._client.headers)
        if not connection.is_open:
            self.close()
        retry_after = answer.headers.get("retry-after", "")
        return Reply(
            answer.status,
            answer.body,
            answer.headers.get("x-request-id", ""),
            float(retry_after) if retry_after.isdecimal() else None,
            answer.headers.get("x-should-retry") != "false",
        )

    def abort(self) -> None:
        self._is_aborted = True
        if self._connection is not None:
            self._connection.abort()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Sender:
    def __init__(self, client: RouterClient, options: BatchOptions, priority: int | None) -> None:
        """`priority`: of lines that have none; None: the server knows no priorities."""
        self._client = client
        self._timeout_s = options.timeout_s
        self._priority = priority
        self._pool = ThreadPoolExecutor(options.concurrency, "batch")
        self._idle: list[_Post] = []

    async def send(self, line: BatchLine) -> Reply:
        post = self._idle.pop() if self._idle else _Post(self._client, self._timeout_s)
        body = line.body
        if self._priority is not None and line.url in WITH_PRIORITY:
            body = with_priority(body, self._priority)
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._pool, post.post, line.url, body)
        except asyncio.CancelledError:
            post.abort()
            raise
        self._idle.append(post)
        return reply

    def close(self) -> None:
        for post in self._idle:
            post.close()
        self._pool.shutdown()


def with_priority(body: bytes, priority: int) -> bytes:
    """Return a body with this priority, unless it has one."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({"priority": priority, **fields})


def batch(url: str, api_key: str | None, source: Path, target: Path, options: BatchOptions) -> int:
    """Answer what is not answered yet and return the exit code: 0, or 1 if a line's answer is an error. Raise
    ConfigError if the files are wrong, BatchGaveUp if the server does not answer."""
    client = RouterClient(url, api_key)
    checked = check_lines(source, LIMITS)
    if checked.errors:
        for error in checked.errors[:SHOWN_ERRORS]:
            where = f"line {error.line}: " if error.line is not None else ""
            print(f"chitu: {source}: {where}{error.message}", file=sys.stderr)
        raise ConfigError(f"{source} is no file of requests; nothing was sent")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input itself")
    lock_path = target.with_name(target.name + ".lock")
    try:
        lock = claim(lock_path)
    except BlockingIOError:
        raise ConfigError(f"another `chitu batch` writes {target}") from None
    try:
        answers = Answers(target, target)
        try:
            answers.open()
        except DamagedAnswers as error:
            raise ConfigError(f"{error}; move it away, or name another output") from None
        if len(answers.done - checked.ids):
            raise ConfigError(f"{target} has answers to lines that {source} does not have: name another output")
        total = len(checked.ids)
        if answers.done:
            print(f"{len(answers.done)} of {total} lines are answered in {target}", file=sys.stderr)
        priority = _priority_for(client) if len(answers.done) < total else None
        asyncio.run(_answer(client, source, answers, options, priority, total))
    finally:
        lock_path.unlink(missing_ok=True)
        lock.close()
    counts = answers.counts
    print(f"{total} lines: {counts.completed} completed, {counts.failed} failed", file=sys.stderr)
    return 1 if counts.failed else 0


def _priority_for(client: RouterClient) -> int | None:
    """Return the lowest priority if the server is one of ours: other servers refuse fields that they do not know."""
    try:
        return MAX_PRIORITY if client.is_chitu() else None
    except RouterUnreachable:
        raise
    except ChituError:
        return None


async def _answer(
    client: RouterClient, source: Path, answers: Answers, options: BatchOptions, priority: int | None, total: int
) -> None:
    # Ctrl-C and SIGTERM cancel what runs, so that what is answered is on the disk.
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, this.cancel)
    sender, lines = _Sender(client, options, priority), OpenLines(source, LIMITS, answers.done)
    next_s = time.monotonic() + PROGRESS_S

    def on_answer() -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + PROGRESS_S
            print(f"{len(answers.done)} of {total}, {answers.counts.failed} failed", file=sys.stderr)

    lines.open()
    try:
        await Runner(sender.send, answers, options.concurrency, options.patience_s, on_answer).run(lines)
    except GaveUp as error:
        raise BatchGaveUp(f"{error}; the same command goes on") from None
    except InvalidRequest as error:
        raise ConfigError(f"{source} was changed meanwhile: {error.message}") from None
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await answers.close()
        lines.close()
        sender.close()
