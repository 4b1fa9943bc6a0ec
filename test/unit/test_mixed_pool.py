"""Goodput over rates, in virtual time: a pool with several ways to serve serves at least what each way alone does."""

from __future__ import annotations

import random

import pytest

from chitu.config.schema import AdmissionConfig, RouterConfig, SchedulerConfig, SLOConfig
from chitu.simulation.cluster import SimulatedCluster
from chitu.simulation.profile import EngineProfile, LinkCost, StepCost

COST = StepCost(
    prefill_s=0.015, prompt_token_s=1e-4, prompt_pair_s=1e-9, decode_s=0.012, sequence_s=1e-4, context_s=1e-7
)
LINK = LinkCost(bytes_per_s=1e10, message_s=0.0005)
PROFILE = EngineProfile(COST, LINK, num_pages=20_000, kv_bytes_per_token=100_000, vocab_size=1000, overlap=True)
LARGE = SchedulerConfig(max_batched_tokens=2048, chunk_size=2048)
TTFT_S, TPOT_S = 1.0, 0.04
HORIZON_S = 10.0
LONG, SHORT = ((2000, 6000), (10, 60)), ((100, 400), (100, 300))
"""Lengths of prompts and of answers."""


def goodput(shape: tuple[int, int, int], lengths: tuple[tuple[int, int], tuple[int, int]], rate: float) -> float:
    """Return the requests a second that keep both targets, with D that compute if there is a target."""
    slo = SLOConfig(TTFT_S, TPOT_S)
    cluster = SimulatedCluster(PROFILE, *shape, config=RouterConfig(slo=slo), scheduler=LARGE)
    rng, at_s, requests = random.Random(1), 0.0, []
    while at_s < HORIZON_S:
        at_s += rng.expovariate(rate)
        requests.append(cluster.submit(at_s, rng.randint(*lengths[0]), rng.randint(*lengths[1])))
    cluster.run()
    return sum(request.keeps(TTFT_S, TPOT_S) for request in requests) / HORIZON_S


@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long prompts", "long answers"])
def test_a_mixed_pool_serves_at_least_what_its_better_part_does_at_every_rate(
    lengths: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    for rate in (2.0, 5.0) if lengths is LONG else (25.0,):
        mixed = goodput((1, 1, 2), lengths, rate)
        parts = [goodput((1, 1, 0), lengths, rate), goodput((0, 0, 2), lengths, rate)]
        assert mixed >= max(parts)


@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long prompts", "long answers"])
def test_a_mixed_pool_over_its_limit_rejects_early_instead_of_letting_requests_wait(
    lengths: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    config = RouterConfig(slo=SLOConfig(TTFT_S, TPOT_S), admission=AdmissionConfig(max_queue_s=TTFT_S / 2))
    cluster = SimulatedCluster(PROFILE, 1, 1, 2, config=config, scheduler=LARGE)
    rng, at_s, requests = random.Random(2), 0.0, []
    while at_s < HORIZON_S:
        at_s += rng.expovariate(20.0 if lengths is LONG else 150.0)
        requests.append(cluster.submit(at_s, rng.randint(*lengths[0]), rng.randint(*lengths[1])))
    cluster.run()
    waited_s = sorted(request.ttft_s for request in requests if request.is_whole)
    assert sum(request.is_rejected for request in requests) > 0.2 * len(requests)
    assert waited_s[len(waited_s) // 2] < 2 * TTFT_S, waited_s[-5:]
