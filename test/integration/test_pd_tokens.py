"""Tokens of 1P1D = tokens of one undivided engine = transformers, for every family over shm, and over Mooncake for one
family of each kind of pages. Each prompt is asked more than once, and again with the answer's beginning as a next turn,
so most of these tokens come from cached pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from completions import Completion, complete_all
from nursery import FORKED

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

FAMILIES = (
    "qwen3",
    "deepseek_v3",
    *(pytest.param(name, marks=pytest.mark.by_hand) for name in ("llama", "qwen2", "qwen3_moe")),
)
"""By hand: families whose pages are those of qwen3; `test_engine_tokens` computes the tokens of all families."""
OVER_MOONCAKE = ("qwen3", "deepseek_v3")
"""Families that also run over Mooncake: K and V of heads, and latent rows. Nothing else of a model matters to a
transport."""
TWO_LANES = ("qwen3", "deepseek_v3")
"""Families whose unified instance computes prompts beside its decode steps, of each kind of pages one."""
LENGTHS = (1, 2, 15, 16, 17, 36, 37, 38, 64, 74, 100, 111, 128, 255, 512, 700)
OUTPUT_TOKENS, NEXT_TURN_TOKENS, PAGE_SIZE = 12, 5, 16
CHUNKS = ["scheduler.chunk_size=37", "scheduler.max_batched_tokens=250", "cache.num_pages=2000"]
PATIENCE = [
    "dp_config.router.pd_disaggregation.deadlines.queue_s=120",
    "dp_config.router.pd_disaggregation.deadlines.transfer_s=120",
]
GREEDY: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose heads have 32 numbers, as the attention in C requires; narrower heads are left to torch."""
    return make_model(tmp_path_factory.mktemp("models") / request.param, family=request.param, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return greedy continuations by transformers, float32, one prompt at a time."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def seeded_options() -> list[dict[str, Any]]:
    """Return a different mixture of sampling options for every prompt."""
    mixtures: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.6},
        {"temperature": 0.9, "frequency_penalty": 1.1, "repetition_penalty": 1.2},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logit_bias": {"42": 4.0, "43": -100}},
        {"temperature": 1.0, "min_tokens": 6, "ignore_eos": False},
    ]
    return [
        {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "seed": 1000 + n, **mixtures[n % len(mixtures)]}
        for n in range(len(LENGTHS))
    ]


def answers_of(
    topology: str, model: Path, overrides: list[str], prompts: list[list[int]]
) -> tuple[list[Completion], list[Completion]]:
    """Return (greedy, seeded) answers of a fresh cluster to 16 requests at once. The greedy ones include those of a
    next turn."""
    settings = [f"model.path={model}", "model.served_name=m", *CHUNKS, *PATIENCE, *overrides]
    with LocalCluster(load_topology(topology, settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        greedy = complete_all(cluster.url, prompts, [GREEDY] * len(prompts))
        turns = [prompt + answer.token_ids[:NEXT_TURN_TOKENS] for prompt, answer in zip(prompts, greedy, strict=True)]
        next_turn = GREEDY | {"max_tokens": OUTPUT_TOKENS - NEXT_TURN_TOKENS}
        again = complete_all(cluster.url, turns, [next_turn] * len(turns))
        seeded = complete_all(cluster.url, prompts, seeded_options())
    assert [answer.token_ids for answer in again] == [answer.token_ids[NEXT_TURN_TOKENS:] for answer in greedy]
    for prompt, answer in zip(prompts, again, strict=True):
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // PAGE_SIZE * PAGE_SIZE
    return greedy, seeded


@pytest.fixture(scope="module")
def unified(model: Path, prompts: list[list[int]]) -> tuple[list[Completion], list[Completion]]:
    lanes = ["scheduler.lanes=2", "scheduler.threads=2"] if model.name in TWO_LANES else []
    return answers_of("unified_local.yaml", model, lanes, prompts)


@pytest.fixture(params=["shm", "mooncake"])
def transport(request: pytest.FixtureRequest, model: Path) -> Iterator[str]:
    if request.param == "mooncake":
        if model.name not in OVER_MOONCAKE:
            pytest.skip("its pages are those of another family")
        try:
            import mooncake.engine  # noqa: F401
        except (ImportError, OSError) as error:
            pytest.skip(f"mooncake does not import here: {error}")
    yield request.param


def test_unified_equals_transformers(
    unified: tuple[list[Completion], list[Completion]], expected: list[list[int]]
) -> None:
    assert [answer.token_ids for answer in unified[0]] == expected


def test_pd_equals_unified_and_transformers(
    transport: str,
    model: Path,
    prompts: list[list[int]],
    unified: tuple[list[Completion], list[Completion]],
    expected: list[list[int]],
) -> None:
    overrides = [f"dp_config.router.pd_disaggregation.transport={transport}"]
    if transport == "shm":
        overrides.append("scheduler.overlap=on")
    greedy, seeded = answers_of("pd_disagg_1p1d_local.yaml", model, overrides, prompts)
    assert [answer.token_ids for answer in greedy] == expected
    assert [answer.token_ids for answer in seeded] == [answer.token_ids for answer in unified[1]]
    assert [answer.text for answer in seeded] == [answer.text for answer in unified[1]]
    assert [answer.usage["prompt_tokens"] for answer in greedy] == list(LENGTHS)
