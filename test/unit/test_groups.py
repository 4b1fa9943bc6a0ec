"""Groups of instances: their places in a topology, and what the router makes of members that live and die together."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import LAYOUT, World
from support.clock import FakeClock

from chitu.config.load import load_topology
from chitu.config.schema import BreakerConfig, DeadlineConfig, Topology
from chitu.config.topology import bound_ports, find_instance, groups, instances, places
from chitu.config.topology_checks import problems
from chitu.errors import BadFrame, LastInstance, NoInstance, RoleRefused
from chitu.launch.join import grown
from chitu.launch.plan import Entries, plan, plan_text
from chitu.pd_coordination import LINGER_S, PDCoordination
from chitu.process.node_devices import Device, NodeDevices
from chitu.process.placement import assign_devices, with_shares
from chitu.process.progress import ProgressWriter, file_of, joined, read_progress
from chitu.protocol import (
    PROTOCOL_VERSION,
    ClusterView,
    Drain,
    GroupPlace,
    Heartbeat,
    InstanceInfo,
    Join,
    Leave,
    LoadReport,
)
from chitu.protocol.weights import Weights, WeightsOrder
from chitu.router.candidates import Candidates, whole_groups
from chitu.types import Role

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
ROUTER = "dp_config.router"
LEASE_S = 3.0

# ----------------------------------------------------------------------------------------------------------- topology


def topology_of(*words: str) -> Topology:
    return load_topology(None, [f"{ROUTER}.{word}" for word in words])


TWO_ENTRIES = (
    "prefill_schedulers=[{tp_size: 2, devices: [cpu, cpu]}]",
    "decode_schedulers=[{dp_size: 2, tp_size: 2, port: 300, devices: [cpu, cpu, cpu, cpu]}, {devices: [cpu]}]",
)


def test_members_have_consecutive_ranks_ports_and_devices_of_their_own() -> None:
    devices = "['cuda:0', 'cuda:1', 'cuda:2', 'cuda:3']"
    topology = topology_of(f"decode_schedulers=[{{dp_size: 2, tp_size: 2, port: 300, devices: {devices}}}, {{}}]")
    first, second, last = (i for i in instances(topology) if i.role is D)
    assert [(i.name, i.data_rank, i.config.port) for i in (first, second, last)] == [
        ("D0", 0, 300),
        ("D1", 1, 301),
        ("D2", 0, 0),
    ]
    assert (first.config.devices, second.config.devices) == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert places(topology.dp_config.router) == [(i.role, i.engine_rank) for i in instances(topology)]
    assert [i.key[-1] for i in (first, second, last)] == ["0", "0", "1"], "a key is that of the entry"
    assert [group.name for group in groups(topology)] == ["P0", "D0-D1", "D2"]
    assert groups(topology)[1].config.port == 300 and len(groups(topology)[1].config.devices) == 4


def test_a_base_port_is_that_of_the_first_member() -> None:
    topology = topology_of("decode_schedulers=[{dp_size: 2}]")
    dp_config = msgspec.structs.replace(topology.dp_config, scheduler_base_port=400)
    topology = msgspec.structs.replace(topology, dp_config=dp_config)
    assert [find_instance(topology, D, rank).config.port for rank in (0, 1)] == [400, 401]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (TWO_ENTRIES, ""),
        (
            ("decode_schedulers=[{dp_size: 2, devices: [cpu]}]",),
            "decode_schedulers.0.devices names 1 devices, but dp_config.router.decode_schedulers.0.tp_size is 1, and "
            "dp_config.router.decode_schedulers.0.dp_size 2: give one device per rank",
        ),
        (
            ("decode_schedulers=[{dp_size: 2, port: 300}, {port: 301}]",),
            "decode_schedulers.1.port and dp_config.router.decode_schedulers.0.port (+1) are both port 301",
        ),
        (("decode_schedulers=[{dp_size: 2}]", "balance=act"), "dp_size is 2, and dp_config.router.balance is act"),
        (("decode_schedulers=[{dp_size: 0}]",), "dp_size"),
        (("decode_schedulers=[{experts: shared}]",), "experts"),
    ],
)
def test_what_cannot_work_is_refused_by_name(words: Sequence[str], found: str) -> None:
    try:
        said = "\n".join(problems(topology_of(*words), need_model=False))
    except Exception as error:  # a value out of range is refused when it is read
        said = str(error)
    assert found in said if found else not said


def test_the_plan_says_where_experts_are() -> None:
    topology = topology_of("decode_schedulers=[{dp_size: 2, tp_size: 2, experts: spread}]")
    text = plan_text(topology, plan(topology, "t.yaml", [], 4, Entries(python="python")), 4, [])
    assert "dp 2 x tp 2, experts spread over 4, devices" in text


def test_a_group_is_one_torchrun_of_all_its_ranks() -> None:
    topology = topology_of(*TWO_ENTRIES)
    specs = {spec.name: spec for spec in plan(topology, "t.yaml", [], 4, Entries(python="python"))}
    assert list(specs) == ["router", "P0", "D0-D1", "D2"]
    argv = specs["D0-D1"].argv
    assert "--nproc-per-node=4" in argv and argv[argv.index("--rank") + 1] == "0"
    assert specs["D0-D1"].num_members == 2 and specs["D2"].argv[specs["D2"].argv.index("--rank") + 1] == "2"
    text = plan_text(topology, list(specs.values()), 4, [])
    assert "D0-D1 on 127.0.0.1: dp 2 x tp 2" in text
    assert [key for key, _, port in bound_ports(topology) if port == 301] == [f"{ROUTER}.decode_schedulers.0.port (+1)"]


def test_a_group_gets_the_gpus_of_all_its_members() -> None:
    topology = topology_of("decode_schedulers=[{dp_size: 2, tp_size: 2}, {}]", "prefill_schedulers=[{}]")
    node = NodeDevices(tuple(Device(str(k), f"GPU-{k}", "H") for k in range(6)), "a test")
    shared = with_shares(topology, assign_devices(topology, instances(topology), node))
    assert [(i.name, i.config.devices) for i in instances(shared)] == [
        ("P0", ("cuda:0",)),
        ("D0", ("cuda:1", "cuda:2")),
        ("D1", ("cuda:3", "cuda:4")),
        ("D2", ("cuda:5",)),
    ]


def test_an_instance_that_joins_later_is_in_no_group() -> None:
    topology = topology_of("decode_schedulers=[{dp_size: 2, devices: [cpu, cpu]}]")
    own = [group for group in groups(grown(topology, [], D, 2, "127.0.0.1")) if group.role is D]
    assert [(group.name, group.config.devices) for group in own] == [(f"D{k}", ("cpu",)) for k in range(3)]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("ready", "warmup"), "warmup"),
        (("loading", "starting"), "starting"),
        (("drained", "ready"), "ready"),
        (("drained", "drained"), "drained"),
        (("ready", "taken"), "taken"),
    ],
)
def test_a_group_is_as_far_as_its_last_member(states: Sequence[str], expected: str, tmp_path: Path) -> None:
    for rank, state in enumerate(states):
        ProgressWriter(tmp_path / "D0-D1.progress", rank).state(state)
    assert len(list(tmp_path.iterdir())) == 2
    parts = [read_progress(file_of(tmp_path / "D0-D1.progress", rank)) for rank in range(2)]
    assert joined(parts).state == expected


# --------------------------------------------------------------------------------------------------------- membership


def member(role: Role, rank: int, group: int = 0, data_rank: int = 0, size: int = 2, **fields: Any) -> InstanceInfo:
    """Return the member of a group; its incarnation is made of both numbers. `group` 0: it is alone."""
    place = GroupPlace(group, data_rank, size) if group else None
    incarnation = 10 * group + data_rank if group else 1000 + 10 * (role is D) + rank
    fields = {"pid": incarnation, "pid_namespace": "here", "roles": (P, D), **fields}
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 1 + rank, 2, LAYOUT, 512, group=place, **fields)


class Cluster:
    """A membership without sockets."""

    def __init__(self, *members: InstanceInfo) -> None:
        self.clock = FakeClock()
        self.core = PDCoordination(self.clock, DeadlineConfig(lease_s=LEASE_S), 7, self)
        self.lost: list[tuple[str, bool]] = []
        self.left: list[set[str]] = []
        """Who was in the view at each loss."""
        for info in members:
            self.join(info)

    def on_joined(self, instance: InstanceInfo) -> None: ...

    def on_change(self) -> None:
        self.core.next_change()

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        self.lost.append((instance.name, has_died))
        self.left.append({*self.status})

    def join(self, info: InstanceInfo) -> None:
        reply = self.core.on_message(Join(PROTOCOL_VERSION, info))
        assert reply is not None and not reply.code, reply  # type: ignore[union-attr]

    def beat(self, *infos: InstanceInfo) -> None:
        for info in infos:
            assert self.core.on_heartbeat(Heartbeat(info.role, info.engine_rank, info.incarnation, LoadReport()))

    @property
    def status(self) -> dict[str, str]:
        return {info.name: info.becomes or ("drains" if info.draining else "up") for info in self.core.view.instances}

    @property
    def usable(self) -> bool:
        return Candidates.in_view(self.core.view).usable


ALONE, D0, D1 = member(P, 0), member(D, 0, 1, 0), member(D, 1, 1, 1)
D2, D3 = member(D, 2, 2, 0), member(D, 3, 2, 1)


def test_a_group_counts_once_all_its_members_have_joined() -> None:
    cluster = Cluster(ALONE, D1)
    assert not cluster.usable
    assert Candidates.in_view(cluster.core.view).why_unusable() == (
        "no decode instance is ready; other members of the group of D1 are not here"
    )
    cluster.join(D0)
    assert cluster.usable


def test_a_silent_member_takes_its_group_along_whatever_signs_the_others_give() -> None:
    cluster = Cluster(ALONE, D0, D1, D2, D3)
    for _ in range(8):
        cluster.clock.advance(LEASE_S / 7.5)
        cluster.beat(ALONE, D0, D2, D3)
        cluster.core.tick()
    assert cluster.lost == [("D1", False), ("D0", False)]
    assert cluster.left == [{"P0", "D2", "D3"}] * 2, "both left the view in one change"
    assert cluster.core.metrics().expired_leases == {"D1": 1}
    cluster.join(D0)
    assert cluster.usable and [i.name for i in Candidates.in_view(cluster.core.view).decode] == ["D2", "D3"]


def test_a_death_is_one_of_the_group_and_proves_nothing_of_the_other_processes() -> None:
    cluster = Cluster(ALONE, D0, D1)
    cluster.core.on_death(D, 0, D0.incarnation)
    assert cluster.lost == [("D0", True), ("D1", True)] and cluster.core.metrics().deaths == {"D0": 1}
    cluster.clock.advance(2 * LINGER_S)
    cluster.beat(ALONE)
    cluster.core.tick()
    assert cluster.core.view.dead == (D0.incarnation,) and cluster.core.is_doomed(D1.incarnation)
    assert cluster.core.on_message(Join(PROTOCOL_VERSION, D1)) is None, "it sees a view without itself before it ends"
    assert "D1" not in cluster.status
    cluster.core.on_death(D, 1, D1.incarnation)
    cluster.clock.advance(LINGER_S)
    cluster.core.tick()
    assert cluster.core.view.dead == (D0.incarnation, D1.incarnation) and not cluster.core.is_doomed(D1.incarnation)
    assert cluster.core.metrics().deaths == {"D0": 1}


def test_a_launcher_reports_the_ends_of_all_members() -> None:
    cluster = Cluster(ALONE, D0, D1)
    gone = (D0.pid, D1.pid)
    for info in (D0, D1):
        cluster.core.on_message(Leave(D, info.engine_rank, info.incarnation, "its launcher", gone, "here"))
    assert cluster.lost == [("D0", True), ("D1", True)]
    cluster.clock.advance(LINGER_S)
    cluster.core.tick()
    assert {*cluster.core.view.dead} == {D0.incarnation, D1.incarnation}


def test_a_member_that_is_started_again_ends_what_is_left_of_the_old_group() -> None:
    cluster = Cluster(ALONE, D0, D1)
    cluster.join(member(D, 0, 3, 0))
    assert cluster.lost == [("D0", True), ("D1", True)] and not cluster.usable
    cluster.join(member(D, 1, 3, 1))
    assert cluster.usable


@pytest.mark.parametrize("asked", ["operator", "member"])
@pytest.mark.parametrize("early", [(D1,), (D0, D1)])
def test_a_drain_is_one_of_the_group_also_of_a_member_that_joins_later(
    early: Sequence[InstanceInfo], asked: str
) -> None:
    cluster = Cluster(ALONE, *early)
    if asked == "operator":
        cluster.core.drain(D, 1)
    else:
        cluster.core.on_message(Drain(D, 1, D1.incarnation))
    if D0 not in early:
        cluster.join(D0)
    assert cluster.status == {"P0": "up", "D0": "drains", "D1": "drains"}


def test_without_its_group_nothing_serves() -> None:
    cluster = Cluster(ALONE, D0, D1)
    with pytest.raises(LastInstance, match="without D0 and D1 nothing could be served"):
        cluster.core.require_others(D, 1, "chitu drain D1")
    cluster.join(D2)
    with pytest.raises(LastInstance):
        cluster.core.require_others(D, 1, "chitu drain D1")  # D2 alone is half a group
    cluster.join(D3)
    cluster.core.require_others(D, 1, "chitu drain D1")


def changed(info: InstanceInfo, role: Role, rank: int) -> InstanceInfo:
    home = f"{info.role}:{info.engine_rank}"
    fields: dict[str, Any] = {"role": role, "engine_rank": rank, "incarnation": info.incarnation + 500, "home": home}
    return msgspec.structs.replace(info, former=(info.incarnation,), **fields)


def test_a_group_changes_its_role_as_a_whole() -> None:
    cluster = Cluster(ALONE, D0, D2)
    with pytest.raises(RoleRefused, match="group of D0 is not complete"):
        cluster.core.change_role(D, 0, P)
    cluster.join(D1)
    cluster.join(D3)
    cluster.core.change_role(D, 1, P)
    assert cluster.status == {"P0": "up", "D0": "prefill:1", "D1": "prefill:2", "D2": "up", "D3": "up"}
    with pytest.raises(RoleRefused, match="D0 becomes P1 already"):
        cluster.core.change_role(D, 0, P)
    first, second = changed(D0, P, 1), changed(D1, P, 2)
    cluster.join(first)
    assert [i.name for i in Candidates.in_view(cluster.core.view).prefill] == ["P0"], "one half is P, one is still D"
    cluster.join(second)
    assert cluster.lost == [("D0", False), ("D1", False)], "lives that ended, and no loss of the group"
    assert [i.name for i in Candidates.in_view(cluster.core.view).prefill] == ["P0", "P1", "P2"]
    cluster.core.on_death(P, 2, second.incarnation)
    assert cluster.lost[2:] == [("P2", True), ("P1", True)]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_change_is_taken_back_for_the_whole_group_or_not_at_all(has_begun: bool) -> None:
    cluster = Cluster(ALONE, D0, D1, D2, D3)
    cluster.core.change_role(D, 0, P, is_revocable=True)
    if has_begun:
        cluster.join(changed(D0, P, 1))
    cluster.core.on_death(D, 2, D2.incarnation)
    others = {"P1": "up", "D1": "prefill:2"} if has_begun else {"D0": "up", "D1": "up"}
    assert cluster.status == {"P0": "up"} | others and cluster.usable is not has_begun


def test_a_group_serves_weights_once_all_its_members_do() -> None:
    new = Weights(1, "new", "/new")
    infos = [msgspec.structs.replace(info, weights=new) for info in (ALONE, D0)]
    order = WeightsOrder(serve=new)
    assert not Candidates.in_view(ClusterView(1, 1, (*infos, D1), weights=order)).usable
    infos.append(msgspec.structs.replace(D1, weights=new))
    assert Candidates.in_view(ClusterView(1, 1, tuple(infos), weights=order)).usable


def test_members_with_two_roles_are_no_whole_group() -> None:
    half = msgspec.structs.replace(D1, role=P, engine_rank=1)
    assert whole_groups([ALONE, D0, half]) == [ALONE] and whole_groups([D0, D1, ALONE]) == [D0, D1, ALONE]


def test_a_place_outside_of_its_group_is_refused() -> None:
    cluster = Cluster(ALONE)
    reply = cluster.core.on_message(Join(PROTOCOL_VERSION, member(D, 0, 1, 2)))
    assert reply is not None and reply.code == BadFrame.code  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.sampled_from(("join", "silence", "die", "drain", "role", "again")), st.integers(0, 4))))
def test_whatever_happens_no_part_of_a_group_serves_and_none_outlives_another(events: list[tuple[str, int]]) -> None:
    infos, number = [ALONE, D0, D1, D2, D3], 10
    cluster = Cluster(*infos)
    for what, which in events:
        info = infos[which]
        before = {i.incarnation for i in cluster.core.view.instances}
        of_group = {
            i.incarnation for i in infos if i is info or (i.group and info.group and i.group.id == info.group.id)
        }
        if what == "join":
            cluster.join(info)
        elif what == "die":
            cluster.core.on_death(info.role, info.engine_rank, info.incarnation)
        elif what == "drain":
            cluster.core.drain(info.role, info.engine_rank)
        elif what == "role" and info.incarnation in before:
            with contextlib.suppress(RoleRefused):
                cluster.core.change_role(info.role, info.engine_rank, P if info.role is D else D)
        elif what == "again" and info.group is not None:
            number += 1
            infos = [
                member(i.role, i.engine_rank, number, i.group.rank) if i.incarnation in of_group and i.group else i
                for i in infos
            ]
        elif what == "silence":
            for _ in range(8):
                cluster.clock.advance(LEASE_S / 7.5)
                for each in cluster.core.view.instances:
                    if each.incarnation != info.incarnation:
                        cluster.beat(each)
                cluster.core.tick()
        present = {i.incarnation: i for i in cluster.core.view.instances}
        if what in ("die", "silence") and info.incarnation in before:
            assert not of_group & present.keys(), "one is gone, and another one of its group stays"
        draining = {i.group.id for i in present.values() if i.group is not None and i.draining}
        assert all(i.draining for i in present.values() if i.group is not None and i.group.id in draining)
        serving = Candidates.in_view(cluster.core.view)
        groups_there = Counter(i.group.id for i in (*serving.prefill, *serving.decode) if i.group is not None)
        assert set(groups_there.values()) <= {2}


# ----------------------------------------------------------------------------------------------------------- requests


def world_of(*members: InstanceInfo, **config: Any) -> World:
    world = World(**config)
    for info in members:
        add(world, info)
    return world


def add(world: World, info: InstanceInfo) -> None:
    world.instances.append(info)
    world.router.on_joined(info)
    world.router.on_view(ClusterView(1, len(world.instances), tuple(world.instances)))


def lose(world: World, *infos: InstanceInfo) -> None:
    """Lose members as the membership does: all leave the view, then each is reported."""
    world.instances = [each for each in world.instances if each not in infos]
    world.router.on_view(ClusterView(1, 99, tuple(world.instances)))
    for info in infos:
        world.router.on_lost(info, "killed", True)


def test_half_a_group_gets_no_request() -> None:
    world = world_of(ALONE, D0)
    with pytest.raises(NoInstance):
        world.add()
    add(world, D1)
    assert {world.pair(world.add()[0]) for _ in range(4)} == {"P0-D0", "P0-D1"}


def test_the_rest_of_a_lost_group_gets_no_request_even_before_the_next_view() -> None:
    world = world_of(ALONE, D0, D1, D2, D3)
    world.router.on_lost(D1, "killed", True)
    assert {world.pair(world.add()[0]) for _ in range(4)} == {"P0-D2", "P0-D3"}


def test_the_death_of_a_group_is_one_accident_and_its_requests_go_on_at_another() -> None:
    world = world_of(ALONE, D0, D1, D2, D3)
    generations = [world.add()[0] for _ in range(4)]
    for generation in generations:
        world.emit(world.room(generation), 5)
    lose(world, D0, D1)
    assert all(world.pair(generation) in ("P0-D2", "P0-D3") for generation in generations)
    assert sorted(generation.record.deaths for generation in generations) == [0, 0, 1, 1]


def test_a_retry_leaves_the_group_before_its_end_is_known() -> None:
    world = world_of(ALONE, D0, D1, D2, D3)
    generation, room = world.add()
    assert world.pair(generation) == "P0-D0"
    world.fails("P0", room, "decode_lost")
    assert generation.record.avoid >= {(D, 0, D0.incarnation), (D, 1, D1.incarnation)}
    assert world.pair(generation) in ("P0-D2", "P0-D3")


def test_a_retry_that_found_nothing_but_the_dying_group_is_not_poison() -> None:
    world = world_of(ALONE, D0, D1)
    generation, room = world.add()
    world.fails("P0", room, "decode_lost")  # P has seen D0's process end, the router has not
    assert world.pair(generation) == "P0-D1", "nothing else is there"
    lose(world, D0, D1)
    assert generation.error is not None and generation.error.code == "decode_lost"
    assert generation.record.deaths == 1


def test_a_second_group_that_dies_under_a_request_makes_it_poison() -> None:
    world = world_of(ALONE, D0, D1, D2, D3)
    generation, _ = world.add()
    lose(world, D0, D1)
    lose(world, D2, D3)
    assert generation.error is not None and generation.error.code == "poison_request"


def test_a_group_of_p_that_dies_is_one_accident() -> None:
    p0, p1, p2, p3 = (member(P, rank, 3 + rank // 2, rank % 2) for rank in range(4))
    world = world_of(p0, p1, p2, p3, D0, D1)
    generations = [world.add()[0] for _ in range(4)]
    lose(world, p0, p1)
    assert all(world.pair(generation)[:2] in ("P2", "P3") for generation in generations)
    assert max(generation.record.deaths for generation in generations) == 1


def test_a_busy_member_sends_requests_to_others_of_its_group() -> None:
    world = world_of(ALONE, D0, D1)
    generation, room = world.add()
    world.decode_fails(room, "capacity")
    assert world.pair(generation) == "P0-D1" and generation.error is None


def test_a_group_has_one_breaker() -> None:
    world = world_of(ALONE, D0, D1, D2, D3, breaker=BreakerConfig(failures=2, open_s=5.0))
    for name in ("P0-D0", "P0-D1"):
        _, room = next(found for _ in range(4) if world.pair((found := world.add())[0]) == name)
        world.decode_fails(room, "internal")
    assert {world.pair(world.add()[0]) for _ in range(4)} == {"P0-D2", "P0-D3"}
    assert world.router.metrics().breaker_openings == {"D1": 1}
