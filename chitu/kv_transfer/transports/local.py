"""The transports of this process: which it offers, the memory that they registered, and their messages.

The thread that builds the service calls `open_transports` and `wrap_transports` (staging) once the pool exists, then
`register_memory`, on every TP rank. A writer takes the first transport that reaches its peer (`shard_writer.py`). On
one host that is shared memory for pools in host memory. For pools in device memory it is CUDA's interprocess handles,
then the host's pinned memory, for GPUs that cannot map each other's. Triton and the driver are imported only with a
GPU. `TransportMessages` belongs to a role, which resolves addresses and does not read the messages: the comm thread
calls `deliver`, any thread sends, no lock is held.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from chitu.config.devices import gpu_index, is_gpu
from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig
from chitu.config.staging import (
    StagingPlan,
    goes_through_the_host,
    has_transfer_library,
    plan_staging,
    protocol_of,
    staging_prefills,
)
from chitu.config.topology import is_loopback
from chitu.config.transport_env import transport_environment
from chitu.errors import BadFrame, ChituError, ConfigError, MissingDependency, TransferFailed
from chitu.kv_cache.aux_row import RowMemory
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.cuda_ipc import CudaIpcTransport
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.nixl import NixlTransport
from chitu.kv_transfer.transports.segments import (
    DeviceCopier,
    HostArena,
    HostCopier,
    PieceCopier,
    Scatterer,
    StagingArea,
    area_of,
)
from chitu.kv_transfer.transports.shm import PinnedShmTransport, ShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd, staged_from
from chitu.kv_transfer.transports.transport import MessagingTransport, SendFrame, Transport, pins, way_of
from chitu.net.threads import Spawn
from chitu.ops.cuda_driver import CudaDriver
from chitu.protocol import KVLayout, TransportMessage, TransportSession, encode
from chitu.types import REGISTRATION_ROOM, Role

logger = logging.getLogger(__name__)

ONE_MACHINE = ("shm", "cuda_ipc")
"""Transports that map memory of other processes on their own machine."""


@runtime_checkable
class Pinnable(Protocol):
    """A pool that gives its memory back to the system, unless a transport pins it."""

    pinned_by: str
    """Name of that transport; empty if there is none."""


def open_transports(config: PDDisaggregationConfig, host: str, device: str = "cpu") -> list[Transport]:
    """Return the transports of this process, best first; register the pool's arena with each of them.

    `host`: this instance's address as peers reach it. `device`: the pool's device, `cpu` or `cuda:N`. Raises
    MissingDependency if the configured library is absent; `auto` logs that and goes on. A loopback `host` has its peers
    on this machine: `auto` then leaves out Mooncake, which listens on all interfaces.
    """
    _set_environment(config)
    if config.transport == "shm":
        return [ShmTransport() if device == "cpu" else _open_on_gpu(config, host, device)[-1]]
    if config.transport == "cuda_ipc":
        return _open_on_gpu(config, host, device)[:1]
    if config.transport == "nixl":
        return [NixlTransport(host, device, config.ib_device)]
    if config.transport == "mooncake":
        return [MooncakeTransport(host, protocol_of(config), config.ib_device)]
    transports: list[Transport] = [ShmTransport()] if device == "cpu" else _open_on_gpu(config, host, device)
    if is_loopback(host):
        return transports
    try:
        transports.append(MooncakeTransport(host, protocol_of(config), config.ib_device))
    except MissingDependency as error:
        logger.info("transport auto: %s only, so peers must be on this host (%s)", transports[0].name, error)
    return transports


def _set_environment(config: PDDisaggregationConfig) -> None:
    """Give the libraries the topology's variables, before the first of them is loaded."""
    for name, value in transport_environment(config).items():
        if (old := os.environ.get(name, value)) != value:
            logger.info("transports: %s is %s, as the topology says, not %s as in the environment", name, value, old)
        os.environ[name] = value


def _open_on_gpu(config: PDDisaggregationConfig, host: str, device: str) -> list[Transport]:
    """Return `cuda_ipc`, and after it `shm` if segments in host memory are possible. They share driver and kernel.

    Raises ConfigError if the pool is not in a GPU's memory.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise ConfigError(f"pd_disaggregation.transport is cuda_ipc, but the device is {device}: use auto or shm")
    driver = CudaDriver(int(index or 0))
    from chitu.ops.kernels.blocks import BlockCopier  # Triton: only with a GPU

    copier = BlockCopier(device)
    copier.warm_up()
    transports: list[Transport] = [CudaIpcTransport(driver, copier)]
    has_segments = goes_through_the_host(config, has_transfer_library(config, host))
    if config.transfer != "direct" and has_segments:
        transports.append(PinnedShmTransport(driver, copier))
    return transports


def register_memory(memory: PagedMemory, transports: list[Transport]) -> tuple[TransportSession, ...]:
    """Register the memory and return the sessions of the transports that can use it, in order; the other ones are
    closed and taken out of the list. Idempotent. Raises TransferFailed if none can use it."""
    sessions: list[TransportSession] = []
    usable: list[Transport] = []
    reasons: list[str] = []
    for transport in transports:
        try:
            transport.register(memory.arena_base, memory.arena_bytes)
            sessions.append(transport.local_session())
            usable.append(transport)
            if pins(transport) and isinstance(memory, Pinnable):
                memory.pinned_by = way_of(transport)
        except ChituError as error:
            logger.warning("transport %s is left out: %s", transport.name, error.message)
            reasons.append(f"{transport.name}: {error.message}")
            transport.close()
    transports[:] = usable
    if not usable:
        raise TransferFailed(f"no transport can use the KV memory ({'; '.join(reasons) or 'none was given'})")
    return tuple(sessions)


def ways_of(sessions: Sequence[TransportSession]) -> tuple[str, ...]:
    """Return what `Transport.can_reach` compares, a string per session. Two ends need one in common to connect."""
    ways = []
    for session in sessions:
        protocol, host_id = session.attributes.get("protocol"), session.attributes.get("host_id", "")
        if protocol is not None:
            ways.append(f"{session.transport} over {protocol}")
        elif session.transport in ONE_MACHINE:
            ways.append(f"{session.transport}@{host_id}")
        else:
            ways.append(session.transport)
    return tuple(ways)


class TransportMessages:
    """Transports by name. `address_of`: host and control port of an incarnation of the other role; None if unknown."""

    def __init__(
        self,
        incarnation: int,
        transports: Sequence[Transport],
        send_frame: SendFrame,
        address_of: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self._incarnation = incarnation
        self._send_frame = send_frame
        self._address_of = address_of
        self._transports: dict[str, MessagingTransport] = {}
        for transport in transports:
            if isinstance(transport, MessagingTransport):
                self._transports[transport.name] = transport
                transport.attach(partial(self._send, transport.name))

    def deliver(self, rank: int, message: TransportMessage) -> None:
        """Deliver a message of a registered peer. Raises ProtocolError."""
        transport = self._transports.get(message.transport)
        if transport is None:
            raise BadFrame(f"a message to transport {message.transport[:40]!r}, which accepts none here")
        transport.on_message(rank, message.incarnation, message.payload)

    def revoke(self, incarnation: int) -> bool:
        """Fence a peer that is dead. Return True once none of our own transports writes for it."""
        return all([transport.revoke(incarnation) for transport in self._transports.values()])

    def start(self, spawn: Spawn) -> None:
        for transport in self._transports.values():
            transport.start(spawn)

    def _send(self, name: str, incarnation: int, payload: bytes) -> None:
        address = self._address_of(incarnation)
        if address is not None:
            message = TransportMessage(self._incarnation, name, payload)
            self._send_frame(*address, REGISTRATION_ROOM, encode(message))


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
    least = max(*pool.layout.bytes_by_layer, pool.aux_row_bytes)
    if plan.segment_bytes < least:
        raise ConfigError(
            f"dp_config.router.pd_disaggregation.staging_segment_mb: {plan.segment_bytes} bytes hold no page of a layer"
            f" or no logits row, {least} bytes of this model: raise it"
        )
