"""A request that continues on another instance after k tokens gets the rest of the tokens that it would have got."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_checkpoints import VOCAB_SIZE, Engine, chunks_of, make_prompt, write_checkpoint

from chitu.engine.executor import FirstToken, PrefillChunk, StepPlan
from chitu.engine.sampler import Sampler
from chitu.protocol import SamplingParams

COUNT = 20
EOS = (2, 3)
PROMPT = make_prompt(41)
SAMPLINGS = {
    "greedy": SamplingParams(COUNT, temperature=0.0, ignore_eos=True),
    "greedy with penalties": SamplingParams(
        COUNT, temperature=0.0, presence_penalty=1.1, frequency_penalty=0.7, repetition_penalty=1.3, ignore_eos=True
    ),
    "seeded": SamplingParams(COUNT, temperature=1.3, seed=7, ignore_eos=True),
    "seeded, filtered, with penalties": SamplingParams(
        COUNT, temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=11, frequency_penalty=1.5, presence_penalty=0.5
    ),
    "eos wanted, and forbidden for a while": SamplingParams(
        COUNT, min_tokens=12, temperature=0.8, seed=3, logit_bias={2: 30.0}, repetition_penalty=1.2
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(folder, "qwen3")
    return folder


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(folder: Path) -> Engine:
    sampler = Sampler(COUNT, VOCAB_SIZE, torch.device("cpu"), EOS)
    return Engine(folder, num_slots=COUNT, sampler=sampler)


def drive(engine: Engine, first: StepPlan, counts: list[int]) -> list[list[int]]:
    """Run until slot s has emitted `counts[s]` tokens; `first` gives each slot its first token."""
    outputs: list[list[int]] = [[] for _ in counts]
    plan = first
    while True:
        result = engine.runner.execute(plan)
        for slot, token in zip(result.slots, result.tokens, strict=True):
            outputs[slot].append(token)
        todo = [slot for slot, count in enumerate(counts) if len(outputs[slot]) < count]
        if not todo:
            return outputs
        plan = StepPlan(decode=todo)


def begin(engine: Engine, outputs: list[list[int]], sampling: SamplingParams) -> StepPlan:
    """Return a plan of a unified instance in which slot s continues after `outputs[s]`."""
    total = len(PROMPT) + COUNT
    return StepPlan(
        admit=[
            engine.admit(slot, PROMPT + output, total, prompt_len=len(PROMPT), sampling=sampling)
            for slot, output in enumerate(outputs)
        ],
        prefill=[PrefillChunk(slot, 0, len(PROMPT) + len(output), True) for slot, output in enumerate(outputs)],
    )


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_unified_instance_goes_on_behind_any_token(folder: Path, name: str) -> None:
    sampling = SAMPLINGS[name]
    whole = engine(folder)
    (expected,) = drive(whole, begin(whole, [[]], sampling), [COUNT])
    if name.startswith("eos"):
        assert 2 not in expected[:12] and expected[12] == 2, "the forbidden time counts from the first instance on"
    second = engine(folder)
    rests = drive(second, begin(second, [expected[:k] for k in range(COUNT)], sampling), [*range(COUNT, 0, -1)])
    assert [expected[:k] + rest for k, rest in enumerate(rests)] == [expected] * COUNT


@pytest.mark.parametrize("name", SAMPLINGS)
def test_d_goes_on_behind_any_token_with_logits_and_pages_of_another_p(folder: Path, name: str) -> None:
    sampling = SAMPLINGS[name]
    whole = engine(folder)
    (expected,) = drive(whole, begin(whole, [[]], sampling), [COUNT])
    for k in (1, 6, 7, 8, COUNT - 1):  # 41 + 7 tokens fill three pages
        tokens = PROMPT + expected[:k]
        prefill, decode = Engine(folder, sampling=False), engine(folder)
        source = prefill.admit(0, tokens, len(tokens), sampling=None)
        for index, chunk in enumerate(chunks_of(0, len(tokens), 16, aux_slot=2)):
            prefill.runner.execute(StepPlan(admit=[] if index else [source], prefill=[chunk]))
        target = decode.admit(
            0, tokens, len(PROMPT) + COUNT, prompt_len=len(PROMPT), kv_len=len(tokens), sampling=sampling
        )
        pages = list(target.pages[: len(source.pages)])
        for mine, theirs in zip((prefill.pool.k, prefill.pool.v), (decode.pool.k, decode.pool.v), strict=True):
            for source_region, target_region in zip(mine, theirs, strict=True):
                target_region[pages] = source_region[list(source.pages)]
        decode.pool.aux_logits[1] = prefill.pool.aux_logits[2]
        first = StepPlan(admit=[target], first_tokens=[FirstToken(0, 1)])
        (rest,) = drive(decode, first, [COUNT - k])
        assert expected[:k] + rest == expected, f"behind {k} tokens"
