"""A topology as one node runs it: loaded, and loaded again with the devices of this node for its instances.

Called once at the start by `chitu serve`, `chitu node`, `chitu plan`, and by a scheduler process without a launcher.
The second load is needed because other settings depend on the devices (`config/devices.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from chitu.config.devices import CPU, is_auto, is_gpu
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import SECTIONS, Instance, host_names, instances, instances_on, with_router
from chitu.errors import ConfigError
from chitu.launch.device_shares import DeviceAssignment, assign_devices
from chitu.launch.node_devices import NodeDevices, look
from chitu.launch.transport_choice import describe_transports, protocol_overrides
from chitu.net.rdma_devices import look_at_rdma
from chitu.types import Role


@dataclass(frozen=True, slots=True)
class Placement:
    topology: Topology
    overrides: list[str]
    """Given overrides and those of the devices; every process of this node is started with them."""
    node: NodeDevices
    notes: tuple[str, ...]
    """Notes on the devices for the operator, a sentence each."""
    ways: str = ""
    """Description of the transports between P and D."""


def place(config: str | None, overrides: Sequence[str], own_of: Callable[[Topology], Sequence[Instance]]) -> Placement:
    """Return the placement of `own_of(topology)`, this node's instances. Raise ConfigError if it cannot serve them. The
    caller checks everything except the devices."""
    topology = load_topology(config, overrides)
    own = own_of(topology)
    node = look_for(own)
    shares = assign_devices(topology, own, node)
    overrides = [*overrides, *shares.overrides]
    topology, rdma = load_topology(config, overrides), look_at_rdma()
    ways = describe_transports(topology, rdma)
    if any(item.role is not Role.UNIFIED for item in own):  # a node with only the router needs no RDMA
        overrides += protocol_overrides(topology, rdma)
    return Placement(load_topology(config, overrides), overrides, node, shares.notes, ways)


def place_like_here(config: str | None, overrides: Sequence[str]) -> tuple[Placement, list[str]]:
    """Return what `place` would do on each host of the topology if all were like this machine, and the problems, a
    sentence each. For `chitu plan`. With several hosts, a failure here is only a note: their devices stay `auto`."""
    topology = load_topology(config, overrides)
    hosts, node = host_names(topology), look_for(instances(topology))
    devices: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for host in hosts:
        own = instances_on(topology, host)
        try:
            shares = assign_devices(topology, own, node)
        except ConfigError as error:
            (problems if len(hosts) == 1 else notes).append(error.message)
            continue
        notes += shares.notes
        if len(hosts) == 1 or (node.devices and not node.problem):
            devices |= {item.key: shares.devices[item.key] for item in own if item.key in shares.devices}
    overrides = [*overrides, *DeviceAssignment(devices, ()).overrides]
    if len(hosts) > 1 and any(is_auto(item.config) for item in instances(topology)):
        notes = [f"for hosts like this one: {note}" for note in dict.fromkeys(notes)]
    topology, rdma = load_topology(config, overrides), look_at_rdma()
    ways = describe_transports(topology, rdma)
    try:
        if len(hosts) == 1:
            overrides += protocol_overrides(topology, rdma)
    except ConfigError as error:
        problems.append(error.message)
    return Placement(load_topology(config, overrides), overrides, node, tuple(notes), ways), problems


def look_for(own: Sequence[Instance]) -> NodeDevices:
    """Return the devices of this node, or none if its instances need none."""
    if any(is_auto(item.config) or any(map(is_gpu, item.config.devices)) for item in own):
        return look()
    return NodeDevices((), "no instance needs one")


def on_cpus(topology: Topology) -> list[str]:
    """Return overrides that put all instances whose devices are `auto` on CPUs."""
    autos = [item for item in instances(topology) if is_auto(item.config)]
    return [f"{item.key}.devices=[{','.join([CPU] * item.config.tp_size)}]" for item in autos]


def with_shares(topology: Topology, shares: DeviceAssignment) -> Topology:
    """Return the topology with the devices of `shares`, without loading its file again."""
    keyed = {item.key: item.config for item in instances(topology)}
    configs = {
        key: msgspec.structs.replace(config, devices=shares.devices.get(key, config.devices))
        for key, config in keyed.items()
    }
    placed = {
        section: tuple(configs[item.key] for item in instances(topology) if SECTIONS[item.role] == section)
        for section in SECTIONS.values()
    }
    return with_router(topology, **placed)
