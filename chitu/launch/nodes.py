"""Assignment of machines to the hosts of a topology, and checks that only a launcher can make. Pure.

Called by `chitu plan`, the local supervisor and the launcher of one node. The hosts of a topology are numbered in the
order in which it names them, the router's first; a list of machines (Slurm's nodes, `--hosts`) replaces them in this
order, so the placeholders of the packaged files never have to be edited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chitu.config.schema import Topology
from chitu.config.topology import host_names, instances, router_ports, same_host
from chitu.errors import ConfigError
from chitu.process.child import ProcessSpec


def split_hosts(text: str) -> list[str]:
    """Split `a, b` into `["a", "b"]`. Raise ConfigError if one is empty or given twice."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not host:
            raise ConfigError(f"--hosts {text!r} has an empty entry: give host,host,...")
        if hosts.count(host) > 1:
            raise ConfigError(f"--hosts names {host} twice: give each machine once (one machine alone: `chitu serve`)")
    return hosts


def host_overrides(topology: Topology, hosts: Sequence[str]) -> list[str]:
    """Return overrides that replace the topology's hosts with `hosts`. Raise ConfigError if the numbers differ."""
    names = host_names(topology)
    if len(hosts) != len(names):
        raise ConfigError(
            f"the topology has {len(names)} hosts ({', '.join(names)}), but {len(hosts)} are given "
            f"({', '.join(hosts)}): give one for each, the router's first"
        )
    keys = {"dp_config.router.host": topology.dp_config.router.host}
    keys |= {f"{instance.key}.host": instance.config.host for instance in instances(topology)}
    return [f"{key}={hosts[names.index(same_host(host))]}" for key, host in keys.items()]


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


def thread_overrides(topology: Topology, threads_per_rank: int) -> list[str]:
    """Return overrides that give every rank of every instance this many CPU threads."""
    return [f"{item.key}.threads={threads_per_rank * item.config.tp_size}" for item in instances(topology)]


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
