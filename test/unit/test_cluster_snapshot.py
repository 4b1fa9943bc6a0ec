"""The snapshot of the cluster: whose requests it shows to whom, what it costs, and the transports in it."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from router_world import two_pairs
from support.clock import FakeClock

from chitu.cluster.cluster import RouterRecord
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.errors import TooManyRequests
from chitu.http.fleet.changes import LOAD_FIELDS
from chitu.http.fleet.snapshot import (
    MAX_WATCHERS,
    PIECE_INSTANCES,
    SnapshotSource,
    Watchers,
    transport_in_use,
)
from chitu.protocol import ClusterView, Finish, InstanceInfo, KVLayout, LoadReport, PathLoad, StepRates, TransferSums
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.types import Role

LAYOUT = KVLayout.uniform("m", num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32", vocab_size=100)


def view(**hosts: str) -> ClusterView:
    """Return a view of instances, given as P0="10.0.0.1", ..."""
    roles = {role.letter: role for role in Role}
    infos = [
        InstanceInfo(roles[name[0]], int(name[1:]), 1 + index, host, 1, 2, LAYOUT, 512)
        for index, (name, host) in enumerate(hosts.items())
    ]
    return ClusterView(1, 1, tuple(infos))


@pytest.mark.parametrize(
    ("overrides", "members", "expected"),
    [
        ([], {"P0": "127.0.0.1", "D0": "localhost"}, "shm"),
        ([], {"P0": "10.0.0.1", "D0": "10.0.0.2"}, "mooncake"),
        ([], {"P0": "10.0.0.1", "D0": "10.0.0.1", "D1": "10.0.0.2"}, "shm and mooncake"),
        ([], {"P0": "10.0.0.1"}, "auto"),
        (["transport=nixl"], {"P0": "127.0.0.1", "D0": "127.0.0.1"}, "nixl"),
        (["prefill_schedulers.0.devices=['cuda:0']"], {"P0": "127.0.0.1", "D0": "127.0.0.1"}, "cuda_ipc"),
    ],
)
def test_auto_is_shown_as_what_it_comes_to(overrides: list[str], members: dict[str, str], expected: str) -> None:
    prefixes = {"transport": "dp_config.router.pd_disaggregation."}
    words = [f"{prefixes.get(word.split('=')[0], 'dp_config.router.')}{word}" for word in overrides]
    assert transport_in_use(load_topology(None, words), view(**members)) == expected


class Cluster:
    """What snapshots read of a `chitu.cluster.cluster.Cluster`."""

    def __init__(self, *tenants: str) -> None:
        self.world = two_pairs()
        self.view = view(P0="localhost", D0="localhost")
        self.num_asked = 0
        self.reports: dict[Any, Any] = {}
        world = self.world
        for tenant in tenants:
            room = world.add(tenant=tenant)[1]
            world.tokens(
                [room],
                [
                    Finish(
                        room,
                        "stop",
                        page_sums=b"12345678",
                        transfer_sums=TransferSums(0, 1, b"12345678", b"12345678"),
                    )
                ],
            )
            world.add(tenant=tenant)

    def loads(self) -> dict[Any, Any]:
        return self.reports

    def record(self) -> RouterRecord:
        self.num_asked += 1
        router = self.world.router
        return RouterRecord(
            router.in_flight, router.journal.version, tuple(router.running()), tuple(router.journal.ended)
        )


def source_of(cluster: Cluster, clock: FakeClock, template: str = "") -> SnapshotSource:
    model = SimpleNamespace(
        name="m", limits=lambda candidates: None, tokenizer=SimpleNamespace(template_source=template)
    )
    return SnapshotSource(Topology(), cast(Any, model), cluster.world.router, cast(Any, cluster), clock, "0")


def test_a_tenant_sees_its_own_requests_and_the_operator_all() -> None:
    source = source_of(Cluster("a", "b", "b"), FakeClock())
    for tenant, expected in (("a", ["a"] * 2), ("b", ["b"] * 4), (None, ["a", "b", "b"] * 2), ("c", []), ("", [])):
        for encoded in (asyncio.run(source.fresh(tenant)), asyncio.run(source.event(tenant, 0)).encoded):
            shown = msgspec.json.decode(encoded)
            assert sorted(str(request["tenant"]) for request in shown["requests"]) == sorted(expected)
            assert b"_sums" not in encoded and b"12345678".hex().encode() not in encoded


def test_without_api_keys_requests_have_no_tenant_and_everybody_sees_them() -> None:
    encoded = asyncio.run(source_of(Cluster(""), FakeClock()).fresh(None))
    assert len(msgspec.json.decode(encoded, type=ClusterSnapshot).requests) == 2 and b"tenant" not in encoded


def test_a_first_prompt_fits_the_model() -> None:
    for template, prompt in (
        ("{{ messages }}", ("What is the capital of France?", True)),
        ("", ("Once upon a time", False)),
    ):
        encoded = asyncio.run(source_of(Cluster(), FakeClock(), template).fresh(None))
        first = msgspec.json.decode(encoded, type=ClusterSnapshot).first_prompt
        assert (first.text, first.is_chat) == prompt


def test_streams_of_a_tenant_cost_one_encoding_and_all_streams_one_record_in_each_interval() -> None:
    cluster, clock = Cluster("a", "b"), FakeClock()
    source = source_of(cluster, clock)

    async def read() -> list[bytes]:
        return [(await source.event(tenant, 0)).encoded for tenant in ("a", "b", "a", None, "b")]

    first = asyncio.run(read())
    assert first[0] is first[2] and first[1] is first[4] and cluster.num_asked == 1
    clock.advance(SnapshotSource.MIN_AGE_S)
    again = asyncio.run(read())
    assert again[0] is not first[0] and again[0] is again[2] and cluster.num_asked == 2


def test_a_tenant_is_not_told_when_requests_of_others_begin_and_end() -> None:
    cluster, clock = Cluster("a", "b"), FakeClock()
    source = source_of(cluster, clock)

    def changes() -> list[object]:
        clock.advance(2 * SnapshotSource.MIN_AGE_S)
        return [asyncio.run(source.change(tenant)) for tenant in ("a", "b", None)]

    before = changes()
    assert changes() == before
    world = cluster.world
    room = world.add(tenant="b")[1]
    begun = changes()
    assert [old == new for old, new in zip(before, begun, strict=True)] == [True, False, False]
    world.tokens([room])
    assert [old == new for old, new in zip(begun, changes(), strict=True)] == [True, False, False]


def test_streams_of_one_client_leave_room_for_those_of_others() -> None:
    async def main() -> None:
        watchers = Watchers(source_of(Cluster(""), FakeClock()))
        streams = [watchers.events(b"greedy", None) for _ in range(MAX_WATCHERS)]
        started = [await anext(stream, b"") for stream in streams]
        assert sum(map(bool, started)) == MAX_WATCHERS // 4
        with pytest.raises(TooManyRequests):
            watchers.require_room(b"greedy")
        watchers.require_room(b"another")
        other = watchers.events(b"another", None)
        assert await anext(other)
        for stream in (*streams, other):
            await cast(Any, stream).aclose()
        watchers.require_room(b"greedy")

    asyncio.run(main())


def test_the_snapshot_of_a_large_cluster_leaves_the_loop_free_and_has_every_instance_in_order() -> None:
    cluster, turns = Cluster("a"), 0
    names = {**{f"P{rank}": "127.0.0.1" for rank in range(300)}, **{f"D{rank}": "127.0.0.1" for rank in range(300)}}
    cluster.view = view(**names)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> bytes:
        counting = asyncio.create_task(count_turns())
        encoded = await source_of(cluster, FakeClock()).fresh(None)
        counting.cancel()
        return encoded

    shown = msgspec.json.decode(asyncio.run(read()), type=ClusterSnapshot)
    assert [instance.name for instance in shown.instances] == list(names)
    assert (len(shown.requests), turns >= len(names) / PIECE_INSTANCES) == (2, True)


class Reader:
    """A reader of events, who merges them as `web/cluster.js` does."""

    def __init__(self, source: SnapshotSource) -> None:
        self.source, self.version = source, 0
        self.instances: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}

    def read(self) -> int:
        """Take one event and return its size."""
        event = asyncio.run(self.source.event(None, self.version))
        self.version, shown = event.version, msgspec.json.decode(event.encoded)
        if shown["is_whole"]:
            self.instances, self.requests = {}, {}
        for change in shown["instances"]:
            self.instances[change["name"]] = self.instances.get(change["name"], {}) | change
        ended = {room: request for room, request in self.requests.items() if request["ended_at_s"] is not None}
        self.requests = ended | {request["room"]: request for request in shown["requests"]}
        return len(event.encoded)

    def expect_all(self) -> None:
        """Check that it knows what the snapshot says."""
        fresh = msgspec.json.decode(asyncio.run(self.source.fresh(None)))
        for instance in fresh["instances"]:
            del instance["layout"]
            if (load := instance["load"]) is not None:
                instance["load"] = {name: load[name] for name in LOAD_FIELDS if load[name]}
                if load["drafts"]:
                    instance["load"]["tokens_a_row"] = round(load["rates"]["tokens_a_row"], 1)
        assert self.instances == {instance["name"]: instance for instance in fresh["instances"]}
        assert self.requests == {request["room"]: request for request in fresh["requests"]}


def test_who_follows_the_events_knows_what_the_snapshot_says_however_seldom_it_reads() -> None:
    cluster, clock, rng = Cluster(), FakeClock(), random.Random(1)
    source, world = source_of(cluster, clock), cluster.world
    names = {f"{letter}{rank}" for letter in "PD" for rank in range(6)}
    hosts = dict.fromkeys(sorted(names), "localhost")
    readers = {Reader(source): chance for chance in (1.0, 0.5, 0.1)}
    rooms: list[bytes] = []
    for _ in range(150):
        present = {name: host for name, host in hosts.items() if rng.random() < 0.95}
        cluster.view = view(**present) if rng.random() < 0.3 else cluster.view
        for info in cluster.view.instances:
            if rng.random() < 0.2:
                running, paths = rng.randrange(3), (PathLoad(1, "shm", rng.randrange(9)),)
                drafts, rates = rng.choice(({}, {"text": (9, 3)})), StepRates(tokens_a_row=1 + rng.random())
                load = LoadReport(running=running, paths=paths, drafts=drafts, rates=rates)
                cluster.reports[info.role, info.engine_rank] = load
        if rng.random() < 0.5 and len(rooms) < 8:
            rooms.append(world.add()[1])
        elif rooms and rng.random() < 0.5:
            room = rooms.pop(rng.randrange(len(rooms)))
            world.tokens([room], [Finish(room, "stop")])
        for reader, chance in readers.items():
            clock.advance(2 * SnapshotSource.MIN_AGE_S)
            if rng.random() < chance:
                reader.read()
                reader.expect_all()


def test_an_event_of_five_hundred_instances_has_what_changed() -> None:
    cluster, clock = Cluster(), FakeClock()
    cluster.view = view(**{f"{letter}{rank}": "10.0.0.1" for letter in "PD" for rank in range(250)})

    def work(share: float) -> None:
        for info in cluster.view.instances[: int(500 * share)]:
            before = cluster.reports.get((info.role, info.engine_rank), LoadReport())
            paths = tuple(PathLoad(rank, "shm", 1) for rank in range(250))
            more = dict(tokens=before.tokens + 10_000, steps=before.steps + 500, running=8, pages_total=4096)
            cluster.reports[info.role, info.engine_rank] = LoadReport(**more, paths=paths)

    reader = Reader(source_of(cluster, clock))

    def size(share: float) -> int:
        work(share)
        clock.advance(2 * SnapshotSource.MIN_AGE_S)
        return reader.read()

    sizes = {share: size(share) for share in (1.0, 0.0, 0.02, 1.001)}
    assert sizes[1.0] < 500 * 240 and sizes[0.0] < 700 and sizes[0.02] < 2000 and sizes[1.001] < 500 * 100, sizes
    reader.expect_all()
