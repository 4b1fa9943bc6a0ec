"""1P1D with the real engine: a request that makes a step raise fails alone, and no process is restarted."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chaos_cluster import DEADLINES, PATIENCE_S, VOCAB_SIZE, ChaosCluster, short_ask
from completions import instance_loads, is_whole
from nursery import FORKED, forked
from poisoned_scheduler import POISON_OF_D, POISON_OF_P
from safetensors.numpy import load_file, save_file
from support.router_process import wait_until
from support.steady_load import Ask

from chitu.config.load import load_topology
from chitu.config.topology import instances
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.process.supervisor import StartFailed
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


# ----------------------------------------------------------------------------------------------------------------------
# 1P1D with the real engine and weights that are not finite: a request that meets them fails by name, alone, and leaves
# no page; a model that computes nothing else does not start.


BAD = 77
COUNTER = "chitu_instance_unsound_requests_total"
PROMPT = [10 + 7 * position % 300 for position in range(100)]


def damage(folder: Path, name: str, rows: slice, value: float = np.nan) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors[name][rows] = value
    save_file(tensors, path, {"format": "pt"})


WAYS = {
    "overlap": ("pd_disagg_1p1d_local", ["scheduler.overlap=on"]),
    "tp": ("pd_disagg_1p1d_local", ["dp_config.router.prefill_schedulers.0.tp_size=2"]),
    "unified": ("unified_local", []),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_meets_them_fails_alone(tmp_path: Path, way: str) -> None:
    model = make_model(tmp_path / "llama", family="llama")
    damage(model, "model.embed_tokens.weight", slice(BAD, BAD + 1))
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=500", f"{PD}.transport=shm"]
    name, more_settings = WAYS[way]
    topology = load_topology(name, [*settings, "scheduler.chunk_size=32", *more_settings])
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()

        def ask(prompt: list[int], **more: object) -> httpx.Response:
            body = {"model": "m", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
            return httpx.post(f"{cluster.url}/v1/completions", json=body | more, timeout=60.0, trust_env=False)

        right = ask(PROMPT, temperature=0.0).json()["choices"][0]["token_ids"]
        bad = [*PROMPT[:40], BAD, *PROMPT[40:]]
        for sampling in ({}, {"temperature": 0.0}, {"top_p": 0.5, "logprobs": 3}, {"logit_bias": {"9": 100}}, {"n": 3}):
            reply = ask(bad, **sampling)
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "step_failed"), reply.text
            assert "not finite" in reply.json()["error"]["message"]
        chosen = ask(PROMPT, allowed_token_ids=[BAD])  # D feeds it in the next step
        assert (chosen.status_code, chosen.json()["error"]["code"]) == (500, "step_failed")
        again = ask(PROMPT, temperature=0.0)
        assert again.json()["choices"][0]["token_ids"] == right
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert ask([*bad[:80], 5], temperature=0.0).json()["error"]["code"] == "step_failed", "nothing bad was cached"

        def counts() -> list[str]:
            lines = httpx.get(f"{cluster.url}/metrics", timeout=5.0, trust_env=False).text.splitlines()
            return sorted(line.split()[-1] for line in lines if line.startswith(f"{COUNTER}{{"))

        # P counts a prompt once, a unified instance each choice of it; the token chosen here is decoded elsewhere.
        wait_until(lambda: counts() == (["9.0"] if way == "unified" else ["1.0", "6.0"]), 15.0, counts)
        names = [each.name for each in instances(topology)]
        assert all(map(cluster.alive, names)) and set(instance_loads(cluster.url)) == set(names)
        assert "are not finite: damaged weights" in cluster.logs(names[0])
        assert "retrying" not in cluster.logs("router"), "what fails everywhere is not tried again"


def test_a_model_without_a_finite_logit_does_not_start(tmp_path: Path) -> None:
    model = make_model(tmp_path / "qwen3", family="qwen3")
    damage(model, "model.layers.1.mlp.down_proj.weight", slice(None))
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=100", f"{PD}.transport=shm"]
    with (
        LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster,
        pytest.raises(StartFailed, match="logits are not finite"),
    ):
        cluster.wait_ready()


# ----------------------------------------------------------------------------------------------------------------------
# A request that kills the processes that compute it is not sent to a third one, and later requests are served.


LONG = [f"{DEADLINES}.{name}=60" for name in ("queue_s", "transfer_s")]
"""Deadlines long enough that the request is held until its P is killed."""


def prefill_of(cluster: ChaosCluster, attempt: int) -> str:
    """Return the P that has this attempt of the suspect; empty if that attempt is not running."""
    for request in cluster.snapshot().requests:
        if "suspect" in request.request_id and request.attempt == attempt and request.ended_at_s is None:
            return request.prefill or ""
    return ""


def test_a_request_that_two_processes_died_under_is_not_sent_to_a_third(tmp_path: Path) -> None:
    rng = random.Random(3)
    suspect = Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(90)), 8, request_id="suspect")
    with ChaosCluster(tmp_path, *LONG, clients=1) as cluster:
        cluster.hold("prefill")  # P does not finish it
        (future,) = cluster.load.send([suspect])
        for attempt in (1, 2):
            wait_until(lambda attempt=attempt: prefill_of(cluster, attempt) != "", 10, "not sent")  # type: ignore[misc]
            victim = prefill_of(cluster, attempt)
            cluster.processes.kill(victim, signal.SIGKILL)
            cluster.mend("SIGKILL", victim)
            wait_until(cluster.processes.ready, 60, lambda: "; ".join(cluster.not_whole()))
        answer = future.result(PATIENCE_S)
        assert answer.outcome == "poison_request", answer
        log = cluster.processes.logs("router")
        assert log.count("suspect -> ") == 2
        assert "2 instances died one after the other while they had this request" in log
        cluster.release()
        answers = [future.result(PATIENCE_S) for future in cluster.load.send([short_ask(rng) for _ in range(4)])]
        assert [answer.outcome for answer in answers] == ["right"] * 4
        wait_until(lambda: not cluster.not_whole(), 20, cluster.not_whole)
