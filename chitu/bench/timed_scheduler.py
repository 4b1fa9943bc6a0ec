"""An instance whose steps take a stated time and compute nothing: `python -m chitu.bench.timed_scheduler --role ...`.

`chitu.serve.scheduler` with another executor, so that scheduling, transfers, sockets and threads are the real ones:
what a load benchmark measures is the system and not the machine. `FakeExecutor` checks every plan; the logits rows that
cross from P to D are its own. Started by `LocalCluster` through its `Entries`; the time passes on the step thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import time

from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.engine.fake import FakeExecutor
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.launch.process import die_with_torchrun
from chitu.pd_service import EngineParts
from chitu.serve.scheduler import main

STEP_S = 0.010
"""Of every step."""
PROMPT_TOKEN_S = 0.0001
"""And so much for each prompt token in it: 10,000 tokens a second at most."""


class TimedExecutor:
    """A `FakeExecutor` that takes its time."""

    def __init__(self, inner: FakeExecutor) -> None:
        self._inner = inner

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if plan.prefill or plan.decode or plan.first_tokens:
            time.sleep(STEP_S + PROMPT_TOKEN_S * sum(chunk.length for chunk in plan.prefill))
        return self._inner.execute(plan, on_layer)

    def warmup(self) -> None: ...

    def close(self) -> None:
        self._inner.close()


def with_timed_steps(parts: EngineParts) -> EngineParts:
    """The same instance, with made-up tokens after a stated time in place of the model's."""
    cache, info = parts.cache, parts.executor.info
    if parts.aux is None:
        return dataclasses.replace(parts, executor=TimedExecutor(FakeExecutor(info, cache.num_pages, cache.page_size)))
    rows = parts.aux.get_buf_infos()
    memory = (ctypes.c_uint8 * rows.lengths[0]).from_address(rows.ptrs[0])  # lives as long as the pool
    inner = FakeExecutor(
        info,
        cache.num_pages,
        cache.page_size,
        parts.aux.num_slots,
        memoryview(memory),
        aux_row_bytes=rows.item_lengths[0],
        aux_offset=AUX_HEADER_BYTES,
    )
    return dataclasses.replace(parts, executor=TimedExecutor(inner))


if __name__ == "__main__":
    die_with_torchrun()
    sys.exit(main(adapt=with_timed_steps))
