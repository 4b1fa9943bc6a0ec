"""Random requests to clusters under pressure have the answers of one engine that gets them one by one, and the tokens
that `transformers`' logits give: tokens, texts, calls, reasoning, finish reasons, logprobs and usage. The engine drafts
nothing; the clusters compute as many drafts as there is room for, most of them wrong.

CI runs the first 120. By hand, each further 400 meet another cluster:
`.venv/bin/python -m pytest test/integration/test_random_requests.py --by-hand`
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import instance_loads, is_whole
from nursery import FORKED
from random_requests import Answer, Drawn, Recomputation, ask, differences, request_of
from support.router_process import wait_until
from thinking_model import CLOSE, make_thinking_model

from chitu.config.load import load_topology
from chitu.config.topology import instances, on_one_host, router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.tokenizer import Tokenizer

VOCAB = 500
MAX_MODEL_LEN = 1024
AT_ONCE = 24
PER_CLUSTER, IN_CI = 400, 60
DRAFTING = replace(FORKED, scheduler="support.drafting_scheduler")
PD = "dp_config.router.pd_disaggregation"
TWO_PAIRS = "pd_disagg_2p2d_multi_node.yaml"
PRESSED = ["cache.page_size=4", "cache.num_pages=300", "scheduler.chunk_size=24", "cache.host_bytes=1000000"]
"""Prompts are computed in chunks, requests are retracted, and prefixes leave the pool for the tiers."""
CLUSTERS: dict[str, tuple[str, list[str]]] = {
    "pressed": ("pd_disagg_1p1d_local.yaml", PRESSED),
    "overlap": ("pd_disagg_1p1d_local.yaml", [*PRESSED, "scheduler.overlap=on", f"{PD}.verify_kv=all"]),
    "killed": (TWO_PAIRS, ["cache.num_pages=1000", "scheduler.threads=1"]),
    "fp8": ("pd_disagg_1p1d_local.yaml", ["cache.kv_dtype=fp8_e4m3", "cache.num_pages=200", "cache.page_size=8"]),
    "tp": (
        "pd_disagg_1p1d_local.yaml",
        [*PRESSED, *(f"dp_config.router.decode_schedulers.0.{key}" for key in ("tp_size=2", "devices=[cpu,cpu]"))],
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": VOCAB}
    return make_thinking_model(tmp_path_factory.mktemp("models") / "qwen3", **sizes)


NEAR_TIES = dict.fromkeys(CLUSTERS, 0) | {"tp": 1}
"""Requests that may differ. The sums of two ranks round differently: in one of 400 a draw falls another way, behind
logprobs that are equal to 3e-6."""
FIRST, *OTHERS = CLUSTERS


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(other, marks=pytest.mark.by_hand) for other in OTHERS)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drawn(name: str, model: Path) -> list[Drawn]:
    first, end_of_thought = list(CLUSTERS).index(name) * PER_CLUSTER, Tokenizer.load(model).added_token_ids[CLOSE]
    count = IN_CI if name == FIRST else PER_CLUSTER
    return [request_of(number, VOCAB, end_of_thought) for number in range(first, first + count)]


@contextlib.contextmanager
def running(model: Path, topology: str, settings: list[str], entries: Entries = DRAFTING) -> Iterator[LocalCluster]:
    common = [f"model.path={model}", "model.served_name=m", f"model.max_model_len={MAX_MODEL_LEN}"]
    if topology == TWO_PAIRS:
        local = on_one_host(load_topology(topology))
        common += [f"{key}=0" for key in router_ports(local.dp_config.router)]
        common += [f"{instance.key}.port=0" for instance in instances(local)]
    with LocalCluster(load_topology(topology, [*common, *settings]), entries=entries) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.fixture(scope="module")
def right(name: str, model: Path, drawn: list[Drawn]) -> list[Answer]:
    """Return the answers, few of them refusals, of one engine that gets one request at a time and caches nothing."""
    settings = ["cache.num_pages=400", "cache.prefix_cache=false", "scheduler.speculation=off"]
    settings += ["cache.kv_dtype=fp8_e4m3", "cache.page_size=8"] if name == "fp8" else []
    with running(model, "unified_local.yaml", settings, FORKED) as cluster:
        answers = ask(cluster.url, drawn, at_once=1, streamed=0.0)
    refused = [answer.error for answer in answers if answer.status != 200]
    assert len(refused) < 0.05 * len(answers), refused
    return answers


@contextlib.contextmanager
def killing(cluster: LocalCluster) -> Iterator[None]:
    """Kill D0 and D1 in turn, each when all instances serve, until the block ends."""
    is_over = threading.Event()

    def kill() -> None:
        for name in itertools.cycle(("D0", "D1")):
            if is_over.wait(1.5):
                return
            up = {one["name"]: one["pid"] for one in snapshot(cluster.url)["instances"] if one["status"] == "up"}
            if len(up) == 4:
                os.kill(up[name], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def snapshot(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/cluster", timeout=10.0, trust_env=False).json()
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_under_pressure_answers_as_one_engine_does(
    name: str, model: Path, drawn: list[Drawn], right: list[Answer]
) -> None:
    topology, settings = CLUSTERS[name]
    with running(model, topology, settings) as cluster:
        with killing(cluster) if name == "killed" else contextlib.nullcontext():
            found = ask(cluster.url, drawn, AT_ONCE, streamed=0.4)
        wrong = {
            one.number: says for one, r, f in zip(drawn, right, found, strict=True) if (says := differences(one, r, f))
        }
        assert len(wrong) <= NEAR_TIES[name], f"{len(wrong)} of {len(drawn)}, the first: {first_of(wrong, drawn)}"
        wait_until(
            lambda: all(map(is_whole, instance_loads(cluster.url).values())), 30.0, lambda: instance_loads(cluster.url)
        )
        loads = instance_loads(cluster.url)
    if settings[: len(PRESSED)] == PRESSED:  # else the pressure that the test is about was not there
        assert loads["D0"]["retractions"] and loads["P0"]["evictions"] and loads["P0"]["host_tokens"], loads


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engine_draws_what_the_logits_of_transformers_give(
    name: str, model: Path, drawn: list[Drawn], right: list[Answer]
) -> None:
    if name == "fp8":
        pytest.skip("transformers has no fp8 pages")
    recomputation = Recomputation(model, MAX_MODEL_LEN)
    wrong = {
        one.number: says
        for one, answer in zip(drawn, right, strict=True)
        if (says := recomputation.differences(one, answer))
    }
    assert not wrong, f"{len(wrong)} of {len(drawn)}, the first: {first_of(wrong, drawn)}"


def first_of(wrong: dict[int, list[str]], drawn: list[Drawn]) -> str:
    number = min(wrong)
    return f"{[one.body for one in drawn if one.number == number]} {wrong[number]}"
