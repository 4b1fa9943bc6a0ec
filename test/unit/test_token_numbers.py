"""Token messages are numbered: what is lost with a connection is noticed, and nobody gets a text with a hole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, two_pairs

from chitu.config.schema import BreakerConfig
from chitu.instance.token_manager import BEAT_S, TokenManager
from chitu.protocol import ClusterView, Finish, TokenBatch, token_codec
from chitu.router.routing import InstanceKey
from chitu.router.token_numbers import TokenNumbers
from chitu.types import Role

ROOM, OTHER = b"r" * 16, b"o" * 16
D0 = InstanceKey(Role.DECODE, 0, 1)
ROUTER, WORKER = 0, 71


class Ports:
    """Token ports that keep what they are sent, or take nothing."""

    def __init__(self, accepts: bool = True) -> None:
        self.sent: list[TokenBatch] = []
        self._accepts = accepts

    def send(self, frame: bytes) -> bool:
        self.sent.append(token_codec.decode(frame))
        return self._accepts

    def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------------- D


def frames_of(flushes: list[tuple[float, bytes | None]], accepts: bool = True) -> list[TokenBatch]:
    """What a token manager sends: a token of the room (or none) and a flush at each time."""
    port = Ports(accepts)
    manager = TokenManager(1, port.send)
    for now_s, room in flushes:
        if room is not None:
            manager.push(room, 5)
        manager.flush(now_s)
    return port.sent


def test_messages_count_from_1_and_those_that_could_not_be_sent_count_too() -> None:
    steps: list[tuple[float, bytes | None]] = [(0.0, ROOM), (0.1, None), (0.2, OTHER)]
    assert [batch.number for batch in frames_of(steps)] == [1, 2]
    assert [batch.number for batch in frames_of(steps, accepts=False)] == [1, 2]


def test_a_port_that_got_messages_gets_an_empty_one_in_silence_and_no_other_does() -> None:
    assert frames_of([(10.0, None), (20.0, None)]) == []
    sent = frames_of([(0.0, ROOM), (BEAT_S - 0.1, None), (BEAT_S, None), (BEAT_S + 0.1, None), (2 * BEAT_S, None)])
    assert [(batch.number, batch.rooms) for batch in sent] == [(1, [ROOM]), (2, []), (3, [])]


def test_a_new_router_is_counted_for_anew_and_gets_nothing_of_before_and_api_processes_are_counted_apart() -> None:
    router, worker = Ports(), Ports()
    manager = TokenManager(1, router.send, lambda port: worker)
    manager.expect(WORKER, 5001)
    for _ in range(3):
        manager.push(ROOM, 5)
        manager.push(OTHER, 6, WORKER)
        manager.flush()
    manager.push(ROOM, 5)
    manager.push(OTHER, 6, WORKER)
    manager.restart()
    manager.flush()
    manager.push(OTHER, 7)
    manager.flush()
    assert [(b.epoch, b.number, b.rooms) for b in router.sent] == [
        *((0, number, [ROOM]) for number in (1, 2, 3)),
        (1, 1, [OTHER]),
    ]
    assert [(b.epoch, b.number) for b in worker.sent] == [(0, 1), (0, 2), (0, 3), (0, 4)]


# ------------------------------------------------------------------------------------------------------- the numbers


def batch(number: int, epoch: int = 0, incarnation: int = 1) -> TokenBatch:
    return TokenBatch(incarnation, [], [], [], number, epoch)


def joined(*keys: InstanceKey) -> TokenNumbers:
    numbers = TokenNumbers()
    for key in keys:
        numbers.on_joined(key)
    return numbers


@given(st.lists(st.tuples(st.sampled_from(["send", "send", "lose", "router", "join again"]), st.booleans())))
def test_a_hole_is_always_seen_at_the_next_message_and_there_is_no_false_alarm(script: list[tuple[str, bool]]) -> None:
    """A real TokenManager, an API process or the router itself, losses, routers that take over, and leases that end."""
    port = Ports()
    manager = TokenManager(1, port.send, lambda _: port)
    manager.expect(WORKER, 5001)
    numbers = {ROUTER: joined(D0), WORKER: joined(D0)}
    is_owed = {ROUTER: False, WORKER: False}
    for what, to_worker in script:
        to = WORKER if to_worker else ROUTER
        if what == "router":
            manager.restart()
            numbers[ROUTER], is_owed[ROUTER] = joined(D0), False
        elif what == "join again":
            numbers[to].on_joined(D0)
        else:
            manager.push(ROOM, 5, to)
            manager.flush()
            message = port.sent.pop()
            if what == "lose":
                is_owed[to] = True
            else:
                assert (numbers[to].missing(message) is not None) == is_owed[to]
                is_owed[to] = False


def test_the_first_messages_can_be_the_lost_ones() -> None:
    assert joined(D0).missing(batch(3)) == (D0, 2)
    numbers = joined(D0)
    assert numbers.missing(batch(1)) is None
    assert numbers.missing(batch(2, epoch=1)) == (D0, 1), "after a router, the second message looks like in order"


def test_each_instance_is_counted_for_itself_and_only_its_newest_process() -> None:
    other, newer = InstanceKey(Role.DECODE, 1, 2), InstanceKey(Role.DECODE, 0, 3)
    numbers = joined(D0, other)
    for number in (1, 2):
        assert numbers.missing(batch(number)) is None and numbers.missing(batch(number, incarnation=2)) is None
    assert numbers.missing(batch(7, incarnation=9)) is None, "of nobody who joined"
    assert numbers.missing(batch(0)) is None and numbers.missing(batch(3)) is None, "0 is not counted"
    numbers.on_joined(newer)
    assert numbers.missing(batch(9)) is None, "an old process, with what it had sent before it died"
    assert numbers.missing(batch(1, incarnation=3)) is None
    assert numbers.missing(batch(4, incarnation=2)) == (other, 1)


# -------------------------------------------------------------------------------------------------------- the router


def send(world: World, number: int, room: bytes, *tokens: int, finish: str = "", name: str = "D0") -> None:
    finished = [Finish(room, finish)] if finish else []
    incarnation = world.instance(name).incarnation
    world.router.on_tokens(TokenBatch(incarnation, [room] * len(tokens), list(tokens), finished, number))
    world.router.flush()


def test_a_missing_message_moves_what_decodes_there_behind_the_last_token_in_order() -> None:
    world = two_pairs()
    client, elsewhere = world.add_client(), world.add_client()
    old, other = world.room(client.generation), world.room(elsewhere.generation)
    assert (world.pair(client.generation), world.pair(elsewhere.generation)) == ("P0-D0", "P1-D1")
    send(world, 1, old, 10)
    send(world, 1, other, 30, name="D1")
    send(world, 2, old, 11)
    send(world, 4, old, 13)
    assert client.tokens == [10, 11], "the token behind the hole must not be shown"
    new = world.room(client.generation)
    assert new != old and client.generation is not None and client.generation.num_attempts == 2
    assert world.pair(client.generation)[-2:] == "D1"
    assert world.room(elsewhere.generation) == other, "what decodes elsewhere has lost nothing"
    send(world, 5, old, 14)
    assert client.tokens == [10, 11]
    send(world, 2, new, 12, 13, finish="length", name="D1")
    assert client.tokens == [10, 11, 12, 13] and client.generation.error is None


def test_a_lost_end_is_noticed_by_the_empty_message_after_it() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 1, old, 10)
    send(world, 3, old)
    assert world.room(client.generation) != old


def test_a_message_that_cannot_be_read_is_a_lost_one() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 1, old, 10)
    incarnation = world.instance("D0").incarnation
    world.router.on_tokens(TokenBatch(incarnation, [old], [11, 12], [], 2))
    send(world, 3, old, 13)
    assert client.tokens == [10] and world.room(client.generation) != old


@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
def test_the_only_d_goes_on_itself_and_one_cut_opens_no_breaker(role: Role) -> None:
    roles = (role,) if role is Role.UNIFIED else (Role.PREFILL, role)
    world = World(*roles, breaker=BreakerConfig(failures=2))
    name = f"{role.letter}0"
    clients = [world.add_client() for _ in range(4)]
    for number, client in enumerate(clients, 1):
        send(world, number, world.room(client.generation), 10, name=name)
    send(world, 9, ROOM, name=name)
    for number, client in enumerate(clients, 10):
        send(world, number, world.room(client.generation), 11, finish="length", name=name)
    assert [client.tokens for client in clients] == [[10, 11]] * 4
    metrics = world.router.metrics()
    assert metrics.retries == {"tokens_lost": 4} and not metrics.breaker_openings


def test_who_comes_back_after_its_lease_ended_is_checked_from_the_first_message_on() -> None:
    for number, is_whole in ((2, True), (3, False)):
        world = World(Role.PREFILL, Role.DECODE)
        instance = world.instance("D0")
        send(world, 1, OTHER, 10)
        world.lose(Role.DECODE)
        world.instances.append(instance)
        world.router.on_joined(instance)
        world.router.on_view(ClusterView(1, 3, tuple(world.instances)))
        client = world.add_client()
        room = world.room(client.generation)
        send(world, number, room, 11)
        assert client.tokens == [11] * is_whole and (world.room(client.generation) == room) == is_whole
