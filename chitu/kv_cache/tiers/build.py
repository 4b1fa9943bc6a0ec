"""The tiers of an instance by its configuration. Called once by the main thread, after the pool was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from chitu.clock import Clock
from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import PagedRegions, host_memory, page_content_bytes, page_copies_of
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_cache.tiers.record import HEADER_BYTES


class Index(Protocol):
    """What of `PagedKVCacheManager` is needed."""

    page_size: int
    on_cached: Callable[..., None] | None

    def generation(self, page: int) -> int: ...


def build_tiers(
    config: CacheConfig,
    pool: PagedRegions,
    device: str,
    cache: Index,
    free_bytes: int,
    clock: Clock,
    wake: Callable[[], None],
) -> PrefixTiers:
    """With `cache.host_bytes` set; `cache` tells it of its pages from now on. `device`: the kind of the pool's.
    `free_bytes`: of host memory. Raises ConfigError."""
    page_bytes = page_content_bytes(pool)
    if config.host_bytes < HEADER_BYTES + page_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, less than one page of {HEADER_BYTES + page_bytes}")
    if config.host_bytes > free_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, but {free_bytes} bytes of host memory are free")
    host = HostPages(host_memory(config.host_bytes, device), page_bytes)
    copies = page_copies_of(pool, device)
    tiers = PrefixTiers(host, copies, cache.generation, cache.page_size, config.load_timeout_s, clock, wake)
    cache.on_cached = tiers.write_back
    return tiers
