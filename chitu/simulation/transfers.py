"""Transfers of a simulated engine: pages without bytes behind them, and writes that take their bytes' time.

A write of KV begins when a transfer thread is free and its layers are computed, and takes its bytes' time on the egress
of P and the ingress of D. The machines of both sides see it as they see a real one. The simulation has one thread, so
the locks of the real parts are never contended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from chitu.errors import Internal
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext
from chitu.kv_transfer.chunks import ChunkFeed, TransferJob
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.sender import FenceResult, FenceWrites, JobDequeued, Write, Written
from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, WriteError
from chitu.protocol import KVLayout, RankMemory, TransportSession
from chitu.simulation.engine import Moment
from chitu.simulation.profile import LinkCost
from chitu.types import Ready


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
        return aux_row_bytes(self.layout.aux_numbers)

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

    later: Callable[[Moment, int], None]
    """Calls `put_layer` for a layer at its moment."""
    _has_step = False

    def layer_done(self, layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None:
        assert isinstance(ready, Moment)
        assert first_layer is None, "the engine reports single layers"
        self.later(ready, layer)

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


class Receiving(Protocol):
    """The memory that a write goes to: an instance."""

    rows: HeaderRows
    ingress_free_s: float
    """When the link into the instance is free again."""


class TransferWorld(Protocol):
    """What writes need of the world that they are in."""

    def at(self, when_s: float, act: Callable[..., object], *values: object) -> None:
        """Call `act` with the values at a virtual moment."""
        ...

    def receiver_of(self, incarnation: int) -> Receiving | None:
        """Return the instance of an incarnation; None if it has ended."""
        ...

    def rate_to(self, source: int, target: int) -> float:
        """Return the share of the usual bytes a second between two incarnations; 0: none move."""
        ...


class TimedSender(PrefillSender):
    """P's side of the transfer whose writes take virtual time instead of a thread's.

    A write that takes longer than `write_timeout_s` fails then, and may land later: its D gets no other write until
    it has (`fence`). One to a process that has ended fails at once, fenced."""

    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        rows: HeaderRows,
        context: TransferContext,
        world: TransferWorld,
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
        self._rows, self._row_bytes = rows, memory.pool.aux_row_bytes
        self._unit_bytes = sum(memory.pool.page_bytes) // config.layout.num_layers
        self._num_idle = config.transfer_threads
        self.busy_s = 0.0
        """Seconds that all writes took."""
        self._free_s = 0.0
        """When the egress is free again."""
        self._unsettled: list[tuple[Moment, int]] = []
        """Layers of a step whose time a group has yet to set."""
        self._late: dict[int, float] = {}
        """When the last late write to a D is over, by its incarnation."""

    def _later(self, moment: Moment, layer: int) -> None:
        if math.isnan(moment.end_s):
            self._unsettled.append((moment, layer))
        else:
            self._world.at(moment.end_s, self._put_layer, layer)

    def _put_layer(self, layer: int) -> None:
        assert self.timed_feed is not None
        self.timed_feed.put_layer(layer)
        self.pump()

    def pump(self) -> None:
        """Begin the writes that may begin: one on each idle thread."""
        unsettled, self._unsettled = self._unsettled, []
        for moment, layer in unsettled:
            self._later(moment, layer)
        while self._num_idle and (job := self.queue.begin()) is not None:
            effects = self._handle(JobDequeued(job))
            if not effects:
                self.queue.end(job)
                continue
            (effect,) = effects
            if isinstance(effect, FenceWrites):
                self._handle(FenceResult(effect, self._is_fenced(effect.peer.info.incarnation)))
                self.queue.end(job)
                continue
            self._num_idle -= 1
            self._begin(job, effect)

    def _begin(self, job: TransferJob, write: Write) -> None:
        now_s, to = self._clock.monotonic(), write.destination.peer.info
        target = self._world.receiver_of(to.incarnation)
        rate = self._link.bytes_per_s * self._world.rate_to(self._config.incarnation, to.incarnation)
        if target is None:
            error = WriteError(f"{TimedTransport.name}: D{to.engine_rank} has ended", fenced=True)
            self._world.at(now_s, self._fail, job, write, error)
            return
        ready_s = max([getattr(chunk.ready, "end_s", 0.0) for chunk in job.chunks], default=0.0)
        nbytes = self._row_bytes if job.is_aux else self._unit_bytes * job.num_units
        start_s = max(now_s, ready_s, self._free_s, target.ingress_free_s)
        took_s = nbytes / rate if rate else math.inf
        if took_s > self._config.write_timeout_s:
            end_s = self._free_s = start_s + self._config.write_timeout_s
            self._late[to.incarnation] = start_s + took_s if rate else end_s
            error = WriteError(f"{TimedTransport.name}: a write to D{to.engine_rank} timed out", fenced=False)
            self._world.at(end_s, self._fail, job, write, error)
            return
        self._free_s = target.ingress_free_s = start_s + took_s
        end_s = self._free_s + self._link.write_s
        self.busy_s += end_s - start_s
        if job.is_aux:
            self._rows.seal(write.record.computed.aux_slot, job.room, write.record.computed.cached_tokens)
        self._world.at(end_s, self._land, job, write, nbytes, target, end_s - start_s)

    def _is_fenced(self, incarnation: int) -> bool:
        """Return whether no late write to a D can land any more: none is on its way, and something gets through."""
        is_over = self._clock.monotonic() >= self._late.get(incarnation, 0.0)
        return is_over and self._world.rate_to(self._config.incarnation, incarnation) > 0

    def _land(self, job: TransferJob, write: Write, nbytes: int, target: Receiving, took_s: float) -> None:
        if job.is_aux:
            source = self._rows.row(write.record.computed.aux_slot)
            target.rows.row(write.destination.info.dst_aux_index)[:] = source
        self._writer.paths.add(write.destination.peer.info.engine_rank, TimedTransport.name, nbytes, took_s)
        self._end(job, Written(job, (nbytes,)))

    def _fail(self, job: TransferJob, write: Write, error: WriteError) -> None:
        self._writer.paths.add(write.destination.peer.info.engine_rank, TimedTransport.name, None, 0.0)
        self._end(job, Written(job, error=error))

    def _end(self, job: TransferJob, written: Written) -> None:
        self._handle(written)
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
