"""Groups whose members share experts, in virtual time: their steps, what they cost, and the bound of their chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from chitu.config.schema import RouterConfig, SchedulerConfig, SLOConfig
from chitu.engine.executor import StepSizes
from chitu.simulation.cluster import SimulatedCluster, SimulatedRequest
from chitu.simulation.engine import SimulatedLockstep
from chitu.simulation.profile import EngineProfile, ExchangeCost, StepCost, StepLoad

GROUP = EngineProfile(
    StepCost(prefill_s=0.002, prompt_token_s=1e-4, decode_s=0.01, sequence_s=0.0005, turn_s=0.0005),
    dp_size=2,
    experts="spread",
    expert_share=0.5,
    exchange=ExchangeCost(0.001, 1e-5),
)
TPOT_S = 0.04
SCHEDULER = SchedulerConfig(max_batched_tokens=2048, chunk_size=2048, max_running_requests=32)


def run(cluster: SimulatedCluster, count: int = 20) -> list[SimulatedRequest]:
    requests = [cluster.submit(0.02 * n, 100 + 37 * n, 30) for n in range(count)]
    cluster.run()
    assert all(request.is_whole and request.is_right for request in requests)
    return requests


def test_a_step_takes_what_the_fullest_member_and_the_mean_of_the_experts_say() -> None:
    alone = msgspec.structs.replace(GROUP, dp_size=1)
    load = StepLoad(100, 5050, 0, 0), StepLoad(0, 0, 4, 400)
    assert alone.seconds([load[0]]) == alone.cost.seconds(*load[0])
    own, mean = alone.cost.seconds(*load[0]), alone.cost.seconds(50, 2525, 2, 200)
    assert GROUP.seconds(load) == pytest.approx(0.5 * own + 0.5 * mean + 0.001 + 100 * 1e-5)
    assert GROUP.seconds([load[1], load[1]]) > GROUP.seconds([load[1]]), "one member computes its share for the other"
    apart = msgspec.structs.replace(GROUP, experts="cut")
    assert apart.seconds([load[1]]) == GROUP.cost.seconds(*load[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_members_step_together_and_every_answer_is_whole(overlap: bool) -> None:
    profile = msgspec.structs.replace(GROUP, overlap=overlap)
    for counts in ({"unified": 1}, {"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1}):
        cluster = SimulatedCluster(profile, **counts, scheduler=SCHEDULER)
        requests = run(cluster)
        assert {one.name for one in cluster.members} == {
            f"{role[0].upper()}{rank}" for role, count in counts.items() for rank in range(2 * count)
        }
        used = {name for request in requests for name in request.pair.split("-")}
        assert used == {one.name for one in cluster.members}
        for one in cluster.members:
            assert one.group is not None and one.executor.steps <= one.group.num_turns
            assert one.scheduler.load.steps <= one.executor.steps, "a lent step was counted"
        assert run(SimulatedCluster(profile, **counts, scheduler=SCHEDULER))[-1].end_s == requests[-1].end_s


def test_members_without_shared_experts_do_not_wait_for_each_other() -> None:
    apart = msgspec.structs.replace(GROUP, experts="cut")
    cluster = SimulatedCluster(apart, unified=1, scheduler=SCHEDULER)
    cluster.submit(0.0, 2000, 1)
    short = cluster.submit(0.0, 10, 1)
    cluster.run()
    assert short.ttft_s < 0.02
    group = SimulatedCluster(GROUP, unified=1, scheduler=SCHEDULER)
    group.submit(0.0, 2000, 1)
    short = group.submit(0.0, 10, 1)
    group.run()
    assert short.ttft_s > 0.1


def test_a_member_takes_its_group_along() -> None:
    cluster = SimulatedCluster(GROUP, unified=2, scheduler=SCHEDULER)
    requests = [cluster.submit(0.01 * n, 200, 60) for n in range(8)]
    cluster.at(0.3, cluster.kill, "U1")
    cluster.run()
    assert [one.name for one in cluster.members] == ["U2", "U3"]
    assert all(request.is_whole and request.is_right for request in requests)


class Deaf(SimulatedLockstep):
    """Planted: a member that knows nothing of the others."""

    @property
    def others(self) -> Sequence[StepSizes]:
        return ()

    @others.setter
    def others(self, sizes: Sequence[StepSizes]) -> None: ...


def token_s_beside_prompts(*, is_deaf: bool) -> float:
    """Let one member decode, and a long prompt come to the other one. Return the mean time of a token."""
    config = RouterConfig(slo=SLOConfig(tpot_s=TPOT_S), policy="least_loaded")
    cluster = SimulatedCluster(GROUP, unified=1, config=config, scheduler=SCHEDULER)
    for member in cluster.members:
        if is_deaf:
            member.executor.lockstep.__class__ = Deaf
    for n in range(40):
        cluster.submit(0.15 * n, 100 + 190 * (n % 10), 40)
    cluster.run()
    stream = cluster.submit(9.0, 20, 15)
    prompt = cluster.submit(9.02, 40_000, 1)
    cluster.run()
    assert stream.is_whole and prompt.is_whole and stream.pair != prompt.pair
    return stream.tpot_s


def test_the_streams_of_one_member_wait_no_longer_than_the_slo_for_prompts_of_another() -> None:
    assert 0.5 * TPOT_S < token_s_beside_prompts(is_deaf=False) < TPOT_S
    assert token_s_beside_prompts(is_deaf=True) > 1.5 * TPOT_S, "a chunk that is bounded beside its own streams alone"
