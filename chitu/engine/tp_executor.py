"""The ranks of one tensor-parallel instance: the executor of the main rank, and the loop of a follower. They talk over
a `RankGroup`.

A step is one small broadcast: the plan without what only the main rank needs (sampling). The tokens that it draws reach
the followers within the step, from device to device (`shared_draws.py`), so the next plan may be sent while it runs.
The step thread calls the executor; the last call (`close`) comes from the main thread, after the step thread has ended.

A follower (main thread of ranks 1, 2, ...) has no port and decides nothing. It ends when the main rank orders it
(`run_follower` returns) or dies (`Lifeline`). Invariant: it executes every plan that the main rank executes, in the
same order, so slots and pages are always equal.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.engine.executor import ExecutorInfo, LayerCallback, StepHandle, StepPlan, StepResult, run_warmup
from chitu.engine.model_runner import ModelRunner
from chitu.engine.process_watch import Lifeline, ProcessWatch, explaining
from chitu.engine.profiler import RankProfiler
from chitu.engine.rank_groups import RankGroup
from chitu.engine.weights import RankWeights
from chitu.engine.weights_loader import AdapterFolder, GivenBack, ReadWeights
from chitu.errors import Internal
from chitu.known_types import known
from chitu.net.threads import ServiceThread
from chitu.protocol.weights import SleepLevel

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""Time for the followers to receive the last order. They are idle by then."""


WeightsCall = Literal["begin", "begin_again", "collect", "change", "drop", "sleep", "unload"]


class StepOrder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The message to the followers."""

    plan: StepPlan | None
    """Plan to run; None if the instance shuts down, or if the order is another one."""
    weights: tuple[WeightsCall, str, tuple[AdapterFolder, ...]] | None = None
    """Call of the follower's `RankWeights`, with a path, or a level, and adapters."""
    record: bool | None = None
    """Argument of the follower's `ModelRunner.record`."""
    profile: tuple[str, int] | None = None
    """Arguments of the follower's `RankProfiler.begin`; an empty path: `end`."""


_encoder = msgspec.msgpack.Encoder()
step_decoder: msgspec.msgpack.Decoder[StepOrder] = msgspec.msgpack.Decoder(StepOrder)


def for_followers(plan: StepPlan) -> StepPlan:
    """Return the plan without parameters of sampling."""
    if not plan.admit:
        return plan
    return msgspec.structs.replace(plan, admit=[msgspec.structs.replace(each, sampling=None) for each in plan.admit])


class TensorParallelExecutor:
    """An `Executor`. `watch` ends this process when a follower dies; `close` disarms it before the followers end."""

    def __init__(
        self, runner: ModelRunner, group: RankGroup, watch: ProcessWatch, end_timeout_s: float = END_TIMEOUT_S
    ) -> None:
        self._runner = runner
        self._group = group
        self._watch = watch
        self._end_timeout_s = end_timeout_s

    @property
    def info(self) -> ExecutorInfo:
        return self._runner.info

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepHandle:
        if plan.first_tokens and not {first.slot for first in plan.first_tokens}.isdisjoint(plan.decode):
            raise Internal("a first token is fed back in the step that samples it: the followers cannot know it")
        self._group.send(_encoder.encode(StepOrder(for_followers(plan))))
        step = self._runner.launch(plan, on_layer)
        if plan.offload or plan.encode:
            # The pages may be announced next, and a peer would overwrite what a slower rank has not copied yet. Nor has
            # it read the patches of images yet, whose files go when the step is done.
            self._group.barrier()
        return step

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        """Launch a step and return its result."""
        return self.launch(plan, on_layer).result()

    def forget(self, slots: Collection[int]) -> None:
        with explaining():
            raise Internal("a step raised on the main rank, and the other ranks are in the middle of it")

    @property
    def saved_keys(self) -> frozenset[int]:
        return self._runner.saved_keys

    def warmup(self) -> None:
        shapes = self._runner.shapes
        run_warmup(self, shapes)
        self.record(shapes.samples)

    def record(self, is_decoding: bool) -> None:
        self._group.send(_encoder.encode(StepOrder(None, record=is_decoding)))
        self._runner.record(is_decoding)

    def close(self) -> None:
        """Shut down the followers and wait until they have received that order. One that hangs ends with this process,
        whose end is near."""
        self._watch.disarm()
        order = ServiceThread("tp-end", self._order_end)
        order.start()
        order.join(self._end_timeout_s)
        if order.is_alive():
            logger.warning("shutting down without waiting for a rank that hangs")
            return
        self._runner.close()
        self._group.close()

    def _order_end(self) -> None:
        self._group.send(_encoder.encode(StepOrder(None)))
        self._group.barrier()


class TensorParallelProfiler:
    """Records what all ranks compute, a file each. Step thread of the main rank."""

    def __init__(self, group: RankGroup) -> None:
        self._own = RankProfiler(MAIN_RANK)
        self._group = group

    def begin(self, stem: str, max_bytes: int) -> None:
        self._group.send(_encoder.encode(StepOrder(None, profile=(stem, max_bytes))))
        self._own.begin(stem, max_bytes)

    def end(self) -> None:
        self._group.send(_encoder.encode(StepOrder(None, profile=("", 0))))
        self._own.end()


class TensorParallelWeights:
    """A `WeightsLoader` of all ranks. What differs between them ends the change, as any error of one does."""

    def __init__(self, own: RankWeights, group: RankGroup) -> None:
        self._own = own
        self._group = group
        self._found: ReadWeights | None = None

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._send("begin", path, adapters)
        self._found = None
        self._own.begin(path, adapters)

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        self._send("begin_again", path, adapters)
        self._found = None
        self._own.begin_again(path, adapters)

    def poll(self) -> ReadWeights | None:
        if self._found is None and self._own.poll() is not None:
            self._send("collect")
            ranks = _collected(self._own, self._group)
            errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(ranks) if each.error]
            if not errors and len({(each.model_hash, each.adapters) for each in ranks}) > 1:
                errors = ["the ranks found different weights in this folder"]
            self._found = ReadWeights(error=errors[0]) if errors else ranks[MAIN_RANK]
        return self._found

    def change(self) -> None:
        self._send("change")
        self._own.change()
        self._group.barrier()
        self._found = None

    def unload(self, number: int) -> None:
        self._send("unload", "", [AdapterFolder(number, "", "")])
        self._own.unload(number)

    def drop(self) -> None:
        self._send("drop")
        self._own.drop()
        self._found = None

    def why_no_sleep(self, level: SleepLevel) -> str:
        return self._own.why_no_sleep(level)

    def sleep(self, level: SleepLevel) -> GivenBack:
        self._send("sleep", str(level))
        self._found = None
        return _slept(self._own, self._group, level)

    def _send(self, call: WeightsCall, path: str = "", adapters: Sequence[AdapterFolder] = ()) -> None:
        self._group.send(_encoder.encode(StepOrder(None, (call, path, tuple(adapters)))))


def _collected(weights: RankWeights, group: RankGroup) -> list[ReadWeights]:
    """Return what each rank has read, once all have. A collective operation."""
    return [
        msgspec.msgpack.decode(each, type=known(ReadWeights)) for each in group.collect(_encoder.encode(weights.wait()))
    ]


def _slept(weights: RankWeights, group: RankGroup, level: SleepLevel) -> GivenBack:
    """Give memory back on every rank, and return what all have given. A collective operation."""
    ranks = [
        msgspec.msgpack.decode(each, type=known(GivenBack))
        for each in group.collect(_encoder.encode(weights.sleep(level)))
    ]
    return GivenBack(sum(each.num_bytes for each in ranks), ranks[MAIN_RANK].keeps)


def _call_weights(
    weights: RankWeights, group: RankGroup, call: WeightsCall, path: str, adapters: Sequence[AdapterFolder]
) -> None:
    """Do on a follower what the main rank does with its own weights."""
    if call == "begin":
        weights.begin(path, adapters)
    elif call == "begin_again":
        weights.begin_again(path, adapters)
    elif call == "sleep":
        _slept(weights, group, 2 if path == "2" else 1)
    elif call == "collect":
        _collected(weights, group)
    elif call == "change":
        weights.change()
        group.barrier()
    elif call == "unload":
        for each in adapters:
            weights.unload(each.number)
    else:
        weights.drop()


def run_follower(runner: ModelRunner, group: RankGroup, lifeline: Lifeline, weights: RankWeights | None = None) -> None:
    """Run the main rank's steps until it shuts down the instance. `weights`: None if they are never changed."""
    profiler = RankProfiler(group.rank)
    while True:
        order = step_decoder.decode(group.receive())
        if order.weights is not None and weights is not None:
            _call_weights(weights, group, *order.weights)
            continue
        if order.record is not None:
            runner.record(order.record)
            continue
        if order.profile is not None:
            stem, max_bytes = order.profile
            profiler.begin(stem, max_bytes) if stem else profiler.end()
            continue
        if order.plan is None:
            lifeline.close()
            group.barrier()
            runner.close()
            group.close()
            return
        runner.launch(order.plan)  # it samples nothing: there is nothing to read
        if order.plan.offload or order.plan.encode:
            group.barrier()  # as on the main rank: see `TensorParallelExecutor.launch`
