"""Staging memory for KV transfers: which instance has it, where, and how much. Pure.

Called by the topology check (`staging_problems`), and by the process that builds a pool and its transports
(`plan_staging`). Staging is for transports that pay per piece, and for memory that a peer cannot write: see
docs/adr/0005. TP: only instances of one rank take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from chitu.config.devices import is_gpu
from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig
from chitu.config.topology import is_loopback
from chitu.types import Role

PREFIX = "dp_config.router.pd_disaggregation"
SEGMENTS_OF_A_PEER = 2
"""Minimum segments for each peer: one is written while the other is scattered."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    place: Literal["pool", "host"]
    """Place of the segments: `pool`, the arena of the pool, also on a GPU; `host`, separate host memory beside a pool
    on a GPU."""
    segment_bytes: int
    num_segments: int

    @property
    def nbytes(self) -> int:
        return self.segment_bytes * self.num_segments

    @property
    def pool_bytes(self) -> int:
        return self.nbytes if self.place == "pool" else 0


def plan_staging(router: RouterConfig, role: Role, instance: InstanceConfig) -> StagingPlan | None:
    """Return the staging memory of this instance, or None if it needs none.

    It is needed for `staged` anywhere, and for `auto` with pools on GPUs, unless cuda_ipc is the only transport. P
    needs none if only shm and cuda_ipc can be used, which gather directly into D's segments.
    """
    pd = router.pd_disaggregation
    is_cuda = any(map(is_gpu, instance.devices))
    if role in (Role.UNIFIED, Role.ENCODE) or instance.tp_size != 1:
        return None
    if pd.transfer == "direct" or not _num_peers(router):
        return None
    if pd.transfer == "auto" and (not is_cuda or pd.transport == "cuda_ipc"):
        return None
    has_library = has_transfer_library(pd, instance.host)
    if role is Role.PREFILL and not has_library:
        return None
    return StagingPlan(
        "host" if is_cuda and goes_through_the_host(pd, has_library) else "pool",
        pd.staging_segment_mb << 20,
        pd.staging_mb // pd.staging_segment_mb,
    )


def pool_bytes_of(router: RouterConfig, role: Role, instance: InstanceConfig) -> int:
    """Return the bytes that transports need at the end of the pool's arena."""
    plan = plan_staging(router, role, instance)
    return plan.pool_bytes if plan is not None else 0


def protocol_of(pd: PDDisaggregationConfig) -> str:
    """Return Mooncake's protocol. `auto` that no launcher has resolved means TCP, which always works."""
    return "rdma" if pd.mooncake_protocol == "rdma" else "tcp"


def has_transfer_library(pd: PDDisaggregationConfig, host: str) -> bool:
    """Return whether a library may carry the writes: not between processes of one machine, unless configured."""
    return pd.transport in ("mooncake", "nixl") or (pd.transport == "auto" and not is_loopback(host))


def goes_through_the_host(pd: PDDisaggregationConfig, has_library: bool) -> bool:
    """Return whether the segments of a GPU are in host memory: shm maps nothing else, and TCP sends from there anyway.
    RDMA and UCX take device memory; so does cuda_ipc, which `auto` prefers if `transfer` is `staged`."""
    if pd.transport == "auto" and pd.transfer == "staged":
        return False
    if pd.transport in ("shm", "auto", "mooncake"):
        return not has_library or pd.mooncake_protocol != "rdma"
    return False


def staging_problems(router: RouterConfig) -> Iterator[str]:
    """Yield a sentence for each setting that cannot work."""
    pd = router.pd_disaggregation
    paired = [(Role.PREFILL, config) for config in router.prefill_schedulers]
    paired += [(Role.DECODE, config) for config in router.decode_schedulers]
    is_cuda = any(is_gpu(device) for _, config in paired for device in config.devices)
    if pd.transport == "shm" and is_cuda:
        if pd.transfer == "direct":
            yield (
                f"{PREFIX}.transfer is direct and transport shm, which maps host memory, but P and D have GPUs: "
                "use transfer auto or staged, or transport auto or cuda_ipc"
            )
        if any(config.tp_size > 1 for _, config in paired):
            yield (
                f"{PREFIX}.transport is shm, which maps host memory, but P and D have GPUs and a tp_size above 1, for "
                "which transfers are not staged: use auto or cuda_ipc"
            )
    for role, config in paired:
        if pd.transfer == "staged" and config.tp_size > 1:
            yield (
                f"{PREFIX}.transfer is staged, but a {role.value} instance has tp_size {config.tp_size}: segments are "
                "for instances of one rank; use auto, which then writes directly, or direct"
            )
    plans = [plan for role, config in paired if (plan := plan_staging(router, role, config)) is not None]
    if not plans:
        return
    num_segments, num_peers = plans[0].num_segments, _num_peers(router)
    wanted = SEGMENTS_OF_A_PEER * num_peers
    if num_segments < wanted:
        yield (
            f"{PREFIX}.staging_mb is {pd.staging_mb}: that is {num_segments} segments of {pd.staging_segment_mb} MiB "
            f"(staging_segment_mb), but each of {num_peers} P needs {SEGMENTS_OF_A_PEER} of every D: "
            f"at least {wanted * pd.staging_segment_mb} MiB, or smaller segments"
        )


def staging_prefills(router: RouterConfig) -> tuple[int, ...]:
    """Return the engine ranks of the P that may be granted segments."""
    sizes = [config.tp_size for config in router.prefill_schedulers for _ in range(config.dp_size)]
    return tuple(rank for rank, tp_size in enumerate(sizes) if tp_size == 1)


def _num_peers(router: RouterConfig) -> int:
    return len(staging_prefills(router))
