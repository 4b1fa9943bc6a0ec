"""The loop of a tensor-parallel follower: wait for the main rank's next step, run it on its shard, repeat.

Runs on the main thread of ranks 1, 2, ... A follower has no port and decides nothing; while the instance is idle it
waits without a timeout. It ends when the main rank orders it (`run_follower` returns) or dies (`Lifeline`).
Invariant: it executes every plan that the main rank executes, in the same order, so slots and pages are always equal.
"""

from __future__ import annotations

from chitu.engine.model_runner import ModelRunner
from chitu.engine.parallel import RankGroup
from chitu.engine.process_watch import Lifeline
from chitu.engine.tp_executor import step_decoder


def run_follower(runner: ModelRunner, group: RankGroup, lifeline: Lifeline) -> None:
    """Run the main rank's steps until it shuts down the instance."""
    while True:
        order = step_decoder.decode(group.receive())
        if order.plan is None:
            lifeline.close()
            group.barrier()
            runner.close()
            group.close()
            return
        runner.append_tokens(order.slots, order.tokens)
        step = runner.launch(order.plan)  # it samples nothing: there is nothing to read
        if order.plan.copy:
            step.result()
        if order.plan.offload or order.plan.copy:
            group.barrier()  # as on the main rank: see `TensorParallelExecutor.execute`
