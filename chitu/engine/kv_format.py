"""The dtype of K and V in the pages of a rank: `cache.kv_dtype`, checked against model and device.

Called once by `build.py`, before weights are read.
"""

from __future__ import annotations

from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.models.config import ModelSpec
from chitu.ops.fp8_pages import ALIGNMENT_BYTES
from chitu.protocol import FP8_E4M3, fp8_head_bytes

MIN_CAPABILITY = (8, 9)
"""Lowest compute capability with e4m3: Ada and Hopper are the first."""


def kv_dtype_of(config: CacheConfig, spec: ModelSpec, model_dtype: str, capability: tuple[int, int] | None) -> str:
    """Return `KVLayout.dtype`. `capability`: of the GPU; None on a CPU. Raises ConfigError if e4m3 is asked for but
    the GPU does not support it or a head's page is not aligned."""
    if config.kv_dtype == "auto":
        return model_dtype
    nbytes = fp8_head_bytes(config.page_size, spec.head_dim)
    if nbytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"cache.kv_dtype: with {FP8_E4M3} a KV head's page of {config.page_size} tokens of {spec.head_dim} numbers "
            f"and their scales has {nbytes} bytes, which is no multiple of {ALIGNMENT_BYTES}: set cache.page_size to a "
            "multiple of 16"
        )
    if capability is not None and capability < MIN_CAPABILITY:
        raise ConfigError(
            f"cache.kv_dtype: {FP8_E4M3} needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; this one has "
            f"{capability[0]}.{capability[1]}"
        )
    return FP8_E4M3
