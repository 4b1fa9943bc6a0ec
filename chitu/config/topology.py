"""A topology as a whole: its instances, hosts, ports and threads. Pure: values in, values out. `topology_checks.py`
checks it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from chitu.config.schema import AUTO_DEVICES, InstanceConfig, RouterConfig, Section, Topology
from chitu.errors import ConfigError
from chitu.types import Role, instance_name

ALL_ADDRESSES = ("0.0.0.0", "::")
"""Addresses to listen on at all interfaces; no peer can connect to them."""
MAX_PORT = 65535

SECTIONS = {
    Role.PREFILL: "prefill_schedulers",
    Role.DECODE: "decode_schedulers",
    Role.UNIFIED: "unified_schedulers",
    Role.ENCODE: "encode_schedulers",
}
API_PORT = "dp_config.router.port"
EVENT_PORTS = ("kv_events_port", "kv_events_replay_port")
BODY_BYTES, BODY_BYTES_WITH_IMAGES = 2 << 20, 32 << 20
"""`router.max_body_bytes`, if it is unset, without and with a model that sees images."""
PORT_STEP = 2
"""Distance of the ports of two routers on one host."""


def max_body_bytes(router: RouterConfig, has_vision: bool) -> int:
    """Return the maximum body of one request."""
    if router.max_body_bytes is not None:
        return router.max_body_bytes
    return min(BODY_BYTES_WITH_IMAGES, router.max_total_body_bytes) if has_vision else BODY_BYTES


@dataclass(frozen=True, slots=True)
class Instance:
    """One member of the cluster: a torchrun of its own, or one data rank of a group. `key` is the path of its entry in
    the YAML."""

    role: Role
    engine_rank: int
    config: InstanceConfig
    """Configuration of its entry, with the host, the port and the devices of this member alone."""
    data_rank: int = 0
    """Its number in its group."""
    entry: int | None = None
    """Index of its entry in the list of its role; None: its engine rank."""

    @property
    def name(self) -> str:
        return instance_name(self.role, self.engine_rank)

    @property
    def place(self) -> int:
        """Its number among the members on its host."""
        return self.data_rank % self.config.members_per_host

    @property
    def key(self) -> str:
        return f"dp_config.router.{SECTIONS[self.role]}.{self.engine_rank if self.entry is None else self.entry}"

    @property
    def port_key(self) -> str:
        """Path of its port."""
        return self.key_of("port")

    def key_of(self, port: str) -> str:
        """Return the path of one of its ports; that of a further member names the distance."""
        return f"{self.key}.{port}" + (f" (+{self.data_rank})" if self.data_rank else "")


class Group(NamedTuple):
    """One entry of the YAML, with `dp_size` members, or the part of it that one host has: one torchrun."""

    first: Instance
    members: tuple[Instance, ...]
    config: InstanceConfig
    """The entry as it is, with the port of the first member and the devices of all. Of a part: with its host, and with
    the size and the devices of this part alone."""
    node_rank: int = 0
    """Number of a part's host among `hosts`."""

    @property
    def role(self) -> Role:
        return self.first.role

    @property
    def engine_rank(self) -> int:
        """That of the first member."""
        return self.first.engine_rank

    @property
    def key(self) -> str:
        return self.first.key

    @property
    def name(self) -> str:
        """`D0`, or `D0-D3` of several members."""
        return self.first.name if len(self.members) == 1 else f"{self.first.name}-{self.members[-1].name}"

    @property
    def is_part(self) -> bool:
        """Whether other hosts have other parts of it."""
        return len(self.config.hosts) > 1


def groups(topology: Topology) -> tuple[Group, ...]:
    """Return the entries of the topology, P first, in their order."""
    found = []
    for role in Role:
        rank = 0
        for entry, config in enumerate(getattr(topology.dp_config.router, SECTIONS[role])):
            members = tuple(
                Instance(role, rank + data_rank, _of_member(config, data_rank), data_rank, entry)
                for data_rank in range(config.dp_size)
            )
            found.append(Group(members[0], members, config))
            rank += config.dp_size
    return tuple(found)


def parts(topology: Topology) -> tuple[Group, ...]:
    """Return what each host has of each group, in the order of the topology: the torchruns of the cluster."""
    return tuple(part for group in groups(topology) for part in _parts_of(group))


def _parts_of(group: Group) -> Iterator[Group]:
    config, size = group.config, group.config.members_per_host
    if len(config.all_hosts) == 1:
        host = config.all_hosts[0]
        yield group if host == config.host else group._replace(config=msgspec.structs.replace(config, host=host))
        return
    for node_rank, host in enumerate(config.hosts):
        members = group.members[node_rank * size : (node_rank + 1) * size]
        if not members:  # the checks report it
            continue
        devices = _devices_of(config, node_rank * size, size)
        own = msgspec.structs.replace(config, host=host, dp_size=len(members), devices=devices)
        yield Group(members[0], members, own, node_rank)


def _of_member(config: InstanceConfig, data_rank: int) -> InstanceConfig:
    """Return an entry with the host, the port and the devices of one of its members."""
    hosts = config.all_hosts
    host = hosts[min(data_rank // config.members_per_host, len(hosts) - 1)]
    if config.dp_size == 1:
        return config if host == config.host else msgspec.structs.replace(config, host=host)
    devices = _devices_of(config, data_rank, 1)
    ports = {key: port + data_rank if (port := getattr(config, key)) else 0 for key in ("port", *EVENT_PORTS)}
    return msgspec.structs.replace(config, host=host, devices=devices, **ports)


def _devices_of(config: InstanceConfig, data_rank: int, num_members: int) -> tuple[str, ...]:
    """Return the devices of these members of an entry."""
    if len(config.devices) != config.num_devices or config.devices == AUTO_DEVICES:  # the checks report the first
        return config.devices
    return config.devices[data_rank * config.tp_size :][: num_members * config.tp_size]


def instances(topology: Topology) -> tuple[Instance, ...]:
    """Return P0, P1, ..., D0, ..., U0, ..., E0, ... in this order. The members of a group have consecutive ranks."""
    return tuple(member for group in groups(topology) for member in group.members)


def find_part(topology: Topology, name: str) -> Group:
    """Return the torchrun with this name (`D0-D1`), or with a member of this name (`D1`)."""
    for part in parts(topology):
        if name in (part.name, *(member.name for member in part.members)):
            return part
    raise ConfigError(f"the topology has no process {name!r}")


def process_of(topology: Topology, instance: Instance) -> str:
    """Return the name of the process that an instance is in."""
    return find_part(topology, instance.name).name


def places(router: RouterConfig) -> list[tuple[Role, int]]:
    """Return role and rank of each instance of the topology."""
    sizes = {role: sum(entry.dp_size for entry in getattr(router, SECTIONS[role])) for role in Role}
    return [(role, rank) for role, size in sizes.items() for rank in range(size)]


def parts_of(topology: Topology, members: Iterable[Instance]) -> list[Group]:
    """Return the torchruns of these members, in the order of the topology."""
    names = {member.name for member in members}
    return [part for part in parts(topology) if any(member.name in names for member in part.members)]


def find_instance(topology: Topology, role: Role, engine_rank: int) -> Instance:
    """Return the instance of a scheduler process, with `dp_config.scheduler_base_port` as its port if set, or with the
    next ones in a group."""
    for instance in instances(topology):
        if (instance.role, instance.engine_rank) == (role, engine_rank):
            base_port = topology.dp_config.scheduler_base_port
            if base_port is None:
                return instance
            port = base_port + instance.data_rank if base_port else 0
            return replace(instance, config=msgspec.structs.replace(instance.config, port=port))
    names = ", ".join(instance.name for instance in instances(topology)) or "none"
    raise ConfigError(
        f"the topology has no instance {instance_name(role, engine_rank)}; it has {names} "
        f"(`chitu join {role}` adds one to a running cluster)"
    )


def with_router(topology: Topology, **changes: Any) -> Topology:
    """Return the same topology with these keys of its router changed."""
    router = msgspec.structs.replace(topology.dp_config.router, **changes)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))


def with_instances(topology: Topology, change: Callable[[Group], InstanceConfig]) -> Topology:
    """Return the same topology with what `change` makes of each entry."""
    configs: dict[str, list[InstanceConfig]] = {section: [] for section in SECTIONS.values()}
    for group in groups(topology):
        configs[SECTIONS[group.role]].append(change(group))
    return with_router(topology, **{section: tuple(members) for section, members in configs.items()})


def is_address(host: str) -> bool:
    """Return whether it is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def same_host(host: str) -> str:
    """Return the canonical name of a host: all loopback names are one."""
    return "127.0.0.1" if is_loopback(host) else host


def inside_address(host: str) -> str:
    """Return the address at which a process on `host` listens: that of loopback, or all of the machine's, of the same
    family. The one of IPv6 takes IPv4 too."""
    if ":" in host:
        return "::1" if is_loopback(host) else "::"
    return "127.0.0.1" if is_loopback(host) else "0.0.0.0"


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of sockets that listen at this address or name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int | str) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_names(topology: Topology) -> list[str]:
    """Return every host once, the routers' first; all loopback names count as one."""
    named = [*router_hosts(topology.dp_config.router), *(instance.config.host for instance in instances(topology))]
    return list(dict.fromkeys(same_host(host) for host in named))


def instances_on(topology: Topology, host: str) -> list[Instance]:
    return [instance for instance in instances(topology) if same_host(instance.config.host) == same_host(host)]


def on_one_host(topology: Topology, host: str = "127.0.0.1") -> Topology:
    """Return the same cluster with every process on `host`, as `chitu serve` starts it. Loopback and all-interface
    addresses stay as they are, for the checks to see."""
    router = topology.dp_config.router

    def there(old: str) -> str:
        return old if is_loopback(old) or old in ALL_ADDRESSES else host

    def together(item: Group) -> InstanceConfig:
        return msgspec.structs.replace(item.config, host=there(item.config.all_hosts[0]), hosts=())

    moved = with_instances(topology, together)
    return with_router(moved, host=there(router.host), hosts=tuple(map(there, router.hosts)))


def listening_host(router: RouterConfig) -> str:
    """Return the address at which the HTTP API listens."""
    return router.host if router.http_host is None else router.http_host


def api_host(router: RouterConfig) -> str:
    """Return the address at which the processes of the cluster reach the HTTP API."""
    host = listening_host(router)
    return router.host if host in ALL_ADDRESSES else host


def api_url(host: str, port: int) -> str:
    """Return the URL of the API."""
    return f"http://{with_port(host, port)}"


def probe_address(topology: Topology, host: str) -> tuple[str, int] | None:
    """Return where the launcher of `host` answers probes; None if it does not. Probes come from outside the machine or
    container unless everything is on loopback."""
    port = topology.dp_config.probe_port
    is_inside = is_loopback(host) and is_loopback(listening_host(topology.dp_config.router))
    return None if port is None else ("127.0.0.1" if is_inside else inside_address(host), port)


def router_hosts(router: RouterConfig) -> tuple[str, ...]:
    """Return the address of each router."""
    return router.hosts or (router.host,)


def place_on_host(router: RouterConfig, index: int) -> int:
    """Return how many routers before this one are on its host."""
    hosts = [same_host(host) for host in router_hosts(router)]
    return hosts[:index].count(hosts[index])


def router_at(router: RouterConfig, index: int) -> RouterConfig:
    """Return the configuration of one of the routers, with its own address and ports. They share `port` on a host."""
    distance = PORT_STEP * place_on_host(router, index)

    def there(port: int) -> int:
        return port + distance if port else 0

    pd = router.pd_disaggregation
    return msgspec.structs.replace(
        router,
        host=router_hosts(router)[index],
        stats_port=there(router.stats_port),
        token_port=there(router.token_port),
        pd_disaggregation=msgspec.structs.replace(
            pd,
            coordination_port=there(pd.coordination_port),
            metadata_sync_port=there(pd.metadata_sync_port),
            bootstrap_port=there(pd.bootstrap_port),
        ),
    )


def num_on_host(router: RouterConfig, index: int) -> int:
    """Return how many routers the host of this one has."""
    hosts = [same_host(host) for host in router_hosts(router)]
    return hosts.count(hosts[index])


def own_api_port(router: RouterConfig, index: int) -> int:
    """Return the port at which this router alone has the API: `port`, if it is the only one on its host."""
    return router.port + 1 + place_on_host(router, index) if num_on_host(router, index) > 1 else router.port


def own_api_url(router: RouterConfig, index: int) -> str:
    return api_url(api_host(router_at(router, index)), own_api_port(router, index))


def routers(topology: Topology) -> list[RouterConfig]:
    """Return the configuration of each router."""
    router = topology.dp_config.router
    return [router_at(router, index) for index in range(len(router_hosts(router)))]


def router_ports(router: RouterConfig) -> dict[str, int]:
    """Return the ports that the router listens on, by key path."""
    pd = router.pd_disaggregation
    return {
        API_PORT: router.port,
        "dp_config.router.stats_port": router.stats_port,
        "dp_config.router.token_port": router.token_port,
        "dp_config.router.pd_disaggregation.coordination_port": pd.coordination_port,
        "dp_config.router.pd_disaggregation.metadata_sync_port": pd.metadata_sync_port,
        "dp_config.router.pd_disaggregation.bootstrap_port": pd.bootstrap_port,
    }


def bound_ports(topology: Topology) -> Iterator[tuple[str, str, int]]:
    """Yield key, host and number of every port that the topology has its processes listen on; 0 is any free one."""
    router = topology.dp_config.router
    for index, each in enumerate(routers(topology)):
        place, distance = place_on_host(router, index), PORT_STEP * place_on_host(router, index)
        for key, port in router_ports(each).items():
            if key != API_PORT or not place:  # those of a host share it
                yield f"{key} (+{distance})" if place else key, each.host, port
        if router.port and num_on_host(router, index) > 1:
            yield f"{API_PORT} (+{place + 1}, of one router alone)", each.host, own_api_port(router, index)
    for instance in instances(topology):
        yield instance.port_key, instance.config.host, instance.config.port
        for key in EVENT_PORTS:
            if port := getattr(instance.config, key):
                yield instance.key_of(key), instance.config.host, port
    for group in groups(topology):
        if group.is_part:
            yield f"{group.key}.rendezvous_port", group.config.hosts[0], group.config.rendezvous_port


def with_router_ports(topology: Topology, ports: Mapping[str, int]) -> Topology:
    """Return the topology with the router's actual ports, by short key name (`stats_port`), instead of the file's."""
    router, pd = topology.dp_config.router, topology.dp_config.router.pd_disaggregation
    pd = msgspec.structs.replace(pd, **{name: port for name, port in ports.items() if hasattr(pd, name)})
    of_router = {name: port for name, port in ports.items() if hasattr(router, name)}
    return with_router(topology, pd_disaggregation=pd, **of_router)


def threads_of(topology: Topology, instance: Instance | Group, cores: int) -> int:
    """Return the CPU threads for the computation of each rank of an instance, or of each member of a group, on a host
    with `cores` cores."""
    of_instance = (
        instance.config.threads
        or topology.scheduler.threads
        or cores // max(1, len(instances_on(topology, instance.config.host)))
    )
    return max(1, of_instance // instance.config.tp_size)


def computes_prompts(topology: Topology, role: Role) -> bool:
    """Return whether instances of this role compute prompts: D only if `router.slo.tpot_s` bounds its steps."""
    if role is Role.ENCODE:
        return False
    return role is not Role.DECODE or topology.dp_config.router.slo.tpot_s is not None


def has_tiers(topology: Topology, instance: Instance) -> bool:
    """Return whether its prefix cache has a tier in host memory: on P and unified instances, and on a D that can share
    the pages of its answers."""
    if not topology.cache.host_bytes or instance.role is Role.ENCODE:
        return False
    return instance.role is not Role.DECODE or has_lasting_tiers(topology)


def has_lasting_tiers(topology: Topology) -> bool:
    """Return whether pages outlive their instance and other instances can read them."""
    store = topology.cache.store
    return topology.cache.disk.path is not None or store.master is not None or store.plugin is not None


def revision_of(topology: Topology, config: InstanceConfig) -> str:
    """Return the revision of an instance (`InstanceConfig.revision`)."""
    model = topology.model
    numbers = f"{model.code} {model.weights} {model.prefill_attention}"
    return config.revision or blake2b(numbers.encode(), digest_size=4).hexdigest()


def changed_keys(topology: Topology) -> dict[str, Any]:
    """Return the topology as plain values, without keys at their defaults. The sizes of steps are kept in any case,
    since without them `with_step_sizes` finds others."""
    changed = _changed(topology)
    sizes = {name: getattr(topology.scheduler, name) for name in ("max_batched_tokens", "chunk_size")}
    return {**changed, "scheduler": {**changed.get("scheduler", {}), **sizes}}


def _changed(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_changed(each) for each in value]
    if not isinstance(value, Section):
        return msgspec.to_builtins(value)
    changed = {}
    for one in msgspec.structs.fields(type(value)):
        default = one.default
        if one.default_factory is not msgspec.NODEFAULT:
            default = one.default_factory()
        if (own := getattr(value, one.name)) != default:
            changed[one.name] = _changed(own)
    return changed
