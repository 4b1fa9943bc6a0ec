"""Tensor-parallel ranks whose steps are launched before the last one is read: the main rank's device is late, so a plan
reaches the followers before the tokens that it feeds exist. Ranks are threads here, so no gloo."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import VOCAB_SIZE, GreedySampler, chunks_of, make_prompt, write_checkpoint
from support.executors import LateExecutor, LateStep
from test_overlap_engine import DECODES, NUM_PAGES, NUM_SLOTS, compare, mixed_requests, serve_by
from thread_ranks import Ranks, ThreadRank

from chitu.engine.executor import CopyPage, StepPlan
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.errors import Internal
from chitu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3", num_layers=1)


class Device(LateExecutor):
    """Notes at each launch whether the step before has not even begun."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.ahead: list[bool] = []
        self.shapes = runner.shapes

    def launch(self, plan: StepPlan, on_layer: Any = None) -> LateStep:
        self.ahead.append(bool(self.unread) and not self.unread[-1].is_done())
        return super().launch(plan, on_layer)


def served(folder: Path, requests: list[Any], size: int, overlap: bool, recording: Any) -> tuple[Any, list[bool], Any]:
    """Return what was served, whether each launch went ahead of the step before, and the calls of each rank."""
    devices: list[Device] = []

    def late(runner: Any) -> Device:
        devices.append(Device(runner))
        return devices[0]

    sampler = Sampler(NUM_SLOTS, VOCAB_SIZE, torch.device("cpu"), (2,))
    options: dict[str, Any] = {"num_slots": NUM_SLOTS, "max_model_len": 128, "ops": TorchOps}
    ranks = Ranks(folder, size, NUM_PAGES, sampler=sampler, recording=recording, main=late, **options)
    found = serve_by(ranks.runner, requests, overlap)
    ranks.close()
    return found, devices[0].ahead, ranks.meeting.calls


@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"tp{size}")
def test_tokens_are_those_without_overlap_and_no_launch_waits(checkpoint: Any, size: int, recording: Any) -> None:
    folder, reference = checkpoint
    requests = mixed_requests(reference)
    off, none_ahead, _ = served(folder, requests, size, False, recording)
    on, ahead, calls = served(folder, requests, size, True, recording)
    compare(reference, requests, off, on)
    assert not any(none_ahead)
    assert len(ahead) > 60 and ahead.count(True) > 0.9 * len(ahead), "more than the first and retractions wait"
    assert calls[0] and all(each == calls[0] for each in calls), "the ranks do not make the same calls"


class KeepsLogits(GreedySampler):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def is_greedy(self, slots: list[int]) -> bool:
        return False

    def draws_of(self, slots: list[int]) -> None:
        return None

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        self.rows += logits.clone()
        return super().sample(logits, slots)


def logits_of(folder: Path, ahead: bool, rank: Any = ThreadRank) -> torch.Tensor:
    """Return the logits of two prompts and their decodes, each step launched before the last one is read, or after."""
    sampler = KeepsLogits()
    ranks = Ranks(folder, 2, sampler=sampler, ops=TorchOps, main=Device, rank=rank)
    prompts = [make_prompt(20), make_prompt(37, seed=4)]
    admit = [ranks.admit(slot, prompt, 64) for slot, prompt in enumerate(prompts)]
    chunks = [next(chunks_of(slot, len(prompt), 64, sample=True)) for slot, prompt in enumerate(prompts)]
    plans = [StepPlan(admit=admit, prefill=chunks)] + [StepPlan(decode=[0, 1]) for _ in range(6)]
    before = None
    for plan in plans:
        step = ranks.runner.launch(plan)
        if before is not None:
            before.result()
        before = step if ahead else None
        if not ahead:
            step.result()
    if before is not None:
        before.result()
    ranks.close()
    return torch.stack(sampler.rows)


class ForgetsTokens(ThreadRank):
    """A rank to which the tokens of the main rank do not come."""

    def broadcast(self, x: torch.Tensor) -> Callable[[], None]:
        wait = super().broadcast(x)
        return (lambda: None) if self.rank else wait


def test_logits_are_those_of_steps_that_are_read_first_and_a_lost_token_shows_in_them(checkpoint: Any) -> None:
    folder, _ = checkpoint
    right = logits_of(folder, ahead=False)
    assert len(right) == 14 and torch.equal(logits_of(folder, ahead=True), right)
    wrong = logits_of(folder, ahead=True, rank=ForgetsTokens)
    assert torch.equal(wrong[:2], right[:2]) and not torch.allclose(wrong[2:4], right[2:4], atol=1e-2)


def test_a_follower_that_lacks_a_token_says_so_in_the_next_step(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(checkpoint[0], 2, ops=TorchOps)
    monkeypatch.setattr(ranks.runners[1]._slots, "append_tokens", lambda slots, tokens: None)
    prompt = make_prompt(20)
    ranks.runner.execute(StepPlan(admit=[ranks.admit(0, prompt, 64)], prefill=list(chunks_of(0, 20, 64, sample=True))))
    with pytest.raises(threading.BrokenBarrierError):  # the main rank waits for a sum that its follower does not join
        ranks.runner.execute(StepPlan(decode=[0]))
    with pytest.raises(Internal, match="decode with kv_len 20 of 20 tokens"):
        ranks.followers[0].result(timeout=20)


def test_ranks_meet_behind_copies_of_pages(checkpoint: Any) -> None:
    """What a slower rank still copies must not be announced when the main rank is done."""
    ranks = Ranks(checkpoint[0], 2, ops=TorchOps)
    ranks.runner.execute(StepPlan(admit=[ranks.admit(0, make_prompt(20), 64)]))
    source, target = ranks.pages(32)
    ranks.runner.execute(StepPlan(copy=[CopyPage(0, source, target)]))
    assert ranks.meeting.calls == [[("all_reduce", (1,))]] * 2
    ranks.close()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_ranks_record_the_same_steps_and_replays_give_the_logits_of_launches(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    eager, _ = logits_and_recorded(tmp_path, None)
    recorded, steps = logits_and_recorded(tmp_path, Recording(Notes(), decode_sizes=(1, 2, 4), prefill_sizes=()))
    assert len(eager) == 2 + 6 * 2 + 3 and (eager - recorded).abs().max() <= 1e-5 * eager.abs().max()
    assert set(steps) == {1, 2, 4} and all(steps.count(size) % 2 == 0 for size in steps), "ranks record other steps"


class Notes(EagerRecorder):
    """Notes the rows of each recording."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def record(self, body: Any) -> Any:
        batch = inspect.getclosurevars(body).nonlocals["batch"]
        self.rows.append(len(batch.decode_slots))
        return super().record(body)


def logits_and_recorded(folder: Path, recording: Recording | None) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of two prompts and their decodes, with one and with both, and the rows of each recording."""
    sampler = KeepsLogits()
    options: dict[str, Any] = {"num_slots": 4, "max_model_len": 128}
    ranks = Ranks(folder, 2, sampler=sampler, ops=TorchOps, recording=recording, **options)
    ranks.runner.warmup()
    sampler.rows.clear()
    prompts = [make_prompt(20), make_prompt(37, seed=4)]
    admit = [ranks.admit(slot, prompt, 64) for slot, prompt in enumerate(prompts)]
    chunks = [next(chunks_of(slot, len(prompt), 64, sample=True)) for slot, prompt in enumerate(prompts)]
    ranks.runner.execute(StepPlan(admit=admit, prefill=chunks))
    for slots in [[0, 1]] * 6 + [[1]] * 3:
        ranks.runner.execute(StepPlan(decode=slots))
    ranks.close()
    calls = ranks.meeting.calls
    assert calls[0] == calls[1]
    rows = recording.recorder.rows if recording is not None else []  # type: ignore[attr-defined]
    return torch.stack(sampler.rows), rows
