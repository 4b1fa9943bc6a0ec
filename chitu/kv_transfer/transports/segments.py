"""Both ends of a staged transport: the segments of staging memory, what fills them on P, and what empties them on D.

Source: docs/adr/0015.

**Area**: one range of registered memory, cut into segments of equal size, built by the service's main thread and then
read-only. It lies behind the pages in the pool's arena, or in host memory beside a pool in GPU memory (`HostArena`):
an anonymous shared file, which `shm` can map and libraries can send from over TCP, pinned at the first copy (0.7 ms per
MiB, measured for 448 MiB), so an instance whose writes go another way pays nothing. D grants its segments to the P of
the cluster in equal shares by engine rank.

**`Gatherer`**, P's end: which segments are free and which groups D has not answered. Transfer threads use it and wait
here; the comm thread calls `on_message`. One condition guards it, and nothing is sent or copied under it. A granted
segment is free, held by a group, doubtful (a write to it failed and may still land), or in use by a write that runs.
Invariants: no two groups are in one segment; a segment that D may still read, or that a late write may hit, is not
written; numbers of groups grow over all D and are never used twice.

**`Scatterer`**, D's end: copies groups into the pool on a thread of its own and answers P. The comm thread only queues
(`on_message`, `revoke`). Invariants: no group is scattered twice; a segment is answered only when nothing reads it any
more; nothing of a revoked P is copied any more. A segment belongs to one incarnation of P, whose numbers grow, so only
the last number of each segment has to be remembered. Nothing checks whether the room of a group still waits: no other
request owns its pages until P has reported that it stopped, which P does not do before each of its groups was answered,
or until P is dead and revoked.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Union

import msgspec
import numpy as np

from chitu.errors import BadFrame, ChituError, TransferFailed
from chitu.kv_cache.pool import shared_memory
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.cuda_ipc import PinDriver
from chitu.kv_transfer.transports.mapped import APART, as_array, first_outside
from chitu.kv_transfer.transports.shm import CopyEngine, CopyFault
from chitu.kv_transfer.transports.transport import CopyList, Int64s, LaunchedCopies, PeerHandle
from chitu.net.threads import JobThread, Spawn
from chitu.protocol import TransportSession
from chitu.types import Ready

SEGMENTS = "segments"
"""Attribute of D's session: base, bytes and number of its segments."""
OWNERS = "segment_owners"
"""Attribute of D's session: engine ranks of the P that share its segments."""
ADDRESS_LIMIT = 1 << 63
PAGE_BYTES = 4096
RETRY_INTERVAL_S = 0.2
"""Interval at which a group is sent again until D answers."""
KEPT_REVOKED = 1024
"""Number of dead incarnations of P that are remembered: far more than those that late messages can come from."""


@dataclass(frozen=True, slots=True)
class StagingArea:
    base: int
    segment_bytes: int
    num_segments: int
    arena_base: int
    """Base of the allocation that the transports register."""
    arena_bytes: int

    def __post_init__(self) -> None:
        is_inside = self.arena_base <= self.base and self.base + self.nbytes <= self.arena_base + self.arena_bytes
        if self.segment_bytes < 1 or self.num_segments < 1 or not is_inside:
            raise ValueError(
                f"{self.num_segments} segments of {self.segment_bytes} bytes at {self.base:#x} in an arena of"
                f" {self.arena_bytes} bytes at {self.arena_base:#x}"
            )

    @property
    def nbytes(self) -> int:
        return self.num_segments * self.segment_bytes

    def address(self, segment: int) -> int:
        """Return the address of the segment's first byte. Raises IndexError for a segment that does not exist."""
        if not 0 <= segment < self.num_segments:
            raise IndexError(f"segment {segment} of {self.num_segments}")
        return self.base + segment * self.segment_bytes

    def is_in(self, memory: PagedMemory) -> bool:
        """Return whether it lies in the pool's own arena, which every transport registers anyway."""
        return self.arena_base == memory.arena_base

    def attributes(self, memory: PagedMemory, owners: Sequence[int]) -> dict[str, str]:
        """Return the session attributes that describe D's area."""
        found = {SEGMENTS: f"{self.base}:{self.segment_bytes}:{self.num_segments}", OWNERS: ",".join(map(str, owners))}
        return found if self.is_in(memory) else {**found, APART: f"{self.arena_base}:{self.arena_bytes}"}


def area_of(memory: PagedMemory, base: int, segment_bytes: int, num_segments: int) -> StagingArea:
    """Return the area at the tail of a pool's arena."""
    return StagingArea(base, segment_bytes, num_segments, memory.arena_base, memory.arena_bytes)


def share_of(num_segments: int, owners: Sequence[int], rank: int) -> range:
    """Return the segments that the P of this engine rank may write. They are fixed, so no P waits for a grant, and a
    silent P costs other P nothing. A P that comes back gets the segments of its predecessor, which is dead by then."""
    ranks = sorted(set(owners))
    share = num_segments // max(1, len(ranks))
    first = ranks.index(rank) * share if rank in ranks else 0
    return range(first, first + share) if rank in ranks else range(0)


def granted(session: TransportSession, rank: int) -> tuple[int, int, range] | None:
    """Return the base and size of a D's segments, and those that the P of this rank may write, or None if there are
    none. Raises TransferFailed for invalid numbers."""
    text = session.attributes.get(SEGMENTS, "")
    if not text:
        return None
    try:
        base, segment_bytes, num_segments = (int(number) for number in text.split(":"))
        owners = [int(number) for number in session.attributes.get(OWNERS, "").split(",") if number]
    except ValueError as error:
        raise TransferFailed(f"segments {text[:80]!r} of {session.session_id} are not well formed") from error
    if min(base, segment_bytes - 1, num_segments) < 0 or base + segment_bytes * num_segments >= ADDRESS_LIMIT:
        raise TransferFailed(f"{num_segments} segments of {segment_bytes} bytes at {base:#x} of {session.session_id}")
    mine = share_of(num_segments, owners, rank)
    return (base, segment_bytes, mine) if mine else None


class HostArena:
    """Implements `Window`. Raises ConfigError if the memory cannot be allocated."""

    def __init__(self, nbytes: int, driver: PinDriver) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._driver = driver
        self._lock = threading.Lock()
        self._device_base: int | None = None
        self._map = shared_memory("chitu-staging", self.nbytes, "staging in host memory")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def is_pinned(self) -> bool:
        return self._device_base is not None

    def device_base(self) -> int:
        """Return the device address of `base`; pins the memory at the first call. Raises TransferFailed."""
        with self._lock:
            if self._device_base is None:
                self._device_base = self._driver.pin(self.base, self.nbytes)
            return self._device_base

    def close(self) -> None:
        """Unpin and release the memory; no copy may be in flight. Idempotent. Processes that mapped it keep it."""
        with self._lock:
            if self._device_base is not None:
                self._driver.unpin(self.base)
                self._device_base = None
            self._map.close()


class WriteGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="group"):
    """P -> D: pieces lie in a segment, one after the other. Repeated until `Scattered`."""

    number: int
    """Number of the group, counted from 1 within this incarnation of P."""
    segment: int
    targets: bytes
    """Destination address of each piece in D's pool, int64 LE."""
    lengths: bytes
    """Bytes of each piece, int64 LE."""


class Scattered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="scattered"):
    """D -> P: answer to each `WriteGroup`. D is done with the segment, and nothing of the group is written any more."""

    number: int
    segment: int
    error: str = ""
    """Error text; if not empty, the pieces are not in their places."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WriteGroup | Scattered] = msgspec.msgpack.Decoder(Union[WriteGroup, Scattered])


def encode(message: WriteGroup | Scattered) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> WriteGroup | Scattered:
    """Decode a message. Raises BadFrame."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"a message between staged transports: {error}") from error


@dataclass(slots=True, eq=False)
class TargetSegments:
    """Segments of one D that we were granted."""

    base: int
    segment_bytes: int
    group_bytes: int
    """Most bytes of a group: no more than a segment of our own, if we gather into one."""
    free: deque[int]
    """Free segments, least recently used first: late messages of a segment's last group are then as old as can be."""
    doubtful: list[int] = field(default_factory=list)
    given_up: list[SentGroup] = field(default_factory=list)
    """Groups that no writer waits for any more: fenced when D has answered them."""

    def address(self, segment: int) -> int:
        return self.base + segment * self.segment_bytes


@dataclass(slots=True, eq=False)
class StagedPeer:
    """A D. `segments` is None if every write is direct."""

    inner: PeerHandle
    segments: TargetSegments | None
    must_stage: bool
    """True if its pages cannot or may not be written directly."""
    incarnation: int = 0
    send: Callable[[int, bytes], None] = lambda incarnation, payload: None

    @property
    def session_id(self) -> str:
        return self.inner.session_id


@dataclass(slots=True, eq=False)
class SentGroup:
    peer: StagedPeer
    group: WriteGroup
    answer: Scattered | None = None

    def send(self) -> None:
        self.peer.send(self.peer.incarnation, encode(self.group))


class Gatherer:
    """Segments and groups of P. `area`: our own segments; None if transports put pieces straight into D's segments."""

    def __init__(self, area: StagingArea | None) -> None:
        self.area = area
        self._own_free = deque(range(area.num_segments if area is not None else 0))
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._sent: dict[int, SentGroup] = {}
        """Groups that D has not answered, by number."""

    # --------------------------------------------------------------------------------------------------------- segments

    def allocate(self, segments: TargetSegments, sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        """Return a segment of D once one is free, else None. Meanwhile sends unanswered groups of `sent` again."""
        return self._allocate(segments.free, sent, timeout_s)

    def allocate_own(self, sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        return self._allocate(self._own_free, sent, timeout_s)

    def _allocate(self, free: deque[int], sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        while self.wait(lambda: bool(free), sent, timeout_s):
            with self._changed:
                if free:  # else another thread was first
                    return free.popleft()
        return None

    def give_own(self, segment: int) -> None:
        """Give back our own segment after its write. If that may still land, it lands where D does not read."""
        with self._changed:
            self._own_free.append(segment)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the groups

    def send(self, peer: StagedPeer, segment: int, targets: bytes, lengths: bytes) -> SentGroup:
        """Send a group for a segment that is written. The segment is D's until D answers."""
        with self._changed:
            sent = SentGroup(peer, WriteGroup(next(self._numbers), segment, targets, lengths))
            self._sent[sent.group.number] = sent
        sent.send()
        return sent

    def dropped(self, segments: TargetSegments, segment: int, is_fenced: bool) -> None:
        """Give back a segment whose write failed; D gets no group. Unless it is fenced, the write may still land."""
        with self._changed:
            (segments.free if is_fenced else segments.doubtful).append(segment)
            self._changed.notify_all()

    def release_fenced(self, segments: TargetSegments, doubtful: Sequence[int]) -> None:
        """Free doubtful segments in which nothing can land any more."""
        with self._changed:
            for segment in doubtful:
                segments.doubtful.remove(segment)
                segments.free.append(segment)
            self._changed.notify_all()

    def give_up(self, segments: TargetSegments, sent: Sequence[SentGroup]) -> bool:
        """Stop waiting for these groups. Return True if one of them was not answered: D may still copy it."""
        with self._changed:
            unanswered = [group for group in sent if group.answer is None]
            segments.given_up += unanswered
            return bool(unanswered)

    def on_message(self, incarnation: int, answer: Scattered) -> None:
        """Take D's answer that it is done with a segment. Late and duplicate answers change nothing."""
        with self._changed:
            sent = self._sent.get(answer.number)
            if sent is None or sent.peer.incarnation != incarnation or sent.group.segment != answer.segment:
                return
            del self._sent[answer.number]
            sent.answer = answer
            segments = sent.peer.segments
            assert segments is not None
            if sent in segments.given_up:
                segments.given_up.remove(sent)
            segments.free.append(answer.segment)
            self._changed.notify_all()

    def forget(self, peer: StagedPeer) -> None:
        with self._changed:
            self._sent = {number: sent for number, sent in self._sent.items() if sent.peer is not peer}

    def wait(self, is_over: Callable[[], bool], sent: Sequence[SentGroup], timeout_s: float) -> bool:
        """Wait until `is_over`, at most `timeout_s`; return whether it is. Sends unanswered groups of `sent` again."""
        for _ in range(max(1, math.ceil(timeout_s / RETRY_INTERVAL_S))):
            with self._changed:
                if self._changed.wait_for(is_over, min(timeout_s, RETRY_INTERVAL_S)):
                    return True
            for group in sent:
                if group.answer is None:
                    group.send()
        return False


class PieceCopier(Protocol):
    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        """Copy once all of `after` have passed; block until the bytes are in place. Addresses are of this process, host
        or device, and were range-checked by the caller. Raises TransferFailed; a part may have been copied then."""
        ...


class Window(Protocol):
    """Host memory that the device can reach (`HostArena`)."""

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


@dataclass(slots=True, frozen=True)
class ScatterJob:
    incarnation: int
    group: WriteGroup
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
        self._revoked: OrderedDict[int, None] = OrderedDict()
        self._is_started = False
        self.jobs: JobThread[ScatterJob] = JobThread("scatter", self._scatter)

    def on_message(self, rank: int, incarnation: int, group: WriteGroup, send: Callable[[int, bytes], None]) -> None:
        """Queue a group that lies in a segment. One that came before is answered again, or will be. Raises BadFrame."""
        if group.segment not in share_of(self._area.num_segments, self.owners, rank):
            raise BadFrame(f"P{rank} staged a group in segment {group.segment}, which it was not granted")
        copies = self._copies(rank, group)
        with self._lock:
            segment = self._segments[group.segment]
            if incarnation in self._revoked:
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

    def revoke(self, incarnation: int) -> bool:
        """Accept nothing more from this P. Return True once nothing of it is being copied."""
        with self._lock:
            self._revoked[incarnation] = None
            if len(self._revoked) > KEPT_REVOKED:
                self._revoked.popitem(last=False)
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
            is_wanted = job.incarnation not in self._revoked
        error = "" if is_wanted else "it counts as dead"
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

    def _copies(self, rank: int, group: WriteGroup) -> CopyList:
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
