"""How many prompt tokens a step computes where the topology does not say: by the devices that compute prompts.

A CPU is busy for long with 512 tokens. A GPU is not busy at all: 512 tokens at a time cost it more in steps than in
arithmetic, and whole prompts are what its libraries are fastest at. On P nothing waits for a step but other prompts; a
unified instance's running streams do. Called by `load.py` alone, so all that read the configuration see the numbers.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from chitu.config.schema import InstanceConfig, SchedulerConfig, Topology

PREFILL_TOKENS = 8192
UNIFIED_TOKENS = 2048
"""The largest prefill that is recorded (`engine/step_graphs.py`)."""


def with_step_sizes(topology: Topology, given: Collection[str]) -> Topology:
    """The topology with `max_batched_tokens` and `chunk_size` of its GPUs, except those that are `given`."""
    router = topology.dp_config.router
    computing = (*router.prefill_schedulers, *router.unified_schedulers)
    if not computing or not all(map(_is_on_gpus, computing)):
        return topology
    tokens = UNIFIED_TOKENS if router.unified_schedulers else PREFILL_TOKENS
    scheduler = topology.scheduler
    batched = scheduler.max_batched_tokens if "max_batched_tokens" in given else tokens
    chunk = scheduler.chunk_size if "chunk_size" in given else min(tokens, batched)
    if "max_batched_tokens" not in given:
        batched = max(batched, chunk)
    sizes: SchedulerConfig = msgspec.structs.replace(scheduler, max_batched_tokens=batched, chunk_size=chunk)
    return msgspec.structs.replace(topology, scheduler=sizes)


def _is_on_gpus(instance: InstanceConfig) -> bool:
    return all(device.startswith("cuda") for device in instance.devices)
