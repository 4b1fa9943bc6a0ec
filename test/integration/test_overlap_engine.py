"""The real engine under the scheduler: the same tokens whether a step is launched before the last one is read or after,
with recorded steps and without. And the path of the tokens to the host, with marks in place of CUDA events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from engine_checkpoints import PAGE_SIZE, VOCAB_SIZE, Engine, expected_tokens, make_prompt, write_checkpoint
from support.clock import FakeClock
from support.drafts import AllDrafts
from support.requests import unified_request

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, SchedulerConfig
from chitu.engine.executor import MAX_UNREAD_STEPS, StepResult
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.engine.step_tokens import StepTokens
from chitu.errors import Internal
from chitu.grammars import GrammarStore
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.roles import DecodeRole
from chitu.instance.token_manager import TokenManager
from chitu.ops.torch_ops import TorchOps
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import CancelRequest, SamplingParams, pack_i32, token_codec

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PAGES = 14
NUM_SLOTS = 4
DECODES = Recording(EagerRecorder(), decode_sizes=(1, 2), prefill_sizes=())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, write_checkpoint(folder, "qwen3", num_layers=1)


@dataclass
class Served:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    retractions: int = 0
    steps: int = 0

    def take(self, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        logprobs = dict(batch.logprobs)
        for place, (room, token) in enumerate(zip(batch.rooms, batch.tokens, strict=True)):
            self.tokens.setdefault(room[-1], []).append(token)
            if place in logprobs:
                self.logprobs.setdefault(room[-1], []).append(logprobs[place])
        for finish in batch.finished:
            self.reasons[finish.room[-1]] = finish.reason
        return True


def serve(
    folder,
    requests: list[tuple[list[int], SamplingParams]],
    overlap: bool,
    recording: Recording | None,
    sampler=None,
    grammars: GrammarStore | None = None,
    draft_source=None,
    lanes: int = 1,
    is_cached: bool = False,
    **options,
):
    sampler = sampler or Sampler(NUM_SLOTS, VOCAB_SIZE, torch.device("cpu"), (2,))
    engine = Engine(
        folder,
        **{"ops": TorchOps(), **options},
        num_pages=NUM_PAGES,
        num_slots=NUM_SLOTS,
        max_model_len=128,
        recording=recording,
        sampler=sampler,
    )
    if lanes == 2:
        engine.runner.use_lanes(2)
    served = serve_by(engine.runner, requests, overlap, grammars, draft_source, lanes == 2, is_cached)
    engine.runner.close()
    return served


def serve_by(
    runner,
    requests,
    overlap: bool,
    grammars: GrammarStore | None = None,
    draft_source=None,
    has_lane: bool = False,
    is_cached: bool = False,
) -> Served:
    """Submit one more request per turn, on a pool in which not all of them can grow; cancel the last one."""
    served = Served()
    cache = PagedKVCacheManager(NUM_PAGES, PAGE_SIZE, b"model" if is_cached else None)
    config = SchedulerConfig(
        max_running_requests=NUM_SLOTS, max_batched_tokens=48, chunk_size=23, reserved_decode_tokens=1
    )
    core = InstanceCore(
        SchedulerSettings(config, DeadlineConfig(), overlap=overlap),
        LoadedEngine(runner, cache, grammars=grammars, lane=runner if has_lane else None),
        TokenManager(1, served.take),
        lambda room, error: None,
        FakeClock(),
    )
    if draft_source is not None:
        core.drafts = AllDrafts(draft_source, NUM_SLOTS, VOCAB_SIZE)
    scheduler = PDScheduler(core, DecodeRole(core))
    for index, (prompt, sampling) in enumerate(requests):
        scheduler.submit(unified_request(index.to_bytes(16, "big"), f"r{index}", pack_i32(prompt), sampling))
        scheduler.step()
    while len(requests) - 1 not in served.tokens:
        scheduler.step()
    scheduler.submit(CancelRequest((len(requests) - 1).to_bytes(16, "big")))
    while not scheduler.is_idle:
        scheduler.step()
    scheduler.step()
    cache.check_idle()
    served.retractions, served.steps = scheduler.load.retractions, scheduler.load.steps
    return served


@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
def test_tokens_and_ends_are_those_without_overlap(checkpoint, recording):
    folder, reference = checkpoint
    requests = mixed_requests(reference)
    off = serve(folder, requests, overlap=False, recording=recording)
    on = serve(folder, requests, overlap=True, recording=recording)
    compare(reference, requests, off, on)


def mixed_requests(reference) -> list[tuple[list[int], SamplingParams]]:
    """Return requests of all kinds, of which the third ends at a stop id."""
    greedy = SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True)
    prompts = [make_prompt(length) for length in (3, 40, 16, 30, 25, 9, 31, 12)]
    stop = expected_tokens(reference, prompts[2], 12)[11]
    seeded = SamplingParams(max_tokens=33, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True)
    params = [
        greedy,
        seeded,
        SamplingParams(max_tokens=36, temperature=0.0, stop_token_ids=(stop,)),
        SamplingParams(max_tokens=36, temperature=1.0, top_k=9, repetition_penalty=1.3, min_tokens=20, seed=13),
        greedy,
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=30, temperature=0.7, frequency_penalty=0.5, logit_bias={5: 2.0}, seed=21),
        greedy,
    ]
    return list(zip(prompts, params, strict=True))


def compare(reference, requests, off: Served, on: Served) -> None:
    prompts, last = [prompt for prompt, _ in requests], len(requests) - 1
    (stop,) = requests[2][1].stop_token_ids
    assert on.retractions > 0 and off.retractions > 0, "the pool is large enough for everybody"
    assert on.reasons == off.reasons and last not in on.reasons
    assert {room: on.tokens[room] for room in on.reasons} == {room: off.tokens[room] for room in off.reasons}
    assert on.tokens[0] == expected_tokens(reference, prompts[0], 36)
    assert on.reasons[2] == "stop" and on.tokens[2][-1] == stop
    shorter, longer = sorted((on.tokens[last], off.tokens[last]), key=len)
    assert longer[: len(shorter)] == shorter


class Mark:
    """Event that passes when the test sets it."""

    def __init__(self) -> None:
        self.is_passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.waits += 1


def test_tokens_of_two_steps_wait_in_two_buffers_and_a_third_is_refused():
    marks: list[Mark] = []

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    steps = StepTokens(4, mark, is_pinned=False)
    first = steps.launched([3, 1], torch.tensor([30, 10]))
    silent = steps.launched([], None)
    second = steps.launched([1], torch.tensor([11]))
    with pytest.raises(Internal, match=f"{MAX_UNREAD_STEPS} unread"):
        steps.launched([2], torch.tensor([22]))
    assert not first.is_done()
    marks[0].is_passed = True
    assert first.is_done() and not second.is_done()
    assert first.result() == StepResult([3, 1], [30, 10])
    assert silent.result() == StepResult([], []), "it is waited for all the same: a step without tokens writes pages"
    third = steps.launched([2, 0], torch.tensor([22, 2]))
    assert second.result() == StepResult([1], [11])
    assert third.result() == StepResult([2, 0], [22, 2])
    assert [each.waits for each in marks] == [1, 1, 1, 1]


class FaultySampler(Sampler):
    """Sampler that raises for one seed, after the tokens of the whole batch are drawn, counted and recorded."""

    raised = 0

    def admit(self, slot, token_ids, prompt_len, params, numbers=None):
        super().admit(slot, token_ids, prompt_len, params, numbers)
        self.seeds = {**getattr(self, "seeds", {}), slot: params.seed}

    def sample(self, logits, slots):
        tokens = super().sample(logits, slots)
        if any(self.seeds[slot] == POISON_SEED for slot in slots):
            self.raised += 1
            raise RuntimeError("a tensor that does not fit")
        return tokens


POISON_SEED = 666


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
def test_a_request_that_raises_fails_alone_and_no_token_of_others_counts_twice(checkpoint, recording, overlap):
    folder, _ = checkpoint
    prompts = [make_prompt(length) for length in (3, 40, 16, 30, 25, 9)]
    params = [
        SamplingParams(max_tokens=30, temperature=0.7, frequency_penalty=0.9, logit_bias={5: 2.0}, seed=21),
        SamplingParams(max_tokens=33, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=1.0, top_k=9, repetition_penalty=1.3, min_tokens=20, seed=13),
        SamplingParams(max_tokens=36, temperature=0.0, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True),
    ]
    good = list(zip(prompts, params, strict=False))
    last = (prompts[5], SamplingParams(max_tokens=30, temperature=0.0))
    bad = (prompts[4], SamplingParams(max_tokens=30, temperature=1.0, seed=POISON_SEED))
    alone = serve(folder, [*good, last], overlap, recording)
    sampler = FaultySampler(NUM_SLOTS, VOCAB_SIZE, torch.device("cpu"), (2,))
    beside = serve(folder, [*good[:2], bad, *good[2:], last], overlap, recording, sampler)
    assert sampler.raised > 1
    assert (beside.reasons.pop(2), beside.tokens.pop(2, [])) == ("error", [])
    order = [0, 1, 3, 4, 5]
    assert [beside.tokens[index] for index in order] == [alone.tokens[index] for index in range(5)]
    assert [beside.reasons[index] for index in order] == [alone.reasons[index] for index in range(5)]
