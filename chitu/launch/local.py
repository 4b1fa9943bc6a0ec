"""A whole topology on this machine: starts it, reports when it serves, restarts dead processes, ends it cleanly.

`LocalCluster` is used by `chitu serve` (restart=True, driven by `poll`) and by integration tests. It has no thread of
its own: everything happens inside its methods, in the caller's thread, which must outlive the cluster (children die
with the thread that started them, see `child.py`).

    with LocalCluster(load_topology("pd_disagg_1p1d_local", [f"model.path={model_dir}"])) as cluster:
        cluster.wait_ready()                      # router up, every instance warmed up, GET /health is 200
        post(cluster.url + "/v1/completions", ...)
        cluster.kill("D0")                        # SIGKILL to the scheduler itself, not to torchrun above it
        cluster.wait_exit("D0")
        cluster.restart("D0")                     # same ports, new incarnation
        cluster.wait_ready()
        assert "created pd request" in cluster.logs("router")
    # leaving the block drains and ends everything within seconds; nothing is left behind

If the topology has no cluster key, one is made, so no other user can join: `cluster.topology` has it. Names are
`router`, `P0`, `P1`, `D0`, `U0`. All ports but a fixed one may be 0. `cluster.ports` has the router's actual ones by
short key name (`port`, `stats_port`, `bootstrap_port`, ...). Logs stay in `cluster.log_dir`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of, with_own_key
from chitu.config.load import dump_topology
from chitu.config.schema import Topology
from chitu.config.topology import Instance, api_host, api_url, instances, on_one_host, probe_address, with_router
from chitu.config.topology_checks import check, missing_roles
from chitu.errors import ConfigError
from chitu.launch.plan import Entries, instance_spec, launch_problems, port_overrides, router_spec
from chitu.launch.preflight import require_preflight
from chitu.launch.router_calls import ask_health
from chitu.net.control_groups import usable_cores
from chitu.process.child import ROUTER, STDOUT, ProcessSpec, StdoutLog, make_log_dir, open_private
from chitu.process.node_devices import NodeDevices
from chitu.process.placement import assign_devices, look_for, with_shares
from chitu.process.run_dir import Launched
from chitu.process.supervisor import POLL_S, Member, StartFailed, Supervisor

__all__ = ["LocalCluster", "StartFailed"]


class LocalCluster:
    """A cluster on this machine; see the module's docstring. `port` is the HTTP port (0: any free one; None: the
    topology's). `node` has the GPUs of this machine, if already known. With `stdout` all processes log there."""

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
        node: NodeDevices | None = None,
        stdout: StdoutLog | None = None,
    ) -> None:
        topology = on_one_host(topology)
        if port is not None:
            topology = with_router(topology, port=port)
        own = instances(topology)
        self.node = look_for(own) if node is None else node
        shares = assign_devices(topology, own, self.node)
        topology = with_shares(topology, shares)
        check(topology)
        for problem in launch_problems(topology):
            raise ConfigError(problem)
        self._entries = entries or Entries()
        router = topology.dp_config.router
        warn = on_event or (lambda text: None)
        require_preflight(topology, router.host, self._entries.reads_model, warn, self.node.cards)
        if stdout is None and (log_dir or topology.log.dir) == STDOUT:
            stdout = StdoutLog()
        if stdout is not None:
            topology = msgspec.structs.replace(topology, log=msgspec.structs.replace(topology.log, format="json"))
        self.topology = topology = with_own_key(topology)
        self.host = api_host(topology.dp_config.router)
        self.ports: dict[str, int] = {}
        self._cores = usable_cores()
        self.supervisor = Supervisor(
            [ROUTER, *(item.name for item in instances(topology))],
            self._spec,
            make_log_dir(log_dir or topology.log.dir) if stdout is None else None,
            restart=restart,
            on_event=on_event or (lambda text: None),
            env={ENVIRONMENT_KEY: cluster_key_of(topology), **(env or {})},
            max_log_bytes=topology.log.max_mb << 20,
            popen=self._entries.popen,
            probe_address=probe_address(topology, router.host),
            stdout=stdout,
        )
        self.log_dir = self.supervisor.log_dir
        self._config = str(self.log_dir / "topology.yaml")
        self.members = self.supervisor.members
        self._write_config()

    # ------------------------------------------------------------------------------------------------------- life

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the router; `poll` starts the instances as soon as its ports are known."""
        self.supervisor.start(ROUTER)

    def poll(self) -> None:
        """Check every process once: detect deaths, start due processes. Call about every 0.1 s.

        Raise StartFailed if a process ended before it was ever ready.
        """
        self.supervisor.poll()
        if not self.ports and (ports := self.members[ROUTER].progress.ports):
            self.ports = dict(ports)
            key = cluster_key_of(self.topology)
            self.supervisor.run_dir.keep_key(ports["port"], key)
            own = tuple(name for name in self.members if name != ROUTER)
            self.supervisor.run_dir.keep_launched(Launched(self.url, own, key))
            for name in self.members:
                if name != ROUTER:
                    self.supervisor.start(name)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until every live process is ready and `/health` answers 200. Raise StartFailed after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > end_s:
                states = ", ".join(f"{m.name} {m.progress.state}" for m in self.members.values())
                raise StartFailed(f"the cluster is not ready after {timeout_s:g} s: {states}; logs in {self.log_dir}")
            time.sleep(POLL_S)

    def ready(self) -> bool:
        """Call `poll`, then return whether every live process is ready and the router has a usable pair, if the
        topology has one."""
        self.poll()
        live = [member for member in self.members.values() if member.child or member.restart_at_s is not None]
        started = len(live) == len(self.members) or any(member.was_ready for member in live if member.name != ROUTER)
        return started and all(member.progress.state == "ready" for member in live) and self._all_joined(live)

    def _all_joined(self, live: list[Member]) -> bool:
        """Return whether the router has the present incarnation of every live instance."""
        health = ask_health(self.url) if self.ports else None
        if health is None or not (health.is_usable or missing_roles(self.topology)):
            return False
        return all(
            health.joined.get(member.name) == member.progress.incarnation
            for member in live
            if member.child is not None and member.name != ROUTER
        )

    def stop(self) -> dict[str, int | None]:
        """Drain and end everything, the router first, so that no new request arrives. Return exit codes by name.

        Processes left `deadlines.drain_delay_s` + `drain_s` + 0.5 s (4.5 s) after the start of the stop are killed.
        Idempotent.
        """
        deadlines = self.topology.dp_config.router.pd_disaggregation.deadlines
        return self.supervisor.stop(deadlines.drain_s, deadlines.drain_delay_s)

    # ------------------------------------------------------------------------------------------------- for callers

    @property
    def url(self) -> str:
        """URL of the API, `http://127.0.0.1:PORT`, once the router listens."""
        if "port" not in self.ports:
            raise StartFailed("the router does not listen yet: call wait_ready first")
        return api_url(self.host, self.ports["port"])

    def alive(self, name: str) -> bool:
        child = self.supervisor.member(name).child
        return child is not None and child.exit_code() is None

    def pid(self, name: str) -> int:
        """Return the pid of the process that does the work: the scheduler under torchrun, or the router itself."""
        child = self.supervisor.child(name)
        if name == ROUTER or not self._entries.has_torchrun(self._instance(name)):
            return child.pid
        workers = child.worker_pids()
        if not workers:
            raise StartFailed(f"{name} has no scheduler process yet")
        return workers[0]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the working process (SIGKILL, SIGSTOP, SIGCONT, ...)."""
        os.kill(self.pid(name), number)

    def wait_exit(self, name: str, timeout_s: float = 10.0) -> None:
        """Wait until the process (and its parent torchrun) has ended."""
        end_s = time.monotonic() + timeout_s
        while self.alive(name):
            if time.monotonic() > end_s:
                raise StartFailed(f"{name} still runs after {timeout_s:g} s")
            time.sleep(POLL_S)
        self.poll()

    def restart(self, name: str) -> None:
        """Restart a process at the same ports, after killing what is left of it. Then call `wait_ready`."""
        member = self.supervisor.member(name)
        if member.child is not None:
            member.child.kill_tree()
            member.child = None
        self.supervisor.start(name)

    def logs(self, name: str) -> str:
        """Return everything that the process wrote, over all its incarnations."""
        return self.supervisor.logs(name)

    def _write_config(self) -> None:
        with open_private(Path(self._config), append=False) as file:  # it may have API keys, but not the cluster key
            file.write(dump_topology(self.topology).encode())

    def _spec(self, name: str) -> ProcessSpec:
        """Return the command of a process, with the router's actual ports."""
        if not os.path.exists(self._config):  # the temporary folder was cleaned
            self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_config()
        overrides = port_overrides(self.ports)
        if name == ROUTER:
            return router_spec(self.topology, self._config, overrides, self._entries)
        instance = self._instance(name)
        return instance_spec(self.topology, instance, self._config, overrides, self._cores, self._entries, self.node)

    def _instance(self, name: str) -> Instance:
        return next(instance for instance in instances(self.topology) if instance.name == name)
