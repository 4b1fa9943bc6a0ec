"""One child process tree: started in its own session, logged to a file, ended as a whole.

Used by `LocalCluster`, from one thread. Invariant: a child dies with its supervisor (`PR_SET_PDEATHSIG`), even when
that is killed with -9. The signal follows the *thread* that started the child, so start children from a thread that
outlives them. Every process of a tree has `CHITU_PROCESS` in its environment. torchrun puts its workers into their own
sessions, so that mark, not the process group, identifies the processes of the tree. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from chitu.config.load import child_environment, process_mark, under_torchrun
from chitu.errors import ConfigError
from chitu.launch.log_files import cut, last_text, open_private
from chitu.launch.plan import ProcessSpec
from chitu.launch.stdout_log import Captured

PR_SET_PDEATHSIG = 1
MARK = "CHITU_PROCESS"
KILL_S = 2.0
REPORT = re.compile(r"[A-Z]\d{4} .*torch/distributed/elastic/")
"""First line of torchrun's report. A traceback of its own names these files, too."""
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
