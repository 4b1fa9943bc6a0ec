"""A link over a hostile network: what is sent is taken once and in order, or given up by a sender that knows of it; and
then what the router makes of both directions."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, pair, two_pairs

from chitu.config.schema import BreakerConfig, DeadlineConfig
from chitu.instance.token_manager import FORMER_LINKS, TokenManager
from chitu.net import link as link_module
from chitu.net.link import MAX_LINKS, LinkReceiver, LinkReceivers, LinkSender
from chitu.protocol import (
    CancelRequest,
    ClusterView,
    Finish,
    Heartbeat,
    InstanceInfo,
    LinkWord,
    LoadReport,
    TokenBatch,
    token_codec,
)
from chitu.router.routing import instance_key
from chitu.types import Role

INTERVAL_S, PATIENCE_S = 0.5, 3.0
DEADLINES = DeadlineConfig(heartbeat_interval_s=INTERVAL_S, lease_s=PATIENCE_S)
LINK = 70


class Pump:
    """A sender and a receiver, and connections between them that break: what is on the way gets lost, or comes behind
    what the next connection brings."""

    def __init__(self) -> None:
        self.sender: LinkSender[int] = LinkSender(LINK, INTERVAL_S, PATIENCE_S)
        self.receivers = LinkReceivers()
        self.wire: deque[bytes] = deque()
        self.late: deque[bytes] = deque()
        """Of an earlier connection."""
        self.now_s = 100.0
        self.num_sent = 0
        self.taken: list[int] = []
        self.given_up: list[int] = []
        self.num_frames = 0
        self.tells = True
        """Sends a message when it has given some up, as every sender does."""

    def send(self) -> None:
        self.num_sent += 1
        frame = f"{self.sender.number} {self.sender.num_kept} {self.num_sent}".encode()
        self.sender.note(frame, self.num_sent, self.now_s)
        self._put(frame)

    def _put(self, frame: bytes) -> None:
        self.num_frames += 1
        self.wire.append(frame)

    def deliver(self, count: int = 1_000_000, *, twice: bool = False) -> None:
        for _ in range(min(count, len(self.wire))):
            frame = self.wire.popleft()
            for _ in range(1 + twice):
                self._take(frame)

    def deliver_late(self) -> None:
        while self.late:
            self._take(self.late.popleft())

    def _take(self, frame: bytes) -> None:
        number, num_kept, name = map(int, frame.split())
        if self.receivers.take(LINK, number, num_kept):
            self.taken.append(name)

    def beat(self, *, is_lost: bool = False, is_reading: bool = True) -> None:
        """A word, after the usual time or at once for a gap."""
        self.now_s += INTERVAL_S
        words = self.receivers.words()
        if not is_lost:
            self.hear(words, is_reading)

    def hear(self, words: tuple[LinkWord, ...], is_reading: bool = True) -> None:
        news = self.sender.on_word(words[0] if words else None, is_reading, self.now_s)
        self.given_up += [sent.about for sent in news.given_up]
        for frame in news.repeat:
            self._put(frame)
        if news.given_up and self.tells:
            self.send()

    def alarm(self) -> None:
        if self.receivers.take_alarm():
            self.hear(self.receivers.words())

    def two_beats(self) -> None:
        for _ in range(2):
            self.deliver()
            self.alarm()
            self.deliver()
            self.beat()
        self.deliver()
        self.alarm()
        self.deliver()


OPS = ["send", "send", "send", "deliver", "one", "twice", "cut", "reconnect", "late", "beat", "beat lost", "alarm"]


def run(pump: Pump, script: list[str], *, is_reading: bool) -> None:
    for what in script:
        if what == "send":
            pump.send()
        elif what == "one":
            pump.deliver(1)
        elif what in ("deliver", "twice"):
            pump.deliver(twice=what == "twice")
        elif what == "cut":
            pump.wire.clear()
        elif what == "reconnect":
            pump.late.extend(pump.wire)
            pump.wire.clear()
        elif what == "late":
            pump.deliver_late()
        elif what == "alarm":
            pump.alarm()
        else:
            pump.beat(is_lost=what == "beat lost", is_reading=is_reading)


@given(st.lists(st.sampled_from(OPS), max_size=60))
def test_everything_is_taken_once_and_in_order_two_words_after_the_last_fault(script: list[str]) -> None:
    pump = Pump()
    run(pump, script, is_reading=False)  # whoever does not read for long is slow, and nothing is given up
    assert pump.taken == list(range(1, len(pump.taken) + 1)), "out of order, twice, or from behind a gap"
    pump.deliver_late()
    pump.two_beats()
    pump.beat()
    assert pump.taken == list(range(1, pump.num_sent + 1)) and not pump.given_up
    pump.beat()
    assert pump.sender.num_kept == 0 and not pump.wire


@given(st.lists(st.sampled_from([*OPS, *["cut", "beat"] * 6]), max_size=120))
def test_what_does_not_come_through_for_long_is_given_up_and_both_ends_know_it(script: list[str]) -> None:
    pump = Pump()
    run(pump, script, is_reading=True)
    assert pump.taken == sorted(set(pump.taken))
    pump.wire.clear()
    pump.late.clear()
    pump.send()
    pump.two_beats()
    pump.two_beats()
    pump.beat()
    assert pump.taken == sorted(set(pump.taken)) and pump.sender.num_kept == 0
    assert set(pump.taken) | set(pump.given_up) == set(range(1, pump.num_sent + 1)), "lost, and nobody knows"
    (receiver,) = pump.receivers._links.values()
    assert receiver.given_up == pump.num_sent - len(pump.taken)


def test_in_order_and_idle_there_is_not_one_message_more() -> None:
    pump = Pump()
    for _ in range(5):
        pump.send()
        pump.deliver()
        pump.beat()
    for _ in range(5):
        pump.beat()
    assert pump.num_frames == 5


def test_a_receiver_that_is_stopped_or_slow_has_lost_nothing_and_is_sent_nothing_twice() -> None:
    pump = Pump()
    pump.send()
    for _ in range(20):  # its heartbeat thread goes on, the one that reads does not
        pump.beat(is_reading=False)
    pump.now_s += 60.0  # stopped altogether: no heartbeats
    pump.send()
    pump.beat(is_reading=False)
    pump.deliver()
    pump.beat()
    assert pump.taken == [1, 2] and pump.num_frames == 2 and not pump.given_up


def test_words_that_come_at_once_after_a_silence_attest_nothing() -> None:
    pump = Pump()
    pump.send()
    pump.now_s += PATIENCE_S
    for _ in range(10):
        pump.now_s -= INTERVAL_S - 0.001
        pump.beat()
    assert not pump.given_up


def test_a_receiver_that_is_late_costs_one_frame_a_word_and_a_gap_costs_all_once() -> None:
    pump = Pump()
    for _ in range(9):
        pump.send()
    pump.beat()
    pump.beat()
    assert pump.num_frames == 9 + 2, "nothing says that one of them was lost"
    del pump.wire[0]
    pump.deliver()
    pump.alarm()
    assert pump.num_frames == 11 + 9
    pump.alarm()
    pump.hear((LinkWord(LINK, 0, True),))
    assert pump.num_frames == 11 + 9, "they are on the way again"


def test_a_message_is_given_up_when_its_own_patience_ends_and_comes_through_late_but_before_a_later_one() -> None:
    pump = Pump()
    pump.tells = False
    pump.beat()
    pump.send()
    pump.beat()
    pump.send()
    start_s = pump.now_s - INTERVAL_S
    while not pump.given_up:
        pump.beat()
    assert PATIENCE_S <= pump.now_s - start_s <= PATIENCE_S + 2 * INTERVAL_S
    assert pump.given_up == [1], "the other has waited for less"
    pump.beat()
    assert pump.given_up == [1, 2]
    pump.send()
    pump.deliver()
    assert pump.taken == [1, 2, 3], "what was queued comes in the end"


def test_what_a_sender_keeps_is_bounded_in_messages_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_KEPT", 3)
    monkeypatch.setattr(link_module, "MAX_KEPT_BYTES", 100)
    sender: LinkSender[str] = LinkSender(LINK, INTERVAL_S, PATIENCE_S)
    for size, is_full in ((10, False), (10, False), (10, True)):
        sender.note(bytes(size), "small", 0.0)
        assert sender.is_full is is_full
    sender.on_word(LinkWord(LINK, 3), True, 1.0)
    assert not sender.is_full and sender.num_kept == 0
    for size, is_full in ((99, False), (1, True)):
        sender.note(bytes(size), "large", 2.0)
        assert sender.is_full is is_full
    assert [sent.about for sent in sender.give_up(2.0)] == ["large", "large"] and not sender.is_full


def test_what_a_receiver_knows_is_bounded_and_a_forgotten_link_goes_on() -> None:
    receivers = LinkReceivers()
    for number in range(1, 5):
        assert receivers.take(0, number, 0)
    for link in range(1, MAX_LINKS + 1):
        receivers.take(link, 1, 0)
    assert [word.link for word in receivers.words()] == list(range(1, MAX_LINKS + 1))
    assert not receivers.take(0, 6, 1) and receivers.take_alarm()
    assert receivers.take(0, 5, 0) and receivers.take(0, 6, 1)
    assert receivers.words() == (LinkWord(0, 6),) and receivers.words() == ()


def test_odd_numbers_from_the_wire_change_no_other_link_and_what_has_none_is_taken() -> None:
    receivers = LinkReceivers()
    assert receivers.take(1, 1, 0)
    assert receivers.take(LINK, 0, 0) and receivers.take(LINK, -1, 0)
    assert receivers.words() == (LinkWord(1, 1),)
    receiver = LinkReceiver()
    assert receiver.take((1 << 64) - 1, -5) and not receiver.take(3, 1 << 70)
    assert receivers.take(1, 2, 0)


# ------------------------------------------------------------------------------------------------------------------ D


class Port:
    def __init__(self) -> None:
        self.sent: list[TokenBatch] = []

    def send(self, frame: bytes) -> bool:
        self.sent.append(token_codec.decode(frame))
        return True

    def close(self) -> None: ...


ROOM = b"r" * 16


def test_each_link_of_d_counts_from_1_and_a_request_of_a_former_one_is_refused() -> None:
    router, worker = Port(), Port()
    manager = TokenManager(1, router.send, lambda _: worker)
    assert manager.expect(71, 5001, 9)
    assert manager.expect(0, 0, LINK)
    for now_s in (0.0, 0.1):
        manager.push(ROOM, 5)
        manager.push(ROOM, 6, 71)
        manager.flush(now_s)
    assert [(b.link, b.number, b.num_kept) for b in router.sent] == [(LINK, 1, 0), (LINK, 2, 1)]
    assert [(b.link, b.number, b.num_kept) for b in worker.sent] == [(9, 1, 0), (9, 2, 1)]
    manager.push(ROOM, 5)
    manager.restart()
    manager.flush(0.2)
    assert len(router.sent) == 2, "a new router gets nothing of before"
    assert not manager.expect(0, 0, LINK)
    for link in range(100, 100 + FORMER_LINKS + 3):
        assert manager.expect(0, 0, link)
        manager.push(ROOM, 5)
        manager.flush(0.3)
        assert (router.sent[-1].link, router.sent[-1].number) == (link, 1)
    assert not manager.expect(0, 0, 110)


def test_d_sends_again_what_its_router_has_not_and_says_of_what_it_gave_up() -> None:
    port = Port()
    manager = TokenManager(1, port.send, repeat_s=INTERVAL_S, patience_s=PATIENCE_S)
    manager.expect(0, 0, LINK)
    for number in range(3):
        manager.push(ROOM, number)
        manager.flush(0.0)
    manager.hear(LinkWord(LINK + 1, 3))
    manager.hear(LinkWord(LINK, 1, has_gap=True))
    manager.flush(0.1)
    assert [b.number for b in port.sent] == [1, 2, 3, 2, 3]
    now_s = 0.1
    while not manager.tokens_dropped:
        now_s += INTERVAL_S
        manager.hear(LinkWord(LINK, 1))
        manager.flush(now_s)
        assert now_s < PATIENCE_S + 3 * INTERVAL_S
    assert manager.tokens_dropped == 2 and now_s >= PATIENCE_S
    last = port.sent[-1]
    assert (last.number, last.num_kept, last.tokens) == (4, 0, [])


# ------------------------------------------------------------------------------------------------------ router, tokens


def send(
    world: World, number: int, room: bytes, *tokens: int, finish: str = "", name: str = "D0", kept: int = 0
) -> None:
    finished = [Finish(room, finish)] if finish else []
    instance = world.instance(name)
    link = world.link(name)
    batch = TokenBatch(instance.incarnation, [room] * len(tokens), list(tokens), finished, number, link, kept)
    world.router.on_tokens(batch)
    world.router.flush()


def words(world: World, name: str = "D0") -> list[LinkWord]:
    return [message for to, message in world.outbox.sent if to == name and isinstance(message, LinkWord)]


def test_what_comes_from_behind_a_gap_is_asked_for_at_once_and_the_client_sees_every_token_once() -> None:
    world = two_pairs()
    client = world.add_client()
    room = world.room(client.generation)
    send(world, 1, room, 10)
    send(world, 3, room, 12, kept=1)
    send(world, 4, room, 13, kept=2)
    assert client.tokens == [10] and words(world) == [LinkWord(world.link("D0"), 1, True)]
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


# ---------------------------------------------------------------------------------------------------- router, requests


class Instances:
    """The receiving sides of a `World`: they get what they were sent, but what is told to be lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.receivers = {instance_key(i): LinkReceivers() for i in world.instances}
        self.taken: list[tuple[str, object]] = []
        self.num_delivered = 0
        self.reads = 0
        world.clock.advance(INTERVAL_S)

    def deliver(self, *lost: str) -> None:
        """What was sent since the last call; all for these instances is lost."""
        for name, message in self.world.outbox.sent[self.num_delivered :]:
            if name in lost or isinstance(message, LinkWord):
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
        said = self.receivers[instance_key(instance)].words()
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
    assert [to for to, m in sent if isinstance(m, LinkWord)] == ["D0"] and len(sent) == 1, "the answer to D alone"


@pytest.mark.parametrize("name", ["P0", "D0"])
def test_a_cancellation_that_was_given_up_comes_as_soon_as_something_comes_through(name: str) -> None:
    """What it cancels was taken, so it must end; and the receiver must hear that a message before it is gone."""
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
        said = (LinkWord(other_link, 9),)
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
    """`router.workers`: two API processes, one instance that both send to, whose heartbeats go to both."""
    worlds = [World(Role.UNIFIED), World(Role.UNIFIED)]
    receivers, delivered = LinkReceivers(), [0, 0]
    rooms = [world.add()[1] for world in worlds]
    taken: list[bytes] = []

    def deliver(*lost: int) -> None:
        for at, world in enumerate(worlds):
            for _, message in world.outbox.sent[delivered[at] :]:
                if at in lost or isinstance(message, LinkWord):
                    continue
                if receivers.take(message.link, message.number, message.num_kept):  # type: ignore[attr-defined]
                    taken.append(message.room)  # type: ignore[attr-defined]
            delivered[at] = len(world.outbox.sent)

    deliver(1)
    for reads in range(1, 4):
        beat = Heartbeat(Role.UNIFIED, 0, 1, LoadReport(), receivers.words(), reads)
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
