"""Flipped bytes in real clusters: with `verify_kv: all` every answer is exactly right, without it some are not.

The reference is a unified instance of the same model, which transfers no KV.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole
from nursery import FORKED
from support.faults import ENVIRONMENT
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

ROUTER = "dp_config.router"
PD = f"{ROUTER}.pd_disaggregation"
PLANTED = replace(FORKED, scheduler="support.planted_scheduler")
NUM_REQUESTS = 24
EVERY = 5
"""One of this many KV writes, and of logits rows, is broken."""

SHAPES = {
    "1P1D": [],
    "2P2D": [
        f"{ROUTER}.prefill_schedulers=[{{port: 0}}, {{port: 0}}]",
        f"{ROUTER}.decode_schedulers=[{{port: 0}}, {{port: 0}}]",
    ],
    "1P1D of two ranks each": [
        f"{ROUTER}.{role}_schedulers=[{{port: 0, tp_size: 2, devices: [cpu, cpu]}}]" for role in ("prefill", "decode")
    ],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3")
    patience = [f"{PD}.deadlines.queue_s=120", f"{PD}.deadlines.transfer_s=120"]
    return [f"model.path={model}", "model.served_name=m", "cache.num_pages=1000", "scheduler.threads=1", *patience]


def requests() -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.choice([5, 40, 150, 400]))] for _ in range(NUM_REQUESTS)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95, "seed": 7},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    ]
    return prompts, [{"max_tokens": 24, "ignore_eos": True, **kinds[i % 3]} for i in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(settings: list[str]) -> list[list[int]]:
    with LocalCluster(load_topology("unified_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        return [answer.token_ids for answer in complete_all(cluster.url, *requests())]


def broken(settings: list[str], *more: str, **faults: int) -> LocalCluster:
    """Return a cluster with faults and without an effective breaker, which would rightly shut the broken link and end
    the test early. A long prompt has a write per layer, so most of its attempts fail; each attempt with sound logits
    brings a token, and 24 finish the request."""
    patience = [f"{ROUTER}.retry.max_attempts=200", f"{ROUTER}.breaker.failures=1000"]
    return LocalCluster(
        load_topology("pd_disagg_1p1d_local.yaml", [*settings, *patience, *more]),
        entries=PLANTED,
        env={ENVIRONMENT: json.dumps({"flip_byte_every": EVERY, **faults})},
    )


def counted(url: str, name: str, code: str) -> int:
    text = httpx.get(f"{url}/metrics", timeout=5.0, trust_env=False).text
    found = re.search(rf'^{name}_total\{{code="{code}"\}} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def assert_whole(cluster: LocalCluster) -> None:
    wait_until(
        lambda: all(is_whole(load) for load in instance_loads(cluster.url).values()),
        15.0,
        lambda: instance_loads(cluster.url),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_kv_verified_every_answer_is_right_and_the_broken_tries_are_counted(
    shape: str, settings: list[str], expected: list[list[int]]
) -> None:
    with broken(settings, f"{PD}.verify_kv=all", *SHAPES[shape], flip_logits_every=EVERY) as cluster:
        cluster.wait_ready()
        answers = [answer.token_ids for answer in complete_all(cluster.url, *requests())]
        assert answers == expected
        assert counted(cluster.url, "chitu_retries", "integrity") >= NUM_REQUESTS // EVERY
        assert counted(cluster.url, "chitu_requests_failed", "integrity") == 0
        assert_whole(cluster)
        decodes = "".join(cluster.logs(name) for name in instance_loads(cluster.url) if name.startswith("D"))
        assert "of the prompt), written over shm" in decodes and "checksum of the logits" in decodes


def test_without_verification_the_same_faults_give_wrong_answers(
    settings: list[str], expected: list[list[int]]
) -> None:
    with broken(settings, f"{PD}.verify_kv=off") as cluster:
        cluster.wait_ready()
        answers = [answer.token_ids for answer in complete_all(cluster.url, *requests())]
        assert counted(cluster.url, "chitu_retries", "integrity") == 0
        num_wrong = sum(answer != right for answer, right in zip(answers, expected, strict=True))
        assert num_wrong >= 2, "the faults that the other test survives do no harm: it shows nothing"


def test_without_retries_a_broken_transfer_is_a_typed_error_and_never_a_second_token(settings: list[str]) -> None:
    """Token 1 may have been sent: its logits have a checksum of their own and come before the KV."""
    once = [f"{PD}.verify_kv=all", f"{ROUTER}.retry.max_attempts=1"]
    with broken(settings, *once, flip_byte_every=1) as cluster:
        cluster.wait_ready()
        for length in (1, 5, 150):
            body = {"model": "m", "prompt": list(range(10, 10 + length)), "max_tokens": 8, "ignore_eos": True}
            whole = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
            assert whole.status_code == 503 and whole.json()["error"]["code"] == "integrity"
            body |= {"stream": True, "return_token_ids": True}
            stream = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
            assert '"code":"integrity"' in stream.text.replace(" ", "")
            tokens = re.findall(r'"token_ids":\s*\[([^\]]+)\]', stream.text)
            assert len(",".join(tokens).split(",")) <= 1, stream.text
        assert_whole(cluster)
