"""How KV will travel between P and D, decided and said before anything starts. Pure.

Called by `launch/placement.py`. `mooncake_protocol: auto` becomes what this node has; nodes are taken for alike, as
with devices (docs/adr/0009). Whether a transport reaches a peer they find out when they meet (`kv_transfer/select.py`).
"""

from __future__ import annotations

import msgspec

from chitu.config.devices import is_gpu
from chitu.config.schema import Topology
from chitu.config.staging import goes_through_the_host, has_transfer_library
from chitu.config.topology import Instance, instances, same_host
from chitu.errors import ConfigError
from chitu.net.rdma_devices import Rdma, choose_protocol, why_no_rdma
from chitu.types import Role

KEY = "dp_config.router.pd_disaggregation.mooncake_protocol"


def uses_mooncake(topology: Topology) -> bool:
    pd = topology.dp_config.router.pd_disaggregation
    return pd.transport == "mooncake" or (
        pd.transport == "auto" and any(has_transfer_library(pd, item.config.host) for item in _paired(topology))
    )


def protocol_overrides(topology: Topology, found: Rdma) -> list[str]:
    """ConfigError where RDMA was asked for and this node cannot."""
    pd = topology.dp_config.router.pd_disaggregation
    if not uses_mooncake(topology) or pd.mooncake_protocol == "tcp":
        return []
    has_gpus = _has_gpus(topology)
    if pd.mooncake_protocol == "rdma":
        if reason := why_no_rdma(found, pd.ib_device, has_gpus):
            raise ConfigError(f"{KEY} is rdma, but {reason}: use auto or tcp")
        return []
    return [f"{KEY}={choose_protocol(pd, found, has_gpus)[0]}"]


def describe_ways(topology: Topology, found: Rdma) -> str:
    """`topology`: with devices, and the protocol as the file says. Empty where nothing travels."""
    paired = _paired(topology)
    if not paired:
        return ""
    pd, has_gpus = topology.dp_config.router.pd_disaggregation, _has_gpus(topology)
    hosts = {role: {same_host(item.config.host) for item in paired if item.role is role} for role in Role}
    ways = []
    if hosts[Role.PREFILL] & hosts[Role.DECODE] and pd.transport in ("auto", "shm", "cuda_ipc"):
        way = "cuda_ipc" if has_gpus and pd.transport != "shm" else "shm"
        ways.append(f"{way} on one host" + (" (GPU memory to GPU memory)" if way == "cuda_ipc" else ""))
    if pd.transport == "nixl":
        ways.append("nixl (UCX chooses)")
    elif pd.transport == "mooncake" or (pd.transport == "auto" and len(set().union(*hosts.values())) > 1):
        protocol, why = choose_protocol(pd, found, has_gpus)
        chosen = msgspec.structs.replace(pd, mooncake_protocol=protocol)
        staged = has_gpus and pd.transfer != "direct" and goes_through_the_host(chosen, True)
        staged = staged and all(item.config.tp_size == 1 for item in paired)  # segments are for one rank
        ways.append(f"mooncake over {protocol}{' between hosts' if pd.transport == 'auto' else ''} ({why})")
        ways[-1] += ", staged through host memory" if staged else ""
    return "; ".join(ways)


def _paired(topology: Topology) -> list[Instance]:
    return [item for item in instances(topology) if item.role is not Role.UNIFIED]


def _has_gpus(topology: Topology) -> bool:
    return any(is_gpu(device) for item in _paired(topology) for device in item.config.devices)
