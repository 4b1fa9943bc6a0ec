"""The comm loop against a router made of bare sockets: it joins until a view has it, survives garbage, and hands
messages on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from ports import free_ports
from support.router_process import wait_until

from chitu import __version__
from chitu.clock import RealClock
from chitu.config.schema import DeadlineConfig
from chitu.instance.comm import CommLoop, RouterAddress
from chitu.kv_transfer.kv_manager import NoPeers
from chitu.net.sockets import PushSocket, bind, connect
from chitu.net.threads import ServiceThread, Waker
from chitu.net.view_feed import Readers
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    VIEW_TOPIC,
    CancelRequest,
    ClusterView,
    CoordinationMessage,
    Drain,
    InstanceInfo,
    Join,
    JoinReply,
    KVLayout,
    LinkAck,
    LinkStamp,
    SchedulerMessage,
    ViewChange,
    coordination_codec,
    encode,
    encode_for,
    view_topic,
)
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)
"""Any layout will do here."""


JOIN_S = 0.05
LEASE_S = 1.0


class Router:
    """Bare sockets of a router, and the messages that the comm loop handed on."""

    def __init__(self, *others: RouterAddress) -> None:
        """`others`: routers behind this one in the list of the loop."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stats, stats = bind(self.context, zmq.PULL, "127.0.0.1", 0)
        self.coordination, self.coordination_port = bind(self.context, zmq.ROUTER, "127.0.0.1", 0)
        self.view, view = bind(self.context, zmq.XPUB, "127.0.0.1", 0)
        self.loop = CommLoop(
            "127.0.0.1", 0, [RouterAddress("127.0.0.1", stats, self.coordination_port, view), *others], RealClock()
        )
        self.requests: list[SchedulerMessage] = []
        self.acks: list[LinkAck] = []
        self.views: list[ClusterView] = []
        self.new_routers = 0
        self.replaced: list[int] = []
        """Indices of routers that another one has replaced."""
        self.refusals: list[tuple[str, str]] = []
        self.happened = Waker()
        self.info = InstanceInfo(
            Role.DECODE, 0, 77, "127.0.0.1", self.loop.port, self.loop.control_port, LAYOUT, 128, os.getpid()
        )
        self.drains = 0
        self.orders: list[str] = []
        """What it was asked to become, "" to leave; `stay` where that was taken back."""
        self.silent: list[int] = []
        self.alarms = 0
        deadlines = DeadlineConfig(retry_interval_s=JOIN_S, lease_s=LEASE_S)
        self.thread = ServiceThread("comm", lambda: self.loop.run(self.info, NoPeers(), self, deadlines))
        self.thread.start()

    def on_missing(self) -> None:
        self.alarms += 1
        self.happened.wake()

    def on_request(self, message: SchedulerMessage) -> None:
        self.requests.append(message)
        self.happened.wake()

    def on_link_ack(self, word: LinkAck) -> None:
        self.acks.append(word)
        self.happened.wake()

    def on_view(self, view: ClusterView, router: int) -> None:
        self.views.append(view)
        self.happened.wake()

    def on_new_router(self, router: int) -> None:
        self.new_routers += 1
        self.replaced.append(router)
        self.happened.wake()

    def on_refused(self, code: str, message: str) -> None:
        self.refusals.append((code, message))
        self.happened.wake()

    def on_drain(self, becomes: str) -> None:
        self.drains += 1
        self.orders.append(becomes)
        self.happened.wake()

    def on_stay(self) -> None:
        self.orders.append("stay")
        self.happened.wake()

    def on_silence(self, router: int) -> None:
        self.silent.append(router)

    def joins(self, count: int, first_view: tuple[int, int] = (0, 0)) -> bytes:
        """Take so many joins; return the identity that sent them. `first_view`: that of an earlier member, if it was
        one."""
        identity = b""
        for _ in range(count):
            assert self.coordination.poll(5000), "no join came"
            identity, frame = self.coordination.recv_multipart()
            assert coordination_codec.decode(frame) == Join(
                PROTOCOL_VERSION,
                msgspec.structs.replace(
                    self.info, first_view=first_view, protocol=PROTOCOL_VERSION, release=__version__
                ),
            )
        return identity

    def greet(self) -> None:
        """Send a view without members, by which the loop knows the version of the router, until it joins."""
        for _ in range(200):
            self.send_view(ClusterView(1, 0, ()))
            if self.coordination.poll(50):
                return
        raise AssertionError("it does not join")

    def publish(self, router_incarnation: int, version: int, draining: bool = False) -> None:
        """Repeat a view until the loop receives it: a SUB that has just connected misses messages."""
        before = len(self.views)
        for _ in range(200):
            info = msgspec.structs.replace(self.info, draining=draining)
            self.send_view(ClusterView(router_incarnation, version, (info,)))
            self.happened.wait(0.05)
            if len(self.views) > before:
                return
        raise AssertionError("the view never arrived")

    def send_view(self, view: ClusterView) -> None:
        self.view.send_multipart([VIEW_TOPIC, encode(view)])

    def asked_topic(self) -> bytes:
        """Wait until the loop asks for a whole view, and return the topic that it asks for."""
        while True:
            assert self.view.poll(5000), "it does not ask"
            readers = Readers()
            if readers.take(self.view.recv()):
                return next(iter(readers.waiting))

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        for socket in (self.stats, self.coordination, self.view):
            socket.close()
        self.context.term()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


def test_it_joins_until_the_view_has_it(router: Router) -> None:
    router.greet()
    router.joins(3)
    assert not router.loop.contacts.joined
    router.publish(1, 1)
    assert router.loop.contacts.joined


def test_it_speaks_the_version_of_an_older_router_and_that_of_the_newer_one_that_replaces_it(router: Router) -> None:
    def join_behind(version: int, incarnation: int) -> Join:
        """Send views in this version alone, until a join comes that names it."""
        for _ in range(400):
            frame = encode_for(version, ClusterView(incarnation, 0, ()))
            router.view.send_multipart([view_topic(version), frame])
            if router.coordination.poll(20):
                _, frame = router.coordination.recv_multipart()
                join = coordination_codec.decode(frame)
                if isinstance(join, Join) and join.protocol_version == version:
                    return join
        raise AssertionError("it does not join")

    assert join_behind(OLDEST_VERSION, 1).instance == router.info, "what came later is left out"
    newer = join_behind(PROTOCOL_VERSION, 2).instance
    assert (newer.protocol, newer.release) == (PROTOCOL_VERSION, __version__)


def test_it_does_not_stay_with_the_older_version_in_which_a_router_was_heard_first(router: Router) -> None:
    for _ in range(400):
        for version in (OLDEST_VERSION, PROTOCOL_VERSION):
            if version == OLDEST_VERSION or router.loop.contacts.routers[0].feed.view.version >= 0:
                router.view.send_multipart([view_topic(version), encode_for(version, ClusterView(1, 0, ()))])
        if router.coordination.poll(20):
            break
    join = coordination_codec.decode(router.coordination.recv_multipart()[1])
    assert isinstance(join, Join) and join.protocol_version == PROTOCOL_VERSION


def test_it_gets_a_whole_view_that_is_sent_to_it_alone_and_follows_the_changes(router: Router) -> None:
    topic = router.asked_topic()
    others = topic[:-1] + bytes([topic[-1] ^ 1])
    router.view.send_multipart([others, encode(ClusterView(1, 9, ()))])
    router.view.send_multipart([topic, encode(ClusterView(1, 1, ()))])
    other = msgspec.structs.replace(router.info, engine_rank=1, incarnation=78)
    changes = [ViewChange(1, 2, 1, (router.info,)), ViewChange(1, 3, 2, (other,)), ViewChange(1, 3, 3)]
    for change in changes:
        router.view.send_multipart([VIEW_TOPIC, encode(change)])
    wait_until(lambda: router.views and router.views[-1].version == 3, 10, lambda: router.views)
    assert router.views[-1] == ClusterView(1, 3, (router.info, other))
    assert router.loop.contacts.joined
    router.view.send_multipart([VIEW_TOPIC, encode(ViewChange(1, 4, 3, left=((Role.DECODE, 0),)))])
    for _ in range(50):  # those sent before it saw itself in a view come first
        _, frame = router.coordination.recv_multipart()
        join = coordination_codec.decode(frame)
        if isinstance(join, Join) and join.instance.returns:
            return
    raise AssertionError("it does not join again")


def test_who_missed_a_change_asks_for_the_whole_view_and_takes_no_later_change_for_it(router: Router) -> None:
    topic = router.asked_topic()
    router.view.send_multipart([topic, encode(ClusterView(1, 1, (router.info,)))])
    router.happened.wait(5)
    views = router.loop.contacts.num_views
    while not router.view.poll(50):
        router.view.send_multipart([VIEW_TOPIC, encode(ViewChange(1, 3, 3))])
    assert router.asked_topic() == topic
    assert (router.loop.contacts.num_views, len(router.views)) == (views, 1), "the router counts as silent meanwhile"
    router.view.send_multipart([topic, encode(ClusterView(1, 3, (router.info,), cache_flush=5))])
    wait_until(lambda: len(router.views) == 2, 10, lambda: router.views)
    assert router.views[-1].cache_flush == 5


def test_joins_are_not_kept_for_a_router_that_is_not_there(router: Router) -> None:
    router.greet()
    router.joins(1)
    router.coordination.close()
    wait_for_turns(router, 30)  # turns of the loop, each with about one join
    router.coordination, _ = bind(router.context, zmq.ROUTER, "127.0.0.1", router.coordination_port)
    before = router.loop.num_reads
    router.greet()
    router.joins(1)
    waiting = 0
    while router.coordination.poll(0):
        router.joins(1)
        waiting += 1
    assert waiting <= router.loop.num_reads - before
    assert router.thread.is_alive()


def test_after_a_lease_without_a_view_it_hears_the_next_one_and_joins_a_new_router_only_behind_its_view(
    router: Router,
) -> None:
    router.publish(1, 1)
    while router.coordination.poll(2 * 1000 * JOIN_S):
        router.coordination.recv_multipart()  # those sent before
    port = router.view.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    router.view.close()
    assert not router.coordination.poll(3 * 1000 * LEASE_S), "what that router sends before its view would be dropped"
    router.view, _ = bind(router.context, zmq.XPUB, "127.0.0.1", int(port))
    for _ in range(200):
        router.send_view(ClusterView(2, 1, ()))
        if router.coordination.poll(50):
            break
    router.joins(1, first_view=(1, 1))
    assert router.new_routers == 1
    router.publish(2, 2)
    assert router.loop.contacts.joined


def wait_for_turns(router: Router, count: int) -> None:
    end = router.loop.num_reads + count
    while router.loop.num_reads < end:
        router.happened.wait(0.01)


def test_a_router_with_another_incarnation_is_reported_once(router: Router) -> None:
    router.publish(1, 1)
    assert router.new_routers == 0
    router.publish(2, 1)
    assert router.new_routers == 1


def test_a_refused_join_is_told_with_its_code(router: Router) -> None:
    router.greet()
    identity = router.joins(1)
    reply = JoinReply(router.info.incarnation, 0.0, "incompatible_layout", "page_size: 16 != 32")
    router.coordination.send_multipart((identity, encode(reply)))
    wait_until(lambda: router.refusals, 5, "a refusal")
    assert router.refusals == [("incompatible_layout", "page_size: 16 != 32")]


def test_what_other_threads_say_after_its_end_is_no_error(router: Router) -> None:
    router.loop.stop()
    router.thread.join(5)
    router.loop.send_peer("127.0.0.1", 1, b"", b"")
    router.loop.stop()


def test_a_drain_is_told_once_whether_it_comes_as_a_message_or_in_the_view(router: Router) -> None:
    router.greet()
    identity = router.joins(1)
    for incarnation in (1, router.info.incarnation):  # the first one addresses an older process
        router.coordination.send_multipart((identity, encode(Drain(Role.DECODE, 0, incarnation))))
    router.happened.wait(5)
    router.publish(1, 1, draining=True)
    assert router.drains == 1


def test_a_drain_in_the_view_alone_is_enough_and_a_new_router_learns_it_from_the_join(router: Router) -> None:
    router.publish(1, 1, draining=True)
    assert router.drains == 1
    other = ClusterView(2, 1, ())
    deadline = RealClock().monotonic() + 10
    while RealClock().monotonic() < deadline:
        router.send_view(other)
        if router.coordination.poll(50):
            frame = router.coordination.recv_multipart()[1]
            join = coordination_codec.decode(frame)
            if isinstance(join, Join) and join.instance.draining:
                return
    raise AssertionError("no join said that it drains")


def test_garbage_is_counted_and_the_next_request_is_served(router: Router) -> None:
    push = connect(router.context, zmq.PUSH, "127.0.0.1", router.loop.port)
    for frame in (b"", b"\xc1", msgspec.msgpack.encode({"type": "what"}), msgspec.msgpack.encode([1, 2])):
        push.send(frame)
    push.send_multipart([b"two", b"frames"])
    push.send(encode(CancelRequest(b"r" * 16)))
    while not router.requests:
        router.happened.wait(5)
    push.close()
    assert router.requests == [CancelRequest(b"r" * 16)]
    assert (router.loop.bad_frames, router.loop.unknown_frames) == (5, 1)


def test_what_is_behind_a_gap_is_told_at_once_and_taken_when_all_of_it_comes_again(router: Router) -> None:
    push = connect(router.context, zmq.PUSH, "127.0.0.1", router.loop.port)
    frames = [encode(CancelRequest(bytes([number]) * 16, LinkStamp(9, number, number - 1))) for number in range(1, 4)]
    push.send(frames[0])
    push.send(frames[2])
    while not router.alarms:
        router.happened.wait(5)
    assert router.loop.received.acks() == (LinkAck(9, 1, has_gap=True),)
    push.send_multipart([*frames[1:], encode(LinkAck(9, 5))])
    while not router.acks:
        router.happened.wait(5)
    push.close()
    assert [message.room[0] for message in router.requests] == [1, 2, 3] and router.alarms == 1
    assert router.loop.received.acks() == (LinkAck(9, 3),) and router.acks == [LinkAck(9, 5)]


def test_a_frame_that_cannot_be_read_is_lost(router: Router) -> None:
    push = connect(router.context, zmq.PUSH, "127.0.0.1", router.loop.port)
    frames = [encode(CancelRequest(b"r" * 16, LinkStamp(9, number, number - 1))) for number in range(1, 4)]
    push.send_multipart([frames[0], frames[1][:-1], frames[2]])
    while not router.alarms:
        router.happened.wait(5)
    push.close()
    assert router.loop.bad_frames == 1
    assert router.loop.received.acks() == (LinkAck(9, 1, has_gap=True),)


def test_the_port_is_found_empty_again_and_again_where_nothing_comes(router: Router) -> None:
    before = router.loop.num_reads
    deadline = RealClock().monotonic() + 5
    while router.loop.num_reads < before + 3:
        assert RealClock().monotonic() < deadline
        router.happened.wait(0.02)


def test_nothing_is_queued_for_a_router_that_is_away_and_little_for_one_that_hangs() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as router:
        (port,) = free_ports(1)
        heartbeats = PushSocket(context, "127.0.0.1", port, most_queued=10, queues_unconnected=False)
        assert not heartbeats.send(b"old")
        router.setsockopt(zmq.RCVHWM, 1)
        router.bind(f"tcp://127.0.0.1:{port}")
        while not heartbeats.send(b"new"):
            router.poll(10)
        assert router.recv() == b"new"
        sent = [heartbeats.send(bytes(1 << 20)) for _ in range(100)]  # the kernel takes some
        assert not all(sent)
        heartbeats.close(linger_ms=0)


# ----------------------------------------------------------------------------------------------------------------------
# Two routers.


class Second:
    """Bare sockets of the second router of a list."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stats, stats = bind(self.context, zmq.PULL, "127.0.0.1", 0)
        self.coordination, coordination = bind(self.context, zmq.ROUTER, "127.0.0.1", 0)
        self.view, view = bind(self.context, zmq.XPUB, "127.0.0.1", 0)
        self.address = RouterAddress("127.0.0.1", stats, coordination, view)

    def next(self) -> CoordinationMessage:
        assert self.coordination.poll(5000), "no message came"
        return coordination_codec.decode(self.coordination.recv_multipart()[1])

    def send(self, view: ClusterView) -> None:
        self.view.send_multipart([VIEW_TOPIC, encode(view)])

    def close(self) -> None:
        for socket in (self.stats, self.coordination, self.view):
            socket.close(0)
        self.context.term()


@pytest.fixture
def two() -> Iterator[tuple[Router, Second]]:
    second = Second()
    first = Router(second.address)
    yield first, second
    first.close()
    second.close()


def publish_until(second: Second, view: ClusterView, is_so: Callable[[], bool]) -> None:
    def sent() -> bool:
        second.send(view)
        return is_so()

    wait_until(sent, 10, "the view has no effect")


def test_it_joins_two_routers_once_it_has_heard_both_and_follows_each(two: tuple[Router, Second]) -> None:
    first, second = two
    first.publish(1, 1)  # lists it already, as a router may that knew it before
    publish_until(second, ClusterView(9, 1, ()), lambda: first.loop.contacts.num_views[1] > 0)
    join = second.next()
    assert isinstance(join, Join) and join.instance.incarnation == first.info.incarnation
    assert first.loop.contacts.joined_routers == (0,)
    publish_until(second, ClusterView(9, 2, (first.info,)), lambda: first.loop.contacts.joined_routers == (0, 1))
    first.publish(2, 1)
    assert first.replaced == [0], "requests of the second router go on"


def test_a_router_that_it_hears_after_it_was_a_member_is_told_that_it_returns(two: tuple[Router, Second]) -> None:
    """There may be a newer process of its rank there."""
    first, second = two
    first.publish(7, 3)
    publish_until(second, ClusterView(9, 1, ()), lambda: first.loop.contacts.num_views[1] > 0)
    joins = [second.next() for _ in range(3)]
    returns = [join.instance.first_view for join in joins if isinstance(join, Join)]
    assert returns[-1] == (7, 3)


def test_a_drain_that_one_router_asks_for_is_told_to_the_other_until_its_view_shows_it(
    two: tuple[Router, Second],
) -> None:
    first, second = two
    first.publish(1, 1)
    publish_until(second, ClusterView(9, 1, (first.info,)), lambda: first.loop.contacts.joined_routers == (0, 1))
    first.publish(1, 2, draining=True)
    told = 0
    while told < 2:
        told += isinstance(second.next(), Drain)
    draining = msgspec.structs.replace(first.info, draining=True)
    publish_until(second, ClusterView(9, 2, (draining,)), lambda: first.loop.contacts.routers[1].knows_drain)
    assert first.drains == 1


def test_a_router_that_is_silent_for_a_lease_counts_as_away_and_the_other_one_does_not(
    two: tuple[Router, Second],
) -> None:
    first, second = two
    first.publish(1, 1)
    publish_until(second, ClusterView(9, 1, (first.info,)), lambda: first.loop.contacts.joined_routers == (0, 1))
    publish_until(second, ClusterView(9, 1, (first.info,)), lambda: first.loop.contacts.joined_routers == (1,))
    first.publish(1, 2)
    assert first.loop.contacts.joined_routers == (0, 1)
    assert first.silent == [0], "its orders count"


def shown(first: Router, version: int, **changes: object) -> None:
    """Show a record of the instance in the first router's view, until the loop has it."""
    record = msgspec.structs.replace(first.info, **changes)

    def has_come() -> bool:
        first.send_view(ClusterView(1, version, (record,)))
        return any(view.router_incarnation == 1 and view.version == version for view in first.views)

    wait_until(has_come, 10, "the view never arrived")


def test_a_change_of_role_that_its_router_takes_back_is_over_for_the_other_one_too(two: tuple[Router, Second]) -> None:
    first, second = two
    first.publish(1, 1)
    publish_until(second, ClusterView(9, 1, (first.info,)), lambda: first.loop.contacts.joined_routers == (0, 1))
    shown(first, 2, draining=True, becomes="prefill:2")
    told = second.next()
    while not (isinstance(told, Join) and told.instance.becomes == "prefill:2"):
        told = second.next()
    shown(first, 3)
    changing = msgspec.structs.replace(first.info, draining=True, becomes="prefill:2")
    before = len(first.views)
    publish_until(second, ClusterView(9, 2, (changing,)), lambda: len(first.views) > before)  # it comes late
    told = second.next()
    while not (isinstance(told, Join) and not told.instance.draining):
        told = second.next()
    publish_until(second, ClusterView(9, 3, (first.info,)), lambda: first.loop.contacts.routers[1].knows_drain)
    assert first.orders == ["prefill:2", "stay"]
    publish_until(second, ClusterView(9, 4, (changing,)), lambda: len(first.orders) > 2)
    assert first.orders[2:] == ["prefill:2"], "the other router asks anew"


def test_one_whose_rank_was_taken_while_its_role_changed_gets_the_one_that_the_first_router_names(
    two: tuple[Router, Second],
) -> None:
    first, second = two
    publish_until(second, ClusterView(9, 1, ()), lambda: first.loop.contacts.num_views[1] > 0)
    versions = itertools.count(1)

    def begin_again(**changes: object) -> None:
        first.publish(1, next(versions))  # lest it is silent for a lease
        first.info = msgspec.structs.replace(first.info, **changes)
        assert first.loop.change(first.info, NoPeers(), 5.0)

    def refuse(router: Router | Second, free_rank: int) -> None:
        """Refuse the next join of the present incarnation."""
        while True:
            assert router.coordination.poll(5000), "no join came"
            identity, frame = router.coordination.recv_multipart()
            join = coordination_codec.decode(frame)
            if isinstance(join, Join) and join.instance.incarnation == first.info.incarnation:
                break
        refusal = JoinReply(first.info.incarnation, code="rank_taken", message="for a test", free_rank=free_rank)
        router.coordination.send_multipart([identity, encode(refusal)])

    begin_again(role=Role.PREFILL, engine_rank=2, incarnation=78, former=(77,))
    refuse(first, 5)
    wait_until(lambda: first.orders, 5, "it was not told")
    assert first.orders == ["prefill:5"] and not first.refusals
    while second.coordination.poll(0):
        join = second.next()
        assert isinstance(join, Join) and join.instance.incarnation == 77, (
            "it joined the second router before the first"
        )
    begin_again(engine_rank=5, incarnation=79, former=(77, 78))
    first.publish(1, next(versions))
    refuse(second, 6)
    refuse(second, 6)  # it asks again: the first router's word counts
    assert first.orders == ["prefill:5"] and not first.refusals
