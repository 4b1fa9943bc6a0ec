"""One child process tree: started in its own session, logged, ended as a whole. Linux only.

Used from one thread. Invariant: a child dies with its supervisor (`PR_SET_PDEATHSIG`), even when that is killed with
-9. The signal follows the *thread* that started the child, so start children from a thread that outlives them. Every
process of a tree has `CHITU_PROCESS` in its environment. torchrun puts its workers into their own sessions, so that
mark, not the process group, identifies the processes of the tree.

A child, including its native libraries, writes its log through the inherited descriptors 1 and 2, so only its starter
can limit the log's size: it copies the file and truncates it. The descriptors append, so the next line starts the file
again. With `log.dir: "-"`, as containers want it, a launcher and all its processes write to stdout, a JSON object a
line (`StdoutLog`): a thread for each process passes its lines on, and puts what is none (a traceback, torchrun) into
such an object. A reader of stdout that stands still costs lines, not the launcher (`chitu/log.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from chitu.config.load import child_environment, process_mark, under_torchrun
from chitu.errors import ConfigError
from chitu.lock_files import claim
from chitu.log import JSON_START, JsonFormatter, setup_logging

log = logging.getLogger(__name__)

TAIL_BYTES = 64 << 10
"""Size of the end of a log in which a process's last lines are looked for."""
STDOUT = "-"
"""Value of `log.dir` and `--log-dir` that means this log."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is cut into pieces."""
KEPT_LINES = 200
"""Last lines of a process that are kept, to tell how it ended."""
END_S = 1.0
ROUTER = "router"
PR_SET_PDEATHSIG = 1
MARK = "CHITU_PROCESS"
KILL_S = 2.0
REPORT = re.compile(r"[A-Z]\d{4} .*torch/distributed/elastic/")
"""First line of torchrun's report. A traceback of its own names these files, too."""


class LogTaken(ConfigError):
    """Another launcher that runs has this log."""


def make_log_dir(folder: str | None) -> Path:
    """Return `folder`, made if missing, or for None a new one in the temporary folder. Only this user can read a folder
    made here."""
    try:
        path = Path(os.path.expanduser(folder)).absolute() if folder else Path(tempfile.mkdtemp(prefix="chitu-"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        where = f"the folder {folder} for the logs" if folder else "a temporary folder for the logs"
        raise ConfigError(f"{where} cannot be made ({error.strerror or error}): give another with --log-dir") from error
    return path


def open_private(path: Path, *, append: bool = True) -> BinaryIO:
    """Open a file for writing and make it accessible to this user only, even if it existed before."""
    mode = os.O_APPEND if append else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | mode, 0o600)
    os.set_blocking(descriptor, True)  # a FIFO that nobody reads is an error, and no wait
    with contextlib.suppress(OSError):  # another user's file that we may write
        os.fchmod(descriptor, 0o600)
    return open(descriptor, "ab" if append else "wb", buffering=0)


def claim_log(path: Path) -> BinaryIO | None:
    """Claim a log until the returned file is closed. Raise LogTaken if another launcher has it: they would take each
    other's ports and progress from the files beside it."""
    try:
        return claim(path.with_suffix(".lock"))
    except BlockingIOError:
        raise LogTaken(f"another launcher writes {path}: give this one another --log-dir (log.dir)") from None
    except OSError:  # a network file system without locks; another error is reported by the start of its process
        return None


def cut(path: Path, kept: Path, max_bytes: int) -> bool:
    """Copy a log that is beyond its limit to `kept` and empty it. Return whether it did. Lines written in between are
    lost; so is the whole log if the copy cannot be written, since the limit protects against full disks.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        with contextlib.suppress(OSError), path.open("rb") as source:
            kept.unlink(missing_ok=True)  # logrotate may have renamed the log itself to this
            with open_private(kept) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        os.truncate(path, 0)
    except OSError:  # a log error must not end the launcher
        return False
    return True


def last_text(path: Path, start: int) -> str:
    """Return what was written since `start` (a size of the file), `TAIL_BYTES` at most, or why it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # a FIFO would block
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"


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


def router_name(index: int) -> str:
    """Return the name of the process of a router."""
    return f"{ROUTER}.{index}" if index else ROUTER


def is_router(name: str) -> bool:
    return name.partition(".")[0] == ROUTER


_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. Call it first in a process entry.

    `parent_pid` is the parent's pid at the start of this process; if that parent is already gone, exit now.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def die_with_torchrun() -> None:
    """End with torchrun, even by SIGKILL; do nothing without torchrun. Call it first in a process entry."""
    if not under_torchrun():
        return
    die_with_parent()
    mark = process_mark()
    if mark is not None and os.getppid() not in processes_marked(mark):
        os._exit(1)  # torchrun ended before `prctl` took effect


def processes_marked(mark: str) -> list[int]:
    """Return the pids of live processes whose environment has `CHITU_PROCESS=<mark>`."""
    wanted = f"\0{MARK}={mark}\0".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        # Processes of other users cannot be read, and any process may end meanwhile.
        with contextlib.suppress(OSError):
            if wanted in b"\0%b\0" % _read(f"/proc/{name}/environ") and not _is_zombie(name):
                found.append(int(name))
    return sorted(found)


def _is_zombie(name: str) -> bool:
    return _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[0] == b"Z"


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. `env` has only the variables that override the inherited environment."""

    name: str
    """Name: `router`, `P0`, `D1`, `U0`."""
    host: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()
    """File descriptors of the starter that the process inherits under the same numbers."""


class ChildProcess:
    """A started process tree. `mark` is unique to it."""

    def __init__(
        self,
        spec: ProcessSpec,
        env: Mapping[str, str],
        log: Path | None,
        mark: str,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        captured: Captured | None = None,
    ) -> None:
        """Start the process. `env` overrides the variables of the spec. With `log` None its output is `captured`, or
        this process's own."""
        self.name = spec.name
        self._captured = captured
        self.mark = mark
        self.log = log
        self.started_s = time.monotonic()
        self._oom_kills = _oom_kills()
        supervisor = os.getpid()
        self._log_start = 0
        try:
            with open_private(log) if log is not None else contextlib.nullcontext() as output:
                if output is not None:
                    self._log_start = os.fstat(output.fileno()).st_size
                self._popen = popen(
                    spec.argv,
                    env=child_environment({**spec.env, **env, MARK: mark}),
                    stdin=subprocess.DEVNULL,
                    stdout=output if captured is None else captured.descriptor,
                    stderr=output if captured is None else captured.descriptor,
                    pass_fds=spec.descriptors,
                    start_new_session=True,
                    umask=0o077,  # for files other than the log
                    preexec_fn=lambda: die_with_parent(supervisor),
                )
        except OSError as error:
            raise ConfigError(f"{spec.name} cannot be started: {error}") from error
        finally:
            if captured is not None:
                os.close(captured.descriptor)

    @property
    def pid(self) -> int:
        """Pid of the started process: torchrun's, for an instance."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs. A negative one is the signal that ended it."""
        return self._popen.poll()

    def worker_pids(self) -> list[int]:
        """Return the pids below the started process, in ascending order (the schedulers under a torchrun)."""
        return [pid for pid in processes_marked(self.mark) if pid != self.pid]

    def terminate(self) -> None:
        """Send SIGTERM to the workers, or to the process itself if it has none. torchrun ends after its workers."""
        for pid in self.worker_pids() or [self.pid]:
            self._signal(pid, signal.SIGTERM)

    def kill_tree(self) -> None:
        """Send SIGKILL to every process of the tree, until none is left or 2 s are over (one may be stuck)."""
        end_s = time.monotonic() + KILL_S
        while (pids := processes_marked(self.mark)) and time.monotonic() < end_s:
            for pid in pids:
                self._signal(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=max(0.0, end_s - time.monotonic()))

    def bound_log(self, max_bytes: int) -> None:
        """Rotate the log into NAME.log.1 if it is longer than `max_bytes`. The process may write to a file that was
        deleted or renamed."""
        if self.log is not None and cut(
            Path(f"/proc/{self.pid}/fd/1"), self.log.with_name(f"{self.log.name}.1"), max_bytes
        ):
            self._log_start = 0

    def tail(self, lines: int = 15) -> list[str]:
        """Return its last log lines, without torchrun's report on a rank that failed."""
        text = self._text().splitlines()
        first_noise = next((i for i, line in enumerate(text) if REPORT.match(line)), len(text))
        return (text[:first_noise] or text)[-lines:]

    def describe_end(self, code: int) -> str:
        """Describe how it ended with this exit code; of an instance how the rank ended, by torchrun's report. Say so if
        the kernel killed a process for lack of memory meanwhile."""
        found = re.findall(r"failed \(exitcode: (-?\d+)\)", self._text())
        code = int(found[-1]) if found else code
        is_oom = code == -signal.SIGKILL and _oom_kills() > self._oom_kills
        return describe_exit(code) + (
            "; the kernel killed a process for lack of memory (OOM) meanwhile" if is_oom else ""
        )

    def _text(self) -> str:
        if self._captured is not None:
            return "\n".join(self._captured.lines)
        return last_text(self.log, self._log_start) if self.log is not None else ""

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid == self.pid and self.exit_code() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, on the host or in a control group."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def describe_exit(code: int) -> str:
    """Return an exit code as `exit code 3`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
