"""Whole P and D of which some change their role, at every moment: no token, no page and no cached prefix is lost.

The scripts of faults (`test_cluster_faults.py`) have changes of role, too.
"""

from __future__ import annotations

import pytest
from cluster_process import Process
from cluster_world import ClusterWorld, RoutedWorld
from support.fake_transport import Fault, FaultKind

from chitu.kv_transfer.receiver import ReceiverState
from chitu.types import Role


class World(RoutedWorld):
    returns_home = False


LOAD = [(9, 12), (20, 3), (14, 20), (3, 1), (22, 9), (17, 28)]
"""Tokens of prompts and answers."""


def loaded(world: RoutedWorld, turn: int) -> None:
    """Play `turn` turns in which the requests of `LOAD` are sent."""
    for at in range(turn):
        if at % 3 == 0 and at // 3 < len(LOAD):
            world.request(*LOAD[at // 3])
        world.turns(1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=str)
def test_a_change_of_role_at_any_turn_costs_no_token_and_no_page(role: Role) -> None:
    for turn in range(1, 40, 6):
        world = World()
        loaded(world, turn)
        process = world.of(role)[turn % 2]
        world.change_role(process)
        loaded(world, 18)
        world.settle_down(12.0)
        assert process.role is not role and world.num_changes == 1, turn
        assert {client.end for client in world.clients} == {"finished"}, turn
        if turn % 2:
            world.change_role(process)
            world.settle_down(12.0)
            assert (process.role, process.rank) == process.home
        world.check_it_still_serves()


class Hasty(Process):
    """One that joins in its new role once its requests are over, although a peer may still write to its pages."""

    @property
    def is_over(self) -> bool:
        return self.scheduler.is_done


class HastyWorld(World):
    process_type = Hasty


def late_write(world: RoutedWorld) -> Process:
    """Have P0 write to D0 late, cancel the request, and ask D0 to change its role. Return D0."""
    world.fabric.inject(Fault(FaultKind.LATE))
    client = world.request(20, 20)
    d = world.of(Role.DECODE)[0]
    for _ in range(100):
        world.turns(1)
        busy = [d for d in world.of(Role.DECODE) if d.cache.allocator.num_used]
        if world.fabric._late and busy:
            d = busy[0]
            break
    assert client is not None and client.generation is not None and world.router is not None
    world.router.cancel(client.generation)
    world.change_role(d)
    return d


def test_one_that_joins_before_the_last_write_to_its_pages_has_ended_is_found() -> None:
    world = HastyWorld()
    late_write(world)
    with pytest.raises(AssertionError):
        world.settle_down(12.0)


def test_one_to_whose_pages_a_write_may_land_waits_for_it() -> None:
    world = World()
    d = late_write(world)
    world.turns(50)
    assert d.role is Role.DECODE and d.becomes and d.cache.allocator.num_quarantined
    world.settle_down(12.0)
    assert d.role is Role.PREFILL and not d.cache.allocator.num_quarantined
    world.check_it_still_serves()


@pytest.mark.parametrize("hears", [True, False])
def test_pages_in_quarantine_for_a_p_that_became_d_are_freed_by_its_next_record(hears: bool) -> None:
    """Its process lives, has the same address, and does not answer for what it was."""
    world = ClusterWorld(2, 1)
    p, d = world.of(Role.PREFILL)[0], world.of(Role.DECODE)[0]
    asked = world.ask(0, 22, 8, lost=1)  # P never gets the request: only D fears its writes
    assert asked is not None
    for _ in range(60):
        if d.kv.side.state(asked.room) is ReceiverState.WAITING:  # type: ignore[union-attr]
            break
        world.turns(1)
    d.is_frozen = True  # so that the abort comes when P is none any more
    world.end(asked, "cancelled")
    world.change_role(p)
    world.turns(60)
    assert p.role is Role.DECODE
    d.is_frozen, d.is_deaf = False, not hears
    world.turns(130)  # after a second it asks for the views that it has missed
    assert d.cache.allocator.num_quarantined == (0 if hears else 6)
    world.settle_down()
