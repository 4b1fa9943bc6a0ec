"""Requests on a router whose instances change their weights: what is refused waits and is sent again, and no answer is
of two versions unless every change under it was mixed."""

from __future__ import annotations

import msgspec
import pytest
from router_world import ONE_TRY, World, pair, two_pairs

from chitu.errors import RequestTimeout, WeightsChanged
from chitu.protocol import ClusterView
from chitu.protocol.weights import Weights, WeightsOrder
from chitu.types import Role

UNMIXED, MIXED = Weights(1, "h1", "/w1"), Weights(1, "h1", "/w1", True)


def show(world: World, weights: Weights, holds: bool = False, *, have: Weights | None = None) -> None:
    """Publish a view whose instances `have` these weights, or those that it serves."""
    infos = [msgspec.structs.replace(info, weights=weights if have is None else have) for info in world.instances]
    world.router.on_view(ClusterView(1, 9, tuple(infos), weights=WeightsOrder(weights, holds=holds)))


@pytest.mark.parametrize("knows_first", [True, False])
def test_a_request_that_is_refused_for_weights_before_its_first_token_waits_and_is_sent_again(
    knows_first: bool,
) -> None:
    """Even if no failed attempt may be followed by another one. The router knows of the change first, or later."""
    world = pair(retry=ONE_TRY)
    generation, room = world.add()
    if knows_first:
        show(world, Weights(), holds=True)
    world.fails("P0", room, "weights_changed")
    assert sorted(world.cancelled()) == ["D0", "P0"], "D waits for a P that refused, and does not change meanwhile"
    assert world.router.num_sent == 0 and world.router.in_flight == 1
    show(world, UNMIXED, holds=True, have=Weights())
    world.router.tick()
    assert not generation.done and world.room(generation) == room, "it is sent while new ones wait"
    show(world, UNMIXED)
    again = world.room(generation)
    assert again != room and {m.head.weights for m in world.sent_to(again).values()} == {1}
    world.emit(again, 1, 2, 3, 4, finish="length")
    assert generation.finish is not None and generation.take() == [1, 2, 3, 4]
    assert generation.weights == [(0, "h1")]


def test_a_refusal_that_comes_when_the_router_has_the_newest_view_is_followed_by_another_try_at_the_next_tick() -> None:
    world = two_pairs()
    generation, room = world.add()
    for _ in range(30):  # more than any bound of attempts
        world.decode_fails(room, "weights_changed")
        world.clock.advance(0.05)
        world.router.tick()
        room, before = world.room(generation), room
        assert room != before
    assert generation.record.failed == 0 and not generation.record.avoid
    world.emit(room, 1, 2, 3, 4, finish="length")
    assert generation.finish is not None


def test_a_request_that_waits_ends_with_its_time_or_its_client_and_is_not_sent_then() -> None:
    world = pair()
    late, _ = world.add(timeout_s=5.0)
    gone, _ = world.add()
    for generation in (late, gone):
        world.fails("P0", world.room(generation), "weights_changed")
    show(world, Weights(), holds=True)
    world.router.cancel(gone)
    for _ in range(120):
        world.clock.advance(0.05)
        world.router.tick()
    assert isinstance(late.error, RequestTimeout) and gone.done and world.router.in_flight == 0
    sent = len(world.outbox.sent)
    show(world, UNMIXED)
    world.router.tick()
    assert len(world.outbox.sent) == sent


def test_a_request_without_tokens_whose_instance_is_lost_while_the_others_change_waits_for_them() -> None:
    world = pair()
    generation, room = world.add()
    gone = world.instances.pop()
    show(world, UNMIXED, holds=True, have=Weights())
    world.router.on_lost(gone, "killed", True)
    assert not generation.done
    world.join(Role.DECODE, 1)
    assert world.room(generation) != room


@pytest.mark.parametrize("has_died", [True, False])
def test_a_request_whose_p_is_lost_while_new_ones_wait_is_kept_until_d_gives_it_up(has_died: bool) -> None:
    """D may have all that it needs. A cancellation here would come back from D as the request's own failure."""
    world = pair()
    generation, room = world.add()
    gone = world.instances.pop(0)
    assert gone.role is Role.PREFILL
    show(world, UNMIXED, holds=True, have=Weights())
    world.router.on_lost(gone, "for a test", has_died)
    assert world.cancelled() == [] and world.room(generation) == room
    world.decode_fails(room, "prefill_lost")
    assert not generation.done and world.cancelled() == ["D0"]
    world.decode_fails(room, "cancelled")
    assert not generation.done
    world.join(Role.PREFILL, 1)
    again = world.room(generation)
    assert again != room
    world.emit(again, 1, 2, 3, 4, finish="length")
    assert generation.finish is not None and generation.take() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("newest", "goes_on"),
    [
        (UNMIXED, False),
        (MIXED, True),
        (Weights(2, "h2", "/w2", True, unmixed=1), False),  # the first of two changes was not mixed
        (Weights(2, "h2", "/w2", True), True),
        (Weights(3, "h3", "/w3", True, unmixed=2), False),
    ],
)
def test_tokens_are_followed_by_those_of_other_weights_only_if_all_changes_between_were_mixed(
    newest: Weights, goes_on: bool
) -> None:
    world = two_pairs()
    generation, room = world.add()
    world.emit(room, 7)
    show(world, newest)
    world.decode_fails(room, "decode_lost")
    assert generation.done is not goes_on
    if not goes_on:
        assert isinstance(generation.error, WeightsChanged)
