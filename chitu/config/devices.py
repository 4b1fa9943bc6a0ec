"""Meaning of the names in an instance's `devices`, and the defaults that follow from them. Pure.

A launcher replaces `auto` once it has inspected its node (`process/placement.py`); no process computes with `auto`.
A launcher shows a process only its own GPUs, which count from 0 there: `on_visible_devices` maps the node's names,
which the topology has, to those of the process.

`scheduler.overlap`: whether an instance launches a step before it has read the previous one (ADR 6). Tokens in a step:
512 keep a CPU busy for long. A GPU spends more on steps of 512 tokens than on their arithmetic, and its libraries are
fastest with whole prompts. On P only other prompts wait for a step; on a unified instance running streams do. Only
`load.py` sets these, so every reader of the configuration sees the numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from chitu.config.key_paths import is_number
from chitu.config.schema import AUTO_DEVICES, InstanceConfig, SchedulerConfig, Topology

CPU = "cpu"
GPU_ELSEWHERE = "cuda:other"
"""A GPU of another node; only that node knows which one."""
CPU_DTYPE = "float32"
"""Dtype of `model.dtype: auto` on CPUs, whatever the checkpoint has: docs/adr/0012."""
PREFILL_TOKENS = 8192
UNIFIED_TOKENS = 2048
"""Step size of unified instances: the largest prefill that is recorded (`engine/step_graphs.py`)."""


def dtype_on(device: str, wanted: str, stored: str) -> str:
    """Return the dtype that a device computes in. `wanted` is `model.dtype`, `stored` the checkpoint's own dtype."""
    if wanted != "auto":
        return wanted
    return CPU_DTYPE if device == CPU else stored


def is_auto(config: InstanceConfig) -> bool:
    return config.devices == AUTO_DEVICES


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def gpu_index(device: str) -> int:
    """Return the index of a GPU of this node (`cuda` is `cuda:0`), or -1 for one of another node."""
    return -1 if device == GPU_ELSEWHERE else int(device.partition(":")[2] or 0)


def why_no_device(device: str) -> str:
    """Return why this is no device name, as the end of a sentence, or "" if it is one."""
    kind, _, index = device.partition(":")
    if device in (CPU, "cuda", GPU_ELSEWHERE) or (kind == "cuda" and is_number(index)):
        return ""
    return f"has {device!r}: a device is 'cpu' or 'cuda:N', or all of it is 'auto'"


def on_visible_devices(config: InstanceConfig, shown: Sequence[str]) -> InstanceConfig:
    """Return an instance with its devices as its own processes name them. `shown` has the names of those that they see,
    in order; it is empty if they see all, as without a launcher."""
    if not shown:
        return config
    local = tuple(f"cuda:{shown.index(name)}" if is_gpu(name) else name for name in config.devices)
    return msgspec.structs.replace(config, devices=local)


def overlaps_steps(scheduler: SchedulerConfig, instance: InstanceConfig) -> bool:
    """Return whether steps overlap. `auto` means on devices that compute asynchronously, which is CUDA."""
    return scheduler.overlap == "on" or (scheduler.overlap == "auto" and is_gpu(instance.devices[0]))


def max_draft_tokens(scheduler: SchedulerConfig, instance: InstanceConfig) -> int:
    """Return the maximum tokens of a draft on this instance; 0: it drafts nothing."""
    if scheduler.speculation == "off" or (scheduler.speculation == "auto" and is_gpu(instance.devices[0])):
        return 0
    return scheduler.max_draft_tokens


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
