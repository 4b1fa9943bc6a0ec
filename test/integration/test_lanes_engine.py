"""The real engine with a lane for prompts: tokens, logprobs and logits are those of one lane, also if a decode step
computes within a layer of the chunk."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from engine_checkpoints import PAGE_SIZE, VOCAB_SIZE, Engine, make_prompt, write_checkpoint
from test_overlap_engine import NUM_SLOTS, POISON_SEED, FaultySampler, serve

from chitu.config.schema import SchedulerConfig
from chitu.config.topology import Instance
from chitu.engine import lanes
from chitu.engine.executor import Admit, PrefillChunk, StepPlan
from chitu.engine.lanes import lane_problems, num_lanes, why_one_lane
from chitu.engine.sampler import Sampler
from chitu.errors import Internal
from chitu.ops.native import NativeOps, load_library
from chitu.protocol import SamplingParams, pack_i32, unpack_logprobs
from chitu.types import Role

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True)
PAGES = 8
"""Of each slot."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, "qwen3", num_layers=2)
    return folder


@pytest.mark.parametrize("is_cached", [False, True])
def test_tokens_logprobs_and_ends_are_those_of_one_lane(checkpoint, is_cached):
    lengths = (3, 40, 16, 30, 25, 9, 31, 12)
    prompts = [make_prompt(length) for length in lengths]  # some begin with others: prefix hits
    stop = serve(checkpoint, [(prompts[2], GREEDY), (prompts[0], GREEDY)], False, None).tokens[0][11]
    params = [
        GREEDY,
        SamplingParams(max_tokens=33, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=0.0, stop_token_ids=(stop,)),
        SamplingParams(max_tokens=36, temperature=0.0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=1.0, top_k=9, repetition_penalty=1.3, min_tokens=20, seed=13),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=30, temperature=0.7, frequency_penalty=0.5, logit_bias={5: 2.0}, seed=21),
        GREEDY,
    ]
    requests = list(zip(prompts, params, strict=True))
    one = serve(checkpoint, requests, False, None)
    two = serve(checkpoint, requests, False, None, lanes=2, is_cached=is_cached)
    assert two.retractions > 0 or is_cached
    assert two.reasons == one.reasons
    assert {room: two.tokens[room] for room in two.reasons} == {room: one.tokens[room] for room in one.reasons}
    assert two.reasons[2] == "stop"
    for packed, other in zip(two.logprobs[3], one.logprobs[3], strict=True):
        found, right = unpack_logprobs(packed), unpack_logprobs(other)
        assert found.logprob == pytest.approx(right.logprob, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in right.top]


def test_a_request_that_raises_when_its_chunk_is_read_fails_alone(checkpoint):
    prompts = [make_prompt(length) for length in (3, 40, 30, 25)]
    params = [GREEDY, SamplingParams(max_tokens=33, temperature=1.0, seed=17, ignore_eos=True), GREEDY]
    good = list(zip(prompts, params, strict=False))
    bad = (prompts[3], SamplingParams(max_tokens=30, temperature=1.0, seed=POISON_SEED))
    alone = serve(checkpoint, good, False, None)
    sampler = FaultySampler(NUM_SLOTS, VOCAB_SIZE, torch.device("cpu"), (2,))
    beside = serve(checkpoint, [*good[:2], bad, good[2]], False, None, sampler, lanes=2)
    assert sampler.raised > 1 and beside.reasons.pop(2) == "error"
    assert [beside.tokens[index] for index in (0, 1)] == [alone.tokens[index] for index in (0, 1)]


class PausingOps(NativeOps):
    """Operations that pause in the lane of prompts before the second half of the first MLP, whose input is in a buffer.
    `is_shared` plants the fault that this must find: a lane without buffers of its own."""

    def __init__(self, library: Any, is_shared: bool) -> None:
        super().__init__(library)
        self.is_within, self.has_decoded = threading.Event(), threading.Event()
        self._is_shared = is_shared
        self._calls = 0
        self._pauses = False

    def beside(self) -> NativeOps:
        other = self if self._is_shared else PausingOps(self._library, False)
        other._pauses, other.is_within, other.has_decoded = True, self.is_within, self.has_decoded
        return other

    def linear_add(self, *values: Any) -> Any:
        if self._pauses and threading.current_thread().name.startswith("prompts"):
            self._calls += 1
            if self._calls == 2:
                self.is_within.set()
                assert self.has_decoded.wait(10)
        return super().linear_add(*values)


def within_a_layer(folder: Any, is_beside: bool, ops: Any) -> tuple[torch.Tensor, list[int]]:
    """Compute a chunk and two decode steps, the second within a layer of the chunk if it `is_beside`. Return the logits
    `[V]` of the chunk's last token, and the tokens of the steps."""
    sampler = Sampler(NUM_SLOTS, VOCAB_SIZE, torch.device("cpu"), (2,))
    options = {"num_pages": 4 * PAGES, "num_slots": NUM_SLOTS, "max_model_len": 128}
    runner = Engine(folder, **options, sampler=sampler, ops=ops).runner
    runner.use_lanes(2)
    prompts = [make_prompt(40), make_prompt(9)]
    admits = [
        Admit(slot, pack_i32(prompt), len(prompt), 0, tuple(range(PAGES * slot, PAGES * slot + PAGES)), GREEDY)
        for slot, prompt in enumerate(prompts)
    ]
    tokens = runner.execute(StepPlan(admit=admits, prefill=[PrefillChunk(1, 0, 9, sample=True)])).tokens
    chunk = PrefillChunk(0, 0, 40, sample=True, aux_slot=0)
    if is_beside:
        rest, beside = runner.launch_beside(StepPlan(prefill=[chunk], decode=[1]))
        assert ops.is_within.wait(10) and not beside.is_done()
        tokens += rest.result().tokens + runner.execute(StepPlan(decode=[1])).tokens
        ops.has_decoded.set()
        tokens += beside.result().tokens
    else:
        tokens += runner.execute(StepPlan(decode=[1])).tokens + runner.execute(StepPlan(decode=[1])).tokens
        tokens += runner.execute(StepPlan(prefill=[chunk])).tokens
    tokens += runner.execute(StepPlan(decode=[0, 1])).tokens
    runner.close()
    return runner._pool.aux_logits[0].clone(), tokens


def test_logits_are_the_same_if_steps_compute_within_a_layer_of_the_chunk(checkpoint):
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    logits_V, tokens = within_a_layer(checkpoint, False, PausingOps(library, False))
    beside_V, beside = within_a_layer(checkpoint, True, PausingOps(library, False))
    assert torch.equal(beside_V, logits_V) and beside == tokens
    planted_V, _ = within_a_layer(checkpoint, True, PausingOps(library, True))
    assert not torch.equal(planted_V, logits_V), "operations that share buffers were not found"


def test_a_second_chunk_beside_the_first_is_refused(checkpoint):
    runner = Engine(checkpoint, num_pages=16, num_slots=2, max_model_len=128).runner
    plan = StepPlan(admit=[Admit(0, pack_i32(make_prompt(9)), 9, 0, (0, 1), GREEDY)], prefill=[PrefillChunk(0, 0, 4)])
    with pytest.raises(Internal, match="no lane"):
        runner.launch_beside(plan)


def instance_of(**config: Any) -> Any:
    values = {"devices": ("cpu",), "num_devices": 1, **config}
    return SimpleNamespace(role=Role.UNIFIED, config=SimpleNamespace(**values), name="unified 0")


@pytest.mark.parametrize(
    ("config", "spec", "threads", "why"),
    [
        ({}, {}, 2, ""),
        ({}, {}, 1, "one thread"),
        ({"devices": ("cuda:0",)}, {}, 2, "GPU"),
        ({"num_devices": 2}, {}, 2, "ranks"),
        ({}, {"state": ("row",)}, 2, "recurrent"),
        ({}, {"code": "transformers"}, 2, "modules"),
        ({}, {"has_draft_layer": True}, 2, "drafts"),
    ],
)
def test_two_lanes_are_refused_by_name_where_they_cannot_be(config, spec, threads, why, monkeypatch):
    spec: Any = SimpleNamespace(**{"architecture": "A", "state": (), "code": "own", "has_draft_layer": False, **spec})
    instance: Instance = instance_of(**config)
    found = why_one_lane(instance, spec, threads, has_adapters=False)
    assert why in found and bool(found) == bool(why)
    topology: Any = SimpleNamespace(scheduler=SchedulerConfig(lanes=2), model=SimpleNamespace(adapters=()))
    monkeypatch.setattr(lanes, "threads_of", lambda *_: threads)
    problems = list(lane_problems(topology, spec, [instance]))
    assert all(why in each and "unified 0" in each for each in problems) and bool(problems) == bool(why)
    topology.scheduler = SchedulerConfig()
    assert not list(lane_problems(topology, spec, [instance]))
    assert "LoRA" in why_one_lane(instance_of(), SimpleNamespace(**vars(spec), **{}), threads, True) or why


def test_one_lane_unless_two_are_asked_for():
    asked: list[Literal["auto", 1, 2]] = ["auto", 1, 2]
    assert [num_lanes(SchedulerConfig(lanes=each), instance_of()) for each in asked] == [1, 1, 2]
    decoding = instance_of()
    decoding.role = Role.DECODE
    assert num_lanes(SchedulerConfig(lanes=2), decoding) == 1


assert PAGE_SIZE * PAGES >= 128 // 2
