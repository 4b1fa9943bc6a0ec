"""The processes for work that would delay the tokens of other requests: large bodies and grammars. Loop thread.

Owned by `ApiEndpoint`. There are three kinds of tasks, which do not wait for each other. One task of each kind runs at
a time, so there are three processes at most, and none before the first task. Clients take turns, so one waits for at
most one task of each other. If a process dies in a task, the task is retried once. It fails if the second process dies
too, or if a process uses up its CPU time. The next task gets a new process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import uuid
from typing import Any, cast

from chitu.config.load import child_environment
from chitu.config.schema import ModelConfig
from chitu.errors import Capacity, Internal, PoisonRequest
from chitu.http.body_reader import BODY_S, BodyTask, JudgeGrammar, too_costly
from chitu.net.fair_share import NoPlace, Turns
from chitu.process.child import MARK, describe_exit
from chitu.serve.body_process import ANSWER, HEAD, TASK, UNWANTED

log = logging.getLogger(__name__)

HUGE_BODY_BYTES = 256 << 10
MAX_TASKS = 1024
"""Unfinished tasks of one kind, at most; one client has a quarter at most (`Places`). `router.max_total_body_bytes`
bounds the bytes of their bodies."""
TRIES = 2
HUNG_S = 10 * BODY_S
"""A process that does not answer for this long is stopped or waits forever, and is killed."""


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
            argv = (sys.executable, "-m", "chitu.serve.body_process", str(theirs.fileno()), str(os.getpid()))
            # A mark of its own: with the router's mark, the launcher would take it for the router's worker.
            env = child_environment({MARK: uuid.uuid4().hex})
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
        log.info("large bodies and grammars: started pid %d", popen.pid)
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
    """The `BodyExecutor` of this API process."""

    def __init__(self, model: ModelConfig, takes_unknown: bool) -> None:
        self._setup = pickle.dumps((model, takes_unknown))
        self._idle: list[BodyProcess] = []
        self._busy: set[BodyProcess] = set()
        self._turns: dict[str, Turns[bytes]] = {kind: Turns(MAX_TASKS) for kind in ("grammar", "huge", "large")}

    @property
    def pids(self) -> list[int]:
        """Pids of the live processes."""
        return [process._popen.pid for process in (*self._idle, *self._busy) if process.exit_code is None]

    async def do(self, task: BodyTask, raw: bytes | bytearray, client: bytes = b"") -> Any:
        """Return or raise what `BodyWork` does for the task. Capacity if too many tasks of the client wait already."""
        is_grammar = isinstance(task, JudgeGrammar)
        kind = "grammar" if is_grammar else "huge" if len(raw) > HUGE_BODY_BYTES else "large"
        try:
            async with self._turns[kind].turn(client):
                return await self._do(task, raw)
        except NoPlace:
            what = "grammars wait to be compiled" if is_grammar else "large bodies wait to be read"
            raise Capacity(f"too many of your {what} already") from None

    async def _do(self, task: BodyTask, raw: bytes | bytearray) -> object:
        code = 0
        for _ in range(TRIES):
            process = self._idle.pop() if self._idle else await BodyProcess.start(self._setup)
            self._busy.add(process)
            try:
                found = await process.ask(task, raw)
                if isinstance(found, BaseException):
                    raise found
                return found
            except ProcessEnded as error:
                code = error.code
                log.warning("the process that works on large bodies ended in a task: %s", describe_exit(code))
                if code == -signal.SIGPROF:
                    raise too_costly(task) from None
            finally:
                self._busy.discard(process)
                if process.exit_code is None:
                    self._idle.append(process)
        raise PoisonRequest(f"the process that worked on this request ended {TRIES} times ({describe_exit(code)})")

    def close(self) -> None:
        for process in (*self._idle, *self._busy):
            process.kill()
