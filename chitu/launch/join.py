"""`chitu join decode`: adds an instance to a running cluster, on this machine or another. Blocking; main thread.

The router reports the topology (`GET /admin/topology`) and the present instances. The new one gets the next free rank
and the settings of the first of its role, or the default ones if the topology has none. If several join at once, the
router accepts one for each rank, and the others try the next. From then on it behaves as a node of a topology file that
has it (`chitu node`): it loads, joins, and runs until a signal, its death or `chitu drain`.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from chitu.config.devices import is_gpu
from chitu.config.load import dump_topology
from chitu.config.schema import AUTO_DEVICES, InstanceConfig, RouterConfig, Topology
from chitu.config.topology import (
    SECTIONS,
    find_instance,
    host_names,
    instances,
    is_loopback,
    routers,
    same_host,
    with_router,
)
from chitu.errors import ConfigError, RankTaken
from chitu.launch.display import tell
from chitu.launch.host import NodeOptions, run_node
from chitu.launch.plan import Entries
from chitu.launch.router_calls import credential, known_key
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.net.curve import MAX_SOCKETS
from chitu.process.logs import STDOUT
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.types import Role, instance_name

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class JoinOptions:
    url: str
    role: Role
    rank: int | None = None
    """Rank; None: the lowest that no instance has, even one that is down."""
    devices: tuple[str, ...] = ()
    """Devices, one for each rank; empty: those of the first instance of this role, or `auto`."""
    log_dir: str | None = None
    ready_timeout_s: float = 600.0
    entries: Entries = field(default_factory=Entries)


def join(options: JoinOptions, overrides: Sequence[str]) -> int:
    """Run the instance and return a node's exit code: 0 after a signal or a drain, 1 if it died or was not ready in
    time.

    The router may start later, within `ready_timeout_s`: containers start in any order.

    If two processes request the same rank at once, the later gets the next one, unless its options name the rank.

    Raise ConfigError and the errors of `RouterClient` before anything starts; RankTaken.
    """
    client = RouterClient(options.url, credential(options.url))
    _wait_for(client, options.ready_timeout_s)
    tried: set[int] = set()
    while True:
        known = client.cluster().instances
        rank = options.rank if options.rank is not None else next_rank(known, options.role, tried)
        tried.add(rank)
        try:
            return _join_as(rank, options, overrides, client.topology(), known, client.url)
        except RankTaken:
            if options.rank is not None:
                raise
            tell(f"another process has joined as {instance_name(options.role, rank)} meanwhile: the next rank is tried")


def _wait_for(client: RouterClient, timeout_s: float) -> None:
    """Return once the router answers. Raise RouterUnreachable after `timeout_s`, or for a name that none can have."""
    end_s, was_told = time.monotonic() + timeout_s, False
    while True:
        try:
            client.cluster()
            return
        except RouterUnreachable as error:
            if isinstance(error.__cause__, UnicodeError) or time.monotonic() > end_s:
                raise
            if not was_told:
                tell(f"{error.message}; trying again for {timeout_s:g} s (--ready-timeout)")
            was_told = True
        time.sleep(RETRY_S)


def _join_as(
    rank: int,
    options: JoinOptions,
    overrides: Sequence[str],
    topology: Topology,
    known: Sequence[InstanceSnapshot],
    url: str,
) -> int:
    topology = by_name(topology, url)
    topology = grown(topology, known, options.role, rank, own_address(routers(topology)), options.devices)
    with tempfile.TemporaryDirectory(prefix="chitu-join-") as folder:
        file = Path(folder) / "topology.yaml"
        file.write_text(dump_topology(topology), encoding="utf-8")
        node = NodeOptions(
            hosts=None,
            index=_host_index(topology, options.role, rank),
            only=instance_name(options.role, rank),
            url=url,
            cluster_key=known_key(options.url),
            ready_timeout_s=options.ready_timeout_s,
            log_dir=options.log_dir,
            entries=options.entries,
        )
        return run_node(str(file), overrides, node)


def by_name(topology: Topology, url: str) -> Topology:
    """Return the topology with the name in `url` in place of the router's address, if the name stands for that address:
    a router that starts again elsewhere under the same name is found again."""
    name = urlsplit(url).hostname or ""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        if not is_loopback(name) and topology.dp_config.router.host in {address[4][0] for address in found}:
            return with_router(topology, host=name)
    return topology


def next_rank(known: Sequence[InstanceSnapshot], role: Role, tried: Container[int] = ()) -> int:
    """Return the lowest rank that was not tried, and that no instance of this role has, even one that is down."""
    names = {instance.name for instance in known}
    return next(rank for rank in count() if rank not in tried and instance_name(role, rank) not in names)


def grown(
    topology: Topology,
    known: Sequence[InstanceSnapshot],
    role: Role,
    rank: int,
    host: str,
    devices: Sequence[str] = (),
) -> Topology:
    """Return the topology with the instances that have joined since, and with instance `rank` of `role` on `host`.

    If the first of the role has GPUs, the new one's launcher chooses its own (`auto`). Members of groups are listed as
    instances of their own: the new one is in no group.

    Where the topology has none of a role, its instances have the defaults of their keys.

    Raise ConfigError if that instance already runs.
    """
    if not 0 <= rank < MAX_SOCKETS:  # a topology lists every rank below, and the router has a socket for each instance
        raise ConfigError(f"the rank {rank} is not from 0 to {MAX_SOCKETS - 1}")
    if any(item.name == instance_name(role, rank) and item.status != "down" for item in known):
        raise ConfigError(f"{instance_name(role, rank)} is in the cluster: drain it first, or give another --rank")
    places = {(item.role, int(item.name[1:])): item.host for item in known} | {(str(role), rank): host}
    sections = {}
    for each, section in SECTIONS.items():
        members = [member.config for member in instances(topology) if member.role is each]
        configs: list[InstanceConfig] = [
            msgspec.structs.replace(config, dp_size=1, hosts=(), rendezvous_port=0) for config in members
        ]
        size = max((number + 1 for kind, number in places if kind == str(each)), default=0)
        like = configs[0] if configs else InstanceConfig(host=topology.dp_config.router.host)
        for number in range(len(configs), size):
            place = places.get((str(each), number)) or like.host
            devices_of = AUTO_DEVICES if any(map(is_gpu, like.devices)) else like.devices
            configs.append(msgspec.structs.replace(like, host=place, port=0, devices=devices_of))
        sections[section] = configs
    new = msgspec.structs.replace(sections[SECTIONS[role]][rank], host=host, port=0)
    if devices:
        new = msgspec.structs.replace(new, devices=tuple(devices), tp_size=len(devices))
    sections[SECTIONS[role]][rank] = new
    lists = {section: tuple(configs) for section, configs in sections.items()}
    # The key is a port for one process, if the first instance was started by hand.
    dp_config = msgspec.structs.replace(topology.dp_config, scheduler_base_port=None)
    # A folder is one of the router's machine.
    log = msgspec.structs.replace(topology.log, dir=STDOUT if topology.log.dir == STDOUT else None)
    return with_router(msgspec.structs.replace(topology, dp_config=dp_config, log=log), **lists)


def _host_index(topology: Topology, role: Role, rank: int) -> int:
    host = find_instance(topology, role, rank).config.host
    return host_names(topology).index(same_host(host))


def own_address(known: Sequence[RouterConfig]) -> str:
    """Return this machine's address towards the first of these routers whose coordination port it reaches, as another
    one may be about to start again. Raise ConfigError, of the first one's, if it reaches none."""
    errors = []
    for router in known:
        try:
            return _address_towards(router)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _address_towards(router: RouterConfig) -> str:
    host, port = router.host, router.pd_disaggregation.coordination_port
    try:
        with contextlib.closing(socket.create_connection((host, port), CONNECT_TIMEOUT_S)) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        hint = ""
        if is_loopback(host):
            hint = (
                "; the cluster accepts only instances on its own machine: start it by `chitu node`, with addresses "
                "that others can reach"
            )
        raise ConfigError(f"the router's coordination port, {host}:{port}, cannot be reached: {error}{hint}") from error
