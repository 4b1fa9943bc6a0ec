"""Resolves `devices: auto`: assigns the GPUs of a node to its instances in the order of the topology.

Pure. Called by the launchers (`launch/node.py`, `launch/local.py`), by `chitu plan`, and by a scheduler process without
a launcher. Each node decides for its own instances and assumes that other nodes are like it: of their instances it
needs to know only whether they have GPUs. All processes of the node get the result as overrides, so they agree. The
router detects P and D of unlike nodes when they join (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chitu.config.devices import CPU, CPU_DTYPE, GPU_ELSEWHERE, dtype_on, gpu_index, is_auto, is_gpu, why_no_device
from chitu.config.schema import Topology
from chitu.config.topology import Instance, instances
from chitu.errors import ConfigError
from chitu.launch.node_devices import VISIBLE, Device, NodeDevices
from chitu.types import Role

SHOWN = "CHITU_DEVICES"
"""Variable with the topology's names of the devices in a process's CUDA_VISIBLE_DEVICES, in order."""


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    devices: Mapping[str, tuple[str, ...]]
    """Devices of all instances that were `auto`, by key of the instance; those of other nodes by their kind only."""
    notes: tuple[str, ...]
    """Notes for the operator, a sentence each."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}.devices=[{','.join(devices)}]" for key, devices in self.devices.items()]


def assign_devices(topology: Topology, own: Sequence[Instance], node: NodeDevices) -> DeviceAssignment:
    """Assign devices to `own`, this node's instances. Raise ConfigError if there are too few, or a name is invalid."""
    for instance in own:
        for reason in filter(None, map(why_no_device, () if is_auto(instance.config) else instance.config.devices)):
            raise ConfigError(f"{instance.key}.devices {reason}")
    asked = [instance for instance in own if is_auto(instance.config)]
    named = [instance for instance in own if any(map(is_gpu, instance.config.devices))]
    _check_named(named, node)
    kind = _kind_of_others(topology)
    where, notes = f"this node has {_gpus(len(node.devices))} ({node.source})", []
    if kind == CPU or not asked:
        on_gpus = kind != CPU and bool(named)
    elif node.problem and (node.is_given or kind is not None):
        raise ConfigError(node.problem)
    elif kind is not None and not node.devices:
        raise ConfigError(f"{_names(asked)}: other P and D have GPUs, but {where}: all of them need the same kind")
    else:
        on_gpus = bool(node.devices) and not node.problem
        if not on_gpus:
            dtype = dtype_on(CPU, topology.model.dtype, CPU_DTYPE)
            notes.append(f"{_names(asked)} on CPUs, in {dtype}: {node.problem or where}")
    devices: dict[str, tuple[str, ...]] = {}
    if on_gpus:
        taken = {gpu_index(device) for instance in named for device in instance.config.devices if is_gpu(device)}
        free = [k for k in range(len(node.devices)) if k not in taken]
        needed = sum(instance.config.tp_size for instance in asked)
        if needed > len(free):
            raise ConfigError(_too_few(asked, needed, len(free), where))
        for instance in asked:
            mine, free = free[: instance.config.tp_size], free[instance.config.tp_size :]
            devices[instance.key] = tuple(f"cuda:{k}" for k in mine)
            _check_parts(instance, [node.devices[k] for k in mine])
        notes += [*_shared(own), *_idle(free, node)]
    for instance in instances(topology):
        if is_auto(instance.config) and instance.key not in devices:
            is_here = any(instance.key == mine.key for mine in own)
            kind_of_it = GPU_ELSEWHERE if on_gpus and not is_here else CPU
            if own or kind is not None:  # a node with only the router does not know the other nodes' devices
                devices[instance.key] = (kind_of_it,) * instance.config.tp_size
    return DeviceAssignment(devices, tuple(notes))


def environment_of(instance: Instance, node: NodeDevices) -> dict[str, str]:
    """Return the variables that show a process of this instance only its own devices. Empty on CPUs, and for devices
    that this node does not have, as in a plan for other nodes."""
    names = tuple(dict.fromkeys(filter(is_gpu, instance.config.devices)))
    if not names or any(name == GPU_ELSEWHERE or gpu_index(name) >= len(node.devices) for name in names):
        return {}
    tokens = [node.devices[gpu_index(name)].token for name in names]
    # Number GPUs in the order of nvidia-smi, unless the environment gave a list, which keeps its own order.
    order = {} if node.is_given else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {VISIBLE: ",".join(tokens), SHOWN: ",".join(names), **order}


def describe(own: Sequence[Instance], node: NodeDevices) -> str:
    """Return the devices of each instance, in one line."""
    parts = []
    for instance in own:
        shown = environment_of(instance, node).get(VISIBLE)
        parts.append(f"{instance.name} on " + (f"GPU {shown}" if shown else "CPUs"))
    return "; ".join(parts)


def _kind_of_others(topology: Topology) -> str | None:
    """Return the kind of the devices that P and D name, which the others then need, too; None if none names any."""
    named = [
        device
        for instance in instances(topology)
        if instance.role is not Role.UNIFIED and not is_auto(instance.config)
        for device in instance.config.devices
    ]
    return None if not named else "cuda" if any(map(is_gpu, named)) else CPU


def _check_named(named: Sequence[Instance], node: NodeDevices) -> None:
    for instance in named:
        mine = list(dict.fromkeys(filter(is_gpu, instance.config.devices)))
        for device in mine:
            if node.problem:
                raise ConfigError(f"{instance.key}.devices names {device}, but {node.problem}")
            if device == GPU_ELSEWHERE or gpu_index(device) >= len(node.devices):
                raise ConfigError(
                    f"{instance.key}.devices names {device}, but this node has {_gpus(len(node.devices))} "
                    f"({node.source}): name one that is there, or use auto"
                )
        _check_parts(instance, [node.devices[gpu_index(device)] for device in mine])


def _check_parts(instance: Instance, devices: Sequence[Device]) -> None:
    if len(devices) > 1 and any(device.is_mig for device in devices):
        raise ConfigError(
            f"{instance.key}.tp_size is {instance.config.tp_size}, but its devices are MIG parts of a GPU, which "
            "cannot reach each other: use tp_size 1, or whole GPUs"
        )


def _too_few(asked: Sequence[Instance], needed: int, num_free: int, where: str) -> str:
    sizes = sorted({instance.config.tp_size for instance in asked})
    each = f"tp_size {' and '.join(map(str, sizes))}"
    sharing = ""
    if num_free and all(size == 1 for size in sizes):
        words = [f"{instance.key}.devices=[cuda:{k % num_free}]" for k, instance in enumerate(asked)]
        sharing = f"; to share GPUs, say so: {' '.join(words)}"
    left = "" if f"has {_gpus(num_free)} " in where else f", of which {num_free} are free"
    return (
        f"{where}{left}, but {_names(asked)} need {needed} ({each}): use fewer instances, a smaller tp_size, or CPUs "
        f"with {VISIBLE}= (empty){sharing}"
    )


def _shared(own: Sequence[Instance]) -> list[str]:
    users: dict[str, list[str]] = {}
    for instance in own:
        for index in dict.fromkeys(map(gpu_index, filter(is_gpu, instance.config.devices))):
            users.setdefault(f"cuda:{index}", []).append(instance.name)
    return [f"{' and '.join(names)} share {device}" for device, names in users.items() if len(names) > 1]


def _idle(free: Sequence[int], node: NodeDevices) -> list[str]:
    tokens = ",".join(node.devices[k].token for k in free)
    return [f"{_gpus(len(free))} of {len(node.devices)} stay idle ({tokens})"] if free else []


def _gpus(count: int) -> str:
    return "no GPU" if count == 0 else f"{count} GPU{'s' * (count > 1)}"


def _names(found: Sequence[Instance]) -> str:
    return ", ".join(instance.name for instance in found)
