"""A router without sockets: made-up instances, a record of what they were sent, and a clock that tests move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.clock import FakeClock
from support.keyed_peer import KeyedPeer
from support.requests import generate_request

from chitu.config.schema import (
    BreakerConfig,
    DeadlineConfig,
    PDDisaggregationConfig,
    RetryConfig,
    RouterConfig,
    TraceConfig,
)
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    PROTOCOL_VERSION,
    CancelRequest,
    ClusterView,
    Finish,
    InstanceInfo,
    KVLayout,
    LinkAck,
    RequestFailed,
    SamplingParams,
    TokenBatch,
    pack_i32,
    scheduler_codec,
)
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.generation import Generation
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role

LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100)


class RecordingOutbox:
    """An outbox that records what is sent instead of writing to sockets."""

    def __init__(self) -> None:
        self.peers: set[InstanceKey] = set()
        self.full: set[InstanceKey] = set()
        self.sent: list[tuple[str, object]] = []

    def open(self, instance: InstanceInfo) -> KeyedPeer:
        self.peers.add(instance_key(instance))
        return KeyedPeer(self, instance_key(instance))

    def send(self, key: InstanceKey, frame: bytes) -> bool:
        if key not in self.peers or key in self.full:
            return False
        self.sent.append((f"{key.role.letter}{key.engine_rank}", scheduler_codec.decode(frame)))
        return True

    def close_peer(self, key: InstanceKey) -> None:
        self.peers.discard(key)


@dataclass
class Client:
    """A client that reads as the HTTP layer does: it takes what has arrived at each wake-up."""

    generation: Generation | None = None
    tokens: list[int] = field(default_factory=list)

    def wake(self) -> None:
        if self.generation is not None:
            self.tokens += self.generation.take()


class World:
    def __init__(
        self,
        *roles: Role,
        max_in_flight: int = 8,
        max_tokens_in_flight: int = 1000,
        retry: RetryConfig | None = None,
        breaker: BreakerConfig | None = None,
        deadlines: DeadlineConfig | None = None,
    ) -> None:
        """Make one instance for each role given. The instances of a role have the ranks 0, 1, ..."""
        self.clock = FakeClock()
        self.outbox = RecordingOutbox()
        config = RouterConfig(
            policy="round_robin",  # tests need to know which pair comes next
            max_in_flight=max_in_flight,
            max_tokens_in_flight=max_tokens_in_flight,
            request_timeout_s=60.0,
            retry=retry or RetryConfig(),
            breaker=breaker or BreakerConfig(),
            pd_disaggregation=PDDisaggregationConfig(deadlines=deadlines or DeadlineConfig()),
        )
        outbox: Any = self.outbox
        trace = RouterTrace(TraceConfig(), None, "router", self.clock)  # type: ignore[arg-type]  # nothing is traced
        self.router = PDRequestRouter(outbox, self.clock, config, trace)
        ranks = [roles[:place].count(role) for place, role in enumerate(roles)]
        self.instances = [
            InstanceInfo(
                role,
                rank,
                1 + place,
                "127.0.0.1",
                1,
                2,
                LAYOUT,
                512,
                num_slots=4,
                num_pages=20,
                protocol=PROTOCOL_VERSION,
            )
            for place, (role, rank) in enumerate(zip(roles, ranks, strict=True))
        ]
        self._gone: list[InstanceInfo] = []
        for instance in self.instances:
            self.router.on_joined(instance)
        self.router.on_view(ClusterView(1, 1, tuple(self.instances)))
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def add(self, **fields: Any) -> tuple[Generation, bytes]:
        request = generate_request("id", pack_i32([1, 2, 3]), 3, SamplingParams(max_tokens=4), **fields)
        generation = self.router.add_request(request, self.wake)
        return generation, self.room(generation)

    def add_choices(self, count: int, num_tokens: int = 3, **fields: Any) -> list[Generation]:
        prompt = pack_i32(range(num_tokens))
        samplings = [SamplingParams(max_tokens=4, seed=7 + choice) for choice in range(count)]
        requests = [generate_request(f"id-{i}", prompt, num_tokens, s, **fields) for i, s in enumerate(samplings)]
        added: list[Generation] = []
        while len(added) < count:
            added += self.router.add_choices(requests[len(added) :], self.wake)
        return added

    def add_client(self, **fields: Any) -> Client:
        client = Client()
        sampling = fields.pop("sampling", SamplingParams(max_tokens=8))
        request = generate_request("id", pack_i32([1, 2, 3]), 3, sampling, **fields)
        client.generation = self.router.add_request(request, client.wake)
        return client

    def room(self, generation: Generation | None) -> bytes:
        """Return the room of the request's current attempt."""
        assert generation is not None and generation.attempt is not None
        return generation.attempt.room

    def pair(self, generation: Generation | None) -> str:
        assert generation is not None and generation.attempt is not None
        return generation.attempt.pair

    def tokens(self, rooms: list[bytes], finished: list[Finish] | None = None) -> None:
        self.router.on_tokens(TokenBatch(1, rooms, list(range(len(rooms))), finished or []))
        self.router.flush()

    def emit(self, room: bytes, *tokens: int, finish: str = "") -> None:
        finished = [Finish(room, finish)] if finish else []
        self.router.on_tokens(TokenBatch(1, [room] * len(tokens), list(tokens), finished))
        self.router.flush()

    def decode_fails(self, room: bytes, code: str) -> None:
        self.router.on_tokens(TokenBatch(1, [], [], [Finish(room, "error", code, "for a test")]))
        self.router.flush()

    def fails(self, name: str, room: bytes, code: str) -> None:
        """Report on the stats port, as the instance `name` (such as `P0`), that the request failed."""
        instance = self.instance(name)
        failed = RequestFailed(instance.role, instance.engine_rank, instance.incarnation, room, code, "for a test")
        self.router.on_request_failed(failed)

    def link(self, name: str) -> int:
        """Return the router's link to an instance."""
        return self.router._members[instance_key(self.instance(name))].sender.link

    def instance(self, name: str) -> InstanceInfo:
        return next(i for i in self.instances if f"{i.role.letter}{i.engine_rank}" == name)

    def lose(self, role: Role, rank: int = 0, has_died: bool = True) -> None:
        gone = next(i for i in self.instances if i.role is role and i.engine_rank == rank)
        self.instances.remove(gone)
        self._gone.append(gone)
        self.router.on_view(ClusterView(1, 2, tuple(self.instances)))
        self.router.on_lost(gone, "killed", has_died)

    def join(self, role: Role, rank: int) -> None:
        """Add a new process of an instance that was lost, or one more instance."""
        incarnation = 1 + max(i.incarnation for i in (*self.instances, *self._gone))
        new = InstanceInfo(role, rank, incarnation, "127.0.0.1", 1, 2, LAYOUT, 512)
        self.instances.append(new)
        self.router.on_joined(new)
        self.router.on_view(ClusterView(1, 3, tuple(self.instances)))

    def cancelled(self) -> list[str]:
        return [name for name, message in self.outbox.sent if isinstance(message, CancelRequest)]

    def sent_to(self, room: bytes) -> dict[str, Any]:
        """Return what was sent for an attempt, by instance, without cancellations."""
        return {
            name: message
            for name, message in self.outbox.sent
            if not isinstance(message, CancelRequest | LinkAck) and message.head.room == room  # type: ignore[attr-defined]
        }


def pair(**config: Any) -> World:
    return World(Role.PREFILL, Role.DECODE, **config)


def two_pairs(**config: Any) -> World:
    return World(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, **config)


ONE_TRY = RetryConfig(max_attempts=1)
