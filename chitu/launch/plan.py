"""Topology -> processes: the commands and environments that make the cluster. Pure; starts nothing.

Called by the local supervisor and by `chitu plan`. The router is a plain process; an instance is one torchrun with
`tp_size` ranks and its own rendezvous, so instances never meet in torch.distributed. The rendezvous of a single rank is
a file, since torch's TCP store (`--standalone`, at a free port) listens on all interfaces.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chitu.config.schema import Topology
from chitu.config.topology import Instance, instances, router_ports, threads_of
from chitu.process.child import ROUTER, ProcessSpec
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

    def has_torchrun(self, instance: Instance) -> bool:
        return self.torchrun or instance.config.tp_size > 1


def router_spec(topology: Topology, config: str, overrides: Sequence[str], entries: Entries) -> ProcessSpec:
    """Return the router process."""
    return ProcessSpec(
        name=ROUTER,
        host=topology.dp_config.router.host,
        argv=(entries.python, "-m", entries.router, "--config", config, *overrides),
        env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def instance_spec(
    topology: Topology,
    instance: Instance,
    config: str,
    overrides: Sequence[str],
    cores: int,
    entries: Entries,
    node: NodeDevices | None = None,
) -> ProcessSpec:
    """Return the torchrun of one instance. `cores` are the CPU cores of its host; `node` has its GPUs, if known."""
    deadlines = topology.dp_config.router.pd_disaggregation.deadlines
    patience_s = math.ceil(deadlines.drain_delay_s + deadlines.drain_s) + 30
    alone, has_torchrun = instance.config.tp_size == 1, entries.has_torchrun(instance)
    meeting = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file") if alone else ("--standalone",)
    # The ranks of an instance share a host. Without an address they would resolve its name, which may fail.
    torchrun = ("-m", "torch.distributed.run", "--local-addr=127.0.0.1", *meeting)
    ranks = (f"--nproc-per-node={instance.config.tp_size}", "--max-restarts=0")
    return ProcessSpec(
        name=instance.name,
        host=instance.config.host,
        argv=(
            *(entries.python, *(torchrun + ranks if has_torchrun else ())),
            *("-m", entries.scheduler, "--config", config),
            *("--role", instance.role.value, "--rank", str(instance.engine_rank), *overrides),
        ),
        env={
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads_of(topology, instance, cores)),
            "PD_MASTER_ADDR": topology.dp_config.router.host,
            "TOKENIZERS_PARALLELISM": "false",
            # Otherwise torchrun kills its ranks 30 s after a signal (torch before 2.12 always does).
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience_s),
            # Otherwise torchrun would still start a TCP store for its ranks.
            **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if alone and has_torchrun else {}),
            **(environment_of(instance, node) if node is not None else {}),
        },
    )


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
    members = instances(topology)
    return (
        router_spec(topology, config, overrides, entries),
        *(instance_spec(topology, member, config, overrides, cores, entries, node) for member in members),
    )


def port_overrides(ports: dict[str, int]) -> list[str]:
    """Return overrides that set the router's ports (by short name, as it reports them) for the other processes."""
    keys = {key.rsplit(".", 1)[1]: key for key in router_ports_keys()}
    return [f"{keys[name]}={port}" for name, port in ports.items() if name in keys]


def router_ports_keys() -> list[str]:
    """Return the key paths of the router's ports."""
    return list(router_ports(Topology().dp_config.router))
