"""The router and P's early token: shown once, compared with D's, and never taken for another attempt."""

from __future__ import annotations

from typing import Any

import pytest
from router_world import Client, World

from chitu.protocol import Finish, Grammar, PrefillRequest, SamplingParams, TokenBatch
from chitu.protocol.account import PrefillTimes, StageTimes
from chitu.types import Role

STAGES = StageTimes(PrefillTimes(0.01, 0.1, 0.02), 0.005, 0.15, 0.17, 0.3)


def two_pairs() -> World:
    return World(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)


def early(world: World, client: Client, token: int, room: bytes | None = None) -> None:
    """Have the P of the client's attempt send a first token, for that room."""
    assert client.generation is not None
    attempt = client.generation.attempt
    assert attempt is not None and attempt.prefill is not None
    batch = TokenBatch(attempt.prefill.incarnation, [], [], [], early=[(room or attempt.room, token)])
    world.router.on_tokens(batch)
    world.router.flush()


def room_of(world: World, client: Client) -> bytes:
    return world.room(client.generation)


def outcomes(world: World) -> dict[str, int]:
    return dict(world.router.counters.early_tokens)


def test_an_early_token_is_shown_at_once_and_ds_own_confirms_it() -> None:
    world = two_pairs()
    client = world.add_client()
    early(world, client, 11)
    assert client.tokens == [11]
    world.emit(room_of(world, client), 11)
    assert client.tokens == [11]
    world.emit(room_of(world, client), 12)
    world.emit(room_of(world, client), 13, finish="length")
    assert client.tokens == [11, 12, 13]
    assert outcomes(world) == {"shown": 1, "confirmed": 1}
    counters = world.router.counters
    assert (counters.tokens, counters.ttft.count, counters.second_token.count) == (3, 1, 1)


def test_both_in_one_turn_of_the_loop_are_one_token() -> None:
    world = two_pairs()
    client = world.add_client()
    room = room_of(world, client)
    world.router.on_tokens(
        TokenBatch(1, [], [], [], early=[(room, 11)]), TokenBatch(3, [room, room, room], [11, 12, 11], [])
    )
    world.router.flush()
    assert client.tokens == [11, 12, 11]


def test_a_late_early_token_and_one_that_comes_twice_are_shown_once() -> None:
    world = two_pairs()
    client = world.add_client()
    world.emit(room_of(world, client), 11, 12)
    early(world, client, 11)
    early(world, client, 11)
    world.emit(room_of(world, client), 13)
    assert client.tokens == [11, 12, 13] and outcomes(world) == {"late": 2}
    other = world.add_client()
    early(world, other, 21)
    early(world, other, 21)
    world.emit(room_of(world, other), 21, 22)
    assert other.tokens == [21, 22] and outcomes(world) == {"late": 3, "shown": 1, "confirmed": 1}


def test_a_lost_early_token_changes_nothing() -> None:
    world = two_pairs()
    client = world.add_client()
    world.emit(room_of(world, client), 11, finish="stop")
    assert client.tokens == [11] and outcomes(world) == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_another_token_of_d_is_integrity_and_the_request_continues_elsewhere_behind_the_shown_one(
    is_late: bool,
) -> None:
    world = two_pairs()
    client = world.add_client()
    first, old = world.pair(client.generation), room_of(world, client)
    if is_late:
        world.emit(old, 11)
        early(world, client, 99)
    else:
        early(world, client, 11)
        world.emit(old, 99, 98)
    assert client.tokens == [11] and outcomes(world)["different"] == 1
    assert world.router.metrics().retries == {"integrity": 1}
    assert set(world.pair(client.generation).split("-")).isdisjoint(first.split("-"))
    head = world.sent_to(room_of(world, client))["D1"].head
    assert head.num_emitted == 1 and head.token_ids[-4:] == (11).to_bytes(4, "little")
    early(world, client, 12)
    world.emit(room_of(world, client), 12, 13, finish="length")
    assert client.tokens == [11, 12, 13]


def test_an_early_token_of_an_old_attempt_or_of_another_p_is_stale() -> None:
    world = two_pairs()
    client = world.add_client()
    old = room_of(world, client)
    early(world, client, 11)
    world.decode_fails(old, "transfer_failed")
    early(world, client, 77, old)
    attempt = client.generation.attempt if client.generation else None
    assert attempt is not None
    stranger = TokenBatch(attempt.decode.incarnation, [], [], [], early=[(attempt.room, 78)])
    world.router.on_tokens(stranger)
    world.emit(attempt.room, 12, finish="length")
    assert client.tokens == [11, 12] and outcomes(world)["stale"] == 2


@pytest.mark.parametrize("dead", ["P0", "D0"])
def test_a_request_whose_p_or_d_is_lost_before_d_confirms_moves_behind_the_early_token(dead: str) -> None:
    world = two_pairs()
    client = world.add_client()
    early(world, client, 11)
    world.router.on_lost(world.instance(dead), "killed", has_died=True)
    assert client.generation is not None and client.generation.num_attempts == 2
    world.emit(room_of(world, client), 12, finish="length")
    assert client.tokens == [11, 12]


@pytest.mark.parametrize("token", [2, 11])
def test_the_end_of_an_answer_of_one_token_comes_with_ds_confirmation_or_with_its_death(token: int) -> None:
    for dies in (False, True):
        world = two_pairs()
        most = 8 if token == 2 else 1
        sampling = SamplingParams(max_tokens=most)
        client = world.add_client(sampling=sampling, stop_ids=frozenset({2}))
        early(world, client, token)
        assert client.tokens == [token] and client.generation is not None and client.generation.finish is None
        room, reason = room_of(world, client), "stop" if token == 2 else "length"
        if dies:
            world.router.on_lost(world.instance("D0"), "killed", has_died=True)
        else:
            world.emit(room, token, finish=reason)
        assert client.tokens == [token] and client.generation.finish is not None
        assert client.generation.finish.reason == reason


def test_an_unconfirmed_attempt_whose_half_does_not_reach_d_moves() -> None:
    world = two_pairs()
    client = world.add_client()
    early(world, client, 11)
    world.fails("P0", room_of(world, client), "bootstrap_timeout")
    world.emit(room_of(world, client), 12, finish="length")
    assert client.tokens == [11, 12] and world.router.metrics().retries == {"bootstrap_timeout": 1}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, True),
        ({"wake_per_token": False}, False),
        ({"sampling": SamplingParams(8, grammar=Grammar("json_object"))}, False),
        ({"sampling": SamplingParams(8, logprobs=0)}, False),
        ({"sampling": SamplingParams(8, prompt_logprobs=0)}, False),
        ({"sampling": SamplingParams(8, pooling="last")}, False),
        ({"sampling": SamplingParams(8, 2, 0.7, 5, 0.9, 0.1, 3, 1.0, 1.0, 1.2, {3: 1.0}, (4,))}, True),
    ],
)
def test_p_draws_what_depends_only_on_the_row_the_prompt_and_the_seed(fields: dict[str, Any], asked: bool) -> None:
    world = two_pairs()
    client = world.add_client(**fields)
    halves = world.sent_to(room_of(world, client))
    (half,) = (half for half in halves.values() if isinstance(half, PrefillRequest))
    assert half.early == (client.generation.request.sampling if asked and client.generation else None)


def test_p_draws_nothing_for_choices_of_a_prompt() -> None:
    world = two_pairs()
    world.add_choices(2)
    assert [m.early for _, m in world.outbox.sent if isinstance(m, PrefillRequest)] == [None]


def test_an_early_token_has_a_stage_of_its_own_behind_it() -> None:
    world = two_pairs()
    client = world.add_client()
    room = room_of(world, client)
    early(world, client, 11)
    world.router.on_tokens(TokenBatch(3, [room], [11], [Finish(room, "stop", stages=STAGES)]))
    assert client.generation is not None
    stages = client.generation.ended[-1].stages
    assert stages is not None and stages.span_s("confirm") is not None and stages.span_s("first_step") is None
