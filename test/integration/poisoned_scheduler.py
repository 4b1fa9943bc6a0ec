"""Process entry of P and D with the real engine, which raises when it computes a step with a poisonous request: on P
for a token of the prompt, on D for one that `logit_bias` names. `python -m poisoned_scheduler`"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from chitu.config.topology import Instance, Topology
from chitu.engine.executor import ExecutorInfo, LayerCallback, StepHandle, StepPlan
from chitu.engine.model_runner import ModelRunner
from chitu.net.threads import end_process
from chitu.process.progress import ProgressWriter
from chitu.protocol import unpack_i32
from chitu.serve.factories import Factories, build_real_rank
from chitu.serve.scheduler import main

POISON_OF_P = 501
POISON_OF_D = 502


class PoisonedRunner:
    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.model = inner.model
        self._poisoned: dict[int, bool] = {}
        self._warm_thread: int | None = None

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    @property
    def saved_keys(self) -> frozenset[int]:
        return self._inner.saved_keys

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        if threading.get_ident() != self._warm_thread:  # otherwise no step works, and every request of the test fails
            raise RuntimeError("libraries keep handles and plans for each thread: this one was not warmed up")
        for admit in plan.admit:
            if admit.sampling is None:
                self._poisoned[admit.slot] = POISON_OF_P in unpack_i32(admit.token_ids)
            else:
                self._poisoned[admit.slot] = POISON_OF_D in admit.sampling.logit_bias
        handle = self._inner.launch(plan, on_layer)
        slots = [*plan.decode, *(part.slot for part in (*plan.prefill, *plan.first_tokens))]
        if any(self._poisoned[slot] for slot in slots):
            raise IndexError("index out of range in self")
        return handle

    def forget(self, slots: Collection[int]) -> None:
        self._inner.forget(slots)

    def warmup(self) -> None:
        self._warm_thread = threading.get_ident()
        self._inner.warmup()

    def close(self) -> None:
        self._inner.close()


def build_rank(topology: Topology, instance: Instance, tp_rank: int, progress: ProgressWriter) -> Any:
    rank: Any = build_real_rank(topology, instance, tp_rank, progress)
    return replace(rank, runner=PoisonedRunner(rank.runner))


if __name__ == "__main__":
    end_process(main(factories=Factories(build_rank)))
