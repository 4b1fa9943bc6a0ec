"""Default number of prompt tokens in a step, by the devices that compute prompts.

512 tokens keep a CPU busy for long. A GPU spends more on the steps of 512 tokens than on their arithmetic, and its
libraries are fastest with whole prompts. On P only other prompts wait for a step; on a unified instance running streams
do. Only `load.py` calls this, so every reader of the configuration sees the numbers.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from chitu.config.devices import is_gpu
from chitu.config.schema import SchedulerConfig, Topology

PREFILL_TOKENS = 8192
UNIFIED_TOKENS = 2048
"""Step size of unified instances: the largest prefill that is recorded (`engine/step_graphs.py`)."""


def with_step_sizes(topology: Topology, given: Collection[str]) -> Topology:
    """Return the topology with `max_batched_tokens` and `chunk_size` for GPUs, except those that are `given`."""
    router = topology.dp_config.router
    computing = (*router.prefill_schedulers, *router.unified_schedulers)
    if not computing or not all(is_gpu(device) for instance in computing for device in instance.devices):
        return topology
    tokens = UNIFIED_TOKENS if router.unified_schedulers else PREFILL_TOKENS
    scheduler = topology.scheduler
    batched = scheduler.max_batched_tokens if "max_batched_tokens" in given else tokens
    chunk = scheduler.chunk_size if "chunk_size" in given else min(tokens, batched)
    if "max_batched_tokens" not in given:
        batched = max(batched, chunk)
    sizes: SchedulerConfig = msgspec.structs.replace(scheduler, max_batched_tokens=batched, chunk_size=chunk)
    return msgspec.structs.replace(topology, scheduler=sizes)
