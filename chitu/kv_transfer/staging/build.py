"""Staging of one instance, made once its pool is: which copier, which segments, and who may write them.

Called by the service's main thread (`serve/scheduler.py`), before `KVManager`. On a GPU the driver and Triton are
imported here. `StagingParts.close` after the transports were closed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chitu.config.schema import InstanceConfig, RouterConfig
from chitu.config.staging import StagingPlan, plan_staging, protocol_of, staging_prefills
from chitu.errors import ConfigError
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import Staging, StagingArea, area_of
from chitu.kv_transfer.staging.copier import DeviceCopier, HostCopier, PieceCopier
from chitu.kv_transfer.staging.host_area import HostArena
from chitu.kv_transfer.transports.arenas import MEMORY
from chitu.kv_transfer.transports.cuda_ipc.driver import CudaDriver
from chitu.protocol import KVLayout, TransportSession
from chitu.types import Role

logger = logging.getLogger(__name__)


class StagedPool(PagedMemory, Protocol):
    """A pool with `StagingPlan.pool_bytes` at its tail."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def staging_base(self) -> int: ...


@dataclass(slots=True, frozen=True)
class StagingParts:
    staging: Staging
    arena: HostArena | None
    prefills: tuple[int, ...]
    """D: engine ranks of the P that get segments."""
    num_prefills: int

    def is_required(self, sessions: Sequence[TransportSession]) -> bool:
        """D: whether every P writes into segments alone: so configured, or because nothing else can be reached."""
        if self.staging.area is None or len(self.prefills) < self.num_prefills:
            return False
        return self.staging.way == "staged" or all(MEMORY in session.attributes for session in sessions)

    def pin(self, sessions: Sequence[TransportSession]) -> None:
        """Now, and not at the first request, unless cuda_ipc may do without it. Raises TransferFailed."""
        if self.arena is not None and sessions[0].transport != "cuda_ipc":
            self.arena.device_base()

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


def build_staging(router: RouterConfig, role: Role, instance: InstanceConfig, pool: StagedPool) -> StagingParts | None:
    """None: nothing is staged here. Raises ConfigError where a segment is too small, or the memory cannot be had."""
    pd, device = router.pd_disaggregation, instance.devices[0]
    plan = plan_staging(router, role, instance)
    is_asked = any(plan_staging(router, Role.DECODE, decode) for decode in router.decode_schedulers)
    if instance.tp_size != 1 or role is Role.UNIFIED or not is_asked:
        return None
    if plan is not None:
        _check(plan, pool)
    arena: HostArena | None = None
    copier: PieceCopier = HostCopier()
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if plan is not None and plan.place == "host":
            arena = HostArena(plan.nbytes, CudaDriver(index))
        from chitu.ops.kernels.blocks import BlockCopier  # Triton: only where there is a GPU

        blocks = BlockCopier(f"cuda:{index}")
        blocks.warm_up()
        copier = DeviceCopier(blocks, [arena] if arena is not None else [])
    area: StagingArea | None = None
    if arena is not None and plan is not None:
        area = StagingArea(arena.base, plan.segment_bytes, plan.num_segments, arena.base, arena.nbytes)
    elif plan is not None:
        area = area_of(pool, pool.staging_base, plan.segment_bytes, plan.num_segments)
    if plan is not None:
        where = "host memory" if arena is not None else "the pool's arena"
        logger.info("staging: %d segments of %d bytes in %s", plan.num_segments, plan.segment_bytes, where)
    return StagingParts(
        Staging(pd.transfer, copier, area, device, protocol_of(pd)),
        arena,
        staging_prefills(router) if role is Role.DECODE else (),
        len(router.prefill_schedulers),
    )


def _check(plan: StagingPlan, pool: StagedPool) -> None:
    """The least that is staged is a page of one layer, or a logits row."""
    least = max(pool.layout.regions_per_layer * pool.page_bytes, pool.aux_row_bytes)
    if plan.segment_bytes < least:
        raise ConfigError(
            f"dp_config.router.pd_disaggregation.staging_segment_mb: {plan.segment_bytes} bytes hold no page of a layer"
            f" or no logits row, {least} bytes of this model: raise it"
        )
