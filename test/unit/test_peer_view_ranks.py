"""A peer of several TP ranks is dead only if none of its processes is left: followers write too."""

from __future__ import annotations

import msgspec
import pytest

from chitu.kv_transfer.peer_view import PeerView
from chitu.net.process_deaths import pid_namespace
from chitu.protocol import ClusterView, InstanceInfo, KVLayout
from chitu.types import Role

LAYOUT = KVLayout("m", 1, 2, 8, 4, "float32", 100, tp_size=3)
INSTANCE = InstanceInfo(Role.PREFILL, 0, 5, "h", 1, 2, LAYOUT, 100, pid=10, follower_pids=(11, 12))


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
