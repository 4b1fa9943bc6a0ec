"""A real router process and fake workers as child processes, for benchmarks and tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from chitu.process.progress import read_progress

POLL_S = 0.03
START_S = 120.0
"""Timeout of a process's start, on a busy machine."""
PATIENCE_S = 60.0
"""Least patience of a wait: a busy machine takes ten times as long as one that has nothing else to do."""


def wait_until(condition: Callable[[], object], timeout_s: float, what: str | Callable[[], object]) -> float:
    """Poll a condition of another process until it is true, for `timeout_s` or PATIENCE_S, whatever is longer: what
    takes how long is no business of real processes. Return the seconds that it took. Raise TimeoutError that says
    `what` was waited for, or what there is instead."""
    start_s, timeout_s = time.monotonic(), max(timeout_s, PATIENCE_S)
    while not condition():
        if time.monotonic() > start_s + timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in ns resolution."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


@dataclass(slots=True)
class RouterUnderTest:
    """`with RouterUnderTest(folder, model) as router: router.start_workers(...)`. The OS picks the ports."""

    folder: Path
    """Folder for the progress, logs and traces."""
    model: Path
    overrides: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the router and the workers that override this process's, such as keys, which no command line
    takes."""
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] = field(init=False)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> RouterUnderTest:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['port']}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def pids(self) -> list[int]:
        """Process ids of the router and its body processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    @property
    def log(self) -> str:
        return (self.folder / "router.log").read_text()

    def start(self) -> None:
        """Start the router and wait until it is ready. A second start takes the ports of the first, as a restarted
        router does."""
        progress = self.folder / "router.progress"
        progress.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "chitu.serve.api_server", *self._port_overrides()]
        argv += [f"model.path={self.model}", *self.overrides]
        with (self.folder / "router.log").open("ab") as log:
            environment = {**self._environment(), "CHITU_PROGRESS_FILE": str(progress)}
            self.process = self.popen(argv, stderr=log, env=environment)
        process = self.process
        wait_until(lambda: read_progress(progress).ports or process.poll() is not None, START_S, "the router's ports")
        self.ports = dict(read_progress(progress).ports)
        if not self.ports:
            raise RuntimeError(f"the router ended with {process.returncode}: {self.log[-2000:]}")

    def _port_overrides(self) -> list[str]:
        router, pd = "dp_config.router.", "dp_config.router.pd_disaggregation."
        prefixes = {"port": router, "stats_port": router, "token_port": router}
        names = ("port", "stats_port", "token_port", "coordination_port", "metadata_sync_port", "bootstrap_port")
        return [f"{prefixes.get(name, pd)}{name}={self.ports.get(name, 0)}" for name in names]

    def start_worker(self, instances: str, *options: str, wait: bool = True) -> subprocess.Popen[bytes]:
        """Start a fake worker process for instances such as `P0,D0`. With `wait`, wait until the router's /health lists
        all of them."""
        names = ("coordination_port", "metadata_sync_port", "stats_port", "token_port")
        argv = [sys.executable, "-m", "support.fake_worker", "--instances", instances, "--host", "127.0.0.1"]
        for name in names:
            argv += ["--" + name.replace("_", "-"), str(self.ports[name])]
        with (self.folder / "worker.log").open("ab") as log:
            worker = self.popen([*argv, *options], stderr=log, env=self._environment())
        self.workers.append(worker)
        if wait:
            wanted = set(instances.split(","))
            wait_until(lambda: wanted <= self.members(), START_S, f"{instances} to join")
        return worker

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", **self.env}

    def members(self) -> set[str]:
        """Return the names in the cluster view."""
        return {instance["name"] for instance in self.health()["instances"]}

    def health(self) -> dict[str, list[dict[str, str]]]:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
                body = reply.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        result: dict[str, list[dict[str, str]]] = json.loads(body)
        return result

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """End everything and return the router's exit code."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers:
            _reap(worker)
        self.workers.clear()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return _reap(self.process)


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
