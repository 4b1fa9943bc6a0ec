"""A few checkpoints of the list on real clusters: router, P and D as processes, over shm and over Mooncake. The
logprobs of the answers are those of `transformers`."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoint_table import Checkpoint, make_checkpoint, prompts
from nursery import WITH_TRANSFORMERS
from support.checkpoints import ROWS

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

CLOSE = 2e-4
"""Bound on the error of a logprob, whose logits are some tens."""
CLUSTERS = [
    ("gpt-oss-20b", "mooncake"),
    ("Qwen3-Next-80B-A3B-Instruct", "shm"),
    *(
        pytest.param(*each, marks=pytest.mark.by_hand)
        for each in (
            ("gemma-3-1b-it", "shm"),
            ("Qwen3-Next-80B-A3B-Instruct", "mooncake"),
            ("granite-4.0-h-small", "shm"),
            ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "shm"),
            ("Kimi-Linear-48B-A3B", "shm"),
        )
    ),
]


def with_tokenizer(name: str, folder: Path) -> Checkpoint:
    checkpoint = make_checkpoint(next(row for row in ROWS if row.name == name), folder)
    other = make_model(folder / "other", family="qwen3", vocab_size=500)
    for file in other.glob("tokenizer*"):
        shutil.copy(file, folder)
    return checkpoint


def cluster_of(folder: Path, transport: str) -> LocalCluster:
    settings = [f"model.path={folder}", "model.served_name=m", "scheduler.chunk_size=37", "cache.num_pages=200"]
    settings.append(f"dp_config.router.pd_disaggregation.transport={transport}")
    return LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=WITH_TRANSFORMERS)


def check(checkpoint: Checkpoint, prompt: list[int], choice: dict[str, Any]) -> None:
    """Check the logprob of each token of an answer."""
    tokens = choice["token_ids"]
    right = torch.log_softmax(checkpoint.logits(prompt, tokens), -1)
    own = right[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert torch.allclose(torch.tensor(choice["logprobs"]["token_logprobs"]), own, atol=CLOSE)


def ask(url: str, prompt: list[int], num_tokens: int, **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "logprobs": 0, "return_token_ids": True}
    response = httpx.post(
        f"{url}/v1/completions", json={**body, "ignore_eos": True, **options}, timeout=120, trust_env=False
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(("name", "transport"), CLUSTERS)
def test_answers_of_a_cluster_have_the_logprobs_of_transformers(name: str, transport: str, tmp_path: Path) -> None:
    if transport == "mooncake":
        pytest.importorskip("mooncake.engine")
    checkpoint = with_tokenizer(name, tmp_path)
    with cluster_of(tmp_path, transport) as cluster, ThreadPoolExecutor(8) as pool:
        cluster.wait_ready()
        asked = [(prompt, {}) for prompt in prompts()] + [(prompts()[1], {"n": 3, "temperature": 1.0, "seed": 5})]
        answers = list(pool.map(lambda each: ask(cluster.url, each[0], 6, **{"temperature": 0, **each[1]}), asked))
        for (prompt, _), answer in zip(asked, answers, strict=True):
            for choice in answer["choices"]:
                check(checkpoint, prompt, choice)
