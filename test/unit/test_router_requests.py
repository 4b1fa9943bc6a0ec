"""PDRequestRouter without sockets: what is sent to which instance, and how each request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from router_world import ONE_TRY, World, pair, two_pairs

from chitu.errors import InvalidRequest, NoInstance, RequestCancelled, TooManyRequests
from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    Finish,
    InstanceInfo,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
    TokenBatch,
    UnifiedRequest,
    encode,
    pack_i32,
)
from chitu.protocol.account import PrefillTimes, StageTimes
from chitu.router.attempts import KEPT_RECORDS
from chitu.router.dispatch import max_choices
from chitu.router.generation import GenerateRequest, Generation
from chitu.types import Role


def test_the_decode_half_leaves_before_the_prefill_half_with_one_room() -> None:
    world = pair()
    _, room = world.add()
    (first, decode), (second, prefill) = world.outbox.sent
    assert (first, second) == ("D0", "P0")
    assert isinstance(decode, DecodeRequest) and isinstance(prefill, PrefillRequest)
    assert decode.head == prefill.head and decode.head.room == room
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
    report = StageTimes(PrefillTimes(0.1, 0.2, 0.3), total_s=1.0)
    world.clock.advance(0.75)
    world.tokens([room], [Finish(room, "length", kv_bytes=4096, stages=report)])
    assert world.router.running() == []
    (ended,) = world.router.journal.ended
    assert (ended.state, ended.output_tokens, ended.kv_bytes) == ("finished", 2, 4096)
    assert ended.stages is not None and (ended.stages.compute_s, ended.stages.decode_s) == (0.2, 0.7)
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
    assert (ended.state, ended.error) == (state, error)
    assert ended.stages is not None and not ended.stages.is_reported


def test_the_journal_keeps_the_newest_records_only() -> None:
    world = pair()
    for _ in range(KEPT_RECORDS + 5):
        _, room = world.add()
        world.tokens([room], [Finish(room, "stop")])
    assert len(world.router.journal.ended) == KEPT_RECORDS


# ----------------------------------------------------------------------------------------------------------------------
# The router's own deadline is the request's: P and D know whether an attempt without a token advances.


def test_an_attempt_without_a_token_goes_on_until_an_instance_or_the_requests_deadline_ends_it() -> None:
    world = two_pairs()
    client = world.add_client()
    first = world.room(client.generation)
    world.clock.advance(59.9)
    world.router.tick()
    assert world.room(client.generation) == first
    world.clock.advance(0.2)
    world.router.tick()
    assert client.generation is not None and client.generation.error is not None
    text = "(router.request_timeout_s): attempt 1 waited 60.1 s in PREFILL for the first token of P0-D0"
    assert client.generation.error.code == "request_timeout" and client.generation.error.message.endswith(text)
    assert sorted(world.cancelled()) == ["D0", "P0"] and world.router.in_flight == 0


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
    assert client.generation is not None
    if not finishes:
        assert client.generation.error is not None
        text = "(router.request_timeout_s): attempt 1 waited 61.0 s in DECODE for the last token of P0-D0"
        assert client.generation.error.message.endswith(text)


# ----------------------------------------------------------------------------------------------------------------------
# Choices of one prompt on the router: one message for each of P and D, and a room for each choice.


def sent(world: World) -> list[tuple[str, str]]:
    return [(name, type(message).__name__) for name, message in world.outbox.sent]


def test_choices_go_out_as_one_request_and_each_hears_of_its_own_room() -> None:
    world = pair()
    generations = world.add_choices(3)
    assert sent(world) == [("D0", "DecodeRequest"), ("P0", "PrefillRequest")]
    (_, to_decode), (_, to_prefill) = world.outbox.sent
    assert isinstance(to_decode, DecodeRequest) and isinstance(to_prefill, PrefillRequest)
    assert to_decode.head == to_prefill.head
    assert [fork.room for fork in to_decode.forks] == [world.room(generation) for generation in generations]
    assert [(fork.request_id, fork.seed) for fork in to_decode.forks] == [("id-0", 7), ("id-1", 8), ("id-2", 9)]
    rooms = [world.room(generation) for generation in generations]
    world.router.on_tokens(TokenBatch(1, rooms, [5, 6, 7], [], prompt_logprobs=[(to_decode.head.room, b"lines")]))
    assert [generation.take() for generation in generations] == [[5], [6], [7]]
    assert {generation.prompt_logprobs for generation in generations} == {b"lines"}
    for room in rooms:
        world.emit(room, 8, finish="length")
    assert world.router.in_flight == 0 and not world.router._attempts.groups and not world.cancelled()


def test_p_hears_of_a_cancellation_when_the_last_choice_is_cancelled() -> None:
    world = pair()
    first, second = world.add_choices(2)
    room = world.outbox.sent[0][1].head.room  # type: ignore[attr-defined]
    world.router.cancel(first, is_complete=True)
    assert world.cancelled() == ["D0"]
    world.router.cancel(second)
    ends = [message.room for name, message in world.outbox.sent if isinstance(message, CancelRequest) and name == "P0"]
    assert ends == [room]


@pytest.mark.parametrize("reporter", ["P0", "D0"])
def test_when_the_prompt_fails_each_choice_goes_on_by_itself(reporter: str) -> None:
    world = two_pairs()
    generations = world.add_choices(3)
    name, message = world.outbox.sent[0]
    of_pair = {"P0": "P" + name[1], "D0": name}
    rooms = [world.room(generation) for generation in generations]
    if reporter == "P0":
        world.fails(of_pair["P0"], message.head.room, "transfer_failed")  # type: ignore[attr-defined]
    else:
        for room in rooms:
            world.decode_fails(room, "transfer_failed")
    assert all(world.room(generation) not in rooms for generation in generations)
    for generation in generations:
        halves = world.sent_to(world.room(generation))
        assert len(halves) == 2 and not next(h for n, h in halves.items() if n[0] == "D").forks
        assert name not in halves
    assert not world.router._attempts.groups


def test_a_prompt_counts_once_where_prompts_are_counted_and_choices_where_these_are() -> None:
    world = pair()
    generations = world.add_choices(4, num_tokens=10)
    loads = {member.key.role: member.load for member in world.router._members.by_link.values()}
    assert loads[Role.PREFILL].work == 10, "prompt tokens"
    assert loads[Role.DECODE].work == 4, "requests"
    for generation in generations:
        world.emit(world.room(generation), 5, finish="length")
    assert [load.work for load in loads.values()] == [0, 0]


def test_of_more_choices_than_d_can_start_together_several_messages_are_made() -> None:
    world = pair(max_in_flight=20)
    world.add_choices(9)
    groups = [len(message.forks) for _, message in world.outbox.sent if isinstance(message, DecodeRequest)]
    assert groups == [4, 4, 0], "four slots; the last one goes by itself"


@pytest.mark.parametrize(
    ("slots", "pages", "num_tokens", "most"),
    [(0, 0, 5, 1), (8, 100, 16, 8), (8, 4, 17, 2), (8, 2, 17, 1), (8, 2, 32, 8), (10**6, 10**6, 5, MAX_FORKS)],
)
def test_a_message_has_as_many_choices_as_d_has_slots_and_pages_for(
    slots: int, pages: int, num_tokens: int, most: int
) -> None:
    layout = pair().instances[0].layout
    info = InstanceInfo(Role.DECODE, 0, 1, "h", 1, 2, layout, 512, num_slots=slots, num_pages=pages)
    assert layout.page_size == 16 and max_choices(info, num_tokens) == most


def test_all_choices_are_taken_or_none() -> None:
    world = pair(retry=ONE_TRY)
    world.outbox.full = set(world.outbox.peers)
    with pytest.raises(Exception, match="accepts no requests"):
        world.add_choices(3)
    assert world.router.in_flight == 0 and not world.router._attempts.groups
    world = pair(max_in_flight=8)
    world.add_choices(6)
    with pytest.raises(Exception, match="max_in_flight"):
        world.add_choices(3)
    assert world.router.in_flight == 6


def test_a_choice_that_its_client_cancels_ends_alone() -> None:
    world = pair()
    first, second = world.add_choices(2)
    world.router.cancel(first)
    assert isinstance(first.error, RequestCancelled) and second.error is None and not second.done


def test_one_call_sends_one_message_so_that_others_have_a_turn_before_the_next() -> None:
    """A D takes at most as many choices together as it has slots."""
    world = pair(max_in_flight=16)
    requests = [GenerateRequest(f"id-{i}", pack_i32([1]), 1, SamplingParams(max_tokens=4, seed=i)) for i in range(9)]
    sizes = []
    while requests:
        before = len(world.outbox.sent)
        added = world.router.add_choices(requests, world.wake)
        assert [name for name, _ in world.outbox.sent[before:]] == ["D0", "P0"]
        sizes.append(len(added))
        requests = requests[len(added) :]
    assert sizes == [4, 4, 1]
