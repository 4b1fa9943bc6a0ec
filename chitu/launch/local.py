"""A whole topology on this machine, for tests and benchmarks: `HostProcesses` with commands for a test's script.

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
`router`, `P0`, `P1`, `D0`, `U0`; a group is one process, `D0-D1`. All ports but a fixed one may be 0. `cluster.ports`
has the router's actual ones by short key name (`port`, `stats_port`, `bootstrap_port`, ...). Logs stay in
`cluster.log_dir`. It has no thread of its own: the thread that calls its methods must outlive it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from chitu.config.schema import Topology
from chitu.config.topology import find_part, instances, on_one_host, with_router
from chitu.launch.host import HostProcesses
from chitu.launch.plan import Entries
from chitu.process.child import is_router
from chitu.process.logs import STDOUT, StdoutLog
from chitu.process.placement import Placement, assign_devices, look_for, with_shares
from chitu.process.supervisor import POLL_S, StartFailed

__all__ = ["LocalCluster", "StartFailed"]


class LocalCluster(HostProcesses):
    """A cluster on this machine; see the module's docstring."""

    def __init__(
        self,
        topology: Topology,
        *,
        port: int | None = 0,
        log_dir: str | None = None,
        restart: bool = False,
        env: Mapping[str, str] = {},
        on_event: Callable[[str], None] = lambda text: None,
        entries: Entries | None = None,
    ) -> None:
        """`port`: the HTTP port (0: any free one; None: the topology's)."""
        topology = on_one_host(topology)
        if port is not None:
            topology = with_router(topology, port=port)
        own = instances(topology)
        node = look_for(own)
        topology = with_shares(topology, assign_devices(topology, own, node))
        super().__init__(
            Placement(topology, node, ()),
            topology.dp_config.router.host,
            restart=restart,
            log_dir=log_dir,
            env=env,
            entries=entries or Entries(),
            on_event=on_event,
            stdout=StdoutLog() if (log_dir or topology.log.dir) == STDOUT else None,
        )

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ready(self) -> bool:
        """Call `poll`, then return whether every live process is ready and the router has a usable pair, if the
        topology has one."""
        return not self.missing()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until every live process is ready and `/health` answers 200. Raise StartFailed after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > end_s:
                states = ", ".join(f"{m.name} {m.progress.state}" for m in self.members.values())
                raise StartFailed(f"the cluster is not ready after {timeout_s:g} s: {states}; logs in {self.log_dir}")
            time.sleep(POLL_S)

    def alive(self, name: str) -> bool:
        child = self.supervisor.member(name).child
        return child is not None and child.exit_code() is None

    def pid(self, name: str) -> int:
        """Return the pid of the process that does the work: the scheduler under torchrun, or the router itself. Of a
        group that of the member with this name, or of its first one."""
        if is_router(name):
            return self.supervisor.child(name).pid
        group = find_part(self.topology, name)
        child = self.supervisor.child(group.name)
        if not self._entries.has_torchrun(group):
            return child.pid
        rank = sum(member.place * group.config.tp_size for member in group.members if member.name == name)
        workers = child.worker_pids()
        if len(workers) <= rank:
            raise StartFailed(f"{name} has no scheduler process yet")
        return workers[rank]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the working process (SIGKILL, SIGSTOP, SIGCONT, ...)."""
        os.kill(self.pid(name), number)

    def wait_exit(self, name: str, timeout_s: float = 60.0) -> None:
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
