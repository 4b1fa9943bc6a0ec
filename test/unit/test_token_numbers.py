"""Token messages are numbered: what is lost with a connection is noticed, and nobody gets a text with a hole."""

from __future__ import annotations

from router_world import World, two_pairs

from chitu.messages import Finish, TokenBatch, token_codec
from chitu.token_manager import BEAT_S, TokenManager
from chitu.types import Role

ROOM, OTHER = b"r" * 16, b"o" * 16


def frames_of(flushes: list[tuple[float, bytes | None]], accepts: bool = True) -> list[TokenBatch]:
    """What a token manager sends: a token of the room (or none) and a flush at each time."""
    sent: list[TokenBatch] = []

    def send(frame: bytes) -> bool:
        sent.append(token_codec.decode(frame))
        return accepts

    manager = TokenManager(1, send)
    for now_s, room in flushes:
        if room is not None:
            manager.push(room, 5)
        manager.flush(now_s)
    return sent


def test_messages_count_from_1_and_those_that_could_not_be_sent_count_too() -> None:
    steps: list[tuple[float, bytes | None]] = [(0.0, ROOM), (0.1, None), (0.2, OTHER)]
    assert [batch.number for batch in frames_of(steps)] == [1, 2]
    assert [batch.number for batch in frames_of(steps, accepts=False)] == [1, 2]


def test_a_port_that_got_messages_gets_an_empty_one_in_silence_and_no_other_does() -> None:
    assert frames_of([(10.0, None), (20.0, None)]) == []
    sent = frames_of([(0.0, ROOM), (BEAT_S - 0.1, None), (BEAT_S, None), (BEAT_S + 0.1, None), (2 * BEAT_S, None)])
    assert [(batch.number, batch.rooms) for batch in sent] == [(1, [ROOM]), (2, []), (3, [])]


def send(world: World, number: int, room: bytes, *tokens: int, finish: str = "") -> None:
    finished = [Finish(room, finish)] if finish else []
    world.router.on_tokens(TokenBatch(1, [room] * len(tokens), list(tokens), finished, number))
    world.router.flush()


def test_a_missing_message_moves_what_decodes_there_behind_the_last_token_in_order() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 7, old, 10)  # the first one seen may have any number
    send(world, 8, old, 11)
    send(world, 10, old, 13)
    assert client.tokens == [10, 11], "the token behind the hole must not be shown"
    new = world.room(client.generation)
    assert new != old and client.generation is not None and client.generation.num_attempts == 2
    send(world, 11, old, 14)
    assert client.tokens == [10, 11]
    send(world, 12, new, 12, 13, finish="length")
    assert client.tokens == [10, 11, 12, 13] and client.generation.error is None


def test_a_lost_end_is_noticed_by_the_empty_message_after_it() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 1, old, 10)
    send(world, 3, old)
    assert world.room(client.generation) != old


def test_an_instance_that_joins_again_may_go_on_counting() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 1, old, 10)
    instances = [i for i in world.instances if i.role is Role.DECODE]
    for instance in instances:  # the same incarnation, as after a long cut
        world.router.on_joined(instance)
    send(world, 9, old, 11)
    assert client.tokens == [10, 11] and world.room(client.generation) == old
