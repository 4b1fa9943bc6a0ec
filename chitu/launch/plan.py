"""Topology -> processes: the commands and environments that make the cluster, and the output of `chitu plan`. Pure.

Called by the launchers and by `chitu plan`. The router is a plain process; an instance is one torchrun with `tp_size`
ranks and its own rendezvous, so instances never meet in torch.distributed. Neither do groups: the members of one share
a torchrun of `dp_size` x `tp_size` ranks, of which rank r is TP rank r % `tp_size` of data rank r // `tp_size`. If
they are on several hosts, each host has a torchrun for its part, and these meet at the first host. The rendezvous of a
single rank is a file, since torch's TCP store (`--standalone`, at a free port) listens on all interfaces. The hosts of
a topology are numbered in the order in which it names them, the router's first; a list of machines (Slurm's nodes,
`--hosts`) replaces them in this order, so the placeholders of the packaged files never have to be edited.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from chitu.config.schema import InstanceConfig, Topology
from chitu.config.topology import (
    API_PORT,
    Group,
    bound_ports,
    groups,
    host_names,
    instances,
    parts,
    router_hosts,
    router_ports,
    routers,
    same_host,
    threads_of,
    with_instances,
    with_router,
)
from chitu.errors import ConfigError
from chitu.process.child import ProcessSpec, is_router, router_name
from chitu.process.node_devices import NodeDevices
from chitu.process.placement import environment_of


@dataclass(frozen=True, slots=True)
class Entries:
    """Modules that the processes run, and the interpreter for them. Tests replace them with stand-ins."""

    router: str = "chitu.serve.api_server"
    scheduler: str = "chitu.serve.scheduler"
    python: str = sys.executable
    torchrun: bool = True
    """Whether torchrun also starts instances of one rank. Without it they start seconds faster (it imports torch,
    too)."""
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    @property
    def reads_model(self) -> bool:
        """Whether the scheduler reads a whole model; stand-ins need none, or one without weights."""
        return self.scheduler == Entries().scheduler

    def has_torchrun(self, part: Group) -> bool:
        return self.torchrun or part.config.num_devices > 1 or part.is_part


def router_spec(
    topology: Topology, config: str, overrides: Sequence[str], entries: Entries, index: int = 0
) -> ProcessSpec:
    """Return the process of a router."""
    hosts = router_hosts(topology.dp_config.router)
    which = ("--index", str(index)) if len(hosts) > 1 else ()
    return ProcessSpec(
        name=router_name(index),
        host=hosts[index],
        argv=(entries.python, "-m", entries.router, "--config", config, *which, *overrides),
        env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def instance_spec(
    topology: Topology,
    part: Group,
    file: str,
    overrides: Sequence[str],
    cores: int,
    entries: Entries,
    node: NodeDevices | None = None,
) -> ProcessSpec:
    """Return the torchrun of an instance, or of a group's part on one host. `cores`: CPU cores of its host; `node` has
    its GPUs, if known."""
    deadlines = topology.dp_config.router.pd_disaggregation.deadlines
    patience_s = math.ceil(deadlines.drain_delay_s + deadlines.drain_s) + 30
    config, num_ranks = part.config, part.config.num_devices
    alone, has_torchrun = num_ranks == 1 and not part.is_part, entries.has_torchrun(part)
    ranks = (f"--nproc-per-node={num_ranks}", "--max-restarts=0")
    return ProcessSpec(
        name=part.name,
        host=config.host,
        argv=(
            *(entries.python, *(("-m", "torch.distributed.run", *_meeting(part), *ranks) if has_torchrun else ())),
            *("-m", entries.scheduler, "--config", file),
            *("--role", part.role.value, "--rank", str(part.engine_rank - part.first.data_rank), *overrides),
        ),
        env={
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads_of(topology, part, cores)),
            "PD_MASTER_ADDR": topology.dp_config.router.host,
            "TOKENIZERS_PARALLELISM": "false",
            # Otherwise torchrun kills its ranks 30 s after a signal (torch before 2.12 always does).
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience_s),
            # Otherwise torchrun would still start a TCP store for its ranks.
            **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if alone and has_torchrun else {}),
            **(environment_of(part, node) if node is not None else {}),
        },
        num_members=len(part.members),
        is_part=part.is_part,
    )


def _meeting(part: Group) -> tuple[str, ...]:
    """Return how the ranks of a torchrun find each other."""
    config = part.config
    if part.is_part:
        where = (f"--master-addr={config.hosts[0]}", f"--master-port={config.rendezvous_port}")
        return (f"--local-addr={config.host}", f"--nnodes={len(config.hosts)}", f"--node-rank={part.node_rank}", *where)
    # The ranks share a host. Without an address they would resolve its name, which may fail.
    alone = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file")
    return ("--local-addr=127.0.0.1", *(alone if config.num_devices == 1 else ("--standalone",)))


def plan(
    topology: Topology,
    config: str,
    overrides: Sequence[str],
    cores: int,
    entries: Entries | None = None,
    node: NodeDevices | None = None,
) -> tuple[ProcessSpec, ...]:
    """Return all processes of the topology, router first, as `chitu plan` shows them. `node` has the GPUs, if known."""
    entries = entries or Entries()
    return (
        *(router_spec(topology, config, overrides, entries, i) for i in range(len(routers(topology)))),
        *(instance_spec(topology, part, config, overrides, cores, entries, node) for part in parts(topology)),
    )


def split_hosts(text: str) -> list[str]:
    """Split `a, b` into `["a", "b"]`. Raise ConfigError if one is empty or given twice."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not host:
            raise ConfigError(f"--hosts {text!r} has an empty entry: give host,host,...")
        if hosts.count(host) > 1:
            raise ConfigError(f"--hosts names {host} twice: give each machine once (one machine alone: `chitu serve`)")
    return hosts


def with_hosts(topology: Topology, hosts: Sequence[str]) -> Topology:
    """Return the topology on `hosts`. Raise ConfigError if their number differs."""
    names = host_names(topology)
    if len(hosts) != len(names):
        raise ConfigError(
            f"the topology has {len(names)} hosts ({', '.join(names)}), but {len(hosts)} are given "
            f"({', '.join(hosts)}): give one for each, the router's first"
        )

    def there(host: str) -> str:
        return hosts[names.index(same_host(host))]

    def moved_to(group: Group) -> InstanceConfig:
        if group.config.hosts:
            return msgspec.structs.replace(group.config, hosts=tuple(map(there, group.config.hosts)))
        return msgspec.structs.replace(group.config, host=there(group.config.host))

    moved = with_instances(topology, moved_to)
    router = topology.dp_config.router
    return with_router(moved, host=there(router.host), hosts=tuple(map(there, router.hosts)))


def host_overrides(topology: Topology, hosts: Sequence[str]) -> list[str]:
    """Return what `with_hosts` does as overrides, for a command line."""
    moved = with_hosts(topology, hosts)
    keys = {"dp_config.router.host": moved.dp_config.router.host}
    if moved.dp_config.router.hosts:
        keys["dp_config.router.hosts"] = f"[{','.join(moved.dp_config.router.hosts)}]"
    for group in groups(moved):
        several = group.config.hosts
        keys |= (
            {f"{group.key}.hosts": f"[{','.join(several)}]"} if several else {f"{group.key}.host": group.config.host}
        )
    return [f"{key}={host}" for key, host in keys.items()]


def host_at(topology: Topology, index: int) -> str:
    """Return host number `index`. Raise ConfigError if the topology has no such host."""
    names = host_names(topology)
    if not 0 <= index < len(names):
        raise ConfigError(f"node index {index}: the topology has {len(names)} hosts, 0 to {len(names) - 1}")
    return names[index]


def specs_on(topology: Topology, specs: Sequence[ProcessSpec], index: int) -> list[ProcessSpec]:
    """Return the processes of host number `index`. Raise ConfigError if the topology has no such host."""
    host = host_at(topology, index)
    return [spec for spec in specs if same_host(spec.host) == host]


def with_threads(topology: Topology, threads_per_rank: int) -> Topology:
    """Return the topology with this many CPU threads for every rank of every instance."""
    return with_instances(
        topology,
        lambda item: msgspec.structs.replace(item.config, threads=threads_per_rank * item.config.tp_size),
    )


def launch_problems(topology: Topology) -> Iterator[str]:
    """Yield a sentence for each problem that no single process can see, in addition to `topology_checks.problems`."""
    if topology.dp_config.scheduler_base_port is not None and len(instances(topology)) > 1:
        yield (
            "dp_config.scheduler_base_port is the port of one scheduler process; this cluster starts "
            f"{len(instances(topology))}: set the port of each instance instead"
        )
    if len(host_names(topology)) > 1:
        yield from open_ports(topology)


def open_ports(topology: Topology) -> Iterator[str]:
    """Yield a sentence for each router port that only the router would know."""
    for key, port in router_ports(topology.dp_config.router).items():
        if port == 0:
            yield f"{key} is 0 (picked at start), but other hosts have to know it before: give a port"


def node_command(config: str, overrides: Sequence[str], hosts: str | None) -> list[str]:
    """Return the command line of a node without its index, as `chitu plan` prints it."""
    return ["chitu", "node", config, *overrides, *(["--hosts", hosts] if hosts else [])]


def plan_text(
    topology: Topology, specs: Sequence[ProcessSpec], cores: int, node_argv: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """Return the text of a plan. `specs` has all processes, as `plan` returns them. `node_argv` is the command of one
    node without its index. `notes` has lines on devices and transfers."""
    lines = [
        *_hosts(topology, specs),
        "",
        *_ports(topology),
        *_processes(topology, specs),
        *_nodes(topology, node_argv),
    ]
    lines += ["", *notes]
    return "\n".join([*lines, f"OMP_NUM_THREADS is counted for hosts of {cores} cores, as this one."])


def _hosts(topology: Topology, specs: Sequence[ProcessSpec]) -> Iterator[str]:
    yield "hosts"
    for index, host in enumerate(host_names(topology)):
        yield f"  {host:20} {' '.join(spec.name for spec in specs_on(topology, specs, index))}"


def _ports(topology: Topology) -> Iterator[str]:
    yield "ports (0: picked by the OS at start)"
    router = topology.dp_config.router
    for key, host, port in bound_ports(topology):
        where = (router.http_host or host) if key.startswith(f"{API_PORT} ") or key == API_PORT else host
        yield f"  {where:20} {port:6}  {key}"


def _processes(topology: Topology, specs: Sequence[ProcessSpec]) -> Iterator[str]:
    found = {part.name: part for part in parts(topology)}
    for spec in specs:
        yield ""
        if is_router(spec.name):
            yield f"{spec.name} on {spec.host}"
        else:
            yield f"{spec.name} on {spec.host}: {_sizes(found[spec.name])}"
        yield f"  {' '.join(f'{key}={shlex.quote(value)}' for key, value in spec.env.items())} \\"
        yield f"  {shlex.join(spec.argv)}"


def _sizes(part: Group) -> str:
    config = part.config
    sizes = f"tp_size {config.tp_size}" if config.dp_size == 1 else f"dp {config.dp_size} x tp {config.tp_size}"
    whole = ""
    if part.is_part:
        sizes = f"dp {config.dp_size} x tp {config.tp_size}"
        size = part.first.config.dp_size
        whole = f", part {part.node_rank} of a group of {size} on {len(config.hosts)} hosts"
    if config.experts == "spread":
        sizes += f", experts spread over {part.first.config.num_devices}"
    return f"{sizes}, devices {','.join(config.devices)}{whole}"


def _nodes(topology: Topology, node_argv: Sequence[str]) -> Iterator[str]:
    """Yield the command that starts all processes of each host; Slurm's scripts run the same."""
    hosts = host_names(topology)
    if len(hosts) < 2:
        return
    yield ""
    yield "or all processes of a host at once"
    for index, host in enumerate(hosts):
        yield f"  {host:20} {shlex.join([*node_argv, '--node-index', str(index)])}"
