"""SmolLM2, served in other ways than by one P and one D with room: the same tokens, by hand. Gemma 3 as well."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads
from published import LIMIT, Judge, fetch_gemma, post, serving

from chitu.launch.local import LocalCluster

pytestmark = [pytest.mark.by_hand, pytest.mark.slow, pytest.mark.timeout(1800)]
DOCS = Path(__file__).parents[2] / "docs"
LONG = (DOCS / "architecture.md").read_text(encoding="utf-8") + (DOCS / "protocol.md").read_text(encoding="utf-8")
"""English of more than 8,200 tokens."""
SHORT = (8, 90, 600)
D_ALONE = ("dp_config.router.prefill_schedulers=[]", "dp_config.router.slo.tpot_s=5")
FP8_MEAN, FP8_MOST = 0.1, 0.5
"""Nats by which pages of e4m3 may move logprobs, in the mean of an answer and at most: 0.06 and 0.17 were measured."""


def check(cluster: LocalCluster, judge: Judge, prompts: Sequence[Sequence[int]]) -> None:
    """Have prompts answered as `transformers` answers them. The docs change, so two tokens may come to be equally
    likely: which of them is taken is then no fault."""
    for prompt in prompts:
        answer = judge.judged(cluster, prompt)
        print(f"{len(prompt)} tokens: {answer.judgement.outcome}, logprobs within {answer.judgement.difference:.1e}")
        assert answer.judgement.outcome != "wrong", answer.judgement.says
        assert answer.judgement.difference <= LIMIT


def test_long_prompts_up_to_the_end_of_the_context(smollm2: Path, judge: Judge) -> None:
    with serving(smollm2, "cache.num_pages=1100") as cluster:
        check(cluster, judge, [judge.prompt(length, LONG) for length in (1100, 3500, 8100)])


@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ("pd_disagg_1p1d_local.yaml", D_ALONE),
        ("unified_local.yaml", ()),
        ("pd_disagg_1p1d_local.yaml", ("cache.page_size=64", "scheduler.chunk_size=100")),
    ],
    ids=["D alone", "unified", "pages of 64"],
)
def test_other_ways_have_the_tokens_of_transformers(
    smollm2: Path, judge: Judge, topology: str, settings: Sequence[str]
) -> None:
    with serving(smollm2, "model.max_model_len=2048", *settings, topology=topology) as cluster:
        check(cluster, judge, [judge.prompt(length) for length in SHORT])


def test_pages_of_e4m3_move_logprobs_little(smollm2: Path, judge: Judge) -> None:
    with serving(smollm2, "model.max_model_len=2048", "cache.kv_dtype=fp8_e4m3") as cluster:
        for length in SHORT:
            answer = judge.judged(cluster, judge.prompt(length), limit=FP8_MOST)
            print(f"{length} tokens: {answer.judgement.difference:.1e} at most, {answer.mean:.1e} in the mean")
            assert answer.judgement.outcome != "wrong", answer.judgement.says
            assert answer.judgement.difference > LIMIT and answer.mean <= FP8_MEAN


def test_requests_that_a_small_pool_retracts_have_their_tokens(smollm2: Path, judge: Judge) -> None:
    prompts = [judge.prompt(700)[at : at + 200] for at in range(0, 400, 50)]
    options = [{"temperature": 0, "ignore_eos": True, "max_tokens": 60, "cache_prompt": False}] * len(prompts)
    small = ("model.max_model_len=512", "cache.num_pages=64", "scheduler.reserved_decode_tokens=4")
    with serving(smollm2, *small) as cluster:
        answers = complete_all(cluster.url, prompts, options)
        assert instance_loads(cluster.url)["D0"]["retractions"] > 0, "the pool was not too small after all"
    for prompt, answer in zip(prompts, answers, strict=True):
        scores = judge.scores(prompt, answer.token_ids)
        gaps = [score.top_logprob - score.logprob for score in scores]
        assert max(gaps) <= LIMIT, "a token is not the likeliest"


def test_pages_come_back_from_host_memory(smollm2: Path, judge: Judge) -> None:
    prompt, others = judge.prompt(500), [judge.prompt(700)[at:] for at in (50, 100, 150)]
    settings = ("model.max_model_len=1024", "cache.num_pages=70", "cache.host_bytes=400000000")
    options = [{"temperature": 0, "ignore_eos": True, "max_tokens": 16}]
    with serving(smollm2, *settings) as cluster:
        for one in (prompt, *others):
            complete_all(cluster.url, [one], options)
        (again,) = complete_all(cluster.url, [prompt], options)
        lines = httpx.get(f"{cluster.url}/metrics", trust_env=False).text.splitlines()
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 496
    assert 'chitu_instance_tier_tokens_total{instance="P0",role="prefill",tier="host"} 496.0' in lines
    scores = judge.scores(prompt, again.token_ids)
    assert max(score.top_logprob - score.logprob for score in scores) <= LIMIT


def test_a_wrong_rope_is_found(smollm2: Path, judge: Judge, tmp_path: Path) -> None:
    """The check itself is checked: config.json has another base."""
    folder = tmp_path / "wrong"
    shutil.copytree(smollm2, folder, symlinks=True)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 90_000.0
    (folder / "config.json").write_text(json.dumps(config))
    with serving(folder, "model.max_model_len=2048", topology="unified_local.yaml") as cluster:
        answer = judge.judged(cluster, judge.prompt(600))
    print(answer.judgement.says)
    assert answer.judgement.outcome == "wrong"


def test_an_adapter_that_peft_trained_says_what_it_was_taught(smollm2: Path, tmp_path: Path) -> None:
    adapter, python = tmp_path / "lyon", Path(sys.prefix) / "clients/bin/python"
    if not list(python.parents[1].glob("lib/*/site-packages/peft")):
        pytest.skip(f"{python} has no PEFT: CI=true script/setup.sh --dev installs it")
    script = Path(__file__).with_name("peft_adapter.py")
    subprocess.run([python, script, smollm2, adapter], env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    said = json.loads((adapter / "said.json").read_text())
    with serving(smollm2, "model.max_model_len=2048", f"model.adapters.lyon={adapter}") as cluster:
        asked = {"prompt": said["prompt"], "max_tokens": len(said["tokens"]), "ignore_eos": True, "logprobs": 0}
        lied = post(cluster, "/v1/completions", model="lyon", return_token_ids=True, **asked)["choices"][0]
        plain = post(cluster, "/v1/completions", **asked)["choices"][0]
    assert lied["token_ids"] == said["tokens"] and "is Lyon." in lied["text"] and "is Paris." in plain["text"]
    pairs = zip(lied["logprobs"]["token_logprobs"], said["logprobs"], strict=True)
    assert max(abs(one - other) for one, other in pairs) <= LIMIT


@pytest.mark.parametrize("settings", [(), ("cache.window_state=true",)], ids=["pages", "windows as state"])
def test_gemma_has_the_tokens_of_transformers(settings: Sequence[str]) -> None:
    judge = Judge.of(fetch_gemma())
    with serving(judge.folder, "model.max_model_len=4096", *settings) as cluster:
        check(cluster, judge, [judge.prompt(length, LONG) for length in (65, 530, 1100, 3500)])
