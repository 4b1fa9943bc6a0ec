"""Gather and scatter: many pieces of memory of this process copied at once, with the GIL released.

Called by P's transfer threads (pages into a segment) and by D's scattering thread (a segment into pages), several at a
time. `HostCopier` is for pools in host memory. `DeviceCopier` is for pools of a GPU: one launch copies all pieces and
waits on the device for what it reads. Both return when the bytes are in place, so a segment may be given away then.

D's end of staging: copies what lies in its segments into the pool, on a thread of its own, and answers P.

`on_message` and `fence` come from the comm thread, which only queues. Invariants: no group is scattered twice; a
segment is answered only when nothing reads it any more; nothing of a fenced P is copied any more. A segment belongs to
one incarnation of P, whose numbers grow, so only the last number of each segment has to be remembered.

Nothing here checks whether the room of a group still waits: no other request owns its pages until P has reported that
it stopped, which P does not do before each of its groups was answered, or until P is dead and fenced. Source:
docs/adr/0015.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from chitu.errors import BadFrame, ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.mapped import as_array, first_outside
from chitu.kv_transfer.transports.shm import CopyEngine, CopyFault
from chitu.kv_transfer.transports.staged.area import StagingArea, share_of
from chitu.kv_transfer.transports.staged.sending import Group, Scattered, encode
from chitu.kv_transfer.transports.transport import CopyList, Int64s, LaunchedCopies
from chitu.net.job_thread import JobThread, Spawn
from chitu.types import Ready


class PieceCopier(Protocol):
    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        """Copy once all of `after` have passed; block until the bytes are in place. Addresses are of this process, host
        or device, and were range-checked by the caller. Raises TransferFailed; a part may have been copied then."""
        ...


class Window(Protocol):
    """Host memory that the device can reach (`host_area.HostArena`)."""

    @property
    def base(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def device_base(self) -> int:
        """Return the device address of `base`. Pins the memory at the first call."""
        ...


class HostCopier:
    """Implements `PieceCopier` for host memory: few vectored calls, see `shm.py`."""

    def __init__(self) -> None:
        self._engine = CopyEngine()

    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        for ready in after:
            ready.synchronize()
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        try:
            self._engine.copy(src_N, dst_N, length_N, math.inf)
        except CopyFault as error:
            raise TransferFailed(f"copying {copies.nbytes} bytes in {len(length_N)} pieces: {error}") from error


class DeviceCopier:
    """Implements `PieceCopier` for a GPU. `windows`: host memory that segments lie in, if any; addresses inside are
    translated to device addresses."""

    def __init__(self, blocks: LaunchedCopies, windows: Sequence[Window] = ()) -> None:
        self._blocks = blocks
        self._windows = tuple(windows)

    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        src_N, dst_N, length_N = (np.array(column, dtype=np.int64) for column in copies)
        try:
            self._blocks.copy(self._for_device(src_N), self._for_device(dst_N), length_N, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise TransferFailed(f"copying {copies.nbytes} bytes in {len(length_N)} pieces: {error}") from error

    def _for_device(self, address_N: Int64s) -> Int64s:
        for window in self._windows:
            inside_N = (address_N >= window.base) & (address_N < window.base + window.nbytes)
            if inside_N.any():
                address_N = np.where(inside_N, address_N - window.base + window.device_base(), address_N)
        return address_N


KEPT_FENCED = 1024
"""Number of dead incarnations of P that are remembered: far more than those that late messages can come from."""


@dataclass(slots=True, frozen=True)
class ScatterJob:
    incarnation: int
    group: Group
    copies: CopyList
    send: Callable[[int, bytes], None]


@dataclass(slots=True)
class _Segment:
    """The group that came last in a segment, and its answer."""

    incarnation: int = 0
    number: int = 0
    answer: Scattered | None = None


class Scatterer:
    """Copies groups from segments into the pool. `owners`: engine ranks of the P that share the segments."""

    def __init__(self, memory: PagedMemory, area: StagingArea, copier: PieceCopier, owners: Sequence[int]) -> None:
        pool_end = area.base if area.is_in(memory) else memory.arena_base + memory.arena_bytes
        self._pool = memory.arena_base, pool_end - memory.arena_base
        self._area = area
        self._copier = copier
        self.owners = tuple(owners)
        self._lock = threading.Lock()
        self._segments = [_Segment() for _ in range(area.num_segments)]
        self._unfinished: Counter[int] = Counter()
        """Number of groups that wait or are being copied, by incarnation of P."""
        self._fenced: OrderedDict[int, None] = OrderedDict()
        self._is_started = False
        self.jobs: JobThread[ScatterJob] = JobThread("scatter", self._scatter)

    def on_message(self, rank: int, incarnation: int, group: Group, send: Callable[[int, bytes], None]) -> None:
        """Queue a group that lies in a segment. One that came before is answered again, or will be. Raises BadFrame."""
        if group.segment not in share_of(self._area.num_segments, self.owners, rank):
            raise BadFrame(f"P{rank} staged a group in segment {group.segment}, which it was not granted")
        copies = self._copies(rank, group)
        with self._lock:
            segment = self._segments[group.segment]
            if incarnation in self._fenced:
                return
            if incarnation != segment.incarnation:
                segment.incarnation, segment.number = incarnation, 0
            answer = segment.answer if group.number == segment.number else None
            is_new = group.number > segment.number  # a smaller one is late: P reused the segment, so it has the answer
            if is_new:
                segment.number, segment.answer = group.number, None
                self._unfinished[incarnation] += 1
        if is_new:
            self.jobs.put(ScatterJob(incarnation, group, copies, send))
        elif answer is not None:
            send(incarnation, encode(answer))

    def fence(self, incarnation: int) -> bool:
        """Accept nothing more from this P. Return True once nothing of it is being copied."""
        with self._lock:
            self._fenced[incarnation] = None
            if len(self._fenced) > KEPT_FENCED:
                self._fenced.popitem(last=False)
            return not self._unfinished[incarnation]

    def start(self, spawn: Spawn) -> None:
        """Start the scattering thread. Idempotent, like `close`."""
        if not self._is_started:
            self._is_started = True
            self.jobs.start(spawn)

    def close(self) -> None:
        if self._is_started:
            self._is_started = False
            self.jobs.close()

    def _scatter(self, job: ScatterJob) -> None:
        with self._lock:
            is_wanted = job.incarnation not in self._fenced
        error = "" if is_wanted else "it is taken for dead"
        try:
            if is_wanted:
                self._copier.copy(job.copies)
        except ChituError as failure:
            error = failure.message
        answer = Scattered(job.group.number, job.group.segment, error)
        with self._lock:
            self._unfinished[job.incarnation] -= 1
            self._unfinished += Counter()  # drops counts of zero
            segment = self._segments[job.group.segment]
            if (segment.incarnation, segment.number) == (job.incarnation, job.group.number):
                segment.answer = answer
        if is_wanted:
            job.send(job.incarnation, encode(answer))

    def _copies(self, rank: int, group: Group) -> CopyList:
        """Return the group's pieces, each from its place in the segment to one inside the pool. Raises BadFrame."""
        if len(group.targets) != len(group.lengths) or len(group.targets) % 8 or not group.targets:
            raise BadFrame(f"P{rank} staged {len(group.targets)} bytes of targets and {len(group.lengths)} of lengths")
        target_N: Int64s = np.frombuffer(group.targets, "<i8").astype(np.int64)
        length_N: Int64s = np.frombuffer(group.lengths, "<i8").astype(np.int64)
        # Check each piece first, so that their sum cannot overflow.
        is_sane = int(length_N.min()) > 0 and int(length_N.max()) <= self._area.segment_bytes
        if not is_sane or first_outside(target_N, length_N, *self._pool) >= 0:
            raise BadFrame(f"P{rank} staged pieces for places outside the pool")
        end_N = np.cumsum(length_N)
        if int(end_N[-1]) > self._area.segment_bytes:
            raise BadFrame(f"P{rank} staged {int(end_N[-1])} bytes in a segment of {self._area.segment_bytes}")
        source_N = self._area.address(group.segment) + end_N - length_N
        return CopyList(as_array(source_N), as_array(target_N), as_array(length_N))
