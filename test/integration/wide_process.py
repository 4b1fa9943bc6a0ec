"""A member of a group that shares experts, as a process of its own: `python -m wide_process RANK SIZE FOLDER MEETING`.
Runs its script over gloo and real bells, and writes its logits and what it counted to `MEETING.RANK`."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from engine_checkpoints import Engine
from wide_ranks import RowsBySlot, ragged_script

from chitu.engine.executor import StepHandle, StepPlan
from chitu.engine.expert_group import ExpertGroup, GroupLinks
from chitu.engine.lockstep import join_lockstep

TIMEOUT = timedelta(seconds=40)
IDLE_S = 0.005
"""Time of a step without rows, unless another member has some."""


def main(rank: int, size: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), size), rank=rank, world_size=size)
    compute, turns = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
    sampler, rung = RowsBySlot(), threading.Event()
    experts = ExpertGroup(GroupLinks(compute))
    engine = Engine(folder, sampler=sampler, experts=experts)
    executor = join_lockstep(engine.runner, engine.runner.shapes, turns, rung.set)

    def rest() -> None:
        if executor.must_step:
            executor.lend()
        else:
            rung.wait(IDLE_S)
            rung.clear()

    def launch(plan: StepPlan) -> StepHandle:
        if not plan.rows.rows:
            rest()
        return executor.launch(plan)

    logits = ragged_script(rank).run(engine, launch, sampler)
    counts = executor.counts
    torch.save(logits, f"{meeting}.{rank}.part")
    os.rename(f"{meeting}.{rank}.part", f"{meeting}.{rank}")
    while executor.must_step or not all(Path(f"{meeting}.{each}").exists() for each in range(size)):
        rest()
    print(rank, counts.computed, counts.lent, counts.empty, flush=True)
    executor.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
