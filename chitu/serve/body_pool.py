"""The processes for work that would delay the tokens of other requests: large bodies and grammars.

`BodyProcesses`, owned by `ApiEndpoint` on the loop thread, has four kinds of tasks, which do not wait for each other.
One task of each kind runs at a time, so there are four processes at most, and none before the first task. One of them
is for bodies with images alone: it decodes files of strangers, and has a child with the model's image processor; where
the model sees images, it is started with the router.
Clients take turns, so one waits for at most one task of each other. If a process dies in a task, the task is retried
once. It fails if the second process dies too, or if a process uses up its CPU time. The next task gets a new process.

The process (`python -m chitu.serve.body_pool SOCKET PARENT_PID`) inherits one end of a socket pair, over which it sends
one answer per task, in order. It has a tokenizer and no access to the cluster, opens no port, and imports no torch. It
ends with the process that started it, however that ends, or by SIGPROF in a task that exceeds its limit of CPU time.
A task on the wire: its sizes (`HEAD`), the task, `raw`. An answer: its size, the answer. Both are pickled: this is the
same program with the same trust, separate only to keep CPU work off the loop. The byte `UNWANTED` during a task cancels
it; `HEAD` begins with another byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from chitu.config.load import keyless_environment
from chitu.config.schema import ImagesConfig, ModelConfig
from chitu.errors import Capacity, ChituError, Internal, PoisonRequest
from chitu.http.ask.image_files import ImageReader
from chitu.http.ask.reader import BODY_S, BodyTask, BodyWork, JudgeGrammar, ReadBody, too_costly
from chitu.http.ask.served_model import ServedModel
from chitu.http.table import READERS
from chitu.images.sizer import SizerProcess
from chitu.net.fair_share import NoPlace, Turns
from chitu.net.http import ClientGone
from chitu.process.child import describe_exit
from chitu.process.descendants import MARK, die_with_parent

logger = logging.getLogger(__name__)

HEAD = struct.Struct("<cIQ")
"""`TASK`, size of the task, size of `raw` (both in bytes)."""
ANSWER = struct.Struct("<Q")
TASK, UNWANTED = b"T", b"U"
NICENESS = 10
"""Nice value of the process, so that tokens take precedence on few cores."""
HUGE_BODY_BYTES = 256 << 10
MAX_TASKS = 1024
"""Unfinished tasks of one kind, at most; one client has a quarter at most (`Places`). `router.max_total_body_bytes`
bounds the bytes of their bodies."""
TRIES = 2
HUNG_S = 10 * BODY_S
"""A process that does not answer for this long is stopped or waits forever, and is killed."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let the kernel kill this process if the block takes more than `seconds` of CPU time, over all threads."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return exactly `num_bytes` bytes. EOFError if the other end is closed."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def serve(connection: socket.socket, work: BodyWork) -> None:
    """Answer tasks until the other end closes, then raise EOFError."""

    def require_client() -> None:
        if select.select([connection], [], [], 0)[0]:
            raise ClientGone

    while True:
        kind = receive(connection, 1)
        if kind == UNWANTED:  # it arrived after the end of the task
            continue
        _, task_bytes, raw_bytes = HEAD.unpack(kind + receive(connection, HEAD.size - 1))
        task: BodyTask = pickle.loads(receive(connection, task_bytes))
        raw = receive(connection, raw_bytes)
        found: object = None
        try:
            if isinstance(task, JudgeGrammar):
                work.judge(task, limited)
            else:
                with limited(task.limit_s):
                    found = work.read(task, raw, require_client)
        except (ChituError, ClientGone) as error:
            found = error.with_traceback(None)
        except Exception as error:
            found = Internal(f"a body could not be worked on: {error!r}"[:500])
        answer = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        connection.sendall(ANSWER.pack(len(answer)))
        connection.sendall(answer)
        del raw, found, answer


def main(argv: Sequence[str]) -> int:
    die_with_parent(int(argv[1]))
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the router receives a terminal's, and ends this process after its drain
    connection = socket.socket(fileno=int(argv[0]))
    try:
        model: ModelConfig
        images: ImagesConfig
        model, takes_unknown, images, reads_images = pickle.loads(
            receive(connection, *ANSWER.unpack(receive(connection, ANSWER.size)))
        )
        served = ServedModel.load(model, 0, images)
        if reads_images and served.has_vision:
            sizer = _sizer_of(model, images)
            with contextlib.suppress(ChituError):  # the first image will tell
                sizer.load()
            served.set_reader(ImageReader(images, lambda: sizer))
        serve(connection, BodyWork(served, takes_unknown, READERS))
    except (EOFError, ConnectionError):
        pass
    return 0


def _sizer_of(model: ModelConfig, images: ImagesConfig) -> SizerProcess:
    sizer = SizerProcess.of(model.path, images)
    if isinstance(sizer, str):
        raise Internal(f"the model's images: {sizer}")
    return sizer


class ProcessEnded(Exception):
    """The process ended without an answer. `code`: its return code, as in `subprocess`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class BodyProcess(asyncio.Protocol):
    """One process, as seen by the process that started it. It answers one task after another."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[object] | None = None
        self.exit_code: int | None = None
        """Return code; None while the process lives."""

    @classmethod
    async def start(cls, setup: bytes) -> BodyProcess:
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            argv = (sys.executable, "-m", "chitu.serve.body_pool", str(theirs.fileno()), str(os.getpid()))
            # A mark of its own: with the router's mark, the launcher would take it for the router's worker.
            env = keyless_environment({MARK: uuid.uuid4().hex})
            popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=env)
        except OSError as error:
            mine.close()
            raise _cannot_start(error) from error
        finally:
            theirs.close()
        mine.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, process = await loop.create_unix_connection(lambda: cls(popen), sock=mine)
        transport.writelines((ANSWER.pack(len(setup)), setup))
        logger.info("large bodies and grammars: started pid %d", popen.pid)
        return process

    async def ask(self, task: BodyTask, raw: bytes | bytearray) -> object:
        """Return the answer to `task`. ProcessEnded if none will come. If cancelled, wait until the process is free."""
        if self.exit_code is not None:
            raise ProcessEnded(self.exit_code)
        assert self._transport is not None and self._answer is None
        self._answer = asyncio.get_running_loop().create_future()
        packed = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        self._transport.write(HEAD.pack(TASK, len(packed), len(raw)) + packed)
        if raw:
            self._transport.write(raw)
        hung = asyncio.get_running_loop().call_later(HUNG_S, self.kill)
        try:
            return await asyncio.shield(self._answer)
        except asyncio.CancelledError:
            if self.exit_code is None and not self._answer.done():
                self._transport.write(UNWANTED)
                try:
                    await asyncio.wait((self._answer,))
                except asyncio.CancelledError:  # again: an answer now would pass for the next task's
                    self.kill()
            raise
        finally:
            hung.cancel()
            if self._answer.done() and not self._answer.cancelled():
                self._answer.exception()  # mark the exception as retrieved
            self._answer = None

    def kill(self) -> None:
        self._popen.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < ANSWER.size:
            return
        [num_bytes] = ANSWER.unpack_from(self._received)
        if len(self._received) == ANSWER.size + num_bytes:
            answer = pickle.loads(memoryview(self._received)[ANSWER.size :])
            self._received = bytearray()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._popen.kill()
        self.exit_code = self._popen.wait()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ProcessEnded(self.exit_code))


def _cannot_start(error: OSError) -> Internal:
    return Internal(f"the process that works on large bodies cannot be started: {error}")


class BodyProcesses:
    """The `BodyExecutor` of this router."""

    def __init__(self, model: ModelConfig, takes_unknown: bool, images: ImagesConfig | None = None) -> None:
        """`images`: limits on images; None: the usual ones."""
        setup = model, takes_unknown, images or ImagesConfig()
        self._setups = {reads_images: pickle.dumps((*setup, reads_images)) for reads_images in (False, True)}
        self._idle: dict[bool, list[BodyProcess]] = {False: [], True: []}
        """Those without and with images."""
        self._busy: set[BodyProcess] = set()
        self._turns: dict[str, Turns[bytes]] = {
            kind: Turns(MAX_TASKS) for kind in ("grammar", "images", "huge", "large")
        }

    @property
    def pids(self) -> list[int]:
        """Pids of the live processes."""
        return [process._popen.pid for process in self._all() if process.exit_code is None]

    def _all(self) -> list[BodyProcess]:
        return [*self._idle[False], *self._idle[True], *self._busy]

    async def prepare_images(self) -> None:
        """Start a process for bodies with images: it needs seconds to load the model's image processor."""
        self._idle[True].append(await BodyProcess.start(self._setups[True]))

    async def do(self, task: BodyTask, raw: bytes | bytearray, client: bytes = b"") -> Any:
        """Return or raise what `BodyWork` does for the task. Capacity if too many tasks of the client wait already."""
        is_grammar = isinstance(task, JudgeGrammar)
        kind = "grammar" if is_grammar else "huge" if len(raw) > HUGE_BODY_BYTES else "large"
        if isinstance(task, ReadBody) and task.reads_images:
            kind = "images"
        try:
            async with self._turns[kind].turn(client):
                return await self._do(task, raw, kind == "images")
        except NoPlace:
            bodies = "bodies with images" if kind == "images" else "large bodies"
            what = "grammars wait to be compiled" if is_grammar else f"{bodies} wait to be read"
            raise Capacity(f"too many of your {what} already") from None

    async def _do(self, task: BodyTask, raw: bytes | bytearray, reads_images: bool) -> object:
        code, idle = 0, self._idle[reads_images]
        for _ in range(TRIES):
            process = idle.pop() if idle else await BodyProcess.start(self._setups[reads_images])
            self._busy.add(process)
            try:
                found = await process.ask(task, raw)
                if isinstance(found, BaseException):
                    raise found
                return found
            except ProcessEnded as error:
                code = error.code
                logger.warning("the process that works on large bodies ended in a task: %s", describe_exit(code))
                if code == -signal.SIGPROF:
                    raise too_costly(task) from None
            finally:
                self._busy.discard(process)
                if process.exit_code is None:
                    idle.append(process)
        raise PoisonRequest(f"the process that worked on this request ended {TRIES} times ({describe_exit(code)})")

    def close(self) -> None:
        for process in self._all():
            process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
