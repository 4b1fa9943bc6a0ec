"""Admission in front of a cluster of real schedulers, through the phases of a day: what the router predicts is what
requests then wait, and nothing is refused while nothing waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from admission_world import Ask, ReplayWorld, ratio

from chitu.config.schema import PolicyName
from chitu.errors import NoInstance
from chitu.types import Role

PAIR, UNIFIED = (Role.PREFILL, Role.DECODE), (Role.UNIFIED,)
Make = Callable[[], tuple[list[int], int]]


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(20, 900) for _ in range(num_tokens)]


def refused(asks: list[Ask]) -> list[Ask]:
    return [ask for ask in asks if ask.generation is None]


@pytest.mark.parametrize(
    ("roles", "policy"), [(PAIR, "prefix_affinity"), (PAIR, "round_robin"), (UNIFIED, "prefix_affinity")]
)
def test_predicted_waits_are_the_real_ones_in_every_phase(roles: tuple[Role, ...], policy: PolicyName) -> None:
    rng = random.Random(3)
    world = ReplayWorld(*roles, policy=policy)
    shared = prompt(rng, 1500)

    def warm() -> tuple[list[int], int]:
        return shared + prompt(rng, 10), 40

    def cold() -> tuple[list[int], int]:
        return prompt(rng, rng.randrange(500, 1500)), 4

    def short() -> tuple[list[int], int]:
        return prompt(rng, 5), 50

    def long() -> tuple[list[int], int]:
        return prompt(rng, 1900), 4

    phases: list[tuple[str, Callable[[], list[Ask]], bool]] = [
        ("cold", partial(world.closed_loop, 16, 30.0, lambda: (prompt(rng, 1000), 4)), True),
        ("warm", partial(world.closed_loop, 16, 20.0, warm), True),
        ("warm, more clients", partial(world.closed_loop, 24, 20.0, warm), True),
        ("D-bound", partial(world.closed_loop, 40, 25.0, short), True),
        ("idle", partial(world.burst, 3, 0.05, long), True),
        ("idle for long", partial(world.burst, 3, 0.05, long), True),
        ("three times too much", partial(world.open_loop, 6.0, 45.0, rng, cold), False),
    ]
    for name, run, fits in phases:
        if name.startswith("idle"):
            world.run(5.0 if name == "idle" else 60.0)
        asks = run()
        assert not any(ask.was_free for ask in asks), name
        assert 0.5 < ratio(asks) < 2.0, name
        assert bool(refused(asks)) != fits, name
    admitted = [ask for ask in asks if ask.generation is not None]
    assert max(ask.wait_s for ask in admitted) < 1.25 * 20.0, "who is let in is served in time"


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_refused_while_nothing_waits(seed: int) -> None:
    """Any mixture of prompts, shared or not, of answers, and of clients that come and go."""
    rng = random.Random(seed)
    roles = PAIR if seed % 3 else UNIFIED
    policy: PolicyName = rng.choice(["prefix_affinity", "round_robin", "least_loaded"])
    world = ReplayWorld(*roles, policy=policy, max_queue_s=rng.choice([1.0, 2.0, None]))
    for _ in range(4):
        shared, own = prompt(rng, rng.choice([0, 100, 600, 2000])), rng.choice([5, 50, 400, 1900])
        make = partial(_request, rng, shared, own, rng.choice([1, 4, 20]))
        if rng.random() < 0.5:
            world.closed_loop(rng.choice([1, 6, 24]), rng.choice([2.0, 5.0]), make)
        else:
            world.open_loop(rng.choice([1.0, 8.0, 40.0]), rng.choice([1.0, 2.0]), rng, make)
        world.run(rng.choice([0.0, 0.3, 3.0, 40.0]))
    assert not any(ask.was_free for ask in world.asks)
    world.run(1.0)
    begin = len(world.asks)
    world.burst(2, 0.05, partial(_request, rng, [], 1900, 4))
    assert not refused(world.asks[begin:]), "the cluster is idle"


def _request(rng: random.Random, shared: list[int], own: int, max_tokens: int) -> tuple[list[int], int]:
    return shared + prompt(rng, rng.randrange(1, own + 1)), max_tokens


@pytest.mark.parametrize("roles", [PAIR, UNIFIED], ids=["pair", "unified"])
def test_choices_count_their_prompt_once_and_themselves_each(roles: tuple[Role, ...]) -> None:
    rng = random.Random(5)
    world = ReplayWorld(*roles)
    world.closed_loop(12, 20.0, lambda: (prompt(rng, 600), 20))
    begin = len(world.asks)
    for _ in range(6):
        world.ask(prompt(rng, 600), 20, choices=3)
        world.run(1.0)
    world.run_until_idle()
    asks = world.asks[begin:]
    assert not refused(asks) and 0.5 < ratio(asks) < 2.0


def test_requests_of_a_warm_prefix_all_go_to_the_instance_that_has_it() -> None:
    """None of them is answered before the last is sent, and all of them are little work."""
    world = ReplayWorld(Role.PREFILL, Role.PREFILL, Role.DECODE)
    rng = random.Random(2)
    shared = prompt(rng, 3000)
    owner = world.ask(shared + prompt(rng, 10), 4).prefill
    world.router.fail_all(NoInstance("for a test"))
    asks = [world.ask(shared + prompt(rng, 10), 4) for _ in range(24)]
    assert {ask.prefill for ask in asks} == {owner}
    assert world.ask(prompt(rng, 3000), 4).prefill != owner, "what it does not have goes to the one that is idle"
