"""`chitu serve` as a user starts it: a process whose output is read line by line, and all its descendants, found by a
mark."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from support.router_process import PATIENCE_S

MARK = "CHITU_TEST_MARK"


class ServeProcess:
    """A `chitu serve` process. `argv` runs with a mark in its environment that every descendant inherits."""

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        read, write = os.pipe()
        self._output = open(read)  # noqa: SIM115 - the reader closes it
        with open(write, "wb") as output:
            environment = {**os.environ, **(env or {}), MARK: self.mark}
            self.process = popen(argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                self._queue.put(line.rstrip("\n"))

    def wait_line(self, pattern: str, timeout_s: float = 90.0) -> re.Match[str]:
        """Return the next matching line and drop the lines before it; raise AssertionError with all output on
        timeout."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, min(0.2, end_s - time.monotonic())))
            except queue.Empty:
                over = time.monotonic() >= end_s or (self.process.poll() is not None and not self._reader.is_alive())
                assert not over, f"no line {pattern!r} in:\n" + "\n".join(self.lines)
                continue
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def printed_request(self) -> str:
        """Run the request that `chitu serve` prints to be copied, as it stands, and return the answer."""
        self.wait_line("Ctrl-C ends it")
        start = next(i for i, line in enumerate(self.lines) if line.startswith("    curl "))
        command = "\n".join(self.lines[start : start + 2])
        run = ["bash", "-c", f"{command} --fail-with-body --silent --show-error --max-time 60"]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def signal_and_wait(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code. Children are killed after 4.5 s; the rest of the time is for busy
        machines."""
        self.process.send_signal(number)
        return int(self.process.wait(PATIENCE_S))

    def offspring(self) -> dict[int, str]:
        """Return the live processes that carry the mark: pid -> command line."""
        found = {}
        wanted = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                with contextlib.suppress(OSError):
                    alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if alive and wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pids_of(self, role: str) -> list[int]:
        """Return the pids of the scheduler processes, without the torchruns above them (named alike, or
        `pt_elastic`)."""
        return [
            pid
            for pid, command in self.offspring().items()
            if f"--role {role}" in command and "torch.distributed.run" not in command and "pt_elastic" not in command
        ]

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.offspring():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
