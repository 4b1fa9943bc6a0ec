"""One P or D of the simulated cluster, and what watches its writes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from pd_node import NUM_AUX, NUM_LAYERS, NUM_PAGES, PAGE_BYTES, PAGE_SIZE, VOCAB, Memory, WatchedCopier, staged
from support.executors import LateExecutor
from support.fake_transport import FakeFabric, FakeTransport

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import (
    DeadlineConfig,
    PDDisaggregationConfig,
    RetryConfig,
    RouterConfig,
    SchedulerConfig,
)
from chitu.engine.executor import (
    CopyPage,
    Executor,
    ExecutorInfo,
    LayerCallback,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
    StepResult,
)
from chitu.errors import ChituError
from chitu.fake.executor import FakeExecutor
from chitu.instance.core import LoadedEngine, SchedulerSettings
from chitu.instance.sequences import AT_PEER_STATES, Sequence, SequenceState
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_cache.checksum import HostPageSums
from chitu.kv_cache.state_row import StateSlots
from chitu.kv_transfer.both_sides import TransferEvent
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.chunks import TransferJob
from chitu.kv_transfer.kv_manager import KVManagerConfig, NoPeers
from chitu.kv_transfer.layout import VerifyKV
from chitu.kv_transfer.receiver import ReceiverState
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sender_table import SenderState
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.staged import StagedTransport, TransferWay
from chitu.kv_transfer.transports.transport import CopyList, Transport
from chitu.net.process_deaths import pid_namespace
from chitu.net.view_feed import ViewReceiver
from chitu.protocol import ClusterView, InstanceInfo, SchedulerMessage
from chitu.simulation.process import Hardware, SimulatedProcess, World
from chitu.types import Role, instance_name

if TYPE_CHECKING:
    from cluster import Cluster


# ----------------------------------------------------------------------------------------------------------------------
# Watches P's writes into D's memory: bytes move only in memory that their room owns, both at once and when a late write
# lands; other threads go on in the middle of a write.


@dataclass(frozen=True)
class Writes:
    """How the Ps of a world write and how the Ds verify."""

    max_batch_bytes: int = 4 * PAGE_BYTES
    verify_kv: VerifyKV = "off"
    way: TransferWay = "direct"
    segment_bytes: int = 0
    """Bytes of a segment. Zero: no instance has segments."""
    gathers: bool = False
    """Whether P's transport puts pieces into D's segments by itself."""
    has_state: bool = False
    """Whether the model has a recurrent state; then nothing is cached."""


class WriteWatch:
    """The `on_write` and `on_land` callbacks of the world's fabric."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._writes: dict[int, tuple[bytes, CopyList]] = {}
        """Room and copies, by the id of the copies."""
        self._num_moves = 0
        self._is_inside_write = False

    def on_write(self, target: str, copies: CopyList) -> None:
        self._writes[id(copies)] = self._world.writing, copies
        self.meanwhile()

    def meanwhile(self) -> None:
        """Let other threads run in the middle of a write, gather or scatter, which take long: the comm threads and the
        step threads of D go on, and those of P receive their messages."""
        self._num_moves += 1
        world = self._world
        if self._is_inside_write or (self._num_moves % 3 and not world.interruptions):
            return
        self._is_inside_write = True
        if world.interruptions:
            world.op_cancel(world.interruptions.popleft(), 0)
            while world.orders and world.deliver_order():
                pass
        for process in world.of(Role.DECODE):
            if not process.is_frozen and not process.is_slow and process not in world.stepping:
                world.step(process)
        for _ in range(min(2, len(world.frames))):
            world.deliver(0)
        for process in world.of(Role.PREFILL):
            if not process.is_frozen:
                process.tick()
        self._is_inside_write = False

    def on_land(self, target: str, copies: CopyList) -> None:
        room = self._writes[id(copies)][0]
        for process in self._world.processes:
            if process.role is Role.PREFILL:
                _check(process, room, copies.src, copies.length, is_source=True)
            elif process.session == target:
                _check(process, room, copies.dst, copies.length, is_source=False)

    def on_copy(self, process: Process, copies: CopyList) -> None:
        """Check that a room owns all pieces that are gathered into a segment of this process or scattered out of
        one."""
        self.meanwhile()
        is_source = process.role is Role.PREFILL
        pages, slots = _parts(process, copies.src if is_source else copies.dst, copies.length)
        sequences = process.sequences()
        rooms = [room for room in sequences if pages <= set(process.cache.get_page_indices(room))]
        rooms = [room for room in rooms if slots <= _rows_of(sequences[room])]
        assert rooms, f"pages {pages} and rows {slots} of {process.name} are copied, and no room has them"
        process.check_landing(rooms[0], pages, slots, is_source)


def _check(process: Process, room: bytes, addresses: object, lengths: object, is_source: bool) -> None:
    """Check that the room has these pages and aux slots of the process. Segments are exempt: any P may write them at
    any time, and if all writes are staged, nothing else is written."""
    memory, at = process.memory, np.asarray(addresses, dtype=np.int64)
    if not ((at >= memory.arena_base) & (at < memory.arena_base + memory.arena_bytes)).any():
        return
    pages, slots = _parts(process, addresses, lengths)
    if pages or slots:
        assert is_source or process.world.writes.way != "staged", "a write beside the segments"
        process.check_landing(room, pages, slots, is_source)


def _rows_of(sequence: Sequence) -> set[int]:
    """Return its rows, numbered as by `_parts`."""
    return {sequence.holds.aux_slot, *([NUM_AUX + sequence.holds.state_slot] if sequence.holds.state_slot >= 0 else [])}


def _parts(process: Process, addresses: object, lengths: object) -> tuple[set[int], set[int]]:
    """Return the pages and rows (aux slots, and behind them state slots) of the process that contain these bytes."""
    memory = process.memory
    offsets = np.asarray(addresses, dtype=np.int64) - memory.arena_base
    aux_offset = memory.aux_base - memory.arena_base
    state_offset = memory.state_base - memory.arena_base
    area_offset = None if memory.area is None else memory.area.base - memory.arena_base
    region_bytes = NUM_PAGES * PAGE_BYTES
    pages: set[int] = set()
    slots: set[int] = set()
    for start, count in zip(offsets.tolist(), np.asarray(lengths).tolist(), strict=True):
        if start < aux_offset:
            first = start % region_bytes // PAGE_BYTES
            pages.update(range(first, first + -(-count // PAGE_BYTES)))
        elif memory.num_state_slots and state_offset <= start < state_offset + memory.states.size:
            slots.add(NUM_AUX + (start - state_offset) // memory.state_row_bytes)
        elif area_offset is None or start < area_offset:
            slots.add((start - aux_offset) // memory.aux_row_bytes)
    return pages, slots


# ----------------------------------------------------------------------------------------------------------------------
# One P or D of the simulated cluster with its real parts: `PDScheduler`, transfer layer, page accounting. Only compute
# (`KVExecutor`), the transport, the clock and the network (`cluster.py`) are fakes. It checks the invariants inside one
# process: a token's KV is right whenever it is read, every transfer event comes once and in order, a room that ended
# stays ended, and every page and aux slot has exactly one owner.


INFO = ExecutorInfo(num_slots=5, max_model_len=64, vocab_size=1000, num_layers=NUM_LAYERS, eos_token_ids=(2,))
SCHEDULING = SchedulerConfig(max_running_requests=5, max_batched_tokens=12, chunk_size=5, reserved_decode_tokens=1)
DEADLINES = DeadlineConfig(
    bootstrap_s=1.0,
    queue_s=1.0,
    transfer_s=3.0,
    retry_interval_s=0.2,
    lease_s=1.5,
    router_s=4.0,
    role_change_s=0.5,
)
REQUEST_TIMEOUT_S = 12.0
CONFIG = RouterConfig(
    request_timeout_s=REQUEST_TIMEOUT_S,
    retry=RetryConfig(max_attempts=4),
    pd_disaggregation=PDDisaggregationConfig(deadlines=DEADLINES),
)
QUIET_S = 0.03
"""Time without work after which a process that changes its role begins its next life."""
NAMESPACE = pid_namespace()
SUCCEEDED = {SenderState.SUCCEEDED, ReceiverState.SUCCEEDED}
FAILED = {SenderState.STOPPING, SenderState.UNFENCED, SenderState.FENCING, SenderState.RELEASED}
FAILED |= {ReceiverState.QUARANTINED, ReceiverState.RELEASED}
SEQUENCE_STATES = tuple(SequenceState)
REGION_SALT = (np.arange(2 * NUM_LAYERS, dtype=np.uint64) * 0x9E3779B1).astype(np.uint32)[:, None]


class Surroundings(World, Protocol):
    """Parts of the world that a process needs beside those that any simulated one does."""

    fabric: FakeFabric
    writes: Writes
    watch: WriteWatch
    num_prefill: int
    writing: bytes
    """Room of the write that runs now."""

    @property
    def num_started(self) -> int: ...
    def meanwhile(self) -> None: ...
    def wait_turn(self) -> None: ...
    def on_submit(self, process: Process, message: SchedulerMessage) -> None:
        """Handle that a request, or its cancellation, has arrived."""
        ...


class KVExecutor(FakeExecutor):
    """`FakeExecutor` whose KV are real bytes: for token t in region r, a checksum of the tokens up to t, mixed with
    r."""

    checked_to = AUX_HEADER_BYTES + 4 * VOCAB

    def __init__(self, memory: Memory, meanwhile: Callable[[], None]) -> None:
        super().__init__(INFO, NUM_PAGES, PAGE_SIZE, memory.rows, memory.states)
        self._kv = memory.kv.view(np.uint32)
        self._meanwhile = meanwhile
        self._host: dict[int, NDArray[np.uint32]] = {}

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        for key in plan.drop:
            del self._host[key]

        def layer_done(layer: int) -> None:
            for chunk in plan.prefill:
                self._write(chunk.slot, chunk.start, chunk.start + chunk.length, slice(2 * layer, 2 * layer + 2))
            if on_layer is not None:
                on_layer(layer)
            self._meanwhile()

        return super().execute(plan, layer_done)

    def _right(self, slot: int, start: int, end: int) -> NDArray[np.uint32]:
        """Return the right KV, `[regions, end - start]`."""
        tokens = self._slots[slot].tokens
        sums = itertools.accumulate(
            (t.to_bytes(4, "little") for t in tokens[:end]), lambda s, t: zlib.crc32(t, s), initial=0
        )
        return np.array(list(sums)[start + 1 :], dtype=np.uint32) ^ REGION_SALT

    def _write(self, slot: int, start: int, end: int, regions: slice = slice(None)) -> None:
        pages, right = self._slots[slot].pages, self._right(slot, start, end)
        for at in range(start, end):
            self._kv[regions, pages[at // PAGE_SIZE], at % PAGE_SIZE] = right[regions, at - start]

    def _check(self, slot: int, num_tokens: int) -> None:
        found = self._kv[:, self._slots[slot].pages].reshape(2 * NUM_LAYERS, -1)[:, :num_tokens]
        assert (found == self._right(slot, 0, num_tokens)).all(), f"slot {slot}: KV of another request, or torn"

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        self._check(chunk.slot, chunk.start)
        super()._prefill(chunk, result)

    def _decode(self, slot: int, result: StepResult) -> None:
        length = self._slots[slot].kv_len
        self._check(slot, length)
        self._write(slot, length, length + 1)
        super()._decode(slot, result)

    def _copy(self, copy: CopyPage) -> None:
        super()._copy(copy)
        self._kv[:, copy.target] = self._kv[:, copy.source]

    def _offload(self, offload: Offload) -> None:
        self._check(offload.slot, self._slots[offload.slot].kv_len)
        self._host[offload.key] = self._kv[:, self._slots[offload.slot].pages].copy()
        super()._offload(offload)

    def _restore(self, restore: Restore) -> None:
        saved = self._host.pop(restore.key)
        pages = self._slots[restore.slot].pages[: saved.shape[1]]
        self._kv[:, pages] = saved[:, : len(pages)]
        super()._restore(restore)


@dataclass
class EventLog:
    """Checks the events of a room: each kind once; Success, or Failed and then Released; nothing after the end; only
    Released after an abort."""

    kinds: dict[bytes, list[Kind]] = field(default_factory=dict)
    aborted: set[bytes] = field(default_factory=set)

    def take(self, event: TransferEvent) -> None:
        seen = self.kinds.setdefault(event.room, [])
        assert event.kind not in seen, f"{event.kind.name} came twice"
        assert Kind.RELEASED not in seen, f"{event.kind.name} after RELEASED"
        assert event.kind is Kind.RELEASED or event.room not in self.aborted, f"{event.kind.name} after an abort"
        if event.kind is Kind.RELEASED:  # after SUCCESS only if an abort crossed it and took it back
            assert Kind.SUCCESS not in seen, "RELEASED after SUCCESS"
        else:
            assert not {Kind.SUCCESS, Kind.FAILED} & set(seen), f"{event.kind.name} after {seen[-1].name}"
        seen.append(event.kind)


class Process(SimulatedProcess):
    """An incarnation of P or D. Its threads are the methods that the world calls: `step`, `write`, `on_frame`,
    `tick`."""

    cache_type = PagedKVCacheManager
    quiet_s = QUIET_S
    world: Surroundings

    def __init__(self, world: Surroundings, role: Role, rank: int) -> None:
        incarnation = world.new_incarnation()
        self.pid = incarnation
        """An incarnation is its pid, as long as the process keeps its role."""
        self.home = role, rank
        self.routers: set[int] = set()
        """Routers whose views it received."""
        self.session = f"{instance_name(role, rank)}-{incarnation}"
        has_state = world.writes.has_state
        self.memory = Memory(segment_bytes=world.writes.segment_bytes, has_state=has_state)
        self.states = StateSlots(self.memory.num_state_slots)
        self._is_writing = False
        self.cache = self.cache_type(NUM_PAGES, PAGE_SIZE, None if has_state else b"model")
        self.executor = KVExecutor(self.memory, world.meanwhile)
        self._wrap(world)
        self.transport = self._transport(world, role, rank)
        self.beat_s = world.clock.monotonic()
        memory, overlap = self.memory, self.device is not self.executor
        engine = LoadedEngine(self.device, self.cache, memory.aux, states=self.states)
        sums = HostPageSums(memory.layout, 0, memory.region_bases, memory.num_pages, memory.page_bytes)
        hardware = Hardware(
            engine, memory, [self.transport], 1000 + incarnation, sums, memory.state_seals, overlap=overlap
        )
        # Those of even rank run on one machine and see a kill at once; the router reports kills of the rest.
        host, namespace = ("elsewhere", "") if rank % 2 else ("h", NAMESPACE)
        info = InstanceInfo(
            *(role, rank, incarnation, host, 1, hardware.control_port, memory.layout, 4096, self.pid),
            pid_namespace=namespace,
            start_ticks=world.num_started,
            num_slots=min(INFO.num_slots, self.states.num_slots - 1) if self.states.num_slots else INFO.num_slots,
            num_pages=NUM_PAGES,
            roles=(Role.PREFILL, Role.DECODE),
        )
        super().__init__(world, info, hardware, SchedulerSettings(SCHEDULING, DEADLINES, "", REQUEST_TIMEOUT_S))

    def _wrap(self, world: Surroundings) -> None:
        self.device: Executor = self.executor
        """What the scheduler launches steps on."""

    def _begin(self, info: InstanceInfo) -> None:
        super()._begin(info)
        self.transfer = self.kv.side
        self.table = self.transfer.machine.table  # type: ignore[union-attr]
        self.events = EventLog()
        self._ends: dict[bytes, bool] = {}
        """Whether the room succeeded, by room."""
        self._live: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._tap()

    @property
    def is_home(self) -> bool:
        return self.home == (self.role, self.rank)

    @property
    def router(self) -> int:
        """Incarnation of the router whose view it has."""
        return self.contacts.routers[0].incarnation

    @property
    def first_view(self) -> tuple[int, int]:
        return self.contacts.routers[0].first_view

    @property
    def feed(self) -> ViewReceiver:
        return self.contacts.routers[0].feed

    def _transport(self, world: Surroundings, role: Role, rank: int) -> Transport:
        writes, memory = world.writes, self.memory
        fake = FakeTransport(world.fabric, self.session)
        fake.gathers = writes.gathers
        if writes.way == "direct":
            return fake
        copier = WatchedCopier(lambda copies: world.watch.on_copy(self, copies))
        of = fake, memory, writes.way, copier, role, rank, world.num_prefill
        return staged(*of, world.wait_turn)

    def _transfer_config(self, info: InstanceInfo) -> KVManagerConfig:
        writes = self.world.writes
        config = super()._transfer_config(info)
        return replace(config, max_batch_bytes=writes.max_batch_bytes, verify_kv=writes.verify_kv)

    def _tap(self) -> None:
        """Observe what passes between the parts, without changing it."""
        side = self.kv.side
        assert not isinstance(side, NoPeers)
        poll, abort = side.poll, side.abort

        def tapped_abort(room: bytes, error: ChituError) -> None:
            abort(room, error)
            self.events.aborted.add(room)

        def tapped() -> list[TransferEvent]:
            events = poll()
            for event in events:
                self.events.take(event)
            return events

        side.poll, side.abort = tapped, tapped_abort  # type: ignore[method-assign]
        if isinstance(side, PrefillSender):
            queue = side.queue
            work = queue._work

            def noted(batch: TransferJob) -> None:
                before, self.world.writing = self.world.writing, batch.room
                work(batch)
                self.world.writing = before

            queue._work = noted

    # ----------------------------------------------------------------------------------------------------- its threads

    def on_request(self, message: SchedulerMessage, /) -> None:
        self.world.on_submit(self, message)
        super().on_request(message)

    def on_view(self, view: ClusterView, router: int) -> None:
        self.routers.add(view.router_incarnation)
        super().on_view(view, router)

    def step(self) -> bool:
        worked = super().step()
        self.look_at_life()
        return worked

    def write(self) -> bool:
        """Run the threads that write, scatter and verify. Each does one thing at a time and is not interrupted by
        another."""
        if self._is_writing:
            return False
        self._is_writing = True
        try:
            side = self.kv.side
            if isinstance(side, PrefillSender):
                return side.queue.run_one()
            assert isinstance(side, DecodeReceiver)
            verifier = side.verifier
            has_scattered = isinstance(self.transport, StagedTransport) and self.transport.scatter_one()
            return any([has_scattered, verifier is not None and verifier.run_one()])
        finally:
            self._is_writing = False

    def tick(self) -> None:
        """Run the comm and heartbeat threads."""
        self.keep_in_touch()
        if self.clock.monotonic() >= self.next_beat_s:
            self.beat()

    # ------------------------------------------------------------------------------------------------------ invariants

    def sequences(self) -> dict[bytes, Sequence]:
        sequences = self.scheduler._sequences
        found: dict[bytes, Sequence] = {}
        for state in SEQUENCE_STATES:
            queue = sequences.of(state)
            if queue:
                assert not found.keys() & queue.keys(), "a request stands in two queues"
                assert {sequence.state for sequence in queue.values()} == {state}
                found.update(queue)
        assert len(found) == len(sequences)
        return found

    def check(self) -> None:
        allocator, rooms = self.cache.allocator, self.cache._rooms
        private = [page for room in rooms.values() for page in room.private()]
        pinned = {page for room in rooms.values() for page in room.pinned}
        assert len(private) == len(set(private)) and not pinned & set(private), "a page is in two hands"
        assert allocator.num_used + allocator.num_quarantined == len(private) + len(pinned)
        assert allocator.num_free + allocator.num_cached + len(private) + len(pinned) == NUM_PAGES
        sequences = self.sequences()
        assert rooms.keys() <= sequences.keys(), "pages of a request that is gone"
        slots = [s.holds.aux_slot for s in sequences.values() if s.holds.aux_slot >= 0]
        assert len(slots) == len(set(slots)) and self.memory.aux.num_free + len(slots) == NUM_AUX
        rows = [s.holds.state_slot for s in sequences.values() if s.holds.state_slot >= 0]
        assert len(rows) == len(set(rows)) and self.states.num_free + len(rows) == self.states.num_slots
        self._check_rooms()

    def _check_rooms(self) -> None:
        live = {room: entry.state for room, entry in self.table.items()}
        assert not live.keys() & self._gone, "a room that was over lives again"
        self._gone |= self._live - live.keys()
        self._live = set(live)
        for room, state in live.items():
            if state in SUCCEEDED | FAILED:
                has_succeeded = state in SUCCEEDED
                assert self._ends.setdefault(room, has_succeeded) is has_succeeded, f"it ended, and is {state.name} now"
            assert state in SUCCEEDED | FAILED or room not in self._ends, f"it ended, and is {state.name} now"

    def check_landing(self, room: bytes, pages: set[int], aux_slots: set[int], is_source: bool) -> None:
        """Check that a room's bytes may move now: out of our memory (`is_source`) or into it."""
        sequence = self.sequences().get(room)
        side = "out of" if is_source else "into"
        assert sequence is not None, f"a write {side} {self.name} for a room that it has given back"
        assert pages <= set(self.cache.get_page_indices(room)), f"a write {side} pages of another room of {self.name}"
        is_known = not is_source and pages & set(self.cache._rooms[room].pinned)
        assert not is_known, f"a write into pages that {self.name} has cached"
        assert aux_slots <= _rows_of(sequence), f"a write {side} a row of another room of {self.name}"
        if not is_source:
            assert sequence.state in AT_PEER_STATES | {SequenceState.CLOSING}

    def check_empty(self) -> None:
        assert self.scheduler.is_idle and not len(self.table)
        self.cache.check_idle()
        assert self.memory.aux.num_free == NUM_AUX
        self.states.check_idle()
        assert not self.executor.saved_keys and not self.executor._host


STEP_S = 0.9
"""What a step of a slow process takes: a prompt of five chunks takes longer than `transfer_s`."""


class SlowProcess(Process):
    """P or D on a machine that computes so slowly that its deadlines are short. Its threads run as usual."""

    free_s = 0.0
    """When its step is over."""

    def step(self) -> bool:
        now_s = self.world.clock.monotonic()
        if now_s < self.free_s:
            return False
        num_steps = self.scheduler.load.steps
        worked = super().step()
        if self.scheduler.load.steps > num_steps:
            self.free_s = now_s + STEP_S
        return worked


class LateProcess(Process):
    """P or D with overlapping steps on a late device: a step reads and writes KV, as real bytes, when it runs, after
    its launch. Between any two turns it is checked what a launched, unread step may touch."""

    num_overlapped = 0
    """Number of turns that left a step unread."""

    def _wrap(self, world: Surroundings) -> None:
        self.executor.info = msgspec.structs.replace(INFO, checks_rows=True)
        self.device = self.late = LateExecutor(self.executor)

    def step(self) -> bool:
        if self.scheduler.turns % 3 == 0:
            self.late.run_next()
        worked = super().step()
        self.num_overlapped += bool(self.late.unread)
        return worked

    def write(self) -> bool:
        """Write, unless a step runs now: a transfer thread that waits for it goes on later."""
        return not self.late.is_running and super().write()

    def check(self) -> None:
        super().check()
        held = {page for room in self.cache._rooms.values() for page in room.table}
        resources = self.scheduler._resources
        assert len(self.late.unread) == resources.num_unread
        for step in self.late.unread:
            assert step.pages <= held, "a page is free while a launched, unread step has its slot"
            assert not step.slots & set(resources.slots._free), "a slot is free while a launched step has it"
            aux_slots = {sequence.holds.aux_slot for sequence in self.sequences().values()}
            assert step.aux_slots <= aux_slots, "an aux slot is free while a launched step has it"

    def check_empty(self) -> None:
        super().check_empty()
        assert not self.late.unread and not self.scheduler._resources._leaving, "resources wait to be released"
