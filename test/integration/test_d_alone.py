"""D computes prompts itself, in real processes: logits and tokens are those of the pair, and nothing moves."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import Completion, complete_all, instance_loads, is_whole
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

PAGE_SIZE = 16
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SETTINGS = ["model.served_name=m", "scheduler.threads=1", "cache.num_pages=800", "scheduler.speculation=off"]
"""With drafts the streams of a small model, which repeats itself, are over before P has computed beside them."""
TPOT_S = 5.0
"""So long that D may compute everything, however slow the machine is."""
ALONE = f"dp_config.router.slo.tpot_s={TPOT_S}"
BESIDE_P = "dp_config.router.slo.tpot_s=0.02"
"""So short that D computes few tokens of a prompt in each step beside streams."""
TP = [
    "dp_config.router.decode_schedulers.0.tp_size=2",
    "dp_config.router.decode_schedulers.0.devices=[cpu,cpu]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(path, family="qwen3")
    return path


def start(model: Path, *settings: str) -> LocalCluster:
    return LocalCluster(
        load_topology("pd_disagg_1p1d_local.yaml", [f"model.path={model}", *SETTINGS, *settings]), entries=FORKED
    )


@pytest.fixture(scope="module", params=[pytest.param("1 rank", marks=pytest.mark.by_hand), "2 ranks"])
def cluster(request: pytest.FixtureRequest, model: Path) -> Iterator[LocalCluster]:
    without_p = "dp_config.router.prefill_schedulers=[]"
    with start(model, ALONE, without_p, *(TP if request.param == "2 ranks" else ())) as cluster:
        cluster.wait_ready()
        yield cluster


def ended(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Return the records of the newest requests, oldest first."""
    return httpx.get(f"{cluster.url}/cluster", timeout=5.0, trust_env=False).json()["requests"]


def pairs_of(cluster: LocalCluster) -> list[str]:
    """Return the pairs of the newest requests, oldest first: `D0` if D did all."""
    return ["-".join(name for name in (one.get("prefill"), one["decode"]) if name) for one in ended(cluster)]


def ask(cluster: LocalCluster, prompt: list[int], **options: Any) -> Completion:
    (answer,) = complete_all(cluster.url, [prompt], [GREEDY | {"max_tokens": 7} | options])
    return answer


def lines_of(cluster: LocalCluster, prompt: list[int], **options: Any) -> list[float]:
    """Return the logprobs of the five likeliest tokens at each place of an answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 7, "logprobs": 5, **GREEDY, **options}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False).json()
    return [value for place in answer["choices"][0]["logprobs"]["top_logprobs"] for value in place.values()]


def wait_idle(cluster: LocalCluster) -> None:
    def loads() -> dict[str, dict[str, int]]:
        return instance_loads(cluster.url)

    wait_until(lambda: all(map(is_whole, loads().values())), 30.0, loads)


def test_a_conversation_on_d_moves_nothing_and_computes_only_what_is_new(cluster: LocalCluster) -> None:
    rng = random.Random(3)
    prompt, known = [rng.randrange(10, 500) for _ in range(300)], 0
    for _turn in range(3):
        answer = ask(cluster, prompt, cache_salt="one conversation")
        assert pairs_of(cluster)[-1] == "D0" and ended(cluster)[-1]["kv_bytes"] == 0
        details = answer.usage.get("prompt_tokens_details") or {}
        assert details.get("cached_tokens", 0) == known // PAGE_SIZE * PAGE_SIZE
        without = ask(cluster, prompt, cache_prompt=False)
        assert answer.token_ids == without.token_ids
        known = len(prompt) + len(answer.token_ids) - 1
        prompt = [*prompt, *answer.token_ids, *(rng.randrange(10, 500) for _ in range(20))]
    wait_idle(cluster)


def test_many_requests_on_d_are_right_in_every_form(cluster: LocalCluster) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.randint(1, 200))] for _ in range(12)]
    options = [GREEDY | {"max_tokens": rng.randint(1, 20), "cache_prompt": False} for _ in prompts]
    together = complete_all(cluster.url, prompts, options)
    for prompt, option, answer in zip(prompts, options, together, strict=True):
        assert ask(cluster, prompt, **option).token_ids == answer.token_ids
    assert "D0" in pairs_of(cluster)
    body = {"model": "m", "prompt": prompts[0], "n": 3, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    choices = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0, trust_env=False).json()["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    assert pairs_of(cluster)[-3:] == ["D0"] * 3
    wait_idle(cluster)


def computed_by_p(pair: LocalCluster) -> tuple[list[int], list[float]]:
    """Return a prompt that P computed, because D had streams that would have waited for it, and the logprobs of its
    answer. What the router takes for cheaper depends on measured times, so several are tried. The streams have prompts
    of their own, by which P's time a token is measured."""
    is_enough = threading.Event()

    def keep_busy() -> None:
        while not is_enough.is_set():
            streams = [[20 + n, *range(21, 70)] for n in range(24)]
            complete_all(pair.url, streams, [GREEDY | {"max_tokens": 300}] * len(streams))

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_busy)
        try:
            for number in range(20):
                prompt = [20 + number, *((7 * place) % 490 + 10 for place in range(600))]
                wait_until(lambda: instance_loads(pair.url)["D0"]["running"] >= 18, 30.0, lambda: "no streams")
                lines = lines_of(pair, prompt)
                record = [one for one in ended(pair) if one["prompt_tokens"] == len(prompt)][-1]
                if record["prefill"] == "P0" and record["kv_bytes"] > 0:
                    return prompt, lines
        finally:
            is_enough.set()
            busy.result()
    raise AssertionError(f"no prompt was computed by P beside the streams of D: the newest one went {record}")


def test_logits_of_d_alone_are_those_of_the_pair_also_behind_what_the_pair_left(
    cluster: LocalCluster, model: Path
) -> None:
    with start(model, BESIDE_P) as pair:
        pair.wait_ready()
        prompt, first = computed_by_p(pair)
        second = [*prompt, *ask(cluster, prompt).token_ids, 11, 12, 13]
        pair.kill("P0")  # a request that is still sent there is tried again, on D alone
        expected = lines_of(pair, second)
        assert pairs_of(pair)[-1] == "D0" and ended(pair)[-1]["kv_bytes"] == 0
        assert ended(pair)[-1]["cached_tokens"] == (len(prompt) + 6) // PAGE_SIZE * PAGE_SIZE
    for found, right in ((lines_of(cluster, prompt), first), (lines_of(cluster, second, cache_prompt=False), expected)):
        largest = max(map(abs, right))
        assert all(math.isclose(a, b, abs_tol=1e-5 * largest) for a, b in zip(found, right, strict=True))
