"""The truth in a minute: prompts through 1P1D on one card, and through one instance, judged by transformers.

The judge is the same checkpoint in transformers, in float32 on the same card. It scores each answer token by token,
after the tokens that were taken, so a near-tie excuses nothing behind it. A random model in bfloat16 has near-ties: a
token is right if its logit is within `TOLERANCE` standard deviations of the largest. Tokens alone would hide a page
that is a little wrong, so the logprob of each token must be the judge's, too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster, StartFailed
from chitu.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.on_card, pytest.mark.timeout(300)]

TOLERANCE = 0.25
"""Of a token's logit below the largest, and of its logprob from the judge's, in standard deviations of the logits."""
MEAN_TOLERANCE = {torch.bfloat16: 0.04, torch.float32: 1e-4}
"""Of logprobs, in the mean of a prompt's answer. In bfloat16 transformers itself is 0.01 from its float32 (this model,
on a CPU), and an answer to a prompt with one other token 0.1."""
READY_S = 150.0
PD, UNIFIED = "pd_disagg_1p1d_local", "unified_local"
LENGTHS = (1, 17, 64, 65, 200, 700, 1023, 1500, 2048, 2100, 3000, 4097)
TWIN_LENGTHS = (1, 17, 64, 65, 200, 300)


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]


def shape_of(card) -> ModelShape:
    if card.is_twin:
        return ModelShape(
            hidden_size=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=32,
            intermediate_size=96,
            vocab_size=600,
            max_position_embeddings=2048,
            tie=True,
            dtype="float32",
        )
    return ModelShape(
        hidden_size=1024,
        layers=6,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=8192,
        max_position_embeddings=8192,
        tie=True,
        dtype="bfloat16",
        rope_theta=1e6,
    )


@pytest.fixture(scope="module")
def model(card, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("truth") / "m", "qwen3", shape_of(card))


@pytest.fixture(scope="module")
def prompts(card) -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(10, 500) for _ in range(n)] for n in (TWIN_LENGTHS if card.is_twin else LENGTHS)]


def cluster_of(card, model: Path, name: str) -> LocalCluster:
    router = "dp_config.router"
    sections = ("unified",) if name == UNIFIED else ("prefill", "decode")
    own = [f"model.path={model}", "model.served_name=m", "cache.num_pages=2000", "scheduler.max_running_requests=16"]
    own += [f"{router}.{section}_schedulers.0.devices=[{card.device}]" for section in sections]
    if name == PD:
        pd = f"{router}.pd_disaggregation"
        own += [f"{pd}.transport={card.transport}", f"{pd}.verify_kv=all"]
    return LocalCluster(load_topology(name, own))


@pytest.fixture(scope="module")
def clusters(card, model) -> Iterator[dict[str, LocalCluster]]:
    """Start both at once: most of a start is imports and, on a card, compiling."""
    with cluster_of(card, model, PD) as divided, cluster_of(card, model, UNIFIED) as unified:
        end_s = time.monotonic() + READY_S
        for cluster in (divided, unified):
            try:
                cluster.wait_ready(max(1.0, end_s - time.monotonic()))
            except StartFailed as error:
                pytest.fail(f"{error}\n{ends_of_logs(cluster)}", pytrace=False)
        yield {PD: divided, UNIFIED: unified}


def ends_of_logs(cluster: LocalCluster) -> str:
    """Return the last lines of each process that did not become ready."""
    missing = [name for name, member in cluster.members.items() if member.progress.state != "ready"]
    return "\n".join(f"--- {name}\n" + "\n".join(cluster.logs(name).splitlines()[-15:]) for name in missing)


@pytest.fixture(scope="module")
def judge(card, model):
    """Return a function: a prompt and an answer to the judge's logprobs `[N]` of its tokens, their logits below the
    largest, and the logits' standard deviations."""
    from transformers import AutoModelForCausalLM

    wide = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    wide = wide.to(card.device).eval()

    @torch.inference_mode()
    def score(prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.tensor([prompt + tokens], device=card.device)
        logits_NV = wide(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].double()
        chosen_N = logits_NV.gather(1, torch.tensor(tokens, device=card.device)[:, None])[:, 0]
        logprobs_N = chosen_N - logits_NV.logsumexp(-1)
        return logprobs_N.cpu(), (logits_NV.max(-1).values - chosen_N).cpu(), logits_NV.std(-1).cpu()

    return score


def ask(url: str, prompt: list[int], **options: object) -> Answer:
    body = {"model": "m", "prompt": prompt, "return_token_ids": True, "logprobs": 0, "ignore_eos": True, **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=90, trust_env=False)
    assert response.status_code == 200, f"{len(prompt)} tokens: {response.status_code}: {response.text[:300]}"
    choice = response.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def faults(card, judge, prompts: list[list[int]], answers: list[Answer], count: int, is_greedy: bool) -> list[str]:
    """Return what is wrong, a line for each prompt with a wrong answer."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs_N, gaps_N, spread_N = judge(prompt, answer.tokens)
        away_N = (torch.tensor(answer.logprobs, dtype=torch.float64) - logprobs_N).abs() / spread_N
        gap = float((gaps_N / spread_N).max()) if is_greedy else 0.0
        facts = f"logit {gap:.4f}, logprob {away_N.max():.5f}, in the mean {away_N.mean():.5f} sd away"
        print(f"  prompt of {len(prompt)} tokens: {facts}")
        is_right = gap <= TOLERANCE and away_N.max() <= TOLERANCE and away_N.mean() <= MEAN_TOLERANCE[card.dtype]
        if not is_right or len(answer.tokens) != count:
            found.append(f"prompt of {len(prompt)} tokens: {len(answer.tokens)} tokens, {facts}")
    return found


@pytest.mark.parametrize("name", [PD, UNIFIED])
def test_answers_are_those_of_transformers(card, clusters, judge, prompts, name):
    """Alone, all together, and drawn with a seed."""
    url, count = clusters[name].url, card.size(24, 6)
    greedy = {"temperature": 0, "max_tokens": count}
    assert not faults(card, judge, prompts, [ask(url, prompt, **greedy) for prompt in prompts], count, True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(partial(ask, url, **greedy), prompts))
    assert not faults(card, judge, prompts, together, count, True)
    seeded = {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "seed": 7, "max_tokens": count}
    assert not faults(card, judge, prompts, [ask(url, prompt, **seeded) for prompt in prompts], count, False)


def test_the_judge_finds_a_page_of_another_prompt(card, clusters, judge, prompts):
    """The answer to a prompt with 16 other tokens is not taken for right."""
    prompt, count = prompts[4], card.size(24, 6)
    other = [*prompt[:160], *prompts[3][:16], *prompt[176:]]
    answer = ask(clusters[PD].url, other, temperature=0, max_tokens=count)
    assert faults(card, judge, [prompt], [answer], count, True)
    assert not faults(card, judge, [other], [answer], count, True)
