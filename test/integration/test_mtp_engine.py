"""Drafts by the model's own layer: how many of them are right is known by construction, and no token changes."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_checkpoints import PAGE_SIZE, make_prompt
from mtp_checkpoints import (
    NUM_MODEL_LAYERS,
    VOCAB,
    answer_to,
    predicted_steps,
    some_tokens,
    write_predictable,
    write_random,
)
from mtp_instance import NUM_PAGES, Instance
from support.requests import unified_request
from transformers.generation.candidate_generator import MTPCandidateGenerator

from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import EagerRecorder, Recording
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import Fork, SamplingParams, pack_i32

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 60
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True)
"""Of answers that are compared with those without drafts: they pass two borders of pages, and retract each other."""
PROMPT = [5, 9, 17]
DECODES = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())
"""As of test_step_graphs."""


@pytest.fixture(scope="module")
def predictable(tmp_path_factory):
    made = {}

    def folder_of(right):
        if right not in made:
            made[right] = tmp_path_factory.mktemp("predictable")
            write_predictable(made[right], right)
        return made[right]

    return folder_of


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    write_random(folder)
    return folder


@pytest.mark.parametrize(("share", "steps"), [(1.0, 30), (0.0, 59), (0.5, 41)])
def test_steps_are_those_of_the_construction(predictable, share, steps):
    right = some_tokens(share)
    answer = answer_to(PROMPT, NUM_TOKENS)
    assert predicted_steps(answer, right) == steps
    instance = Instance(predictable(right))
    assert instance.serve([(PROMPT, GREEDY)]) == [answer]
    assert instance.num_decodes == steps


@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_takes_the_hidden_state_of_the_position_before(predictable, overlap):
    instance = Instance(predictable(None), overlap=overlap)
    assert instance.serve([(PROMPT, GREEDY)]) == [answer_to(PROMPT, NUM_TOKENS)]
    assert instance.num_decodes == 30


def test_tokens_are_those_without_drafts(random_model):
    prompts = [make_prompt(length) for length in (3, 40, 16, 30, 25, 9)]
    params = [
        SHORT,
        SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True),
        SamplingParams(max_tokens=36, temperature=0.0, repetition_penalty=1.8, frequency_penalty=1.5),
        SamplingParams(max_tokens=36, temperature=1.0, top_k=9, presence_penalty=1.5, min_tokens=20, seed=13),
        SamplingParams(max_tokens=1, temperature=0.0),
        SHORT,
    ]
    requests = list(zip(prompts, params, strict=True))
    for num_pages in (NUM_PAGES, 14):
        without = Instance(random_model, drafts=False, num_pages=num_pages).serve(requests)
        instance = Instance(random_model, num_pages=num_pages)
        assert instance.serve(requests) == without
        instance.cache.check_idle()
        follow_ups = [(prompt + answer[:-7], SHORT) for (prompt, _), answer in zip(requests, without, strict=True)]
        other = Instance(random_model, drafts=False, num_pages=num_pages)
        assert instance.serve(follow_ups[:2]) == other.serve(follow_ups[:2])


def test_drafts_are_those_of_transformers(random_model, monkeypatch):
    """Its steps, and every draft, for a prompt in one chunk and in several."""
    layers = [rf"model\.layers\.{NUM_MODEL_LAYERS}.*"]  # its list has the layer numbers of published checkpoints
    monkeypatch.setattr(transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", layers)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected: dict[int, int] = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def noted(self, input_ids, *args, **kwargs):
        candidates = get_candidates(self, input_ids, *args, **kwargs)
        if candidates[0].shape[1] > input_ids.shape[1]:
            expected[input_ids.shape[1]] = int(candidates[0][0, -1])
        return candidates

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    for length in (7, 60):
        prompt = make_prompt(length)
        expected.clear()
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, use_mtp=True)
        instance = Instance(random_model)
        assert instance.serve([(prompt, GREEDY)]) == [answer[0, length:].tolist()]
        found = {length + known: guess for known, guess in instance.guesses}
        num_same = sum(found[known] == expected[known] for known in found.keys() & expected.keys())
        assert num_same == len(expected) > 20 and len(found) - len(expected) <= 1


@pytest.mark.parametrize("length", [3, PAGE_SIZE])
def test_choices_of_a_prompt_draft_by_its_hidden_state(predictable, length):
    """Also where the first token of each needs a new page."""
    prompt = [(5 * place + 3) % 300 for place in range(length)]
    rooms = [number.to_bytes(16, "big") for number in (0, 1)]
    instance = Instance(predictable(None))
    forks = tuple(Fork(room, f"choice {room[-1]}", 0) for room in rooms)
    head = unified_request((9).to_bytes(16, "big"), "prompt", pack_i32(prompt), GREEDY, forks=forks)
    instance.scheduler.submit(head)
    instance.run()
    assert [instance.tokens[number] for number in (0, 1)] == [answer_to(prompt, NUM_TOKENS)] * 2
    assert instance.num_decodes == 30


@pytest.mark.parametrize("overlap", [False, True])
def test_behind_recorded_decodes_steps_are_those_of_the_construction(predictable, overlap):
    """The hidden states are the recording's, of the rows of drafts, too."""
    instance = Instance(predictable(None), ops=TorchOps(), recording=DECODES, overlap=overlap)
    assert instance.serve([(PROMPT, GREEDY)]) == [answer_to(PROMPT, NUM_TOKENS)]
    assert instance.num_decodes == 30


@pytest.mark.parametrize("overlap", [False, True])
def test_recorded_decodes_of_several_requests_draft_what_others_do(random_model, overlap):
    """Prompts beside decodes are a forward of their own then. Guesses are compared for a request alone."""
    lengths = (3, 40, 16, 30)
    requests = [(make_prompt(length), SHORT) for length in lengths]
    without = Instance(random_model, drafts=False).serve(requests)
    instances = [
        Instance(random_model, ops=TorchOps(), recording=recording, overlap=overlap) for recording in (None, DECODES)
    ]
    for instance in instances:
        assert instance.serve(requests) == without
        instance.guesses.clear()
        instance.num_drawn = 0
        assert instance.serve(requests[1:2]) == without[1:2]
    assert instances[0].guesses == instances[1].guesses and len(instances[0].guesses) > 20


@pytest.mark.parametrize(
    ("share", "ranks", "recording"), [(0.8, 1, None), (None, 1, None), (None, 2, None), (None, 1, DECODES)]
)
def test_further_tokens_are_drafted_from_the_layers_own(predictable, share, ranks, recording):
    """By the token that it drafted, and by its own result as the hidden state before."""
    right = None if share is None else some_tokens(share)
    answer, ops = answer_to(PROMPT, NUM_TOKENS), None if recording is None else TorchOps()
    instance = Instance(predictable(right), num_ranks=ranks, mtp_tokens=3, recording=recording, ops=ops)
    assert instance.serve([(PROMPT, GREEDY)]) == [answer]
    assert instance.num_decodes == predicted_steps(answer, range(VOCAB) if right is None else right, 3)
    instance.cache.check_idle()
    if ranks > 1:
        instance.close()


def test_with_further_tokens_answers_are_those_without_drafts(random_model):
    requests = [(make_prompt(length), SHORT) for length in (3, 40, 16, 30, 25, 9)]
    for num_pages in (NUM_PAGES, 14):
        without = Instance(random_model, drafts=False, num_pages=num_pages).serve(requests)
        instance = Instance(random_model, num_pages=num_pages, mtp_tokens=3)
        assert instance.serve(requests) == without
        instance.cache.check_idle()


class RaisesOnce(Sampler):
    """Raises in its tenth draw, when the tokens of the batch are drawn and counted."""

    num_draws = 0

    def sample(self, logits, slots):
        tokens = super().sample(logits, slots)
        self.num_draws += 1
        if self.num_draws == 10:
            raise RuntimeError("a tensor that does not fit")
        return tokens


def test_a_repeated_step_has_a_hole_and_no_draft(predictable, random_model):
    """The next step computes by its own hidden states: one draft is lost, and no token changes."""
    instance = Instance(predictable(None), sampler=RaisesOnce)
    assert instance.serve([(PROMPT, GREEDY)]) == [answer_to(PROMPT, NUM_TOKENS)]
    assert instance.num_decodes - 1 in (30, 31)
    requests = [(make_prompt(length), GREEDY) for length in (3, 40, 16)]
    without = Instance(random_model, drafts=False).serve(requests)
    assert Instance(random_model, sampler=RaisesOnce).serve(requests) == without
