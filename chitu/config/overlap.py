"""Rule whether an instance launches a step before it has read the previous one (`scheduler.overlap`, ADR 6). Pure."""

from __future__ import annotations

from chitu.config.devices import is_gpu
from chitu.config.schema import InstanceConfig, SchedulerConfig


def overlaps_steps(scheduler: SchedulerConfig, instance: InstanceConfig) -> bool:
    """Return whether steps overlap. `auto` means on devices that compute asynchronously, which is CUDA. Never with
    several TP ranks, whatever the key is: the order for a step carries the tokens of the previous one to the
    followers."""
    if instance.tp_size > 1 or scheduler.overlap == "off":
        return False
    return scheduler.overlap == "on" or is_gpu(instance.devices[0])
