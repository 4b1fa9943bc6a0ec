"""The checks of a topology that need more than one key.

Pure, except that they check whether the model folder exists. Called by `chitu serve`, `chitu plan` and by every process
entry before a model loads. `check` raises the first problem; `problems` lists all; `warn_without_key`
and `warn_of_open_api` log.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from chitu.config.cluster_key import API_KEYS, ENVIRONMENT_KEY, cluster_key_of
from chitu.config.devices import is_auto, why_no_device
from chitu.config.model_files import ADAPTER_CONFIG
from chitu.config.schema import InstanceConfig, ModelConfig, RouterConfig, Topology
from chitu.config.staging import staging_problems
from chitu.config.tensor_parallel import why_not
from chitu.config.topology import (
    ALL_ADDRESSES,
    MAX_PORT,
    Group,
    bound_ports,
    groups,
    host_names,
    instances,
    is_address,
    is_loopback,
    listening_host,
    max_body_bytes,
    same_host,
)
from chitu.config.transport_env import transport_problems
from chitu.errors import ConfigError
from chitu.log import module_levels
from chitu.types import Role

logger = logging.getLogger(__name__)

PLACEHOLDER_SUFFIX = ".example"
"""Suffix of the placeholder host names in the multi-node files (RFC 2606 keeps them unresolvable)."""
IMAGE_HOST = re.compile(r"(\*\.)?[a-z0-9_.-]+(:\d+)?|[0-9a-f:]*:[0-9a-f:.]*|\[[0-9a-f:.]+\](:\d+)?", re.IGNORECASE)
"""A host from which images are fetched: a name or address, and maybe a port."""
MAX_FILE_MB = 63
"""Largest file of an image that fits in a message between processes, of 64 MiB."""
MAX_NAME_CHARS = 100
"""Most characters of an adapter's name."""


def warn_without_key(topology: Topology) -> None:
    """Log a warning if a cluster on several machines has no key, so that anyone who reaches its ports can join."""
    hosts = host_names(topology)
    if len(hosts) > 1 and not cluster_key_of(topology):
        logger.warning(
            "NO CLUSTER KEY on %d hosts (%s): anyone who reaches the ports of this cluster can join it, read its "
            "requests and write into its KV cache; set %s (docs/security.md)",
            *(len(hosts), ", ".join(hosts), ENVIRONMENT_KEY),
        )


def open_api(topology: Topology) -> str | None:
    """Return a sentence if other machines can reach the API and it needs no key, else None."""
    router = topology.dp_config.router
    host = listening_host(router)
    if router.api_keys or is_loopback(host):
        return None
    return (
        f"NO API KEY: the API listens on {host}, and anyone who reaches it can use the model; set {API_KEYS} "
        "(docs/security.md)"
    )


def missing_roles(topology: Topology) -> tuple[Role, ...]:
    """Return the roles of which an instance has to join before a request can be served; empty if the topology has a
    pair or a unified instance."""
    present = {instance.role for instance in instances(topology)}
    if Role.UNIFIED in present:
        return ()
    return tuple(role for role in (Role.PREFILL, Role.DECODE) if role not in present)


def warn_of_open_api(topology: Topology) -> None:
    """Log a warning if the API is open, for the router."""
    if warning := open_api(topology):
        logger.warning("%s", warning)


def check(topology: Topology, master_addr: str | None = None, need_model: bool = True) -> None:
    """Raise ConfigError with the first problem, if there is one."""
    for problem in problems(topology, master_addr, need_model):
        raise ConfigError(problem)


def problems(topology: Topology, master_addr: str | None = None, need_model: bool = True) -> Iterator[str]:
    """Yield a sentence for everything wrong with the topology. `master_addr` is PD_MASTER_ADDR as found."""
    yield from _api_key_problems(topology.dp_config.router)
    yield from _instance_problems(topology)
    yield from _device_problems(topology)
    yield from staging_problems(topology.dp_config.router)
    yield from transport_problems(topology.dp_config.router.pd_disaggregation)
    yield from _host_problems(topology, master_addr)
    yield from _port_problems(topology)
    yield from _event_problems(topology)
    yield from _size_problems(topology)
    yield from _tier_problems(topology)
    yield from _folder_problems(topology)
    yield from _log_problems(topology)
    if need_model:
        yield from _model_problems(topology.model.path)
        yield from _adapter_problems(topology.model)
        yield from _split_problems(topology)


def _tier_problems(topology: Topology) -> Iterator[str]:
    store = topology.cache.store
    if store.master is not None and store.plugin is not None:
        yield "cache.store.plugin stands in place of a Mooncake Store, and cache.store.master names one"
    if store.options and store.plugin is None:
        yield "cache.store.options are those of cache.store.plugin, which is not set"
    if not topology.cache.host_bytes:
        lasting = {"disk.path": topology.cache.disk.path, "store.master": store.master, "store.plugin": store.plugin}
        for key, value in lasting.items():
            if value is not None:
                yield f"cache.{key}: pages go through host memory, and cache.host_bytes is 0"
        return
    if not topology.cache.prefix_cache:
        yield "cache.host_bytes is memory for the prefix cache, which cache.prefix_cache turns off"


def _folder_problems(topology: Topology) -> Iterator[str]:
    folders = {
        "cache.disk.path": topology.cache.disk.path,
        "dp_config.router.kept_requests.dir": topology.dp_config.router.kept_requests.dir,
        "dp_config.router.batches.dir": topology.dp_config.router.batches.dir,
        "log.dir": topology.log.dir,
        "trace.dir": topology.trace.dir,
    }
    for key, folder in folders.items():
        if folder == "":
            yield f"{key} is empty: give a folder, or leave the key out"


def _log_problems(topology: Topology) -> Iterator[str]:
    try:
        module_levels(topology.log.modules)
    except ValueError as error:
        yield f"log.modules: {error}"


def _api_key_problems(router: RouterConfig) -> Iterator[str]:
    for index, key in enumerate(router.api_keys):
        if not key or key != key.strip():
            yield f"dp_config.router.api_keys.{index} is empty or has a space at an end: no client can send such a key"
    lists = {"api_key_salts": router.api_key_salts, "api_key_min_priorities": router.api_key_min_priorities}
    for name, entries in lists.items():
        if router.api_keys and entries and len(entries) != len(router.api_keys):
            yield (
                f"dp_config.router.{name} has {len(entries)} entries for {len(router.api_keys)} API keys: give each "
                "key one, in their order, or none at all"
            )


def _instance_problems(topology: Topology) -> Iterator[str]:
    router = topology.dp_config.router
    for group in groups(topology):
        key, config = group.key, group.config
        yield from _spread_problems(key, config)
        yield from _encode_problems(topology, group)
        if config.dp_size > 1 and router.balance == "act":
            yield (
                f"{key}.dp_size is {config.dp_size}, and dp_config.router.balance is act: the balancer changes the "
                "role of one instance at a time, and a group changes as a whole; use advise or off"
            )
        if is_auto(config):
            continue
        if len(config.devices) != config.num_devices:
            of_group = f", and {key}.dp_size {config.dp_size}" if config.dp_size > 1 else ""
            yield (
                f"{key}.devices names {len(config.devices)} devices, but {key}.tp_size is "
                f"{config.tp_size}{of_group}: give one device per rank"
            )
        for device in config.devices:
            if reason := why_no_device(device):
                yield f"{key}.devices {reason}"


def _encode_problems(topology: Topology, group: Group) -> Iterator[str]:
    """Check an entry of `encode_schedulers`."""
    key, config = group.key, group.config
    if group.role is not Role.ENCODE:
        return
    for name, value in (("tp_size", config.tp_size), ("dp_size", config.dp_size)):
        if value > 1:
            yield f"{key}.{name} is {value}, but an E is one process on one device: give an entry for each E"
    if topology.model.images == "off":
        yield f"{key} encodes images, which model.images turns off: set it to auto, or leave the entry out"


def _spread_problems(key: str, config: InstanceConfig) -> Iterator[str]:
    """Check how an entry is spread over its hosts."""
    hosts = [same_host(host) for host in config.hosts]
    if len(hosts) < 2:
        return
    for host in dict.fromkeys(host for host in hosts if hosts.count(host) > 1):
        yield f"{key}.hosts names {host} twice: give each host once, it has as many members as every other one"
    if config.dp_size % len(hosts):
        yield (
            f"{key}.dp_size is {config.dp_size}, which {len(hosts)} hosts cannot share evenly: each has whole members, "
            f"and as many as every other one; give dp_size {len(hosts)} or a multiple, or fewer {key}.hosts"
        )
    if not config.rendezvous_port:
        yield (
            f"{key}.rendezvous_port is 0, but the processes of {len(hosts)} hosts have to find each other: give a port "
            f"that is free at {config.hosts[0]}"
        )


def _device_problems(topology: Topology) -> Iterator[str]:
    """Check that P and D have their pages in memory of the same kind, and a transport for it."""
    prefix = "dp_config.router.pd_disaggregation"
    config = topology.dp_config.router.pd_disaggregation
    paired = [item for item in instances(topology) if item.role is not Role.UNIFIED and not is_auto(item.config)]
    by_kind = {device.partition(":")[0]: instance for instance in paired for device in instance.config.devices}
    if not by_kind.keys() <= {"cpu", "cuda"}:
        return  # `_instance_problems` reports an unknown device
    if len(by_kind) == 2:
        yield (
            f"{by_kind['cuda'].key} has its pages in GPU memory and {by_kind['cpu'].key} in host memory: "
            "all of P, D and E need the same kind of device"
        )
    elif by_kind.keys() == {"cpu"} and config.transport == "cuda_ipc":
        yield f"{prefix}.transport is cuda_ipc, but no P or D has a CUDA device: use auto or shm"


def _host_problems(topology: Topology, master_addr: str | None) -> Iterator[str]:
    router = topology.dp_config.router
    hosts = host_names(topology)
    by_key = {"dp_config.router.host": router.host}
    by_key |= {f"dp_config.router.hosts.{index}": host for index, host in enumerate(router.hosts) if index}
    for group in groups(topology):
        if group.config.hosts:
            by_key |= {f"{group.key}.hosts.{index}": host for index, host in enumerate(group.config.hosts)}
        else:
            by_key[f"{group.key}.host"] = group.config.host
    placeholders = {key: host for key, host in by_key.items() if host.endswith(PLACEHOLDER_SUFFIX)}
    if placeholders:
        names = ", ".join(dict.fromkeys(placeholders.values()))
        yield (
            f"{names} are still placeholders: give the machines with --hosts A,B, or their addresses as "
            f"{', '.join(placeholders)}"
        )
    for key, host in by_key.items():
        if not host:
            yield f"{key} is empty: give the address of the machine"
        elif host in ALL_ADDRESSES:
            yield (
                f"{key} is {host}, which is no address that others can reach: give the machine's own (to have the API "
                f"alone listen there: dp_config.router.http_host={host})"
            )
        elif len(hosts) > 1 and is_loopback(host):
            yield (
                f"{key} is the loopback address {host}, but the topology has {len(hosts)} hosts "
                f"({', '.join(hosts)}): give an address that the others can reach"
            )
        elif "%" in host:
            yield f"{key} is {host}: give an address that is the same on every machine, not one of a link"
    if len({":" in host for host in by_key.values() if is_address(host)}) > 1:
        yield (
            f"{', '.join(f'{key} is {host}' for key, host in by_key.items())}: some are IPv6 and some IPv4, give all "
            "of one family"
        )
    if router.http_host == "":
        yield "dp_config.router.http_host is empty: give an address of the router's machine, 0.0.0.0 for all of them"
    if router.otlp_endpoint and not re.match(r"https?://[^/]", router.otlp_endpoint):
        yield (
            f"dp_config.router.otlp_endpoint is {router.otlp_endpoint!r}: give the collector's base URL, such as "
            "http://127.0.0.1:4318"
        )
    for origin in router.cors_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin):
            yield (
                f"dp_config.router.cors_origins has {origin!r}, which no browser sends: give it as https://host:port, "
                "in lower case and without a path or a slash at the end"
            )
    if master_addr and len(hosts) > 1 and is_loopback(master_addr):
        yield (
            f"PD_MASTER_ADDR is the loopback address {master_addr}, but the topology has {len(hosts)} hosts: "
            "set it to the router's address"
        )
    transport = router.pd_disaggregation.transport
    if transport in ("shm", "cuda_ipc") and len(hosts) > 1:
        yield (
            f"dp_config.router.pd_disaggregation.transport is {transport}, but the topology has {len(hosts)} hosts: "
            "use auto or mooncake"
        )


def _port_problems(topology: Topology) -> Iterator[str]:
    used: dict[tuple[str, int], str] = {}
    for key, where, port in bound_ports(topology):
        host = same_host(where)
        if port > MAX_PORT:
            yield f"{key} would be port {port}, and ports end at {MAX_PORT}"
        elif port and (other := used.setdefault((host, port), key)) != key:
            yield f"{key} and {other} are both port {port} on {host}: give one of them another port, or 0"


def _event_problems(topology: Topology) -> Iterator[str]:
    """Check what publishes KV events."""
    for group in groups(topology):
        port, replay_port = group.config.kv_events_port, group.config.kv_events_replay_port
        if replay_port and not port:
            yield f"{group.key}.kv_events_replay_port is {replay_port}, but kv_events_port is 0: nothing is published"
        if port and group.role is Role.ENCODE:
            yield f"{group.key}.kv_events_port is {port}, but an E has no prefix cache: leave the key out"
        elif port and not topology.cache.prefix_cache:
            yield f"{group.key}.kv_events_port is {port}, but cache.prefix_cache is off: there is nothing to publish"
    try:
        topology.cache.events.topic.format(host="", port=0, name="", model="")
    except (LookupError, ValueError) as error:
        yield f"cache.events.topic has a name in braces other than host, port, name and model ({error})"


def _size_problems(topology: Topology) -> Iterator[str]:
    scheduler, cache, deadlines = (
        topology.scheduler,
        topology.cache,
        topology.dp_config.router.pd_disaggregation.deadlines,
    )
    if scheduler.chunk_size > scheduler.max_batched_tokens:
        yield (
            f"scheduler.chunk_size is {scheduler.chunk_size}, more than scheduler.max_batched_tokens "
            f"({scheduler.max_batched_tokens}): no chunk would ever fit a step"
        )
    if topology.model.max_model_len is not None:
        for key, pages in [
            ("cache.num_pages", cache.num_pages),
            *((f"{group.key}.num_pages", group.config.num_pages) for group in groups(topology)),
        ]:
            if pages is not None and pages * cache.page_size < topology.model.max_model_len:
                yield (
                    f"{key} is {pages}: {pages} pages of {cache.page_size} tokens hold less than one request of "
                    f"model.max_model_len ({topology.model.max_model_len}) tokens"
                )
    router = topology.dp_config.router
    body_bytes = max_body_bytes(router, has_vision=False)
    if router.max_total_body_bytes < body_bytes:
        yield (
            f"dp_config.router.max_total_body_bytes is {router.max_total_body_bytes}, less than one body of "
            f"dp_config.router.max_body_bytes ({body_bytes})"
        )
    for entry in router.images.hosts:
        if not IMAGE_HOST.fullmatch(entry):
            yield f"dp_config.router.images.hosts has {entry!r}, which is no host: give names, maybe with a port"
    if router.breaker.open_s > router.breaker.max_open_s:
        yield (
            f"dp_config.router.breaker.open_s is {router.breaker.open_s:g}, more than "
            f"dp_config.router.breaker.max_open_s ({router.breaker.max_open_s:g})"
        )
    if router.images.max_file_mb > MAX_FILE_MB:
        yield (
            f"dp_config.router.images.max_file_mb is {router.images.max_file_mb}: routers send instances files of at "
            f"most {MAX_FILE_MB} MiB"
        )
    if deadlines.lease_s < 2 * deadlines.heartbeat_interval_s:
        prefix = "dp_config.router.pd_disaggregation.deadlines"
        yield (
            f"{prefix}.lease_s is {deadlines.lease_s:g}, less than two heartbeats "
            f"({prefix}.heartbeat_interval_s is {deadlines.heartbeat_interval_s:g}): one late heartbeat ends it"
        )


def _model_problems(path: str) -> Iterator[str]:
    folder = Path(os.path.expanduser(path))
    if not path:
        yield "model.path is empty: give the folder of a Hugging Face checkpoint (--model PATH)"
    elif folder.is_file():
        cure = "give it as --model, which makes a folder of it" if folder.suffix == ".gguf" else "give its folder"
        yield f"model.path is {path!r}, which is a file: {cure}"
    elif not folder.is_dir():
        yield f"model.path is {path!r}, but there is no such {'file' if folder.suffix == '.gguf' else 'folder'}"
    elif not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):
        yield f"model.path is {path!r}, which has GGUF files and no config.json: give one of the files as --model"
    elif not (folder / "config.json").is_file():
        yield f"model.path is {path!r}, but the folder has no config.json: it is no Hugging Face checkpoint"


def why_no_adapter_name(name: str, model: ModelConfig) -> str:
    """Return why a LoRA adapter cannot have this name; empty if it can."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        return f"{name!r} is no name: it must be 1 to {MAX_NAME_CHARS} printable characters"
    is_base = name in (model.path, model.served_name or Path(model.path).name)
    return f"{name!r} is the name of the model alone" if is_base else ""


def _adapter_problems(model: ModelConfig) -> Iterator[str]:
    for name, folder in model.adapters.items():
        key = f"model.adapters.{name}"
        if why := why_no_adapter_name(name, model):
            yield f"model.adapters: {why}"
        elif not (Path(folder) / ADAPTER_CONFIG).is_file():
            yield f"{key} is {folder!r}, which is no folder with a LoRA adapter: it has no {ADAPTER_CONFIG}"


def _split_problems(topology: Topology) -> Iterator[str]:
    """Check that the ranks of each instance can split the model's heads. Loading refuses an unreadable file."""
    try:
        config = json.loads((Path(os.path.expanduser(topology.model.path)) / "config.json").read_text(encoding="utf-8"))
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    except (OSError, ValueError, TypeError, KeyError):
        return
    for group in groups(topology):
        tp_size = group.config.tp_size
        reason = why_not(num_heads, num_kv_heads, tp_size)
        if reason:
            yield f"{group.key}.tp_size is {tp_size}: {reason}"
