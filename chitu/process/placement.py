"""A topology as one node runs it: loaded once, with the devices and transports of this node.

Called once at the start by `chitu serve`, `chitu node`, `chitu plan`, and by a scheduler process without a launcher.
All but `place`, `placed`, `place_like_here` and `look_for` is pure. `devices: auto` becomes the node's GPUs in the
order of the topology, `mooncake_protocol: auto` the protocol of this node. Each node decides for itself and assumes
that the others are like it: of their instances it needs to know only whether they have GPUs. The router detects P and D
of unlike nodes when they join (docs/adr/0009); peers find out whether a transport reaches the other when they connect
(`kv_transfer/transports/local.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from chitu.config.devices import (
    CPU,
    CPU_DTYPE,
    GPU_ELSEWHERE,
    dtype_on,
    gpu_index,
    is_auto,
    is_gpu,
    why_no_device,
    with_step_sizes,
)
from chitu.config.load import read_topology
from chitu.config.schema import Topology
from chitu.config.staging import goes_through_the_host, has_transfer_library
from chitu.config.topology import (
    Group,
    Instance,
    groups,
    host_names,
    instances,
    instances_on,
    parts_of,
    same_host,
    with_instances,
    with_router,
)
from chitu.config.transport_env import transport_environment, ucx_limits
from chitu.errors import ConfigError
from chitu.net.rdma_devices import Rdma, choose_for_ucx, choose_protocol, look_at_rdma, why_no_rdma
from chitu.process.node_devices import VISIBLE, Device, NodeDevices, look
from chitu.types import Role

SHOWN = "CHITU_DEVICES"
"""Variable with the topology's names of the devices in a process's CUDA_VISIBLE_DEVICES, in order."""
PD = "dp_config.router.pd_disaggregation"
KEY = f"{PD}.mooncake_protocol"


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    devices: Mapping[str, tuple[str, ...]]
    """Devices of all entries of the topology that were `auto`, by key; those of other nodes by their kind only."""
    notes: tuple[str, ...]
    """Notes for the operator, a sentence each."""


def assign_devices(topology: Topology, members: Sequence[Instance], node: NodeDevices) -> DeviceAssignment:
    """Assign devices to this node's instances. Raise ConfigError if there are too few, or a name is invalid."""
    own = parts_of(topology, members)
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
        needed = sum(instance.config.num_devices for instance in asked)
        if needed > len(free):
            raise ConfigError(_too_few(asked, needed, len(free), where))
        for instance in asked:
            mine, free = free[: instance.config.num_devices], free[instance.config.num_devices :]
            devices[instance.key] = _among_all(instance, tuple(f"cuda:{k}" for k in mine))
            _check_parts(instance, [node.devices[k] for k in mine])
        notes += [*_shared(own), *_idle(free, node)]
    for instance in groups(topology):
        if is_auto(instance.config) and instance.key not in devices:
            is_here = any(instance.key == mine.key for mine in own)
            kind_of_it = GPU_ELSEWHERE if on_gpus and not is_here else CPU
            if own or kind is not None:  # a node with only the router does not know the other nodes' devices
                devices[instance.key] = (kind_of_it,) * instance.config.num_devices
    return DeviceAssignment(devices, tuple(notes))


def _among_all(part: Group, mine: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices of a whole group, of which `mine` are those of this host's part."""
    if not part.is_part:
        return mine
    before = part.first.data_rank * part.config.tp_size
    behind = part.first.config.num_devices - before - len(mine)
    return (*(GPU_ELSEWHERE,) * before, *mine, *(GPU_ELSEWHERE,) * behind)


def environment_of(instance: Instance | Group, node: NodeDevices) -> dict[str, str]:
    """Return the variables that show the processes of a torchrun only its own devices. Empty on CPUs, and for devices
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


def _check_named(named: Sequence[Group], node: NodeDevices) -> None:
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


def _check_parts(instance: Group, devices: Sequence[Device]) -> None:
    if instance.config.tp_size > 1 and any(device.is_mig for device in devices):
        raise ConfigError(
            f"{instance.key}.tp_size is {instance.config.tp_size}, but its devices are MIG parts of a GPU, which "
            "cannot reach each other: use tp_size 1, or whole GPUs"
        )


def _too_few(asked: Sequence[Group], needed: int, num_free: int, where: str) -> str:
    sizes = sorted({instance.config.num_devices for instance in asked})
    each = f"tp_size {' and '.join(map(str, sizes))}"
    if any(instance.config.dp_size > 1 for instance in asked):
        each = f"dp_size x tp_size {' and '.join(map(str, sizes))}"
    sharing = ""
    if num_free and all(size == 1 for size in sizes):
        words = [f"{instance.key}.devices=[cuda:{k % num_free}]" for k, instance in enumerate(asked)]
        sharing = f"; to share GPUs, say so: {' '.join(words)}"
    left = "" if f"has {_gpus(num_free)} " in where else f", of which {num_free} are free"
    return (
        f"{where}{left}, but {_names(asked)} need {needed} ({each}): use fewer instances, a smaller tp_size, or CPUs "
        f"with {VISIBLE}= (empty){sharing}"
    )


def _shared(own: Sequence[Group]) -> list[str]:
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


def _names(found: Sequence[Group]) -> str:
    return ", ".join(instance.name for instance in found)


def uses_mooncake(topology: Topology) -> bool:
    pd = topology.dp_config.router.pd_disaggregation
    return pd.transport == "mooncake" or (
        pd.transport == "auto" and any(has_transfer_library(pd, item.config.host) for item in _paired(topology))
    )


def needed_library(topology: Topology) -> str:
    """Return `mooncake` or `nixl` if P and D cannot reach each other without it, else ""."""
    transport, paired = topology.dp_config.router.pd_disaggregation.transport, _paired(topology)
    if transport in ("mooncake", "nixl"):
        return transport if paired else ""
    return "mooncake" if transport == "auto" and len(_hosts(paired)) > 1 else ""


def is_staged(topology: Topology, protocol: str) -> bool:
    """Return whether Mooncake over `protocol` gets KV of GPUs from host memory. Otherwise it sends from the GPU itself,
    piece by piece, which needs a build with CUDA."""
    pd, paired = topology.dp_config.router.pd_disaggregation, _paired(topology)
    chosen = msgspec.structs.replace(pd, mooncake_protocol=protocol)
    has_segments = pd.transfer != "direct" and all(item.config.tp_size == 1 for item in paired)
    return has_gpus(topology) and has_segments and goes_through_the_host(chosen, True)


def why_not_sent(topology: Topology, protocol: str, has_cuda_build: bool) -> tuple[str, str]:
    """Return what keeps Mooncake over `protocol` from sending KV of GPUs, and what makes it slow, a sentence each; both
    may be empty. `topology` has devices. `has_cuda_build` is about Mooncake on this node."""
    pd = topology.dp_config.router.pd_disaggregation
    if needed_library(topology) != "mooncake" or not has_gpus(topology) or is_staged(topology, protocol):
        return "", ""
    because = "over rdma" if protocol == "rdma" else f"with {PD}.transfer direct"
    if pd.transfer != "direct" and any(item.config.tp_size > 1 for item in _paired(topology)):
        because = "of instances with tp_size above 1"
    if not has_cuda_build:
        return f"KV of GPUs {because} is sent from GPU memory, but this build of Mooncake has no CUDA", ""
    if protocol == "rdma":
        return "", ""
    return "", f"KV of GPUs {because} goes over TCP piece by piece from GPU memory, which is slow"


def chosen_protocol(topology: Topology, found: Rdma) -> str:
    """Return the protocol of Mooncake on this node, or "" if the topology's stays. Raise ConfigError if RDMA is
    required but missing."""
    pd = topology.dp_config.router.pd_disaggregation
    if not uses_mooncake(topology) or pd.mooncake_protocol == "tcp":
        return ""
    if pd.mooncake_protocol == "rdma":
        if reason := why_no_rdma(found, pd.ib_device, has_gpus(topology)):
            raise ConfigError(f"{KEY} is rdma, but {reason}: use auto or tcp")
        return ""
    return choose_protocol(pd, found, has_gpus(topology))[0]


def describe_transports(topology: Topology, found: Rdma) -> str:
    """Describe the transports, or return "" without P and D. `topology` has devices, and the protocol of the file."""
    paired = _paired(topology)
    if not paired:
        return ""
    pd, on_gpus = topology.dp_config.router.pd_disaggregation, has_gpus(topology)
    hosts = {role: _hosts([item for item in paired if item.role is role]) for role in Role}
    ways = []
    if hosts[Role.PREFILL] & hosts[Role.DECODE] and pd.transport in ("auto", "shm", "cuda_ipc"):
        way = "cuda_ipc" if on_gpus and pd.transport != "shm" else "shm"
        ways.append(f"{way} on one host" + (" (GPU memory to GPU memory)" if way == "cuda_ipc" else ""))
    if pd.transport == "nixl":
        way = choose_for_ucx(pd.ib_device, found, on_gpus, ucx_limits(transport_environment(pd)))
        ways.append(f"nixl {way}")
    elif needed_library(topology) == "mooncake":
        protocol, why = choose_protocol(pd, found, on_gpus)
        ways.append(f"mooncake over {protocol}{' between hosts' if pd.transport == 'auto' else ''} ({why})")
        if on_gpus and is_staged(topology, protocol):
            ways[-1] += ", staged through host memory"
        elif on_gpus:
            slowly = "" if protocol == "rdma" else ", piece by piece, which is slow"
            ways[-1] += f", straight from GPU memory{slowly} (needs Mooncake's build with CUDA)"
    if (library := needed_library(topology)) and len(_hosts(paired)) > 1:
        ways.append(f"{library}'s ports ask for no key (docs/security.md)")
    return "; ".join(ways)


def _paired(topology: Topology) -> list[Instance]:
    return [item for item in instances(topology) if item.role is not Role.UNIFIED]


def _hosts(found: Iterable[Instance]) -> set[str]:
    return {same_host(item.config.host) for item in found}


def has_gpus(topology: Topology) -> bool:
    """Return whether P and D have GPUs."""
    return any(is_gpu(device) for item in _paired(topology) for device in item.config.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    topology: Topology
    """The topology with the devices and the protocol, as every process of this node reads it."""
    node: NodeDevices
    notes: tuple[str, ...]
    """Notes on the devices for the operator, a sentence each."""
    ways: str = ""
    """Description of the transports between P and D."""


def place(config: str | None, overrides: Sequence[str], own_of: Callable[[Topology], Sequence[Instance]]) -> Placement:
    """Load a topology and return the placement of `own_of(topology)`, this node's instances, as `placed` does."""
    topology, given = read_topology(config, overrides)
    return placed(topology, given, own_of(topology))


def placed(topology: Topology, given: Collection[str], own: Sequence[Instance]) -> Placement:
    """Return the placement of `own`, this node's instances. `given`: keys of `scheduler` that do not depend on the
    devices. Raise ConfigError if the node cannot serve them. The caller checks everything except the devices."""
    node = look_for(own)
    shares = assign_devices(topology, own, node)
    topology, rdma = with_step_sizes(with_shares(topology, shares), given), look_at_rdma()
    ways = describe_transports(topology, rdma)
    if any(item.role is not Role.UNIFIED for item in own):  # a node with only the router needs no RDMA
        topology = _with_protocol(topology, chosen_protocol(topology, rdma))
    return Placement(topology, node, shares.notes, ways)


def place_like_here(topology: Topology, given: Collection[str]) -> tuple[Placement, list[str], list[str]]:
    """Return what `placed` would do on each host of the topology if all were like this machine, as overrides for a
    command line, too, and the problems, a sentence each. For `chitu plan`. With several hosts, a failure here is only a
    note: their devices stay `auto`."""
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
            for key in {item.key: None for item in own if item.key in shares.devices}:
                pairs = zip(devices.get(key, shares.devices[key]), shares.devices[key], strict=True)
                devices[key] = tuple(old if new == GPU_ELSEWHERE else new for old, new in pairs)
    overrides = [f"{key}.devices=[{','.join(names)}]" for key, names in devices.items()]
    if len(hosts) > 1 and any(is_auto(item.config) for item in instances(topology)):
        notes = [f"for hosts like this one: {note}" for note in dict.fromkeys(notes)]
    topology = with_step_sizes(with_shares(topology, DeviceAssignment(devices, ())), given)
    rdma = look_at_rdma()
    ways = describe_transports(topology, rdma)
    try:
        if len(hosts) == 1 and (protocol := chosen_protocol(topology, rdma)):
            overrides.append(f"{KEY}={protocol}")
            topology = _with_protocol(topology, protocol)
    except ConfigError as error:
        problems.append(error.message)
    return Placement(topology, node, tuple(notes), ways), overrides, problems


def _with_protocol(topology: Topology, protocol: str) -> Topology:
    pd = topology.dp_config.router.pd_disaggregation
    protocol = protocol or pd.mooncake_protocol
    return with_router(topology, pd_disaggregation=msgspec.structs.replace(pd, mooncake_protocol=protocol))


def look_for(own: Sequence[Instance]) -> NodeDevices:
    """Return the devices of this node, or none if its instances need none."""
    if any(is_auto(item.config) or any(map(is_gpu, item.config.devices)) for item in own):
        return look()
    return NodeDevices((), "no instance needs one")


def on_cpus(topology: Topology) -> Topology:
    """Return the topology with all instances whose devices are `auto` on CPUs."""
    autos = [item for item in groups(topology) if is_auto(item.config)]
    return with_shares(topology, DeviceAssignment({item.key: (CPU,) * item.config.num_devices for item in autos}, ()))


def with_shares(topology: Topology, shares: DeviceAssignment) -> Topology:
    """Return the topology with the devices of `shares`."""
    return with_instances(
        topology,
        lambda item: msgspec.structs.replace(item.config, devices=shares.devices.get(item.key, item.config.devices)),
    )
