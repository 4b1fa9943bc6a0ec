"""A group of members that share experts, whose ranks are threads of the test: without gloo, sockets or ports."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from checkpoint_table import Adapted
from engine_checkpoints import PAGE_SIZE, Engine, GreedySampler, chunks_of, make_prompt
from support.lockstep import Table
from thread_ranks import Meeting, NoLifeline, ThreadRank

from chitu.engine.build import load_model
from chitu.engine.executor import StepHandle, StepPlan
from chitu.engine.expert_group import ExpertGroup, Way
from chitu.engine.lockstep import RecordingExecutor, Turn
from chitu.engine.memory_budget import kv_layout
from chitu.engine.model_runner import ModelRunner
from chitu.engine.process_watch import ProcessWatch
from chitu.engine.step_graphs import Recording
from chitu.engine.tp_executor import TensorParallelExecutor, run_follower
from chitu.kv_cache.pool import KVPool
from chitu.models.adapters import hashes_of, read_adapters
from chitu.models.config import model_hash, read_model_spec
from chitu.ops.torch_ops import TorchOps

PATIENCE_S = 60.0
NUM_SLOTS = 8
MAX_MODEL_LEN = 128
NEVER = 1 << 30
"""Step of a member that is done."""


class ThreadLinks:
    """`Links` of one rank, which count the bytes that it sends to others."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.bytes_sent = 0

    def all_gather(self, x_RC: torch.Tensor) -> torch.Tensor:
        self.bytes_sent += (self.size - 1) * x_RC.nbytes
        found = self.meeting.gather(self.rank, x_RC)
        assert {each.shape for each in found} == {x_RC.shape}, "the members have unlike numbers of rows"
        return torch.cat(found)

    def reduce_scatter(self, x_RC: torch.Tensor) -> torch.Tensor:
        self.bytes_sent += (self.size - 1) * x_RC.nbytes // self.size
        return torch.stack(self.meeting.gather(self.rank, x_RC)).sum(0).chunk(self.size)[self.rank]

    def all_to_all(self, x_RC: torch.Tensor, sends: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        blocks = x_RC.split(list(sends))
        self.bytes_sent += sum(block.nbytes for to, block in enumerate(blocks) if to != self.rank)
        sizes = self.meeting.gather(self.rank, torch.tensor(list(sends)))
        found = self.meeting.gather(self.rank, x_RC)
        parts = [each.split(size.tolist())[self.rank] for each, size in zip(found, sizes, strict=True)]
        assert [len(part) for part in parts] == list(takes)
        return torch.cat(parts)


class RowsBySlot(GreedySampler):
    """Keeps the logits of every slot."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, torch.Tensor]] = []

    def is_greedy(self, slots: list[int]) -> bool:
        """Draw from logits also behind a recording, which has argmax in it."""
        return False

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        self.rows += zip(slots, logits.clone(), strict=True)
        return super().sample(logits, slots)


Event = tuple[int, int, int]
"""A step, and the length of a prompt that begins in it and of its answer."""


def plain_prompt(length: int, seed: int) -> list[int]:
    """Return a prompt without special tokens."""
    return [10 + token % 470 for token in make_prompt(length, seed)]


class Script:
    """What a member does in each step: in every one each of its sequences takes its next chunk or decode."""

    def __init__(self, events: Sequence[Event], seed: int) -> None:
        self.events, self.seed = sorted(events), seed
        self.steps = max([step for step, _, _ in events], default=0) + 1

    def run(self, pages: Engine, launch: Callable[[StepPlan], Any], sampler: RowsBySlot) -> list[torch.Tensor]:
        """Return the logits of each prompt, in the order of the events. `launch` gets empty plans while idle."""
        pending: dict[int, list[Any]] = {}
        left: dict[int, int] = {}
        number: dict[int, int] = {}
        rows: list[list[torch.Tensor]] = [[] for _ in self.events]
        free, released, step = list(range(NUM_SLOTS)), list[int](), 0
        while step < self.steps or left:
            admit, release, released = [], released, []
            free += release
            for at, (begins, length, count) in enumerate(self.events):
                if begins == step:
                    slot = free.pop(0)
                    admit.append(pages.admit(slot, plain_prompt(length, self.seed + at), length + count))
                    pending[slot], left[slot] = list(chunks_of(slot, length, 37, sample=True)), count
                    number[slot] = at
            prefill = [chunks.pop(0) for chunks in pending.values() if chunks]
            decode = [slot for slot in left if not pending[slot] and slot not in {chunk.slot for chunk in prefill}]
            result = launch(StepPlan(release=release, admit=admit, prefill=prefill, decode=decode)).result()
            for slot, row in sampler.rows:
                rows[number[slot]].append(row)
            sampler.rows.clear()
            for slot in result.slots:
                left[slot] -= 1
                if not left[slot]:
                    del left[slot], pending[slot]
                    released.append(slot)
            step += 1
        return [torch.stack(each) for each in rows]


def ragged_script(rank: int, seed: int = 3, steps: int = 24) -> Script:
    """Return prompts of odd lengths at odd times. All ranks but the first are idle at the start, and all at times."""
    rng = random.Random(100 * seed + rank)
    events, step = [], 0 if rank == 0 else 6 + 3 * rank
    while step < steps:
        for _ in range(rng.choice((1, 1, 2, 3))):
            events.append((step, rng.choice((1, 5, 16, 33, 70)), rng.randrange(2, 6)))
        step += rng.randrange(5, 13)
    return Script(events, 17 * rank)


class Member:
    """A data rank: its executor for the caller, its followers in threads."""

    def __init__(self, wide: WideRanks, data_rank: int) -> None:
        self.data_rank, self.sampler = data_rank, RowsBySlot()
        tp_meeting = Meeting(wide.tp_size)
        shards = [ThreadRank(tp_meeting, rank) for rank in range(wide.tp_size)]
        self.links = [ThreadLinks(wide.meetings[rank], data_rank) for rank in range(wide.tp_size)]
        self.models, self.pools, runners = [], [], []
        for shard, links in zip(shards, self.links, strict=True):
            experts = ExpertGroup(links if links.size > 1 else None, shard.rank, wide.tp_size, wide.way)
            model = load_model(
                wide.path,
                "float32",
                max_model_len=MAX_MODEL_LEN,
                shard=shard if wide.tp_size > 1 else None,
                adapters=wide.adapters,
                spread=experts,
                ops=TorchOps() if wide.recording is not None else None,
            )
            layout = kv_layout(wide.spec, PAGE_SIZE, "float32", wide.tp_size, model_hash(wide.path), "float32")
            layout = msgspec.structs.replace(layout, adapters=hashes_of(wide.adapters))
            self.models.append(model)
            num_aux, has_scratch = 0 if shard.rank else 8, wide.recording is not None
            pool = KVPool(layout, 256, num_aux, has_scratch=has_scratch, num_state_slots=NUM_SLOTS + 1)
            self.pools.append(pool)
            sampler, recording = None if shard.rank else self.sampler, wide.recording
            sizes = NUM_SLOTS, MAX_MODEL_LEN
            runners.append(ModelRunner(wide.spec, model, pool, *sizes, sampler, recording, experts=experts))
        self.runners = runners
        inner: RecordingExecutor = runners[0]
        self._followers = []
        if wide.tp_size > 1:
            inner = TensorParallelExecutor(runners[0], shards[0], ProcessWatch([]))
            for runner, shard in zip(runners[1:], shards[1:], strict=True):
                follower = threading.Thread(target=run_follower, args=(runner, shard, NoLifeline()), daemon=True)
                follower.start()
                self._followers.append(follower)
        self.executor = wide.table.join(data_rank, inner, runners[0].shapes)
        self._free = list(range(256))
        random.Random(7).shuffle(self._free)
        self._num_state_slots = self.pools[0].num_state_slots
        self.chosen = wide.chosen

    pages = Engine.pages
    admit = Engine.admit
    state_slot = Engine.state_slot

    def run(self, script: Script, steps: list[int]) -> list[torch.Tensor]:
        """Run a script. No member is a step ahead of another one in it (`steps`): one that is idle waits, and lends."""

        def launch(plan: StepPlan) -> StepHandle:
            steps[self.data_rank] += 1
            self.lend_while(lambda: min(steps) < steps[self.data_rank])
            return self.executor.launch(plan)

        logits = script.run(self, launch, self.sampler)  # type: ignore[arg-type]
        steps[self.data_rank] = NEVER
        return logits

    def lend_while(self, is_on: Callable[[], bool]) -> None:
        """Take turns without rows, as an instance without requests does."""
        while is_on():
            if self.executor.must_step:
                self.executor.lend()
            else:
                time.sleep(0.0005)

    def close(self) -> None:
        self.executor.close()
        for follower in self._followers:
            follower.join(PATIENCE_S)


class WideRanks:
    """All members."""

    def __init__(
        self,
        path: Path,
        dp_size: int,
        tp_size: int = 1,
        way: Way = "auto",
        adapted: Adapted | None = None,
        recording: Recording | None = None,
    ) -> None:
        """`adapted`: LoRA adapters, and the slots that have one. `recording`: how steps are recorded, if they are."""
        self.path, self.tp_size, self.way, self.recording = path, tp_size, way, recording
        self.spec = read_model_spec(path, MAX_MODEL_LEN)
        self.adapters = read_adapters(adapted.adapters, self.spec, path) if adapted is not None else []
        self.chosen = adapted.chosen if adapted is not None else {}
        self.meetings = [Meeting(dp_size) for _ in range(tp_size)]
        self.turns: list[list[Turn]] = []
        self.table = Table(dp_size, self.turns.append)
        self.members = [Member(self, rank) for rank in range(dp_size)]

    def run(self, scripts: Sequence[Script]) -> list[list[torch.Tensor]]:
        """Run a script on every member at the same time, each in a thread, and return its logits. A member that is done
        lends until all are. Raises what a member raises."""
        steps = [0] * len(scripts)
        results: list[list[torch.Tensor]] = [[] for _ in scripts]
        errors: list[BaseException] = []

        def work(member: Member, script: Script) -> None:
            try:
                torch.set_num_threads(1)
                results[member.data_rank] = member.run(script, steps)
                member.lend_while(lambda: min(steps) < NEVER or member.executor.must_step)
            except BaseException as error:
                errors.append(error)
                self.table.abort()
                for meeting in self.meetings:
                    meeting.barrier.abort()

        pairs = zip(self.members, scripts, strict=True)
        threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a member waits for another one"
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return results

    def close(self) -> None:
        for member in self.members:
            member.close()


def alone(path: Path, scripts: Sequence[Script], adapted: Adapted | None = None) -> list[list[torch.Tensor]]:
    """Return the logits of the same scripts on one rank that has all experts."""
    results = []
    for script in scripts:
        sampler = RowsBySlot()
        engine = Engine(path, sampler=sampler, adapters=adapted.adapters if adapted is not None else {})
        engine.chosen = adapted.chosen if adapted is not None else {}
        results.append(script.run(engine, engine.runner.launch, sampler))
    return results


def worst_error(found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> float:
    """Return the largest error of a logit, relative to the largest logit of its prompt."""
    pairs = [pair for mine, theirs in zip(found, expected, strict=True) for pair in zip(mine, theirs, strict=True)]
    assert pairs and all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
