"""The lane of prompts: a thread on which chunks of prompts compute while the step thread goes on with decode steps.

The cores are divided while a chunk computes; without one, a step has them all. C code runs without Python's lock, so
two threads are enough. The lane reads the weights, the page table and pages, and writes the pages of its chunks and
nothing else. Slots, the sampler and what is drawn belong to the step thread, which draws a chunk's token when it reads
the chunk. So the tokens are those of one lane.

Invariants: one chunk step at a time; a chunk counts, for the scheduler, when it is read; until then all that was held
at its launch stays held (`Resources`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from chitu.config.devices import is_gpu
from chitu.config.schema import SchedulerConfig, Topology
from chitu.config.topology import Instance, threads_of
from chitu.engine.executor import StepResult
from chitu.errors import Internal
from chitu.models.config import ModelSpec
from chitu.net.control_groups import usable_cores
from chitu.types import Role

T = TypeVar("T")


def why_one_lane(instance: Instance, spec: ModelSpec, threads: int, has_adapters: bool) -> str:
    """Return why prompts of a unified instance cannot compute beside its decode steps; empty if they can."""
    config = instance.config
    if is_gpu(config.devices[0]):
        return "on GPUs prompts compute in the steps that decode"
    if config.num_devices > 1:
        return "several ranks compute each step together"
    if spec.state:
        return f"{spec.architecture} has a recurrent state"
    if spec.code != "own":
        return f"{spec.architecture} is computed by the modules of transformers"
    if spec.has_draft_layer:
        return "a layer of the model drafts (speculation: mtp)"
    if has_adapters:
        return "the model has LoRA adapters"
    return "it has one thread" if threads < 2 else ""


def num_lanes(scheduler: SchedulerConfig, instance: Instance) -> int:
    """Return in how many lanes an instance computes (`scheduler.lanes`), which `lane_problems` has allowed."""
    return 2 if scheduler.lanes == 2 and instance.role is Role.UNIFIED else 1


def lane_problems(topology: Topology, spec: ModelSpec, here: Sequence[Instance]) -> Iterator[str]:
    """Yield error texts on unified instances that cannot have the two lanes that are asked for."""
    if topology.scheduler.lanes != 2:
        return
    for instance in here:
        threads = threads_of(topology, instance, usable_cores())
        if instance.role is Role.UNIFIED and (
            why := why_one_lane(instance, spec, threads, bool(topology.model.adapters))
        ):
            yield f"scheduler.lanes is 2, but {instance.name} can have one lane only: {why}"


class BesideStep(Generic[T]):
    """A step in the lane of prompts. Implements `StepHandle`."""

    def __init__(self, computed: Future[T], finish: Callable[[T], StepResult], on_end: Callable[[], None]) -> None:
        self._computed = computed
        self._finish = finish
        self._on_end = on_end

    def is_done(self) -> bool:
        return self._computed.done()

    def result(self) -> StepResult:
        try:
            computed = self._computed.result()
        finally:
            self._on_end()
        return self._finish(computed)

    def drop(self) -> None:
        """Wait until the step computes no longer, however it ends."""
        self._computed.exception()
        self._on_end()


class Lanes:
    """The threads of an instance, divided while a chunk computes. Step thread only. `set_threads` sets how many threads
    an operation gets that the calling thread starts."""

    def __init__(self, threads: int, set_threads: Callable[[int], None]) -> None:
        self._threads = threads
        self._decode_threads = max(1, threads // 2)
        self._set_threads = set_threads
        prompt_threads = max(1, threads - self._decode_threads)
        self._lane = ThreadPoolExecutor(1, "prompts", initializer=lambda: set_threads(prompt_threads))
        self._is_busy = False

    def start(self, compute: Callable[[], T], finish: Callable[[T], StepResult]) -> BesideStep[T]:
        """Compute in the lane. The result of the step is what `finish` makes of it, on the thread that reads it."""
        if self._is_busy:
            raise Internal("a step was launched in the lane of prompts, which computes another one")
        self._is_busy = True
        self._set_threads(self._decode_threads)
        return BesideStep(self._lane.submit(compute), finish, self._end)

    def _end(self) -> None:
        self._is_busy = False
        self._set_threads(self._threads)

    def close(self) -> None:
        """End the thread. Nothing computes in it any longer."""
        self._lane.shutdown()
