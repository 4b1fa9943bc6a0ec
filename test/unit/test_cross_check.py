"""Cross-checks of P: which of two P is named as wrong, and what the router sends to find out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from router_world import World, two_pairs

from chitu.config.schema import DeadlineConfig
from chitu.protocol import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    Finish,
    SamplingParams,
    TokenBatch,
    TransferSums,
    pack_i32,
    pack_logprobs,
    unpack_i32,
)
from chitu.router.cross_checks import (
    CheckResult,
    Computed,
    Recompute,
    SoundNoise,
    cross_check,
    damage_in,
    rows_apart,
)
from chitu.router.policies import InstanceKey
from chitu.types import Role

P0, P1, P2 = (InstanceKey(Role.PREFILL, rank, 7) for rank in range(3))
PROMPT = pack_i32([1, 2, 3])
LIMIT = SoundNoise("float32").limit
"""Limit of a cluster of which nothing was measured yet."""

TrackChunks = Callable[[InstanceKey, bytes], float]
"""The likeliest token's logprob in the row behind some tokens, as an instance computes it."""


def row(value: float) -> bytes:
    return pack_logprobs(value, [(5, value), (6, value - 1), (7, value - 2)])


def right(key: InstanceKey | None, tokens: bytes) -> float:
    return -0.5 - 0.1 * len(tokens)


def found(
    compute: TrackChunks,
    first: float | None = None,
    pages: TrackChunks | None = None,
    noise: SoundNoise | None = None,
) -> tuple[CheckResult, list[Recompute]]:
    """Return the result of checking an answer of P0, and what was recomputed, in a cluster of P0, P1 and a correct D.
    `pages`: what D computes from the pages of each P."""
    told = row(compute(P0, PROMPT) if first is None else first)
    steps = cross_check(PROMPT, Computed(P0, [5], [told]), noise or SoundNoise("float32"))
    asked: list[Recompute] = []
    answer: Computed | None = None
    try:
        while True:
            ask = steps.send(answer)
            asked.append(ask)
            key = (P1 if ask.prefill == P0 else P0) if ask.by_another else ask.prefill
            rows = [row(compute(key, ask.token_ids))]
            if ask.max_tokens == 2:
                rows.append(row((pages or right)(key, ask.token_ids + pack_i32([5]))))
            answer = Computed(key, [5, 5][: ask.max_tokens], rows)
    except StopIteration as end:
        return end.value, asked


def off(guilty: InstanceKey, by: float) -> TrackChunks:
    return lambda key, tokens: right(key, tokens) + (by if key == guilty else 0.0)


def test_two_that_agree_cost_one_computation() -> None:
    result, asked = found(right)
    assert result == CheckResult("agreed") and asked == [Recompute(PROMPT, 1, P0, by_another=True)]
    assert found(off(P1, 0.9 * LIMIT))[0].outcome == "agreed"


@pytest.mark.parametrize("by", [0.0045, -0.02, 5.0, math.nan, math.inf])
@pytest.mark.parametrize("guilty", [P0, P1])
def test_the_one_that_differs_from_d_too_is_named(guilty: InstanceKey, by: float) -> None:
    result, asked = found(off(guilty, by))
    assert (result.outcome, result.guilty) == ("wrong", guilty), result
    assert f"P{guilty.engine_rank} differs from D" in result.says and "one prompt of 3 tokens" in result.says
    assert asked[1:] == [
        Recompute(tokens, count, key)
        for key in (P0, P1)
        for tokens, count in ((PROMPT, 2), (PROMPT + pack_i32([5]), 1))
    ], "the token that D's row stands behind is the one that this P's row gave"


def test_an_answer_that_was_wrong_once_names_its_cache() -> None:
    """The second of them was computed behind a page of zeros, and its token is the right one."""
    for first in (-3.0, right(None, PROMPT) + 0.0045):
        result, _ = found(right, first=first)
        assert (result.outcome, result.guilty) == ("passing", P0), result


def test_the_limit_is_learned_from_the_p_that_is_nearer_to_d() -> None:
    """Rounding is coarser than the least. So D judges the first check, and what it measures holds for the next ones."""
    noise = SoundNoise("bfloat16")
    rounded: TrackChunks = lambda key, tokens: right(key, tokens) + 0.02  # noqa: E731
    far = off(P1, 0.09)
    assert noise.limit == 0.08
    result, asked = found(far, pages=lambda key, tokens: far(key, tokens) + 0.02, noise=noise)
    assert (result.outcome, len(asked)) == ("agreed", 5), result
    assert noise.limit == pytest.approx(0.16, abs=1e-3)
    result, asked = found(off(P1, 0.15), noise=noise)
    assert (result.outcome, len(asked)) == ("agreed", 1), result
    result, _ = found(off(P1, 0.3), pages=rounded, noise=noise)
    assert (result.outcome, result.guilty) == ("wrong", P1), "what a fixed limit of 0.5 excused"
    assert "rounding explains 0.16" in result.says


def test_pages_that_were_damaged_on_their_way_accuse_no_p() -> None:
    sums = b"".join(n.to_bytes(8, "little") for n in range(6))
    landed = sums[:32] + bytes(8) + sums[40:]
    assert damage_in(TransferSums(3, 2, sums, sums), "P0-D1") == "" == damage_in(None, "P0-D1")
    says = damage_in(TransferSums(3, 2, sums, landed), "P0-D1")
    assert says == "P0-D1: K and V differ between P and D: first in page 4, layer 1"
    assert damage_in(TransferSums(3, 1, sums, landed), "P0-D1").endswith("first in page 7")
    steps = cross_check(PROMPT, Computed(P0, [5], [row(1.0)], says), SoundNoise("float32"))
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == CheckResult("damaged", says=says)
    steps = cross_check(PROMPT, Computed(P0, [5], [row(1.0)]), SoundNoise("float32"))
    next(steps)
    steps.send(Computed(P1, [5], [row(2.0)]))
    with pytest.raises(StopIteration) as end:
        steps.send(Computed(P0, [5, 5], [row(1.0), row(9.0)], says))
    assert end.value.value == CheckResult("damaged", says=says), "D computed from them"


def test_who_is_wrong_is_not_guessed() -> None:
    both, _ = found(lambda key, tokens: right(key, tokens) + (1.0 if key == P0 else 2.0))
    assert (both.outcome, both.guilty) == ("unclear", None) and "both differ" in both.says
    of_d, _ = found(lambda key, tokens: right(key, tokens) + 1.0, first=-3.0)
    assert (of_d.outcome, of_d.guilty) == ("unclear", None), "the two agree now, and D differs from both"
    follows, _ = found(off(P0, 1.0), pages=off(P0, 1.0))
    assert (follows.outcome, follows.guilty) == ("unclear", None) and "neither differs" in follows.says


def test_what_does_not_come_is_no_verdict() -> None:
    for answer in (None, Computed(P0, [5], [row(9.0)])):
        steps = cross_check(PROMPT, Computed(P0, [5], [row(1.0)]), SoundNoise("float32"))
        next(steps)
        with pytest.raises(StopIteration) as end:
            steps.send(answer)
        assert end.value.value == CheckResult("unanswered")
    steps = cross_check(PROMPT, Computed(P0, [5], [row(1.0)]), SoundNoise("float32"))
    next(steps)
    steps.send(Computed(P1, [5], [row(2.0)]))
    with pytest.raises(StopIteration) as end:
        steps.send(Computed(P2, [5, 5], [row(1.0), row(1.0)]))  # P2 is not the instance that was asked
    assert end.value.value.outcome == "unclear"


def test_rows_that_list_other_tokens() -> None:
    one = pack_logprobs(-1.0, [(5, -1.0), (6, -2.0), (7, -3.0)])
    assert rows_apart(one, one) == 0.0
    assert rows_apart(one, pack_logprobs(-1.0, [(5, -1.0), (6, -2.0), (8, -3.0)])) == 0.0, (
        "a tie at the end of the list"
    )
    assert rows_apart(one, pack_logprobs(-1.0, [(5, -1.0), (8, -1.5), (6, -2.0)])) == pytest.approx(1.5)
    assert rows_apart(one, pack_logprobs(-1.0, [(5, math.nan), (6, -2.0), (7, -3.0)])) == math.inf
    assert rows_apart(one, pack_logprobs(-1.0)) == math.inf, "no list"


# ------------------------------------------------------------------------------------------------------ on the router


def answer(world: World, room: bytes, values: list[float]) -> None:
    rows = [(place, row(value)) for place, value in enumerate(values)]
    batch = TokenBatch(1, [room] * len(values), [5] * len(values), [Finish(room, "length")], logprobs=rows)
    world.router.on_tokens(batch)
    world.router.flush()


def open_room(world: World) -> bytes:
    """Return the room of the only request in flight."""
    rooms = world.router._attempts.rooms
    assert len(rooms) == 1, list(rooms)
    return next(iter(rooms))


def checking(verify_compute: str = "all") -> tuple[World, list[CheckResult]]:
    world = two_pairs(verify_compute=verify_compute, deadlines=DeadlineConfig())
    return world, world.router.check_results


def test_the_router_asks_another_p_and_names_the_guilty_one() -> None:
    world, results = checking()
    generation, room = world.add()
    sent = world.sent_to(room)
    assert sent["D0"].sampling.logprobs == MAX_LOGPROBS
    answer(world, room, [-1.0, -1.0, -1.0, -1.0])
    assert generation.take() == [5, 5, 5, 5] and len(generation.logprobs) == 1, "the first token's alone"
    for values, name in (([-2.0], "P1"), ([-1.0, -1.0], "P0"), ([-3.0], "P0"), ([-2.0, -1.0], "P1"), ([-1.0], "P1")):
        assert not results
        world.router.tick()
        asked = open_room(world)
        sent = world.sent_to(asked)
        assert name in sent and sent[name].cache_salt is None and sent[name].priority == MAX_PRIORITY, sent
        num_tokens = len(unpack_i32(sent[name].token_ids))
        assert num_tokens == (4 if len(values) == 1 and name == "P0" else 4 if values == [-1.0] else 3)
        answer(world, asked, values)
    world.router.tick()
    assert [(result.outcome, result.guilty) for result in results] == [
        ("wrong", InstanceKey(Role.PREFILL, 0, world.instance("P0").incarnation))
    ]
    assert world.router.counters.cross_checks == {"wrong": 1} and not world.router.in_flight


def test_another_p_computes_with_the_adapter_of_the_request() -> None:
    world, _ = checking()
    _, room = world.add(adapter="sql")
    assert {name: message.adapter for name, message in world.sent_to(room).items()} == {"P0": "sql", "D0": "sql"}
    answer(world, room, [-1.0])
    world.router.tick()
    assert {message.adapter for message in world.sent_to(open_room(world)).values()} == {"sql"}


def test_the_router_finds_pages_that_were_damaged_on_their_way() -> None:
    world, results = checking()
    _, room = world.add()
    assert world.sent_to(room)["D0"].sampling.transfer_sums
    moved = TransferSums(0, 1, bytes(16), bytes(8) + b"12345678")
    finish = Finish(room, "length", transfer_sums=moved)
    rows = [(0, row(-1.0))]
    world.router.on_tokens(TokenBatch(1, [room], [5], [finish], logprobs=rows))
    world.router.flush()
    world.router.tick()
    (result,) = results
    assert (result.outcome, result.guilty) == ("damaged", None) and result.says.startswith("P0-D0:"), result
    assert world.router.counters.cross_checks == {"damaged": 1} and not world.router.in_flight


def test_it_asks_for_nothing_if_it_is_off_or_there_is_no_second_p_or_the_client_wants_logprobs() -> None:
    world, _ = checking("off")
    _, room = world.add()
    assert world.sent_to(room)["D0"].sampling.logprobs is None
    world, _ = checking()
    client = world.add_client(sampling=SamplingParams(max_tokens=8, logprobs=2))
    room = world.room(client.generation)
    assert world.sent_to(room)["D0"].sampling.logprobs == 2
    answer(world, room, [-1.0, -1.0])
    assert client.generation is not None and len(client.generation.logprobs) == 2
    world.router.tick()
    assert not world.router.in_flight
    world.lose(Role.PREFILL, 1)
    _, room = world.add()
    assert [m.sampling.logprobs for name, m in world.sent_to(room).items() if name[0] == "D"] == [None]


def test_a_check_that_nobody_answers_ends_and_the_next_one_begins() -> None:
    world, results = checking()
    for _ in range(2):
        _, room = world.add()
        answer(world, room, [-1.0] * 4)
    world.router.tick()
    first = open_room(world)
    world.clock.advance(100.0)
    world.router.tick()
    world.router.tick()
    assert open_room(world) != first and world.router.counters.cross_checks == {"unanswered": 1} and not results


def test_a_request_that_ends_before_its_first_token_is_not_checked() -> None:
    world, _ = checking()
    generation, _ = world.add()
    world.router.cancel(generation)
    world.router.tick()
    assert not world.router.in_flight and not world.router.counters.cross_checks
