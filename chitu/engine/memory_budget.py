"""How many KV pages an instance gets. Pure arithmetic over what the host says is free."""

from __future__ import annotations

from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError

CPU_POOL_LIMIT_BYTES = 4 << 30
"""A pool taken from `memory_fraction` on CPU; more only where `cache.num_pages` asks for it."""


def available_cpu_bytes() -> int:
    """MemAvailable of the host."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: set cache.num_pages")


def num_pages_for(
    config: CacheConfig, bytes_per_page: int, free_bytes: int, instances_here: int, max_pages_useful: int
) -> int:
    """Pages of one instance: `memory_fraction` of what is free, shared by the instances of this host.

    `bytes_per_page`: K and V of one page over all layers. `max_pages_useful`: more can never be in use at once.
    ConfigError where not even one request of full length would fit is the caller's to raise; here only: no page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    budget = min(int(free_bytes * config.memory_fraction) // max(1, instances_here), CPU_POOL_LIMIT_BYTES)
    pages = min(budget // bytes_per_page, max_pages_useful)
    if pages < 1:
        raise ConfigError(
            f"cache.memory_fraction: {config.memory_fraction} of {free_bytes} free bytes holds no page of "
            f"{bytes_per_page} bytes; raise it or set cache.num_pages"
        )
    return pages
