"""`chitu doctor`: checks whether this machine, or all nodes of a topology, can serve it. Called by the command line
only.

Alone it checks this machine as `chitu serve` would use it. With `--hosts` and a node index, which Slurm sets itself, it
runs on all nodes at once: they meet, and the router's node judges and prints. Every node exits with 0 without an error,
1 with one, 2 for a topology that cannot be read. A check is a pure function of facts (`node_facts.py`) that yields
findings; `check_node` and `check_cluster` run all of them in order.

*The meeting* is on the coordination port of the router's node. Each node first listens on all its free ports, so that
the ports tried are those that will be used, and sends its facts; then each node tries all others' ports. Messages are
lines of JSON; an invalid or too long line ends its connection. One thread, every wait bounded.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import msgspec

from chitu.config.devices import gpu_index, is_gpu
from chitu.config.load import load_topology, lws_hosts, pd_master_addr, slurm_node
from chitu.config.schema import PDDisaggregationConfig, Topology
from chitu.config.topology import (
    Group,
    Instance,
    bound_ports,
    family_of,
    groups,
    host_names,
    instances_on,
    is_loopback,
    on_one_host,
    parts_of,
    same_host,
)
from chitu.config.topology_checks import problems
from chitu.config.transport_env import transport_environment, ucx_limits
from chitu.engine.memory_budget import GIB
from chitu.errors import ConfigError, ServiceError
from chitu.known_types import known
from chitu.launch.addresses import address_problems, addresses_of
from chitu.launch.plan import host_overrides, launch_problems
from chitu.launch.preflight import (
    MOONCAKE_WITH_CUDA,
    Bind,
    Finding,
    Level,
    cure_of_missing,
    gpu_transfer_findings,
    look_at_model,
    memory_findings,
    model_findings,
    port_findings,
)
from chitu.launch.slurm import expand_nodelist
from chitu.models.config import ModelSpec
from chitu.net.rdma_devices import (
    Rdma,
    automatic_gid,
    choose_for_ucx,
    choose_protocol,
    seen_by_ucx,
    used,
    why_no_rdma,
)
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
from chitu.tools.node_facts import LIBRARIES, NodeFacts, gather
from chitu.types import Role

MAX_LINE_BYTES = 1 << 20
TRY_S = 3.0
"""Timeout of a connection to one port of another node."""
RETRY_S = 0.2

Address = tuple[str, int]
_T = TypeVar("_T", bound=msgspec.Struct)
PYTHONS = ((3, 11), (3, 14))
MEMLOCK_BYTES = 1 << 30
"""Limit of pinned memory that is enough; less is an unchanged default, and RDMA pins the whole pool."""
MAX_SKEW_S = 1.0
"""Tolerated difference of clocks. No protocol needs them to agree; a comparison of logs does."""
WAIT_S = 30.0
"""Time to wait for the other nodes."""
MARKS = {Level.OK: "ok   ", Level.WARNING: "WARN ", Level.ERROR: "ERROR"}


class NotMet(ServiceError):
    """The router's node cannot be reached, or the connection broke."""

    code = "not_met"


class Hello(msgspec.Struct, frozen=True):
    facts: NodeFacts


class Targets(msgspec.Struct, frozen=True):
    """Addresses that a node is to try."""

    addresses: tuple[Address, ...]


class Tried(msgspec.Struct, frozen=True):
    unreachable: tuple[str, ...]
    now_s: float
    """Time of the node's wall clock."""


class Verdict(msgspec.Struct, frozen=True):
    code: int
    """Exit code of every node."""


def hold(binds: Sequence[Bind]) -> dict[int, socket.socket]:
    """Return listening sockets at the free addresses, by port. The caller closes them at the end."""
    held = {}
    for bind in binds:
        if not bind.error and bind.port not in held:
            with contextlib.suppress(OSError):
                held[bind.port] = socket.create_server((bind.host, bind.port), family=family_of(bind.host))
    return held


def try_all(addresses: Sequence[Address]) -> tuple[str, ...]:
    """Return `HOST:PORT: why` for each address that accepts no connection."""

    def why_not(address: Address) -> str:
        try:
            socket.create_connection(address, timeout=TRY_S).close()
        except OSError as error:
            return f"{address[0]}:{address[1]}: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(16) as pool:
        return tuple(filter(None, pool.map(why_not, addresses)))


class Lead:
    """The router's node in the meeting. Call `gather`, then `dismiss`."""

    def __init__(self, listener: socket.socket, wait_s: float) -> None:
        self._listener = listener
        self._wait_s = wait_s
        self._members: dict[str, socket.socket] = {}

    def gather(self, own: NodeFacts, ports: Mapping[str, Sequence[int]]) -> list[NodeFacts]:
        """Return the facts of all nodes that report within `wait_s`. `ports` has the ports to try, by host."""
        facts = {own.host: own}
        end_s = time.monotonic() + self._wait_s
        while len(facts) < len(ports) and (left_s := end_s - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            with contextlib.suppress(OSError, NotMet):
                member, _ = self._listener.accept()
                member.settimeout(TRY_S)
                hello = _receive(member, Hello).facts
                if hello.host in ports:
                    facts[hello.host], self._members[hello.host] = hello, member
        free = {host: {bind.port for bind in node.binds if not bind.error} for host, node in facts.items()}
        targets = {
            host: [(other, port) for other in facts if other != host for port in ports[other] if port in free[other]]
            for host in facts
        }
        for host, member in self._members.items():
            with contextlib.suppress(OSError):
                _send(member, Targets(tuple(targets[host])))
        facts[own.host] = msgspec.structs.replace(own, unreachable=try_all(targets[own.host]), clock_ahead_s=0.0)
        for host, member in self._members.items():
            member.settimeout(self._wait_s + TRY_S)
            with contextlib.suppress(OSError, NotMet):
                tried = _receive(member, Tried)
                facts[host] = msgspec.structs.replace(
                    facts[host], unreachable=tried.unreachable, clock_ahead_s=tried.now_s - time.time()
                )
        return [facts[host] for host in ports if host in facts]

    def dismiss(self, code: int) -> None:
        """Send all nodes this exit code and close their connections."""
        for member in self._members.values():
            with contextlib.suppress(OSError):
                _send(member, Verdict(code))
            member.close()


def follow(leader: Address, facts: NodeFacts, wait_s: float) -> int:
    """Run another node's part and return the common exit code. Raise NotMet."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            connection = socket.create_connection(leader, timeout=TRY_S)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise NotMet(
                    f"{facts.host} does not reach the router's node at {leader[0]}:{leader[1]}: "
                    f"{error.strerror or error} (is `chitu doctor` running there, is there a firewall?)"
                ) from error
            time.sleep(RETRY_S)
    with connection:
        connection.settimeout(2 * wait_s + TRY_S)
        try:
            _send(connection, Hello(facts))
            unreachable = try_all(_receive(connection, Targets).addresses)
            _send(connection, Tried(unreachable, time.time()))
            return _receive(connection, Verdict).code
        except OSError as error:
            raise NotMet(f"the connection to the router's node at {leader[0]}:{leader[1]} broke: {error}") from error


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(msgspec.json.encode(message) + b"\n")


def _receive(connection: socket.socket, kind: type[_T]) -> _T:
    """Return the next message. Raise NotMet for a line that is no such message."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        line += data
        if not data or len(line) > MAX_LINE_BYTES:
            raise NotMet("the other side closed the connection, or sent too long a line")
    try:
        return msgspec.json.decode(line, type=known(kind))
    except msgspec.DecodeError as error:
        raise NotMet(f"the other side sent a line that is no message of `chitu doctor`: {error}") from error


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
    found += [
        *driver(facts),
        *rdma(topology, facts),
        *open_ports(topology),
        *memlock(topology, facts),
        *shared_memory(facts),
    ]
    found += port_findings(facts.binds)
    if facts.model.path:
        found += model_findings(facts.model)
    found += master_address(topology, facts)
    if spec is not None:
        cards = {k: card.memory_bytes for k, card in enumerate(facts.devices.devices) if card.memory_bytes}
        found += memory_findings(topology, spec, here, facts.available_bytes, facts.weights, cards)
    return found


def check_cluster(topology: Topology, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return the findings that concern several nodes together."""
    if len(nodes) < 2:
        return []
    found = [*absent(topology, nodes), *reachability(nodes), *unlike_nodes(topology, nodes)]
    found += [*unlike_parts(topology, nodes), *same_model(nodes)]
    return [*found, *same_versions(topology, nodes), *clocks(nodes)]


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
            cure = f"{cure_of_missing(group, facts.python)}, if it is needed"
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
    says = f"driver {facts.driver} supports CUDA {facts.driver_cuda}; torch is built for {facts.torch_cuda}"
    if _numbers(facts.torch_cuda)[0] > _numbers(facts.driver_cuda)[0]:
        cure = "update the driver, or install torch for an older CUDA"
        yield Finding(Level.ERROR, "driver", says, cure)
    else:
        yield Finding(Level.OK, "driver", says)


def rdma(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    """Report RDMA devices and their state; if a library carries KV, what it will use here, and why not RDMA."""
    pd, library = topology.dp_config.router.pd_disaggregation, needed_library(topology)
    found = seen_by_ucx(facts.rdma) if library == "nixl" else facts.rdma
    says = ", ".join(f"{name} {state}" for name, state in found.devices.items()) or "no RDMA device"
    reason = why_no_rdma(found, pd.ib_device, has_gpus(topology))
    is_required = library == "mooncake" and pd.mooncake_protocol == "rdma"
    if not library or (library == "mooncake" and pd.mooncake_protocol == "tcp"):
        yield Finding(Level.OK, "RDMA", f"{says}; not needed")
    elif library == "nixl" and (limits := ucx_limits(transport_environment(pd))):
        yield Finding(Level.OK, "RDMA", f"{says}; nixl {choose_for_ucx((), found, False, limits)}")
    elif not reason:
        yield Finding(Level.OK, "RDMA", f"{says}; {library} uses {', '.join(used(found, pd.ib_device))}")
        yield from gids(pd, found, library)
    elif is_required:
        yield Finding(Level.ERROR, "RDMA", f"RDMA is configured, but {reason}", f"{_rdma_cure(found)}, or {KEY}=tcp")
    elif found.devices:
        yield Finding(Level.WARNING, "RDMA", f"KV goes over TCP: {reason}", _rdma_cure(found))
    else:
        yield Finding(Level.OK, "RDMA", f"KV goes over TCP: {reason}")


def open_ports(topology: Topology) -> Iterator[Finding]:
    """Name the ports that no key protects, of a cluster of several hosts."""
    library = needed_library(topology)
    if library and len(host_names(topology)) > 1:
        says = f"whoever reaches {library}'s ports can write KV, with or without a cluster key"
        yield Finding(Level.OK, "network", f"{says}: close them and the RDMA network to others (docs/security.md)")


def gids(pd: PDDisaggregationConfig, found: Rdma, library: str) -> Iterator[Finding]:
    """List the addresses of each device that will be used, with the one that will be taken."""
    for name in used(found, pd.ib_device):
        there = found.gids.get(name, ())
        taken = automatic_gid(there, library) if pd.gid_index is None else pd.gid_index
        says = "; ".join(
            f"{gid.index} {gid.address} ({', '.join(filter(None, (gid.kind, gid.network)))})"
            + (" is taken" if gid.index == taken else "")
            for gid in there
        )
        if there and taken not in {gid.index for gid in there}:
            cure = f"set {PD}.gid_index to one that all nodes have, or leave it out"
            yield Finding(Level.ERROR, "RDMA", f"{name} has no GID {taken}, which {PD}.gid_index names: {says}", cure)
        elif there:
            yield Finding(Level.OK, "RDMA", f"GIDs of {name}: {says}")


def _protocol(topology: Topology, facts: NodeFacts) -> str:
    return choose_protocol(topology.dp_config.router.pd_disaggregation, facts.rdma, has_gpus(topology))[0]


def _rdma_cure(found: Rdma) -> str:
    if found.without_driver and not found.active:
        return "apt-get install libibverbs1 ibverbs-providers"
    if not found.active:
        return "bring a link up (ibstat)"
    cure = "" if found.gpu_direct else "modprobe nvidia-peermem, or install the open kernel module; "
    return f"{cure}{PD}.ib_device may name {', '.join(found.active)}"


def memlock(topology: Topology, facts: NodeFacts) -> Iterator[Finding]:
    limit = facts.memlock_bytes
    if limit < 0 or limit >= MEMLOCK_BYTES:
        yield Finding(Level.OK, "memlock", "unlimited" if limit < 0 else f"{limit / GIB:.1f} GiB")
        return
    pd, library = topology.dp_config.router.pd_disaggregation, needed_library(topology)
    is_taken = library == "mooncake" and _protocol(topology, facts) == "rdma"
    if library == "nixl":
        limits = ucx_limits(transport_environment(pd))
        is_taken = choose_for_ucx(pd.ib_device, facts.rdma, has_gpus(topology), limits).startswith("over rdma")
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
                "run chitu doctor there at the same time, with its --node-index; check the firewall",
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
        yield Finding(Level.ERROR, "devices", f"P and D need the same kind of device, but have {says}", cure)
    elif len(protocols) > 1 and needed_library(topology) == "mooncake":
        says = "; ".join(f"{protocol} on {', '.join(hosts)}" for protocol, hosts in protocols.items())
        cure = f"fix RDMA on the nodes without it, or {KEY}=tcp"
        yield Finding(Level.ERROR, "RDMA", f"Mooncake would use {says}, which do not reach each other", cure)


def unlike_parts(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that the parts of each group of several hosts have equal cards, since its members share the work evenly."""
    for group in (group for group in groups(topology) if group.is_part):
        cards = {}
        for node in (node for node in nodes if node.host in map(same_host, group.config.hosts)):
            with contextlib.suppress(ConfigError):  # `check_node` reports it
                cards[node.host] = _cards(topology, group, node)
        if len(set(cards.values())) > 1:
            says = "; ".join(f"{what} on {host}" for host, what in cards.items())
            level = Level.ERROR if "CPUs" in cards.values() else Level.WARNING
            cure = "give all hosts of the group the same: the slowest card sets the pace, the smallest the room"
            yield Finding(level, group.name, f"its parts have unlike cards: {says}", cure)
        elif len(cards) > 1:
            yield Finding(Level.OK, group.name, f"{next(iter(cards.values()))} on each of {len(cards)} hosts")


def _cards(topology: Topology, group: Group, node: NodeFacts) -> str:
    """Return the devices of a node for its part of a group."""
    own = instances_on(topology, node.host)
    shared = with_shares(topology, assign_devices(topology, own, node.devices))
    names = [
        name
        for part in parts_of(shared, instances_on(shared, node.host))
        if part.key == group.key
        for name in part.config.devices
    ]
    cards = [node.devices.devices[gpu_index(name)] for name in names if is_gpu(name)]
    words = Counter(f"{card.name or 'GPU'} ({(card.memory_bytes or 0) / GIB:.0f} GiB)" for card in cards)
    return ", ".join(f"{count} x {what}" for what, count in sorted(words.items())) or "CPUs"


def same_model(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    hashes = {node.host: node.model.hash for node in nodes if node.model.hash}
    if len(set(hashes.values())) > 1:
        says = ", ".join(f"{host} has {value[:8]}" for host, value in hashes.items())
        cure = "put the same checkpoint at this path on all of them"
        yield Finding(Level.ERROR, "model", f"the nodes have different models at the same path: {says}", cure)
    elif hashes:
        yield Finding(Level.OK, "model", f"the same on {len(hashes)} nodes")
    of_images = {node.host: node.model.images for node in nodes if node.model.images}
    if len(set(of_images.values())) > 1:
        says = ", ".join(f"{host} has {value[:8]}" for host, value in of_images.items())
        cure = "use one preprocessor_config.json, and the same versions of transformers and pillow"
        yield Finding(Level.ERROR, "images", f"the nodes would make other patches of an image: {says}", cure)


def same_versions(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for name in ("torch", "transformers", "pillow", "pyzmq", "msgspec", "mooncake-transfer-engine", "nixl", "triton"):
        versions = {node.host: node.libraries[name] for node in nodes if name in node.libraries}
        if len(set(versions.values())) > 1:
            says = ", ".join(f"{host} has {version}" for host, version in versions.items())
            # The parts of a group refuse each other then.
            level = Level.ERROR if name == "torch" and any(g.is_part for g in groups(topology)) else Level.WARNING
            yield Finding(level, name, f"versions differ: {says}", "make all of .venv by one constraints file")


def clocks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        ahead_s = node.clock_ahead_s
        if ahead_s is not None and abs(ahead_s) > MAX_SKEW_S:
            says = f"the clock of {node.host} is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
            yield Finding(Level.WARNING, "clock", says, "run chrony or ntpd: logs of the nodes cannot be put in order")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def doctor(name: str | None, overrides: Sequence[str], hosts: Sequence[str] | None, index: int | None) -> int:
    """Check and return the exit code. `hosts` replace the topology's; `index` is this node's index among them."""
    topology = load_topology(name, overrides)
    slurm = slurm_node()
    if slurm is not None and len(host_names(topology)) > 1:
        hosts = hosts or expand_nodelist(slurm[1])
        index = slurm[0] if index is None else index
    if hosts is None and len(host_names(topology)) > 1:
        hosts = lws_hosts()
    if hosts is None and index is None:
        elsewhere = [Finding(Level.WARNING, "hosts", problem) for problem in address_problems(topology)]
        topology = on_one_host(topology)
        return _report(topology, [gather(topology, topology.dp_config.router.host)], elsewhere)
    if hosts is not None:
        topology = load_topology(name, [*overrides, *host_overrides(topology, addresses_of(hosts))])
    names = host_names(topology)
    if index is None or not 0 <= index < len(names):
        raise ConfigError(
            f"run it on each of {', '.join(names)} at once, with --node-index 0 to {len(names) - 1} (srun gives that "
            "by itself)"
        )
    return _meet(topology, names, index)


def _meet(topology: Topology, names: Sequence[str], index: int) -> int:
    facts = gather(topology, names[index])
    meeting_port = topology.dp_config.router.pd_disaggregation.coordination_port
    held = hold(facts.binds)
    try:
        if index:
            try:
                return follow((topology.dp_config.router.host, meeting_port), facts, WAIT_S)
            except NotMet as error:
                _tell(Finding(Level.ERROR, "meeting", error.message))
                _report(topology, [facts])
                return 1
        if meeting_port not in held:
            return _report(topology, [facts])
        lead = Lead(held[meeting_port], WAIT_S)
        ports = {host: [port for _, where, port in bound_ports(topology) if port and where == host] for host in names}
        code = 1
        try:
            code = _report(topology, lead.gather(facts, ports))
        finally:
            lead.dismiss(code)
        return code
    finally:
        for listener in held.values():
            listener.close()


def _report(topology: Topology, nodes: Sequence[NodeFacts], more: Sequence[Finding] = ()) -> int:
    """Print all findings, and `more` about the topology. Return 1 if one is an error, else 0."""
    spec, _ = look_at_model(topology)
    code = 0
    sections = [("topology", [*_of_topology(topology, nodes), *more])]
    sections += [(_title(node), check_node(topology, spec, node)) for node in nodes]
    sections.append(("between the nodes", check_cluster(topology, nodes)))
    for title, findings in sections:
        if findings:
            print(title)
        for finding in findings:
            _tell(finding)
            code = max(code, finding.level is Level.ERROR)
    return int(code)


def _of_topology(topology: Topology, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    needs_model = bool(topology.model.path)
    found = chain(problems(topology, pd_master_addr(), need_model=needs_model), launch_problems(topology))
    for problem in found:
        yield Finding(Level.ERROR, "topology", problem)


def _title(node: NodeFacts) -> str:
    return node.host if node.name in ("", node.host) else f"{node.host} ({node.name})"


def _tell(finding: Finding) -> None:
    print(f"  {MARKS[finding.level]} {finding.what:16} {finding.says}")
    if finding.cure and finding.level is not Level.OK:
        print(f"        {'':16} cure: {finding.cure}")
