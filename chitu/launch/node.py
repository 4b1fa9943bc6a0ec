"""`chitu node`: runs the processes of one host of a topology until a signal or the death of one of them.

Run once on every host, with the same topology and hosts, by Slurm's scripts, by ssh or by hand. The nodes do not
communicate with each other: the router tells them which instances are present. Runs in the main thread of its process,
which its children do not outlive. Exit codes: 0 after a signal, 1 if a process died or was not ready in time, 2 for a
wrong configuration. It restarts nothing: the program that started this node decides.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain

from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of, with_cluster_key, with_own_key
from chitu.config.load import load_topology, pd_master_addr
from chitu.config.topology import api_host, api_url, host_names, instances, instances_on, probe_address
from chitu.config.topology_checks import check, missing_roles, open_api
from chitu.errors import ConfigError, RankTaken
from chitu.launch.addresses import with_own_address
from chitu.launch.display import SIGNALS, greeting, make_display, stop_on_signals, tell
from chitu.launch.plan import (
    Entries,
    host_at,
    host_overrides,
    launch_problems,
    open_ports,
    plan,
    specs_on,
    thread_overrides,
)
from chitu.launch.preflight import require_preflight
from chitu.launch.router_calls import ask_health, send_leaves
from chitu.net.control_groups import usable_cores
from chitu.net.process_deaths import pid_namespace
from chitu.process.child import ROUTER, STDOUT, LogTaken, ProcessSpec, StdoutLog, make_log_dir
from chitu.process.placement import describe, place
from chitu.process.progress import Progress
from chitu.process.run_dir import Launched
from chitu.process.supervisor import StartFailed, Supervisor
from chitu.protocol import Leave

POLL_S = 0.1
READY_POLL_S = 0.25
ON_FAILURE_S = 10.0
SAME_ERROR_S = 1.0
"""Time in which other nodes report the same wrong configuration themselves, before `on_failure` ends them."""
READY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    hosts: tuple[str, ...] | None
    """Machines that replace the topology's hosts, the router's first; None: those of the file."""
    index: int
    """Index of this node among the hosts."""
    threads_per_rank: int | None = None
    """CPU threads of each rank; None: the topology's, or this node's cores divided by its instances."""
    ready_timeout_s: float = READY_TIMEOUT_S
    log_dir: str | None = None
    only: str | None = None
    """Name of the only process to run (`D1`), unless another live process has it; the node ends after its drain."""
    url: str = ""
    """URL of the API, if this node reaches it elsewhere than at the topology's address (through a proxy)."""
    cluster_key: str = ""
    """Cluster key that overrides the topology's and the environment's; empty: theirs."""
    on_failure: str | None = None
    """Command that is run once when this node fails, to notify the other nodes."""
    entries: Entries | None = None


def node_command(config: str, overrides: Sequence[str], hosts: str | None) -> list[str]:
    """Return the command line of a node without its index, as `chitu plan` prints it."""
    return ["chitu", "node", config, *overrides, *(["--hosts", hosts] if hosts else [])]


class Node:
    """One host's part of the cluster. The constructor raises ConfigError for a configuration that cannot work, and
    RankTaken as `missing` does."""

    def __init__(
        self,
        config: str,
        overrides: Sequence[str],
        options: NodeOptions,
        on_event: Callable[[str], None],
        stdout: StdoutLog | None = None,
    ) -> None:
        topology = load_topology(config, overrides)
        if options.hosts is not None:
            host_at(load_topology(config, [*overrides, *host_overrides(topology, options.hosts)]), options.index)
            overrides = [*overrides, *host_overrides(topology, with_own_address(options.hosts, options.index))]
        if options.threads_per_rank is not None:
            overrides = [*overrides, *thread_overrides(topology, options.threads_per_rank)]
        topology = load_topology(config, overrides)
        host = host_at(topology, options.index)
        self.label = options.only or f"node {options.index}"
        for problem in chain(launch_problems(topology), open_ports(topology)):
            raise ConfigError(problem)
        try:
            check(topology, pd_master_addr())
            placement = place(config, overrides, lambda found: instances_on(found, host))
            check(placement.topology, pd_master_addr())
            reads_model = (options.entries or Entries()).reads_model
            names = None if options.only is None else (options.only,)
            require_preflight(placement.topology, host, reads_model, on_event, placement.node.cards, names)
            self.log_dir = make_log_dir(options.log_dir or topology.log.dir) if stdout is None else None
        except ConfigError as error:
            raise ConfigError(f"{self.label} ({host}): {error.message}") from error
        topology, overrides, self.devices = placement.topology, placement.overrides, placement.node
        if stdout is not None:
            overrides = [*overrides, "log.format=json"]
        self.device_notes, self.ways = placement.notes, placement.ways
        if options.cluster_key:
            topology = with_cluster_key(topology, options.cluster_key)
        cores = usable_cores()
        all_specs = plan(topology, config, overrides, cores, options.entries, self.devices)
        own = specs_on(topology, all_specs, options.index)
        self._specs = {spec.name: spec for spec in own if options.only in (None, spec.name)}
        if len(host_names(topology)) == 1 and self.has_router:
            topology = with_own_key(topology)
        self.topology = topology
        self.host = host
        self.removes_logs = not (options.log_dir or topology.log.dir)
        """Whether `stop` removes the logs, unless a process died."""
        self._only = options.only or ""
        self._url = options.url
        try:
            self.supervisor = Supervisor(
                list(self._specs),
                self._spec,
                self.log_dir,
                restart=False,
                on_event=on_event,
                env={ENVIRONMENT_KEY: cluster_key_of(topology)},
                max_log_bytes=topology.log.max_mb << 20,
                probe_address=probe_address(topology, host),
                stdout=stdout,
            )
        except LogTaken as error:
            if self._only:  # it starts, and has not joined
                raise RankTaken(
                    f"{error.message}; if it is another {self._only}: give another --rank, or none"
                ) from None
            raise
        self._joined: dict[str, int] = {}
        """Incarnation by name of joined instances, except earlier ones of this node's own."""
        self._pids: dict[str, list[int]] = {}
        """Process ids by name, once all are ready."""

    @property
    def names(self) -> list[str]:
        """Names of its processes: `router`, `P0`, ..."""
        return list(self._specs)

    @property
    def has_router(self) -> bool:
        return ROUTER in self._specs

    @property
    def url(self) -> str:
        router = self.topology.dp_config.router
        return self._url or api_url(api_host(router), router.port)

    def start(self) -> None:
        """Start everything at once: instances retry to join until the router is up."""
        key = cluster_key_of(self.topology)
        if self.has_router and key:
            self.supervisor.run_dir.keep_key(self.topology.dp_config.router.port, key)
        own = tuple(name for name in self._specs if name != ROUTER)
        self.supervisor.run_dir.keep_launched(Launched(self.url, own, key))
        for name in self._specs:
            self.supervisor.start(name)

    def missing(self) -> list[str]:
        """Return what does not serve yet, a few words each. The router's node waits for all instances, other nodes for
        their own.

        Raise StartFailed if a process of this node ended, RankTaken if another process has the rank of `only`.
        """
        self.supervisor.poll()
        for member in self.supervisor.dead():
            if member.lost_rank:
                raise _taken(member.name)
            raise StartFailed(f"{self.label} ends because {member.name} ended")
        local = self.supervisor.members
        words = [
            f"{member.name} is {member.progress.state}" for member in local.values() if member.progress.state != "ready"
        ]
        health = ask_health(self.url)
        if health is None:
            return [*words, f"the router at {self.url} does not answer"]
        if self._only in health.joined and local[self._only].progress.state != "ready":
            self.supervisor.poll()  # again: it may have become ready, and joined, while the router was asked
            if local[self._only].progress.state != "ready":
                raise _taken(self._only)  # the router would refuse it after loading
        # Of this node's instances only the incarnations that it started count; of other nodes any.
        self._joined = {
            name: incarnation
            for name, incarnation in health.joined.items()
            if name not in local or incarnation == local[name].progress.incarnation
        }
        words += [
            f"{instance.name} on {instance.config.host} has not joined the router"
            for instance in instances(self.topology)
            if instance.name not in self._joined
            # `words` already has this node's loading instances; only the router's node waits for those of other nodes.
            and (local[instance.name].progress.state == "ready" if instance.name in local else self.has_router)
        ]
        return words

    def states(self) -> dict[str, Progress]:
        """Return the states to display: of this node's processes, and on the router's node of all other instances."""
        states = {member.name: member.progress for member in self.supervisor.members.values()}
        if self.has_router:
            for instance in instances(self.topology):
                states.setdefault(instance.name, Progress("ready" if instance.name in self._joined else "starting"))
        return states

    def note_pids(self) -> None:
        """Keep the process ids, once all are ready, to report later which of them are gone."""
        members = self.supervisor.members.values()
        self._pids = {member.name: member.child.worker_pids() for member in members if member.child is not None}

    def report_deaths(self) -> None:
        """Report dead instances to the router at once, before their leases expire, with the pids that are gone. Only
        this report tells that none of their processes can still write."""
        dead = {member.name for member in self.supervisor.dead()}
        reason, namespace = "its launcher detected the end of its process", pid_namespace()
        leaves = []
        for i in instances(self.topology):
            if i.name in dead and i.name in self._joined:
                gone = tuple(pid for pid in self._pids.get(i.name, ()) if not os.path.exists(f"/proc/{pid}"))
                leaves.append(Leave(i.role, i.engine_rank, self._joined[i.name], reason, gone, namespace))
        if leaves:
            send_leaves(self.topology, leaves)

    def stop(self) -> None:
        deadlines = self.topology.dp_config.router.pd_disaggregation.deadlines
        self.supervisor.stop(deadlines.drain_s, deadlines.drain_delay_s)
        if self.removes_logs:
            self.supervisor.remove_logs()

    def _spec(self, name: str) -> ProcessSpec:
        spec = self._specs[name]
        return replace(spec, argv=(*spec.argv, "--if-free")) if self._only else spec


def run_node(config: str, overrides: Sequence[str], options: NodeOptions) -> int:
    """Run this node's processes until a signal (return 0) or a failure (return 1). Return 2 if this node cannot run its
    part, before anything starts. Raise RankTaken if another process has the rank of `only`."""
    stdout = StdoutLog() if _log_dir(config, overrides, options) == STDOUT else None
    with stop_on_signals() as stop, closing(make_display(stdout=stdout)) as display:
        try:
            node = Node(config, overrides, options, display.say, stdout)
        except RankTaken:
            raise
        except (ConfigError, OSError) as error:
            display.close()
            return give_up(f"{error}", options.on_failure)
        try:
            logs = f"; logs: {node.log_dir}" if stdout is None else ""
            display.say(f"{node.label} ({node.host}): {' '.join(node.names)}{logs}")
            own = [item for item in instances_on(node.topology, node.host) if item.name in node.names]
            for note in (*node.device_notes, *([describe(own, node.devices)] if own else [])):
                display.say(f"{node.label} devices: {note}")
            if (port := node.supervisor.probe_port) is not None:
                display.say(f"{node.label} probes: /livez and /readyz on port {port}")
            if node.ways:
                display.say(f"{node.label} transfers: {node.ways}")
            if node.has_router and (warning := open_api(node.topology)):
                display.say(warning)
            node.start()
            end_s = time.monotonic() + options.ready_timeout_s
            while not stop.is_set() and (words := node.missing()):
                if time.monotonic() > end_s:
                    raise StartFailed(f"not ready after {options.ready_timeout_s:g} s: {'; '.join(words)}")
                display.update(node.states())
                stop.wait(READY_POLL_S)
            display.update(node.states())
            display.close()
            node.note_pids()
            if not stop.is_set():
                display.tell(_ready_text(node))
            while not stop.wait(POLL_S):
                node.supervisor.poll()
                if dead := node.supervisor.dead():
                    node.report_deaths()
                    raise StartFailed(f"{node.label} ends because {dead[0].name} ended")
                if options.only is not None and node.supervisor.member(options.only).has_left:
                    return 0
            display.tell(f"{node.label} is stopping: waiting for running requests to finish")
            return 0
        except RankTaken:
            if stop.is_set():
                return 0
            raise
        except (StartFailed, ConfigError, OSError) as error:
            display.close()
            if stop.is_set():
                return 0
            node.removes_logs = False  # they may have the reason
            display.tell(f"chitu node: {error}")
            _tell_others(options.on_failure)
            return 1
        finally:
            node.stop()


def give_up(reason: str, on_failure: str | None) -> int:
    """Report why this node cannot run its part, notify the other nodes, and return the exit code."""
    tell(f"chitu: {reason}")
    with stop_on_signals() as stop:
        if on_failure is not None:
            stop.wait(SAME_ERROR_S)
        _tell_others(on_failure)
    return 2


def _taken(name: str) -> RankTaken:
    return RankTaken(f"another process has joined as {name} meanwhile: give another --rank, or none")


def _log_dir(config: str, overrides: Sequence[str], options: NodeOptions) -> str | None:
    """Return where the logs go as configured; None also if the topology cannot be read, which `Node` reports."""
    with contextlib.suppress(ConfigError):
        return options.log_dir or load_topology(config, overrides).log.dir
    return None


def _ready_text(node: Node) -> str:
    if node.has_router:
        names = [instance.name for instance in instances(node.topology)]
        return greeting(node.topology.model, names, node.url, node.log_dir, missing_roles(node.topology))
    return f"{node.label} is ready: {' '.join(node.names)} joined {node.url}"


def _tell_others(command: str | None) -> None:
    """Run the `on_failure` command. Best effort: the exit code reports the failure, too. From here on ignore signals,
    such as that of the command, so that this node ends with its own exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if command:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(shlex.split(command), stdin=subprocess.DEVNULL, timeout=ON_FAILURE_S, check=False)
