"""A prompt that computes for longer than `transfer_s`, on a real 1P1D."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model

from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.models.config import read_model_spec

TRANSFER_S = 2.0
PROMPT_TOKEN_S = 0.006
LONG_TOKENS = 1100
DEADLINES = "dp_config.router.pd_disaggregation.deadlines"


def ask(url: str, start: int, num_tokens: int) -> tuple[list[int], httpx.Response]:
    prompt = [10 + (start + at) % 400 for at in range(num_tokens)]
    fields = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {**fields, "return_token_ids": True, "return_proof": True}
    return prompt, httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)


def test_a_prompt_that_computes_for_three_times_transfer_s_is_answered_in_its_first_attempt_beside_short_ones(
    tmp_path: Path,
) -> None:
    assert LONG_TOKENS * PROMPT_TOKEN_S > 3 * TRANSFER_S
    model = make_checksum_model(tmp_path / "checksum", EngineConfig(step_s=0.01, prompt_token_s=PROMPT_TOKEN_S))
    settings = [
        "model.served_name=m",
        "cache.num_pages=256",
        "scheduler.chunk_size=128",
        f"{DEADLINES}.transfer_s={TRANSFER_S}",
    ]
    topology = load_topology("pd_disagg_1p1d_local", [f"model.path={model}", *settings])
    answers: list[tuple[list[int], httpx.Response]] = []
    with LocalCluster(topology, entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready()
        long = threading.Thread(target=lambda: answers.append(ask(cluster.url, 0, LONG_TOKENS)))
        long.start()
        while long.is_alive():
            answers.append(ask(cluster.url, len(answers) + 1, 9))
        long.join()
    assert len(answers) > 3 and sum(len(prompt) == LONG_TOKENS for prompt, _ in answers) == 1
    for prompt, answer in answers:
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        assert reply["choices"][0]["token_ids"] == expected_tokens(prompt, 4, read_model_spec(model).vocab_size)
        assert answer.headers["x-chitu-attempts"] == "1"
