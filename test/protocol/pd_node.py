"""A P or a D without processes: a core with a fake transport, memory that exposes misuse, and a model of its scheduler.

The model follows the rules of `kv_transfer/both_sides.py` and checks the events: they come once and in order, SUCCESS
means that every byte is right, and a released page is never written again (free pages hold a poison that is checked
whenever they are taken, and at the end). `pd_world.World` joins nodes by a network.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from support.fake_transport import FakeTransport
from support.faults import FaultyTransport

from chitu.config.schema import DeadlineConfig
from chitu.errors import RequestCancelled
from chitu.fake.executor import FAKE_STATE, STATE_ROW_BYTES
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_cache.checksum import HostPageSums
from chitu.kv_cache.state_row import STAMP_BYTES, StateStamp, digest_of
from chitu.kv_cache.state_sums import HostStateSeals
from chitu.kv_transfer.both_sides import OwnMemory, TransferContext, TransferEventKind
from chitu.kv_transfer.chunks import KVChunk
from chitu.kv_transfer.kv_manager import KVManagerConfig, manager_of_decode, manager_of_prefill
from chitu.kv_transfer.layout import MetadataBuffers, PageSums
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.segments import Gatherer, HostCopier, Scatterer, SentGroup, StagingArea, area_of
from chitu.kv_transfer.transports.staged import StagedFrom, StagedTransport, StagingEnd, TransferWay
from chitu.kv_transfer.transports.transport import CopyList, Transport
from chitu.protocol import InstanceInfo, KVLayout
from chitu.types import Ready, Role, instance_name

if TYPE_CHECKING:
    from pd_world import World


NUM_LAYERS = 3
PAGE_SIZE = 4
TOKEN_BYTES = 4
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES
NUM_PAGES = 24
NUM_AUX = 4
NUM_STATES = 3
NUM_SEGMENTS = 4
VOCAB = 8
AUX_ROW_BYTES = AUX_HEADER_BYTES + 64
POISON = 0xEE
WAIT_TURNS = 24
"""Number of turns after which a write has timed out."""
DEADLINES = DeadlineConfig(bootstrap_s=1.0, queue_s=1.0, transfer_s=3.0, retry_interval_s=0.2)
LAYOUT = KVLayout.uniform("hash", NUM_LAYERS, 1, 1, PAGE_SIZE, "float32", VOCAB)

STATE_LAYOUT = msgspec.structs.replace(LAYOUT, state=FAKE_STATE)

Kind = TransferEventKind


def mixed(number: int) -> int:
    """Return a distinct number for each from 1 to 1008, in mixed order."""
    return number * 613 % 1009


class WatchedSums:
    """`PageSums` of a node. Counts the sums, and runs `meanwhile` in each call."""

    def __init__(self, inner: PageSums) -> None:
        self._inner = inner
        self.num_units = 0
        """Pages times layers summed so far."""
        self.meanwhile: Callable[[], object] = lambda: None

    def sums(self, layers: range, pages: Sequence[int]) -> NDArray[np.int64]:
        self.num_units += len(layers) * len(pages)
        self.meanwhile()
        return self._inner.sums(layers, pages)


class WatchedCopier:
    """`PieceCopier` of a node. `look` receives the copies; `meanwhile` runs before and after bytes move."""

    def __init__(self, look: Callable[[CopyList], object] = lambda copies: None) -> None:
        self._inner = HostCopier()
        self._look = look
        self.meanwhile: Callable[[], object] = lambda: None

    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        self.meanwhile()
        self._look(copies)
        self._inner.copy(copies, after)
        self.meanwhile()


class PumpedGatherer(Gatherer):
    """Gatherer whose waiting thread gives the rest of the world turns, in this one thread."""

    def __init__(self, area: StagingArea | None, turn: Callable[[], object]) -> None:
        super().__init__(area)
        self._turn = turn

    def wait(self, is_over: Callable[[], bool], sent: Sequence[SentGroup], timeout_s: float) -> bool:
        for number in range(WAIT_TURNS):
            if is_over():
                return True
            if number % 4 == 3:
                for group in sent:
                    if group.answer is None:
                        group.send()
            self._turn()
        return is_over()


def staged(
    inner: Transport,
    memory: Memory,
    way: TransferWay,
    copier: WatchedCopier,
    role: Role,
    rank: int,
    num_prefill: int,
    turn: Callable[[], object],
) -> StagedTransport:
    """Return a staged transport. With `auto` smaller batches are written directly, so rooms use both ways."""
    assert memory.area is not None
    scatterer = Scatterer(memory, memory.area, copier, range(num_prefill)) if role is Role.DECODE else None
    threshold = StagedFrom(3, 1 << 20)
    end = StagingEnd(way, memory, copier, memory.area, rank, scatterer, threshold=lambda transport: threshold)
    end.gatherer = PumpedGatherer(memory.area if role is Role.PREFILL else None, turn)
    return StagedTransport(inner, end)


class DeviceQueue:
    """Twin of a device: launched work runs, in order, when a thread waits for a point behind it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._num_launched = 0

    def launch(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._num_launched += 1

    def event(self) -> Point:
        return Point(self, self._num_launched)

    @property
    def num_waiting(self) -> int:
        return len(self._work)

    def run_until(self, number: int) -> None:
        while self._num_launched - len(self._work) < number:
            self._work.popleft()()


@dataclass(frozen=True)
class Point:
    """`Ready` of the twin."""

    queue: DeviceQueue
    number: int

    def synchronize(self) -> None:
        self.queue.run_until(self.number)

    def wait(self, stream: object = None) -> None:
        raise AssertionError("the fake transport has no stream")


class Memory:
    """A pool in numpy: `PagedMemory` plus a free list whose pages are poisoned, and segments behind it."""

    def __init__(self, page_bytes: int = PAGE_BYTES, segment_bytes: int = 0, *, has_state: bool = False) -> None:
        region_bytes = NUM_PAGES * page_bytes
        state_at = 2 * NUM_LAYERS * region_bytes + NUM_AUX * AUX_ROW_BYTES
        self.num_state_slots = NUM_STATES if has_state else 0
        self.state_row_bytes = STATE_ROW_BYTES if has_state else 0
        pool_bytes = state_at + self.num_state_slots * self.state_row_bytes
        self.arena = np.full(pool_bytes + NUM_SEGMENTS * segment_bytes, POISON, dtype=np.uint8)
        self.arena_base = int(self.arena.ctypes.data)
        self.arena_bytes = self.arena.nbytes
        self.region_bases = tuple(self.arena_base + r * region_bytes for r in range(2 * NUM_LAYERS))
        self.page_bytes = (page_bytes,) * (2 * NUM_LAYERS)
        self.num_pages = NUM_PAGES
        self.aux_base = self.arena_base + 2 * NUM_LAYERS * region_bytes
        self.aux_row_bytes = AUX_ROW_BYTES
        self.num_aux_slots = NUM_AUX
        self.layout = STATE_LAYOUT if has_state else LAYOUT
        self.state_base = self.arena_base + state_at
        self.states = self.arena[state_at:pool_bytes].reshape(-1, STATE_ROW_BYTES)
        self.state_seals = HostStateSeals(self.layout, 0, self.state_base, NUM_STATES) if has_state else None
        self.free_states = list(range(self.num_state_slots))
        regions = self.arena[: 2 * NUM_LAYERS * region_bytes]
        self.kv = regions.reshape(2 * NUM_LAYERS, NUM_PAGES, page_bytes)
        self.rows = self.arena[2 * NUM_LAYERS * region_bytes : state_at].reshape(NUM_AUX, AUX_ROW_BYTES)
        self.area: StagingArea | None = None
        if segment_bytes:
            self.area = area_of(self, self.arena_base + pool_bytes, segment_bytes, NUM_SEGMENTS)
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

    def take_state(self) -> int:
        slot = self.free_states.pop()
        assert (self.states[slot] == POISON).all(), f"state row {slot} was written after it was given back"
        return slot

    def give_state(self, slot: int) -> None:
        assert slot not in self.free_states, "a state row came back twice"
        self.states[slot] = POISON
        self.free_states.append(slot)

    def check_poison(self, page: int) -> None:
        assert (self.kv[:, page] == POISON).all(), f"page {page} was written after it was given back"


def token_bytes(room: bytes, region: int, token: int) -> bytes:
    """Return what the model computes: a function of everything that could be confused. Never the poison."""
    value = int.from_bytes(room[:4], "little") ^ (region * 0x01010101) ^ (token * 0x00010203 + token)
    return bytes(b if b != POISON else 0 for b in (value & 0xFFFFFFFF).to_bytes(4, "little"))


def prompt_of(room: bytes, num_tokens: int) -> bytes:
    return (room * (1 + num_tokens // 4))[: 4 * num_tokens]


def state_of(room: bytes, num_tokens: int) -> NDArray[np.uint8]:
    """Return the row of the state behind so many tokens of a prompt."""
    stamp = StateStamp(num_tokens, digest_of(prompt_of(room, num_tokens))).pack()
    content = hashlib.sha512(room + num_tokens.to_bytes(4, "little")).digest()
    return np.frombuffer(stamp.ljust(STAMP_BYTES, b"\0") + content, np.uint8)


def logits_of(room: bytes) -> np.ndarray:
    return np.frombuffer(room * 2, dtype=np.float32)


@dataclass
class Request:
    """A room in the state of one side's scheduler."""

    room: bytes
    num_tokens: int
    pages: list[int]
    aux_slot: int = -1
    state_slot: int = -1
    computed: int = 0
    seen: list[Kind] = field(default_factory=list)
    is_aborted: bool = False
    holds: bool = True
    error: Exception | None = None
    needs_kv: bool = True
    """Whether D needs KV; otherwise it needs the logits row alone."""
    is_drawn_unchecked: bool = False
    """Whether the step of D that draws checks the row."""
    is_drawn: bool = False

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
        self.memory = Memory(segment_bytes=world.segment_bytes, has_state=world.has_state)
        self.requests: dict[bytes, Request] = {}
        self.is_alive = True
        self.is_frozen = False
        self.is_in_view = True
        self.device: DeviceQueue | None = None
        """If set, a step launches its work there and does not wait."""
        self.session = f"{instance_name(role, rank)}-{self.incarnation}"
        config = KVManagerConfig(rank, self.incarnation, "h", self.port, self.memory.layout, DEADLINES)
        memory = self.memory
        self.page_sums = WatchedSums(HostPageSums(LAYOUT, 0, memory.region_bases, memory.num_pages, memory.page_bytes))
        self.wake: Callable[[], object] = lambda: None
        self.copier = WatchedCopier()
        fake = FakeTransport(world.fabric, self.session)
        self.transport: Transport = fake if world.faults is None else FaultyTransport(fake, world.faults)
        if world.way != "direct":
            fake.gathers = world.gathers
            of = self.transport, memory, world.way, self.copier, role, rank, world.num_prefill
            self.transport = staged(*of, lambda: world.wait_turn())
        own = OwnMemory(memory, memory.aux, [self.transport], self.page_sums, memory.state_seals)
        context = TransferContext(world.link, lambda: self.wake(), world.clock, is_pid_alive=world.is_pid_alive)
        config = replace(config, max_batch_bytes=world.max_batch_bytes, verify_kv=world.verify_kv)
        build = manager_of_prefill if role is Role.PREFILL else manager_of_decode
        self.kv = build(config, own, context)

    @property
    def sender(self) -> PrefillSender:
        assert isinstance(self.kv.side, PrefillSender)
        return self.kv.side

    @property
    def receiver(self) -> DecodeReceiver:
        assert isinstance(self.kv.side, DecodeReceiver)
        return self.kv.side

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            self.role, self.rank, self.incarnation, "h", 1, self.port, self.memory.layout, 4096, self.pid
        )

    def verify_one(self) -> bool:
        """Run one turn of D's verifying thread."""
        verifier = self.kv.side.verifier if self.role is Role.DECODE else None
        return verifier is not None and verifier.run_one()

    def scatter_one(self) -> bool:
        """Run one turn of the transport's thread on D."""
        return isinstance(self.transport, StagedTransport) and self.transport.scatter_one()

    # ------------------------------------------------------------------------------------------- scheduler, both roles

    def _draw(self, request: Request) -> None:
        """Do what a step does that draws from a row and checks it; read it."""
        request.is_drawn = True
        rows, end = self.memory.aux._rows, AUX_HEADER_BYTES + 4 * VOCAB
        found, logits = rows.checked(request.aux_slot, end), bytes(rows.read(request.aux_slot, AUX_HEADER_BYTES, end))
        judged = self.receiver.row_checked(request.room, request.aux_slot, found)
        assert judged is None or logits == logits_of(request.room).tobytes(), "wrong logits"

    def poll(self) -> None:
        for request in self.requests.values():
            is_due = request.is_drawn_unchecked and not request.is_drawn and not request.is_aborted
            if is_due and request.seen == [Kind.LOGITS_READY]:
                self._draw(request)
        for event in self.kv.side.poll():
            request = self.requests.get(event.room)
            assert request is not None, f"{event.kind} for a room that {self.session} does not have"
            self._check_order(request, event.kind)
            request.seen.append(event.kind)
            if event.kind is Kind.FAILED:
                assert event.error is not None
                request.error = event.error
            if event.kind is Kind.SUCCESS and request.is_drawn_unchecked:
                assert request.is_drawn, "SUCCESS before the row is checked"
            if event.kind is Kind.LOGITS_READY and not request.is_drawn_unchecked:
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
        if not request.needs_kv:
            return
        for token in range(request.num_tokens):
            page, offset = request.pages[token // PAGE_SIZE], token % PAGE_SIZE * TOKEN_BYTES
            for region in range(2 * NUM_LAYERS):
                found = self.memory.kv[region, page, offset : offset + TOKEN_BYTES].tobytes()
                assert found == token_bytes(request.room, region, token), f"token {token} of region {region} is wrong"
        if request.state_slot >= 0:
            found_row = self.memory.states[request.state_slot, STAMP_BYTES:]
            assert (found_row == state_of(request.room, request.num_tokens)[STAMP_BYTES:]).all(), "wrong state"

    def _free(self, request: Request) -> None:
        assert request.holds
        request.holds = False
        self.memory.give(request.pages)
        if request.state_slot >= 0:
            self.memory.give_state(request.state_slot)
        if request.aux_slot >= 0:
            self.memory.aux.free(request.aux_slot)

    def abort(self, room: bytes) -> None:
        request = self.requests[room]
        if not request.is_over and not request.is_aborted:
            request.is_aborted = True
            role = self.kv.side
            role.abort(room, RequestCancelled("the client is gone"))

    # ------------------------------------------------------------------------------------------------------ scheduler D

    def decode(
        self, room: bytes, num_tokens: int, prefill: Node, needs_kv: bool = True, page_sums: bool = False
    ) -> bool:
        """Start a room on D. With `needs_kv` False it holds pages and needs the logits row alone."""
        pages_wanted = -(-num_tokens // PAGE_SIZE)
        if self.world.has_state and needs_kv and not self.memory.free_states:
            return False
        aux_slot = self.memory.aux.allocate() if len(self.memory.free) >= pages_wanted else None
        if aux_slot is None:
            return False
        pages = self.memory.take(pages_wanted, self.world.rng)
        state_slot = self.memory.take_state() if self.world.has_state and needs_kv else -1
        request = Request(room, num_tokens, pages, aux_slot, state_slot, needs_kv=needs_kv)
        request.is_drawn_unchecked = self.world.checks_in_steps and needs_kv
        self.requests[room] = request
        wanted = pages if needs_kv else []
        of = room, room.hex()[:6], wanted, aux_slot, num_tokens, prefill.rank, prefill.incarnation
        digest = digest_of(prompt_of(room, num_tokens))
        more = state_slot, digest, request.is_drawn_unchecked
        self.receiver.announce(*of, 0, page_sums, *more)
        return True

    # ------------------------------------------------------------------------------------------------------ scheduler P

    def prefill(self, room: bytes, num_tokens: int, decode: Node) -> bool:
        pages_wanted = -(-num_tokens // PAGE_SIZE)
        if len(self.memory.free) < pages_wanted or (self.world.has_state and not self.memory.free_states):
            return False
        pages = self.memory.take(pages_wanted, self.world.rng)
        state_slot = self.memory.take_state() if self.world.has_state else -1
        self.requests[room] = Request(room, num_tokens, pages, state_slot=state_slot)
        self.sender.add_request(room, room.hex()[:6], num_tokens, decode.rank, decode.incarnation)
        return True

    def compute(self) -> None:
        """Run one step over some of the rooms, with the network and the transfer thread at work between the layers."""
        rng = self.world.rng
        chunks: list[tuple[Request, int]] = []
        for request in self.requests.values():
            if request.computed < request.num_tokens and not request.seen.count(Kind.FAILED) and rng.random() < 0.7:
                if request.is_over or request.is_aborted:
                    continue
                chunks.append((request, min(request.num_tokens, request.computed + rng.randint(1, 9))))
        self.sender.feed.begin_step([KVChunk(r.room, r.pages, r.computed, end) for r, end in chunks])
        drawn = rng.random()
        skips = drawn < 0.2 and self.device is None  # an executor that reports only at the end
        is_recorded = drawn > 0.8  # it reports all layers at once
        for layer in range(NUM_LAYERS):
            for request, end in chunks:
                for token in range(request.computed, end):
                    page, offset = request.pages[token // PAGE_SIZE], token % PAGE_SIZE * TOKEN_BYTES
                    for region in (2 * layer, 2 * layer + 1):
                        data = np.frombuffer(token_bytes(request.room, region, token), dtype=np.uint8)
                        self._store(self.memory.kv[region, page, offset : offset + TOKEN_BYTES], data)
            if is_recorded and layer == NUM_LAYERS - 1:
                self.sender.feed.layer_done(layer, self.device.event() if self.device else None, 0)
            elif not skips and not is_recorded:
                self.sender.feed.layer_done(layer, self.device.event() if self.device else None)
            self.world.churn(rng.randint(0, 2))
        self.sender.feed.end_step()
        for request, end in chunks:
            request.computed = end
            if request.state_slot >= 0 and request.holds:
                self.memory.states[request.state_slot] = state_of(request.room, end)
            if end == request.num_tokens:
                aux_slot = self.memory.aux.allocate()
                if aux_slot is None:
                    self.abort(request.room)
                    continue
                request.aux_slot = aux_slot
                self.memory.aux.get(aux_slot)[:] = logits_of(request.room)
                self.sender.feed.send_rows(request.room, aux_slot, None, request.state_slot)

    def _store(self, place: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        if self.device is None:
            place[:] = data
        else:
            self.device.launch(partial(np.copyto, place, data))
