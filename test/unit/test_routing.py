"""Policies are pure: they spread evenly, reach every pair, skip what drains, and see load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import ConfigError, NoInstance
from chitu.messages import ClusterView, InstanceInfo, KVLayout, LoadReport
from chitu.routing import Candidates, InstanceLoad, RoutingRequest, instance_key, make_policy
from chitu.types import Role


def info(role: Role, rank: int, draining: bool = False) -> InstanceInfo:
    layout = KVLayout("hash", 2, 2, 16, 16, "float32", 100)
    return InstanceInfo(role, rank, 1, "127.0.0.1", 1, 2, layout, 512, draining=draining)


def cluster(prefill: int, decode: int, unified: int = 0) -> Candidates:
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.UNIFIED, unified))
    return Candidates.of(ClusterView(1, 1, tuple(info(role, k) for role, count in counts for k in range(count))))


@given(st.integers(1, 5), st.integers(1, 5))
def test_round_robin_reaches_every_pair_equally(prefill: int, decode: int) -> None:
    policy, candidates = make_policy("round_robin"), cluster(prefill, decode)
    pairs: Counter[tuple[int, int]] = Counter()
    for n in range(3 * prefill * decode):
        target = policy(RoutingRequest(n, 10), candidates, {})
        assert target.prefill is not None
        pairs[(target.prefill.engine_rank, target.decode.engine_rank)] += 1
    assert set(pairs.values()) == {3} and len(pairs) == prefill * decode


@pytest.mark.parametrize("name", ["round_robin", "least_loaded"])
def test_pairs_come_before_unified_and_draining_ones_are_skipped(name: str) -> None:
    policy = make_policy(name)
    assert policy(RoutingRequest(0, 1), cluster(1, 1, 1), {}).prefill is not None
    alone = policy(RoutingRequest(3, 1), cluster(1, 0, 2), {})
    assert alone.prefill is None and alone.decode.role is Role.UNIFIED
    view = ClusterView(1, 1, (info(Role.PREFILL, 0, True), info(Role.PREFILL, 1), info(Role.DECODE, 0)))
    for n in range(4):
        target = policy(RoutingRequest(n, 1), Candidates.of(view), {})
        assert target.prefill is not None and target.prefill.engine_rank == 1
    with pytest.raises(NoInstance, match="no decode"):
        policy(RoutingRequest(0, 1), cluster(1, 0), {})


def test_least_loaded_sees_its_own_counts_and_the_reports() -> None:
    policy, candidates = make_policy("least_loaded"), cluster(2, 2)
    loads = {instance_key(i): InstanceLoad() for i in candidates.prefill + candidates.decode}
    loads[instance_key(candidates.prefill[0])].prompt_tokens = 500
    loads[instance_key(candidates.decode[1])].report = LoadReport(running=9)
    for n in range(4):
        target = policy(RoutingRequest(n, 1), candidates, loads)
        assert target.prefill is candidates.prefill[1] and target.decode is candidates.decode[0]
    idle = {policy(RoutingRequest(n, 1), candidates, {}).decode.engine_rank for n in range(2)}
    assert idle == {0, 1}


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'fastest'"):
        make_policy("fastest")
