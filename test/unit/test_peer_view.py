"""Views, pids and the router's reports decide which peer is alive, lost or dead; a greater number never does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chitu.kv_transfer.peers import KEPT_ABSENT, KEPT_ROUTERS, PeerView
from chitu.net.process_deaths import pid_namespace
from chitu.protocol import ClusterView, InstanceInfo, KVLayout
from chitu.types import Role

LAYOUT = KVLayout.uniform("m", 1, 2, 8, 4, "float32", 100)
HERE = pid_namespace()
ORDERS = [(5, 9), (9, 5)]


def elsewhere(incarnation: int, **fields: Any) -> InstanceInfo:
    """Return an instance of rank 0 on another machine."""
    info = InstanceInfo(Role.PREFILL, 0, incarnation, "h", 1, 2, LAYOUT, 100, 10, pid_namespace="there")
    return msgspec.structs.replace(info, **fields)


def view_of(*views: ClusterView, alive: set[int] | None = None) -> PeerView:
    pids = {10} if alive is None else alive
    peers = PeerView(Role.PREFILL, "me", lambda pid: pid in pids)
    for view in views:
        assert peers.update(view)
    return peers


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_who_the_router_puts_in_anothers_place_is_alive_and_the_other_one_dead(first: int, second: int) -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(first),)), ClusterView(1, 2, (elsewhere(second),)))
    assert not peers.is_lost(0, second) and not peers.is_dead(0, second) and not peers.is_replaced(0, second)
    assert peers.is_lost(0, first) and peers.is_dead(0, first) and peers.is_replaced(0, first)
    assert [i.incarnation for i in peers.present()] == [second]


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_the_view_of_another_router_counts_whatever_its_number(first: int, second: int) -> None:
    peers = view_of(ClusterView(first, 7, (elsewhere(1),)), ClusterView(second, 1, ()))
    assert not peers.present() and not peers.is_lost(0, 1), "it has not joined this router yet"
    assert peers.update(ClusterView(second, 2, (elsewhere(1, first_view=(7, 1)),))) and peers.present()
    assert not peers.update(ClusterView(second, 2, ())), "the same again"


def test_one_that_returns_to_a_new_router_proves_no_death() -> None:
    """The returning instance may be an older one that was frozen, while the other one still writes."""
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)), ClusterView(2, 1, (elsewhere(4, first_view=(7, 1)),)))
    assert peers.is_lost(0, 5) and not peers.is_dead(0, 5)
    peers.update(ClusterView(2, 2, (elsewhere(5, first_view=(7, 1)),)))
    assert not peers.is_lost(0, 5) and peers.is_lost(0, 4)


@pytest.mark.parametrize(
    ("first_view", "is_dead"),
    [((1, 3), True), ((1, 2), False), ((1, 1), False), ((2, 1), True), ((7, 9), False)],
    ids=["later", "the same", "earlier", "of a later router", "of a router never heard"],
)
def test_one_that_was_new_to_a_view_that_we_missed_proves_it_by_the_place_of_that_view(
    first_view: tuple[int, int], is_dead: bool
) -> None:
    """The router that gave it the rank ended before this process received that view."""
    peers = view_of(ClusterView(1, 2, (elsewhere(5),)), ClusterView(2, 1, ()))
    assert peers.update(ClusterView(3, 1, (elsewhere(4, first_view=first_view),)))
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5) is is_dead and not peers.is_lost(0, 4)


def test_the_former_incarnation_of_an_instance_that_changed_its_role_is_dead_while_its_process_lives() -> None:
    """Its new record has another role, and comes with every view, also of a router that never had the former one."""
    new = msgspec.structs.replace(elsewhere(6), role=Role.DECODE, engine_rank=3, former=(4, 5), home="prefill:0")
    peers = view_of(ClusterView(1, 1, (elsewhere(5, pid_namespace=HERE),)), ClusterView(2, 9, (new,)))
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5)
    assert peers.is_dead(0, 4), "one that was never seen"


@pytest.mark.parametrize("has_moved", [True, False])
def test_one_that_changed_its_role_proves_no_death_of_who_had_its_rank(has_moved: bool) -> None:
    """That one may be frozen and write when it thaws: no launcher ended it."""
    new = elsewhere(6, start_ticks=9, former=(3,) if has_moved else ())
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)), ClusterView(1, 2, ()), ClusterView(1, 3, (new,)))
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5) is not has_moved


def test_a_process_that_is_started_again_proves_the_end_of_what_it_had_become() -> None:
    moved = elsewhere(5, engine_rank=2, former=(4,), home="decode:1")
    again = msgspec.structs.replace(elsewhere(7), role=Role.DECODE, engine_rank=1)
    peers = view_of(ClusterView(1, 1, (moved,)), ClusterView(1, 2, ()))
    assert peers.is_lost(2, 5) and not peers.is_dead(2, 5)
    assert peers.update(ClusterView(1, 3, (again,))) and peers.is_dead(2, 5)


@pytest.mark.parametrize("count", [KEPT_ROUTERS - 1, KEPT_ROUTERS])
def test_of_routers_a_bounded_number_is_remembered(count: int) -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)), *(ClusterView(2 + n, 1, ()) for n in range(count)))
    peers.update(ClusterView(2, 2, (elsewhere(4, first_view=(1, 2)),)))
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5) is (count < KEPT_ROUTERS)


def test_one_that_just_started_proves_it_to_whatever_router_it_joined() -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)), ClusterView(2, 1, (elsewhere(4),)))
    assert peers.is_dead(0, 5) and not peers.is_lost(0, 4)


@pytest.mark.parametrize(("ticks", "is_dead"), [(70, True), (50, False)])
def test_on_one_machine_the_later_start_proves_it_too(ticks: int, is_dead: bool) -> None:
    next_one = elsewhere(4, first_view=(7, 1), start_ticks=ticks)
    peers = view_of(ClusterView(1, 1, (elsewhere(5, start_ticks=60),)), ClusterView(2, 1, (next_one,)))
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5) is is_dead


def test_a_replaced_process_of_this_machine_is_dead_when_it_has_ended_and_not_before() -> None:
    alive = {10, 11}
    old, new = elsewhere(5, pid_namespace=HERE), elsewhere(6, pid=11, pid_namespace=HERE)
    peers = view_of(ClusterView(1, 1, (old,)), ClusterView(1, 2, (new,)), alive=alive)
    assert peers.is_lost(0, 5) and not peers.is_dead(0, 5)
    alive -= {10}
    assert peers.is_dead(0, 5)


def test_the_pid_of_a_process_that_was_seen_to_end_may_be_used_again() -> None:
    alive = {10}
    peers = view_of(ClusterView(1, 1, (elsewhere(5, pid_namespace=HERE),)), alive=alive)
    alive.clear()
    assert peers.find_ended()
    alive.add(10)
    assert peers.is_lost(0, 5) and peers.is_dead(0, 5)


def test_of_those_that_no_view_had_the_last_one_may_still_join() -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)))
    for incarnation in (7, 6):
        peers.note(0, incarnation)
    assert peers.is_lost(0, 7) and not peers.is_lost(0, 6) and not peers.is_lost(0, 5)
    peers.update(ClusterView(1, 2, (elsewhere(7),)))
    assert not peers.is_lost(0, 7) and peers.is_dead(0, 5)
    assert peers.is_lost(0, 6) and not peers.is_dead(0, 6), "it may be younger than this view"


@pytest.mark.parametrize("count", [KEPT_ABSENT, KEPT_ABSENT + 1])
def test_of_those_that_are_gone_a_bounded_number_is_remembered(count: int) -> None:
    peers = view_of()
    for number in range(1, count + 2):
        peers.update(ClusterView(1, number, (elsewhere(number),)))
    assert peers.is_dead(0, 2) and not peers.is_lost(0, count + 1)
    assert peers.is_dead(0, 1) is (count == KEPT_ABSENT)


# ----------------------------------------------------------------------------------------------------------------------
# A peer of several TP ranks is dead only if none of its processes is left: followers write too.


RANKS_LAYOUT = KVLayout.uniform("m", 1, 2, 8, 4, "float32", 100, tp_size=3)
INSTANCE = InstanceInfo(Role.PREFILL, 0, 5, "h", 1, 2, RANKS_LAYOUT, 100, pid=10, follower_pids=(11, 12))


def test_a_lost_instance_is_dead_when_its_last_rank_is_gone() -> None:
    alive = {10, 11, 12}
    view = PeerView(Role.PREFILL, "h", lambda pid: pid in alive)
    assert view.update(ClusterView(1, 1, (INSTANCE,)))
    assert view.update(ClusterView(1, 2, ()))
    assert view.is_lost(0, 5) and not view.is_dead(0, 5)
    alive -= {10}
    assert not view.is_dead(0, 5), "a follower may be in the middle of a write"
    alive -= {11}
    assert not view.is_dead(0, 5)
    alive -= {12}
    assert view.is_dead(0, 5)


def test_an_instance_with_a_rank_that_was_never_seen_alive_here_counts_as_frozen() -> None:
    view = PeerView(Role.PREFILL, "h", lambda pid: pid != 12)
    view.update(ClusterView(1, 1, (INSTANCE,)))
    view.update(ClusterView(1, 2, ()))
    assert view.is_lost(0, 5) and not view.is_dead(0, 5)


def test_a_process_that_ended_is_lost_at_once_without_a_word_of_the_router() -> None:
    alive = {10, 11, 12}
    view = PeerView(Role.PREFILL, "h", lambda pid: pid in alive)
    instance = msgspec.structs.replace(INSTANCE, pid_namespace=pid_namespace())
    view.update(ClusterView(1, 1, (instance,)))
    assert not view.find_ended() and not view.is_lost(0, 5)
    alive -= {10, 12}
    assert view.find_ended() and view.is_lost(0, 5) and not view.present()
    assert not view.find_ended(), "once"
    assert not view.is_dead(0, 5), "a follower may be in the middle of a write"
    view.update(ClusterView(1, 2, (instance,)))
    assert view.is_lost(0, 5), "a router that does not know yet changes nothing"
    alive -= {11}
    assert view.is_dead(0, 5)


@pytest.mark.parametrize("namespace", ["", "another"])
def test_a_pid_of_another_namespace_says_nothing(namespace: str) -> None:
    alive = {10, 11, 12}
    view = PeerView(Role.PREFILL, "h", lambda pid: pid in alive)
    view.update(ClusterView(1, 1, (msgspec.structs.replace(INSTANCE, pid_namespace=namespace),)))
    alive.clear()
    assert not view.find_ended() and not view.is_lost(0, 5)


def test_who_the_router_calls_dead_is_dead_wherever_it_ran_and_whatever_router_follows() -> None:
    view = PeerView(Role.PREFILL, "h", lambda pid: True)
    elsewhere = msgspec.structs.replace(INSTANCE, host="elsewhere", pid_namespace="another")
    view.update(ClusterView(1, 1, (elsewhere,)))
    view.update(ClusterView(1, 2, ()))
    assert view.is_lost(0, 5) and not view.is_dead(0, 5), "it may only be frozen"
    view.update(ClusterView(1, 3, (), dead=(4, 5, 99)))
    assert view.is_lost(0, 5) and view.is_dead(0, 5) and not view.is_dead(0, 6)
    view.update(ClusterView(1, 4, (), dead=(99,)))
    view.update(ClusterView(2, 1, ()))
    assert view.is_lost(0, 5) and view.is_dead(0, 5), "nobody comes back from the dead"
    assert not view.is_dead(1, 99), "what nobody here knows is not kept"


# ----------------------------------------------------------------------------------------------------------------------
# Several routers, each with views of its own.


def test_a_peer_is_present_while_one_router_lists_it_and_lost_once_none_does() -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)))
    assert peers.update(ClusterView(9, 1, (elsewhere(5),)), router=1)
    assert peers.update(ClusterView(1, 2, ()))
    assert not peers.is_lost(0, 5) and [info.incarnation for info in peers.present()] == [5]
    assert peers.update(ClusterView(9, 2, ()), router=1)
    assert peers.is_lost(0, 5) and not peers.present() and not peers.is_dead(0, 5), "it may only be cut off from both"
    assert peers.update(ClusterView(9, 3, (), dead=(5,)), router=1)
    assert peers.is_dead(0, 5), "one router's proof is enough"


def test_a_process_that_restarts_joins_one_router_before_the_other_and_is_not_taken_for_the_dead_one() -> None:
    views = [
        (0, ClusterView(1, 1, (elsewhere(5),))),
        (1, ClusterView(9, 1, (elsewhere(5),))),
        (0, ClusterView(1, 2, (elsewhere(6),))),
        (1, ClusterView(9, 2, (elsewhere(5),))),  # has not seen the new one yet
    ]
    peers, mixed = view_of(), view_of()
    for router, view in views:
        peers.update(view, router)
        mixed.update(view)  # as if the views of both had one order
    assert peers.is_dead(0, 5) and peers.is_lost(0, 5), "a page that waits for it may be freed"
    assert not peers.is_dead(0, 6) and not peers.is_lost(0, 6)
    assert mixed.is_dead(0, 6), "the fault that this would be: pages are freed while it writes"
    peers.update(ClusterView(9, 3, (elsewhere(6),)), 1)
    assert not peers.is_dead(0, 6) and not peers.is_lost(0, 6) and peers.is_dead(0, 5)


def test_what_a_silent_router_lists_counts_no_more_while_another_one_is_heard() -> None:
    peers = view_of(ClusterView(1, 1, (elsewhere(5),)))
    peers.update(ClusterView(9, 1, (elsewhere(5),)), 1)
    peers.update(ClusterView(9, 2, ()), 1)
    peers.note_silence(0)
    assert peers.is_lost(0, 5) and not peers.present()
    peers.note_silence(1)
    assert not peers.is_lost(0, 5), "nobody is heard: the newest views count, as with one router"
    assert peers.update(ClusterView(1, 1, (elsewhere(5),))), "the same view of a router that is heard again is news"
    assert not peers.is_lost(0, 5) and peers.present()
