"""Processes for tests, forked from one that has imported torch: an import takes seconds of a core.

`Nursery` starts `python nursery.py` and asks it for processes. Each is otherwise a real process: it has its own pid,
session, descriptors and environment (also in /proc, by which launchers find their processes), runs a module like
`python -m`, and is killed, ends and is waited for as any other. `popen` stands in for `subprocess.Popen` where a
launcher starts processes. torchrun is such a process too, and so are its ranks, which are its children. `chitu` is the
`chitu` command with all processes that it launches. A test of imports, of interpreters or of how torchrun itself starts
cannot use it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
from support.router_process import RouterUnderTest

from chitu.launch.plan import Entries
from chitu.process.descendants import die_with_parent

CLONE_NEWNET = 0x40000000
NAMESPACE = -1
"""Key of the descriptor of the child's network namespace. Without it the child gets that of the calling thread."""
OWN_NAMESPACE = "/proc/thread-self/ns/net"
MAX_REQUEST_BYTES = 1 << 17
PRELOAD = "LD_PRELOAD"
DESCRIPTOR = "CHITU_TEST_NURSERY"
"""Variable with the descriptor by which a process of the nursery asks for others."""
SPACE = "CHITU_TEST_SPACE"
"""Room in the nursery's environment: a child overwrites it with its own for readers of /proc/PID/environ."""
SPACE_BYTES = 1 << 16
"""Bytes of this room, and of that in the nursery's arguments for those of a child."""
TORCHRUN = "torch.distributed.run"
_OWN_HOSTS = ("unshare", "--mount", "bash", "-c", 'mount --bind "$1" /etc/hosts && exec "${@:2}"', "-")
IMPORTED = (
    "torch",
    "chitu.serve.scheduler",
    "chitu.engine.build",
    "chitu.serve.api_server",
    "chitu.launch.join",
    "chitu.tools.smoke",
    "forked_chitu",
    "support.checksum_scheduler",
    "support.fake_worker",
    "pydantic.v1",  # FastAPI imports it when it makes the router's routes
    "tokenizers",
    TORCHRUN,
)

OF_TRANSFORMERS = (
    *("transformers.modeling_utils", "chitu.models.generic.model"),
    "transformers.models.qwen3_vl.modeling_qwen3_vl",  # of most models that see here
)
"""What an instance imports whose model the modules of transformers compute: four seconds of a core. It reads variables
of the Hugging Face hub when it is imported, so that not every process may have it."""

END_AT_ONCE = {*IMPORTED, "standin_router", "standin_scheduler"}
"""Modules whose processes end without destructors of libraries. Tests of transports see how those end."""


class _Request(msgspec.Struct):
    module: str
    arguments: list[str]
    path: list[str]
    folder: str
    env: dict[str, str]
    numbers: list[int]
    """Numbers that the descriptors sent along have in the child."""
    is_session: bool
    umask: int


class Nursery:
    """A process that has imported everything and forks the processes that tests ask for."""

    _child: Child | None = None

    def __init__(self, preload: str, hosts: Path | None = None) -> None:
        """Start the nursery. `preload` is the LD_PRELOAD of it and all its children; empty for none. They see
        `hosts` in place of /etc/hosts; it may change later."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
        parent = os.getpid()
        self._process = subprocess.Popen(
            [*((*_OWN_HOSTS, str(hosts)) if hosts else ()), sys.executable, __file__, " " * SPACE_BYTES],
            stdin=theirs,
            env={**os.environ, SPACE: " " * SPACE_BYTES, PRELOAD: preload},
            preexec_fn=lambda: die_with_parent(parent),
        )
        theirs.close()

    @classmethod
    def inherited(cls, descriptor: int, child: Child | None = None) -> Nursery:
        """Return the nursery of the test that started this process, or one that is a process of another nursery, which
        ends if nobody holds the child."""
        nursery = cls.__new__(cls)
        nursery._child = child
        nursery._requests = socket.socket(fileno=descriptor)
        return nursery

    def fileno(self) -> int:
        return self._requests.fileno()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        env: Mapping[str, str],
        *,
        folder: str | Path | None = None,
        is_session: bool = False,
        umask: int = 0o022,
    ) -> Child:
        """Run `python -m module arguments`, in this process's folder if `folder` is None. `descriptors` maps numbers of
        the child to ours, which stay open here."""
        status, theirs = os.pipe()
        given, opened = {**descriptors}, [theirs]
        if NAMESPACE not in given:
            given[NAMESPACE] = os.open(OWN_NAMESPACE, os.O_RDONLY)
            opened.append(given[NAMESPACE])
        request = _Request(
            module, list(arguments), sys.path, str(folder or Path.cwd()), dict(env), list(given), is_session, umask
        )
        packet = msgspec.msgpack.encode(request)
        assert len(packet) <= MAX_REQUEST_BYTES, "an environment of this size"
        socket.send_fds(self._requests, [packet], [theirs, *given.values()])
        for descriptor in opened:
            os.close(descriptor)
        return Child(status)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        umask: int = 0o022,
        preexec_fn: object = die_with_parent,
    ) -> Any:
        """Start a process for `ChildProcess` or `RouterUnderTest`, as `subprocess.Popen` does: this interpreter runs a
        module, maybe on another host of a `Network`, and ends with its parent."""
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "rb"))
            given = {0: nothing.fileno(), 1: _number(stdout, 1), 2: _number(stderr, 2), **{n: n for n in pass_fds}}
            if argv[0] == "nsenter":
                namespace = stack.enter_context(open(argv[1].removeprefix("--net="), "rb"))
                given[NAMESPACE], argv = namespace.fileno(), argv[2:]
            assert tuple(argv[:2]) == (sys.executable, "-m") and stdin == subprocess.DEVNULL and preexec_fn is not None
            return self.fork(argv[2], argv[3:], given, env, folder=cwd, is_session=start_new_session, umask=umask)


def _number(stream: IO[bytes] | int | None, inherited: int) -> int:
    if stream is None:
        return inherited
    return stream if isinstance(stream, int) else stream.fileno()


def nursery(preload: str = "") -> Nursery:
    """Return this process's nursery, which ends with it. Each library in front of libc needs a nursery of its own."""
    return _one_nursery(preload)  # the cache would take `nursery()` and `nursery("")` for two, 5 s of a core each


@functools.cache
def _one_nursery(preload: str) -> Nursery:
    """Start it, or take that of the test that started this process."""
    if inherited := os.environ.pop(DESCRIPTOR, ""):
        return Nursery.inherited(int(inherited))
    return Nursery(preload)


@functools.cache
def nursery_with_transformers() -> Nursery:
    """Return a nursery that has imported transformers, too: a process of the other one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
    child = nursery().fork("nursery", OF_TRANSFORMERS, {0: theirs.fileno(), 1: 1, 2: 2}, os.environ)
    theirs.close()
    return Nursery.inherited(ours.detach(), child)


def popen_with_transformers(argv: Sequence[str], **options: Any) -> Any:
    """Start a process as `popen` does, from the nursery that has imported transformers."""
    return nursery_with_transformers().popen(argv, **options)


def popen(argv: Sequence[str], **options: Any) -> Any:
    """Start a process as `subprocess.Popen` does, from the nursery."""
    return nursery(options["env"].get(PRELOAD, "")).popen(argv, **options)


def launcher(argv: Sequence[str], **options: Any) -> Any:
    """Start a launcher as `popen` does, with what it needs to start its processes by `forked` from this nursery."""
    own = nursery()
    return own.popen(
        argv, env={**options.pop("env"), DESCRIPTOR: str(own.fileno())}, pass_fds=[own.fileno()], **options
    )


def chitu(argv: Sequence[str], torchrun: bool = False, **options: Any) -> Any:
    """Start a `chitu` command as `popen` does. The processes that it launches come from this nursery, too."""
    at, entries = argv.index("chitu.cli"), Entries()
    own = ("forked_chitu", entries.router, entries.scheduler, "torchrun" if torchrun else "direct")
    return launcher([*argv[:at], *own, *argv[at + 1 :]], **options)


def run_chitu(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a `chitu` command as `subprocess.run` does, with processes from the nursery."""
    return run(argv, env, timeout_s, chitu)


def run(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float, start: Callable[..., Any] = popen
) -> subprocess.CompletedProcess[str]:
    """Run a module as `subprocess.run` does, from the nursery."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        code = start(argv, env=env, stdout=stdout, stderr=stderr).wait(timeout_s)
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(argv, code, *texts)


def forked(entries: Entries) -> Entries:
    """Return the same processes, started from the nursery."""
    return replace(entries, popen=popen)


FORKED = forked(Entries(torchrun=False))
"""Entries for clusters whose tests are not about how processes start: 1P1D takes a tenth of the CPU time."""
WITH_TRANSFORMERS = replace(FORKED, popen=popen_with_transformers)
"""The same for instances whose models, or encoders of images, the modules of transformers compute."""


def forked_router(*arguments: Any, **options: Any) -> RouterUnderTest:
    """Return a router with processes from the nursery, except body processes, which it starts itself."""
    return RouterUnderTest(*arguments, **options, popen=popen)


class Child:
    """A process of the nursery with the interface of `subprocess.Popen`."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status)
        line = self._status.readline()
        assert line, "the nursery did not fork"
        self.pid = int(line)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            line = self._status.readline()
            self.returncode = int(line) if line else -signal.SIGKILL  # the nursery was killed, and the child with it
            self._status.close()
        return self.returncode


def next_child() -> _Request:
    """Fork for each request. Return in the child, with what it must do; exit in the parent when there is no more to
    do."""
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()  # otherwise a child's garbage collection would copy the pages of all objects
    while True:
        packet, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 16)
        if not packet:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    requests.close()
    status, *given = descriptors
    request = msgspec.msgpack.decode(packet, type=_Request)
    parent = os.getpid()
    child = os.fork()
    if child != 0:  # this process waits for the child as its parent, and ends with it if the starter has ended
        for descriptor in (*given, 0, 1, 2):
            os.close(descriptor)
        os.write(status, b"%d\n" % child)
        ends = select.poll()
        ends.register(status, 0)
        ends.register(ended := os.pidfd_open(child), select.POLLIN)
        if any(descriptor == ended for descriptor, _ in ends.poll()):
            os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    die_with_parent(parent)
    os.close(status)
    if request.module == TORCHRUN:
        return _torchrun_or_rank(request, given)
    _become(request, given)
    return request


def _torchrun_or_rank(torchrun: _Request, given: Sequence[int]) -> _Request:
    """Fork the ranks while this process has one thread; each waits until torchrun starts it, and is its child.

    Until then a rank does not have torchrun's environment, so a launcher does not take it for a process of its tree.
    """
    assert max(torchrun.numbers) <= 2, "descriptors beside those that every process has"
    (number,) = (word.partition("=")[2] for word in torchrun.arguments if word.startswith("--nproc-per-node="))
    waiting: list[tuple[int, socket.socket]] = []
    parent = os.getpid()
    for _ in range(int(number)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            for opened in (ours, *(other for _, other in waiting)):
                opened.close()
            rank = msgspec.msgpack.decode(theirs.recv(MAX_REQUEST_BYTES), type=_Request)
            _become(rank, given)
            theirs.send(b"it is a process of its own")
            theirs.close()
            return rank
        theirs.close()
        waiting.append((child, ours))

    class Rank(subprocess.Popen[bytes]):
        """A rank that was forked already, which torchrun supervises."""

        def __init__(self, args: Sequence[str], env: dict[str, str], stdout: None, stderr: None, **_: bool) -> None:
            assert tuple(args[1:3]) == ("-u", "-m") and stdout is None and stderr is None
            request = msgspec.structs.replace(
                torchrun, module=args[3], arguments=list(args[4:]), env=env, is_session=True
            )
            self._packet = msgspec.msgpack.encode(request)
            super().__init__(args)

        def _execute_child(self, *_: object) -> None:
            self.pid, rank = waiting.pop(0)
            rank.send(self._packet)
            rank.recv(MAX_REQUEST_BYTES)
            rank.close()
            self._child_created = True

    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    handler.Popen = Rank
    _become(torchrun, given)
    return torchrun


def _become(request: _Request, given: Sequence[int]) -> None:
    """Take over the descriptors, session, folder, arguments and environment of the request."""
    high = [os.dup2(descriptor, 100 + at) for at, descriptor in enumerate(given)]  # above all numbers that they get
    for descriptor in given:
        os.close(descriptor)
    for number, descriptor in zip(request.numbers, high, strict=True):
        if number != NAMESPACE:
            os.dup2(descriptor, number)
        elif os.fstat(descriptor).st_ino == os.stat(OWN_NAMESPACE).st_ino:
            pass  # to enter even one's own takes root
        elif ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    if request.is_session:
        os.setsid()
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()  # what is set below are libc's copies, so the block that the kernel shows is free
    os.environ.update(request.env)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    argv = (sys.executable, "-m", request.module, *request.arguments)
    for at, words in ((45, argv), (47, [f"{key}={value}" for key, value in request.env.items()])):
        start, end = int(stat[at]), int(stat[at + 1])
        block = b"".join(word.encode() + b"\0" for word in words)
        assert len(block) <= end - start, "arguments and an environment of this size"
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _leave(codes: Sequence[int]) -> None:
    """End with the exit code of a process that ended by itself. To take down torch, which most would not have without
    the nursery, would take it a quarter second of a core."""
    if codes:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    exit_codes: list[int] = []
    atexit.register(_leave, exit_codes)  # before all that is imported below, so it runs after their handlers
    for name in (*IMPORTED, *" ".join(sys.argv[1:]).split()):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    wanted = next_child()
    sys.path[:] = [*filter(None, wanted.env.get("PYTHONPATH", "").split(os.pathsep)), *wanted.path]
    sys.modules.pop(wanted.module, None)  # it runs as `__main__`
    sys.argv = [wanted.module, *wanted.arguments]
    try:
        runpy.run_module(wanted.module, run_name="__main__", alter_sys=True)
        if wanted.module in END_AT_ONCE:
            exit_codes.append(0)
    except SystemExit as end:
        if wanted.module in END_AT_ONCE and (end.code is None or isinstance(end.code, int)):
            exit_codes.append(end.code or 0)
        raise
