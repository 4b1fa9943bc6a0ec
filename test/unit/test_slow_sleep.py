"""Waking on a slow machine, in virtual time: who reads its weights for long is not taken for dead."""

from __future__ import annotations

from test_simulated_cluster import PROFILE

from chitu.config.schema import RouterConfig
from chitu.simulation.cluster import SimulatedCluster
from chitu.simulation.instance import SimulatedInstance, TimedLoader

READ_S = 100.0


def loader_of(instance: SimulatedInstance) -> TimedLoader:
    loader = instance.core.engine.weights
    assert isinstance(loader, TimedLoader)
    return loader


def test_waking_for_a_hundred_seconds_is_no_death_and_the_request_that_woke_them_is_answered() -> None:
    config = RouterConfig()
    lease_s = config.pd_disaggregation.deadlines.lease_s
    assert 10 * lease_s < READ_S
    cluster = SimulatedCluster(PROFILE, 1, 2, config=config, routers=2)
    first = cluster.submit(0.0, 40, 8)
    cluster.run()
    assert first.is_whole
    incarnations = {each.name: each.info.incarnation for each in cluster.members}
    for each in cluster.members:
        loader_of(each).read_s = READ_S
    cluster.first_router.sleep(2)
    cluster.run(cluster.clock.now_s + 3 * lease_s)
    assert {each.core.weights.serves.sleep for each in cluster.members} == {2}
    began_s = cluster.clock.now_s
    late = cluster.submit(began_s, 40, 8, router=1)
    cluster.run()
    assert late.is_whole and cluster.clock.now_s - began_s > READ_S, (late.error, cluster.clock.now_s - began_s)
    assert {each.name: each.info.incarnation for each in cluster.members} == incarnations
    assert not any(cluster.first_router.coordination.metrics().expired_leases.values())
    assert {each.core.weights.serves.sleep for each in cluster.members} == {0}
