"""The real engine with drafts under the scheduler: tokens, ends and logprobs are those without them, whatever the
drafts guess and whatever the sampler is asked for, with recorded steps and without."""

from __future__ import annotations

import random

import pytest
from engine_checkpoints import VOCAB_SIZE, make_prompt, write_checkpoint
from support.drafts import Guesses
from test_overlap_engine import DECODES, serve

from chitu.protocol import SamplingParams, unpack_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 2e-5
"""Largest difference of two logprobs (nats): torch's products round by the number of rows."""
PARAMS = [
    SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=33, temperature=1.0, top_p=0.9, seed=17, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.8, frequency_penalty=1.5, logprobs=5),
    SamplingParams(max_tokens=36, temperature=1.0, top_k=9, presence_penalty=1.5, min_tokens=20, seed=13),
    SamplingParams(max_tokens=28, temperature=0.0, bad_words=((7,), (30, 31)), logit_bias={5: 2.0}),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=0.9, min_p=0.05, seed=-5, allowed_token_ids=tuple(range(20, 40))),
    SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True),
]
PROMPTS = [make_prompt(length) for length in (3, 40, 16, 30, 25, 9, 31, 12)]


ALL = list(zip(PROMPTS, PARAMS, strict=True))
FORMS = {
    "qwen3": {"ops": None},
    "qwen3, fp8 pages": {"ops": None, "kv_dtype": "fp8_e4m3"},
    "qwen3_moe": {"ops": None},
    "deepseek_v3": {"ops": None},
    "glm_moe_dsa": {},
    "llama3": {"code": "transformers"},
    "mistral": {"code": "transformers"},
}
"""Family of the checkpoint, then how it is computed: by C kernels, torch, or the modules of transformers."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def folder_of(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write_checkpoint(made[family], family, num_layers=2)
        return made[family]

    return folder_of


def guessing(tokens: dict[int, list[int]], rate: float):
    rng = random.Random(int(100 * rate))
    return lambda sequence: Guesses(sequence.prompt_len, tokens[sequence.room[-1]], rate, rng, VOCAB_SIZE)


def require_same(drafted, without, close: float = CLOSE) -> None:
    """Check tokens, ends and logprobs of all requests but the last, which is cancelled."""
    last = len(ALL) - 1
    assert drafted.reasons == without.reasons
    tokens = [{room: each.tokens[room] for room in each.tokens if room != last} for each in (drafted, without)]
    assert tokens[0] == tokens[1]
    for room, lines in without.logprobs.items():
        for found, expected in zip(drafted.logprobs[room], lines, strict=True):
            found, expected = unpack_logprobs(found), unpack_logprobs(expected)
            assert abs(found.logprob - expected.logprob) <= close
            for (token, logprob), (other, other_logprob) in zip(found.top, expected.top, strict=True):
                assert token == other and abs(logprob - other_logprob) <= close


@pytest.fixture(scope="module")
def without(checkpoints):
    return serve(checkpoints("qwen3"), ALL, overlap=False, recording=None)


@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.8, 1.0])
def test_tokens_ends_and_logprobs_are_those_without_drafts(checkpoints, without, recording, overlap, rate):
    source = guessing(without.tokens, rate)
    drafted = serve(checkpoints("qwen3"), ALL, overlap, recording, draft_source=source)
    require_same(drafted, without)
    if rate == 1.0:
        assert drafted.steps < without.steps / 2


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_attention_takes_drafts(checkpoints, form):
    folder, options = checkpoints(form.split(",")[0]), FORMS[form]
    without = serve(folder, ALL, overlap=False, recording=None, **options)
    drafted = serve(folder, ALL, False, None, draft_source=guessing(without.tokens, 0.8), **options)
    require_same(drafted, without, close=0.0 if form in ("qwen3", "qwen3_moe") else CLOSE)
