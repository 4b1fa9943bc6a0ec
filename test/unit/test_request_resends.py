"""Requests and cancellations over links from the router to P and D: what a broken connection lost is sent again."""

from __future__ import annotations

import pytest
from router_world import World, pair, two_pairs

from chitu.config.schema import BreakerConfig, DeadlineConfig
from chitu.net.link import LinkReceivers
from chitu.protocol import (
    CancelRequest,
    ClusterView,
    Heartbeat,
    InstanceInfo,
    LinkAck,
    LoadReport,
)
from chitu.router.policies import instance_key
from chitu.types import Role

INTERVAL_S, PATIENCE_S = 0.5, 3.0
DEADLINES = DeadlineConfig(heartbeat_interval_s=INTERVAL_S, lease_s=PATIENCE_S)


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
            if receivers.take(message.link, message.number, message.num_kept):  # type: ignore[attr-defined]
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
    kinds = [isinstance(m, CancelRequest) for to, m in instances.taken if to == name and m.room == room]  # type: ignore[attr-defined]
    assert kinds == [False, True] and world.router.metrics().retries == {}
    count = len(world.outbox.sent)
    instances.beat()
    sent = world.outbox.sent[count:]
    assert [to for to, m in sent if isinstance(m, LinkAck)] == ["D0"] and len(sent) == 1, "the answer to D alone"


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
    kinds = [isinstance(m, CancelRequest) for to, m in instances.taken if to == name and m.room == room]  # type: ignore[attr-defined]
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
    assert [m.room for to, m in instances.taken if to == "D0"] == [room]  # type: ignore[attr-defined]


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
    assert link not in {m.link for m in new} and new[0].number == 1  # type: ignore[attr-defined]


def test_each_process_of_the_router_has_its_own_link_and_hears_the_words_for_all() -> None:
    """`router.workers`: two API processes send to one instance, whose heartbeats go to both."""
    worlds = [World(Role.UNIFIED), World(Role.UNIFIED)]
    receivers, delivered = LinkReceivers(), [0, 0]
    rooms = [world.add()[1] for world in worlds]
    taken: list[bytes] = []

    def deliver(*lost: int) -> None:
        for at, world in enumerate(worlds):
            for _, message in world.outbox.sent[delivered[at] :]:
                if at in lost or isinstance(message, LinkAck):
                    continue
                if receivers.take(message.link, message.number, message.num_kept):  # type: ignore[attr-defined]
                    taken.append(message.room)  # type: ignore[attr-defined]
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
