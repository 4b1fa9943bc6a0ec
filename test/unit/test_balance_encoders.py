"""What the balancer makes of E: a demand, a wish and a recommendation, and never an order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_balance import Fleet
from test_balancing import RATES, Cluster, run
from test_encode_role import encoder

from chitu.protocol import PROTOCOL_VERSION, ImageLoad, Join, LoadReport
from chitu.router.balance import KEPT_S, Balancer, Observed, observe, slow_ones
from chitu.types import Role

P, D, E = Role.PREFILL, Role.DECODE, Role.ENCODE
ROW_S = 1e-3


class Observer:
    """Instances that do a share of what they can, as their reports show it."""

    def __init__(self, prefill: int, encode: int, acts: bool = True) -> None:
        self.counts = {P: prefill, D: 1, E: encode}
        self.balancer = Balancer(2.0, acts=acts)
        self.now_s = 0.0
        self.done = dict.fromkeys(self.counts, 0.0)

    def run(self, seconds: float, of_p: float, of_e: float, **fields: Any) -> list[Any]:
        """Let time pass in which P and E do these shares. Return the orders."""
        orders = []
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            self.done[P] += 0.5 * of_p
            self.done[E] += 0.5 * of_e
            order = self.balancer.tick(self.now_s, Fleet(self._instances(**fields), 0, int(2 * self.now_s), {}))
            orders += [order] if order else []
        return orders

    def _instances(self, **fields: Any) -> list[Observed]:
        found = []
        for role, count in self.counts.items():
            busy_s = self.done[role]
            load = LoadReport(
                prompt_tokens=int(busy_s / RATES.prompt_token_s) if role is P else 0,
                tokens=int(busy_s / ROW_S),
                backlog_s=busy_s if role is E else 0.0,
                image_load=ImageLoad(row_s=ROW_S if role is E else 0.0),
                rates=RATES,
                pages_total=100,
            )
            for rank in range(count):
                info = msgspec.structs.replace(
                    encoder(rank, 10 * rank + (P, D, E).index(role) + 1), role=role, **fields
                )
                found.append(observe(info, load, 100.0, 1000.0))
        return found


def test_the_work_of_e_is_a_demand_and_a_wish() -> None:
    seen = Observer(2, 2)
    seen.run(60, 0.1, 0.6)
    balancer = seen.balancer
    assert balancer.demand[E] == pytest.approx(1.2, rel=0.05) and balancer.pressure[E] == pytest.approx(0.75, rel=0.05)
    assert balancer.wanted[E] == 2 and not balancer.encoders


def test_too_few_e_are_recommended_more_and_nobody_is_ordered_to_become_one() -> None:
    seen = Observer(1, 2)
    assert not seen.run(120, 0.1, 1.0)
    assert seen.balancer.wanted[E] == 3
    text = seen.balancer.encoders
    assert text == "2 E are at 125% of the aim: 3 are wanted; `chitu join encode` adds one"
    spare = Observer(3, 2)
    assert not spare.run(120, 0.1, 1.0)
    assert spare.balancer.encoders == text + ", in the place of a P, which the others can do without"
    assert spare.balancer.advice is None
    busy = Observer(3, 2)
    busy.run(120, 0.6, 1.0)
    assert "in the place" not in busy.balancer.encoders, "two P would have too much to do"


def test_e_that_are_not_needed_give_their_place_to_a_p_that_is() -> None:
    seen = Observer(1, 2)
    assert not seen.run(60, 1.0, 0.1)
    assert not seen.balancer.encoders, "the wish for E stays for a while"
    assert not seen.run(KEPT_S + 30, 1.0, 0.1)
    assert seen.balancer.wanted[E] == 1
    assert seen.balancer.encoders.endswith("`chitu drain` one E, and `chitu join prefill` in its place")
    idle = Observer(1, 2)
    idle.run(KEPT_S + 60, 0.1, 0.1)
    assert not idle.balancer.encoders, "nobody needs the place"


def test_e_neither_hold_up_a_change_of_others_nor_count_as_their_prompts_nor_as_slow_ones() -> None:
    seen, other = Observer(2, 2), Observer(2, 0)
    seen.run(60, 0.3, 0.9, draining=False)
    other.run(60, 0.3, 0.0)
    assert seen.balancer.pressure[P] == other.balancer.pressure[P] and seen.balancer.aim(P, 2) == other.balancer.aim(
        P, 2
    )
    assert seen.balancer.aim(P, 2) == pytest.approx(0.78, abs=0.01), "a prompt takes 0.3 s"
    leaving = [
        one._replace(is_leaving=one.role is E, age_s=0.0 if one.role is E else 99.0) for one in seen._instances()
    ]
    assert not seen.balancer._why_not(1e9, Fleet(leaving, 0, 0, {}))
    fast, slow = (one for one in seen._instances() if one.role is E)
    assert not slow_ones([fast, slow._replace(prompt_token_s=10.0)])


def test_the_router_shows_the_recommendation_and_the_wish_and_tells_them_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = Cluster("act")
        e = encoder()
        cluster.core.on_message(Join(PROTOCOL_VERSION, e))
        cluster.infos.append(e)
        cluster.loads["E0"] = LoadReport(image_rows=64, image_load=ImageLoad(row_s=ROW_S))
        cluster.loads |= {name: msgspec.structs.replace(load, running=0) for name, load in cluster.loads.items()}
        for _ in range(80):
            load = cluster.loads["E0"]
            cluster.loads["E0"] = msgspec.structs.replace(
                load, backlog_s=load.backlog_s + 0.5, tokens=load.tokens + 420
            )
            await cluster.run(0.5)
        metrics = cluster.balancing.metrics()
        assert metrics.wanted["encode"] == 2 and metrics.pressure["encode"] > 1.0
        assert "1 E is at 125% of the aim: 2 are wanted" in metrics.advice
        assert all(role is not E and name[0] != "E" for name, role in cluster.orders)
        assert len([record for record in caplog.records if "E is at" in record.getMessage()]) == 1

    run(scenario())
