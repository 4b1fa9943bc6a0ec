"""Which transports this process offers, best first.

`open_transports` is called once, by the service that owns the pool. A writer takes the first transport that reaches its
peer (`shard_writer.py`). If both ends are on one host, that is shared memory for pools in host memory. For pools in
device memory it is CUDA's interprocess handles, then the host's pinned memory, for GPUs that cannot map each other's.
"""

from __future__ import annotations

import logging

from chitu.config.schema import PDDisaggregationConfig
from chitu.config.staging import goes_through_the_host, has_transfer_library, protocol_of
from chitu.config.topology import is_loopback
from chitu.errors import ConfigError, MissingDependency
from chitu.kv_transfer.transports.cuda_ipc import CudaDriver, CudaIpcTransport
from chitu.kv_transfer.transports.faulty.transfer_engine import FaultyTransport
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.nixl import NixlTransport
from chitu.kv_transfer.transports.shm import PinnedShmTransport, ShmTransport
from chitu.kv_transfer.transports.transport import Transport

logger = logging.getLogger(__name__)


def open_transports(config: PDDisaggregationConfig, host: str, device: str = "cpu") -> list[Transport]:
    """Return the transports of this process, best first; register the pool's arena with each of them.

    `host`: this instance's address as peers reach it. `device`: the pool's device, `cpu` or `cuda:N`. Raises
    MissingDependency if the configured library is absent; `auto` logs that and goes on. A loopback `host` has its peers
    on this machine: `auto` then leaves out Mooncake, which listens on all interfaces.
    """
    return with_faults(_open(config, host, device), config)


def with_faults(transports: list[Transport], config: PDDisaggregationConfig) -> list[Transport]:
    """Return the transports, broken on purpose if that is configured."""
    if not config.faults.describe():
        return transports
    return [FaultyTransport(transport, config.faults) for transport in transports]


def _open(config: PDDisaggregationConfig, host: str, device: str) -> list[Transport]:
    if config.transport == "shm":
        return [ShmTransport() if device == "cpu" else _open_on_gpu(config, host, device)[-1]]
    if config.transport == "cuda_ipc":
        return _open_on_gpu(config, host, device)[:1]
    if config.transport == "nixl":
        return [NixlTransport(host, device)]
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
