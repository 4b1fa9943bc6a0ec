"""Choices of one prompt on the router: one message for each of P and D, and a room for each choice."""

from __future__ import annotations

import pytest
from router_world import ONE_TRY, World, pair, two_pairs

from chitu.errors import RequestCancelled
from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    InstanceInfo,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
    pack_i32,
)
from chitu.router.dispatch import max_choices
from chitu.router.request import GenerateRequest
from chitu.types import Role


def sent(world: World) -> list[tuple[str, str]]:
    return [(name, type(message).__name__) for name, message in world.outbox.sent]


def test_choices_go_out_as_one_request_and_each_hears_of_its_own_room() -> None:
    world = pair()
    generations = world.add_choices(3)
    assert sent(world) == [("D0", "DecodeRequest"), ("P0", "PrefillRequest")]
    (_, to_decode), (_, to_prefill) = world.outbox.sent
    assert isinstance(to_decode, DecodeRequest) and isinstance(to_prefill, PrefillRequest)
    assert to_decode.room == to_prefill.room
    assert [fork.room for fork in to_decode.forks] == [world.room(generation) for generation in generations]
    assert [(fork.request_id, fork.seed) for fork in to_decode.forks] == [("id-0", 7), ("id-1", 8), ("id-2", 9)]
    rooms = [world.room(generation) for generation in generations]
    world.router.on_tokens(TokenBatch(1, rooms, [5, 6, 7], [], prompt_logprobs=[(to_decode.room, b"lines")]))
    assert [generation.take() for generation in generations] == [[5], [6], [7]]
    assert {generation.prompt_logprobs for generation in generations} == {b"lines"}
    for room in rooms:
        world.emit(room, 8, finish="length")
    assert world.router.in_flight == 0 and not world.router._attempts.groups and not world.cancelled()


def test_p_hears_of_a_cancellation_when_the_last_choice_is_cancelled() -> None:
    world = pair()
    first, second = world.add_choices(2)
    room = world.outbox.sent[0][1].room  # type: ignore[attr-defined]
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
        world.fails(of_pair["P0"], message.room, "transfer_failed")  # type: ignore[attr-defined]
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
    loads = {key.role: load for key, load in world.router._selector._loads._loads.items()}
    assert loads[Role.PREFILL].own == 10, "prompt tokens"
    assert loads[Role.DECODE].own == 4, "requests"
    for generation in generations:
        world.emit(world.room(generation), 5, finish="length")
    assert [load.own for load in loads.values()] == [0, 0]


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
    with pytest.raises(Exception, match="does not take requests"):
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
