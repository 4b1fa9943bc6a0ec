"""Conversations with a prefix cache, over real processes: tokens are those of a run without one, a turn computes only
what is new, and all pages are accounted for. Pools are small, so pages are evicted all the time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import Completion, complete_all, instance_loads, is_whole
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

PAGE_SIZE = 16
OUTPUT_TOKENS = 7
TURNS, CONVERSATIONS = 3, 4
GREEDY: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
PD = "dp_config.router.pd_disaggregation"
SETTINGS = [
    "model.served_name=m",
    "scheduler.chunk_size=37",
    "scheduler.max_batched_tokens=90",
    "scheduler.threads=1",
    "cache.num_pages=40",
]
HOST_MEMORY = "cache.host_bytes=4000000"


def sizes(prefill: int, decode: int) -> list[str]:
    """Return settings for the tensor-parallel sizes of P and D."""
    keys = {"prefill": prefill, "decode": decode}
    return [
        setting
        for role, size in keys.items()
        for key in [f"dp_config.router.{role}_schedulers.0"]
        for setting in (f"{key}.tp_size={size}", f"{key}.devices=[{','.join(['cpu'] * size)}]")
    ]


CASES = {
    "unified, host memory": ("unified_local.yaml", "qwen3", ["scheduler.overlap=on", HOST_MEMORY]),
    "shm, staged, overlap, checked, disk": (
        "pd_disagg_1p1d_local.yaml",
        "deepseek_v3",
        [
            *(f"{PD}.transport=shm", f"{PD}.transfer=staged", f"{PD}.verify_kv=all", "scheduler.overlap=on"),
            *(HOST_MEMORY, "cache.load_timeout_s=60"),
        ],
    ),
    "mooncake, 2 ranks to 1, disk": (
        "pd_disagg_1p1d_local.yaml",
        "llama",
        [f"{PD}.transport=mooncake", HOST_MEMORY, "cache.load_timeout_s=60", *sizes(2, 1)],
    ),
    "shm, 1 rank to 2, fp8, disk": (
        "pd_disagg_1p1d_local.yaml",
        "llama",
        [f"{PD}.transport=shm", "cache.kv_dtype=fp8_e4m3", HOST_MEMORY, "cache.load_timeout_s=60", *sizes(1, 2)],
    ),
}

BY_HAND = {"mooncake, 2 ranks to 1, disk"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.by_hand) if each in BY_HAND else each for each in CASES])
def cluster(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    topology, family, overrides = CASES[request.param]
    if "mooncake" in request.param:
        pytest.importorskip("mooncake.engine")
    path = models / family
    if not path.exists():
        make_model(path, family=family)
    settings = [f"model.path={path}", *SETTINGS, *overrides]
    if "disk" in request.param:
        settings.append(f"cache.disk.path={tmp_path_factory.mktemp('disk')}")
    with LocalCluster(load_topology(topology, settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def prefiller(cluster: LocalCluster) -> dict[str, int]:
    """Return the newest load of the instance that computes prompts."""
    return next(load for name, load in instance_loads(cluster.url).items() if not name.startswith("D"))


def answers(cluster: LocalCluster, prompts: list[list[int]], salt: str) -> list[Completion]:
    return complete_all(cluster.url, prompts, [GREEDY | {"cache_salt": salt}] * len(prompts))


def test_conversations_that_fork_have_the_tokens_of_a_run_without_a_cache(cluster: LocalCluster) -> None:
    check_that_a_turn_computes_and_moves_only_its_new_pages(cluster)
    rng = random.Random(5)
    opening = [rng.randrange(10, 500) for _ in range(50)]
    prompts = [opening + [rng.randrange(10, 500) for _ in range(15 * n)] for n in range(CONVERSATIONS)]
    hits = 0
    for turn in range(TURNS):
        cached = answers(cluster, prompts, "shared")
        without: dict[str, Any] = {"cache_prompt": False} if turn % 2 else {"cache_salt": f"turn {turn}"}
        computed = complete_all(cluster.url, prompts, [GREEDY | without] * CONVERSATIONS)
        if turn % 2:
            assert not any(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in computed)
        assert [answer.token_ids for answer in cached] == [answer.token_ids for answer in computed]
        hits += sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in cached)
        fork = rng.randrange(CONVERSATIONS)
        for index, answer in enumerate(cached):
            prompts[index] = prompts[fork if index == 0 else index] + answer.token_ids + [rng.randrange(10, 500)] * 9
    assert hits >= 3 * PAGE_SIZE

    def evicted_and_rests() -> bool:
        loads = instance_loads(cluster.url).values()  # up to a heartbeat old
        return all(load["evictions"] > 0 < load["pages_cached"] and is_whole(load) for load in loads)

    wait_until(evicted_and_rests, 30.0, lambda: instance_loads(cluster.url))


def check_that_a_turn_computes_and_moves_only_its_new_pages(cluster: LocalCluster) -> None:
    """Check a conversation's counters. Runs first: load reports are up to a heartbeat old, so only a fresh cluster has
    known counters. P lacks the pages of the answer, which D computed, unless D leaves them on disk; D has them, so they
    do not move either."""
    names = instance_loads(cluster.url)
    is_unified, disk = any(name.startswith("U") for name in names), cluster.topology.cache.disk.path
    page_bytes, row_bytes = wire_sizes(cluster)
    prompt = [400 - token for token in range(100)]
    computed, moved_pages, saved_pages, known = 0, 0, 0, 0
    for turn in range(3):
        (answer,) = answers(cluster, [prompt], "a single conversation")
        knows_answers = is_unified or disk is not None or not turn
        known_to_prefill = known if knows_answers else known - (OUTPUT_TOKENS - 1)
        cached = known_to_prefill // PAGE_SIZE * PAGE_SIZE
        assert answer.usage["prompt_tokens_details"] == {"cached_tokens": cached}
        computed += len(prompt) - cached
        saved_pages += known // PAGE_SIZE
        moved_pages += -(-len(prompt) // PAGE_SIZE) - known // PAGE_SIZE
        known = len(prompt) + OUTPUT_TOKENS - 1  # the newest token has no K and V yet
        if disk is not None:
            wait_until(partial(is_on_disk, Path(disk), known // PAGE_SIZE), 30.0, lambda: [*Path(disk).glob("*/*")])
        prompt = prompt + answer.token_ids + [7] * 30
    assert computed < 3 * 100
    wait_until(lambda: prefiller(cluster)["cached_tokens"] > 0, 10.0, lambda: prefiller(cluster))
    if is_unified:
        return
    expected = {
        "bytes_moved": moved_pages * page_bytes + 3 * row_bytes,
        "bytes_saved": saved_pages * page_bytes,
        "cached_tokens": saved_pages * PAGE_SIZE,
    }

    def counted() -> dict[str, int]:
        load = instance_loads(cluster.url)["D0"]  # up to a heartbeat old
        return {name: load[name] for name in expected}

    wait_until(lambda: counted() == expected, 10.0, lambda: f"{counted()}, {expected} expected")


def is_on_disk(disk: Path, num_pages: int) -> bool:
    """Return whether the disk has exactly this many pages, of all instances."""
    return len({path.name for path in disk.glob("*/*.kv")}) == num_pages


def wire_sizes(cluster: LocalCluster) -> tuple[int, int]:
    """Return the bytes of a page, in all layers and on all ranks of D together, and of a logits row."""
    spec = json.loads((Path(str(cluster.topology.model.path)) / "config.json").read_text())
    tokens = PAGE_SIZE * spec["num_hidden_layers"]
    row_bytes = 64 + 4 * spec["vocab_size"]
    if "kv_lora_rank" in spec:  # one latent row for all heads
        return tokens * (spec["kv_lora_rank"] + spec["qk_rope_head_dim"]) * 4, row_bytes
    head_dim = spec.get("head_dim") or spec["hidden_size"] // spec["num_attention_heads"]
    head_bytes = head_dim + 4 if cluster.topology.cache.kv_dtype == "fp8_e4m3" else 4 * head_dim  # with its scale
    return tokens * 2 * spec["num_key_value_heads"] * head_bytes, row_bytes


@pytest.mark.parametrize("cluster", ["shm, staged, overlap, checked, disk"], indirect=True)
def test_a_flush_forgets_and_a_salt_is_a_text(cluster: LocalCluster) -> None:
    prompt = list(range(100, 180))
    for cached in (0, 64):
        (answer,) = answers(cluster, [prompt], "")
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == cached
    body = {"model": "m", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    streamed = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False).text
    assert '"prompt_tokens_details":{"cached_tokens":64}' in streamed
    for salt in (5, ["a"], "x" * 257):
        refused = httpx.post(
            f"{cluster.url}/v1/completions", json=body | {"cache_salt": salt}, timeout=60.0, trust_env=False
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
    for shown in ({"cache_prompt": False}, {"cache_prompt": None}):
        (answer,) = complete_all(cluster.url, [prompt], [GREEDY | shown])
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == (0 if False in shown.values() else 64)
    # The router ends a text at a stop string by itself: the number of cached tokens comes with the first token.
    text = complete_all(cluster.url, [prompt], [GREEDY | {"max_tokens": 40}])[0].text
    (answer,) = complete_all(cluster.url, [prompt], [GREEDY | {"max_tokens": 40, "stop": text[len(text) // 2 :][:2]}])
    assert answer.finish_reason == "stop" and len(answer.text) < len(text)
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 64
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    for headers, status in (({}, 401), ({"authorization": f"Bearer {secrets.token}"}, 200)):
        flushed = httpx.post(f"{cluster.url}/admin/cache/flush", headers=headers, timeout=5.0, trust_env=False)
        assert flushed.status_code == status
    wait_until(lambda: prefiller(cluster)["pages_cached"] == 0, 10.0, lambda: prefiller(cluster))
    (answer,) = answers(cluster, [prompt], "")
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
