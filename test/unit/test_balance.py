"""The balancer: a pure machine, driven by a small queueing model of a cluster in virtual time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from chitu.router.balance import SETTLE_S, Balancer, Change, Fleet, Observed
from chitu.types import Role

P, D = Role.PREFILL, Role.DECODE
DT_S = 0.1
PROMPT_TOKEN_S = 1 / 8000
STEP_S, STEP_REQUEST_S = 0.015, 0.0005
"""A decode step takes the first, and the second for each request."""
TTFT_S, TPOT_S = 2.0, 0.045
ROOM = int((TPOT_S - STEP_S) / STEP_REQUEST_S)
"""Requests that D decodes at once within the TPOT."""
FLIP_S = 2.0


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int


def arrivals(seconds: float, rate: float, prompt: float, output: float, rng: random.Random) -> list[Arrival]:
    """Return Poisson arrivals with log-normal lengths of these means, as those of conversations are."""
    at_s, found = 0.0, []

    def length(mean: float, sigma: float) -> int:
        return 1 + int(mean * rng.lognormvariate(-sigma * sigma / 2, sigma))

    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at_s, length(prompt, 1.1), length(output, 0.7)))
    return found


def turning(parts: Sequence[tuple[float, float, float, float]], rng: random.Random) -> list[Arrival]:
    """Return one load after the other; each part is seconds, rate, prompt and output tokens."""
    found, start_s = [], 0.0
    for seconds, *load in parts:
        found += [a._replace(at_s=a.at_s + start_s) for a in arrivals(seconds, *load, rng)]
        start_s += seconds
    return found


@dataclass(eq=False)
class Running:
    arrival: Arrival
    left: float
    first_s: float = math.inf


@dataclass(eq=False)
class Node:
    """One instance: prompts one after the other (P), or requests in a batch (D)."""

    role: Role
    rank: int
    incarnation: int
    since_s: float
    queue: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    tokens: float = 0.0
    backlog_s: float = 0.0
    becomes: Role | None = None
    down_until_s: float = -math.inf

    @property
    def name(self) -> str:
        return f"{self.role.letter}{self.rank}"

    @property
    def load(self) -> float:
        return sum(r.left for r in self.queue) if self.role is P else len(self.queue) + len(self.running)


class World:
    """A cluster. `balancer` None: a fixed split."""

    def __init__(self, prefill: int, decode: int, balancer: Balancer | None = None) -> None:
        self.now_s = 0.0
        self._incarnations = iter(range(1, 1000))
        self.nodes = [
            Node(role, rank, next(self._incarnations), -100.0)
            for role, count in ((P, prefill), (D, decode))
            for rank in range(count)
        ]
        self.balancer = balancer
        self.changes: list[tuple[float, Change]] = []
        self.offered = self.begun = self.good = 0

    def of(self, role: Role) -> list[Node]:
        return [n for n in self.nodes if n.role is role and n.becomes is None and n.down_until_s <= self.now_s]

    def run(self, load: Sequence[Arrival]) -> World:
        rest, turn = deque(load), 0
        while rest or any(n.queue or n.running for n in self.nodes):
            self.now_s += DT_S
            while rest and rest[0].at_s <= self.now_s:
                self._arrive(rest.popleft())
            for node in self.nodes:
                self._step(node)
            turn += 1
            if self.balancer is not None and turn % 10 == 0:
                change = self.balancer.tick(self.now_s, self.fleet())
                if change is not None:
                    self._begin(change)
        return self

    def _arrive(self, arrival: Arrival) -> None:
        self.offered += 1
        if max(self._waits_s().values()) > TTFT_S:
            return  # early rejection
        chosen = min(self.of(P), key=lambda n: n.load)
        chosen.queue.append(Running(arrival, arrival.prompt_tokens * PROMPT_TOKEN_S))

    def _waits_s(self) -> dict[Role, float]:
        prefill, decode = self.of(P), self.of(D)
        waiting = sum(len(n.queue) for n in decode)
        return {
            P: sum(n.load for n in prefill) / len(prefill),
            D: waiting / (len(decode) * ROOM / 15.0),  # a request decodes for about 15 s
        }

    def _step(self, node: Node) -> None:
        if node.becomes is not None and not node.queue and not node.running:
            rank = next(k for k in range(99) if all((n.role, n.rank) != (node.becomes, k) for n in self.nodes))
            self.nodes.remove(node)
            new = Node(node.becomes, rank, next(self._incarnations), self.now_s + FLIP_S)
            new.down_until_s = self.now_s + FLIP_S
            self.nodes.append(new)
        elif node.role is P:
            left_s = DT_S
            if len(node.queue) > 1:
                node.backlog_s += DT_S
            while node.queue and left_s > 0:
                first = node.queue[0]
                part_s = min(left_s, first.left)
                first.left -= part_s
                left_s -= part_s
                node.tokens += part_s / PROMPT_TOKEN_S
                if first.left <= 1e-9:
                    node.queue.popleft()
                    first.left = first.arrival.output_tokens
                    min(self.of(D), key=lambda n: n.load).queue.append(first)
        else:
            while node.queue and len(node.running) < ROOM:
                begun = node.queue.popleft()
                begun.first_s = self.now_s - begun.arrival.at_s
                self.begun += 1
                node.running.append(begun)
            if node.queue:
                node.backlog_s += DT_S
            made = DT_S / (STEP_S + STEP_REQUEST_S * len(node.running))
            node.tokens += made * len(node.running)
            for request in node.running:
                request.left -= made
            self.good += sum(r.left <= 0 and r.first_s <= TTFT_S for r in node.running)
            node.running = [r for r in node.running if r.left > 0]

    def _begin(self, change: Change) -> None:
        node = next(n for n in self.nodes if n.name == change.instance)
        assert node.becomes is None and len(self.of(node.role)) > 1
        node.becomes = change.role
        self.changes.append((self.now_s, change))

    def fleet(self) -> Fleet:
        return Fleet(
            [self._observed(n) for n in self.nodes if n.down_until_s <= self.now_s],
            self.offered,
            self.begun,
            self._waits_s(),
            "one joins" if any(n.down_until_s > self.now_s for n in self.nodes) else "",
        )

    def _observed(self, node: Node) -> Observed:
        is_prefill = node.role is P
        return Observed(
            *(node.name, node.role, node.incarnation, self.now_s - node.since_s, node.becomes is not None),
            prompt_tokens=int(node.tokens) if is_prefill else 0,
            prompt_token_s=PROMPT_TOKEN_S,
            output_tokens=0 if is_prefill else int(node.tokens),
            rows=len(node.running),
            step_s=STEP_S + STEP_REQUEST_S * len(node.running),
            num_slots=64,
            pages_share=0.0,
            backlog_s=node.backlog_s,
            is_held=False,
            roles=(P, D),
            cost_pages=node.load,
            context_tokens=0,
        )


def conversations(seconds: float, instances: int, share: float, rng: random.Random) -> list[Arrival]:
    """Return a load of this share of what the best split of so many instances can do, if they never waited: prompts of
    7,500 tokens to compute and answers of 343, as in the published trace of conversations."""
    work_s = 7500 * PROMPT_TOKEN_S + 343 * TPOT_S / ROOM
    return arrivals(seconds, share * instances / work_s, 7500, 343, rng)


def best_fixed(instances: int, load: Sequence[Arrival]) -> int:
    """Return the requests within the SLO under the best fixed split."""
    return max(World(n, instances - n).run(load).good for n in range(1, instances))


@pytest.mark.parametrize(("begins_with", "share"), [(1, 0.6), (2, 1.0), (3, 0.6)])
def test_on_conversations_it_finds_the_best_split_and_stays_there(begins_with: int, share: float) -> None:
    load = conversations(900.0, 4, share, random.Random(begins_with))
    world = World(begins_with, 4 - begins_with, Balancer(TTFT_S, TPOT_S)).run(load)
    assert world.good >= 0.95 * best_fixed(4, load)
    assert len(world.changes) == 3 - begins_with  # 3P1D is the best; there it stays for the other 800 s


def test_a_load_that_turns_is_followed_with_one_change_for_each_instance() -> None:
    prompts, answers = (2.9, 8000.0, 130.0), (3.9, 500.0, 1000.0)
    load = turning([(300.0, *prompts), (300.0, *answers), (300.0, *prompts)], random.Random(3))
    world = World(2, 2, Balancer(TTFT_S, TPOT_S)).run(load)
    assert world.good >= 1.1 * best_fixed(4, load)  # no fixed split is good at both
    roles = [change.role for _, change in world.changes]
    assert roles == [P, D, D, P, P]
    assert all(at_s % 300.0 < 100.0 for at_s, _ in world.changes)


# --------------------------------------------------------------------------------------------------- the machine alone


class Script:
    """Feeds a balancer twice a second with instances of constant work."""

    def __init__(self, acts: bool = True) -> None:
        self.balancer = Balancer(TTFT_S, None, acts)
        self.now_s = 0.0
        self.offered = self.begun = 0.0
        self.changes: list[tuple[float, Change]] = []
        self.instances = [observed("P0", P, 1), observed("D0", D, 2), observed("D1", D, 3), observed("D2", D, 4)]
        self.busy = ""
        self.requests = 10
        """Requests a second."""

    def run(self, seconds: float, prefill: float, decode: float, waits_s: float = 0.0, begun: float = 1.0) -> None:
        """Let each P and D do so much work in a second, with `begun` of the requests that are offered."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            self.offered += self.requests / 2
            self.begun += self.requests / 2 * begun
            self.instances = [
                i._replace(
                    prompt_tokens=i.prompt_tokens + round(0.5e6 * prefill * (i.role is P)),
                    output_tokens=i.output_tokens + round(0.5e6 * decode * (i.role is D)),
                )
                for i in self.instances
            ]
            waits = {P: waits_s, D: 0.0}
            change = self.balancer.tick(
                self.now_s, Fleet(self.instances, int(self.offered), int(self.begun), waits, self.busy)
            )
            if change is not None:
                self.changes.append((self.now_s, change))


def observed(name: str, role: Role, incarnation: int, **others: object) -> Observed:
    """Return an instance that computes or makes a million tokens a second."""
    whole = Observed(name, role, incarnation, 100.0, False, 0, 1e-6, 0, 1, 1e-6, 1, 0.0, 0.0, False, (P, D), 10.0, 0)
    return whole._replace(**others)


def test_the_side_that_is_short_gets_the_instance_that_costs_least() -> None:
    script = Script()
    script.instances[2] = script.instances[2]._replace(cost_pages=3.0)
    script.run(12.0, 1.0, 0.2)
    at_s, change = script.changes[0]
    assert (change.instance, change.role) == ("D1", P) and at_s < 10.0
    assert str(change) == (
        "D1 should become P: 1 P are at 125% of their aim, 3 D at 22%; the larger falls by 50%, and 3 pages move or "
        "are missed"
    )


def test_nothing_changes_while_neither_side_is_short() -> None:
    script = Script()
    script.run(60.0, 0.6, 0.1)
    assert not script.changes
    script.run(30.0, 0.6, 0.1, waits_s=1.5)  # the same load, but prompts wait: bursts
    assert script.changes


def test_the_last_of_a_side_never_changes() -> None:
    script = Script()
    script.instances = script.instances[:2]
    script.run(100.0, 1.0, 0.0)
    assert not script.changes and script.balancer.advice is None


def test_an_instance_that_cannot_take_the_role_is_left_alone() -> None:
    script = Script()
    script.instances = [i._replace(roles=()) if i.name != "D2" else i for i in script.instances]
    script.run(12.0, 1.0, 0.2)
    assert {change.instance for _, change in script.changes} == {"D2"}


@pytest.mark.parametrize("reason", ["the weights change", "D2 leaves, or changes its role", "D2 has just joined"])
def test_nothing_changes_while_the_fleet_moves_and_it_says_so(reason: str) -> None:
    script = Script()
    if reason.startswith("D2 leaves"):
        script.instances[3] = script.instances[3]._replace(is_leaving=True)
    elif reason.startswith("D2 has"):
        script.instances[3] = script.instances[3]._replace(age_s=SETTLE_S - 0.1)
    else:
        script.busy = reason
    script.run(60.0, 1.0, 0.2)
    assert not script.changes and script.balancer.obstacle == reason
    assert script.balancer.advice is not None and script.balancer.advice.role is P


def test_after_a_change_that_failed_it_waits_a_minute() -> None:
    script = Script()
    script.run(10.0, 1.0, 0.2)
    script.balancer.on_failed(script.now_s)
    script.run(120.0, 1.0, 0.2)
    first_s, second_s = (at_s for at_s, _ in script.changes[:2])
    assert second_s - first_s > 59.0


def test_one_that_only_advises_says_it_as_long_as_it_holds() -> None:
    script = Script(acts=False)
    script.run(30.0, 1.0, 0.2)
    assert not script.changes and script.balancer.advice is not None
    script.run(60.0, 0.2, 0.2)
    assert script.balancer.advice is None


def test_noise_around_equal_pressures_changes_nothing() -> None:
    script = Script()
    script.instances = [observed(f"{r.letter}{k}", r, 10 * k + (r is P)) for r in (P, D) for k in range(3)]
    rng = random.Random(5)
    for _ in range(600):
        script.run(1.0, rng.uniform(0.6, 1.0), rng.uniform(0.7, 1.1))
    assert not script.changes


def test_work_that_waits_counts_as_a_full_instance_whatever_its_rates_say() -> None:
    script = Script()
    for _ in range(20):
        script.instances[0] = script.instances[0]._replace(backlog_s=script.instances[0].backlog_s + 0.5)
        script.run(0.5, 0.01, 0.1)
    assert script.balancer.pressure[P] == pytest.approx(1.25) and script.changes
    held = Script()
    for _ in range(20):
        held.instances[1] = held.instances[1]._replace(backlog_s=held.instances[1].backlog_s + 0.5, is_held=True)
        held.run(0.5, 0.5, 0.1)
    assert held.balancer.pressure[D] == pytest.approx(0.1 / 0.9)


def test_the_longer_a_prompt_takes_beside_the_ttft_the_less_should_p_have_to_do() -> None:
    aims = []
    for prompts in (20, 10, 5, 2, 1):  # a second: the prompts of one second of work
        script = Script()
        script.requests = prompts
        script.run(60.0, 1.0, 0.1)
        aims.append([round(script.balancer.aim(P, count), 2) for count in (1, 4)])
        assert script.balancer.aim(D, 1) == 0.9
    assert aims == [[0.8, 0.8], [0.8, 0.8], [0.74, 0.8], [0.49, 0.79], [0.4, 0.57]]


def test_the_wish_grows_with_the_load_and_shrinks_after_five_minutes_without_it() -> None:
    script = Script(acts=False)
    script.run(60.0, 0.3, 0.3)
    assert script.balancer.wanted == {P: 1, D: 3}  # what there is, until the load is known for long enough
    script.run(60.0, 1.0, 0.9, begun=0.5)  # half of the requests are rejected
    assert script.balancer.wanted == {P: 3, D: 6}
    script.run(240.0, 0.3, 0.1)
    assert script.balancer.wanted == {P: 3, D: 6}
    script.run(120.0, 0.3, 0.1)
    assert script.balancer.wanted == {P: 1, D: 1}


def named_slow(*instances: Observed) -> str:
    """Return what a balancer says of these after a minute."""
    script = Script()
    script.instances = list(instances)
    script.run(60.0, 0.0, 0.0)
    return "" if script.balancer.slow is None else str(script.balancer.slow)


def test_a_p_that_takes_twice_as_long_for_a_prompt_as_others_is_named() -> None:
    peers = [observed(f"P{k}", P, 1 + k) for k in range(2)]
    assert named_slow(*peers, observed("P2", P, 3, prompt_token_s=1.9e-6)) == ""
    assert named_slow(*peers, observed("P2", P, 3, prompt_token_s=3e-6)) == (
        "P2 takes 3.0 times as long for a prompt token as others of its role that do no less: compare its host and "
        "device"
    )
    unknown = [observed(f"P{k}", P, 1 + k, prompt_token_s=0.0) for k in range(2)]
    assert named_slow(*unknown, observed("P2", P, 3)) == "", "nothing is known of the others"
    assert named_slow(observed("P0", P, 1, prompt_token_s=3e-6), observed("D0", D, 2)) == "", "it has no peer"


@pytest.mark.parametrize(
    ("rows", "tokens", "is_named"), [(8, 500, True), (4, 100, True), (9, 500, False), (8, 501, False)]
)
def test_a_d_is_slow_only_beside_one_that_has_no_less_to_do(rows: int, tokens: int, is_named: bool) -> None:
    peer = observed("D0", D, 1, rows=8, context_tokens=500, step_s=0.02)
    said = named_slow(peer, observed("D1", D, 2, rows=rows, context_tokens=tokens, step_s=0.05))
    assert said.startswith("D1 takes 2.5 times as long for a step") if is_named else not said


def test_an_instance_that_was_slow_for_a_moment_is_not_named_and_of_two_the_slower_is() -> None:
    script = Script()
    script.instances = [observed(f"P{k}", P, 1 + k) for k in range(5)]
    seen = []
    for times in ((3.0, 1.0), (1.0, 3.0), (3.0, 4.0), (4.0, 3.0), (1.0, 1.0)):
        for rank, factor in enumerate(times):
            script.instances[rank] = script.instances[rank]._replace(prompt_token_s=factor * 1e-6)
        script.run(20.0, 0.0, 0.0)
        seen.append(script.balancer.slow and script.balancer.slow.instance)
    assert seen == [None, None, "P1", "P0", None]
