"""A whole topology on this machine: start it, know when it serves, restart what dies, end it without a trace.

`LocalCluster` is used by `chitu serve` (restart=True, driven by `poll`) and by integration tests. It has no thread of
its own: everything happens inside its methods, in the caller's thread, which must outlive the cluster (children die
with the thread that started them, see `process.py`).

    with LocalCluster(load_topology("pd_disagg_1p1d_local", [f"model.path={model_dir}"])) as cluster:
        cluster.wait_ready()                      # router up, every instance warmed up, GET /health is 200
        post(cluster.url + "/v1/completions", ...)
        cluster.kill("D0")                        # SIGKILL to the scheduler itself, not to torchrun above it
        cluster.wait_exit("D0")
        cluster.restart("D0")                     # same ports, new incarnation
        cluster.wait_ready()
        assert "created pd request" in cluster.logs("router")
    # leaving the block drains and ends everything within seconds; nothing is left behind

Names are `router`, `P0`, `P1`, `D0`, `U0`. All ports but a fixed one may be 0. `cluster.ports` has the router's actual
ones by short key name (`port`, `stats_port`, `bootstrap_port`, ...). Logs stay in `cluster.log_dir`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from chitu.config.load import dump_topology
from chitu.config.schema import Topology
from chitu.config.topology import check, find_instance, instances, on_one_host
from chitu.errors import ConfigError, Internal
from chitu.launch.plan import ROUTER, Entries, instance_spec, port_overrides, router_spec
from chitu.launch.process import ChildProcess, describe_exit
from chitu.launch.progress import Progress, read_progress

POLL_S = 0.05
GRACE_OVER_DRAIN_S = 0.5
"""A process may take so long beyond `deadlines.drain_s` before it is killed: 4.5 s with the default."""
STABLE_S = 60.0
"""After so long a life the next restart is immediate again."""


class StartFailed(Internal):
    """A process ended, or was not ready in time, before the cluster served."""


@dataclass(slots=True)
class Member:
    """One process of the cluster over all its incarnations."""

    name: str
    child: ChildProcess | None = None
    progress: Progress = field(default_factory=Progress)
    was_ready: bool = False
    failures: int = 0
    """Deaths in a row; each doubles the wait before the next start."""
    restart_at_s: float | None = None
    exit_code: int | None = None
    """Of the last incarnation, once its death was noticed."""


class LocalCluster:
    """See the module's docstring. `port`: HTTP port (0: any free one; None: what the topology says)."""

    def __init__(
        self,
        topology: Topology,
        *,
        port: int | None = 0,
        log_dir: str | None = None,
        restart: bool = False,
        env: Mapping[str, str] | None = None,
        on_event: Callable[[str], None] | None = None,
        entries: Entries | None = None,
    ) -> None:
        topology = on_one_host(topology)
        if port is not None:
            router = msgspec.structs.replace(topology.dp_config.router, port=port)
            topology = msgspec.structs.replace(
                topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router)
            )
        check(topology)
        if topology.dp_config.scheduler_base_port is not None and len(instances(topology)) > 1:
            raise ConfigError(
                "dp_config.scheduler_base_port is the port of one scheduler process; this cluster starts "
                f"{len(instances(topology))}: set the port of each instance instead"
            )
        self.topology = topology
        self.host = topology.dp_config.router.host
        self.ports: dict[str, int] = {}
        self.members = {name: Member(name) for name in (ROUTER, *(item.name for item in instances(topology)))}
        self._restart = restart
        self._env = dict(env or {})
        self._on_event = on_event or (lambda text: None)
        self._entries = entries or Entries()
        self._id = uuid.uuid4().hex[:12]
        self._starts = 0
        self._cores = len(os.sched_getaffinity(0))
        folder = log_dir or topology.log.dir
        self.log_dir = Path(folder).expanduser().absolute() if folder else Path(tempfile.mkdtemp(prefix="chitu-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._config = str(self.log_dir / "topology.yaml")
        self._ready_file = self.log_dir / "router.ready.json"
        Path(self._config).write_text(dump_topology(topology), encoding="utf-8")

    # ------------------------------------------------------------------------------------------------------- life

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the router; the instances follow (in `poll`) as soon as its ports are known."""
        self._spawn(ROUTER)

    def poll(self) -> None:
        """Look after everything once: notice deaths, start what is due. Call every 0.1 s or so.

        StartFailed where a process ended before it was ever ready.
        """
        now_s = time.monotonic()
        for member in self.members.values():
            if member.child is not None and (code := member.child.exit_code()) is not None:
                self._died(member, member.child, code, now_s)
            elif member.child is None and member.restart_at_s is not None and now_s >= member.restart_at_s:
                self._spawn(member.name)
                self._on_event(f"{member.name} is started again")
            elif member.child is not None and member.progress.state != "ready":
                self._look_at_progress(member)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Until every live process is ready and `/health` answers 200. StartFailed after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > end_s:
                states = ", ".join(f"{m.name} {m.progress.state}" for m in self.members.values())
                raise StartFailed(f"the cluster is not ready after {timeout_s:g} s: {states}; logs in {self.log_dir}")
            time.sleep(POLL_S)

    def ready(self) -> bool:
        """`poll`, then whether every live process is ready and the router finds a usable pair."""
        self.poll()
        live = [member for member in self.members.values() if member.child or member.restart_at_s is not None]
        started = len(live) == len(self.members) or any(member.was_ready for member in live if member.name != ROUTER)
        return started and all(member.progress.state == "ready" for member in live) and self._all_joined(live)

    def healthy(self) -> bool:
        """Whether `GET /health` answers 200 within a second: at least one pair can serve."""
        return self._health() is not None

    def _health(self) -> dict[str, Any] | None:
        """Body of `GET /health`; None where it is not 200."""
        if "port" not in self.ports:
            return None
        connection = http.client.HTTPConnection(self.host, self.ports["port"], timeout=1.0)
        try:
            connection.request("GET", "/health")
            reply = connection.getresponse()
            text = reply.read()
            body = json.loads(text) if reply.status == 200 else None
            return body if isinstance(body, dict) else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _all_joined(self, live: list[Member]) -> bool:
        """Whether the router knows the present incarnation (its start time in ns) of every live instance."""
        health = self._health()
        if health is None:
            return False
        joined = {item["name"]: item["incarnation"] for item in health["instances"] if not item["draining"]}
        return all(
            joined.get(member.name, 0) >= member.child.started_ns
            for member in live
            if member.child is not None and member.name != ROUTER
        )

    def stop(self) -> dict[str, int | None]:
        """Drain and end everything: the router first, so that nothing new comes in. Exit codes by name.

        Whatever is left `deadlines.drain_s` + 0.5 s (4.5 s) after the start of the stop is killed. Idempotent.
        """
        drain_s = self.topology.dp_config.router.pd_disaggregation.deadlines.drain_s
        end_s = time.monotonic() + drain_s + GRACE_OVER_DRAIN_S
        try:
            router = [m.child for m in self.members.values() if m.child and m.name == ROUTER]
            workers = [m.child for m in self.members.values() if m.child and m.name != ROUTER]
            # The router finishes what runs before it exits, and needs the workers for it; they get the remaining time.
            for children, until_s in ((router, end_s - 0.4 * drain_s), (workers, end_s)):
                for child in children:
                    child.terminate()
                while any(child.exit_code() is None for child in children) and time.monotonic() < until_s:
                    time.sleep(POLL_S)
        finally:
            codes = {}
            for member in self.members.values():
                member.restart_at_s = None
                if member.child is not None:
                    member.child.kill_tree()
                    member.exit_code = member.child.exit_code()
                    member.child = None
                codes[member.name] = member.exit_code
        return codes

    # ------------------------------------------------------------------------------------------------- for callers

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, once the router listens."""
        if "port" not in self.ports:
            raise StartFailed("the router does not listen yet: call wait_ready first")
        return f"http://{self.host}:{self.ports['port']}"

    def alive(self, name: str) -> bool:
        child = self._member(name).child
        return child is not None and child.exit_code() is None

    def pid(self, name: str) -> int:
        """Pid of the process that does the work: the scheduler under torchrun, or the router itself."""
        child = self._child(name)
        if name == ROUTER:
            return child.pid
        workers = child.worker_pids()
        if not workers:
            raise StartFailed(f"{name} has no scheduler process yet")
        return workers[0]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the working process (SIGKILL, SIGSTOP, SIGCONT, ...)."""
        os.kill(self.pid(name), number)

    def wait_exit(self, name: str, timeout_s: float = 10.0) -> None:
        """Until the process (and the torchrun above it) has ended."""
        end_s = time.monotonic() + timeout_s
        while self.alive(name):
            if time.monotonic() > end_s:
                raise StartFailed(f"{name} still runs after {timeout_s:g} s")
            time.sleep(POLL_S)
        self.poll()

    def restart(self, name: str) -> None:
        """Start it anew (killing what still runs of it), at the ports it had. Then call `wait_ready`."""
        member = self._member(name)
        if member.child is not None:
            member.child.kill_tree()
            member.child = None
        self._spawn(name)

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def logs(self, name: str) -> str:
        """Everything that it wrote, over all its incarnations."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_path(name).read_text(encoding="utf-8", errors="replace")
        return ""

    # ----------------------------------------------------------------------------------------------------- inside

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise ConfigError(f"the cluster has no process {name!r}; it has {', '.join(self.members)}")
        return self.members[name]

    def _child(self, name: str) -> ChildProcess:
        child = self._member(name).child
        if child is None:
            raise StartFailed(f"{name} does not run")
        return child

    def _spawn(self, name: str) -> None:
        member = self._member(name)
        overrides = port_overrides(self.ports)
        if name == ROUTER:
            self._ready_file.unlink(missing_ok=True)
            spec = router_spec(self.topology, self._config, overrides, str(self._ready_file), self._entries)
        else:
            role, rank = next((i.role, i.engine_rank) for i in instances(self.topology) if i.name == name)
            instance = find_instance(self.topology, role, rank)
            spec = instance_spec(self.topology, instance, self._config, overrides, self._cores, self._entries)
        progress = self.log_dir / f"{name}.progress"
        progress.unlink(missing_ok=True)
        self._starts += 1
        member.child = ChildProcess(
            name,
            spec.argv,
            {**spec.env, "CHITU_PROGRESS_FILE": str(progress), **self._env},
            self.log_path(name),
            f"{self._id}/{name}/{self._starts}",
        )
        member.progress = Progress()
        member.restart_at_s = None

    def _look_at_progress(self, member: Member) -> None:
        if member.name != ROUTER:
            member.progress = read_progress(self.log_dir / f"{member.name}.progress")
        elif (ports := read_ready_file(self._ready_file)) is not None:
            first = not self.ports
            self.ports = ports
            member.progress = Progress("ready")
            if first:
                for name in self.members:
                    if name != ROUTER:
                        self._spawn(name)
        if member.progress.state == "ready":
            member.was_ready = True

    def _died(self, member: Member, child: ChildProcess, code: int, now_s: float) -> None:
        self._look_at_progress(member)
        child.kill_tree()
        member.child = None
        member.exit_code = code
        member.progress = Progress("dead")
        reason = child.worker_exit() or describe_exit(code)
        life_s = now_s - child.started_s
        lines = "".join(f"\n    {line}" for line in child.tail())
        report = f"{member.name} ended ({reason}) after {life_s:.1f} s; its last lines ({child.log}):{lines}"
        if not member.was_ready:
            raise StartFailed(report)
        if self._restart:
            member.failures = 1 if life_s > STABLE_S else member.failures + 1
            wait_s = min(10.0, 0.25 * 2 ** (member.failures - 1))
            member.restart_at_s = now_s + wait_s
            report += f"\n{member.name} starts again in {wait_s:g} s"
        self._on_event(report)


def read_ready_file(path: Path) -> dict[str, int] | None:
    """The router's actual ports by short key name; None while the file is not there or not complete."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    ports = {name: value for name, value in record.items() if isinstance(value, int) and name.endswith("port")}
    return ports if "port" in ports else None
