"""The router's own deadlines: every state of an attempt ends, even if the message of its end is lost."""

from __future__ import annotations

import pytest
from router_world import World

from chitu.config.schema import DeadlineConfig
from chitu.types import Role

DEADLINES = DeadlineConfig(queue_s=2.0, bootstrap_s=1.0, transfer_s=3.0, lease_s=1.0)
FIRST_TOKEN_S = 7.0


def two_pairs() -> World:
    return World(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, deadlines=DEADLINES)


def test_an_attempt_without_any_word_is_followed_by_another_once_both_sides_must_have_given_up() -> None:
    world = two_pairs()
    client = world.add_client()
    first, pair = world.room(client.generation), world.pair(client.generation)
    world.clock.advance(FIRST_TOKEN_S - 0.1)
    world.router.tick()
    assert world.room(client.generation) == first
    world.clock.advance(0.2)
    world.router.tick()
    assert world.room(client.generation) != first and world.pair(client.generation) != pair
    assert world.cancelled().count("P0") == world.cancelled().count("D0") == 1
    world.emit(first, 5)  # whatever the first attempt still sends is dropped
    world.emit(world.room(client.generation), 7, 8, finish="stop")
    assert client.tokens == [7, 8]


def test_attempts_that_lose_every_word_end_with_one_that_names_state_pair_and_time() -> None:
    world = two_pairs()
    client = world.add_client()
    for _ in range(3):
        world.clock.advance(FIRST_TOKEN_S + 0.1)
        world.router.tick()
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == "transfer_timeout"
    text = client.generation.error.message
    assert text.startswith("attempt 3 waited 7.1 s in PREFILL for the first token of P")
    assert world.router.in_flight == 0 and not world.router._attempts._first_tokens._buckets


@pytest.mark.parametrize("finishes", [False, True])
def test_an_attempt_whose_first_token_came_has_the_requests_deadline_alone(finishes: bool) -> None:
    world = two_pairs()
    client = world.add_client()
    room = world.room(client.generation)
    world.emit(room, 1)
    world.clock.advance(50.0)
    world.router.tick()
    assert world.room(client.generation) == room
    if finishes:
        world.emit(room, 2, finish="length")
    world.clock.advance(11.0)
    world.router.tick()
    assert client.generation is not None and not world.router._attempts._first_tokens._buckets
    if not finishes:
        assert client.generation.error is not None
        text = "(router.request_timeout_s): attempt 1 waited 61.0 s in DECODE for the last token of P0-D0"
        assert client.generation.error.message.endswith(text)
