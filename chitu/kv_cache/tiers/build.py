"""The tiers of an instance, built from its configuration. Called once by the main thread, after the pool is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from chitu.clock import Clock
from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.disk_pages import DiskPages
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.mooncake_pages import MooncakePages
from chitu.kv_cache.tiers.page_copies import PageCopies, PagedRegions, host_memory, page_content_bytes, page_copies_of
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_cache.tiers.record import HEADER_BYTES
from chitu.kv_cache.tiers.slow_tier import SlowTier

DECODE_HOST_BYTES = 1 << 30
"""Most host memory that D uses: pages wait there for disk and store, and none is read from there."""


class Index(Protocol):
    """The part of `PagedKVCacheManager` that tiers need."""

    page_size: int
    on_cached: Callable[..., None] | None

    def generation(self, page: int) -> int: ...


def build_tiers(
    config: CacheConfig,
    name: str,
    address: str,
    pool: PagedRegions,
    device: str,
    cache: Index,
    free_bytes: int,
    clock: Clock,
    wake: Callable[[], None],
    file: int = -1,
    on_all_ranks: Callable[[PageCopies, memoryview], PageCopies] = lambda own, memory: own,
) -> PrefixTiers:
    """Build the tiers of an instance with `cache.host_bytes`; from now on `cache` passes them its pages. `name` and
    `address` are the instance's, `device` is the kind of the pool's device. `free_bytes` are those of host memory.
    `file` is the descriptor of the tiers' memory if other ranks map it. `on_all_ranks` extends this rank's copies
    between pool and that memory to all ranks. Raise ConfigError if host memory or a store cannot be used."""
    page_bytes = page_content_bytes(pool.layout)
    if config.host_bytes < HEADER_BYTES + page_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, less than one page of {HEADER_BYTES + page_bytes}")
    if config.host_bytes > free_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, but {free_bytes} bytes of host memory are free")
    memory = host_memory(config.host_bytes, device, file)
    host = HostPages(memory, page_bytes)
    copies = on_all_ranks(page_copies_of(pool, device), memory)
    timeout_s, slow = config.load_timeout_s, list[SlowTier]()
    if config.disk.path is not None:
        shared = Path(config.disk.path)
        disk = DiskPages(shared / name, config.disk.max_bytes, shared)
        slow.append(SlowTier("disk", disk, host, timeout_s, clock))
    if config.store.master is not None:
        store = MooncakePages(config.store, address, host.record_bytes)
        store.connect()
        slow.append(SlowTier("store", store, host, timeout_s, clock))
    tiers = PrefixTiers(host, copies, cache.generation, cache.page_size, timeout_s, clock, wake, slow)
    cache.on_cached = tiers.write_back
    return tiers


def decode_cache(config: CacheConfig) -> CacheConfig:
    """Return D's cache configuration: D writes pages to tiers that other instances read, and reads none itself."""
    store = replace(config.store, segment_bytes=0)
    return replace(config, host_bytes=min(config.host_bytes, DECODE_HOST_BYTES), store=store)
