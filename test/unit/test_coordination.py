"""Membership: leases, incarnations, compatibility. No sockets, no sleeping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from support.clock import FakeClock

from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import BadFrame, Capacity, Internal, LastInstance, RoleRefused
from chitu.instance.contacts import SilenceWatch
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
from chitu.router.candidates import Candidates
from chitu.types import Role, place_of, place_text

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
# A router that has gone silent, a step thread that hangs: what an instance does about either.


DEADLINES = DeadlineConfig(heartbeat_interval_s=0.5, router_s=1.5, step_s=2.0)


def test_silence_counts_the_turns_in_which_nothing_came_and_starts_anew_with_every_sign() -> None:
    silence = Silence(0.5)
    assert [silence.seconds(count) for count in (0, 0, 0, 1, 1)] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_each_silence_of_the_router_is_told_once_when_it_is_long_enough() -> None:
    watch = SilenceWatch(DEADLINES)
    views = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [watch.look([count], turn) for turn, count in enumerate(views)] == [
        *([[]] * 3),
        [(0, 1.5)],
        *([[]] * 5),
        [(0, 1.5)],
    ]


def test_a_cluster_has_ended_after_twenty_such_silences_in_a_row() -> None:
    watch = SilenceWatch(DEADLINES)
    abandoned = []
    for turn in range(62):
        watch.look([1], turn)
        abandoned.append(watch.is_abandoned)
    assert abandoned == [False] * 60 + [True] * 2
    watch.look([2], 62)
    assert not watch.is_abandoned


def test_a_step_that_does_not_end_ends_the_process_and_a_slow_one_does_not() -> None:
    watch = SilenceWatch(DEADLINES)
    for turns, view in enumerate(range(20)):
        watch.look([view], turns // 4)  # each step takes 1.5 s
    with pytest.raises(Internal, match=r"the step thread has made no progress for 2.0 s \(deadlines.step_s\)"):
        for view in range(20, 30):
            watch.look([view], 99)


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


BOTH = (Role.PREFILL, Role.DECODE)


def pairs(index: int = 0) -> World:
    """Return a cluster of P0, P1, D0 and D1, which can change their roles; the topology lists P2, too."""
    world = World([(Role.PREFILL, rank) for rank in range(3)], index)
    for place, (role, rank) in enumerate([(role, rank) for role in BOTH for rank in range(2)], 1):
        world.join(msgspec.structs.replace(info(role, rank, place), roles=BOTH, pid=100 + place))
    world.pass_time(0.1)
    return world


def member(world: World, name: str) -> InstanceInfo:
    return next(each for each in world.core.view.instances if each.name == name)


def life_after(drained: InstanceInfo, incarnation: int) -> InstanceInfo:
    """Return what an instance joins with once it has ended the incarnation that drains."""
    role, rank = place_of(drained.becomes)
    home = drained.home or place_text(drained.role, drained.engine_rank)
    return msgspec.structs.replace(
        drained,
        role=role,
        engine_rank=rank,
        incarnation=incarnation,
        draining=False,
        becomes="",
        former=(*drained.former, drained.incarnation),
        home="" if home == drained.becomes else home,
    )


def test_an_instance_changes_its_role_in_one_change_of_the_view_and_back_again() -> None:
    """It never gets the place of a process that may be started again, be it P2, which the topology lists."""
    world = pairs()
    asked = world.core.change_role(Role.DECODE, 1, Role.PREFILL)
    assert (asked.draining, asked.becomes) == (True, "prefill:3") and member(world, "D1") == asked
    world.views.clear()
    new = life_after(asked, 9)
    assert world.join(new).code == ""
    assert [i.name for i in world.core.view.instances] == ["D0", "P0", "P1", "P3"] and member(world, "P3") == new
    assert world.core.view.lost[-1].reason == "it became P3" and not world.died
    assert not any({i.incarnation for i in view.instances} >= {4, 9} for view in world.views), "twice in a view"
    assert world.join(asked).code == "rank_taken", "the old incarnation came back"
    back = world.core.change_role(Role.PREFILL, 3, Role.DECODE)
    assert back.becomes == "decode:1", "its home"
    assert world.join(life_after(back, 11)).code == "" and member(world, "D1").home == ""
    assert world.core.change_role(Role.DECODE, 0, Role.PREFILL).becomes == "prefill:3", "free again"


def test_changes_of_role_that_are_refused_change_nothing() -> None:
    world = pairs()
    world.core.change_role(Role.DECODE, 1, Role.PREFILL)
    world.core.drain(Role.PREFILL, 1)
    version = world.core.view.version
    for role, rank, wanted, why in [
        (Role.DECODE, 1, Role.PREFILL, "D1 becomes P3 already"),
        (Role.PREFILL, 1, Role.DECODE, "P1 drains already"),
        (Role.PREFILL, 0, Role.PREFILL, "P0 is a prefill instance already"),
        (Role.PREFILL, 0, Role.UNIFIED, "P0 cannot become a unified instance"),
    ]:
        with pytest.raises(RoleRefused, match=why):
            world.core.change_role(role, rank, wanted)
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    world.join(msgspec.structs.replace(info(Role.UNIFIED, 0, 20, other), roles=BOTH))
    with pytest.raises(RoleRefused, match="page_size"):
        world.core.change_role(Role.UNIFIED, 0, Role.DECODE)
    assert world.core.view.version == version + 1


def test_two_changes_at_once_get_two_places_and_a_death_gives_its_place_back() -> None:
    world = pairs()
    first = world.core.change_role(Role.DECODE, 0, Role.PREFILL)
    second = world.core.change_role(Role.DECODE, 1, Role.PREFILL)
    assert (first.becomes, second.becomes) == ("prefill:3", "prefill:4")
    joining = msgspec.structs.replace(info(Role.PREFILL, 3, 30), yields=True)
    assert world.join(joining).code == "rank_taken", "an added instance took the place"
    world.core.on_death(Role.DECODE, 0, 3)
    assert world.join(joining).code == ""
    assert world.join(life_after(first, 31)).code == "rank_taken", "it would replace the added one"
    assert world.join(life_after(second, 32)).code == "" and member(world, "P4").former == (4,)


def test_a_drain_wins_over_a_change_of_role_at_every_moment() -> None:
    world = pairs()
    asked = world.core.change_role(Role.DECODE, 1, Role.PREFILL)
    world.core.drain(Role.DECODE, 1)
    assert member(world, "D1").draining and not member(world, "D1").becomes
    assert world.join(asked).code == "" and not member(world, "D1").becomes, "a late repetition of its join"
    assert world.join(life_after(asked, 9)).code == "" and member(world, "P3").draining, (
        "the drain came too late for D1"
    )
    other = world.core.change_role(Role.DECODE, 0, Role.PREFILL)
    assert other.becomes == "prefill:4"
    world.core.on_message(Drain(Role.DECODE, 0, 3))  # it got a signal
    assert world.core.change_role(Role.PREFILL, 0, Role.DECODE).becomes == "decode:2", "D1 belongs to a process"
    assert member(world, "D0").becomes == ""


def test_a_new_router_and_another_one_learn_of_a_change_of_role_from_the_instance() -> None:
    asked = pairs().core.change_role(Role.DECODE, 1, Role.PREFILL)
    new, other = World(), pairs()
    assert new.join(msgspec.structs.replace(asked, first_view=(7, 1))).code == ""
    assert other.join(asked).code == "" and member(other, "D1").becomes == "prefill:3"
    for world in (new, other):
        taken = msgspec.structs.replace(info(Role.PREFILL, 3, 30), yields=True)
        assert world.join(taken).code == "rank_taken"
        assert world.join(life_after(asked, 9)).code == ""
        assert "D1" not in {i.name for i in world.core.view.instances}
        assert world.core.change_role(Role.PREFILL, 3, Role.DECODE).becomes == "decode:1"


def test_a_process_that_is_started_again_takes_its_own_place_and_what_it_had_become_is_gone() -> None:
    world = pairs()
    world.join(life_after(world.core.change_role(Role.DECODE, 1, Role.PREFILL), 9))
    added = msgspec.structs.replace(info(Role.DECODE, 1, 10), yields=True)
    assert world.join(added).code == "rank_taken", "an added instance took the place of one that moved"
    assert world.join(info(Role.DECODE, 1, 11)).code == ""
    assert [i.name for i in world.core.view.instances] == ["D0", "D1", "P0", "P1"] and world.died == [9]


def test_a_place_that_is_none_is_a_bad_frame() -> None:
    world = World()
    assert world.join(msgspec.structs.replace(info(), home="prefill")).code == BadFrame.code
    assert world.join(msgspec.structs.replace(info(), becomes="none:1")).code == BadFrame.code and not world.views


def two_cores() -> tuple[World, World]:
    """Return two routers over P0, P1, D0 and D1, whose heartbeats say that both have them."""
    both = pairs(), pairs(index=1)
    for world in both:
        for each in world.core.view.instances:
            beat_from(world, each, 0, 1)
    return both


def beat_from(world: World, instance: InstanceInfo, *routers: int) -> None:
    place = instance.role, instance.engine_rank, instance.incarnation
    world.core.on_heartbeat(Heartbeat(*place, LoadReport(), routers=routers))


def is_usable(world: World) -> bool:
    return Candidates.in_view(world.core.view).usable


def test_of_two_that_got_one_name_from_two_routers_the_second_is_told_another_rank() -> None:
    world, other = two_cores()
    first = world.core.change_role(Role.DECODE, 0, Role.PREFILL)
    second = other.core.change_role(Role.DECODE, 1, Role.PREFILL)
    assert first.becomes == second.becomes == "prefill:3"
    for each in (world, other):
        each.join(first)
        each.join(second)
    assert world.join(life_after(first, 30)).code == ""
    refused = world.join(life_after(second, 31))
    assert (refused.code, refused.free_rank) == ("rank_taken", 4)
    again = life_after(msgspec.structs.replace(second, becomes="prefill:4", former=(31,)), 32)
    for each in (world, other):
        assert each.join(again).code == ""
        assert each.join(life_after(first, 30)).code == ""
        assert [i.name for i in each.core.view.instances] == ["P0", "P1", "P3", "P4"]
    plain = msgspec.structs.replace(info(Role.PREFILL, 3, 77), yields=True)
    assert world.join(plain).free_rank == -1, "one that never changed its role was started for another rank"


def test_two_routers_that_together_take_the_last_p_both_take_their_change_back() -> None:
    world, other = two_cores()
    one = world.core.change_role(Role.PREFILL, 0, Role.DECODE, is_revocable=True)
    two = other.core.change_role(Role.PREFILL, 1, Role.DECODE, is_revocable=True)
    world.join(two)  # each instance tells the other router
    other.join(one)
    assert is_usable(world) and is_usable(other)
    assert not member(world, "P0").draining and not member(other, "P1").draining
    for each in (world, other):
        for name in ("P0", "P1"):
            stays = msgspec.structs.replace(member(pairs(), name), draining=False, becomes="")
            each.join(stays)
            assert not member(each, name).draining, "the other router does not learn that it stays"
    assert world.core.change_role(Role.PREFILL, 0, Role.DECODE).becomes == "decode:2", "its place is free again"


def test_a_change_is_taken_back_if_the_last_other_one_dies_or_drains_and_not_if_it_was_forced() -> None:
    def asked(is_revocable: bool) -> World:
        world = pairs()
        world.core.change_role(Role.PREFILL, 0, Role.DECODE, is_revocable=is_revocable)
        return world

    for is_revocable in (True, False):
        world = asked(is_revocable)
        world.core.on_death(Role.PREFILL, 1, 2)
        assert is_usable(world) is is_revocable and member(world, "P0").draining is not is_revocable
        world = asked(is_revocable)
        world.core.on_message(Drain(Role.PREFILL, 1, 2))
        assert member(world, "P0").draining is not is_revocable
        world = asked(is_revocable)
        world.core.drain(Role.PREFILL, 0)
        world.core.on_death(Role.PREFILL, 1, 2)
        assert member(world, "P0").draining, "an operator wants it to leave"
    world = asked(True)
    late = member(pairs(), "P0")
    world.join(late)
    assert member(world, "P0").becomes == "decode:2", "a late repetition of a join ended the change"


def test_an_instance_may_go_only_if_others_serve_that_every_router_has() -> None:
    world = pairs()
    world.core.require_others(Role.PREFILL, 0, "chitu drain P0")
    world.core.change_role(Role.PREFILL, 1, Role.DECODE)
    with pytest.raises(LastInstance, match="without P0 nothing could be served"):
        world.core.require_others(Role.PREFILL, 0, "chitu drain P0")
    world.core.require_others(Role.PREFILL, 1, "chitu drain P1")  # it drains already
    world, _ = two_cores()
    beat_from(world, member(world, "P1"), 0)
    with pytest.raises(LastInstance):
        world.core.require_others(Role.PREFILL, 0, "chitu drain P0")
    beat_from(world, member(world, "P1"), 1)  # this router has it, whatever it has heard
    world.core.require_others(Role.PREFILL, 0, "chitu drain P0")
