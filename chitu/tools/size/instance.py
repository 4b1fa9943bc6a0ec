"""One P, D or unified instance in virtual time: real scheduler, managers, page accounting and transfer machines.

Only the executor (`TimedExecutor`), the threads and the network are simulated. A turn of the step loop is two events:
`begin` when it may start, `end` when the step that it waits for is done. A write of KV begins when a transfer thread is
free and its layers are computed, and takes its bytes' time on the egress of P and the ingress of D; the machines of
both sides see it as they see a real one. The simulation has one thread, so the locks of the real parts are never
contended. Invariant: what an instance does at a virtual moment depends only on what reached it before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from chitu.cache_manager import PagedKVCacheManager
from chitu.config.schema import DeadlineConfig, RouterConfig, SchedulerConfig
from chitu.engine.executor import ExecutorInfo
from chitu.errors import ChituError, Internal
from chitu.instance.build import build_decode, build_prefill, build_unified
from chitu.instance.core import InstanceCore, LoadedEngine, SchedulerSettings
from chitu.instance.requests import FailureReports
from chitu.instance.sequences import Inbox
from chitu.instance.token_manager import TokenManager
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes, num_aux_rows
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.chunks import ChunkFeed, TransferJob
from chitu.kv_transfer.kv_manager import KVManager, NoPeers, manager_of_decode
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sender import JobDequeued, Write, Written
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.local import register_memory, ways_of
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle
from chitu.net.link import LinkReceivers
from chitu.net.threads import Waker
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    Heartbeat,
    InstanceInfo,
    KVLayout,
    LinkAck,
    LoadReport,
    RankMemory,
    RequestFailed,
    TransportSession,
    scheduler_codec,
)
from chitu.tools.size.engine import InstanceClock, Moment, TimedExecutor, TimedStep, WorldClock
from chitu.tools.size.profile import EngineProfile, LinkCost
from chitu.types import Ready, Role, instance_name

MAX_LAYERS = 4
"""Parts in which the KV of a chunk leaves at most. More would cost events and change little: it is the last part that
a request waits for."""
ANY_TOKEN = (1 << 31) - 1
FIRST_PORT = 1024


class SimulatedWorld(Protocol):
    """What an instance needs of the cluster that it is in."""

    clock: WorldClock
    deadlines: DeadlineConfig
    config: RouterConfig

    def at(self, when_s: float, act: Callable[..., None], *values: object) -> None:
        """Call `act` with the values at a virtual moment."""
        ...

    def send_peer(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        """Send a frame between P and D."""
        ...

    def send_tokens(self, frame: bytes, now_s: float) -> None:
        """Send a token message to the router."""
        ...

    def send_failed(self, failed: RequestFailed, now_s: float) -> None:
        """Send a failure report to the router."""
        ...

    def receiver_of(self, incarnation: int) -> SimulatedInstance | None:
        """Return the instance of an incarnation; None if it is gone."""
        ...


@dataclass(slots=True, frozen=True)
class PageAddresses:
    """Addresses of a pool that no bytes are behind (`PagedMemory`)."""

    layout: KVLayout
    num_pages: int
    num_aux_slots: int
    arena_base: int = 1 << 20
    state_base: int = 0
    state_row_bytes: int = 0
    num_state_slots: int = 0

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return tuple(4 * region.head_dim * self.layout.page_size for region in self.layout.regions)

    @property
    def region_bases(self) -> tuple[int, ...]:
        sizes = [nbytes * self.num_pages for nbytes in self.page_bytes]
        return tuple(self.arena_base + sum(sizes[:place]) for place in range(len(sizes)))

    @property
    def aux_base(self) -> int:
        return self.arena_base + sum(self.page_bytes) * self.num_pages

    @property
    def aux_row_bytes(self) -> int:
        return aux_row_bytes(self.layout.vocab_size)

    @property
    def arena_bytes(self) -> int:
        return self.aux_base + self.num_aux_slots * self.aux_row_bytes - self.arena_base


@dataclass(slots=True, frozen=True)
class Session:
    session_id: str


class TimedTransport:
    """The way between two simulated instances (`Transport`); `TimedSender` does the writes."""

    name = "simulated"

    def __init__(self, incarnation: int) -> None:
        self._session = TransportSession(self.name, str(incarnation))

    def local_session(self) -> TransportSession:
        return self._session

    def register(self, base: int, nbytes: int) -> None: ...

    def can_reach(self, session: TransportSession) -> bool:
        return True

    def connect(self, memory: RankMemory, session: TransportSession) -> PeerHandle:
        return Session(session.session_id)

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        raise Internal("a simulated write has no bytes")

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        return True

    def disconnect(self, peer: PeerHandle) -> None: ...

    def close(self) -> None: ...


class TimedFeed(ChunkFeed):
    """A feed of an engine that computes within `launch`, so that a layer is there only when it is computed."""

    later: Callable[[float, int], None]
    """Calls `put_layer` for a layer at a virtual moment."""
    _has_step = False

    def layer_done(self, layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None:
        assert isinstance(ready, Moment)
        assert first_layer is None, "the engine reports single layers"
        self.later(ready.end_s, layer)

    def put_layer(self, layer: int) -> None:
        """Hand over a layer that is computed now."""
        super().layer_done(layer)

    def end_step(self) -> None:
        self._has_step = True

    def finish_step(self) -> None:
        """End the step that was launched last, once it is computed."""
        if self._has_step:
            self._has_step = False
            super().end_step()


class TimedSender(PrefillSender):
    """P's side of the transfer whose writes take virtual time instead of a thread's."""

    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        aux: HeaderRows,
        context: TransferContext,
        world: SimulatedWorld,
        link: LinkCost,
        is_async: bool,
    ) -> None:
        """`is_async`: layers are handed over when they are launched, and a transfer thread waits for them, as on a GPU;
        else when they are computed."""
        super().__init__(config, memory, context)
        self.timed_feed = None if is_async else TimedFeed(config, context.clock, self.queue, self._lock)
        if self.timed_feed is not None:
            self.timed_feed.later = self._later
            self.feed = self.timed_feed
        self._world = world
        self._link = link
        self._aux, self._row_bytes = aux, memory.pool.aux_row_bytes
        self._unit_bytes = sum(memory.pool.page_bytes) // config.layout.num_layers
        self._num_idle = config.transfer_threads
        self.busy_s = 0.0
        """Seconds that all writes took."""
        self._free_s = 0.0
        """When the egress is free again."""

    def _later(self, when_s: float, layer: int) -> None:
        self._world.at(when_s, self._put_layer, layer)

    def _put_layer(self, layer: int) -> None:
        assert self.timed_feed is not None
        self.timed_feed.put_layer(layer)
        self.pump()

    def pump(self) -> None:
        """Begin the writes that may begin: one on each idle thread."""
        while self._num_idle and (job := self.queue.begin()) is not None:
            writes = self._handle(JobDequeued(job))
            if not writes:
                self.queue.end(job)
                continue
            (write,) = writes
            if not isinstance(write, Write):
                raise Internal("no simulated write fails")
            self._num_idle -= 1
            self._begin(job, write)

    def _begin(self, job: TransferJob, write: Write) -> None:
        target = self._world.receiver_of(write.destination.peer.info.incarnation)
        if target is None:
            raise Internal("a write to an instance that is gone")
        ready_s = max([getattr(chunk.ready, "end_s", 0.0) for chunk in job.chunks], default=0.0)
        nbytes = self._row_bytes if job.is_aux else self._unit_bytes * job.num_units
        start_s = max(self._clock.monotonic(), ready_s, self._free_s, target.ingress_free_s)
        self._free_s = target.ingress_free_s = start_s + nbytes / self._link.bytes_per_s
        end_s = self._free_s + self._link.write_s
        self.busy_s += end_s - start_s
        if job.is_aux:
            self._aux.seal(write.record.computed.aux_slot, job.room, write.record.computed.cached_tokens)
        self._world.at(end_s, self._land, job, write, nbytes, target, end_s - start_s)

    def _land(self, job: TransferJob, write: Write, nbytes: int, target: SimulatedInstance, took_s: float) -> None:
        if job.is_aux:
            source = self._aux.row(write.record.computed.aux_slot)
            target.aux.row(write.destination.info.dst_aux_index)[:] = source
        self._writer.paths.add(write.destination.peer.info.engine_rank, TimedTransport.name, nbytes, took_s)
        self._handle(Written(job, (nbytes,)))
        self.queue.end(job)
        self._num_idle += 1
        self.pump()


class HeaderRows(MetadataBuffers):
    """Logits rows without logits; their headers are real and move with the rows."""

    def __init__(self, count: int) -> None:
        self._memory = np.zeros((count, 2 * AUX_HEADER_BYTES), np.uint8)
        super().__init__(self._memory, AUX_HEADER_BYTES)

    def row(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a row with its header."""
        row: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._memory[slot]
        return row


class _Wake(Waker):
    """Wakes a step loop that is no thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def wake(self) -> None:
        self._wake()


def _with_paths(load: LoadReport, sender: PrefillSender) -> LoadReport:
    return msgspec.structs.replace(load, paths=sender.path_loads)


class SimulatedInstance:
    """One incarnation. The world delivers messages by `receive` and `on_frame`."""

    def __init__(
        self,
        world: SimulatedWorld,
        role: Role,
        rank: int,
        incarnation: int,
        profile: EngineProfile,
        scheduler: SchedulerConfig,
        transfer_threads: int = 1,
        cache: PagedKVCacheManager | None = None,
    ) -> None:
        """`cache`: that of an earlier incarnation, whose pages stay."""
        self.world, self.role, self.rank, self.incarnation = world, role, rank, incarnation
        self.profile = profile
        self.name = instance_name(role, rank)
        self.clock = InstanceClock(world.clock)
        num_slots, num_layers = scheduler.max_running_requests, min(MAX_LAYERS, profile.num_layers)
        width = max(1, round(profile.kv_bytes_per_token / (4 * num_layers)))
        layout = KVLayout.uniform(
            "simulated", num_layers, 1, width, profile.page_size, "float32", profile.vocab_size, regions_per_layer=1
        )
        num_aux = num_aux_rows(None, num_slots, role)
        self.memory = PageAddresses(layout, profile.num_pages, num_aux)
        self.aux = HeaderRows(num_aux)
        self.cache = cache or PagedKVCacheManager(profile.num_pages, profile.page_size, b"simulated")
        max_len = min(profile.max_model_len, profile.num_pages * profile.page_size)
        info = ExecutorInfo(num_slots, max_len, ANY_TOKEN, num_layers, ())
        self.executor = TimedExecutor(info, profile.cost, self.clock)
        self.ingress_free_s = 0.0
        """When the link into this instance is free again."""
        self._failures = FailureReports(lambda failed: world.send_failed(failed, self.clock.monotonic()))
        deadlines, tpot_s = world.deadlines, world.config.slo.tpot_s
        self.tokens = TokenManager(
            incarnation,
            self._send_tokens,
            repeat_s=deadlines.heartbeat_interval_s,
            patience_s=deadlines.lease_s,
        )
        core = InstanceCore(
            SchedulerSettings(
                scheduler,
                deadlines,
                self.name,
                world.config.request_timeout_s,
                profile.overlap,
                tpot_s=math.inf if tpot_s is None else tpot_s,
            ),
            LoadedEngine(self.executor, self.cache, self.aux),
            self.tokens,
            self._report_failure,
            self.clock,
            inbox=Inbox(_Wake(self.wake)),
        )
        self.sender: TimedSender | None = None
        config = KVManagerConfig(
            *(rank, incarnation, "simulated", FIRST_PORT + incarnation % (65536 - FIRST_PORT), layout, deadlines),
            transfer_threads=transfer_threads,
        )
        self.port = 0 if role is Role.UNIFIED else config.control_port
        own = OwnMemory(self.memory, self.aux, [TimedTransport(incarnation)])
        own = replace(own, sessions=register_memory(own.pool, own.transports))
        context = TransferContext(world.send_peer, self.wake, self.clock)
        if role is Role.UNIFIED:
            composition = build_unified(core, KVManager(NoPeers()))
        elif role is Role.PREFILL:
            self.sender = TimedSender(config, own, self.aux, context, world, profile.link, profile.overlap)
            composition = build_prefill(core, KVManager(self.sender, None, own.transports, ways_of(own.sessions)))
        else:
            receiver: KVManager[DecodeReceiver] = manager_of_decode(config, own, context)
            composition = build_decode(core, receiver)
        self.side = composition.transfer.side
        self.scheduler = PDScheduler(core, composition.role)
        self.info = InstanceInfo(
            *(role, rank, incarnation, "simulated", FIRST_PORT, self.port, layout, max_len),
            num_slots=num_slots,
            num_pages=self.cache.num_pages,
            computes=role is not Role.DECODE or tpot_s is not None,
        )
        self._received = LinkReceivers()
        self._reads = 0
        self._is_busy = self._is_due = self._is_woken = False
        self._has_news = True
        self.is_gone = False

    # ------------------------------------------------------------------------------------------------------ messages in

    def receive(self, frame: bytes) -> None:
        """Take a message of the router, as the comm thread does."""
        if self.is_gone:
            return
        message = scheduler_codec.decode(frame)
        self._has_news = True
        if isinstance(message, LinkAck):
            self.tokens.take_ack(message)
            self.wake()
        elif self._received.take(message.stamp):
            self.scheduler.submit(message)

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Take a message of a peer."""
        if not self.is_gone:
            self.side.on_frame(room, payload)
            self._pump()

    def tick(self) -> None:
        """Apply the deadlines of the transfers, and those of the requests that wait."""
        self.side.tick(self.world.clock.now_s)
        self._pump()
        if not self.scheduler.is_idle:
            self.wake()

    def heartbeat(self) -> Heartbeat | None:
        """Return a report of the load; None if nothing has happened since the last one."""
        if not self._has_news:
            return None
        self._has_news = not self.scheduler.is_idle
        self._reads += 1
        load = self.scheduler.load
        return Heartbeat(
            self.role,
            self.rank,
            self.incarnation,
            load if self.sender is None else _with_paths(load, self.sender),
            self._received.acks(),
            self._reads,
        )

    # ---------------------------------------------------------------------------------------------------- the step loop

    def wake(self) -> None:
        """Begin a turn now, or after the one that runs."""
        self._is_woken = self._has_news = True
        if not (self._is_busy or self._is_due or self.is_gone):
            self._is_due = True
            self.world.at(self.clock.monotonic(), self._begin)

    def _begin(self) -> None:
        self._is_due = self._is_woken = False
        self._is_busy = True
        step = self.scheduler.begin()
        self._pump()
        now_s = self.clock.monotonic()
        end_s = now_s if not isinstance(step, TimedStep) else max(now_s, step.end_s)
        if end_s > self.world.clock.now_s:
            self.world.at(end_s, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if self.sender is not None and self.sender.timed_feed is not None:
            self.sender.timed_feed.finish_step()
        has_worked = self.scheduler.end()
        self._pump()
        self._is_busy = False
        if (has_worked or self._is_woken) and not self.is_gone:
            self._is_due = True
            self.world.at(self.clock.monotonic(), self._begin)

    def _pump(self) -> None:
        if self.sender is not None:
            self.sender.pump()

    def _send_tokens(self, frame: bytes) -> bool:
        self.world.send_tokens(frame, self.clock.monotonic())
        return True

    def _report_failure(self, room: bytes, error: ChituError) -> None:
        self._failures.add(RequestFailed(self.role, self.rank, self.incarnation, room, error.code, error.message))
