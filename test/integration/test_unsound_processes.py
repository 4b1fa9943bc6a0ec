"""1P1D with the real engine and weights that are not finite: a request that meets them fails by name, alone, and leaves
no page; a model that computes nothing else does not start."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from completions import instance_loads
from nursery import FORKED
from safetensors.numpy import load_file, save_file
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.config.topology import instances
from chitu.launch.local import LocalCluster
from chitu.process.supervisor import StartFailed
from chitu.tools.make_model import make_model

BAD = 77
COUNTER = "chitu_instance_unsound_requests_total"
PROMPT = [10 + 7 * position % 300 for position in range(100)]
PD = "dp_config.router.pd_disaggregation"


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
