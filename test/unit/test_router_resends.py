"""What is sent again over a broken connection: tokens to the router, requests to an instance."""

from __future__ import annotations

from typing import Any

import pytest
from router_world import World, pair, two_pairs

from chitu.config.schema import BreakerConfig, DeadlineConfig
from chitu.instance.token_manager import FORMER_LINKS, TokenManager
from chitu.net.link import LinkReceivers
from chitu.protocol import (
    CancelRequest,
    ClusterView,
    Finish,
    Heartbeat,
    InstanceInfo,
    LinkAck,
    LoadReport,
    TokenBatch,
    token_codec,
)
from chitu.router.candidates import instance_key
from chitu.types import Role

# ----------------------------------------------------------------------------------------------------------------------
# Tokens over a link from D to the router: what a broken connection lost is sent again, and both ends know what was
# given up.


INTERVAL_S, PATIENCE_S = 0.5, 3.0
DEADLINES = DeadlineConfig(heartbeat_interval_s=INTERVAL_S, lease_s=PATIENCE_S)
LINK = 70


def room_in(message: Any) -> bytes:
    return message.room if isinstance(message, CancelRequest) else message.head.room


class Port:
    def __init__(self) -> None:
        self.sent: list[TokenBatch] = []

    def send(self, frame: bytes) -> bool:
        self.sent.append(token_codec.decode(frame))
        return True

    def close(self) -> None: ...


ROOM = b"r" * 16


def test_each_link_of_d_counts_from_1_and_a_request_of_a_former_one_is_refused() -> None:
    router, other = Port(), Port()
    manager = TokenManager(1, router.send, other.send)
    assert manager.expect(1, 9)
    assert manager.expect(0, LINK)
    for now_s in (0.0, 0.1):
        manager.push(ROOM, 5)
        manager.push(ROOM, 6, 1)
        manager.flush(now_s)
    assert [(b.link, b.number, b.num_kept) for b in router.sent] == [(LINK, 1, 0), (LINK, 2, 1)]
    assert [(b.link, b.number, b.num_kept) for b in other.sent] == [(9, 1, 0), (9, 2, 1)]
    manager.push(ROOM, 5)
    manager.restart()
    manager.flush(0.2)
    assert len(router.sent) == 2, "a new router gets nothing of before"
    assert not manager.expect(0, LINK)
    for link in range(100, 100 + FORMER_LINKS + 3):
        assert manager.expect(0, link)
        manager.push(ROOM, 5)
        manager.flush(0.3)
        assert (router.sent[-1].link, router.sent[-1].number) == (link, 1)
    assert not manager.expect(0, 110)


def test_d_sends_again_what_its_router_has_not_and_says_of_what_it_gave_up() -> None:
    port = Port()
    manager = TokenManager(1, port.send, repeat_s=INTERVAL_S, patience_s=PATIENCE_S)
    manager.expect(0, LINK)
    for number in range(3):
        manager.push(ROOM, number)
        manager.flush(0.0)
    manager.take_ack(LinkAck(LINK + 1, 3))
    manager.take_ack(LinkAck(LINK, 1, has_gap=True))
    manager.flush(0.1)
    assert [b.number for b in port.sent] == [1, 2, 3, 2, 3]
    now_s = 0.1
    while not manager.tokens_dropped:
        now_s += INTERVAL_S
        manager.take_ack(LinkAck(LINK, 1))
        manager.flush(now_s)
        assert now_s < PATIENCE_S + 3 * INTERVAL_S
    assert manager.tokens_dropped == 2 and now_s >= PATIENCE_S
    last = port.sent[-1]
    assert (last.number, last.num_kept, last.tokens) == (4, 0, [])


def send(
    world: World, number: int, room: bytes, *tokens: int, finish: str = "", name: str = "D0", kept: int = 0
) -> None:
    finished = [Finish(room, finish)] if finish else []
    instance = world.instance(name)
    link = world.link(name)
    batch = TokenBatch(instance.incarnation, [room] * len(tokens), list(tokens), finished, number, link, kept)
    world.router.on_tokens(batch)
    world.router.flush()


def acks(world: World, name: str = "D0") -> list[LinkAck]:
    return [message for to, message in world.outbox.sent if to == name and isinstance(message, LinkAck)]


def test_what_comes_from_behind_a_gap_is_asked_for_at_once_and_the_client_sees_every_token_once() -> None:
    world = two_pairs()
    client = world.add_client()
    room = world.room(client.generation)
    send(world, 1, room, 10)
    send(world, 3, room, 12, kept=1)
    send(world, 4, room, 13, kept=2)
    assert client.tokens == [10] and acks(world) == [LinkAck(world.link("D0"), 1, True)]
    send(world, 2, room, 11)
    send(world, 3, room, 12, kept=1)
    send(world, 3, room, 12, kept=1)
    send(world, 4, room, 13, finish="length", kept=2)
    assert client.tokens == [10, 11, 12, 13] and world.router.metrics().retries == {}


def test_what_was_given_up_moves_what_decodes_there_behind_the_last_token_in_order() -> None:
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


def test_an_end_that_was_given_up_is_noticed_by_the_empty_message_behind_it() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 1, old, 10)
    send(world, 3, old)
    assert world.room(client.generation) != old


def test_the_first_messages_can_be_those_that_were_given_up() -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    send(world, 3, old, 12)
    assert world.room(client.generation) != old and client.tokens == []


@pytest.mark.parametrize("role", [Role.DECODE, Role.UNIFIED])
def test_the_only_d_goes_on_itself_and_one_loss_opens_no_breaker(role: Role) -> None:
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


def test_tokens_of_another_routers_link_and_of_one_that_ended_reach_nobody() -> None:
    world = two_pairs()
    client = world.add_client()
    room, link = world.room(client.generation), world.link("D0")
    world.router.on_tokens(TokenBatch(1, [room], [9], [], 1, link + 1))
    send(world, 1, room, 10)
    d0 = world.instance("D0")
    world.router.on_lost(d0, "silent", has_died=False)
    world.router.on_joined(d0)
    world.router.on_view(ClusterView(1, 3, tuple(world.instances)))
    late = world.room(client.generation)
    world.router.on_tokens(TokenBatch(1, [late], [9], [], 2, link))
    world.router.flush()
    assert client.tokens == [10] and world.link("D0") != link


# ----------------------------------------------------------------------------------------------------------------------
# Requests and cancellations over links from the router to P and D: what a broken connection lost is sent again.


class Instances:
    """The receiving sides of a `World`: they take what was sent, except what the test marks as lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.receivers = {instance_key(i): LinkReceivers() for i in world.instances}
        self.taken: list[tuple[str, object]] = []
        self.num_delivered = 0
        self.reads = 0
        world.clock.advance(INTERVAL_S)

    def deliver(self, *lost: str) -> None:
        """Deliver what was sent since the last call; everything for the instances in `lost` is lost."""
        for name, message in self.world.outbox.sent[self.num_delivered :]:
            if name in lost or isinstance(message, LinkAck):
                continue
            receivers = self.receivers[instance_key(self.world.instance(name))]
            if receivers.take(message.stamp):  # type: ignore[attr-defined]
                self.taken.append((name, message))
        self.num_delivered = len(self.world.outbox.sent)
        self.reads += 1

    def beat(self) -> None:
        self.world.clock.advance(INTERVAL_S)
        for instance in list(self.world.instances):
            self.world.router.on_heartbeat(self.heartbeat(instance))

    def heartbeat(self, instance: InstanceInfo) -> Heartbeat:
        said = self.receivers[instance_key(instance)].acks()
        return Heartbeat(instance.role, instance.engine_rank, instance.incarnation, LoadReport(), said, self.reads)


@pytest.mark.parametrize("name", ["P0", "D0"])
def test_a_lost_half_and_the_cancellation_behind_it_come_again_in_their_order(name: str) -> None:
    world = pair()
    instances = Instances(world)
    generation, room = world.add()
    instances.deliver(name)
    world.router.cancel(generation)
    instances.deliver(name)
    for _ in range(3):
        instances.beat()
        instances.deliver()
    kinds = [isinstance(m, CancelRequest) for to, m in instances.taken if to == name and room_in(m) == room]
    assert kinds == [False, True] and world.router.metrics().retries == {}
    count = len(world.outbox.sent)
    instances.beat()
    sent = world.outbox.sent[count:]
    assert [to for to, m in sent if isinstance(m, LinkAck)] == ["P0", "D0"] and len(sent) == 2, "only the answers"


@pytest.mark.parametrize("name", ["P0", "D0"])
def test_a_cancellation_that_was_given_up_comes_as_soon_as_something_comes_through(name: str) -> None:
    """The request to cancel was taken, so it must end; and the receiver must learn that an earlier message is gone."""
    world = pair(deadlines=DEADLINES)
    instances = Instances(world)
    generation, room = world.add()
    instances.deliver()
    world.router.cancel(generation)
    start_s = world.clock.monotonic()
    while world.clock.monotonic() - start_s <= PATIENCE_S + 3 * INTERVAL_S:
        instances.deliver(name)
        instances.beat()
    for _ in range(3):
        instances.deliver()
        instances.beat()
    kinds = [isinstance(m, CancelRequest) for to, m in instances.taken if to == name and room_in(m) == room]
    assert kinds == [False, True]


def test_late_and_repeated_words_and_those_for_other_processes_of_the_router_change_nothing() -> None:
    world = two_pairs()
    instances = Instances(world)
    client = world.add_client()
    room, link, d0 = world.room(client.generation), world.link("D0"), world.instance("D0")
    instances.deliver("D0")
    for incarnation, other_link in ((d0.incarnation, link + 1), (d0.incarnation + 70, link)):
        said = (LinkAck(other_link, 9),)
        world.router.on_heartbeat(Heartbeat(d0.role, 0, incarnation, LoadReport(), said, 1))
    late = instances.heartbeat(d0)
    for _ in range(3):
        instances.beat()
        instances.deliver()
    world.router.on_heartbeat(late)
    assert world.room(client.generation) == room
    assert [room_in(m) for to, m in instances.taken if to == "D0"] == [room]


def test_an_instance_that_comes_back_has_another_link() -> None:
    world = two_pairs()
    world.add()
    d0, link = world.instance("D0"), world.link("D0")
    old = list(world.outbox.sent)
    world.router.on_lost(d0, "silent", has_died=False)
    world.router.on_joined(d0)
    world.router.on_view(ClusterView(1, 3, tuple(world.instances)))
    for _ in range(2):
        world.add()
    new = [m for name, m in world.outbox.sent[len(old) :] if name == "D0" and not isinstance(m, CancelRequest)]
    assert link not in {m.stamp.link for m in new} and new[0].stamp.number == 1  # type: ignore[attr-defined]


def test_each_router_has_its_own_link_and_hears_the_words_for_all() -> None:
    """Two routers send to one instance, whose heartbeats go to both."""
    worlds = [World(Role.UNIFIED), World(Role.UNIFIED)]
    receivers, delivered = LinkReceivers(), [0, 0]
    rooms = [world.add()[1] for world in worlds]
    taken: list[bytes] = []

    def deliver(*lost: int) -> None:
        for at, world in enumerate(worlds):
            for _, message in world.outbox.sent[delivered[at] :]:
                if at in lost or isinstance(message, LinkAck):
                    continue
                if receivers.take(message.stamp):  # type: ignore[attr-defined]
                    taken.append(room_in(message))
            delivered[at] = len(world.outbox.sent)

    deliver(1)
    for reads in range(1, 4):
        beat = Heartbeat(Role.UNIFIED, 0, 1, LoadReport(), receivers.acks(), reads)
        for world in worlds:
            world.clock.advance(INTERVAL_S)
            world.router.on_heartbeat(beat)
        deliver()
    assert taken == rooms and all(world.router.metrics().retries == {} for world in worlds)


def test_a_deaf_instance_is_left_out_after_some_requests_and_they_are_served_elsewhere() -> None:
    world = two_pairs(deadlines=DEADLINES, breaker=BreakerConfig(failures=2))
    instances = Instances(world)
    clients = [world.add_client() for _ in range(4)]
    assert sorted(world.pair(c.generation)[-2:] for c in clients) == ["D0", "D0", "D1", "D1"]
    start_s = world.clock.monotonic()
    while any(world.pair(client.generation).endswith("D0") for client in clients):
        instances.deliver("D0")
        instances.beat()
        assert world.clock.monotonic() - start_s <= PATIENCE_S + 3 * INTERVAL_S, "not noticed"
    assert world.clock.monotonic() - start_s >= PATIENCE_S
    metrics = world.router.metrics()
    assert metrics.retries == {"request_lost": 2} and metrics.breaker_openings == {"D0": 1}
    assert sum(isinstance(m, CancelRequest) and to == "D0" for to, m in world.outbox.sent) == 2
