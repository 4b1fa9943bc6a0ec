"""PDRequestRouter without sockets: what is sent to which instance, and how each request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from router_world import ONE_TRY, World, pair

from chitu.errors import InvalidRequest, NoInstance, TooManyRequests
from chitu.protocol import (
    CancelRequest,
    DecodeRequest,
    Finish,
    PrefillRequest,
    PrefillTimes,
    RequestFailed,
    StageTimes,
    TokenBatch,
    UnifiedRequest,
    encode,
)
from chitu.router.request import Generation
from chitu.router.request_journal import KEPT_RECORDS
from chitu.types import Role


def test_the_decode_half_leaves_before_the_prefill_half_with_one_room() -> None:
    world = pair()
    _, room = world.add()
    (first, decode), (second, prefill) = world.outbox.sent
    assert (first, second) == ("D0", "P0")
    assert isinstance(decode, DecodeRequest) and isinstance(prefill, PrefillRequest)
    assert decode.room == prefill.room == room
    assert (decode.prefill_rank, decode.prefill_incarnation) == (0, 1)


def test_tokens_and_the_end_arrive_with_one_wake_per_turn() -> None:
    world = pair()
    generation, room = world.add()
    world.tokens([room, room], [Finish(room, "length")])
    assert (generation.take(), world.wakes, generation.done) == ([0, 1], 1, True)
    assert generation.error is None and generation.finish is not None
    assert world.cancelled() == []
    world.tokens([room])
    assert world.router.counters.stale_tokens == 1 and generation.take() == []


def test_all_frames_of_a_turn_are_one_wake_and_a_bad_one_takes_none_with_it() -> None:
    world = pair()
    generation, room = world.add()
    good = [encode(TokenBatch(1, [room], [token], [])) for token in (5, 6, 7)]
    world.router.on_token_frames([good[0], b"\xc1", good[1], encode(CancelRequest(room)), good[2]])
    assert (generation.take(), world.wakes) == ([5, 6, 7], 1)
    assert world.router.counters.bad_token_messages == 2
    world.router.on_token_frames([encode(TokenBatch(1, [room], [8], []))])
    assert (generation.take(), world.wakes) == ([8], 2)


def test_who_wants_no_tokens_is_woken_at_the_end_only() -> None:
    world = pair()
    generation, room = world.add(wake_per_token=False)
    for token in (1, 2):
        world.router.on_token_frames([encode(TokenBatch(1, [room], [token], []))])
    assert (world.wakes, generation.tokens) == (0, [1, 2])
    world.router.on_token_frames([encode(TokenBatch(1, [room], [3], [Finish(room, "length")]))])
    assert (world.wakes, generation.take(), generation.done) == (1, [1, 2, 3], True)


def test_a_token_message_costs_the_router_one_call() -> None:
    """A request has up to a message per token, so a call per message costs more than all others of a request."""
    world = pair()
    _, room = world.add(wake_per_token=False)
    link, calls = world.link("D0"), 0
    frames = [encode(TokenBatch(1, [room], [5], [], number, link)) for number in range(1, 101)]

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        world.router.on_token_frames(frames)
    finally:
        sys.setprofile(None)
    assert world.router.counters.tokens == 100
    assert calls < 100 + 50, "the link's, and what the first token and the turn take"


def test_a_unified_instance_gets_the_whole_request() -> None:
    world = World(Role.UNIFIED)
    world.add()
    assert isinstance(world.outbox.sent[0][1], UnifiedRequest)
    world.lose(Role.UNIFIED)
    with pytest.raises(NoInstance):
        world.add()


def test_a_failure_of_prefill_fails_the_request_and_cancels_both() -> None:
    world = pair(retry=ONE_TRY)
    generation, room = world.add()
    world.router.on_request_failed(RequestFailed(Role.PREFILL, 0, 99, room, "capacity", "an old one"))
    assert not generation.done
    world.router.on_request_failed(RequestFailed(Role.PREFILL, 0, 1, room, "capacity", "too small"))
    assert generation.error is not None and generation.error.code == "capacity"
    assert sorted(world.cancelled()) == ["D0", "P0"] and world.wakes == 1


def test_an_error_of_decode_is_typed() -> None:
    world = pair(retry=ONE_TRY)
    generation, room = world.add()
    world.tokens([], [Finish(room, "error", "prefill_lost", "P0 died")])
    assert generation.error is not None and generation.error.code == "prefill_lost"


def test_a_dead_decode_fails_at_once_and_a_dead_prefill_waits_for_decodes_verdict() -> None:
    world = pair()
    generation, room = world.add()
    world.lose(Role.PREFILL)
    assert not generation.done
    world.tokens([room])
    world.lose(Role.DECODE)
    assert generation.error is not None and generation.error.code == "decode_lost"
    assert world.router.in_flight == 0


def test_cancel_is_idempotent_and_reaches_both() -> None:
    world = pair()
    generation, _ = world.add()
    world.router.cancel(generation)
    world.router.cancel(generation)
    assert sorted(world.cancelled()) == ["D0", "P0"]
    assert world.router.in_flight == 0


def test_bounds_on_number_and_time() -> None:
    world = World(Role.PREFILL, Role.DECODE, max_in_flight=2)
    generations = [world.add()[0] for _ in range(2)]
    with pytest.raises(TooManyRequests) as refused:
        world.add()
    assert refused.value.http_status == 429
    world.clock.advance(61)
    world.router.tick()
    assert [g.error.code for g in generations if g.error] == ["request_timeout"] * 2
    world.add()


def test_prompt_tokens_in_flight_are_bounded_and_come_back_however_a_request_ends() -> None:
    world = World(Role.PREFILL, Role.PREFILL, Role.DECODE, max_tokens_in_flight=6)
    (first, _), (second, _) = world.add(), world.add()
    with pytest.raises(TooManyRequests, match="max_tokens_in_flight"):
        world.add()
    with pytest.raises(TooManyRequests, match="max_tokens_in_flight"):
        world.router.require_admission()
    with pytest.raises(InvalidRequest, match="max_tokens_in_flight") as refused:
        world.router.require_room_for(2, 7)
    assert refused.value.param == "prompt"
    world.router.cancel(first)
    world.router.require_room_for(1, 3)
    third, _ = world.add()
    world.lose(Role.PREFILL)  # its prefill is tried elsewhere, and counts once
    with pytest.raises(TooManyRequests):
        world.router.require_room_for(1, 3)
    world.clock.advance(61)
    world.router.tick()
    assert second.done and third.done
    world.router.require_room_for(2, 6)


def test_the_journal_tells_where_a_request_is_and_where_its_time_went() -> None:
    world = pair()
    generation, room = world.add()
    (running,) = world.router.running()
    assert (running.state, running.prefill, running.decode, running.prompt_tokens) == ("prefill", "P0", "D0", 3)
    world.clock.advance(0.25)
    world.tokens([room])
    generation.take()
    (running,) = world.router.running()
    assert (running.state, running.output_tokens) == ("decode", 1)
    assert running.first_token_at_s == running.created_at_s + 0.25
    stages = StageTimes(PrefillTimes(0.1, 0.2, 0.3), total_s=1.0)
    world.clock.advance(0.75)
    world.tokens([room], [Finish(room, "length", kv_bytes=4096, stages=stages)])
    assert world.router.running() == []
    (ended,) = world.router.journal.ended
    assert (ended.state, ended.output_tokens, ended.kv_bytes, ended.stages) == ("finished", 2, 4096, stages)
    assert ended.ended_at_s == ended.created_at_s + 1.0


@pytest.mark.parametrize(("told", "known"), [(0, 0), (2, 2), (5, 3), (-1, 0)])
def test_what_was_cached_of_a_prompt_is_known_with_its_first_token(told: int, known: int) -> None:
    world = pair()
    generation, room = world.add()
    world.router.on_tokens(TokenBatch(1, [room], [7], [], cached=[(room, told), (bytes(16), 1)]))
    world.router.cancel(generation, is_complete=True)  # a stop string: no instance reports its end
    assert generation.cached_tokens == world.router.journal.ended[-1].cached_tokens == known


@pytest.mark.parametrize(
    ("end", "state", "error"),
    [
        (lambda world, generation: world.router.cancel(generation), "cancelled", ""),
        (lambda world, generation: world.router.cancel(generation, is_complete=True), "finished", ""),
        (lambda world, generation: world.lose(Role.DECODE), "failed", "decode_lost"),
    ],
    ids=["client gone", "stop string", "D lost"],
)
def test_the_journal_tells_how_a_request_ended(
    end: Callable[[World, Generation], None], state: str, error: str
) -> None:
    world = pair()
    version = world.router.journal.version
    generation, _ = world.add()
    assert world.router.journal.version > version
    end(world, generation)
    (ended,) = world.router.journal.ended
    assert (ended.state, ended.error, ended.stages) == (state, error, None)


def test_the_journal_keeps_the_newest_records_only() -> None:
    world = pair()
    for _ in range(KEPT_RECORDS + 5):
        _, room = world.add()
        world.tokens([room], [Finish(room, "stop")])
    assert len(world.router.journal.ended) == KEPT_RECORDS
