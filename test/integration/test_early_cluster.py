"""P's early token in real clusters: streams are exact, and a P that draws wrongly is found."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from nursery import FORKED
from support.planted_scheduler import ENVIRONMENT
from support.router_process import wait_until

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.bench.token_times import streamed_tokens
from chitu.tools.make_model import make_model

ROUTER = "dp_config.router"
NUM_TOKENS = 6
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {"11": 3.0}},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01, "seed": 9, "presence_penalty": 0.5, "min_tokens": 2},
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3")
    return [f"model.path={model}", "model.served_name=m", "cache.num_pages=400", "scheduler.threads=1"]


@pytest.fixture(scope="module")
def unified(settings: list[str]) -> Iterator[LocalCluster]:
    with LocalCluster(load_topology("unified_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(10, 500) for _ in range(rng.choice([5, 40, 150, 400]))] for _ in range(count)]


def counted(url: str, family: str, label: str) -> dict[str, int]:
    """Return the samples of a counter by its one label, without zeros."""
    lines = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines()
    found = [line.removeprefix(f'{family}{{{label}="').split('"} ') for line in lines if line.startswith(family + "{")]
    return {name: int(float(value)) for name, value in found if float(value)}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_streams_are_those_of_one_instance_and_every_early_token_is_confirmed(
    settings: list[str], unified: LocalCluster, tp_size: int
) -> None:
    asked = [(prompt, KINDS[i % len(KINDS)]) for i, prompt in enumerate(prompts(12))]
    shape = f"{ROUTER}.prefill_schedulers=[{{port: 0, tp_size: {tp_size}, devices: {['cpu'] * tp_size}}}]"
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings, shape])
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()
        for prompt, fields in asked:
            expected = streamed_tokens(unified.url, prompt, NUM_TOKENS, **fields)[1]
            assert streamed_tokens(cluster.url, prompt, NUM_TOKENS, **fields)[1] == expected
        found = counted(cluster.url, "chitu_early_tokens_total", "outcome")
    assert found.get("shown", 0) + found.get("late", 0) == len(asked), found
    assert found.get("confirmed", 0) == found["shown"] and found.keys() <= {"shown", "confirmed", "late"}, found


@pytest.mark.parametrize("fault", ["seed", "position", "next"])
def test_a_p_that_draws_wrongly_is_found_and_its_streams_continue_behind_what_was_shown(
    fault: str, settings: list[str], unified: LocalCluster, tmp_path: Path
) -> None:
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps({"P0": {"early": fault}}))
    shape = [f"{ROUTER}.{role}_schedulers=[{{port: 0}}, {{port: 0}}]" for role in ("prefill", "decode")]
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings, *shape, f"{ROUTER}.breaker.failures=1000"])
    fields = KINDS[0] if fault == "next" else KINDS[1]
    entries = replace(FORKED, scheduler="support.planted_scheduler")
    num_wrong = 0
    with LocalCluster(topology, entries=entries, env={ENVIRONMENT: str(planted)}) as cluster:
        cluster.wait_ready()
        for prompt in prompts(8):
            tokens = streamed_tokens(cluster.url, prompt, NUM_TOKENS, **fields)[1]
            expected = streamed_tokens(unified.url, prompt, NUM_TOKENS, **fields)[1]
            num_wrong += tokens[0] != expected[0]
            if tokens[0] == expected[0]:
                assert tokens == expected
            elif fault == "next":  # greedy: what follows depends on the tokens alone
                behind = streamed_tokens(unified.url, [*prompt, tokens[0]], NUM_TOKENS - 1, **fields)[1]
                assert tokens[1:] == behind
        assert counted(cluster.url, "chitu_early_tokens_total", "outcome").get("different", 0) >= num_wrong
        assert num_wrong and counted(cluster.url, "chitu_retries_total", "code").get("integrity", 0) >= num_wrong


def test_each_of_two_routers_shows_the_early_tokens_of_its_own_requests(
    settings: list[str], unified: LocalCluster
) -> None:
    shape = [f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", [*settings, *shape]), entries=FORKED) as cluster:
        cluster.wait_ready()
        urls = list(cluster.router_urls.values())
        asked = [(prompt, KINDS[i % len(KINDS)], urls[i % 3 == 0]) for i, prompt in enumerate(prompts(9))]
        for prompt, fields, url in asked:
            expected = streamed_tokens(unified.url, prompt, NUM_TOKENS, **fields)[1]
            assert streamed_tokens(url, prompt, NUM_TOKENS, **fields)[1] == expected
        for url in urls:
            found = counted(url, "chitu_early_tokens_total", "outcome")
            assert found.get("shown", 0) + found.get("late", 0) == sum(each == url for _, _, each in asked), found
            assert found.get("confirmed", 0) == found["shown"] and found.keys() <= {"shown", "confirmed", "late"}, found


@pytest.mark.parametrize("is_mixed", [False, True], ids=["drained", "mixed"])
def test_early_tokens_are_confirmed_while_weights_change_under_load(
    settings: list[str], tmp_path: Path, is_mixed: bool
) -> None:
    """D draws from P's row, so the weights of the row do not matter, nor whether D has changed already."""
    other = make_model(tmp_path / "other", family="qwen3", seed=1)
    first = settings[0].removeprefix("model.path=")
    asked, is_over, streams = prompts(6), threading.Event(), Counter[tuple[int, ...]]()
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        alone = {}

        def stream() -> None:
            while not is_over.is_set():
                streams[tuple(streamed_tokens(cluster.url, asked[0], NUM_TOKENS)[1])] += 1

        for _ in range(4):
            alone[first] = tuple(streamed_tokens(cluster.url, asked[0], NUM_TOKENS)[1])
        with ThreadPoolExecutor(3) as threads:
            loads = [threads.submit(stream) for _ in range(3)]
            try:
                for path in (str(other), first, str(other)):
                    reply = operator(cluster, "/admin/weights", path=path, mixed=is_mixed)
                    assert reply.status_code == 200, reply.text
                    before = sum(streams.values())
                    wait_until(lambda before=before: sum(streams.values()) >= before + 6, 60, lambda: str(streams))
            finally:
                is_over.set()
            for load in loads:
                load.result()
        alone[str(other)] = tuple(streamed_tokens(cluster.url, asked[0], NUM_TOKENS)[1])
        found = counted(cluster.url, "chitu_early_tokens_total", "outcome")
    assert len(set(alone.values())) == 2 and streams[alone[first]] and streams[alone[str(other)]]
    assert is_mixed or set(streams) == set(alone.values()), "no answer has tokens of two versions"
    assert found["shown"] >= 10 and "different" not in found, found
    assert found["confirmed"] == found["shown"], found


def operator(cluster: LocalCluster, route: str, **body: object) -> httpx.Response:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    return httpx.post(f"{cluster.url}{route}", json=body, headers=headers, trust_env=False, timeout=120)
