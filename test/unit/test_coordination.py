"""Membership: leases, incarnations, compatibility. No sockets, no sleeping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from support.clock import FakeClock

from chitu.config.schema import DeadlineConfig
from chitu.errors import BadFrame, Capacity
from chitu.instance.requests import KEPT, REPEATS, FailureReports
from chitu.net.view_feed import KEPT_DEAD
from chitu.pd_coordination import LINGER_S, PDCoordination
from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    Drain,
    Heartbeat,
    InstanceInfo,
    Join,
    JoinReply,
    KVLayout,
    Leave,
    LoadReport,
    RequestFailed,
)
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)


def info(role: Role = Role.PREFILL, rank: int = 0, incarnation: int = 1, layout: KVLayout = LAYOUT) -> InstanceInfo:
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 1000 + rank, 2000, layout, 512)


class World:
    def __init__(self, places: Sequence[tuple[Role, int]] = (), index: int = 0) -> None:
        self.clock = FakeClock()
        self.lost: list[tuple[int, str]] = []
        self.died: list[int] = []
        """Incarnations in `lost` that were reported as dead."""
        self.views: list[ClusterView] = []
        self.on_joined: Callable[[InstanceInfo], None] = lambda instance: None
        self.core = PDCoordination(self.clock, DeadlineConfig(lease_s=3.0), 7, self, places, index)

    def on_change(self) -> None:
        self.core.next_change()
        self.views.append(self.core.view)

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        self.lost.append((instance.incarnation, reason))
        self.died += [instance.incarnation] if has_died else []

    def join(self, instance: InstanceInfo, version: int = PROTOCOL_VERSION) -> JoinReply:
        reply = self.core.on_message(Join(version, instance))
        assert isinstance(reply, JoinReply)
        return reply

    def beat(self, instance: InstanceInfo) -> bool:
        return self.core.on_heartbeat(
            Heartbeat(instance.role, instance.engine_rank, instance.incarnation, LoadReport(running=5))
        )

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            self.core.tick()

    @property
    def members(self) -> set[tuple[Role, int, int]]:
        return {(i.role, i.engine_rank, i.incarnation) for i in self.core.view.instances}


def test_a_join_is_accepted_once_and_published() -> None:
    world = World()
    assert world.join(info()) == JoinReply(1, lease_s=3.0)
    assert world.join(info()).code == ""
    assert [view.version for view in world.views] == [1]
    assert world.views[0].router_incarnation == 7
    assert world.members == {(Role.PREFILL, 0, 1)}


def test_a_router_without_a_descriptor_says_nothing_and_takes_the_instance_later() -> None:
    """The router sends no answer, because any answer but a welcome is final and ends the instance."""
    world = World()

    def full(instance: InstanceInfo) -> None:
        raise Capacity("Too many open files")

    world.on_joined = full
    assert world.core.on_message(Join(PROTOCOL_VERSION, info())) is None
    assert (world.members, world.views) == (set(), [])
    assert not world.beat(info())
    world.on_joined = lambda instance: None
    assert world.join(info()) == JoinReply(1, lease_s=3.0)
    assert world.members == {(Role.PREFILL, 0, 1)}


def test_an_instance_that_cannot_be_sent_anything_is_refused_and_no_member() -> None:
    world = World()

    def nowhere(instance: InstanceInfo) -> None:
        raise BadFrame("no address")

    world.on_joined = nowhere
    assert world.join(info()).code == "bad_frame"
    assert (world.members, world.views) == (set(), [])


def test_heartbeats_renew_and_silence_ends_the_lease() -> None:
    world = World()
    world.join(info())
    world.pass_time(2.5)
    assert world.beat(info())
    world.pass_time(2.5)
    assert world.members
    world.pass_time(1.0)
    assert not world.members
    assert world.lost == [(1, "no heartbeat for 3 s")]
    assert not world.beat(info())
    assert world.core.metrics().unknown_heartbeats == 1
    assert world.join(info()).code == ""
    assert world.members


def test_ages_lost_leases_and_deaths_are_counted_by_instance() -> None:
    world = World()
    world.join(info())
    world.pass_time(2.0)
    world.beat(info())
    world.pass_time(1.0)
    metrics = world.core.metrics()
    assert (metrics.ages_s, metrics.heartbeat_ages_s) == ({"P0": pytest.approx(3.0)}, {"P0": pytest.approx(1.0)})
    assert (metrics.expired_leases, metrics.deaths) == ({}, {})
    world.pass_time(3.0)
    world.join(info(incarnation=2))
    world.core.on_death(Role.PREFILL, 0, 1)
    assert world.core.metrics().deaths == {}, "of an incarnation that is gone already"
    world.core.on_death(Role.PREFILL, 0, 2)
    world.join(info(incarnation=3))
    world.core.on_message(Leave(Role.PREFILL, 0, 3, "stopped"))
    metrics = world.core.metrics()
    assert (metrics.expired_leases, metrics.deaths, metrics.ages_s) == ({"P0": 1}, {"P0": 1}, {})


def test_a_death_counts_once_whoever_tells_of_it_first() -> None:
    world = World()
    tells: list[Callable[[int], object]] = [
        lambda incarnation: world.core.on_death(Role.PREFILL, 0, incarnation),
        lambda incarnation: world.core.on_message(Leave(Role.PREFILL, 0, incarnation, "its launcher saw it", (77,))),
    ]
    for incarnation in (1, 2):
        world.join(info(incarnation=incarnation))
        for tell in tells[:: 1 if incarnation == 1 else -1]:
            tell(incarnation)
        assert world.core.metrics().deaths == {"P0": incarnation}


def test_heartbeats_that_the_router_has_not_read_yet_are_no_silence() -> None:
    world = World()
    world.join(info())
    read_until_s = world.clock.monotonic()
    for _ in range(100):
        world.clock.advance(0.05)
        world.core.tick(read_until_s + 2.9)
    assert world.members, "its lease had not ended by the time of the newest heartbeat that was read"
    world.core.tick(read_until_s + 3.1)
    assert not world.members


def test_a_stall_of_the_router_is_not_the_instances_silence() -> None:
    world = World()
    world.join(info())
    world.clock.advance(60)
    world.core.tick()
    assert world.members
    world.pass_time(3.5)
    assert not world.members


@pytest.mark.parametrize(("first", "second"), [(5, 6), (6, 5)])
def test_a_process_that_just_started_takes_the_place_of_another_which_is_refused(first: int, second: int) -> None:
    world = World()
    world.join(info(incarnation=first))
    assert world.join(info(incarnation=second)).code == ""
    assert [incarnation for incarnation, _ in world.lost] == [first]
    assert world.members == {(Role.PREFILL, 0, second)}
    reply = world.join(info(incarnation=first))
    assert reply.code == "rank_taken" and f"incarnation {second}" in reply.message
    world.core.on_message(Leave(Role.PREFILL, 0, first))
    assert world.members == {(Role.PREFILL, 0, second)}
    world.core.on_message(Leave(Role.PREFILL, 0, second))
    assert world.join(info(incarnation=first)).code == "rank_taken", "peers take it for dead"
    assert world.join(info(incarnation=second)).code == ""


def test_one_that_returns_takes_nobodys_place_and_is_shown_as_it_joined() -> None:
    """It may be an older process that was frozen while another took its place, at a router that is gone since."""
    world = World()
    returning = msgspec.structs.replace(info(incarnation=5), first_view=(7, 1))
    assert world.join(returning).code == "" and world.core.view.instances == (returning,)
    world.core.on_message(Leave(Role.PREFILL, 0, 5))
    world.join(info(incarnation=6))
    assert world.join(returning).code == "rank_taken"
    world.join(msgspec.structs.replace(info(incarnation=6), first_view=(7, 1)))
    assert world.core.view.instances == (info(incarnation=6),), "it was new to this router"


def test_of_two_that_come_for_one_rank_at_once_the_first_has_it_and_the_other_is_told() -> None:
    world = World()
    first, second = (msgspec.structs.replace(info(incarnation=k), yields=True, pid=k) for k in (5, 6))
    assert [world.join(first).code, world.join(second).code] == ["", "rank_taken"]
    assert world.join(first).code == "" and world.members == {(Role.PREFILL, 0, 5)}
    assert world.lost == []
    world.core.on_message(Leave(Role.PREFILL, 0, 5))
    assert world.join(second).code == "", "nobody has it any more"
    assert world.join(info(incarnation=7)).code == "", "a launcher starts what died anew"


def test_leaves_of_another_incarnation_are_nobodys() -> None:
    world = World()
    world.join(info(incarnation=6))
    world.core.on_message(Leave(Role.PREFILL, 0, 5))
    assert world.members == {(Role.PREFILL, 0, 6)}
    world.core.on_message(Leave(Role.PREFILL, 0, 6))
    assert not world.members


def test_another_protocol_version_is_refused_with_both() -> None:
    reply = World().join(info(), version=99)
    assert (
        reply.code == "config"
        and "99" in reply.message
        and f"speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}" in reply.message
    )


def test_incompatible_layouts_are_refused_with_both_printed() -> None:
    world = World()
    world.join(info())
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    reply = world.join(info(Role.DECODE, layout=other))
    assert reply.code == "incompatible_layout"
    assert "page_size=32" in reply.message and "page_size=16" in reply.message
    assert world.members == {(Role.PREFILL, 0, 1)}
    # An instance may come back with another layout once it is alone.
    assert world.join(info(incarnation=2, layout=other)).code == ""
    assert world.join(info(Role.DECODE, layout=other)).code == ""
    # A unified instance exchanges no pages, so only the model has to be the same.
    assert world.join(info(Role.UNIFIED, layout=LAYOUT)).code == ""
    wrong = msgspec.structs.replace(LAYOUT, model_hash="other")
    assert world.join(info(Role.UNIFIED, 1, layout=wrong)).code == "incompatible_layout"


def test_a_draining_instance_stays_a_member_and_is_marked() -> None:
    world = World()
    world.join(info())
    world.core.on_message(Drain(Role.PREFILL, 0, 1))
    assert world.core.view.instances[0].draining
    world.join(info())
    assert world.core.view.instances[0].draining
    assert len(world.views) == 2


def leave(instance: InstanceInfo, *dead_pids: int, namespace: str = "here") -> Leave:
    return Leave(instance.role, instance.engine_rank, instance.incarnation, "killed", dead_pids, namespace)


HERE = msgspec.structs.replace(info(), pid=10, follower_pids=(11,), pid_namespace="here")
PROOFS: dict[str, tuple[InstanceInfo, Leave]] = {
    "all ranks": (HERE, leave(HERE, 9, 10, 11)),
    "one rank": (SINGLE := msgspec.structs.replace(HERE, follower_pids=()), leave(SINGLE, 10)),
}
NO_PROOFS: dict[str, tuple[InstanceInfo, Leave]] = {
    "it leaves by itself": (HERE, Leave(Role.PREFILL, 0, 1, "stopped")),
    "a rank may live": (HERE, leave(HERE, 10)),
    "another process": (HERE, leave(HERE, 11, 12)),
    "another machine": (HERE, leave(HERE, 10, 11, namespace="there")),
    "nobody knows where": (
        NOWHERE := msgspec.structs.replace(HERE, pid_namespace=""),
        leave(NOWHERE, 10, 11, namespace=""),
    ),
    "without a pid": (info(), leave(info(), 0)),
}


@pytest.mark.parametrize("case", [*PROOFS, *NO_PROOFS])
def test_only_who_has_no_process_left_for_certain_is_called_dead_and_not_at_once(case: str) -> None:
    instance, message = {**PROOFS, **NO_PROOFS}[case]
    world = World()
    world.join(instance)
    world.core.on_message(message)
    assert not world.members
    world.pass_time(LINGER_S - 0.1)
    assert world.core.view.dead == (), "its kernel may still send"
    world.pass_time(60)
    assert world.core.view.dead == ((1,) if case in PROOFS else ())
    assert world.views[-1] == world.core.view


@pytest.mark.parametrize(
    ("how", "is_death"),
    [
        (lambda world: world.core.on_death(Role.PREFILL, 0, 1), True),
        (lambda world: world.core.on_message(Leave(Role.PREFILL, 0, 1, "its launcher saw it end", (5,), "n")), True),
        (lambda world: world.join(info(incarnation=2)), True),
        (lambda world: world.core.on_message(Leave(Role.PREFILL, 0, 1, "stopped")), False),
        (lambda world: world.pass_time(3.2), False),
    ],
    ids=["its process ended", "its launcher says so", "replaced", "goodbye", "silence"],
)
def test_who_is_lost_is_told_as_dead_where_its_process_is(how: Callable[[World], object], is_death: bool) -> None:
    world = World()
    world.join(info())
    how(world)
    assert len(world.lost) == 1 and world.died == [1] * is_death


def test_a_death_on_this_machine_is_told_and_silence_is_none() -> None:
    world = World()
    for incarnation, followers, ends in ((1, (), True), (2, (11,), True), (3, (), False)):
        world.join(msgspec.structs.replace(info(incarnation=incarnation), pid=10, follower_pids=followers))
        if ends:
            world.core.on_death(Role.PREFILL, 0, incarnation)
        world.pass_time(10)
        assert not world.members
    assert world.core.view.dead == (1,), "a follower may still write, and a silent one may be frozen"


def test_the_view_keeps_the_last_deaths() -> None:
    world = World()
    count = KEPT_DEAD + 100
    for incarnation in range(1, count):
        world.join(info(incarnation=incarnation))
        world.core.on_death(Role.PREFILL, 0, incarnation)
    world.pass_time(LINGER_S + 0.1)
    assert world.core.view.dead == tuple(range(count - KEPT_DEAD, count))


def work_of(act: Callable[[], object]) -> int:
    """Return how many lines of the product ran."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "/chitu/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def of_many(count: int) -> World:
    """Return a cluster of so many P and D on 8 machines, the last of which has joined long ago."""
    world = World()
    for rank in range(count):
        ways = (f"shm@{rank % 8}", "mooncake over tcp")
        for role in (Role.PREFILL, Role.DECODE):
            joins = msgspec.structs.replace(info(role, rank, 1 + 2 * rank + (role is Role.DECODE)), ways=ways)
            assert world.join(joins).code == ""
    world.views.clear()
    return world


def test_the_work_of_a_join_a_heartbeat_and_a_loss_does_not_depend_on_how_many_are_there() -> None:
    def work(count: int) -> dict[str, int]:
        world = of_many(count)
        joins = msgspec.structs.replace(info(Role.PREFILL, 5000, 99_999), ways=("shm@9", "mooncake over tcp"))
        later = msgspec.structs.replace(joins, first_view=(7, 1))
        alien = msgspec.structs.replace(
            joins, engine_rank=5001, layout=KVLayout.uniform("other", *([1] * 4), "float32", 9)
        )
        acts: dict[str, Callable[[], object]] = {
            "join": lambda: world.join(joins),
            "repetition": lambda: world.join(later),
            "heartbeat": lambda: world.beat(joins),
            "refusal": lambda: world.join(alien),
            "death": lambda: world.core.on_death(Role.PREFILL, 5000, 99_999),
        }
        lines = {name: work_of(act) for name, act in acts.items()}
        assert len(world.views) == 2, "a join and a death; a repetition changes nothing"
        return lines

    work(5)
    few, many = work(5), work(300)
    assert few == many
    assert all(lines > 5 for lines in few.values())


def test_any_number_of_changes_is_one_number_of_the_view() -> None:
    world = World()
    changes = 0

    def note() -> None:
        nonlocal changes
        changes += 1

    world.on_change = note  # type: ignore[method-assign]
    for rank in range(50):
        world.join(info(rank=rank, incarnation=1 + rank))
    world.core.on_death(Role.PREFILL, 0, 1)
    assert (changes, world.core.view.version, world.core.has_change) == (51, 0, True)
    change = world.core.next_change()
    assert (change.version, change.after, len(change.joined)) == (1, 0, 49)
    assert len(world.core.view.instances) == 49 and not world.core.has_change
    assert world.core.next_change().version == 1


# ----------------------------------------------------------------------------------------------------------------------
# P reports a failure at once and with its next heartbeats, since the router does not acknowledge the report.


def failed(number: int) -> RequestFailed:
    return RequestFailed(Role.PREFILL, 0, 7, number.to_bytes(16, "little"), "capacity", "for a test")


def test_a_failure_is_told_at_once_and_with_each_of_the_next_heartbeats() -> None:
    told: list[RequestFailed] = []
    reports = FailureReports(told.append)
    reports.add(failed(1))
    assert told == [failed(1)]
    assert reports.repeats() == [failed(1)]
    reports.add(failed(2))
    rest = [reports.repeats() for _ in range(REPEATS + 1)]
    assert rest == [[failed(1), failed(2)]] * (REPEATS - 1) + [[failed(2)], []]


def test_a_flood_of_failures_is_told_once_and_takes_no_more_memory() -> None:
    told: list[RequestFailed] = []
    reports = FailureReports(told.append)
    for number in range(KEPT + 5):
        reports.add(failed(number))
    assert len(told) == KEPT + 5
    assert reports.repeats() == [failed(number) for number in range(5, KEPT + 5)]
