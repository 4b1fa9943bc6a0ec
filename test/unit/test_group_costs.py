"""Placement among groups whose members share experts, against brute force: every placement is tried in a model of
steps, and the router's choice must cost hardly more than the best."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from test_costs import RATES, Fleet, info

from chitu.config.schema import SLOConfig
from chitu.protocol import GroupPlace, InstanceInfo, StepRates
from chitu.simulation.profile import EngineProfile, ExchangeCost, StepCost, StepLoad
from chitu.types import Role

PROFILE = EngineProfile(
    StepCost(prompt_token_s=1e-4, decode_s=0.01, sequence_s=0.001),
    dp_size=3,
    experts="spread",
    exchange=ExchangeCost(0.001, 1e-5),
)
ANSWER_TOKENS = 128
TPOT_S = 0.1
CASES = 150


class Case(NamedTuple):
    """What there is when a request comes."""

    sizes: tuple[int, ...]
    """Members of each group of D."""
    rows: tuple[int, ...]
    """Requests that decode on each D, by rank."""
    queue_tokens: int
    """Prompt tokens that wait on P."""
    num_tokens: int
    """Of the prompt."""

    def groups(self) -> list[range]:
        starts = [sum(self.sizes[:place]) for place in range(len(self.sizes))]
        return [range(start, start + size) for start, size in zip(starts, self.sizes, strict=True)]


def rates_of(size: int) -> StepRates:
    """Return what a member of a group of this size has learned of balanced steps."""
    profile, cost = msgspec.structs.replace(PROFILE, dp_size=size), PROFILE.cost
    none, one = profile.even_s(0, 0, 1, 0), profile.even_s(0, 0, 2, 0)
    row_s = (one - none) / size
    return msgspec.structs.replace(
        RATES, decode_step_s=none - row_s * size, row_s=row_s, prompt_token_s=cost.prompt_token_s
    )


def decoding_s(profile: EngineProfile, rows: Sequence[int], chunk: int, at: int) -> float:
    """Return the seconds of a step of a group with so many rows on each member and a chunk on one of them."""
    return profile.seconds([StepLoad(chunk * (place == at), 0, count, 0) for place, count in enumerate(rows)])


def waits_s(case: Case, group: range, at: int, *, is_alone: bool) -> float:
    """Return what all requests together wait until they have 128 more tokens, with the new one on the D `at` of a
    group, which computes the prompt itself or gets it from P."""
    profile = msgspec.structs.replace(PROFILE, dp_size=len(group))
    rows, place, ttft_s = [case.rows[d] for d in group], at - group.start, 0.0
    if is_alone:
        left, most = case.num_tokens, 512
        if sum(rows):
            most = int(rates_of(len(group)).prompt_tokens_within(TPOT_S, sum(rows), 0))
        while left:
            chunk = min(left, most)
            ttft_s, left = ttft_s + decoding_s(profile, rows, chunk, place), left - chunk
        late_s, undisturbed_s = ttft_s, -(-case.num_tokens // most) * decoding_s(profile, rows, 0, place)
        late_s -= undisturbed_s if sum(rows) else 0.0
    else:
        late_s, ttft_s = 0.0, (case.queue_tokens + case.num_tokens) * PROFILE.cost.prompt_token_s
        ttft_s += decoding_s(profile, rows, 0, place) if sum(rows) else 0.0
    before_s = decoding_s(profile, rows, 0, place) if sum(rows) else 0.0
    rows[place] += 1
    step_s = decoding_s(profile, rows, 0, place)
    others = sum(rows) - 1
    return ttft_s + ANSWER_TOKENS * step_s + others * (late_s + ANSWER_TOKENS * (step_s - before_s))


def fleet_of(case: Case, *, knows_groups: bool) -> Fleet:
    """Return a router that knows these loads, and whether the members of a group step together."""
    instances: list[InstanceInfo] = [info(Role.PREFILL, 0)]
    for number, group in enumerate(case.groups(), 1):
        for rank in group:
            place = GroupPlace(number, rank - group.start, len(group), shares_experts=knows_groups)
            instances.append(info(Role.DECODE, rank, computes=True, group=place if len(group) > 1 else None))
    fleet = Fleet(*instances, slo=SLOConfig(tpot_s=TPOT_S))
    fleet.report("P0", waiting_tokens=case.queue_tokens)
    for group in case.groups():
        for rank in group:
            fleet.report(f"D{rank}", rates_of(len(group)), running=case.rows[rank])
    return fleet


def random_case(rng: random.Random) -> Case:
    sizes = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 2])))
    rows = tuple(rng.randint(0, 12) for _ in range(sum(sizes)))
    return Case(sizes, rows, rng.choice([0, 0, 2000, 20_000]), rng.choice([40, 400, 2000]))


def regrets(*, knows_groups: bool) -> list[float]:
    """Return for each case what the router's choice costs, over the least of all placements; ascending."""
    ratios, rng = [], random.Random(4)
    for _ in range(CASES):
        case = random_case(rng)
        costs = {
            f"{'' if is_alone else 'P0-'}D{d}": waits_s(case, group, d, is_alone=is_alone)
            for group in case.groups()
            for d in group
            for is_alone in (False, True)
        }
        chosen = fleet_of(case, knows_groups=knows_groups).pick(case.num_tokens)
        ratios.append(costs[chosen] / min(costs.values()))
    return sorted(ratios)


def test_the_choice_costs_hardly_more_than_the_best_of_all_placements() -> None:
    ratios = regrets(knows_groups=True)
    assert sum(ratios) / CASES < 1.015 and ratios[int(0.95 * CASES)] < 1.08, ratios[-8:]


def test_a_router_that_counts_the_streams_of_one_member_alone_is_found() -> None:
    ratios = regrets(knows_groups=False)
    assert sum(ratios) / CASES > 1.05 and ratios[int(0.95 * CASES)] > 1.3


@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
def test_the_member_with_the_fewest_rows_comes_first_in_a_group(role: Role) -> None:
    places = [GroupPlace(1, rank, 3, shares_experts=True) for rank in range(3)]
    members = [info(role, rank, computes=True, group=place) for rank, place in enumerate(places)]
    fleet = Fleet(*members, slo=SLOConfig(tpot_s=TPOT_S), policy="least_loaded")
    for rank, running in enumerate((6, 2, 9)):
        fleet.report(members[rank].name, running=running)
    assert {fleet.pick(100, seed) for seed in range(6)} == {members[1].name}
    loads = [fleet[member.name].load for member in members]
    assert {load.step_rows for load in loads} == {17} and [load.rows for load in loads] == [6, 2, 9]


def test_instances_that_step_alone_cost_what_they_did() -> None:
    """A group without shared experts, and no group: rows are those of one instance, and nothing more is proposed."""
    for group in (None, True):
        places = [GroupPlace(1, rank, 2) if group else None for rank in range(2)]
        members = [info(Role.DECODE, rank, computes=True, group=place) for rank, place in enumerate(places)]
        fleet = Fleet(*members, slo=SLOConfig(tpot_s=TPOT_S))
        for rank, running in enumerate((6, 2)):
            fleet.report(members[rank].name, running=running)
        assert fleet.pick(100) == "D1"
        loads = [fleet[member.name].load for member in members]
        assert [load.step_rows for load in loads] == [6, 2] == [load.rows for load in loads]
        assert fleet.selector._groups == {}
