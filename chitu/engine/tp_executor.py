"""The executor of the main rank of a tensor-parallel instance: broadcast each step to the followers, then run it.

A step is one small broadcast: the plan without what only the main rank needs (sampling), and the tokens that the last
step sampled, which the followers do not have yet. The followers run `engine/follower.py`. Called by the step thread;
the last call (`close`) comes from the main thread, after the step thread has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from chitu.engine.executor import DoneStep, ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.engine.model_runner import ModelRunner
from chitu.engine.parallel import RankGroup
from chitu.engine.process_watch import ProcessWatch, explaining
from chitu.engine.warmup import run_warmup
from chitu.errors import Internal
from chitu.net.threads import ServiceThread

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""Time for the followers to receive the last order. They are idle by then."""


class StepOrder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The message to the followers."""

    slots: list[int]
    """Slots that sampled in the step before: `tokens[i]` for `slots[i]`."""
    tokens: list[int]
    plan: StepPlan | None
    """Plan to run; None if the instance shuts down."""


_encoder = msgspec.msgpack.Encoder()
step_decoder: msgspec.msgpack.Decoder[StepOrder] = msgspec.msgpack.Decoder(StepOrder)


def for_followers(plan: StepPlan) -> StepPlan:
    """Return the plan without sampling: admissions without parameters, no first tokens."""
    admit = [msgspec.structs.replace(each, sampling=None) for each in plan.admit]
    return msgspec.structs.replace(plan, admit=admit, first_tokens=[])


class TensorParallelExecutor:
    """An `Executor`. `watch` ends this process when a follower dies; `close` disarms it before the followers end."""

    def __init__(
        self, runner: ModelRunner, group: RankGroup, watch: ProcessWatch, end_timeout_s: float = END_TIMEOUT_S
    ) -> None:
        self._runner = runner
        self._group = group
        self._watch = watch
        self._end_timeout_s = end_timeout_s
        self._last = StepResult([], [])

    @property
    def info(self) -> ExecutorInfo:
        return self._runner.info

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        """Run the step to its end: the next broadcast carries its tokens."""
        return DoneStep(self.execute(plan, on_layer))

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if plan.first_tokens and not {first.slot for first in plan.first_tokens}.isdisjoint(plan.decode):
            raise Internal("a first token is fed back in the step that samples it: the followers cannot know it")
        self._group.send(_encoder.encode(StepOrder(self._last.slots, self._last.tokens, for_followers(plan))))
        self._last = self._runner.execute(plan, on_layer)
        if plan.offload or plan.copy:
            # The pages may be announced next, and a peer would overwrite what a slower rank has not copied yet.
            self._group.barrier()
        return self._last

    def forget(self, slots: Collection[int]) -> None:
        with explaining():
            raise Internal("a step raised on the main rank, and the other ranks are in the middle of it")

    @property
    def saved_keys(self) -> frozenset[int]:
        return self._runner.saved_keys

    def warmup(self) -> None:
        run_warmup(self, self._runner.shapes)

    def close(self) -> None:
        """Shut down the followers and wait until they have received that order. One that hangs ends with this process,
        whose end is near."""
        self._watch.disarm()
        order = ServiceThread("tp-end", self._order_end)
        order.start()
        order.join(self._end_timeout_s)
        if order.is_alive():
            logger.warning("ending without waiting any longer for a rank that hangs")
            return
        self._runner.close()
        self._group.close()

    def _order_end(self) -> None:
        self._group.send(_encoder.encode(StepOrder([], [], None)))
        self._group.barrier()
