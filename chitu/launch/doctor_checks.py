"""Checks of a node, or of a cluster of nodes, by the facts gathered there (`node_facts.py`). Pure.

Each check is a function of facts that yields findings; `check_node` and `check_cluster` run all of them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chitu.config.schema import Topology
from chitu.config.topology import Instance, host_names, instances_on, is_loopback
from chitu.engine.memory_budget import GIB
from chitu.errors import ConfigError
from chitu.launch.node_facts import LIBRARIES, NodeFacts
from chitu.launch.preflight import (
    MOONCAKE_WITH_CUDA,
    Finding,
    Level,
    cure_of_missing,
    gpu_transfer_findings,
    memory_findings,
    model_findings,
    port_findings,
)
from chitu.models.config import ModelSpec
from chitu.net.rdma_devices import choose_protocol, why_no_rdma
from chitu.process.node_devices import VISIBLE
from chitu.process.placement import (
    KEY,
    PD,
    DeviceAssignment,
    assign_devices,
    describe,
    has_gpus,
    needed_library,
    with_shares,
)
from chitu.types import Role

PYTHONS = ((3, 11), (3, 14))
MEMLOCK_BYTES = 1 << 30
"""Limit of pinned memory that is enough; less is an unchanged default, and RDMA pins the whole pool."""
MAX_SKEW_S = 1.0
"""Tolerated difference of clocks. No protocol needs them to agree; a comparison of logs does."""


def check_node(topology: Topology, spec: ModelSpec | None, facts: NodeFacts) -> list[Finding]:
    """Return the findings of one node. `spec` is the model's; None if it cannot be read."""
    found = [*python(facts), *libraries(topology, facts), *compiler(facts)]
    try:
        shares = assign_devices(topology, instances_on(topology, facts.host), facts.devices)
    except ConfigError as error:
        found.append(Finding(Level.ERROR, "devices", error.message))
    else:
        topology = with_shares(topology, shares)
        found += devices(instances_on(topology, facts.host), facts, shares)
        if any(item.role is not Role.UNIFIED for item in instances_on(topology, facts.host)):
            found += gpu_transfer_findings(topology, _protocol(topology, facts), facts.libraries)
    here = instances_on(topology, facts.host)
    found += [*driver(facts), *rdma(topology, facts), *memlock(topology, facts), *shared_memory(facts)]
    found += port_findings(facts.binds)
    if facts.model.path:
        found += model_findings(facts.model)
    found += master_address(topology, facts)
    if spec is not None:
        cards = {k: card.memory_bytes for k, card in enumerate(facts.devices.devices) if card.memory_bytes}
        found += memory_findings(topology, spec, here, facts.available_bytes, facts.num_weights, cards)
    return found


def check_cluster(topology: Topology, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return the findings that concern several nodes together."""
    if len(nodes) < 2:
        return []
    found = [*absent(topology, nodes), *reachability(nodes), *unlike_nodes(topology, nodes), *same_model(nodes)]
    return [*found, *same_versions(nodes), *clocks(nodes)]


# ---------------------------------------------------------------------------------------------------------- of one node


def python(facts: NodeFacts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if PYTHONS[0] <= facts.python[:2] <= PYTHONS[1]:
        yield Finding(Level.OK, "python", version)
    else:
        yield Finding(Level.ERROR, "python", version, "3.11 to 3.14 is needed: make .venv with one of them")


def libraries(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    """Check the libraries. A missing extra is reported by its name; one that the topology needs is an error."""
    wanted = {needed_library(topology)}
    groups: dict[str, list[str]] = {}
    for name, extra in LIBRARIES.items():
        groups.setdefault(extra or name, []).append(name)
    for group, names in groups.items():
        present = [f"{name} {facts.libraries[name]}" for name in names if name in facts.libraries]
        if present:
            detail = f", built for CUDA {facts.torch_cuda}" if group == "torch" and facts.torch_cuda else ""
            yield Finding(Level.OK, group, ", ".join(present) + detail)
        elif LIBRARIES.get(group) == "":
            yield Finding(Level.ERROR, group, f"{group} is not installed", "script/setup.sh, or pip install -e .")
        else:
            is_useful = group.startswith("gpu") and bool(facts.devices.devices)
            level = Level.ERROR if group in wanted else Level.WARNING if is_useful else Level.OK
            cure = f"{cure_of_missing(group, facts.python)}, where it is wanted"
            yield Finding(level, group, f"the extra {group} is not installed", cure)
    if facts.missing_shared and any("mooncake" in name for name in facts.libraries):
        level = Level.ERROR if "mooncake" in wanted else Level.WARNING
        packages = " ".join(facts.missing_shared)
        of_cuda = not set(MOONCAKE_WITH_CUDA).isdisjoint(facts.libraries)
        other = "; without a GPU, install the extra mooncake in its place" if of_cuda else ""
        yield Finding(level, "mooncake", f"its wheel lacks {packages}", f"apt-get install {packages}{other}")


def compiler(facts: NodeFacts) -> Iterator[Finding]:
    """Check the C compiler: CPU kernels are compiled at the first start, and Triton's launchers on a GPU."""
    if not facts.compiler:
        level = Level.ERROR if facts.devices.devices else Level.WARNING
        says = "there is no C compiler: Triton cannot work, and on CPUs torch computes, several times slower"
        yield Finding(level, "C compiler", says, "apt-get install gcc libc6-dev")
    elif facts.devices.devices and not facts.has_python_header:
        says = f"{facts.compiler} is there, but Python.h, which Triton's launchers need, is not"
        yield Finding(Level.ERROR, "C compiler", says, "install Python's headers (Debian: python3-dev)")
    else:
        yield Finding(Level.OK, "C compiler", facts.compiler)


def devices(here: Sequence[Instance], facts: NodeFacts, shares: DeviceAssignment) -> Iterator[Finding]:
    """Report the devices of each instance, as the launcher will assign them."""
    cards = ", ".join(
        f"{d.name or 'GPU'} {d.token}" + (f" ({d.memory_bytes / GIB:.0f} GiB)" if d.memory_bytes else "")
        for d in facts.devices.devices
    )
    plan = describe(here, facts.devices) if here else "no instance is on this node"
    yield Finding(Level.OK, "devices", f"{cards or 'no GPU'} ({facts.devices.source}): {plan}")
    for note in shares.notes:
        yield Finding(Level.WARNING if cards or facts.devices.problem else Level.OK, "devices", note)


def driver(facts: NodeFacts) -> Iterator[Finding]:
    if not facts.devices.devices:
        return
    if not facts.driver_cuda or not facts.torch_cuda:
        return
    says = f"driver {facts.driver} takes CUDA {facts.driver_cuda}; torch is built for {facts.torch_cuda}"
    if _numbers(facts.torch_cuda)[0] > _numbers(facts.driver_cuda)[0]:
        cure = "update the driver, or install torch for an older CUDA"
        yield Finding(Level.ERROR, "driver", says, cure)
    else:
        yield Finding(Level.OK, "driver", says)


def rdma(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    """Report RDMA devices and their state; if Mooncake carries KV, the protocol it will use here, and why not RDMA."""
    pd = topology.dp_config.router.pd_disaggregation
    says = ", ".join(f"{name} {state}" for name, state in facts.rdma.devices.items()) or "no RDMA device"
    reason = why_no_rdma(facts.rdma, pd.ib_device, has_gpus(topology))
    if needed_library(topology) != "mooncake" or pd.mooncake_protocol == "tcp":
        yield Finding(Level.OK, "RDMA", f"{says}; not needed")
    elif not reason:
        yield Finding(Level.OK, "RDMA", f"{says}; Mooncake uses it")
    elif pd.mooncake_protocol == "rdma":
        yield Finding(Level.ERROR, "RDMA", f"RDMA is configured, but {reason}", f"{_rdma_cure(facts)}, or {KEY}=tcp")
    elif facts.rdma.devices:
        yield Finding(Level.WARNING, "RDMA", f"KV goes over TCP: {reason}", _rdma_cure(facts))
    else:
        yield Finding(Level.OK, "RDMA", f"KV goes over TCP: {reason}")


def _protocol(topology: Topology, facts: NodeFacts) -> str:
    return choose_protocol(topology.dp_config.router.pd_disaggregation, facts.rdma, has_gpus(topology))[0]


def _rdma_cure(facts: NodeFacts) -> str:
    if not facts.rdma.active:
        return "bring a link up (ibstat)"
    cure = "" if facts.rdma.gpu_direct else "modprobe nvidia-peermem, or install the open kernel module; "
    return f"{cure}{PD}.ib_device may name {', '.join(facts.rdma.active)}"


def memlock(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    limit = facts.memlock_bytes
    if limit < 0 or limit >= MEMLOCK_BYTES:
        yield Finding(Level.OK, "memlock", "unlimited" if limit < 0 else f"{limit / GIB:.1f} GiB")
        return
    is_mooncake = needed_library(topology) == "mooncake"
    is_taken = is_mooncake and _protocol(topology, facts) == "rdma"
    level = Level.ERROR if is_taken else Level.OK
    cure = "ulimit -l unlimited (limits.conf; under Slurm PropagateResourceLimits)" if is_taken else ""
    yield Finding(level, "memlock", f"{limit / 2**20:g} MiB may be pinned; RDMA pins the whole KV pool", cure)


def shared_memory(facts: NodeFacts) -> Iterator[Finding]:
    if facts.shared_memory_error:
        says = f"memfd_create does not work ({facts.shared_memory_error}): no KV pool on CPUs, no transport shm"
        yield Finding(Level.ERROR, "memory", says, "allow memfd_create in the container's seccomp profile")
    else:
        yield Finding(Level.OK, "memory", f"{facts.available_bytes / GIB:.1f} GiB are free; memfd works")


def master_address(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    hosts, address = host_names(topology), facts.master_addr
    if not address or len(hosts) < 2:
        return
    router = topology.dp_config.router.host
    if is_loopback(address):
        says = f"PD_MASTER_ADDR is the loopback address {address}, but the topology has {len(hosts)} hosts"
        yield Finding(Level.ERROR, "PD_MASTER_ADDR", says, f"set it to the router's address, {router}")
    elif address != router:
        says = f"PD_MASTER_ADDR is {address}, and the topology has its router on {router}"
        yield Finding(Level.WARNING, "PD_MASTER_ADDR", says, "unset it, unless both are the same machine")


# -------------------------------------------------------------------------------------------------------- of a cluster


def absent(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for host in host_names(topology):
        if host not in {node.host for node in nodes}:
            yield Finding(
                Level.ERROR,
                host,
                f"the node {host} has not reported",
                "run chitu doctor there at the same time, with its --node-index; look for a firewall",
            )


def reachability(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        for why in node.unreachable:
            cure = "open the port between the nodes, or give the address of a network that both have"
            yield Finding(Level.ERROR, "reachability", f"{node.host} does not reach {why}", cure)
    if not any(node.unreachable for node in nodes):
        yield Finding(Level.OK, "reachability", f"{len(nodes)} nodes reach each other's ports")


def unlike_nodes(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that the launchers choose the same kind of device and protocol, since the router refuses unlike P and D."""
    memory: dict[str, list[str]] = {}
    protocols: dict[str, list[str]] = {}
    for node in nodes:
        paired = [item for item in instances_on(topology, node.host) if item.role is not Role.UNIFIED]
        try:
            shared = with_shares(topology, assign_devices(topology, instances_on(topology, node.host), node.devices))
        except ConfigError:
            continue  # `check_node` reports it
        if paired:
            memory.setdefault("GPUs" if has_gpus(shared) else "CPUs", []).append(node.host)
            protocols.setdefault(_protocol(shared, node), []).append(node.host)
    if len(memory) > 1:
        says = "; ".join(f"{kind} on {', '.join(hosts)}" for kind, hosts in memory.items())
        cure = f"give all of them GPUs, or have all serve on CPUs with {VISIBLE}= (empty)"
        yield Finding(Level.ERROR, "devices", f"P and D need the same kind of device, and have {says}", cure)
    elif len(protocols) > 1 and needed_library(topology) == "mooncake":
        says = "; ".join(f"{protocol} on {', '.join(hosts)}" for protocol, hosts in protocols.items())
        cure = f"fix RDMA on the nodes without it, or {KEY}=tcp"
        yield Finding(Level.ERROR, "RDMA", f"Mooncake would use {says}, which do not reach each other", cure)


def same_model(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    hashes = {node.host: node.model.hash for node in nodes if node.model.hash}
    if len(set(hashes.values())) > 1:
        says = ", ".join(f"{host} has {value[:8]}" for host, value in hashes.items())
        cure = "put the same checkpoint at this path on all of them"
        yield Finding(Level.ERROR, "model", f"the nodes have different models at the same path: {says}", cure)
    elif hashes:
        yield Finding(Level.OK, "model", f"the same on {len(hashes)} nodes")


def same_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for name in ("torch", "pyzmq", "msgspec", "mooncake-transfer-engine", "nixl", "triton"):
        versions = {node.host: node.libraries[name] for node in nodes if name in node.libraries}
        if len(set(versions.values())) > 1:
            says = ", ".join(f"{host} has {version}" for host, version in versions.items())
            yield Finding(Level.WARNING, name, f"versions differ: {says}", "make all of .venv by one constraints file")


def clocks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        ahead_s = node.clock_ahead_s
        if ahead_s is not None and abs(ahead_s) > MAX_SKEW_S:
            says = f"the clock of {node.host} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
            yield Finding(Level.WARNING, "clock", says, "run chrony or ntpd: logs of the nodes cannot be put in order")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
