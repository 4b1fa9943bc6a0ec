"""A transport that stages the writes of another one: gather, one large write into a segment of the peer, scatter there.

It has the wrapped transport's name, since peers choose by name, and all bytes travel through that transport. A write is
cut into groups of at most a segment; while the peer scatters one group, the next is gathered and written. `write`
returns when the peer has answered the last group, so a staged write means what a direct one does: every byte is in its
place. If it does not return in time, bytes may still come to their places; `fence` is True once the wrapped transport
has fenced its writes and the peer has answered every group. All staged transports of a process share one `StagingEnd`
(`segments.py`: P's `Gatherer`, D's `Scatterer`).

A write that could be direct, too, is staged from a size on, by a fixed table (`STAGED_FROM`). A staged write costs two
copies and a message there and back, a direct one something for each of its pieces. So staging wins from some number of
pieces on, unless the pieces are so large that copying them costs more than sending each alone. Measure again with
`chitu bench transfer --transfer direct,staged` (docs/benchmarks.md).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from chitu.config.devices import is_gpu
from chitu.errors import BadFrame, ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.mapped import APART, as_array
from chitu.kv_transfer.transports.segments import (
    Gatherer,
    HostArena,
    PieceCopier,
    Scatterer,
    SentGroup,
    StagedPeer,
    StagingArea,
    TargetSegments,
    WriteGroup,
    decode,
    granted,
)
from chitu.kv_transfer.transports.transport import (
    CopyList,
    Int64s,
    OrderedTransport,
    PeerHandle,
    SendToPeer,
    Transport,
    WriteError,
    gathers,
    pins,
    reaches_pages,
    way_of,
)
from chitu.net.threads import Spawn
from chitu.protocol import RankMemory, TransportSession
from chitu.types import Ready

logger = logging.getLogger(__name__)

KIB = 1 << 10


class StagedFrom(NamedTuple):
    """A write of at least `pieces` pieces, which have at most `piece_bytes` bytes on average."""

    pieces: int
    piece_bytes: int

    def is_met(self, num_pieces: int, nbytes: int) -> bool:
        return num_pieces >= self.pieces and nbytes <= num_pieces * self.piece_bytes


NEVER = StagedFrom(1 << 62, 0)

STAGED_FROM = {
    # Measured between two processes over loopback, two cores, pieces of 16 KiB: 32 pieces took 2.9 ms directly and
    # 3.2 ms staged, 64 took 6.9 and 6.1, 128 took 9.0 and 6.2, 2048 took 139 and 69
    ("mooncake", "tcp", "cpu"): StagedFrom(64, 32 * KIB),
    # The same: 128 pieces took 4.0 and 6.8 ms, 2048 took 32 and 66
    ("nixl", "", "cpu"): NEVER,
    # The same: 128 pieces took 0.9 and 2.3 ms, 2048 took 13 and 32
    ("shm", "", "cpu"): NEVER,
    # Computed from what one H100 took for 7168 pieces of 64 KiB and for the same bytes as one piece (docs/adr/0005),
    # with 0.2 ms for the message: 405 and 361 ms
    ("mooncake", "tcp", "cuda"): StagedFrom(64, 128 * KIB),
    # 107.6 and 0.52 ms
    ("nixl", "", "cuda"): StagedFrom(16, 1024 * KIB),
    # 0.37 ms, both
    ("cuda_ipc", "", "cuda"): NEVER,
}
OTHERS = StagedFrom(40, 1024 * KIB)
"""Threshold of RDMA and whatever else was never measured: assumes Mooncake's cost per piece over NVLink (5.9 us)."""


def staged_from(transport: str, device: str, protocol: str = "tcp") -> StagedFrom:
    """Return the threshold of a transport. `device`: of the pools, `cpu` or `cuda:N`; `protocol`: Mooncake's."""
    kind = "cuda" if is_gpu(device) else "cpu"
    return STAGED_FROM.get((transport, protocol if transport == "mooncake" else "", kind), OTHERS)


TransferWay = Literal["auto", "direct", "staged"]


@dataclass(slots=True)
class StagingEnd:
    """State that the staged transports of a process share."""

    way: TransferWay
    """Transfer mode as configured; never `direct`."""
    memory: PagedMemory
    copier: PieceCopier
    area: StagingArea | None
    """D: segments that it grants. P: segments that it gathers into; None if its transports gather by themselves."""
    rank: int = 0
    """Our engine rank. It determines which segments of a D belong to this P."""
    scatterer: Scatterer | None = None
    """Set on D only."""
    arena: HostArena | None = None
    """Allocation of the area, if the area lies apart from the pool."""
    is_pinned_late: bool = False
    """True if the arena is pinned at the first copy, since it may never be needed."""
    threshold: Callable[[str], StagedFrom] = lambda transport: staged_from(transport, "cpu")
    """Size from which a write is staged, by the wrapped transport's name."""
    gatherer: Gatherer = field(init=False)
    num_users: int = 0
    """Number of transports that are not closed."""

    def __post_init__(self) -> None:
        self.gatherer = Gatherer(self.area if self.scatterer is None else None)


class StagedTransport:
    """Implements `Transport`, `OrderedTransport` and `MessagingTransport` of `kv_transfer.transports.transport`."""

    gathers = False

    def __init__(self, inner: Transport, end: StagingEnd) -> None:
        self.inner = inner
        self.end = end
        self._threshold = end.threshold(inner.name)
        self._send: SendToPeer = lambda incarnation, payload: None
        self._is_closed = False
        end.num_users += 1
        self.bytes_staged = 0
        """Bytes written through segments. For tests and benchmarks."""

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def way(self) -> str:
        return way_of(self.inner)

    @property
    def pins(self) -> bool:
        return pins(self.inner)

    # --------------------------------------------------------------------------------------------- memory and sessions

    def register(self, base: int, nbytes: int) -> None:
        """Register the pool, and the area if it lies apart. A transport that can use the area alone is kept."""
        area = self.end.area
        apart = area if area is not None and not area.is_in(self.end.memory) else None
        failure: ChituError | None = None
        try:
            self.inner.register(base, nbytes)
        except ChituError as error:
            failure = error
        if apart is not None:
            try:
                self.inner.register(apart.arena_base, apart.arena_bytes)
                if self.end.arena is not None and not self.end.is_pinned_late:
                    self.end.arena.device_base()
                if failure is not None:
                    logger.warning("transport %s stages everything: %s", self.name, failure.message)
                return
            except ChituError as error:
                failure = failure or (None if self.end.is_pinned_late else error)
        if failure is not None:
            raise failure

    def local_session(self) -> TransportSession:
        session, area = self.inner.local_session(), self.end.area
        if self.end.scatterer is None or area is None:
            return session
        offered = area.attributes(self.end.memory, self.end.scatterer.owners)
        return TransportSession(session.transport, session.session_id, {**session.attributes, **offered})

    def can_reach(self, session: TransportSession) -> bool:
        return self.inner.can_reach(session)

    def connect(self, memory: RankMemory, session: TransportSession) -> StagedPeer:
        """Open a peer. Raises TransferFailed if we can write neither its pages nor segments that it granted us."""
        found, own = granted(session, self.end.rank), self.end.gatherer.area
        inner = self.inner.connect(memory, session)
        is_reachable = APART not in session.attributes or bool(getattr(inner, "reaches_host_segments", False))
        segments: TargetSegments | None = None
        if found is not None and is_reachable and (own is not None or gathers(self.inner)):
            base, segment_bytes, mine = found
            group_bytes = segment_bytes if own is None else min(segment_bytes, own.segment_bytes)
            segments = TargetSegments(base, segment_bytes, group_bytes, deque(mine))
        if segments is None and not reaches_pages(inner):
            self.inner.disconnect(inner)
            raise TransferFailed(
                f"{self.name}: {session.session_id} accepts only staged writes, but granted no segment"
            )
        must_stage = segments is not None and (self.end.way == "staged" or not reaches_pages(inner))
        if segments is not None:
            what = "all writes" if must_stage else f"writes of {self._threshold.pieces} pieces or more"
            text = "%s to %s: %s are staged, in %d segments of %d bytes"
            logger.info(text, self.name, session.session_id, what, len(segments.free), segments.group_bytes)
        return StagedPeer(inner, segments, must_stage)

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, StagedPeer)
        self.end.gatherer.forget(peer)
        self.inner.disconnect(peer.inner)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.end.scatterer is not None:
            self.end.scatterer.close()
        self.inner.close()
        self.end.num_users -= 1
        if self.end.arena is not None and not self.end.num_users:
            self.end.arena.close()

    # ------------------------------------------------------------------------------------------------------- messages

    def attach(self, send: SendToPeer) -> None:
        self._send = send

    def bind(self, peer: PeerHandle, incarnation: int) -> None:
        assert isinstance(peer, StagedPeer)
        peer.incarnation, peer.send = incarnation, self._send

    def on_message(self, rank: int, incarnation: int, payload: bytes) -> None:
        message, scatterer = decode(payload), self.end.scatterer
        if not isinstance(message, WriteGroup):
            self.end.gatherer.on_message(incarnation, message)
        elif scatterer is not None:
            scatterer.on_message(rank, incarnation, message, self._send)
        else:
            raise BadFrame("a staged group for an instance without segments")

    def revoke(self, incarnation: int) -> bool:
        return self.end.scatterer is None or self.end.scatterer.revoke(incarnation)

    def start(self, spawn: Spawn) -> None:
        if self.end.scatterer is not None:
            self.end.scatterer.start(spawn)

    def scatter_one(self) -> bool:
        """Scatter one group in this thread instead of D's scattering thread. Return False if none waits."""
        return self.end.scatterer is not None and self.end.scatterer.jobs.run_one()

    # --------------------------------------------------------------------------------------------------------- writing

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self.write_after(peer, copies, (), timeout_s)

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        assert isinstance(peer, StagedPeer)
        is_small = not peer.must_stage and not self._threshold.is_met(len(copies.src), copies.nbytes)
        if peer.segments is None or is_small:
            self._write_inner(peer, copies, after, timeout_s)
        else:
            self._stage(peer, peer.segments, copies, after, timeout_s)

    def _write_inner(self, peer: StagedPeer, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        if isinstance(self.inner, OrderedTransport):
            self.inner.write_after(peer.inner, copies, after, timeout_s)
            return
        for ready in after:
            ready.synchronize()
        self.inner.write(peer.inner, copies, timeout_s)

    def _stage(
        self, peer: StagedPeer, segments: TargetSegments, copies: CopyList, after: Sequence[Ready], timeout_s: float
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        gatherer, sent = self.end.gatherer, list[SentGroup]()
        failure: ChituError | None = None
        try:
            for group in groups_of(copies, segments.group_bytes):
                sent.append(self._put(peer, segments, group, after, sent, deadline_s))
        except ChituError as error:
            failure = error
        left_s = max(0.0, deadline_s - time.monotonic())
        gatherer.wait(lambda: all(group.answer is not None for group in sent), sent, left_s)
        is_fenced = not gatherer.give_up(segments, sent)
        if isinstance(failure, WriteError):
            raise WriteError(failure.message, fenced=failure.fenced and is_fenced) from failure
        if failure is not None or not is_fenced:
            text = failure.message if failure is not None else "the peer did not scatter"
            raise WriteError(f"{self.name}: writing to {peer.session_id}: {text} in {timeout_s} s", fenced=is_fenced)
        errors = [group.answer.error for group in sent if group.answer is not None and group.answer.error]
        if errors:
            raise WriteError(f"{self.name}: {peer.session_id} could not scatter: {errors[0]}", fenced=True)
        self.bytes_staged += copies.nbytes

    def _put(
        self,
        peer: StagedPeer,
        segments: TargetSegments,
        copies: CopyList,
        after: Sequence[Ready],
        sent: Sequence[SentGroup],
        deadline_s: float,
    ) -> SentGroup:
        """Gather and write one group, and send it to the peer. Raises WriteError, or another ChituError before anything
        was written."""
        gatherer = self.end.gatherer
        segment = gatherer.allocate(segments, sent, deadline_s - time.monotonic())
        if segment is None:
            raise TransferFailed("no segment was free")
        is_fenced = True
        try:
            self._fill(peer, segments.address(segment), copies, after, sent, deadline_s)
        except ChituError as error:
            is_fenced = not isinstance(error, WriteError) or error.fenced
            gatherer.dropped(segments, segment, is_fenced)
            raise
        target_N, length_N = (np.asarray(column, dtype="<i8") for column in (copies.dst, copies.length))
        return gatherer.send(peer, segment, target_N.tobytes(), length_N.tobytes())

    def _fill(
        self,
        peer: StagedPeer,
        target: int,
        copies: CopyList,
        after: Sequence[Ready],
        sent: Sequence[SentGroup],
        deadline_s: float,
    ) -> None:
        gatherer, own = self.end.gatherer, self.end.gatherer.area
        if gathers(self.inner) or own is None:
            self._write_inner(peer, packed(copies, target), after, max(0.0, deadline_s - time.monotonic()))
            return
        number = gatherer.allocate_own(sent, deadline_s - time.monotonic())
        if number is None:
            raise TransferFailed("no segment of our own was free")
        try:
            self.end.copier.copy(packed(copies, own.address(number)), after)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransferFailed("gathering was not over")
            self.inner.write(peer.inner, CopyList((own.address(number),), (target,), (copies.nbytes,)), left_s)
        finally:
            gatherer.give_own(number)

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        assert isinstance(peer, StagedPeer)
        deadline_s = time.monotonic() + timeout_s
        segments = peer.segments
        doubtful, given_up = (list(segments.doubtful), list(segments.given_up)) if segments is not None else ([], [])
        if not self.inner.fence(peer.inner, timeout_s):
            return False
        if segments is None:
            return True
        self.end.gatherer.release_fenced(segments, doubtful)
        for group in given_up:
            group.send()
        left_s = max(0.0, deadline_s - time.monotonic())
        return self.end.gatherer.wait(lambda: all(group.answer is not None for group in given_up), (), left_s)


def packed(copies: CopyList, base: int) -> CopyList:
    """Return the same pieces with destinations from `base` on, without gaps."""
    length_N: Int64s = np.asarray(copies.length, dtype=np.int64)
    return CopyList(copies.src, as_array(base + np.cumsum(length_N) - length_N), copies.length)


def groups_of(copies: CopyList, nbytes: int) -> Iterator[CopyList]:
    """Yield the same bytes in lists of at most `nbytes` each; a piece is cut only if it alone is longer."""
    src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
    parts_N = -(-length_N // nbytes)
    piece_N = np.repeat(np.arange(len(length_N)), parts_N)
    offset_N = (np.arange(len(piece_N)) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)) * nbytes
    src_N, dst_N = src_N[piece_N] + offset_N, dst_N[piece_N] + offset_N
    length_N = np.minimum(length_N[piece_N] - offset_N, nbytes)
    end_N = np.cumsum(length_N)
    first = done = 0
    while first < len(length_N):
        end = int(np.searchsorted(end_N, done + nbytes, side="right"))
        part = slice(first, end)
        yield CopyList(as_array(src_N[part]), as_array(dst_N[part]), as_array(length_N[part]))
        first, done = end, int(end_N[end - 1])
