"""Transports of KV between P and D, decided and described before anything starts. Pure.

Called by `launch/placement.py`. `mooncake_protocol: auto` becomes the protocol of this node; all nodes are assumed to
be alike, as with devices (docs/adr/0009). Peers find out whether a transport reaches the other when they connect
(`kv_transfer/transports/local.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from chitu.config.devices import is_gpu
from chitu.config.schema import Topology
from chitu.config.staging import goes_through_the_host, has_transfer_library
from chitu.config.topology import Instance, instances, same_host
from chitu.errors import ConfigError
from chitu.net.rdma_devices import Rdma, choose_protocol, why_no_rdma
from chitu.types import Role

PD = "dp_config.router.pd_disaggregation"
KEY = f"{PD}.mooncake_protocol"


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


def protocol_overrides(topology: Topology, found: Rdma) -> list[str]:
    """Return the override of Mooncake's protocol, if any. Raise ConfigError if RDMA is required but missing."""
    pd = topology.dp_config.router.pd_disaggregation
    if not uses_mooncake(topology) or pd.mooncake_protocol == "tcp":
        return []
    if pd.mooncake_protocol == "rdma":
        if reason := why_no_rdma(found, pd.ib_device, has_gpus(topology)):
            raise ConfigError(f"{KEY} is rdma, but {reason}: use auto or tcp")
        return []
    return [f"{KEY}={choose_protocol(pd, found, has_gpus(topology))[0]}"]


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
        ways.append("nixl (UCX chooses)")
    elif needed_library(topology) == "mooncake":
        protocol, why = choose_protocol(pd, found, on_gpus)
        ways.append(f"mooncake over {protocol}{' between hosts' if pd.transport == 'auto' else ''} ({why})")
        if on_gpus and is_staged(topology, protocol):
            ways[-1] += ", staged through host memory"
        elif on_gpus:
            slowly = "" if protocol == "rdma" else ", piece by piece, which is slow"
            ways[-1] += f", straight from GPU memory{slowly} (needs Mooncake's build with CUDA)"
    return "; ".join(ways)


def _paired(topology: Topology) -> list[Instance]:
    return [item for item in instances(topology) if item.role is not Role.UNIFIED]


def _hosts(found: Iterable[Instance]) -> set[str]:
    return {same_host(item.config.host) for item in found}


def has_gpus(topology: Topology) -> bool:
    """Return whether P and D have GPUs."""
    return any(is_gpu(device) for item in _paired(topology) for device in item.config.devices)
