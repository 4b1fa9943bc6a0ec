"""A fleet in virtual time: faults of the network, deaths, operators at one or two routers, slow machines and links.

All parts are the real ones (`chitu/simulation`). A storm is a list of `Blow`; the same list gives the same run, so
hypothesis shrinks it and prints it. The tests of `test/integration` with these subjects show that real processes over
real sockets do the same.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from draws import often
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from chitu.config.schema import (
    AdmissionConfig,
    DeadlineConfig,
    PDDisaggregationConfig,
    RouterConfig,
    SchedulerConfig,
    SLOConfig,
)
from chitu.errors import ChituError, LastInstance, RoleRefused
from chitu.simulation.cluster import SimulatedCluster, SimulatedRequest
from chitu.simulation.instance import SimulatedInstance
from chitu.simulation.profile import EngineProfile, LinkCost, StepCost
from chitu.simulation.router import SimulatedRouter
from chitu.types import Role

COST = StepCost(prefill_s=0.004, prompt_token_s=0.0002, decode_s=0.008, sequence_s=0.0002)
PROFILE = EngineProfile(COST, LinkCost(bytes_per_s=1e8, message_s=0.001), num_pages=400, kv_bytes_per_token=2000)
DEADLINES = DeadlineConfig(
    bootstrap_s=2.0,
    queue_s=10.0,
    transfer_s=3.0,
    retry_interval_s=0.2,
    lease_s=2.0,
    router_s=4.0,
    heartbeat_interval_s=0.3,
    role_change_s=1.0,
)
LEASE_S, BEAT_S = DEADLINES.lease_s, DEADLINES.heartbeat_interval_s
NUM_STORMS = 4
"""A second each on an idle machine, as those of `MILD` and `SEVERE` take."""
TIMEOUT_S = 40.0
"""A client's patience, by which every request is over."""
SCHEDULER = SchedulerConfig(max_running_requests=16, max_batched_tokens=256, chunk_size=128)


def config(**more: object) -> RouterConfig:
    pd = PDDisaggregationConfig(deadlines=DEADLINES)
    return RouterConfig(request_timeout_s=TIMEOUT_S, pd_disaggregation=pd, **more)  # type: ignore[arg-type]


def fleet(prefill: int = 2, decode: int = 2, routers: int = 1, **more: object) -> SimulatedCluster:
    return SimulatedCluster(
        PROFILE, prefill, decode, config=config(**more), scheduler=SCHEDULER, routers=routers, tick_s=0.05
    )


def load(cluster: SimulatedCluster, seconds: float, rate: float = 20.0, seed: int = 1) -> list[SimulatedRequest]:
    """Let requests arrive at all routers in turn, from now on."""
    rng, at_s, requests = random.Random(seed), cluster.clock.now_s, list[SimulatedRequest]()
    end_s = at_s + seconds
    while (at_s := at_s + rng.expovariate(rate)) < end_s:
        router = len(requests) % cluster.num_routers
        requests.append(cluster.submit(at_s, rng.randint(1, 300), rng.randint(1, 60), router))
    return requests


def check_served(requests: list[SimulatedRequest]) -> None:
    assert requests
    ends = {request.error for request in requests}
    assert ends == {""}, ends
    for request in requests:
        assert request.is_whole and request.is_right and request.num_tokens == request.max_tokens, request


def settle(cluster: SimulatedCluster, seconds: float = 8.0) -> None:
    """End all faults, let everything that is under way end, and check that nothing is kept and all serve."""
    cluster.network.heal()
    for end in (*cluster.processes, *filter(None, cluster.routers)):
        if end.is_frozen:
            cluster.thaw(end)
    for process in cluster.processes:
        process.is_slow = process.is_deaf = False
        process.speed = 1.0
        process.wake()
    cluster.run(cluster.clock.now_s + seconds)
    for process in cluster.processes:
        assert process.scheduler.is_idle, (process.name, process.core.sequences.open)
        process.cache.check_idle()
        assert process.rows.num_free == process.rows.num_slots, process.name
        assert process.contacts.joined_routers == tuple(r.index for r in cluster.routers if r), process.name


def serves(cluster: SimulatedCluster) -> None:
    requests = load(cluster, 1.0, seed=99)
    cluster.run()
    check_served(requests)
    settle(cluster)


def attempts(requests: list[SimulatedRequest]) -> int:
    return max(request.num_attempts for request in requests)


# --------------------------------------------------------------------------------------------------- broken connections


@pytest.mark.parametrize("name", ["D0", "P0"])
def test_what_a_broken_connection_loses_comes_again_within_two_heartbeats_and_costs_no_attempt(name: str) -> None:
    cluster = fleet()
    requests = load(cluster, 6.0)
    quiet = max_ttft(fleet())
    for at_s in (1.0, 2.5, 4.0):
        cluster.at(at_s, lambda: setattr(wire(cluster, cluster.first_router, name), "num_to_lose", 3))
    cluster.run()
    check_served(requests)
    assert cluster.network.num_lost == 9 and attempts(requests) == 1
    assert max(request.ttft_s for request in requests) <= quiet + 2 * BEAT_S + 0.1
    settle(cluster)


def max_ttft(cluster: SimulatedCluster) -> float:
    requests = load(cluster, 6.0)
    cluster.run()
    return max(request.ttft_s for request in requests)


def wire(cluster: SimulatedCluster, router: SimulatedRouter, name: str) -> object:
    return cluster.network.wire(router, cluster.find(name))


@pytest.mark.parametrize("name", ["D0", "P0"])
def test_where_the_connection_stays_away_requests_go_elsewhere_after_a_lease(name: str) -> None:
    cluster = fleet()
    requests = load(cluster, 8.0)
    process = cluster.find(name)
    cluster.at(1.0, lambda: setattr(wire(cluster, cluster.first_router, name), "num_to_lose", math.inf))
    cluster.run()
    check_served(requests)
    assert 2 <= attempts(requests) <= 3
    assert max(request.ttft_s for request in requests) < LEASE_S + 4 * BEAT_S + 1.0
    assert process.core.tokens is not None
    settle(cluster)
    serves(cluster)


def test_tokens_that_never_come_through_are_computed_elsewhere() -> None:
    cluster = fleet()
    requests = load(cluster, 6.0)
    long = [cluster.submit(0.5, 50, 200) for _ in range(4)]
    cluster.at(1.0, lambda: setattr(cluster.network.wire(cluster.find("D0"), cluster.first_router), "num_to_lose", 1e9))
    cluster.run()
    check_served(requests + long)
    assert attempts(long) >= 2
    settle(cluster)


@pytest.mark.parametrize(("name", "seconds"), [("D0", 0.5), ("D0", 0.9 * LEASE_S - BEAT_S), ("P0", 0.5)])
def test_an_instance_that_stands_still_for_less_than_a_lease_costs_no_attempt(name: str, seconds: float) -> None:
    cluster = fleet()
    requests = load(cluster, 5.0)
    cluster.at(1.0, cluster.freeze, cluster.find(name))
    cluster.at(1.0 + seconds, cluster.thaw, cluster.find(name))
    cluster.run()
    check_served(requests)
    assert attempts(requests) == 1
    settle(cluster)


def test_a_pair_that_does_not_hear_each_other_is_left_out_and_the_others_serve_on() -> None:
    cluster = fleet()
    early = load(cluster, 4.0)
    cluster.at(1.0, lambda: cluster.network.cut(cluster.find("P0"), cluster.find("D0")))
    cluster.run()
    cluster.run(8.0)
    late = load(cluster, 4.0, seed=2)
    cluster.run()
    check_served(early + late)
    assert attempts(late) == 1 and "P0-D0" not in {request.pair for request in late}
    assert {"P0-D1", "P1-D0"} <= {request.pair for request in late}
    settle(cluster)


@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0, 120.0])
def test_after_any_silence_of_the_network_between_all_ends_everything_is_as_before(seconds: float) -> None:
    cluster = fleet()
    before = load(cluster, 2.0)
    ends = [*cluster.processes, cluster.first_router]

    def fall_silent() -> None:
        for at, one in enumerate(ends):
            for other in ends[:at]:
                cluster.network.cut(one, other)

    cluster.at(1.0, fall_silent)
    cluster.at(1.0 + seconds, cluster.network.heal)
    cluster.run(1.0 + seconds + 8.0)
    assert not cluster.open or seconds < TIMEOUT_S
    cluster.run()
    assert {request.error for request in before} <= {"", "request_timeout", "no_instance", "decode_lost"}
    settle(cluster)
    serves(cluster)


# ------------------------------------------------------------------------------------------------------------ slowness


def test_pairs_whose_links_are_slow_and_then_dead_are_suspended_and_serve_again_when_they_are_sound() -> None:
    cluster = fleet(1, 2)
    requests = load(cluster, 12.0, rate=10.0)
    p, d = cluster.find("P0"), cluster.find("D0")
    cluster.at(1.0, lambda: setattr(cluster.network.wire(p, d), "rate", 1e-5))
    cluster.at(6.0, lambda: setattr(cluster.network.wire(p, d), "rate", 1.0))
    cluster.run()
    check_served(requests)
    assert attempts(requests) >= 2, "some writes were too slow"
    settle(cluster, 60.0)
    assert p.side.suspended_ranks == ()
    late = load(cluster, 3.0, seed=3)
    cluster.run()
    check_served(late)
    assert "P0-D0" in {request.pair for request in late}


@pytest.mark.parametrize("speed", [0.1, 0.02])
def test_machines_ten_and_fifty_times_slower_serve_all_that_they_have_time_for(speed: float) -> None:
    """No deadline takes slowness for silence: a prompt computes for longer than `transfer_s`."""
    cluster = fleet()
    for process in cluster.processes:
        process.speed = speed
    requests = [cluster.submit(at_s / 2, 300 + at_s, 4) for at_s in range(4)]
    long = cluster.submit(0.0, 3000, 4)
    cluster.run()
    if speed == 0.02:
        assert long.ttft_s > 3 * DEADLINES.transfer_s
    check_served([*requests, long])
    assert attempts([*requests, long]) == 1
    settle(cluster)


def test_a_flood_is_rejected_at_once_and_what_is_admitted_waits_no_longer_than_twice_the_bound() -> None:
    cluster = fleet(1, 1, admission=AdmissionConfig(max_queue_s=1.0), slo=SLOConfig())
    requests = load(cluster, 8.0, rate=400.0)
    cluster.run()
    refused = [request for request in requests if request.is_rejected]
    assert {request.error for request in refused} == {"overloaded"} and len(refused) > len(requests) / 2
    assert all(request.end_s == request.at_s for request in refused)
    admitted = [request for request in requests if not request.is_rejected]
    check_served(admitted)
    late = sorted(request.ttft_s for request in admitted if request.at_s > 3.0)
    assert late[len(late) // 2] < 2.0
    settle(cluster)


# ------------------------------------------------------------------------------------------ operators at two routers


def test_of_two_changes_of_role_at_two_routers_at_once_one_leaves_the_last_p() -> None:
    cluster = fleet(2, 1, routers=2)
    requests = load(cluster, 4.0)
    refused: list[LastInstance] = []

    def order(name: str, asked: int) -> None:
        try:
            cluster.change_role(name, Role.DECODE, asked)
        except LastInstance as error:
            refused.append(error)

    cluster.at(1.0, order, "P0", 0)
    cluster.at(1.0, order, "P1", 1)
    cluster.run()
    cluster.run(8.0)
    check_served(requests)
    assert len(refused) == 1 and [process.name for process in cluster.members] == ["P1", "D0", "D1"]
    settle(cluster)
    serves(cluster)


def test_new_requests_at_one_router_wait_for_a_change_of_weights_at_the_other() -> None:
    cluster = fleet(routers=2)
    early = load(cluster, 4.0, rate=60.0)  # there is always one at the other router
    one, other = cluster.routers
    assert one is not None and other is not None
    cluster.at(1.0, lambda: one.change_weights("next"))
    cluster.run(3.0)
    assert {process.scheduler.weights.serves.path for process in cluster.processes} == {"next"}, "under load"
    cluster.run()
    check_served(early)
    assert other.coordination.weights.serve.path == "next" and not other.requests.is_held
    settle(cluster)
    serves(cluster)


def test_weights_that_one_instance_cannot_read_change_nothing() -> None:
    cluster = fleet(routers=2)
    requests = load(cluster, 3.0)
    cluster.first_router.change_weights("bad")
    cluster.run()
    check_served(requests)
    assert {process.scheduler.weights.serves.number for process in cluster.processes} == {0}
    settle(cluster)


@pytest.mark.parametrize("mode", ["keep", "finish"])
@pytest.mark.parametrize("resumed_by", [0, 1])
def test_a_pause_at_one_router_ends_by_a_word_at_either(mode: str, resumed_by: int) -> None:
    cluster = fleet(routers=2)
    requests = load(cluster, 4.0)
    one, other = cluster.routers[0], cluster.routers[resumed_by]
    assert one is not None and other is not None
    cluster.at(1.0, one.pause, mode)
    cluster.at(3.0, other.pause, "")
    cluster.run(2.9)
    waiting = len(cluster.open)
    assert waiting > 15
    cluster.run()
    check_served(requests)
    settle(cluster)


def test_a_pause_ends_with_the_router_that_was_asked_for_it() -> None:
    cluster = fleet(routers=2)
    requests = load(cluster, 4.0)
    one = cluster.routers[0]
    assert one is not None
    cluster.at(1.0, one.pause, "keep")
    cluster.at(2.0, cluster.kill_router, 0)
    cluster.run(2.0 + 2 * LEASE_S + 4.0)
    check_served([request for request in requests if request.router == 1])


def test_what_hits_one_router_touches_none_of_the_others_requests() -> None:
    cluster = fleet(routers=2)
    requests = load(cluster, 8.0)
    cluster.at(2.0, cluster.kill_router, 1)
    cluster.at(5.0, cluster.start_router, 1)
    cluster.run()
    check_served([request for request in requests if request.router == 0])
    lost = [request for request in requests if request.error]
    assert {request.error for request in lost} <= {"router_gone", "no_instance"}
    assert all(1.0 < request.at_s < 5.0 + 2 * LEASE_S for request in lost)
    settle(cluster)
    serves(cluster)


# ---------------------------------------------------------------------------------------------------------- role storms


def test_one_that_changes_its_role_stays_if_the_last_other_one_of_its_kind_dies() -> None:
    cluster = fleet(2, 1)
    requests = load(cluster, 4.0)
    cluster.at(1.0, cluster.change_role, "P0", Role.DECODE)
    cluster.at(1.01, cluster.kill, "P1")
    cluster.run()
    cluster.run(8.0)
    check_served(requests)
    assert [process.name for process in cluster.members] == ["P0", "D0"]
    settle(cluster)


@dataclass(frozen=True)
class Blow:
    """What is done at a time of a storm; `a` and `b` select among what there is."""

    at_ms: int
    kind: str
    a: int = 0
    b: int = 0


KINDS = (
    *["kill", "freeze", "cut", "lose", "slow", "rate", "role"] * 2,
    *("drain", "weights", "mixed", "pause", "router", "freeze_router", "flush"),
)
BLOWS = st.builds(Blow, st.integers(0, 12_000), st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7))
END_S = 16.0
SERIOUS = {"kill", "freeze", "cut", "slow", "rate", "router", "freeze_router", "drain"}
"""Blows that may leave no pair for a while, or take longer than a request has attempts."""


class Storm:
    def __init__(self, cluster: SimulatedCluster, blows: list[Blow]) -> None:
        self._cluster = cluster
        for blow in sorted(blows, key=lambda blow: blow.at_ms):
            cluster.at(blow.at_ms / 1000, self._strike, blow)

    def _strike(self, blow: Blow) -> None:
        getattr(self, blow.kind)(blow.a, blow.b)

    def _soon(self, b: int, act: Callable[[], object]) -> None:
        self._cluster.at(self._cluster.clock.now_s + (0.2, 0.9, 1.7, 3.1)[b % 4], act)

    def _one(self, a: int) -> SimulatedInstance:
        return self._cluster.members[a % len(self._cluster.members)]

    def _router(self, a: int) -> SimulatedRouter:
        routers = [router for router in self._cluster.routers if router is not None]
        return routers[a % len(routers)]

    def kill(self, a: int, b: int) -> None:
        process = self._cluster.kill(self._one(a).name)
        home = process.info.home or f"{process.role}:{process.rank}"
        role, _, rank = home.partition(":")
        self._soon(b, lambda: self._cluster.start(Role(role), int(rank), is_here=bool(a % 2)))

    def freeze(self, a: int, b: int) -> None:
        process = self._one(a)
        if not process.is_frozen:
            self._cluster.freeze(process)
            self._soon(b, lambda: self._cluster.thaw(process) if process.is_frozen else None)

    def freeze_router(self, a: int, b: int) -> None:
        router = self._router(a)
        if not router.is_frozen:
            self._cluster.freeze(router)
            self._soon(b, lambda: self._cluster.thaw(router) if router.is_frozen else None)

    def cut(self, a: int, b: int) -> None:
        ends = [*self._cluster.members, *filter(None, self._cluster.routers)]
        self._cluster.network.cut(ends[a % len(ends)], ends[b % len(ends)])
        self._soon(a, self._cluster.network.heal)

    def lose(self, a: int, b: int) -> None:
        network, router, one = self._cluster.network, self._router(b), self._one(a)
        network.wire(*((router, one) if b % 2 else (one, router))).num_to_lose = 1 + b % 3

    def slow(self, a: int, b: int) -> None:
        process = self._one(a)
        process.speed = 0.1
        self._soon(b, lambda: setattr(process, "speed", 1.0))

    def rate(self, a: int, b: int) -> None:
        wire = self._cluster.network.wire(self._one(a), self._one(b))
        wire.rate = 1e-4
        self._soon(b, lambda: setattr(wire, "rate", 1.0))

    def role(self, a: int, b: int) -> None:
        process = self._one(a)
        wanted = Role.DECODE if process.role is Role.PREFILL else Role.PREFILL
        self._order(self._cluster.change_role, process.name, wanted, self._router(b).index)

    def drain(self, a: int, b: int) -> None:
        process = self._one(a)
        self._order(self._cluster.drain, process.name, self._router(b).index)
        self._soon(b, lambda: self._cluster.start(process.role) if process.is_gone else None)

    def weights(self, a: int, b: int) -> None:
        self._order(self._router(b).change_weights, f"weights-{a}-{b}")

    def mixed(self, a: int, b: int) -> None:
        self._order(partial(self._router(b).change_weights, f"mixed-{a}-{b}", is_mixed=True))

    def pause(self, a: int, b: int) -> None:
        self._router(a).pause(("finish", "keep")[b % 2])  # type: ignore[arg-type]
        self._soon(b, lambda: self._router(a + b).pause(""))

    def flush(self, a: int, b: int) -> None:
        self._router(a).coordination.flush_caches(1 + a + 8 * b)

    def router(self, a: int, b: int) -> None:
        if sum(router is not None for router in self._cluster.routers) > 1:
            index = self._router(a).index
            self._cluster.kill_router(index)
            self._soon(b, lambda: self._cluster.start_router(index))

    def _order(self, act: Callable[..., object], *values: object) -> None:
        """Give an operator's order, which may be refused."""
        with contextlib.suppress(ChituError, KeyError):  # KeyError: it is no member, which the API says before
            act(*values)


SEVERE = [Blow(600 + 800 * at, kind, at, at % 5) for at, kind in enumerate(sorted(set(KINDS)))]
"""One blow of each kind; `MILD`: of those that cost no request."""
MILD = [blow for blow in SEVERE if blow.kind not in SERIOUS]


@settings(suppress_health_check=list(HealthCheck), max_examples=often(NUM_STORMS))
@example((2, 2), 2, SEVERE)
@example((3, 2), 1, MILD)
@given(st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(1, 2), st.lists(BLOWS, min_size=1, max_size=10))
def test_in_any_storm_of_faults_and_orders_each_request_ends_right_or_with_a_word_and_then_all_is_as_before(
    shape: tuple[int, int], routers: int, blows: list[Blow]
) -> None:
    note(f"{shape} {routers} {blows}")
    cluster = fleet(*shape, routers=routers)
    requests = load(cluster, 12.0, rate=8.0)
    Storm(cluster, blows)
    cluster.run(END_S)
    settle(cluster, 10.0)
    cluster.run()
    for request in requests:
        assert request.is_over and request.is_right, request
    if not SERIOUS & {blow.kind for blow in blows}:
        assert {request.error for request in requests} == {""}
    settle(cluster, 10.0)
    serves(cluster)


def test_what_a_router_refuses_is_said() -> None:
    cluster = fleet(1, 1)
    with pytest.raises(RoleRefused):
        cluster.change_role("P0", Role.PREFILL)
