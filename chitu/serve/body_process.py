"""The process that works on large bodies and on grammars: `python -m chitu.serve.body_process SOCKET PARENT_PID`.

Started by `BodyProcesses` alone, with an inherited end of a socket pair, at which it says one answer to each task, one
after the other. It has a tokenizer and nothing of the cluster, opens no port, and imports no torch. It ends with the
process that started it, whatever ends that; and by SIGPROF in a task that takes more processor time than it may.

A task: its sizes (`HEAD`), itself and `raw`. An answer: its size and itself. Both are pickled: this is the same program
with the same trust, apart only for the processor's sake. A byte that comes during a task says that nobody wants it any
more; `HEAD` begins with another one.
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
from chitu.http.body_work import BodyTask, BodyWork, JudgeGrammar
from chitu.http.served_model import ServedModel
from chitu.launch.process import die_with_parent
from chitu.net.http import ClientGone

HEAD = struct.Struct("<cIQ")
"""`TASK`, bytes of the task, bytes of `raw`."""
ANSWER = struct.Struct("<Q")
TASK, UNWANTED = b"T", b"U"
NICENESS = 10
"""So that on few cores tokens go first."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """The kernel kills this process where what is in it takes more processor time, in whatever thread."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Exactly so many. EOFError where the other end is no more."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def serve(connection: socket.socket, work: BodyWork) -> None:
    """Until the other end is no more."""

    def require_client() -> None:
        if select.select([connection], [], [], 0)[0]:
            raise ClientGone

    while True:
        kind = receive(connection, 1)
        if kind == UNWANTED:  # it came behind the end of the task
            continue
        _, task_bytes, raw_bytes = HEAD.unpack(kind + receive(connection, HEAD.size - 1))
        task: BodyTask = pickle.loads(receive(connection, task_bytes))
        raw = receive(connection, raw_bytes)
        found: object = None
        try:
            if isinstance(task, JudgeGrammar):
                work.judge(task)
            else:
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
        signal.signal(number, signal.SIG_IGN)  # a terminal's are for the router, which ends this one behind its drain
    connection = socket.socket(fileno=int(argv[0]))
    try:
        model: ModelConfig
        model, takes_unknown = pickle.loads(receive(connection, *ANSWER.unpack(receive(connection, ANSWER.size))))
        serve(connection, BodyWork(ServedModel.load(model, 0), takes_unknown, limited))
    except (EOFError, ConnectionError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
