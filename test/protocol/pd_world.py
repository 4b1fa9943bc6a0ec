"""P and D cores joined by a network that drops, doubles, delays and reorders, with fake time and the fake transport.

Each node has a model of its scheduler that follows the rules of `kv_transfer/events.py` and checks what it is told:
events come once and in order, SUCCESS means that every byte is right, and a page that was given back is never written
again (free pages hold a poison that is looked at whenever they are taken, and at the end).
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field

import numpy as np

from chitu.clock import FakeClock
from chitu.config.schema import DeadlineConfig
from chitu.errors import RequestCancelled
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_transfer.decode_receiver import DecodeReceiver
from chitu.kv_transfer.events import KVChunk, TransferEventKind
from chitu.kv_transfer.fake.transfer_engine import FakeFabric, FakeTransport, Fault, FaultKind
from chitu.kv_transfer.kv_manager import KVManager, KVManagerConfig
from chitu.kv_transfer.metadata_buffers import MetadataBuffers
from chitu.kv_transfer.prefill_sender import PrefillSender
from chitu.messages import ClusterView, InstanceInfo, KVLayout
from chitu.types import Role, instance_name

NUM_LAYERS = 3
PAGE_SIZE = 4
TOKEN_BYTES = 4
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES
NUM_PAGES = 24
NUM_AUX = 4
VOCAB = 8
AUX_ROW_BYTES = AUX_HEADER_BYTES + 64
POISON = 0xEE
DEADLINES = DeadlineConfig(bootstrap_s=1.0, queue_s=1.0, transfer_s=3.0, retry_interval_s=0.2)
LAYOUT = KVLayout("hash", NUM_LAYERS, 1, 1, PAGE_SIZE, "float32", VOCAB)

Kind = TransferEventKind


class Memory:
    """A pool in numpy: `PagedMemory` plus a free list whose pages are poisoned."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        region_bytes = NUM_PAGES * page_bytes
        self.arena = np.full(2 * NUM_LAYERS * region_bytes + NUM_AUX * AUX_ROW_BYTES, POISON, dtype=np.uint8)
        self.arena_base = int(self.arena.ctypes.data)
        self.arena_bytes = self.arena.nbytes
        self.region_bases = tuple(self.arena_base + r * region_bytes for r in range(2 * NUM_LAYERS))
        self.page_bytes = page_bytes
        self.num_pages = NUM_PAGES
        self.aux_base = self.arena_base + 2 * NUM_LAYERS * region_bytes
        self.aux_row_bytes = AUX_ROW_BYTES
        self.num_aux_slots = NUM_AUX
        regions = self.arena[: 2 * NUM_LAYERS * region_bytes]
        self.kv = regions.reshape(2 * NUM_LAYERS, NUM_PAGES, page_bytes)
        self.rows = self.arena[2 * NUM_LAYERS * region_bytes :].reshape(NUM_AUX, AUX_ROW_BYTES)
        self.aux = MetadataBuffers(self.rows, 4 * VOCAB)
        self.free = list(range(NUM_PAGES))

    def take(self, count: int, rng: random.Random) -> list[int]:
        rng.shuffle(self.free)
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.check_poison(page)
        return pages

    def give(self, pages: list[int]) -> None:
        for page in pages:
            assert page not in self.free, "a page came back twice"
            self.kv[:, page] = POISON
        self.free += pages

    def check_poison(self, page: int) -> None:
        assert (self.kv[:, page] == POISON).all(), f"page {page} was written after it was given back"


def token_bytes(room: bytes, region: int, token: int) -> bytes:
    """What the model computes: a function of all that a mix-up could confuse. Never the poison."""
    value = int.from_bytes(room[:4], "little") ^ (region * 0x01010101) ^ (token * 0x00010203 + token)
    return bytes(b if b != POISON else 0 for b in (value & 0xFFFFFFFF).to_bytes(4, "little"))


def logits_of(room: bytes) -> np.ndarray:
    return np.frombuffer(room * 2, dtype=np.float32)


@dataclass
class Request:
    """A room as one side's scheduler holds it."""

    room: bytes
    num_tokens: int
    pages: list[int]
    aux_slot: int = -1
    computed: int = 0
    seen: list[Kind] = field(default_factory=list)
    is_aborted: bool = False
    holds: bool = True
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return Kind.SUCCESS in self.seen or Kind.RELEASED in self.seen


class Node:
    """One process: its core, memory and scheduler model."""

    def __init__(self, world: World, role: Role, rank: int) -> None:
        self.world = world
        self.role = role
        self.rank = rank
        self.incarnation = world.next_incarnation()
        self.pid = self.incarnation
        self.port = 1000 + self.incarnation
        self.memory = Memory(world.page_bytes.get((role, rank), PAGE_BYTES))
        self.requests: dict[bytes, Request] = {}
        self.is_alive = True
        self.is_frozen = False
        self.is_in_view = True
        self.session = f"{instance_name(role, rank)}-{self.incarnation}"
        self.kv = KVManager(
            role,
            KVManagerConfig(
                rank, self.incarnation, "h", self.port, LAYOUT, DEADLINES, max_batch_bytes=world.max_batch_bytes
            ),
            memory=self.memory,
            aux=self.memory.aux,
            transports=[FakeTransport(world.fabric, self.session)],
            link=world.link,
            wake=lambda: None,
            clock=world.clock,
            is_pid_alive=world.is_pid_alive,
        )

    @property
    def sender(self) -> PrefillSender:
        assert self.kv.sender is not None
        return self.kv.sender

    @property
    def receiver(self) -> DecodeReceiver:
        assert self.kv.receiver is not None
        return self.kv.receiver

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(self.role, self.rank, self.incarnation, "h", 1, self.port, LAYOUT, 4096, self.pid)

    # ------------------------------------------------------------------------------------------- scheduler, both roles

    def poll(self) -> None:
        for event in self.kv.poll():
            request = self.requests.get(event.room)
            assert request is not None, f"{event.kind} for a room that {self.session} does not have"
            self._check_order(request, event.kind)
            request.seen.append(event.kind)
            if event.kind is Kind.FAILED:
                assert event.error is not None
                request.error = event.error
            if event.kind is Kind.LOGITS_READY:
                logits = self.memory.aux.get(request.aux_slot)
                assert (logits.view(np.uint8) == logits_of(event.room).view(np.uint8)).all(), "wrong logits"
            if event.kind is Kind.SUCCESS and self.role is Role.DECODE:
                self._check_bytes(request)
            if request.is_over:
                self._free(request)

    def _check_order(self, request: Request, kind: Kind) -> None:
        assert kind not in request.seen, f"{kind} came twice"
        assert not request.is_over, f"{kind} after the end"
        if request.is_aborted:
            assert kind is Kind.RELEASED, f"{kind} after abort"
        elif kind is Kind.RELEASED:
            assert Kind.FAILED in request.seen, "RELEASED without FAILED"
        else:
            assert Kind.FAILED not in request.seen, f"{kind} after FAILED"
        if kind is Kind.SUCCESS:
            before = Kind.ANNOUNCED if self.role is Role.PREFILL else Kind.LOGITS_READY
            assert before in request.seen

    def _check_bytes(self, request: Request) -> None:
        for token in range(request.num_tokens):
            page, offset = request.pages[token // PAGE_SIZE], token % PAGE_SIZE * TOKEN_BYTES
            for region in range(2 * NUM_LAYERS):
                found = self.memory.kv[region, page, offset : offset + TOKEN_BYTES].tobytes()
                assert found == token_bytes(request.room, region, token), f"token {token} of region {region} is wrong"

    def _free(self, request: Request) -> None:
        assert request.holds
        request.holds = False
        self.memory.give(request.pages)
        if request.aux_slot >= 0:
            self.memory.aux.free(request.aux_slot)

    def abort(self, room: bytes) -> None:
        request = self.requests[room]
        if not request.is_over and not request.is_aborted:
            request.is_aborted = True
            role = self.kv.sender or self.kv.receiver
            assert role is not None
            role.abort(room, RequestCancelled("the client is gone"))

    # ------------------------------------------------------------------------------------------------------ scheduler D

    def decode(self, room: bytes, num_tokens: int, prefill: Node) -> bool:
        pages_wanted = -(-num_tokens // PAGE_SIZE)
        aux_slot = self.memory.aux.allocate() if len(self.memory.free) >= pages_wanted else None
        if aux_slot is None:
            return False
        pages = self.memory.take(pages_wanted, self.world.rng)
        self.requests[room] = Request(room, num_tokens, pages, aux_slot)
        self.receiver.announce(room, room.hex()[:6], pages, aux_slot, num_tokens, prefill.rank, prefill.incarnation)
        return True

    # ------------------------------------------------------------------------------------------------------ scheduler P

    def prefill(self, room: bytes, num_tokens: int, decode: Node) -> bool:
        pages_wanted = -(-num_tokens // PAGE_SIZE)
        if len(self.memory.free) < pages_wanted:
            return False
        self.requests[room] = Request(room, num_tokens, self.memory.take(pages_wanted, self.world.rng))
        self.sender.add_request(room, room.hex()[:6], num_tokens, decode.rank, decode.incarnation)
        return True

    def compute(self) -> None:
        """One step over some of the rooms, with the network and the transfer thread at work between the layers."""
        rng = self.world.rng
        chunks: list[tuple[Request, int]] = []
        for request in self.requests.values():
            if request.computed < request.num_tokens and not request.seen.count(Kind.FAILED) and rng.random() < 0.7:
                if request.is_over or request.is_aborted:
                    continue
                chunks.append((request, min(request.num_tokens, request.computed + rng.randint(1, 9))))
        self.sender.begin_step([KVChunk(r.room, r.pages, r.computed, end) for r, end in chunks])
        skips = rng.random() < 0.2  # an executor that only speaks at the end
        for layer in range(NUM_LAYERS):
            for request, end in chunks:
                for token in range(request.computed, end):
                    page, offset = request.pages[token // PAGE_SIZE], token % PAGE_SIZE * TOKEN_BYTES
                    for region in (2 * layer, 2 * layer + 1):
                        data = np.frombuffer(token_bytes(request.room, region, token), dtype=np.uint8)
                        self.memory.kv[region, page, offset : offset + TOKEN_BYTES] = data
            if not skips:
                self.sender.on_layer_done(layer)
            self.world.churn(rng.randint(0, 2))
        self.sender.end_step()
        for request, end in chunks:
            request.computed = end
            if end == request.num_tokens:
                aux_slot = self.memory.aux.allocate()
                if aux_slot is None:
                    self.abort(request.room)
                    continue
                request.aux_slot = aux_slot
                self.memory.aux.get(aux_slot)[:] = logits_of(request.room)
                self.sender.send_kv_cache(request.room, aux_slot)

    def reset(self, room: bytes) -> None:
        request = self.requests[room]
        if request.holds and self.sender.reset_chunks(room):
            request.computed = 0
            for page in request.pages:
                self.memory.kv[:, page] = 0
            if request.aux_slot >= 0:
                self.memory.aux.free(request.aux_slot)
                request.aux_slot = -1


@dataclass(frozen=True)
class Frame:
    port: int
    room: bytes
    payload: bytes


class World:
    """`hostility`: chance that the network or the fabric does something bad, per frame and per write."""

    def __init__(self, seed: int, num_prefill: int = 1, num_decode: int = 1, hostility: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(100.0)
        self.fabric = FakeFabric()
        self.hostility = hostility
        self.max_batch_bytes = self.rng.choice([1, 4 * PAGE_BYTES, 1 << 20])
        self.page_bytes: dict[tuple[Role, int], int] = {}
        self.frames: list[Frame] = []
        self._incarnations = 0
        self._view_version = 0
        self._dead_pids: set[int] = set()
        self.nodes = [Node(self, Role.PREFILL, k) for k in range(num_prefill)]
        self.nodes += [Node(self, Role.DECODE, m) for m in range(num_decode)]
        self.buried: list[Node] = []

    # ------------------------------------------------------------------------------------------------------------ parts

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def is_pid_alive(self, pid: int) -> bool:
        return pid not in self._dead_pids

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        assert host == "h"
        self.frames.append(Frame(port, room, payload))

    def of(self, role: Role) -> list[Node]:
        return [node for node in self.nodes if node.role is role]

    # ---------------------------------------------------------------------------------------------------------- network

    def churn(self, turns: int) -> None:
        """Deliver some frames, in any order and number, and let transfer threads do some work."""
        for _ in range(turns):
            if self.frames:
                self.deliver_one()
            for node in self.of(Role.PREFILL):
                if not node.is_frozen and self.rng.random() < 0.5:
                    self.write_one(node)

    def deliver_one(self) -> None:
        bad = self.rng.random() < self.hostility
        index = self.rng.randrange(len(self.frames)) if bad else 0
        frame = self.frames.pop(index)
        if bad:
            luck = self.rng.random()
            if luck < 0.4:
                return
            if luck < 0.7:
                self.frames.insert(self.rng.randint(0, len(self.frames)), frame)
        for node in self.nodes:
            if node.port == frame.port:
                if node.is_frozen:
                    self.frames.append(frame)
                else:
                    node.kv.comm_side.on_frame(frame.room, frame.payload)

    def write_one(self, node: Node) -> bool:
        if self.rng.random() < self.hostility / 4:
            self.fabric.inject(Fault(self.rng.choice([FaultKind.DROP, FaultKind.LATE])))
        return node.sender.queue.run_one()

    def publish_view(self) -> None:
        self._view_version += 1
        members = tuple(node.info for node in self.nodes if node.is_in_view and node.is_alive)
        view = ClusterView(1, self._view_version, members)
        for node in self.nodes:
            if not node.is_frozen:
                node.kv.comm_side.on_view(view)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.nodes:
            if not node.is_frozen:
                node.kv.comm_side.tick(self.clock.monotonic())
                node.poll()

    def restart(self, node: Node) -> Node:
        """kill -9 and a new incarnation; its requests are gone with it."""
        self._dead_pids.add(node.pid)
        self.fabric.kill(node.session)
        self.nodes.remove(node)
        self.buried.append(node)
        fresh = Node(self, node.role, node.rank)
        self.nodes.append(fresh)
        return fresh

    def kill(self, node: Node) -> None:
        """kill -9, and nobody starts it again."""
        self._dead_pids.add(node.pid)
        self.fabric.kill(node.session)
        self.nodes.remove(node)
        self.buried.append(node)

    # ---------------------------------------------------------------------------------------------------------- actions

    def submit(self) -> None:
        """The router's two halves of one request; one of them may be lost, or the pair may be stale."""
        room = uuid.UUID(int=self.rng.getrandbits(128)).bytes
        num_tokens = self.rng.randint(1, 20)
        prefill, decode = self.rng.choice(self.of(Role.PREFILL)), self.rng.choice(self.of(Role.DECODE))
        halves = [
            lambda: decode.is_frozen or decode.decode(room, num_tokens, prefill),
            lambda: prefill.is_frozen or prefill.prefill(room, num_tokens, decode),
        ]
        self.rng.shuffle(halves)
        for half in halves:
            if self.rng.random() >= self.hostility / 4:
                half()
            self.churn(self.rng.randint(0, 2))

    def settle_down(self, limit_s: float = 20.0) -> float:
        """No more faults, everybody runs: every room must end. Returns the fake seconds that took."""
        self.hostility = 0.0
        self.fabric._faults.clear()
        for node in self.nodes:
            node.is_frozen, node.is_in_view = False, True
        self.publish_view()
        start_s = self.clock.monotonic()
        while self.clock.monotonic() - start_s < limit_s:
            for _ in range(1000):
                if not self.frames and not any(n.sender.queue.run_one() for n in self.of(Role.PREFILL)):
                    break
                if self.frames:
                    self.deliver_one()
            for node in self.of(Role.PREFILL):
                node.compute()
            self.fabric.release_late_writes()
            self.advance(0.1)
            if self.is_quiet():
                return self.clock.monotonic() - start_s
        raise AssertionError(f"not quiet after {limit_s} s: {self.leftovers()}")

    def is_quiet(self) -> bool:
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        left = []
        for node in self.nodes:
            role = node.kv.sender or node.kv.receiver
            assert role is not None
            left += [f"{node.session} {r.room.hex()[:6]} {r.seen}" for r in node.requests.values() if not r.is_over]
            if role.num_rooms:
                left.append(f"{node.session} keeps {[entry.state for _, entry in role._table.items()]}")
        return left

    def check_all_returned(self) -> None:
        for node in self.nodes:
            assert sorted(node.memory.free) == list(range(NUM_PAGES))
            assert node.memory.aux.num_free == NUM_AUX
            for page in node.memory.free:
                node.memory.check_poison(page)
