"""The cost of each way to serve a request, and the way that is chosen."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from router_world import LAYOUT, RecordingOutbox
from support.clock import FakeClock

from chitu.config.schema import RouterConfig, SLOConfig
from chitu.protocol import ClusterView, InstanceInfo, LoadReport, PathLoad, StepRates, pack_i32
from chitu.router.admission import Admission
from chitu.router.candidates import InstanceKey, Way, instance_key
from chitu.router.costs import SLO
from chitu.router.members import Members
from chitu.router.prefix_history import BLOCK_TOKENS
from chitu.router.ways import Selector
from chitu.types import Role

RATES = StepRates(
    decode_step_s=0.01, row_s=0.001, prompt_token_s=1e-4, chunk_tokens=512, decode_steps=9, prompt_steps=9
)


def info(role: Role, rank: int, **fields: Any) -> InstanceInfo:
    computes = fields.pop("computes", role is not Role.DECODE)
    host = fields.pop("host", "10.0.0.1")
    return InstanceInfo(role, rank, 1, host, 1, 2, LAYOUT, 100_000, computes=computes, **fields)


class Fleet:
    """A router's selector and admission over instances that report when the test says so."""

    def __init__(self, *instances: InstanceInfo, **config: Any) -> None:
        self.clock = FakeClock()
        self.config = RouterConfig(**config)
        self.members = Members(self.config, RecordingOutbox())
        for instance in instances:
            self.members.add(instance)
        self.members.on_view(ClusterView(1, 1, instances))
        self.selector = Selector(self.config, self.members, self.clock)
        self.admission = Admission(self.config, self.members, self.clock)

    def report(self, name: str, rates: StepRates = RATES, **fields: Any) -> None:
        self.members.on_report(self[name], LoadReport(rates=rates, **fields), self.clock.monotonic())

    def __getitem__(self, name: str) -> Any:
        role = {"P": Role.PREFILL, "D": Role.DECODE, "U": Role.UNIFIED}[name[0]]
        return self.members[InstanceKey(role, int(name[1:]), 1)]

    def pick(self, num_tokens: int = 100, seed: int = 0, **options: Any) -> str:
        return self.name(self.selector.select(prompt(num_tokens, seed), **options))

    @staticmethod
    def name(target: Way) -> str:
        return "-".join(one.name for one in (target.prefill, target.decode) if one is not None)


def prompt(num_tokens: int, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    return pack_i32([rng.randrange(100) for _ in range(num_tokens)])


def pair_and_unified(**config: Any) -> Fleet:
    fleet = Fleet(info(Role.PREFILL, 0), info(Role.DECODE, 0), info(Role.UNIFIED, 0), **config)
    for name in ("P0", "D0", "U0"):
        fleet.report(name)
    return fleet


def test_pairs_and_unified_instances_share_the_load() -> None:
    fleet = pair_and_unified()
    for name, busy in (("P0", "U0"), ("U0", "P0-D0")):
        fleet.report(name, waiting_tokens=20_000)
        assert fleet.pick(1000) == busy
        fleet.report(name)
    fleet.report("U0", running=20)  # each of its streams would wait for the prompt
    assert fleet.pick(1000) == "P0-D0"
    fleet.report("P0", waiting_tokens=60_000)
    assert fleet.pick(1000) == "U0", "the queue of P is longer than what all of these wait"


def test_without_another_way_and_without_an_slo_the_policies_decide_alone() -> None:
    fleet = Fleet(
        *(info(role, rank) for role in (Role.PREFILL, Role.DECODE) for rank in range(2)), policy="round_robin"
    )
    fleet.report("P0", waiting_tokens=1 << 20)
    assert sorted(fleet.pick(100, seed) for seed in range(4)) == ["P0-D0", "P0-D1", "P1-D0", "P1-D1"]


@pytest.mark.parametrize("policy", ["round_robin", "prefix_affinity"])
def test_who_would_be_refused_where_a_policy_sends_it_goes_to_the_least_loaded_one(policy: str) -> None:
    fleet = Fleet(info(Role.PREFILL, 0), info(Role.PREFILL, 1), info(Role.DECODE, 0), policy=policy)
    owner = fleet.pick(8 * BLOCK_TOKENS)[:2]
    other = "P1" if owner == "P0" else "P0"
    for name, queue in ((owner, 10_000), (other, 9_000)):  # 1000 tokens a second: 10 s and 9 s of 20 s
        fleet.report(name)
        fleet.report(name, waiting_tokens=queue, backlog_s=1.0, backlog_work=1000)
    picked = [fleet.pick(8 * BLOCK_TOKENS)[:2] for _ in range(4)]
    assert picked == ([owner] * 4 if policy == "prefix_affinity" else [other, owner] * 2), "as the policy says"
    fleet.report(owner, waiting_tokens=21_000, backlog_s=1.0, backlog_work=1000)
    assert [fleet.pick(8 * BLOCK_TOKENS)[:2] for _ in range(4)] == [other] * 4
    fleet.admission.require()


def alone(num_decode: int = 2, **config: Any) -> Fleet:
    slo = config.pop("slo", SLOConfig(tpot_s=0.05))
    instances = [info(Role.PREFILL, 0), *(info(Role.DECODE, rank, computes=True) for rank in range(num_decode))]
    fleet = Fleet(*instances, slo=slo, **config)
    for instance in instances:
        fleet.report(instance.name)
    return fleet


def test_d_computes_what_it_has_most_of_and_not_what_its_streams_would_wait_for() -> None:
    fleet = alone()
    for name in ("D0", "D1"):
        fleet.report(name, running=10)
    first = fleet.selector.select(prompt(4 * BLOCK_TOKENS))
    assert first.prefill is not None, "ten streams would wait for all of it"
    answer = prompt(2 * BLOCK_TOKENS, seed=9)
    decode = instance_key(first.decode)
    fleet.selector.note_answer(prompt(4 * BLOCK_TOKENS) + answer, "", decode)
    turn = prompt(4 * BLOCK_TOKENS) + answer + prompt(30, seed=3)
    second = fleet.selector.select(turn)
    assert second == Way(None, first.decode, 30)
    fleet.report(first.decode.name, running=10, waiting_tokens=100_000)
    assert fleet.selector.select(turn).prefill is not None, "its queue is longer than P's work"
    assert fleet.pick(4 * BLOCK_TOKENS + 30, seed=5).startswith("P0"), "another prompt"
    assert fleet.selector.select(turn, salt="another").prefill is not None
    assert fleet.selector.select(turn, salt=None).prefill is not None


def test_an_idle_cluster_moves_nothing_and_a_d_that_computes_nothing_is_sent_no_whole_request() -> None:
    assert alone().pick(50) in ("D0", "D1")
    fleet = Fleet(info(Role.PREFILL, 0), info(Role.DECODE, 0), slo=SLOConfig(tpot_s=0.05))
    assert {fleet.pick(50, seed) for seed in range(8)} == {"P0-D0"}


def test_the_cheapest_way_that_keeps_the_slo_is_taken() -> None:
    fleet = alone(1, slo=SLOConfig(ttft_s=0.3, tpot_s=0.05))
    fleet.report("D0", running=3)
    assert fleet.pick(1000) == "P0-D0"
    fleet.report("P0", waiting_tokens=2500)  # 0.25 s of queue, and 0.1 s of its own
    assert fleet.pick(1000, 1) == "D0"
    assert fleet.pick(1000, 2, slo=SLO(ttft_s=2.0)) == "P0-D0", "this one may wait"
    fleet.report("D0", running=45)  # 45 streams leave no time for prompts
    assert fleet.pick(1000, 3) == "P0-D0", "nothing keeps it: the cheapest"


def test_a_request_whose_tokens_would_be_too_slow_on_one_d_goes_to_a_unified_instance() -> None:
    fleet = pair_and_unified()
    fleet.report("D0", running=10)
    fleet.report("U0", waiting_tokens=40_000)
    assert fleet.pick(100) == "P0-D0"
    assert fleet.pick(100, slo=SLO(tpot_s=0.015)) == "U0"


def test_the_link_decides_between_equal_instances_as_measured_or_by_host_and_rack() -> None:
    kv = msgspec.structs.replace(LAYOUT, dtype="float32", page_size=1)
    near = [info(Role.DECODE, rank, host=host, rack=rack) for rank, (host, rack) in enumerate([("b", "y"), ("a", "x")])]
    decodes = [msgspec.structs.replace(one, layout=kv) for one in near]
    fleet = Fleet(info(Role.PREFILL, 0, host="a", rack="x"), *decodes, slo=SLOConfig(ttft_s=9.0), policy="round_robin")
    for name in ("P0", "D0", "D1"):
        fleet.report(name)
    assert {fleet.pick(50_000, seed) for seed in range(4)} == {"P0-D1"}, "the D on P's host"
    slow = (PathLoad(1, "shm", 9, 1 << 30, busy_s=900.0), PathLoad(0, "tcp", 9, 1 << 30, busy_s=0.1))
    fleet.report("P0", paths=slow)
    assert "P0-D0" in {fleet.pick(50_000, seed) for seed in range(4)}, "it was measured to be slow"


def test_prompts_that_were_sent_since_the_report_count_and_what_is_done_meanwhile_does_not() -> None:
    fleet = pair_and_unified()
    load = fleet["P0"].load
    fleet.clock.advance(0.4)
    load.on_sent(5000, fleet.clock.monotonic())
    assert load.queued_tokens(fleet.clock.monotonic()) == 5000, "time before it was sent computed none of it"
    fleet.clock.advance(0.2)
    assert load.queued_tokens(fleet.clock.monotonic()) == pytest.approx(3000)


def test_an_instance_without_rates_has_those_of_others_and_failed_ones_are_avoided() -> None:
    fleet = alone(2)
    fleet.report("D1", StepRates())
    assert fleet["D1"].load.rates == fleet["P0"].load.rates
    for avoided, other in (("D0", "D1"), ("D1", "D0")):
        picked = {fleet.pick(50, seed, avoid=frozenset({fleet[avoided].key})) for seed in range(4)}
        assert all(name.endswith(other) for name in picked)
    without_p = Fleet(info(Role.DECODE, 0, computes=True), slo=SLOConfig(tpot_s=0.05))
    assert without_p.pick() == "D0" and not without_p.members.why_unusable()


def test_a_request_is_refused_only_if_it_would_wait_too_long_in_every_way() -> None:
    fleet = pair_and_unified()
    for at in range(1, 4):
        fleet.clock.advance(1.0)
        fleet.report("P0", waiting_tokens=90_000, backlog_s=float(at), backlog_work=1000 * at)
        fleet.report("U0")
    assert fleet.admission.predicted_waits_s() == (0.0, 0.0)
    for at in range(1, 4):
        fleet.clock.advance(1.0)
        fleet.report("P0", waiting_tokens=90_000, backlog_s=3.0 + at, backlog_work=3000 + 1000 * at)
        fleet.report("U0", waiting_tokens=50_000, backlog_s=float(at), backlog_work=1000 * at)
    assert fleet.admission.predicted_waits_s()[0] == pytest.approx(50.0, rel=0.01)
