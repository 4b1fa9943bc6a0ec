"""P and D on one card give the tokens of an undivided instance and free all memory, also after kills."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from completions import complete_all, instance_loads, is_whole
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = [pytest.mark.on_card, pytest.mark.timeout(420)]
"""Timeout with fixtures included: a first cluster compiles its kernels, and may take 300 s until it is ready."""
SLACK_BYTES = 96 << 20
"""Tolerated growth of a card's memory, or of a CPU process's: caches that fill once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "m", "qwen3", head_dim=64, dtype="float32")


def cluster_of(card, model: Path, topology: str) -> LocalCluster:
    sections = ("unified",) if "unified" in topology else ("prefill", "decode")
    overrides = [
        f"model.path={model}",
        "model.served_name=m",
        "model.dtype=float32",
        "cache.num_pages=1500",
        "scheduler.max_running_requests=16",
        "scheduler.chunk_size=100",
        f"dp_config.router.pd_disaggregation.transport={card.transport}",
        *(f"dp_config.router.{section}_schedulers.0.devices=[{card.device}]" for section in sections),
    ]
    return LocalCluster(load_topology(topology, overrides))


@pytest.fixture(scope="module")
def divided(card, model) -> Iterator[tuple[LocalCluster, int]]:
    """Yield a 1P1D cluster and the memory in use on the card before it started."""
    before = held_bytes(card, None)
    with cluster_of(card, model, "pd_disagg_1p1d_local") as cluster:
        cluster.wait_ready(300)
        yield cluster, before
    if not card.is_twin:
        assert held_bytes(card, None) < before + SLACK_BYTES


def held_bytes(card, cluster: LocalCluster | None) -> int:
    """Return the memory in use on the card by all processes; for the twin, that of the cluster's instances."""
    if not card.is_twin:
        free, total = torch.cuda.mem_get_info(card.device)
        return total - free
    pids = [cluster.pid(name) for name in ("P0", "D0")] if cluster is not None else []
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(text.split("RssAnon:")[1].split()[0]) * 1024 for text in statuses)


def make_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(10, 500) for _ in range(source.randint(1, longest))] for _ in range(count)]


def all_given_back(cluster: LocalCluster) -> bool:
    loads = instance_loads(cluster.url)
    return len(loads) == 2 and all(is_whole(load) for load in loads.values())


def test_tokens_of_1p1d_are_those_of_one_instance(card, model, divided):
    cluster, _ = divided
    prompts = make_prompts(card.size(24, 4), card.size(1500, 150), seed=1)
    greedy = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    seeded = {**greedy, "temperature": 0.9, "top_p": 0.8, "top_k": 30, "seed": 7}
    options = [greedy if index % 2 else seeded for index in range(len(prompts))]
    with cluster_of(card, model, "unified_local") as unified:
        unified.wait_ready(300)
        expected = [answer.token_ids for answer in complete_all(unified.url, prompts, options)]
    assert [answer.token_ids for answer in complete_all(cluster.url, prompts, options)] == expected


def test_memory_is_what_it_was_after_many_requests_and_after_kills(card, divided):
    cluster, _ = divided
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    complete_all(cluster.url, (warm := make_prompts(32, 300, seed=2)), [options] * len(warm))
    start = held_bytes(card, cluster)
    for turn in range(card.size(10, 1)):
        prompts = make_prompts(card.size(100, 20), 300, seed=3 + turn)
        complete_all(cluster.url, prompts, [options] * len(prompts))
    wait_until(lambda: all_given_back(cluster), 10, lambda: instance_loads(cluster.url))
    assert held_bytes(card, cluster) < start + SLACK_BYTES
    for name in ("D0", "P0"):
        cluster.kill(name)
        cluster.wait_exit(name)
        cluster.restart(name)
        cluster.wait_ready(300)
        complete_all(cluster.url, warm, [options] * len(warm))
        wait_until(lambda: all_given_back(cluster), 10, lambda: instance_loads(cluster.url))
        assert held_bytes(card, cluster) < start + SLACK_BYTES, name
