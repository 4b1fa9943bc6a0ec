"""The balancer's shell: what the router knows becomes decisions, orders, wishes, and what is shown of them."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router_world import World

from chitu.cluster.balancing import Balancing
from chitu.config.schema import DeadlineConfig, RouterConfig, SLOConfig
from chitu.errors import RoleRefused
from chitu.pd_coordination import PDCoordination
from chitu.protocol import PROTOCOL_VERSION, Heartbeat, InstanceInfo, Join, LoadReport, StepRates
from chitu.router.balance import _Steps, observe
from chitu.types import Role

P, D = Role.PREFILL, Role.DECODE
RATES = StepRates(decode_step_s=0.01, row_s=0.001, prompt_token_s=0.001, decode_steps=9, prompt_steps=9)
"""1000 prompt tokens a second; 4 requests take 14 ms."""
SLO = SLOConfig(ttft_s=2.0, tpot_s=0.05)


class Cluster:
    """1P3D with a router and its membership. P computes 1000 prompt tokens a second, each D makes 160 tokens."""

    def __init__(self, balance: str, command: str = "", refuses: bool = False) -> None:
        self.world = World(P, D, D, D)
        self.clock, self.refuses = self.world.clock, refuses
        core = self.core = PDCoordination(self.clock, DeadlineConfig(lease_s=1e9), 7, self, ())
        self.infos = [msgspec.structs.replace(i, roles=(P, D), num_slots=40) for i in self.world.instances]
        for info in self.infos:
            core.on_message(Join(PROTOCOL_VERSION, info))
        self.orders: list[tuple[str, Role]] = []
        config = msgspec.convert({"balance": balance, "balance_command": command}, RouterConfig)
        config = msgspec.structs.replace(config, slo=SLO)
        self.balancing = Balancing(config, self.world.router, core, self.change_role, self.clock)
        self.loads = {
            info.name: LoadReport(running=4, rates=RATES, pages_total=4000, pages_used=rank)
            for rank, info in enumerate(self.infos)
        }

    def on_joined(self, instance: InstanceInfo) -> None: ...
    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None: ...
    def on_change(self) -> None:
        self.core.next_change()

    async def change_role(self, name: str, role: Role) -> None:
        if self.refuses:
            raise RoleRefused(f"{name} cannot")
        self.orders.append((name, role))
        info = next(info for info in self.infos if info.name == name)
        self.core.change_role(info.role, info.engine_rank, role)

    async def run(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.clock.advance(0.5)
            for info in self.infos:
                load = self.loads[info.name]
                is_prefill = info.role is P
                self.loads[info.name] = load = msgspec.structs.replace(
                    load,
                    prompt_tokens=load.prompt_tokens + 500 * is_prefill,
                    tokens=load.tokens + (500 if is_prefill else 80),
                )
                beat = Heartbeat(info.role, info.engine_rank, info.incarnation, load)
                self.core.on_heartbeat(beat)
            self.balancing.tick()
            await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_it_acts_on_the_instance_that_costs_least_and_waits_until_that_has_moved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        cluster = Cluster("act")
        with caplog.at_level(logging.WARNING, "chitu.cluster.balancing"):
            await cluster.run(30.0)
        assert cluster.orders == [("D0", P)]
        shown = cluster.balancing.metrics()
        assert shown.role_changes == {"prefill": 1}
        assert shown.pressure == {"prefill": pytest.approx(1.25), "decode": pytest.approx(0.056 / 0.9)}
        assert shown.advice.startswith("Balancer (act): ") and shown.advice.endswith(
            "; not now: D0 leaves, or changes its role"
        )
        assert "D0 becomes P: 1 P are at 125% of their aim, 3 D at 6%" in caplog.text

    run(scenario())


def test_one_that_advises_says_it_once_in_the_log_and_orders_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = Cluster("advise")
        with caplog.at_level(logging.WARNING, "chitu.cluster.balancing"):
            await cluster.run(30.0)
        assert not cluster.orders and caplog.text.count("Balancer (advise): D0 should become P") == 1
        assert cluster.balancing.metrics().wanted == {"prefill": 2, "decode": 3}

    run(scenario())


def test_a_slow_instance_is_said_once_in_the_log_and_shown_as_long_as_it_is_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        cluster = Cluster("advise")
        rates = msgspec.structs.replace(RATES, decode_step_s=0.05, row_s=0.002)
        cluster.loads["D2"] = msgspec.structs.replace(cluster.loads["D2"], rates=rates, pages_used=0)
        with caplog.at_level(logging.WARNING, "chitu.cluster.balancing"):
            await cluster.run(90.0)
        says = (
            "D2 takes 4.1 times as long for a step as others of its role that do no less: compare its host and device"
        )
        assert caplog.text.count(says) == 1
        assert cluster.balancing.metrics().advice.startswith(f"Balancer (advise): {says}. D2 should become P: ")
        cluster.loads["D2"] = msgspec.structs.replace(cluster.loads["D2"], rates=RATES)
        await cluster.run(30.0)
        assert says not in cluster.balancing.metrics().advice

    run(scenario())


def test_nothing_changes_while_the_cluster_is_paused() -> None:
    async def scenario() -> None:
        cluster = Cluster("act")
        cluster.core.weights.pause = "finish"
        cluster.core.publish_weights()
        await cluster.run(30.0)
        assert not cluster.orders and "paused" in cluster.balancing.metrics().advice
        cluster.core.weights.pause = ""
        cluster.core.publish_weights()
        await cluster.run(2.0)
        assert cluster.orders

    run(scenario())


def test_a_refused_change_is_logged_and_tried_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = Cluster("act", refuses=True)
        await cluster.run(50.0)
        assert caplog.text.count("D0 does not become P: D0 cannot") == 1
        await cluster.run(30.0)
        assert caplog.text.count("D0 does not become P: D0 cannot") == 2
        assert cluster.balancing.metrics().role_changes == {}

    run(scenario())


def test_the_command_gets_each_wish_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = f"import sys; open({str(told)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')"

    async def scenario() -> None:
        cluster = Cluster("advise", shlex.join([sys.executable, "-c", program, "two words"]))
        await cluster.run(60.0)
        while not told.exists() or not told.read_text():
            await asyncio.sleep(0.01)
        await cluster.run(60.0)
        await asyncio.gather(*cluster.balancing._telling.values())

    run(scenario())
    assert told.read_text() == "two words prefill 2 1\n"


def test_a_command_that_does_not_start_or_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(command: str) -> None:
        cluster = Cluster("advise", command)
        await cluster.run(30.0)
        await asyncio.gather(*cluster.balancing._telling.values())

    run(scenario("/nowhere/scale"))
    assert "/nowhere/scale does not start" in caplog.text
    run(scenario("false"))
    assert "false prefill 2 1 ended with code 1" in caplog.text


def test_a_d_is_measured_by_what_it_can_do_within_the_slo() -> None:
    info = msgspec.structs.replace(Cluster("advise").infos[1], num_slots=4)  # pages of 16 tokens
    rates = msgspec.structs.replace(RATES, context_token_s=1e-5)
    load = LoadReport(
        rates=rates,
        running=3,
        computing=1,
        transferring=1,
        pages_total=20,
        pages_used=4,
        pages_cached=10,
        bytes_moved=3,
        bytes_saved=1,
    )
    one = observe(info, load, 10.0, 100.0)
    assert (one.rows, one.step_s) == (2, pytest.approx(0.01 + 2e-3 + 64e-5))
    assert one.pages_share == 0.1  # four requests have a fifth of the pages; two of them decode
    assert one.context_tokens == 64 and one.cost_pages == 4 + 10 / 4 and one.prompt_token_s == pytest.approx(0.001)


def test_the_seconds_of_a_step_are_a_line_through_all_instances() -> None:
    one = observe(Cluster("advise").infos[1], LoadReport(pages_total=800), 10.0, 1.0)._replace(num_slots=100)
    steps = _Steps()
    assert steps.output_token_s([one], 0.05) == 0.0  # nothing was measured
    for rows in (4, 8, 12, 16):
        steps.add([one._replace(rows=rows, step_s=0.01 + 0.001 * rows)], 0.5)
    close = pytest.approx
    assert steps.output_token_s([one], 0.05) == close(0.05 / 40, rel=0.1)  # 40 take 50 ms
    assert steps.output_token_s([one._replace(num_slots=20)], 0.05) == close(0.03 / 20, rel=0.1)
    assert steps.output_token_s([one], None) == close(0.11 / 100, rel=0.1)
    flat = _Steps()
    flat.add([one._replace(rows=10, step_s=0.02)] * 9, 0.5)  # always ten: the slope is unknown
    assert flat.output_token_s([one], 0.05) == close(0.02 / 100)
