"""A topology as a whole: its instances, hosts, ports and threads. Pure: values in, values out. `topology_checks.py`
checks it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from chitu.config.schema import InstanceConfig, RouterConfig, Topology
from chitu.errors import ConfigError
from chitu.types import Role, instance_name

ALL_ADDRESSES = ("0.0.0.0", "::")
"""Addresses to listen on at all interfaces; no peer can connect to them."""
MAX_PORT = 65535

SECTIONS = {
    Role.PREFILL: "prefill_schedulers",
    Role.DECODE: "decode_schedulers",
    Role.UNIFIED: "unified_schedulers",
}
API_PORT = "dp_config.router.port"
PORT_STEP = 2
"""Distance of the ports of two routers on one host."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One torchrun of the topology; `key` is its path in the YAML."""

    role: Role
    engine_rank: int
    config: InstanceConfig

    @property
    def name(self) -> str:
        return instance_name(self.role, self.engine_rank)

    @property
    def key(self) -> str:
        return f"dp_config.router.{SECTIONS[self.role]}.{self.engine_rank}"


def instances(topology: Topology) -> tuple[Instance, ...]:
    """Return P0, P1, ..., D0, ..., U0, ... in this order."""
    router = topology.dp_config.router
    return tuple(
        Instance(role, rank, config) for role in Role for rank, config in enumerate(getattr(router, SECTIONS[role]))
    )


def find_instance(topology: Topology, role: Role, engine_rank: int) -> Instance:
    """Return the instance of a scheduler process, with `dp_config.scheduler_base_port` as its port if set."""
    for instance in instances(topology):
        if (instance.role, instance.engine_rank) == (role, engine_rank):
            base_port = topology.dp_config.scheduler_base_port
            if base_port is None:
                return instance
            return Instance(role, engine_rank, msgspec.structs.replace(instance.config, port=base_port))
    names = ", ".join(instance.name for instance in instances(topology)) or "none"
    raise ConfigError(
        f"the topology has no instance {instance_name(role, engine_rank)}; it has {names} "
        f"(`chitu join {role}` adds one to a running cluster)"
    )


def with_router(topology: Topology, **changes: Any) -> Topology:
    """Return the same topology with these keys of its router changed."""
    router = msgspec.structs.replace(topology.dp_config.router, **changes)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))


def with_instances(topology: Topology, change: Callable[[Instance], InstanceConfig]) -> Topology:
    """Return the same topology with what `change` makes of each instance."""
    configs: dict[str, list[InstanceConfig]] = {section: [] for section in SECTIONS.values()}
    for instance in instances(topology):
        configs[SECTIONS[instance.role]].append(change(instance))
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

    moved = with_instances(topology, lambda item: msgspec.structs.replace(item.config, host=there(item.config.host)))
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
        yield f"{instance.key}.port", instance.config.host, instance.config.port


def with_router_ports(topology: Topology, ports: Mapping[str, int]) -> Topology:
    """Return the topology with the router's actual ports, by short key name (`stats_port`), instead of the file's."""
    router, pd = topology.dp_config.router, topology.dp_config.router.pd_disaggregation
    pd = msgspec.structs.replace(pd, **{name: port for name, port in ports.items() if hasattr(pd, name)})
    of_router = {name: port for name, port in ports.items() if hasattr(router, name)}
    return with_router(topology, pd_disaggregation=pd, **of_router)


def threads_of(topology: Topology, instance: Instance, cores: int) -> int:
    """Return the CPU threads for the computation of each rank of an instance on a host with `cores` cores."""
    of_instance = (
        instance.config.threads
        or topology.scheduler.threads
        or cores // max(1, len(instances_on(topology, instance.config.host)))
    )
    return max(1, of_instance // instance.config.tp_size)


def computes_prompts(topology: Topology, role: Role) -> bool:
    """Return whether instances of this role compute prompts: D only if `router.slo.tpot_s` bounds its steps."""
    return role is not Role.DECODE or topology.dp_config.router.slo.tpot_s is not None


def has_tiers(topology: Topology, instance: Instance) -> bool:
    """Return whether its prefix cache has a tier in host memory: on P and unified instances, and on a D that can share
    the pages of its answers."""
    return topology.cache.host_bytes > 0 and (instance.role is not Role.DECODE or has_lasting_tiers(topology))


def has_lasting_tiers(topology: Topology) -> bool:
    """Return whether pages outlive their instance and other instances can read them."""
    return topology.cache.disk.path is not None or topology.cache.store.master is not None
