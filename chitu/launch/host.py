"""The processes of one host of a topology, from their start to their end: `chitu serve` and `chitu node`.

For `chitu serve` every host of the topology is this machine, and what dies is started again. `chitu node` runs once on
every host, with the same topology and hosts, by Slurm's scripts, by ssh or by hand; the nodes do not communicate with
each other: the router tells them which instances are present. It restarts only its part of a group of several hosts,
whose other parts end with it: about all else the program that started this node decides.

Everything happens in the caller's thread, the main thread of its process, which the children do not outlive. A topology
is resolved once and written beside the logs; each process reads that file, with the router's actual ports as soon as
they are known. Exit codes: 0 after a signal, within 5 seconds, 1 if the start failed or a process died for good, 2 for
a wrong configuration. Ctrl-C after a signal ends at once.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import msgspec

from chitu.assets import TINY_MODEL_DIR, TINY_MODEL_NAME
from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of, with_cluster_key, with_own_key
from chitu.config.load import dump_topology, lws_hosts, pd_master_addr, read_topology
from chitu.config.schema import Topology
from chitu.config.topology import (
    API_PORT,
    PORT_STEP,
    Instance,
    api_host,
    api_url,
    family_of,
    find_part,
    host_names,
    instances,
    instances_on,
    on_one_host,
    own_api_url,
    parts,
    parts_of,
    place_on_host,
    probe_address,
    process_of,
    router_at,
    router_hosts,
    router_ports,
    same_host,
    with_router,
    with_router_ports,
)
from chitu.config.topology_checks import check, missing_roles, open_api
from chitu.errors import ConfigError, RankTaken
from chitu.launch.addresses import with_own_address
from chitu.launch.death_reports import DeathReports
from chitu.launch.display import (
    SIGNALS,
    PlainDisplay,
    RichDisplay,
    StopRequest,
    greeting,
    make_display,
    stop_on_signals,
    tell,
)
from chitu.launch.plan import (
    Entries,
    host_at,
    instance_spec,
    launch_problems,
    open_ports,
    router_spec,
    with_hosts,
    with_threads,
)
from chitu.launch.preflight import require_preflight
from chitu.launch.router_calls import Health, ask_health
from chitu.net.control_groups import usable_cores
from chitu.process.child import ROUTER, ProcessSpec, is_router, router_name
from chitu.process.logs import STDOUT, LogTaken, StdoutLog, make_log_dir, open_private
from chitu.process.placement import Placement, describe, on_cpus, placed
from chitu.process.progress import Progress
from chitu.process.run_dir import Launched
from chitu.process.supervisor import Member, StartFailed, Supervisor

POLL_S = 0.1
READY_POLL_S = 0.25
"""Pause between two questions to the router of another host."""
ON_FAILURE_S = 10.0
SAME_ERROR_S = 1.0
"""Time in which other nodes report the same wrong configuration themselves, before `on_failure` ends them."""
READY_TIMEOUT_S = 600.0
PICKED_PORTS = (24_000, 32_000)
"""Range of ports that are picked before their routers listen: below those that Linux gives to outgoing connections and
to whoever binds port 0, any of which might take one meanwhile."""
PORT_TRIES = 100


@dataclass(frozen=True, slots=True)
class ServeOptions:
    port: int | None = None
    """HTTP port; overrides `dp_config.router.port`."""
    log_dir: str | None = None
    restart: bool = True
    entries: Entries = field(default_factory=Entries)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    hosts: tuple[str, ...] | None
    """Machines that replace the topology's hosts, the router's first; None: those of the file, in a LeaderWorkerSet its
    pods."""
    index: int
    """Index of this node among the hosts."""
    threads_per_rank: int | None = None
    """CPU threads of each rank; None: the topology's, or this node's cores divided by its instances."""
    ready_timeout_s: float = READY_TIMEOUT_S
    log_dir: str | None = None
    only: str = ""
    """Name of the only process to run (`D1`), unless another live process has it; the node ends after its drain."""
    url: str = ""
    """URL of the API, if this node reaches it elsewhere than at the topology's address (through a proxy)."""
    cluster_key: str = ""
    """Cluster key that overrides the topology's and the environment's; empty: theirs."""
    on_failure: str | None = None
    """Command that is run once when this node fails, to notify the other nodes."""
    entries: Entries = field(default_factory=Entries)


class HostProcesses:
    """The processes of `host`. Its constructor checks everything that a launcher can check, and starts nothing."""

    def __init__(
        self,
        placement: Placement,
        host: str,
        *,
        label: str = "",
        restart: bool = False,
        only: str = "",
        url: str = "",
        log_dir: str | None = None,
        env: Mapping[str, str] = {},
        entries: Entries = Entries(),
        on_event: Callable[[str], None] = lambda text: None,
        stdout: StdoutLog | None = None,
    ) -> None:
        """`label`: name of this node in messages; empty if no other host has a part. `only`: the only process to run,
        unless another live one has its name. `url`: the API's, if not the topology's. With `stdout` all log there.

        Raise ConfigError for what cannot work, RankTaken if another launcher here runs `only`.
        """
        with _naming(label, host):
            _check(placement, host, entries, on_event, only, pd_master_addr() if label else None)
            logs = make_log_dir(log_dir or placement.topology.log.dir) if stdout is None else None
        topology = placement.topology
        self._routers = {
            router_name(index): index
            for index, each in enumerate(router_hosts(topology.dp_config.router))
            if same_host(each) == same_host(host) and not only
        }
        here = parts_of(topology, instances_on(topology, host))
        own = [name for name in (*self._routers, *(part.name for part in here)) if only in ("", name)]
        self.topology = topology = _completed(topology, own, len(self._routers), stdout is not None)
        self.host = host
        self.label = label
        self.node = placement.node
        self.ports: dict[str, int] = {}
        """The router's actual ports by short name (`port`, `stats_port`, ...), once it runs on this host."""
        self._is_router_first = not label
        """Whether the instances start once the router has picked its ports. Other nodes have to know them before."""
        self._placement = placement
        self._only = only
        self._url = url
        self._entries = entries
        self._cores = usable_cores()
        self._stdout = stdout
        self.removes_logs = not (log_dir or topology.log.dir)
        """Whether the logs are removed at the end, unless a process died."""
        self.supervisor = self._supervise(own, logs, restart, on_event, env)
        if len(self._routers) > 1 and topology.trace.dir is None:  # one folder for all, so that any of them can answer
            folder = str(self.supervisor.run_dir.path / "traces")
            trace = msgspec.structs.replace(topology.trace, dir=folder)
            self.topology = msgspec.structs.replace(topology, trace=trace)
        self.log_dir = self.supervisor.log_dir
        self.members = self.supervisor.members
        # Nodes may share the folder of their logs.
        self._config = self.log_dir / f"topology{label and '.'}{label.replace(' ', '-')}.yaml"
        self._write_config()
        self._joined: dict[str, int] = {}
        """Incarnation by name of joined instances, except earlier ones of this host's own."""
        self._deaths = DeathReports(here, self.members)

    def _supervise(
        self,
        own: Sequence[str],
        logs: Path | None,
        restart: bool,
        on_event: Callable[[str], None],
        env: Mapping[str, str],
    ) -> Supervisor:
        topology = self.topology
        try:
            return Supervisor(
                own,
                self._spec,
                logs,
                restart=restart,
                on_event=on_event,
                env={ENVIRONMENT_KEY: cluster_key_of(topology), **env},
                max_log_bytes=topology.log.max_mb << 20,
                popen=self._entries.popen,
                probe_address=probe_address(topology, self.host),
                stdout=self._stdout,
                ends_hung=restart and len(self._routers) > 1,
            )
        except LogTaken as error:
            if only := self._only:  # it starts, and has not joined
                raise RankTaken(f"{error.message}; if it is another {only}: give another --rank, or none") from None
            raise

    @property
    def has_router(self) -> bool:
        return bool(self._routers)

    @property
    def url(self) -> str:
        """URL of the API, of one of the routers that run here or of the first one. Raise StartFailed if it is not known
        yet."""
        router = self.topology.dp_config.router
        port = self.ports.get("port", router.port)
        if not port:
            raise StartFailed("the router does not listen yet: call wait_ready first")
        own = next(iter(self._routers.values()), 0)
        return self._url or api_url(api_host(router_at(router, own)), port)

    @property
    def router_urls(self) -> dict[str, str]:
        """For each router that runs here, by name, the URL at which it alone has the API."""
        router = with_router_ports(self.topology, self.ports).dp_config.router
        return {name: own_api_url(router, index) for name, index in self._routers.items()}

    def introduction(self) -> list[str]:
        """Return what runs here, on which devices, a line each."""
        of = f"{self.label} " if self.label else ""
        names = list(self.members)
        own = [item for item in instances_on(self.topology, self.host) if process_of(self.topology, item) in names]
        where = "" if self._stdout is not None else f"logs: {self.log_dir}"
        lines = [f"{of}({self.host}): {' '.join(names)}" + (f"; {where}" if where else "")] if of else []
        notes = (*self._placement.notes, *([describe(own, self.node)] if own else []))
        lines += [f"{of}devices: {note}" for note in notes]
        if (port := self.supervisor.probe_port) is not None:
            lines.append(f"{of}probes: /livez and /readyz on port {port}")
        if self._placement.ways:
            lines.append(f"{of}transfers: {self._placement.ways}")
        lines += [where] if where and not of else []
        warning = open_api(self.topology) if self.has_router else None
        return [*lines, warning] if warning else lines

    def start(self) -> None:
        """Start the processes. On one host, `poll` starts the instances as soon as the router's ports are known."""
        if not self._is_router_first:
            self._tell_commands()
        for name in self._routers if self._is_router_first else self.members:
            self.supervisor.start(name)

    def poll(self) -> None:
        """Check every process once: detect deaths, start due processes. Call about every 0.1 s.

        Raise StartFailed if a process ended before it was ever ready.
        """
        self.supervisor.poll()
        if self.has_router and not self.ports and all(self.members[name].progress.ports for name in self._routers):
            # Several routers got theirs with the topology.
            first = self.members[next(iter(self._routers))]
            self.ports = dict(first.progress.ports) if len(self._routers) == 1 else self._own_ports()
            if self._is_router_first:
                self._write_config()
                self._tell_commands()
                for name in self.members:
                    if not is_router(name):
                        self.supervisor.start(name)

    def missing(self) -> list[str]:
        """Call `poll`, then return what does not serve yet, a few words each. The router's host waits for all
        instances, other hosts for their own. Processes that died for good count no more.

        Raise StartFailed as `poll`, RankTaken if another process has the rank of `only`.
        """
        self.poll()
        self.supervisor.look()
        live = {member.name: member for member in self.members.values() if not _has_ended(member)}
        words = [f"{name} is {member.progress.state}" for name, member in live.items() if not _is_ready(member)]
        if words and not self.awaits_others:
            return words
        urls = [self.url] if self._url or len(self._routers) < 2 else list(self.router_urls.values())
        answers = [ask_health(url) for url in urls]
        for url, answer in zip(urls, answers, strict=True):
            if answer is None:
                return [*words, f"the router at {url} does not answer"]
        joined, *others = [answer.joined for answer in answers if answer is not None]
        joined = {name: number for name, number in joined.items() if all(each.get(name) == number for each in others)}
        health = Health(all(answer.is_usable for answer in answers if answer is not None), joined)
        mine = live.get(self._only)
        if mine is not None and mine.name in health.joined and not _is_ready(mine):
            self.poll()  # again: it may have become ready, and joined, while the router was asked
            if not _is_ready(mine):
                raise _taken(self._only)  # the router would refuse it after loading
        # Of this host's instances only the incarnations that it started count; of other hosts any.
        parts = self._parts(live)
        self._joined = {
            name: incarnation
            for name, incarnation in health.joined.items()
            if name not in parts or incarnation == parts[name].incarnation
        }
        words += [
            f"{instance.name} on {instance.config.host} has not joined the router"
            for instance in instances(self.topology)
            if instance.name not in self._joined
            # `words` already has this host's loading instances; only the router's host waits for those of others.
            and self._awaits(instance, live)
        ]
        if self.has_router and not (words or health.is_usable or missing_roles(self.topology)):
            words.append("the router has no usable instances")
        return words

    def _awaits(self, instance: Instance, live: Mapping[str, Member]) -> bool:
        """Return whether an instance should have joined: one of this host that is ready, or one of another host."""
        process = process_of(self.topology, instance)
        return _is_ready(live.get(process)) if process in self.members else self.has_router

    @property
    def awaits_others(self) -> bool:
        """Whether the router's answer counts before all processes of this host are ready."""
        return bool(self._only) or len(host_names(self.topology)) > 1

    @property
    def has_left(self) -> bool:
        """Whether `only` was drained."""
        return bool(self._only) and self.members[self._only].has_left

    def states(self) -> dict[str, Progress]:
        """Return the states to display: of this host's processes, and on the router's host of all other instances."""
        states = {name: member.progress for name, member in self.members.items()}
        if self.has_router:
            for part in parts(self.topology):
                is_ready = all(member.name in self._joined for member in part.members)
                states.setdefault(part.name, Progress("ready" if is_ready else "starting"))
        return states

    def require_alive(self) -> None:
        """Raise StartFailed if a process has died for good, RankTaken if another one has its rank."""
        for member in self.supervisor.dead():
            if member.lost_rank:
                raise _taken(member.name)
            if not self.label:
                raise StartFailed(f"{member.name} ended before the cluster served, and is not started again")
            raise StartFailed(f"{self.label} ends because {member.name} ended")

    def report_deaths(self) -> None:
        """Report instances that have ended to the router at once. Call it after every `poll` once all are ready."""
        self._deaths.note_pids()
        self._deaths.send(self.topology)

    def stop(self) -> dict[str, int | None]:
        """Drain and end everything, the router first, so that no new request arrives. Return exit codes by name.

        Processes left `deadlines.drain_delay_s` + `drain_s` + 0.5 s (4.5 s) after the start of the stop are killed.
        Idempotent.
        """
        deadlines = self.topology.dp_config.router.pd_disaggregation.deadlines
        return self.supervisor.stop(deadlines.drain_s, deadlines.drain_delay_s)

    def ready_text(self) -> str:
        """Return what to tell the user once everything serves."""
        if not self.has_router:
            return f"{self.label} is ready: {' '.join(self.members)} joined {self.url}"
        names = [instance.name for instance in instances(self.topology)]
        log_dir = self.log_dir if self._stdout is None else None
        missing, has_key = missing_roles(self.topology), bool(cluster_key_of(self.topology))
        return greeting(self.topology.model, names, self.url, log_dir, missing, has_key)

    def _tell_commands(self) -> None:
        """Tell the commands of this user on this machine what runs here, and the cluster key."""
        key, port = cluster_key_of(self.topology), self.ports.get("port", self.topology.dp_config.router.port)
        if self.has_router and key:
            self.supervisor.run_dir.keep_key(port, key)
        own = tuple(item.name for item in instances(self.topology) if process_of(self.topology, item) in self.members)
        self.supervisor.run_dir.keep_launched(Launched(self.url, own, key))

    def _write_config(self) -> None:
        with open_private(self._config, append=False) as file:  # it may have API keys, but not the cluster key
            file.write(dump_topology(with_router_ports(self.topology, self.ports)).encode())

    def _spec(self, name: str) -> ProcessSpec:
        if not self._config.exists():  # the temporary folder was cleaned
            self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_config()
        topology, config = self.topology, str(self._config)
        if name in self._routers:
            return router_spec(topology, config, [], self._entries, self._routers[name])
        spec = instance_spec(topology, find_part(topology, name), config, [], self._cores, self._entries, self.node)
        return replace(spec, argv=(*spec.argv, "--if-free")) if self._only else spec

    def _own_ports(self) -> dict[str, int]:
        ports = router_ports(self.topology.dp_config.router)
        return {key.rpartition(".")[2]: port for key, port in ports.items()}

    def _parts(self, live: Mapping[str, Member]) -> dict[str, Progress]:
        """Return the progress of each instance in these processes."""
        known = [part for part in parts(self.topology) if part.name in live]
        return {each.name: live[part.name].parts[each.place] for part in known for each in part.members}


def with_free_ports(topology: Topology) -> Topology:
    """Return the topology with ports in place of those that are 0, which are free for each of several routers of this
    machine: they have to know each other's before they start."""
    router = topology.dp_config.router
    picked = {}
    with contextlib.ExitStack() as taken:
        for key, port in router_ports(router).items():
            if not port:
                distances = [PORT_STEP * place_on_host(router, index) for index in range(len(router_hosts(router)))]
                if key == API_PORT:
                    distances = list(range(len(distances) + 1))
                picked[key.rpartition(".")[2]] = _free_port(router.host, distances, taken)
    return with_router_ports(topology, picked)


def _free_port(host: str, distances: Sequence[int], taken: contextlib.ExitStack) -> int:
    """Return a port that is free, as are those at these distances, and bind them until the end of `taken`."""
    for _ in range(PORT_TRIES):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError, OverflowError):
            first = sockets.enter_context(socket.socket(family_of(host)))
            port = random.randrange(*PICKED_PORTS)
            first.bind((host, port))
            for distance in {*distances} - {0}:
                sockets.enter_context(socket.socket(family_of(host))).bind((host, port + distance))
            taken.push(sockets.pop_all())
            return port
    raise ConfigError(f"no free ports for {len(distances)} routers on {host}: give the ports of dp_config.router")


def _has_ended(member: Member) -> bool:
    """Return whether it has died, or was drained, and is not started again by itself."""
    return member.child is None and member.restart_at_s is None and member.exit_code is not None


def _is_ready(member: Member | None) -> bool:
    return member is not None and member.progress.state == "ready"


def _taken(name: str) -> RankTaken:
    return RankTaken(f"another process has joined as {name} meanwhile: give another --rank, or none")


def _run(
    host: HostProcesses,
    display: PlainDisplay | RichDisplay,
    stop: StopRequest,
    ready_timeout_s: float = float("inf"),
    on_ready: Callable[[HostProcesses], bool] | None = None,
) -> int:
    """Run the processes until a signal and return the exit code. Raise StartFailed or RankTaken if they cannot serve.
    `on_ready` is called once they serve; if it returns True, they end again."""
    for line in host.introduction():
        display.say(line)
    host.start()
    end_s = time.monotonic() + ready_timeout_s
    while not stop.is_set() and (words := host.missing()):
        host.require_alive()
        if time.monotonic() > end_s:
            raise StartFailed(f"not ready after {ready_timeout_s:g} s: {'; '.join(words)}")
        display.update(host.states())
        stop.wait(READY_POLL_S if host.awaits_others else POLL_S)
    host.require_alive()
    display.update(host.states())
    display.close()
    if not stop.is_set():
        display.tell(host.ready_text())
        if on_ready is not None and on_ready(host):
            stop.set()
    if host.label:
        host.report_deaths()
    while not stop.wait(POLL_S):
        host.poll()
        dead = {member.name for member in host.supervisor.dead()}
        if host.label:
            host.report_deaths()
            host.require_alive()
        if not host.label and host.has_router and dead.issuperset(host.router_urls):
            return 1
        if host.has_left:
            return 0
    is_stopping = f"{host.label} is stopping" if host.label else "stopping"
    display.tell(f"{is_stopping}: waiting for running requests to finish")
    return 0


def serve(
    config: str | None,
    overrides: Sequence[str],
    options: ServeOptions,
    on_ready: Callable[[HostProcesses], bool] | None = None,
) -> int:
    """Run the whole topology on this machine until a signal and return the exit code. `on_ready` is called once the
    cluster serves; if it returns True, the cluster ends again (quickstart --once). Raise ConfigError before anything
    starts."""
    topology, given = read_topology(config, overrides)
    if not topology.model.path:
        topology = on_cpus(topology)  # the embedded model gains nothing by a GPU
    placement = placed(topology, given, instances(on_one_host(topology)))
    topology = placement.topology
    stdout = StdoutLog() if (options.log_dir or topology.log.dir) == STDOUT else None
    with stop_on_signals() as stop, closing(make_display(stdout=stdout)) as display:
        here = on_one_host(topology)
        if moved := [name for name in host_names(topology) if name not in host_names(here)]:
            display.say(f"all processes are started on this machine, not on {', '.join(moved)}")
        if not here.model.path:
            here = _with_default_model(here, display.say)
        if options.port is not None:
            here = with_router(here, port=options.port)
        host = HostProcesses(
            replace(placement, topology=here),
            here.dp_config.router.host,
            restart=options.restart,
            log_dir=options.log_dir,
            entries=options.entries,
            on_event=display.say,
            stdout=stdout,
        )
        try:
            return _run(host, display, stop, on_ready=on_ready)
        except StartFailed as error:
            if stop.is_set():
                return 0
            display.close()
            display.tell(error.message)
            return 1
        finally:
            host.stop()
            if host.removes_logs and not host.supervisor.remove_logs():
                display.tell(f"the logs stay in {host.log_dir}")


def run_node(config: str, overrides: Sequence[str], options: NodeOptions) -> int:
    """Run this node's processes until a signal (return 0) or a failure (return 1). Return 2 if this node cannot run its
    part, before anything starts. Raise RankTaken if another process has the rank of `only`."""
    try:
        topology, given = read_topology(config, overrides)
    except ConfigError as error:
        return give_up(f"{error}", options.on_failure)
    stdout = StdoutLog() if (options.log_dir or topology.log.dir) == STDOUT else None
    with stop_on_signals() as stop, closing(make_display(stdout=stdout)) as display:
        try:
            host = _node(topology, given, options, display.say, stdout)
        except RankTaken:
            raise
        except (ConfigError, OSError) as error:
            display.close()
            return give_up(f"{error}", options.on_failure)
        try:
            return _run(host, display, stop, options.ready_timeout_s)
        except RankTaken:
            if stop.is_set():
                return 0
            raise
        except (StartFailed, ConfigError, OSError) as error:
            display.close()
            if stop.is_set():
                return 0
            host.removes_logs = False  # they may have the reason
            display.tell(f"chitu node: {error}")
            _tell_others(options.on_failure)
            return 1
        finally:
            host.stop()
            if host.removes_logs:
                host.supervisor.remove_logs()


def _node(
    topology: Topology,
    given: Collection[str],
    options: NodeOptions,
    on_event: Callable[[str], None],
    stdout: StdoutLog | None,
) -> HostProcesses:
    """Return this node's processes. Raise ConfigError, RankTaken."""
    hosts = options.hosts
    if hosts is None and len(host_names(topology)) > 1:
        hosts = lws_hosts()
    if hosts is not None:
        host_at(with_hosts(topology, hosts), options.index)
        topology = with_hosts(topology, with_own_address(hosts, options.index))
    if options.threads_per_rank is not None:
        topology = with_threads(topology, options.threads_per_rank)
    host, label = host_at(topology, options.index), options.only or f"node {options.index}"
    for problem in chain(launch_problems(topology), open_ports(topology)):
        raise ConfigError(problem)
    with _naming(label, host):
        check(topology, pd_master_addr())
        placement = placed(topology, given, instances_on(topology, host))
    if options.cluster_key:
        placement = replace(placement, topology=with_cluster_key(placement.topology, options.cluster_key))
    return HostProcesses(
        placement,
        host,
        label=label,
        only=options.only,
        url=options.url,
        log_dir=options.log_dir,
        entries=options.entries,
        on_event=on_event,
        stdout=stdout,
    )


def _check(
    placement: Placement,
    host: str,
    entries: Entries,
    on_event: Callable[[str], None],
    only: str,
    master_addr: str | None,
) -> None:
    """Raise ConfigError for what cannot work on this host."""
    topology = placement.topology
    check(topology, master_addr)
    for problem in launch_problems(topology):
        raise ConfigError(problem)
    names = (only,) if only else None
    require_preflight(topology, host, entries.reads_model, on_event, placement.node.cards, names)


def _completed(topology: Topology, own: Sequence[str], num_routers: int, has_json_log: bool) -> Topology:
    """Return the topology with what the launcher adds for its processes `own`, of which `num_routers` are routers."""
    if has_json_log:
        topology = msgspec.structs.replace(topology, log=msgspec.structs.replace(topology.log, format="json"))
    if len(host_names(topology)) == 1 and ROUTER in own:
        topology = with_own_key(topology)
    return with_free_ports(topology) if num_routers > 1 else topology


@contextlib.contextmanager
def _naming(label: str, host: str) -> Iterator[None]:
    """Name the node in a ConfigError, where there are several."""
    try:
        yield
    except ConfigError as error:
        if not label:
            raise
        raise ConfigError(f"{label} ({host}): {error.message}") from error


def give_up(reason: str, on_failure: str | None) -> int:
    """Report why this node cannot run its part, notify the other nodes, and return the exit code."""
    tell(f"chitu: {reason}")
    with stop_on_signals() as stop:
        if on_failure is not None:
            stop.wait(SAME_ERROR_S)
        _tell_others(on_failure)
    return 2


def _with_default_model(topology: Topology, say: Callable[[str], None]) -> Topology:
    """Return the topology with the embedded model."""
    say(f"no model given (--model PATH): {TINY_MODEL_NAME} answers, which only knows lists of facts")
    name = topology.model.served_name or TINY_MODEL_NAME
    model = msgspec.structs.replace(topology.model, path=str(TINY_MODEL_DIR), served_name=name)
    return msgspec.structs.replace(topology, model=model)


def _tell_others(command: str | None) -> None:
    """Run the `on_failure` command. Best effort: the exit code reports the failure, too. From here on ignore signals,
    such as that of the command, so that this node ends with its own exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if command:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(shlex.split(command), stdin=subprocess.DEVNULL, timeout=ON_FAILURE_S, check=False)
