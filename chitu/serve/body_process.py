"""The process that works on large bodies and on grammars: `python -m chitu.serve.body_process SOCKET PARENT_PID`.

Only `BodyProcesses` starts it. It inherits one end of a socket pair, over which it sends one answer per task, in order.
It has a tokenizer and no access to the cluster, opens no port, and imports no torch. It ends with the process that
started it, however that ends, or by SIGPROF in a task that exceeds its limit of CPU time.

A task on the wire: its sizes (`HEAD`), the task, `raw`. An answer: its size, the answer. Both are pickled: this is the
same program with the same trust, separate only to keep CPU work off the loop. The byte `UNWANTED` during a task cancels
it; `HEAD` begins with another byte.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chitu.config.schema import ModelConfig
from chitu.errors import ChituError, Internal
from chitu.http.body_reader import BodyTask, BodyWork, JudgeGrammar
from chitu.http.served_model import ServedModel
from chitu.net.http import ClientGone
from chitu.process.child import die_with_parent

HEAD = struct.Struct("<cIQ")
"""`TASK`, size of the task, size of `raw` (both in bytes)."""
ANSWER = struct.Struct("<Q")
TASK, UNWANTED = b"T", b"U"
NICENESS = 10
"""Nice value of the process, so that tokens take precedence on few cores."""


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
        model, takes_unknown = pickle.loads(receive(connection, *ANSWER.unpack(receive(connection, ANSWER.size))))
        serve(connection, BodyWork(ServedModel.load(model, 0), takes_unknown))
    except (EOFError, ConnectionError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
