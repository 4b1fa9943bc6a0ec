"""1P1D with the real engine: a request that makes a step raise fails alone, and no process is restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import instance_loads, is_whole
from nursery import forked
from poisoned_scheduler import POISON_OF_D, POISON_OF_P
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.tools.make_model import make_model

PD = "dp_config.router.pd_disaggregation"
PROMPTS = [[10 + (31 * index + 7 * position) % 400 for position in range(3 + 17 * index)] for index in range(7)]


def body_of(prompt: list[int], index: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.8 * (index % 2), "seed": index, "frequency_penalty": 0.5 * (index % 3)}
    return {"model": "m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True} | (
        sampling | more
    )


def answers(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
            return await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])

    return asyncio.run(run())


def incarnations(url: str) -> dict[str, int]:
    instances = httpx.get(f"{url}/cluster", timeout=5.0, trust_env=False).json()["instances"]
    return {instance["name"]: instance["incarnation"] for instance in instances}


def test_a_request_that_makes_the_model_raise_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    model = make_model(tmp_path / "qwen3", family="qwen3")
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=500", f"{PD}.transport=shm"]
    topology = load_topology("pd_disagg_1p1d_local", [*settings, "scheduler.chunk_size=32"])
    with LocalCluster(topology, entries=forked(Entries(scheduler="poisoned_scheduler", torchrun=False))) as cluster:
        cluster.wait_ready()
        before = incarnations(cluster.url)
        good = [body_of(prompt, index) for index, prompt in enumerate(PROMPTS)]
        expected = [reply.json()["choices"][0]["token_ids"] for reply in answers(cluster.url, good)]
        bad = [
            body_of([*PROMPTS[3], POISON_OF_P, 5], 8),
            body_of(PROMPTS[4], 9, logit_bias={str(POISON_OF_D): 1.0}),
        ]
        for _ in range(3):  # enough to open a circuit breaker
            replies = answers(cluster.url, [*good[:4], *bad, *good[4:]])
            found = [replies.pop(4), replies.pop(4)]
            assert [(reply.status_code, reply.json()["error"]["code"]) for reply in found] == [(500, "step_failed")] * 2
            assert [reply.json()["choices"][0]["token_ids"] for reply in replies] == expected
        assert incarnations(cluster.url) == before

        def whole() -> bool:
            loads = instance_loads(cluster.url)
            return all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))

        wait_until(whole, 15.0, lambda: instance_loads(cluster.url))
        assert all("alone raises the error" in cluster.logs(name) for name in ("P0", "D0"))
        assert "retrying" not in cluster.logs("router"), "what fails everywhere is not tried again"
