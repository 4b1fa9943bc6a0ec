"""API processes beside the one that keeps the membership (`router.workers`): what each may take and learns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import FakeClock

from chitu.config.schema import RouterConfig, Topology
from chitu.config.topology import with_router
from chitu.errors import BadFrame, Capacity, Unauthorized
from chitu.http.access import Access, process_token
from chitu.net.curve import derive
from chitu.net.view_feed import ASK_S
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    STATS_TOPIC,
    VIEW_TOPIC,
    ClusterView,
    Heartbeat,
    InstanceInfo,
    KVLayout,
    LoadReport,
    LostInstance,
    RequestFailed,
    ViewChange,
    Wire,
    encode,
)
from chitu.serve.api_endpoint import ApiEndpoint, Ending, with_share
from chitu.serve.replicas import ReplicaCluster
from chitu.serve.siblings import Siblings
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)
"""A layout; these tests do not depend on its values."""


@given(st.integers(1, 8), st.integers(1, 5000))
def test_the_shares_add_up_to_what_the_router_may_take(workers: int, max_in_flight: int) -> None:
    topology = with_router(Topology(), workers=workers, max_in_flight=max_in_flight)
    config = topology.dp_config.router
    shares = [with_share(topology, index).dp_config.router for index in range(workers)]
    assert sum(share.max_in_flight for share in shares) == max(max_in_flight, workers)
    assert 0 <= config.max_total_body_bytes - sum(share.max_total_body_bytes for share in shares) < workers
    assert 0 <= config.max_tokens_in_flight - sum(share.max_tokens_in_flight for share in shares) < workers
    assert max(s.max_in_flight for s in shares) - min(s.max_in_flight for s in shares) <= 1


@pytest.mark.parametrize("cluster_key", ["", "k" * 40])
@pytest.mark.parametrize("api_keys", [(), ("a" * 20, "b" * 20)])
def test_what_processes_ask_each_other_is_taken_for_an_operators(cluster_key: str, api_keys: tuple[str, ...]) -> None:
    config, secrets = RouterConfig(workers=2, api_keys=api_keys), derive(cluster_key)
    access = Access(config, secrets, FakeClock())
    credential = process_token(config, secrets)
    headers = [(b"authorization", b"Bearer " + credential.encode())] if credential else []
    access.require({"path": "/admin/record", "client": ("127.0.0.1", 5), "headers": headers})
    if credential:
        with pytest.raises(Unauthorized):
            access.require({"path": "/admin/record", "client": ("127.0.0.1", 5), "headers": []})


class Router(PDRequestRouter):
    """A router that records its notifications; it has no descriptor left while `is_full`."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.is_full = False

    def on_joined(self, instance: InstanceInfo) -> None:
        if self.is_full:
            raise Capacity("no socket")
        self.heard.append(("joined", instance.incarnation))

    def on_view(self, view: ClusterView) -> None:
        self.heard.append(("view", view.version))

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        self.heard.append(("lost", instance.incarnation, reason, has_died))

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heard.append(("heartbeat", heartbeat.incarnation))

    def on_request_failed(self, failed: RequestFailed) -> None:
        self.heard.append(("failed", failed.room))


class World:
    def __init__(self) -> None:
        self.router = Router()
        self.cluster = ReplicaCluster(self.router, 1, Siblings(RouterConfig(workers=2), None, 1), {})

    def view(self, version: int, *incarnations: int, lost: tuple[LostInstance, ...] = ()) -> list[tuple[object, ...]]:
        members = tuple(InstanceInfo(Role.DECODE, i % 10, i, "127.0.0.1", 1, 2, LAYOUT, 128) for i in incarnations)
        return self.take(VIEW_TOPIC, ClusterView(5, version, members, lost=lost))

    def take(self, topic: bytes, message: Wire) -> list[tuple[object, ...]]:
        self.router.heard.clear()
        self.cluster.on_frames([topic, encode(message)])
        return list(self.router.heard)


def test_a_view_says_who_came_and_who_left_and_why() -> None:
    world = World()
    assert world.view(1, 10, 11) == [("joined", 10), ("joined", 11), ("view", 1)]
    assert world.view(1, 10, 11) == [], "views are repeated"
    died = LostInstance(10, "its process has ended", True)
    assert world.view(2, 11, lost=(died,)) == [("view", 2), ("lost", 10, "its process has ended", True)]
    # A view may be lost: another instance took the place, and the reason is no longer known.
    assert world.view(9, 21) == [("joined", 21), ("view", 9), ("lost", 11, "it left the cluster", False)]


def test_a_replica_follows_the_changes_and_asks_for_the_whole_view_when_it_missed_one() -> None:
    asked: list[bytes] = []
    clock = FakeClock()
    world = World()
    world.cluster = ReplicaCluster(world.router, 1, Siblings(RouterConfig(), None, 1), {}, asked.append, clock)
    world.view(1, 10)
    joined = InstanceInfo(Role.DECODE, 1, 11, "127.0.0.1", 1, 2, LAYOUT, 128)
    died = LostInstance(10, "its process has ended", True)
    change = ViewChange(5, 2, 1, (joined,), ((Role.DECODE, 0),), lost=(died,))
    assert world.take(VIEW_TOPIC, change) == [
        *(("joined", 11), ("view", 2)),
        ("lost", 10, "its process has ended", True),
    ]
    assert world.take(VIEW_TOPIC, ViewChange(5, 2, 2)) == [], "the same is repeated"
    clock.advance(ASK_S)
    assert world.take(VIEW_TOPIC, ViewChange(5, 4, 3)) == []
    assert asked == [world.cluster.feed.topic]
    assert world.view(4, 11) == [("view", 4)]


def test_who_cannot_be_connected_to_is_tried_again_with_the_next_view_though_it_is_the_same() -> None:
    world = World()
    world.router.is_full = True
    assert world.view(1, 10) == [("view", 1)]
    assert world.cluster.loads() == {}
    world.router.is_full = False
    assert world.view(1, 10) == [("joined", 10), ("view", 1)]
    assert world.view(1, 10) == []


def test_loads_and_failures_come_behind_the_view() -> None:
    world = World()
    load = LoadReport(waiting=3)
    assert world.take(STATS_TOPIC, Heartbeat(Role.DECODE, 0, 10, load)) == [], "of nobody that it knows"
    world.view(1, 10)
    assert world.cluster.loads() == {(Role.DECODE, 0): LoadReport()}
    assert world.take(STATS_TOPIC, Heartbeat(Role.DECODE, 0, 10, load)) == [("heartbeat", 10)]
    assert world.cluster.loads() == {(Role.DECODE, 0): load}
    assert world.take(STATS_TOPIC, RequestFailed(Role.DECODE, 0, 10, b"r" * 16, "capacity", "")) == [
        ("failed", b"r" * 16)
    ]
    world.view(2, 20)
    assert world.cluster.loads() == {(Role.DECODE, 0): LoadReport()}, "another process"
    with pytest.raises(BadFrame):
        world.cluster.on_frames([encode(ClusterView(5, 3, ()))])


@pytest.mark.parametrize("refuses", [True, False])
def test_one_that_ends_alone_takes_new_requests_until_its_drain_is_over(refuses: bool) -> None:
    refused: list[bool] = []

    async def idle() -> None:
        refused.append(routes.draining)

    routes = SimpleNamespace(draining=False)
    api: Any = SimpleNamespace(_routes=routes, _snapshots=SimpleNamespace(), _kept=None, _batches=None)
    api.router = SimpleNamespace(in_flight=0, num_held=0, idle=idle)

    async def scenario() -> None:
        await ApiEndpoint.drain(api, 60.0, Ending(), refuses=refuses)

    asyncio.run(scenario())
    assert (refused, routes.draining) == ([refuses], True)
