"""One child process tree: started in its own session, logged, ended as a whole. Linux only.

Used from one thread. Invariant: a child dies with its supervisor (`descendants.py`), even when that is killed with -9.
The signal follows the *thread* that started the child, so start children from a thread that outlives them.

A child, including its native libraries, writes its log through the inherited descriptors 1 and 2, so only its starter
can limit the log's size: it copies the file and truncates it. The descriptors append, so the next line starts the file
again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chitu.config.load import child_environment
from chitu.errors import ConfigError
from chitu.process.descendants import MARK, die_with_parent, processes_marked
from chitu.process.logs import Captured, cut, last_text, open_private

ROUTER = "router"
KILL_S = 2.0
REPORT = re.compile(r"[A-Z]\d{4} .*torch/distributed/elastic/")
"""First line of torchrun's report. A traceback of its own names these files, too."""


def router_name(index: int) -> str:
    """Return the name of the process of a router."""
    return f"{ROUTER}.{index}" if index else ROUTER


def is_router(name: str) -> bool:
    return name.partition(".")[0] == ROUTER


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. `env` has only the variables that override the inherited environment."""

    name: str
    """Name: `router`, `P0`, `D1`, `U0`; `D0-D3` of a group, or of its members on one host."""
    host: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    descriptors: tuple[int, ...] = ()
    """File descriptors of the starter that the process inherits under the same numbers."""
    num_members: int = 1
    """Instances in it, each of which reports its progress."""
    is_part: bool = False
    """Whether other hosts have other parts of its group, which end with it: it is started again in any case."""


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
