"""A topology as one node runs it: loaded, and loaded again with the devices that this node has for its instances.

Called once at the start by `chitu serve`, `chitu node`, `chitu plan`, and by a scheduler process without a launcher.
Loaded again, because more than the devices depends on them (`config/step_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from chitu.config.devices import CPU, is_auto, is_gpu
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import SECTIONS, Instance, host_names, instances, instances_on
from chitu.errors import ConfigError
from chitu.launch.device_shares import Shares, share_out
from chitu.launch.node_devices import NodeDevices, look
from chitu.launch.transfer_ways import describe_ways, protocol_overrides
from chitu.net.rdma_devices import look_at_rdma
from chitu.types import Role


@dataclass(frozen=True, slots=True)
class Placement:
    topology: Topology
    overrides: list[str]
    """Those given, and the devices: what every process of this node is started with."""
    node: NodeDevices
    notes: tuple[str, ...]
    """What an operator has to know of the devices, a sentence each."""
    ways: str = ""
    """How KV will travel between P and D."""


def place(config: str | None, overrides: Sequence[str], own_of: Callable[[Topology], Sequence[Instance]]) -> Placement:
    """ConfigError where this node cannot serve `own_of(topology)`, its own instances. All
    but the devices is the caller's to check."""
    topology = load_topology(config, overrides)
    own = own_of(topology)
    node = look_for(own)
    shares = share_out(topology, own, node)
    overrides = [*overrides, *shares.overrides]
    topology, rdma = load_topology(config, overrides), look_at_rdma()
    ways = describe_ways(topology, rdma)
    if any(item.role is not Role.UNIFIED for item in own):  # a router's node needs no RDMA
        overrides += protocol_overrides(topology, rdma)
    return Placement(load_topology(config, overrides), overrides, node, shares.notes, ways)


def place_like_here(config: str | None, overrides: Sequence[str]) -> tuple[Placement, list[str]]:
    """What `place` would do on each host of the topology if all were like this machine, for `chitu plan`; and what
    stands against it, a sentence each. Of several hosts, unlike nodes are no problem: their devices stay `auto`."""
    topology = load_topology(config, overrides)
    hosts, node = host_names(topology), look_for(instances(topology))
    devices: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for host in hosts:
        own = instances_on(topology, host)
        try:
            shares = share_out(topology, own, node)
        except ConfigError as error:
            (problems if len(hosts) == 1 else notes).append(error.message)
            continue
        notes += shares.notes
        if len(hosts) == 1 or (node.devices and not node.problem):
            devices |= {item.key: shares.devices[item.key] for item in own if item.key in shares.devices}
    overrides = [*overrides, *Shares(devices, ()).overrides]
    if len(hosts) > 1 and any(is_auto(item.config) for item in instances(topology)):
        notes = [f"for hosts like this one: {note}" for note in dict.fromkeys(notes)]
    topology, rdma = load_topology(config, overrides), look_at_rdma()
    ways = describe_ways(topology, rdma)
    try:
        if len(hosts) == 1:
            overrides += protocol_overrides(topology, rdma)
    except ConfigError as error:
        problems.append(error.message)
    return Placement(load_topology(config, overrides), overrides, node, tuple(notes), ways), problems


def look_for(own: Sequence[Instance]) -> NodeDevices:
    """The devices of this node, unless its instances say that they need none."""
    if any(is_auto(item.config) or any(map(is_gpu, item.config.devices)) for item in own):
        return look()
    return NodeDevices((), "nobody asked")


def on_cpus(topology: Topology) -> list[str]:
    """Overrides that put all instances whose devices are `auto` on CPUs."""
    autos = [item for item in instances(topology) if is_auto(item.config)]
    return [f"{item.key}.devices=[{','.join([CPU] * item.config.tp_size)}]" for item in autos]


def with_shares(topology: Topology, shares: Shares) -> Topology:
    """The devices alone put into a topology of which nobody knows any more what its file said."""
    keyed = {item.key: item.config for item in instances(topology)}
    configs = {
        key: msgspec.structs.replace(config, devices=shares.devices.get(key, config.devices))
        for key, config in keyed.items()
    }
    router = topology.dp_config.router
    placed = {
        section: tuple(configs[item.key] for item in instances(topology) if SECTIONS[item.role] == section)
        for section in SECTIONS.values()
    }
    dp_config = msgspec.structs.replace(topology.dp_config, router=msgspec.structs.replace(router, **placed))
    return msgspec.structs.replace(topology, dp_config=dp_config)
