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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, "qwen3", num_layers=2)
    return folder


@pytest.fixture(scope="module")
def without(folder):
    return serve(folder, list(zip(PROMPTS, PARAMS, strict=True)), overlap=False, recording=None)


def guessing(tokens: dict[int, list[int]], rate: float):
    rng = random.Random(int(100 * rate))
    return lambda sequence: Guesses(sequence.prompt_len, tokens[sequence.room[-1]], rate, rng, VOCAB_SIZE)


@pytest.mark.parametrize("recording", [None, DECODES], ids=["eager", "recorded"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.8, 1.0])
def test_tokens_ends_and_logprobs_are_those_without_drafts(folder, without, recording, overlap, rate):
    requests = list(zip(PROMPTS, PARAMS, strict=True))
    drafted = serve(folder, requests, overlap, recording, draft_source=guessing(without.tokens, rate))
    last = len(requests) - 1  # it is cancelled
    assert drafted.reasons == without.reasons
    assert {r: t for r, t in drafted.tokens.items() if r != last} == {
        r: t for r, t in without.tokens.items() if r != last
    }
    for room, lines in without.logprobs.items():
        for found, expected in zip(drafted.logprobs[room], lines, strict=True):
            found, expected = unpack_logprobs(found), unpack_logprobs(expected)
            assert abs(found.logprob - expected.logprob) < CLOSE
            for (token, logprob), (other, other_logprob) in zip(found.top, expected.top, strict=True):
                assert token == other and abs(logprob - other_logprob) < CLOSE
    if rate == 1.0:
        assert drafted.steps < without.steps / 2
