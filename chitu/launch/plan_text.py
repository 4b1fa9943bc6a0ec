"""Output of `chitu plan`: hosts, ports, devices, environment and exact commands. Pure: values in, text out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from chitu.config.schema import Topology
from chitu.config.topology import host_names, instances, listening_host, router_ports
from chitu.launch.nodes import specs_on
from chitu.process.child import ROUTER, ProcessSpec


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
    for key, port in router_ports(router).items():
        host = listening_host(router) if key == "dp_config.router.port" else router.host
        yield f"  {host:20} {port:6}  {key}"
    for instance in instances(topology):
        yield f"  {instance.config.host:20} {instance.config.port:6}  {instance.key}.port"


def _processes(topology: Topology, specs: Sequence[ProcessSpec]) -> Iterator[str]:
    configs = {instance.name: instance.config for instance in instances(topology)}
    for spec in specs:
        yield ""
        if spec.name == ROUTER:
            yield f"{spec.name} on {spec.host}"
        else:
            config = configs[spec.name]
            yield f"{spec.name} on {spec.host}: tp_size {config.tp_size}, devices {','.join(config.devices)}"
        yield f"  {' '.join(f'{key}={shlex.quote(value)}' for key, value in spec.env.items())} \\"
        yield f"  {shlex.join(spec.argv)}"


def _nodes(topology: Topology, node_argv: Sequence[str]) -> Iterator[str]:
    """Yield the command that starts all processes of each host; Slurm's scripts run the same."""
    hosts = host_names(topology)
    if len(hosts) < 2:
        return
    yield ""
    yield "or all processes of a host at once"
    for index, host in enumerate(hosts):
        yield f"  {host:20} {shlex.join([*node_argv, '--node-index', str(index)])}"
