"""Snapshots of the cluster, once or as a stream, made of its view, its loads and this router's record. Loop thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import groupby, islice
from typing import NamedTuple

import msgspec

from chitu.clock import Clock
from chitu.cluster.cluster import Cluster, RouterRecord
from chitu.config.devices import is_gpu
from chitu.config.schema import Topology
from chitu.config.topology import instances, is_loopback
from chitu.errors import TooManyRequests
from chitu.http.ask.served_model import ServedModel
from chitu.http.fleet.changes import ChangeLog
from chitu.http.wire.pieces import joined
from chitu.net.fair_share import NoPlace, Places
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import PROTOCOL_VERSION, ClusterView, InstanceInfo, LoadReport
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.first_prompt import first_prompt
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceStatus
from chitu.router.attempts import KEPT_RECORDS
from chitu.types import Role, instance_name, place_of

PIECE_INSTANCES = 100
"""Instances in one piece of a snapshot."""
NO_INSTANCES = b'"instances":[]'
MAX_WATCHERS = 256
"""Event streams at once; each costs the loop an encoded snapshot's write per change. One client has a quarter at most
(`Places`)."""
HEARTBEAT_TURNS = 5
"""Looks after which an event comes without a change, since loads change without a request too."""

Change = tuple[object, int]
"""Version of what a reader sees of the cluster. Between two equal values nothing happened except heartbeats."""


class SnapshotEvent(NamedTuple):
    """One event of a stream."""

    encoded: bytes
    version: int
    """Version of the `ChangeLog` that its reader has then."""
    change: Change


class _Seats(NamedTuple):
    """What a snapshot takes from the cluster view alone."""

    view: ClusterView
    transport: str
    rows: list[tuple[tuple[Role, int], str, InstanceInfo | None]]
    """Role and rank, configured host, and the member: of the topology and those that joined beyond it, in order."""
    groups: dict[int, tuple[str, ...]]
    """Names of the members of each group, by its id."""


class SnapshotSource:
    """Builds the snapshot, and for streams what changed in it: at most once per `MIN_AGE_S`, tenant and version that a
    reader has, however many read it. `tenant`: the one whose requests it shows; None: all (see `Access.trace_tenant`).
    """

    MIN_AGE_S = 0.1

    def __init__(
        self,
        topology: Topology,
        model: ServedModel,
        router: PDRequestRouter,
        cluster: Cluster,
        clock: Clock,
        version: str,
    ) -> None:
        self._topology = topology
        self._model = model
        self._first_prompt = first_prompt(model.name, bool(model.tokenizer.template_source))
        self._router = router
        self._cluster = cluster
        self._clock = clock
        self._version = version
        self._known_seats: _Seats | None = None
        self._made: dict[tuple[Role, int], tuple[InstanceInfo | None, LoadReport | None, InstanceSnapshot]] = {}
        """Snapshots of instances, with what they were made of."""
        self._log = ChangeLog()
        self._events: dict[tuple[str | None, int], SnapshotEvent] = {}
        """Events of the newest record, by tenant and the version of their readers."""
        self._versions: dict[str, tuple[RouterRecord | None, object]] = {}
        """The same of what a tenant's `Change` is made of, for all of its streams."""
        self._recent = RouterRecord(0, 0)
        self._recent_at_s = -math.inf
        self.is_closed = False
        """Whether the process is ending, so that streams end too."""

    @property
    def model_name(self) -> str:
        return self._model.name

    async def fresh(self, tenant: str | None) -> bytes:
        """Return JSON of the cluster as it is now: a client that just got its answer finds its own request in it."""
        return await self._encoded(self._cluster.record(), tenant)

    async def event(self, tenant: str | None, version: int) -> SnapshotEvent:
        """Return what is new to a reader of this version, in a record that is at most `MIN_AGE_S` old."""
        record = self._recent_record()
        event = self._events.get((tenant, version))
        if event is None:
            encoded = self._event(record, tenant, version)
            event = SnapshotEvent(encoded, self._log.version, self._change(record, tenant))
            self._events[tenant, version] = event
        return event

    def _event(self, record: RouterRecord, tenant: str | None, version: int) -> bytes:
        snapshot = self._snapshot(record, tenant)
        news = tuple(request for request in snapshot.requests if self._log.is_news(request, version))
        head, _, tail = msgspec.json.encode(msgspec.structs.replace(snapshot, requests=news)).partition(NO_INSTANCES)
        is_whole = b"true" if self._log.is_whole_after(version) else b"false"
        return b'%b"is_whole":%b,"instances":%b%b' % (head, is_whole, self._log.instances_after(version), tail)

    async def change(self, tenant: str | None) -> Change:
        """Return the `Change` of the cluster as of a moment ago."""
        return self._change(self._recent_record(), tenant)

    def _recent_record(self) -> RouterRecord:
        now_s = self._clock.monotonic()
        if now_s - self._recent_at_s >= self.MIN_AGE_S:
            self._recent, self._recent_at_s = self._cluster.record(), now_s
            self._log.observe(self._instances(), self._recent.ended)
            self._events.clear()
        return self._recent

    def _change(self, record: RouterRecord, tenant: str | None) -> Change:
        """Return the version. A tenant's does not grow with the requests of others."""
        if tenant is None:
            return record.version, self._cluster.view.version
        known, version = self._versions.get(tenant, (None, ()))
        if known is not record:
            version = tuple((request.room, request.state) for request in _requests(record, tenant))
            self._versions[tenant] = record, version
        return version, self._cluster.view.version

    async def _encoded(self, record: RouterRecord, tenant: str | None) -> bytes:
        """Return the snapshot's JSON. Between two pieces of it the loop is free."""
        return b"".join([part async for part in joined(self._pieces(record, tenant))])

    def _pieces(self, record: RouterRecord, tenant: str | None) -> Iterator[bytes]:
        """Yield the snapshot's JSON; only its list of instances has the size of the cluster."""
        head, _, tail = msgspec.json.encode(self._snapshot(record, tenant)).partition(NO_INSTANCES)
        yield head + NO_INSTANCES[:-1]
        rest, comma = self._instances(), b""
        while part := list(islice(rest, PIECE_INSTANCES)):
            yield comma + msgspec.json.encode(part)[1:-1]
            comma = b","
        yield b"]" + tail

    def _snapshot(self, record: RouterRecord, tenant: str | None) -> ClusterSnapshot:
        """Return the snapshot without its instances."""
        limits = self._model.limits(self._router.candidates)
        balance = record.coordination.balance
        return ClusterSnapshot(
            model=self._model.name,
            version=self._version,
            max_model_len=limits.max_model_len if limits is not None else None,
            page_size=self._topology.cache.page_size,
            transport=self._seats().transport,
            time_s=self._clock.monotonic(),
            router_incarnation=str(self._cluster.view.router_incarnation),
            in_flight=record.in_flight,
            instances=(),
            requests=_requests(record, tenant),
            first_prompt=self._first_prompt,
            protocol=PROTOCOL_VERSION,
            canary=canary if (canary := self._router.canary).revision else None,
            advice=balance.advice if balance is not None else "",
        )

    def instances(self) -> tuple[InstanceSnapshot, ...]:
        """Return the instances of the topology, and those that joined beyond it."""
        return tuple(self._instances())

    def _instances(self) -> Iterator[InstanceSnapshot]:
        loads, seats = self._cluster.loads(), self._seats()
        for key, host, info in seats.rows:
            load, made = loads.get(key), self._made.get(key)
            if made is None or made[0] is not info or made[1] is not load:
                group = seats.groups[info.group.id] if info is not None and info.group is not None else ()
                made = self._made[key] = info, load, _instance(key, host, info, load, group)
            yield made[2]

    def _seats(self) -> _Seats:
        """Return what follows from the newest view, computed once for each."""
        view = self._cluster.view
        if self._known_seats is None or self._known_seats.view is not view:
            members = {(info.role, info.engine_rank): info for info in view.instances}
            moved = {place_of(info.home) for info in members.values() if info.home}
            hosts = {(i.role, i.engine_rank): i.config.host for i in instances(self._topology)}
            order = {role: position for position, role in enumerate(Role)}
            keys = sorted((hosts.keys() - moved) | members.keys(), key=lambda key: (order[key[0]], key[1]))
            rows = [(key, hosts.get(key, ""), members.get(key)) for key in keys]
            transport = transport_in_use(self._topology, view)
            self._known_seats, self._made = _Seats(view, transport, rows, _groups(view)), {}
        return self._known_seats


def transport_in_use(topology: Topology, view: ClusterView) -> str:
    """Return the transport in use. `auto` uses memory that both ends map on one machine, Mooncake between machines."""
    router = topology.dp_config.router
    configured = router.pd_disaggregation.transport
    hosts: dict[Role, set[str]] = {role: set() for role in Role}
    for info in view.instances:
        hosts[info.role].add("localhost" if is_loopback(info.host) else info.host)
    prefill, decode = hosts[Role.PREFILL], hosts[Role.DECODE]
    if configured != "auto" or not (prefill and decode):
        return configured
    pairs = ([True] if prefill & decode else []) + ([False] if len(prefill | decode) > 1 else [])
    is_cuda = any(is_gpu(device) for item in instances(topology) for device in item.config.devices)
    names = {True: "cuda_ipc" if is_cuda else "shm", False: "mooncake"}
    return " and ".join(names[is_local] for is_local in pairs)


def _requests(record: RouterRecord, tenant: str | None) -> tuple[RequestSnapshot, ...]:
    """Return the tenant's newest requests."""
    ended = [r for r in record.ended if tenant is None or r.tenant == tenant]
    running = [r for r in record.running if tenant is None or r.tenant == tenant]
    ended.sort(key=lambda r: r.ended_at_s or 0.0)
    running.sort(key=lambda r: r.created_at_s)
    return (*ended[-KEPT_RECORDS:], *running[-KEPT_RECORDS:])


def _groups(view: ClusterView) -> dict[int, tuple[str, ...]]:
    """Return the names of the members of each group, by its id."""
    places = sorted((i.group.id, i.group.rank, i.name) for i in view.instances if i.group is not None)
    return {group: tuple(name for _, _, name in found) for group, found in groupby(places, key=lambda place: place[0])}


def _instance(
    key: tuple[Role, int], host: str, info: InstanceInfo | None, load: LoadReport | None, group: tuple[str, ...]
) -> InstanceSnapshot:
    name, role = instance_name(*key), str(key[0])
    if info is None:
        return InstanceSnapshot(name, role, "down", host, 0, "", None)
    status: InstanceStatus = "draining" if info.draining else "asleep" if info.weights.sleep else "up"
    becomes, home = (instance_name(*place_of(text)) if text else "" for text in (info.becomes, info.home))
    return InstanceSnapshot(
        name,
        role,
        status,
        info.host,
        info.pid,
        str(info.incarnation),
        load,
        info.served_layout,
        becomes,
        home,
        group,
        info.release,
        info.protocol,
        info.revision,
    )


PAUSE_S = SnapshotSource.MIN_AGE_S + 0.002
"""Time between two looks. The loop may wake a millisecond early, when the last snapshot is not old enough yet."""


class Watchers:
    """The open event streams, shared by the clients (`Access.client`)."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._places: Places[bytes] = Places(MAX_WATCHERS)

    def require_room(self, client: bytes) -> None:
        """Raise TooManyRequests if the client has its share of the streams."""
        try:
            with self._places.place(client):
                pass
        except NoPlace:
            free = self._places.num_free
            raise TooManyRequests(f"too many event streams of one client: {free} are reserved for others") from None

    async def events(self, client: bytes, tenant: str | None) -> AsyncIterator[bytes]:
        version = 0
        with suppress(NoPlace), self._places.place(client):
            while not self._source.is_closed:
                encoded, version, shown = await self._source.event(tenant, version)
                yield b"data: %b\n\n" % encoded
                for _ in range(HEARTBEAT_TURNS):
                    await asyncio.sleep(PAUSE_S)
                    if self._source.is_closed or await self._source.change(tenant) != shown:
                        break
