"""Staging of one instance, built once its pool exists: which copier, which segments, and which P may write them.

Called by the service's main thread (`serve/scheduler.py`), before the pool is registered with the transports. On a GPU
the driver and Triton are imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.config.devices import gpu_index, is_gpu
from chitu.config.schema import InstanceConfig, RouterConfig
from chitu.config.staging import StagingPlan, plan_staging, protocol_of, staging_prefills
from chitu.errors import ConfigError
from chitu.kv_cache.aux_row import RowMemory
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.cuda_ipc import CudaDriver
from chitu.kv_transfer.transports.staged.area import HostArena, StagingArea, area_of
from chitu.kv_transfer.transports.staged.receiving import DeviceCopier, HostCopier, PieceCopier, Scatterer
from chitu.kv_transfer.transports.staged.transport import StagedTransport, StagingEnd, staged_from
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import KVLayout
from chitu.types import Role

logger = logging.getLogger(__name__)


class RankPool(PagedMemory, Protocol):
    """The memory that an engine computes in, with room for transports behind its pages and rows
    (`StagingPlan.pool_bytes`)."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def transfer_base(self) -> int: ...
    @property
    def aux_rows(self) -> NDArray[np.uint8] | RowMemory: ...


def wrap_transports(
    transports: Sequence[Transport],
    router: RouterConfig,
    role: Role,
    engine_rank: int,
    instance: InstanceConfig,
    pool: RankPool,
) -> list[Transport]:
    """Return the transports, each with its writes staged if that is configured. Raises ConfigError if a segment is too
    small, or the memory cannot be allocated."""
    pd, device = router.pd_disaggregation, instance.devices[0]
    plan = plan_staging(router, role, instance)
    is_asked = any(plan_staging(router, Role.DECODE, decode) for decode in router.decode_schedulers)
    if instance.tp_size != 1 or role is Role.UNIFIED or not is_asked:
        return list(transports)
    if plan is not None:
        _check(plan, pool)
    arena: HostArena | None = None
    copier: PieceCopier = HostCopier()
    if is_gpu(device):
        index = gpu_index(device)
        if plan is not None and plan.place == "host":
            arena = HostArena(plan.nbytes, CudaDriver(index))
        from chitu.ops.kernels.blocks import BlockCopier  # Triton: only with a GPU

        blocks = BlockCopier(f"cuda:{index}")
        blocks.warm_up()
        copier = DeviceCopier(blocks, [arena] if arena is not None else [])
    area: StagingArea | None = None
    if arena is not None and plan is not None:
        area = StagingArea(arena.base, plan.segment_bytes, plan.num_segments, arena.base, arena.nbytes)
    elif plan is not None:
        area = area_of(pool, pool.transfer_base, plan.segment_bytes, plan.num_segments)
    if plan is not None:
        where = "host memory" if arena is not None else "the pool's arena"
        logger.info("staging: %d segments of %d bytes in %s", plan.num_segments, plan.segment_bytes, where)
    scatterer: Scatterer | None = None
    if role is Role.DECODE and area is not None:
        scatterer = Scatterer(pool, area, copier, staging_prefills(router))
    end = StagingEnd(
        pd.transfer,
        pool,
        copier,
        area,
        engine_rank,
        scatterer,
        arena,
        is_pinned_late=transports[0].name == "cuda_ipc",
        threshold=lambda transport: staged_from(transport, device, protocol_of(pd)),
    )
    return [StagedTransport(transport, end) for transport in transports]


def _check(plan: StagingPlan, pool: RankPool) -> None:
    """Raise ConfigError unless a page of one layer and a logits row fit into a segment."""
    least = max(pool.layout.regions_per_layer * pool.page_bytes, pool.aux_row_bytes)
    if plan.segment_bytes < least:
        raise ConfigError(
            f"dp_config.router.pd_disaggregation.staging_segment_mb: {plan.segment_bytes} bytes hold no page of a layer"
            f" or no logits row, {least} bytes of this model: raise it"
        )
