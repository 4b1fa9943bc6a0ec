"""What an instance does not get is missed within two heartbeats, and nothing else is: the counts of both sides
together, then what the router makes of them."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, pair, two_pairs

from chitu.config.schema import BreakerConfig, DeadlineConfig
from chitu.instance.received_requests import ReceivedRequests
from chitu.protocol import (
    CancelRequest,
    Heartbeat,
    InstanceInfo,
    LoadReport,
    RequestMark,
    RequestsReceived,
)
from chitu.router.routing import instance_key
from chitu.router.sent_requests import SentRequests
from chitu.types import Role

INTERVAL_S, PATIENCE_S = 0.5, 3.0
DEADLINES = DeadlineConfig(heartbeat_interval_s=INTERVAL_S, lease_s=PATIENCE_S)


class Link:
    """A router's count and an instance's, with a wire between them that keeps the order, and may be cut or frozen."""

    def __init__(self) -> None:
        self.sent, self.received = SentRequests(PATIENCE_S, INTERVAL_S), ReceivedRequests()
        self.wire: deque[tuple[int, bytes]] = deque()
        self.now_s = 100.0
        self.reads = 0
        self.sent_rooms: list[bytes] = []
        self.taken: list[bytes] = []
        self.lost: list[bytes] = []
        self.stuck: list[bytes] = []
        self.num_marks = 0

    def send(self) -> bytes:
        room = len(self.sent_rooms).to_bytes(16, "little")
        self.sent_rooms.append(room)
        self.wire.append((self.sent.next_number, room))
        self.sent.note(room, False, self.now_s)
        return room

    def deliver(self) -> None:
        while self.wire:
            number, room = self.wire.popleft()
            if self.received.take(self.sent.link, number) and room:
                self.taken.append(room)
        self.reads += 1

    def beat(self, *, is_lost: bool = False, reads: bool = True) -> None:
        self.now_s += INTERVAL_S
        self.reads += reads
        beat = Heartbeat(Role.DECODE, 0, 1, LoadReport(), self.received.report(), self.reads)
        if is_lost:
            return
        news = self.sent.on_heartbeat(beat, self.now_s)
        self.lost += [sent.room for sent in news.lost]
        self.stuck += [sent.room for sent in news.stuck]
        if news.needs_mark:
            self.num_marks += 1
            self.wire.append((self.sent.next_number, b""))
            self.sent.note_mark()


SCRIPT = st.lists(
    st.sampled_from(["send", "send", "send", "deliver", "deliver", "cut", "beat", "beat lost", "hurried beat"]),
    max_size=40,
)


@given(SCRIPT)
def test_each_message_is_taken_or_lost_and_known_after_two_heartbeats_that_come_through(script: list[str]) -> None:
    link = Link()
    dropped: list[bytes] = []
    for what in script:
        if what == "send":
            link.send()
        elif what == "deliver":
            link.deliver()
        elif what == "cut":
            dropped += [room for _, room in link.wire if room]
            link.wire.clear()
        elif what == "hurried beat":
            link.now_s -= INTERVAL_S
            link.beat(reads=False)
        else:  # who has not read for long is slow here, not deaf
            link.beat(is_lost=what == "beat lost", reads=False)
        assert not set(link.lost) & set(link.taken), "what was called lost was taken, or the reverse"
        assert set(link.lost) <= set(dropped), "a false alarm"
    for _ in range(2):
        link.deliver()
        link.beat()
    assert sorted(link.lost + link.taken) == link.sent_rooms and len(link.lost) == len(set(link.lost))
    link.deliver()
    link.beat()
    assert not link.sent._pending and not link.stuck


def test_in_order_and_idle_there_is_not_one_message_more_than_the_requests() -> None:
    link = Link()
    for _ in range(5):
        link.send()
        link.deliver()
        link.beat()
    for _ in range(5):
        link.beat()
    assert link.num_marks == 0 and not link.lost


def test_an_instance_that_is_stopped_or_slow_has_lost_nothing_however_long_it_takes() -> None:
    link = Link()
    link.send()
    for _ in range(20):  # its heartbeat thread goes on, the one that reads does not
        link.beat(reads=False)
    link.now_s += 60.0  # stopped altogether: no heartbeats
    link.beat(reads=True)
    link.deliver()
    link.beat()
    assert link.taken == link.sent_rooms and not link.lost and not link.stuck


def test_heartbeats_that_come_at_once_after_a_silence_do_not_make_an_instance_deaf() -> None:
    link = Link()
    link.send()
    link.now_s += PATIENCE_S
    for _ in range(10):
        link.now_s -= INTERVAL_S - 0.001
        link.beat()
    assert not link.stuck


def test_where_no_connection_comes_about_an_instance_is_deaf_after_its_patience() -> None:
    link = Link()
    link.beat()
    first = link.send()
    link.beat()
    second = link.send()
    start_s = link.now_s - INTERVAL_S
    while not link.stuck:
        link.beat()
    assert PATIENCE_S <= link.now_s - start_s <= PATIENCE_S + 2 * INTERVAL_S
    assert link.stuck == [first], "the other has waited for less"
    link.beat()
    assert link.stuck == [first, second]
    link.deliver()
    link.beat()
    assert link.taken == [first, second], "what was queued comes in the end, with its cancellation behind it"
    assert link.stuck == [first, second] and not link.lost


# --------------------------------------------------------------------------------------------------------- the router


class Instances:
    """The receiving sides of a `World`: they get what they were sent, but what is told to be lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.received = {instance_key(i): ReceivedRequests() for i in world.instances}
        self.num_taken = 0
        self.reads = 0
        world.clock.advance(INTERVAL_S)

    def deliver(self, *lost: str) -> None:
        """What was sent since the last call; all for these instances is lost."""
        for name, message in self.world.outbox.sent[self.num_taken :]:
            if name not in lost:
                self.received[instance_key(self.world.instance(name))].take(message.link, message.number)  # type: ignore[attr-defined]
        self.num_taken = len(self.world.outbox.sent)
        self.reads += 1

    def beat(self) -> None:
        for instance in list(self.world.instances):
            self.world.router.on_heartbeat(self.heartbeat(instance))

    def heartbeat(self, instance: InstanceInfo) -> Heartbeat:
        report = self.received[instance_key(instance)].report()
        return Heartbeat(instance.role, instance.engine_rank, instance.incarnation, LoadReport(), report, self.reads)

    def two_beats(self) -> None:
        """Marks go out with the first, and what they show comes with the second."""
        self.beat()
        self.deliver()
        self.beat()


@pytest.mark.parametrize("who", ["P0", "D0"])
def test_a_request_that_never_got_to_one_side_goes_on_elsewhere_and_the_other_side_is_told(who: str) -> None:
    world = two_pairs()
    instances = Instances(world)
    client = world.add_client()
    old = world.room(client.generation)
    assert world.pair(client.generation) == "P0-D0"
    instances.deliver(who)
    instances.two_beats()
    new = world.room(client.generation)
    assert new != old
    assert who not in world.pair(client.generation)
    assert sorted(world.cancelled()) == ["D0", "P0"]
    metrics = world.router.metrics()
    assert metrics.retries == {"request_lost": 1} and not metrics.breaker_openings
    instances.deliver()
    instances.two_beats()
    assert world.room(client.generation) == new, "what arrived is not sent on again"
    world.emit(new, 1, 2, finish="length")
    assert client.tokens == [1, 2] and client.generation is not None and client.generation.error is None


def test_a_unified_instance_alone_gets_it_again() -> None:
    world = World(Role.UNIFIED)
    instances = Instances(world)
    client = world.add_client()
    instances.deliver("U0")
    instances.two_beats()
    assert client.generation is not None and client.generation.num_attempts == 2


def test_a_cut_under_load_costs_one_attempt_of_what_was_on_the_way_and_opens_no_breaker() -> None:
    world = pair(breaker=BreakerConfig(failures=2))
    instances = Instances(world)
    early = world.add_client()
    instances.deliver()
    late = [world.add_client() for _ in range(4)]
    instances.deliver("P0", "D0")
    instances.two_beats()
    attempts = [c.generation.num_attempts for c in (early, *late) if c.generation is not None]
    assert attempts == [1, 2, 2, 2, 2] and not world.router.metrics().breaker_openings


def test_a_cancellation_that_was_lost_is_sent_again_until_it_was_taken() -> None:
    world = pair()
    instances = Instances(world)
    generation, room = world.add()
    instances.deliver()
    instances.beat()
    world.router.cancel(generation)
    for _ in range(3):
        assert instances.num_taken < len(world.outbox.sent), "nothing was sent again"
        instances.deliver("D0")
        instances.beat()  # which has not heard of the loss; the mark
        instances.deliver()
        instances.beat()
    instances.deliver()
    instances.two_beats()
    to_d = [m for name, m in world.outbox.sent if name == "D0" and isinstance(m, CancelRequest)]
    assert len(to_d) == 4 and {m.room for m in to_d} == {room} and len({m.number for m in to_d}) == 4
    assert len([m for name, m in world.outbox.sent if name == "P0" and isinstance(m, CancelRequest)]) == 1
    count = len(world.outbox.sent)
    instances.two_beats()
    assert len(world.outbox.sent) == count


def test_a_request_that_has_a_token_has_arrived_whatever_is_said_of_it() -> None:
    world = two_pairs()
    client = world.add_client()
    room = world.room(client.generation)
    world.emit(room, 1)
    world.clock.advance(INTERVAL_S)
    d0 = world.instance("D0")
    half = world.sent_to(room)["D0"]
    said = (RequestsReceived(half.link, half.number + 1, ((1, half.number),)),)
    world.router.on_heartbeat(Heartbeat(d0.role, 0, d0.incarnation, LoadReport(), said, 1))
    assert world.room(client.generation) == room


def test_late_and_repeated_words_and_those_for_other_processes_of_the_router_change_nothing() -> None:
    world = two_pairs()
    instances = Instances(world)
    client = world.add_client()
    room = world.room(client.generation)
    d0 = world.instance("D0")
    link = world.sent_to(room)["D0"].link
    instances.deliver("D0")
    for incarnation, other_link in ((d0.incarnation, link + 1), (d0.incarnation + 70, link)):
        said = (RequestsReceived(other_link, 9, ((1, 8),)),)
        world.router.on_heartbeat(Heartbeat(d0.role, 0, incarnation, LoadReport(), said, 1))
    assert world.room(client.generation) == room
    instances.deliver()  # the mark that one of them asked for
    late = instances.heartbeat(d0)
    for _ in range(3):
        world.router.on_heartbeat(late)
    assert client.generation is not None and client.generation.num_attempts == 2
    assert len(world.cancelled()) == 2


def test_who_comes_back_is_counted_for_anew_and_words_of_before_are_nobodys() -> None:
    world = two_pairs()
    instances = Instances(world)
    world.add()
    d0 = world.instance("D0")
    instances.deliver("D0")
    old = [m for name, m in world.outbox.sent if name == "D0"]
    world.router.on_lost(d0, "silent", has_died=False)
    world.router.on_joined(d0)
    client = [world.add_client() for _ in range(2)]
    new = [m for name, m in world.outbox.sent if name == "D0" and m not in old]
    assert {m.link for m in new}.isdisjoint({m.link for m in old})  # type: ignore[attr-defined]
    assert new[0].number == 1  # type: ignore[attr-defined]
    instances.deliver()
    instances.two_beats()
    assert [c.generation.num_attempts for c in client if c.generation is not None] == [1, 1]


def test_each_process_of_the_router_misses_its_own_and_hears_the_words_for_all() -> None:
    """`router.workers`: two API processes, one instance that both send to, whose heartbeats go to both."""
    worlds = [World(Role.UNIFIED), World(Role.UNIFIED)]
    received, clients, taken = ReceivedRequests(), [world.add_client() for world in worlds], [0, 0]

    def deliver(*lost: int) -> None:
        for at, world in enumerate(worlds):
            for _, message in world.outbox.sent[taken[at] :]:
                if at not in lost:
                    received.take(message.link, message.number)  # type: ignore[attr-defined]
            taken[at] = len(world.outbox.sent)

    def beat() -> None:
        beat = Heartbeat(Role.UNIFIED, 0, 1, LoadReport(), received.report())
        for world in worlds:
            world.router.on_heartbeat(beat)

    deliver(1)
    for _ in range(2):
        beat()
        deliver()
        beat()
    assert [c.generation.num_attempts for c in clients if c.generation is not None] == [1, 2]
    assert not [m for _, m in worlds[0].outbox.sent if isinstance(m, RequestMark)]


def test_a_deaf_instance_is_left_out_after_some_requests_and_they_are_served_elsewhere() -> None:
    world = two_pairs(deadlines=DEADLINES, breaker=BreakerConfig(failures=2))
    instances = Instances(world)
    clients = [world.add_client() for _ in range(4)]
    assert sorted(world.pair(c.generation)[-2:] for c in clients) == ["D0", "D0", "D1", "D1"]
    waited_s = 0.0
    while any(world.pair(client.generation).endswith("D0") for client in clients):
        instances.deliver("D0")
        instances.beat()
        world.clock.advance(INTERVAL_S)
        waited_s += INTERVAL_S
        assert waited_s <= PATIENCE_S + 2 * INTERVAL_S, "not noticed"
    assert waited_s >= PATIENCE_S
    metrics = world.router.metrics()
    assert metrics.retries == {"request_lost": 2} and metrics.breaker_openings == {"D0": 1}


def test_marks_are_sent_only_where_a_word_is_missing() -> None:
    world = pair()
    instances = Instances(world)
    world.add()
    instances.beat()  # sent a moment ago: nobody can have heard of it
    marks = [name for name, m in world.outbox.sent if isinstance(m, RequestMark)]
    assert sorted(marks) == ["D0", "P0"]
    instances.deliver()
    for _ in range(3):
        instances.two_beats()
    assert len([m for _, m in world.outbox.sent if isinstance(m, RequestMark)]) == 2
