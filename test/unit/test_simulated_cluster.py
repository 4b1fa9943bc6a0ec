"""`SimulatedCluster`: the real router, schedulers and transfer machines in virtual time."""

from __future__ import annotations

import random

import msgspec
import pytest

from chitu.config.schema import AdmissionConfig, RouterConfig, SchedulerConfig
from chitu.simulation.cluster import SimulatedCluster, SimulatedRequest
from chitu.simulation.profile import EngineProfile, LinkCost, StepCost
from chitu.types import Role

COST = StepCost(prefill_s=0.01, prompt_token_s=0.001, decode_s=0.02, sequence_s=0.001)
LINK = LinkCost(bytes_per_s=1e6, write_s=0.0, message_s=0.001)
PROFILE = EngineProfile(COST, LINK, num_pages=512, kv_bytes_per_token=1000, num_layers=2, vocab_size=16)
ROW_S = 128 / 1e6
"""Time of a logits row on the link."""


def load(cluster: SimulatedCluster, count: int, rate: float, seed: int = 1) -> list[SimulatedRequest]:
    rng, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        requests.append(cluster.submit(at_s, rng.randint(1, 200), rng.randint(1, 40)))
    return requests


def check_idle(cluster: SimulatedCluster) -> None:
    cluster.run(cluster.clock.now_s + 2.0)  # the last messages arrive
    for instance in cluster.members:
        assert instance.scheduler.is_idle
        instance.cache.check_idle()
        assert instance.rows.num_free == instance.rows.num_slots


def test_times_of_one_request_are_those_of_its_messages_steps_and_writes() -> None:
    cluster = SimulatedCluster(PROFILE, prefill=1, decode=1)
    request = cluster.submit(1.0, 96, 11)
    cluster.run()
    computed_s = 1.0 + LINK.message_s + COST.prefill_s + 96 * COST.prompt_token_s
    # The first of two layers is written while the second is computed; its write takes 48 ms, its computing 53 ms.
    landed_s = computed_s + 48 * 1000 / 1e6
    first_s = landed_s + ROW_S + 2 * LINK.message_s
    assert request.first_s == pytest.approx(first_s, abs=1e-4)
    end_s = first_s + 10 * (COST.decode_s + COST.sequence_s)
    assert request.end_s == pytest.approx(end_s, abs=1e-4)
    assert (request.pair, request.num_tokens, request.error) == ("P0-D0", 11, "")
    check_idle(cluster)


def test_a_unified_instance_has_no_hand_over() -> None:
    cluster = SimulatedCluster(PROFILE, unified=1)
    request = cluster.submit(0.0, 100, 3)
    cluster.run()
    assert request.first_s == pytest.approx(0.11 + 2 * LINK.message_s)
    assert request.tpot_s == pytest.approx(0.021)


@pytest.mark.parametrize("shape", [(1, 1, 0), (2, 3, 0), (0, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_ends_whole_and_every_page_comes_back(shape: tuple[int, int, int], overlap: bool) -> None:
    profile = EngineProfile(COST, LINK, num_pages=64, kv_bytes_per_token=1000, vocab_size=16, overlap=overlap)
    runs = []
    for _ in range(2):
        cluster = SimulatedCluster(profile, *shape, scheduler=SchedulerConfig(max_running_requests=8))
        requests = load(cluster, 60, 5.0)
        cluster.run()
        assert all(request.is_whole and request.num_tokens == request.max_tokens for request in requests)
        check_idle(cluster)
        runs.append([(request.first_s, request.end_s, request.pair) for request in requests])
    assert runs[0] == runs[1], "a run is a function of its inputs"


def test_roles_change_and_instances_come_and_go_under_load() -> None:
    cluster = SimulatedCluster(PROFILE, prefill=2, decode=2)
    requests = load(cluster, 120, 8.0)
    cluster.at(3.0, cluster.change_role, "P1", Role.DECODE)
    cluster.at(6.0, lambda: cluster.add(Role.PREFILL))
    cluster.at(9.0, cluster.drain, "D0")
    cluster.run()
    assert all(request.is_whole for request in requests)
    assert [instance.name for instance in cluster.members] == ["P0", "P2", "D1", "D2"]
    assert cluster.find("D2").info.home == "prefill:1"
    check_idle(cluster)


def test_a_prompt_that_begins_like_an_earlier_one_is_not_computed_again() -> None:
    cluster = SimulatedCluster(PROFILE, prefill=2, decode=1)
    prompt = bytes(4 * 400)
    first, second = cluster.submit(0.0, prompt, 2), cluster.submit(5.0, prompt + b"\1\0\0\0", 2)
    cluster.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 400)
    assert second.ttft_s < first.ttft_s / 5


def test_the_router_refuses_what_would_wait_too_long() -> None:
    config = RouterConfig(admission=AdmissionConfig(max_queue_s=1.0))
    fast = msgspec.structs.replace(PROFILE, link=LinkCost(message_s=0.001))
    short = SchedulerConfig(max_batched_tokens=256, chunk_size=128)  # of long steps it would know nothing for long
    cluster = SimulatedCluster(fast, prefill=1, decode=1, config=config, scheduler=short)
    requests = load(cluster, 400, 40.0)
    cluster.run()
    refused = [request for request in requests if request.is_rejected]
    assert {request.error for request in refused} == {"overloaded"}
    admitted = sorted(request.ttft_s for request in requests if request.is_whole)
    assert len(refused) > 100 and len(admitted) + len(refused) == 400
    assert admitted[-1] < 8.0
