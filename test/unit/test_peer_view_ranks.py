"""A peer of several TP ranks is dead only when none of its processes is left: followers write too."""

from __future__ import annotations

from chitu.kv_transfer.peer_view import PeerView
from chitu.messages import ClusterView, InstanceInfo, KVLayout
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
