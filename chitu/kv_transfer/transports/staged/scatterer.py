"""D's end: copies what lies in its segments to where it belongs, on a thread of its own, and answers P.

`on_message` and `fence` come from the comm thread, which only queues. Invariants: no group is scattered twice; a
segment is answered for only when nobody reads it; of a P that was fenced nothing is copied any more. A segment belongs
to one incarnation of P, whose numbers grow, so the last number of each segment is all that has to be remembered.

Nobody here asks whether the room of a group still waits: its pages are nobody else's until P said that it has stopped,
which P does not say before each of its groups was answered, or until P is dead and fenced. Source: docs/adr/0015.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from chitu.errors import BadFrame, ChituError
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.copies import as_array, first_outside
from chitu.kv_transfer.transports.staged.area import StagingArea, share_of
from chitu.kv_transfer.transports.staged.copier import PieceCopier
from chitu.kv_transfer.transports.staged.messages import Group, Scattered, encode
from chitu.kv_transfer.transports.transport import CopyList, Int64s
from chitu.net.job_thread import JobThread, Spawn

KEPT_FENCED = 1024
"""Incarnations of P that are dead: far more than one of which a late message can still come."""


@dataclass(slots=True, frozen=True)
class ScatterJob:
    incarnation: int
    group: Group
    copies: CopyList
    send: Callable[[int, bytes], None]


@dataclass(slots=True)
class _Segment:
    """What came last in it."""

    incarnation: int = 0
    number: int = 0
    answer: Scattered | None = None


class Scatterer:
    """`owners`: engine ranks of the P that share the segments."""

    def __init__(self, memory: PagedMemory, area: StagingArea, copier: PieceCopier, owners: Sequence[int]) -> None:
        pool_end = area.base if area.is_in(memory) else memory.arena_base + memory.arena_bytes
        self._pool = memory.arena_base, pool_end - memory.arena_base
        self._area = area
        self._copier = copier
        self.owners = tuple(owners)
        self._lock = threading.Lock()
        self._segments = [_Segment() for _ in range(area.num_segments)]
        self._unfinished: Counter[int] = Counter()
        """Groups that wait or are being copied, by incarnation of P."""
        self._fenced: OrderedDict[int, None] = OrderedDict()
        self._is_started = False
        self.jobs: JobThread[ScatterJob] = JobThread("scatter", self._scatter)

    def on_message(self, rank: int, incarnation: int, group: Group, send: Callable[[int, bytes], None]) -> None:
        """A group lies in a segment. What is known is answered again, or will be. Raises BadFrame."""
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
            is_new = group.number > segment.number  # a smaller one is late: P has used the segment again, so it knows
            if is_new:
                segment.number, segment.answer = group.number, None
                self._unfinished[incarnation] += 1
        if is_new:
            self.jobs.put(ScatterJob(incarnation, group, copies, send))
        elif answer is not None:
            send(incarnation, encode(answer))

    def fence(self, incarnation: int) -> bool:
        """Take nothing more of this P. True once nothing of it is being copied."""
        with self._lock:
            self._fenced[incarnation] = None
            if len(self._fenced) > KEPT_FENCED:
                self._fenced.popitem(last=False)
            return not self._unfinished[incarnation]

    def start(self, spawn: Spawn) -> None:
        """Idempotent, as the next."""
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
            self._unfinished += Counter()  # without those that have none
            segment = self._segments[job.group.segment]
            if (segment.incarnation, segment.number) == (job.incarnation, job.group.number):
                segment.answer = answer
        if is_wanted:
            job.send(job.incarnation, encode(answer))

    def _copies(self, rank: int, group: Group) -> CopyList:
        """The group's pieces, each from its place in the segment to one inside the pool. Raises BadFrame."""
        if len(group.targets) != len(group.lengths) or len(group.targets) % 8 or not group.targets:
            raise BadFrame(f"P{rank} staged {len(group.targets)} bytes of targets and {len(group.lengths)} of lengths")
        target_N: Int64s = np.frombuffer(group.targets, "<i8").astype(np.int64)
        length_N: Int64s = np.frombuffer(group.lengths, "<i8").astype(np.int64)
        # Checked one by one first: a sum of what is checked cannot overflow.
        is_sane = int(length_N.min()) > 0 and int(length_N.max()) <= self._area.segment_bytes
        if not is_sane or first_outside(target_N, length_N, *self._pool) >= 0:
            raise BadFrame(f"P{rank} staged pieces for places outside the pool")
        end_N = np.cumsum(length_N)
        if int(end_N[-1]) > self._area.segment_bytes:
            raise BadFrame(f"P{rank} staged {int(end_N[-1])} bytes in a segment of {self._area.segment_bytes}")
        source_N = self._area.address(group.segment) + end_N - length_N
        return CopyList(as_array(source_N), as_array(target_N), as_array(length_N))
