"""Places of instances: changes of role, two routers, and who may go."""

from __future__ import annotations

import msgspec
import pytest
from test_coordination import LAYOUT, World, info

from chitu.errors import BadFrame, LastInstance, RoleRefused
from chitu.protocol import (
    Drain,
    Heartbeat,
    InstanceInfo,
    LoadReport,
)
from chitu.router.candidates import Candidates
from chitu.types import Role, place_of, place_text

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
