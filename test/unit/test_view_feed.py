"""The cluster view as numbered changes: a reader that loses messages has an earlier view, never a wrong one."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from chitu.net.view_feed import ASK_S, KEPT_LOST, Readers, ViewReceiver, ViewSender
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    InstanceInfo,
    KVLayout,
    LostInstance,
    ViewChange,
    ViewMessage,
    encode,
    view_codec,
)
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)


def info(rank: int, incarnation: int, role: Role = Role.PREFILL) -> InstanceInfo:
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 1000 + rank, 2000, LAYOUT, 512)


class Router:
    """A `ViewSender` and what it has sent, each message decoded anew."""

    def __init__(self, incarnation: int = 7) -> None:
        self.sender = ViewSender(incarnation)
        self.views = {0: self.sender.view}

    def publish(self) -> ViewChange:
        change = view_codec.decode(encode(self.sender.next_change()))
        assert isinstance(change, ViewChange)
        self.views[change.version] = self.sender.view
        return change

    def whole(self) -> ViewMessage:
        return view_codec.decode(encode(self.sender.view))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(Role), st.integers(0, 3), st.integers(1, 6)),
        st.tuples(st.just("remove"), st.sampled_from(Role), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["dead", "flush"]), st.none(), st.just(0), st.integers(1, 6)),
        st.tuples(st.sampled_from(["publish", "lose", "whole"]), st.none(), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_a_reader_always_has_a_view_of_the_router_and_asks_when_it_is_not_the_newest(
    steps: list[tuple[str, Role | None, int, int]],
) -> None:
    router, reader = Router(), ViewReceiver(0.0)
    members: dict[tuple[Role, int], InstanceInfo] = {}
    for time, (name, role, rank, number) in enumerate(steps, 1):
        if name == "put" and role is not None:
            members[role, rank] = info(rank, number, role)
            router.sender.put(members[role, rank])
        elif name == "remove" and role is not None and (role, rank) in members:
            member = members.pop((role, rank))
            router.sender.remove(member, LostInstance(member.incarnation, "it left", False))
        elif name == "dead":
            router.sender.note_dead([number])
        elif name == "flush":
            router.sender.set_cache_flush(number)
        elif name == "lose":
            router.publish()
        elif name in ("publish", "whole"):
            change = router.publish()
            is_current = reader.take(router.whole() if name == "whole" else change)
            assert is_current == (reader.view == router.sender.view) == (reader.view.version == change.version)
            assert reader.should_ask(2 * ASK_S * time) is not is_current
        if reader.view.version >= 0:
            assert reader.view == router.views[reader.view.version]
    router.publish()
    assert reader.take(router.whole())
    assert reader.view == router.sender.view
    assert reader.view.instances == tuple(members[place] for place in sorted(members))


def test_what_repeats_says_that_nothing_was_missed_and_shows_what_was() -> None:
    router, reader = Router(), ViewReceiver(0.0)
    router.sender.put(info(0, 1))
    assert not reader.take(router.publish()), "it has no view of this router yet"
    assert reader.take(router.whole())
    view = reader.view
    assert reader.take(router.publish()) and reader.view is view, "nothing has changed"
    router.sender.put(info(1, 2))
    router.publish()
    assert not reader.take(router.publish()) and reader.view is view, "one was lost, and this one is empty"
    router.sender.put(info(2, 3))
    assert not reader.take(router.publish()), "nor is a later one taken"
    assert reader.view is view
    assert reader.take(router.whole())
    assert [member.incarnation for member in reader.view.instances] == [1, 2, 3]


def test_it_asks_for_the_whole_view_and_again_only_after_a_while() -> None:
    router, reader = Router(), ViewReceiver(10.0)
    router.sender.put(info(0, 1))
    reader.take(router.publish())
    assert not reader.should_ask(10.0 + ASK_S / 2), "its subscription has asked"
    assert reader.should_ask(10.0 + ASK_S)
    assert not reader.should_ask(10.0 + 1.5 * ASK_S)
    assert reader.should_ask(10.0 + 2 * ASK_S)
    reader.take(router.whole())
    assert not reader.should_ask(100.0)


def test_the_tail_of_an_older_connection_changes_nothing() -> None:
    router, reader = Router(), ViewReceiver(0.0)
    router.sender.put(info(0, 1))
    late = router.publish(), router.whole()
    router.sender.remove(info(0, 1), LostInstance(1, "it left", False))
    router.publish()
    assert reader.take(router.whole())
    for message in late:
        assert reader.take(message), "it is no sign that something is missing"
        assert reader.view == router.sender.view


def test_a_change_of_another_router_is_taken_behind_its_whole_view_alone() -> None:
    old, new, reader = Router(7), Router(8), ViewReceiver(0.0)
    old.sender.put(info(0, 1))
    old.publish()
    reader.take(old.whole())
    new.sender.put(info(1, 2))
    assert not reader.take(new.publish())
    assert reader.view.router_incarnation == 7
    assert reader.take(new.whole())
    new.sender.put(info(2, 3))
    assert reader.take(new.publish())
    assert [member.incarnation for member in reader.view.instances] == [2, 3]


def test_members_that_come_and_go_between_two_numbers_are_one_change_with_every_loss() -> None:
    router, reader = Router(), ViewReceiver(0.0)
    router.sender.put(info(0, 1))
    router.publish()
    reader.take(router.whole())
    count = KEPT_LOST + 10
    for incarnation in range(1, count):
        router.sender.remove(info(0, incarnation), LostInstance(incarnation, "it left", False))
        router.sender.put(info(0, incarnation + 1))
    change = router.publish()
    assert (change.after, change.version) == (1, 2)
    assert (change.joined, change.left) == ((info(0, count),), ())
    assert [lost.incarnation for lost in change.lost] == list(range(1, count))
    assert reader.take(change) and reader.view == router.sender.view
    assert len(reader.view.lost) == KEPT_LOST


def test_a_change_is_as_long_as_what_changed() -> None:
    def length(members: int) -> int:
        router = Router()
        for rank in range(members):
            router.sender.put(info(rank, rank + 1))
        router.publish()
        joins = info(200, 1)  # encoded alike in both
        router.sender.put(msgspec.structs.replace(joins, engine_rank=1000))
        return len(encode(router.sender.next_change()))

    assert length(500) == length(5)


def test_only_a_subscription_to_the_topic_of_a_reader_asks() -> None:
    reader = ViewReceiver(0.0)
    seen = Readers()
    others = (
        b"",
        b"\x01",
        b"\x01view",
        b"\x00" + reader.topic,
        b"\x01" + reader.topic[:-8],
        b"\x01" + reader.topic + b"x",
    )
    assert not any(seen.take(frame) for frame in others) and not seen.waiting
    assert seen.take(b"\x01" + reader.topic) and seen.waiting == {reader.topic: PROTOCOL_VERSION}
    assert isinstance(reader.view, ClusterView) and reader.view.version == -1


def test_changes_go_out_in_an_older_version_as_long_as_someone_reads_it() -> None:
    old, seen = ViewReceiver(0.0), Readers()
    old.protocol = OLDEST_VERSION
    changes, whole = old.topics
    assert (changes, whole[:5]) == (b"view", b"whole"), (
        "the topics of version 20 are those that its release subscribes to"
    )
    assert seen.take(b"\x01" + whole) and seen.waiting == {whole: OLDEST_VERSION}
    assert not seen.take(b"\x01" + changes) and seen.versions == {OLDEST_VERSION, PROTOCOL_VERSION}
    for topic in ViewReceiver(0.0).topics:
        seen.take(b"\x00" + topic)
    assert seen.versions == {OLDEST_VERSION, PROTOCOL_VERSION}
    seen.take(b"\x00" + changes)
    assert seen.versions == {PROTOCOL_VERSION}
