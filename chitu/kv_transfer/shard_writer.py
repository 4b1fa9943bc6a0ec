"""Writes of one P rank into the memory of one D: which ranks of D need it, the fewest copies, and the connections.

Opened when D registers. A transfer thread (on P's main rank) or a lane thread (on a follower) uses it, one at a time.
`DecodeWriter` is the interface for the rest of P: `ShardWriter` implements it on an instance of one rank,
`TPDecodeWriter` (`ranks.py`) on one of several.

Which heads (pure): the TP sizes of P and D may differ. Each KV head of a rank of D is written by exactly one rank of P
that holds it. If several P ranks hold a head, they share the D ranks that need it as evenly as possible; rank 0 always
writes to rank 0, which also takes the logits rows.

Which copies (pure): a *run* is a stretch of the page lists in which both the source and the destination pages are
consecutive, so it is one copy per region. If the two sides hold different KV heads, a *slice* of each page moves, and
each page is its own copy: heads are the outer dimension of a page and tokens the inner one, so the slice is contiguous.
Every index is range-checked here, on both sides, because it becomes an address next: an own page that is out of range
is a bug (`TransferFailed`), a peer's page is a bad message of that peer (`BadFrame`).

Rows (pure): the logits row goes as one copy from rank 0 to rank 0, the state row of a request from every rank of P to
the ranks of D that hold the same lines of its tensors, of every block for itself. Heads of a block that several ranks
hold have one writer each, chosen as that of a KV head.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank
from chitu.errors import BadFrame, ChituError, PeerUnreachable, ProtocolError, TransferFailed
from chitu.kv_cache.state_row import StateRow, blocks_of
from chitu.kv_transfer.layout import PagedMemory, SlotRows, aux_rows_of, state_rows_of
from chitu.kv_transfer.transports.mapped import as_array
from chitu.kv_transfer.transports.transport import (
    CopyList,
    Int64s,
    MessagingTransport,
    OrderedTransport,
    PeerHandle,
    Transport,
    WriteError,
    way_of,
)
from chitu.protocol import KVArgsRegisterInfo, KVLayout, RankMemory
from chitu.types import Ready

NOTHING = CopyList((), (), ())


class PageSlice(NamedTuple):
    """The part of a page or row that moves, in bytes: its offset in the source and in the destination, and its size."""

    src_offset: int
    dst_offset: int
    nbytes: int


class AlikeRegions(NamedTuple):
    """Regions of which the same part of a page moves, ascending."""

    regions: tuple[int, ...]
    part: PageSlice
    src_page_bytes: int
    dst_page_bytes: int
    src_R: Int64s
    """Address of that part of page 0 in each region: `[regions]`."""
    dst_R: Int64s


class RegionPairs(NamedTuple):
    """The regions of a source and of a destination, in pairs, without those of which nothing moves."""

    src: PagedMemory
    dst: PagedMemory
    num_regions: int
    alike: tuple[AlikeRegions, ...]
    """One entry if all layers are alike."""


def pair_regions(src: PagedMemory, dst: PagedMemory, parts: Sequence[PageSlice | None] | None = None) -> RegionPairs:
    """Return the pairs of all regions. `parts`: what moves of a page of each region, None in it for nothing; None: all
    of every page. Raises TransferFailed if the memories do not match."""
    if parts is None:
        if tuple(src.page_bytes) != tuple(dst.page_bytes):
            raise TransferFailed(f"pages of {src.page_bytes} bytes here and {dst.page_bytes} bytes there")
        parts = [PageSlice(0, 0, nbytes) for nbytes in src.page_bytes]
    found: dict[tuple[PageSlice, int, int], list[int]] = {}
    for region, (part, src_bytes, dst_bytes) in enumerate(zip(parts, src.page_bytes, dst.page_bytes, strict=True)):
        if part is None:
            continue
        for offset, page_bytes in ((part.src_offset, src_bytes), (part.dst_offset, dst_bytes)):
            if offset < 0 or part.nbytes < 1 or offset + part.nbytes > page_bytes:
                raise TransferFailed(f"{part.nbytes} bytes from byte {offset} on of pages of {page_bytes} bytes")
        found.setdefault((part, src_bytes, dst_bytes), []).append(region)
    src_R, dst_R = (np.asarray(memory.region_bases, dtype=np.int64) for memory in (src, dst))
    alike = [
        AlikeRegions(tuple(regions), *kind, src_R[regions] + kind[0].src_offset, dst_R[regions] + kind[0].dst_offset)
        for kind, regions in found.items()
    ]
    return RegionPairs(src, dst, len(src.region_bases), tuple(alike))


def plan_page_copies(
    pairs: RegionPairs, src_pages: Sequence[int], dst_pages: Sequence[int], regions: range
) -> CopyList:
    """Return the copies that bring `src_pages[i]` to `dst_pages[i]` in these (consecutive) regions; of regions that are
    alike region by region.

    Raises TransferFailed if our side is out of range, BadFrame if the peer's side is.
    """
    if len(src_pages) != len(dst_pages):
        raise BadFrame(f"{len(src_pages)} source pages for {len(dst_pages)} destination pages")
    if regions.start < 0 or regions.stop > pairs.num_regions:
        raise TransferFailed(f"regions {regions.start} to {regions.stop - 1} of {pairs.num_regions}")
    if not len(src_pages) or not regions:
        return NOTHING
    src_P = checked_pages(src_pages, pairs.src.num_pages, "source", TransferFailed)
    dst_P = checked_pages(dst_pages, pairs.dst.num_pages, "destination", BadFrame)
    plans = []
    for alike in pairs.alike:
        chosen = slice(*(bisect_left(alike.regions, bound) for bound in (regions.start, regions.stop)))
        if chosen.start < chosen.stop:
            plans.append(_plan(alike, chosen, src_P, dst_P))
    return plans[0] if len(plans) == 1 else join(*plans)


def _plan(alike: AlikeRegions, chosen: slice, src_P: Int64s, dst_P: Int64s) -> CopyList:
    """Return the copies in some of these regions."""
    src_R, dst_R, nbytes = alike.src_R[chosen], alike.dst_R[chosen], alike.part.nbytes
    if nbytes == alike.src_page_bytes == alike.dst_page_bytes:  # neighbouring pages move as one copy
        starts, run_pages = merge_runs(src_P, dst_P)
        src_P, dst_P, length_P = src_P[starts], dst_P[starts], run_pages * nbytes
    else:
        length_P = np.full(len(src_P), nbytes, dtype=np.int64)
    return CopyList(
        as_array(np.add.outer(src_R, src_P * alike.src_page_bytes)),
        as_array(np.add.outer(dst_R, dst_P * alike.dst_page_bytes)),
        as_array(np.tile(length_P, len(src_R))),
    )


def merge_runs(src_pages_P: Int64s, dst_pages_P: Int64s) -> tuple[Int64s, Int64s]:
    """Return `(starts, lengths)` of the longest runs that are contiguous in both lists, in list order."""
    breaks_P = (np.diff(src_pages_P) != 1) | (np.diff(dst_pages_P) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks_P) + 1)).astype(np.int64)
    return starts, np.diff(np.append(starts, len(src_pages_P))).astype(np.int64)


def plan_row_copies(
    src: SlotRows, dst: SlotRows, src_slot: int, dst_slot: int, parts: Sequence[PageSlice] | None = None
) -> CopyList:
    """Return the copies that bring these parts of row `src_slot` to row `dst_slot`; None: the whole row, as one copy.
    Raises the errors of `plan_page_copies`."""
    if parts is None:
        if src.row_bytes != dst.row_bytes:
            raise TransferFailed(f"{src.name} rows of {src.row_bytes} bytes here and {dst.row_bytes} bytes there")
        parts = (PageSlice(0, 0, src.row_bytes),)
    if not 0 <= src_slot < src.num_slots:
        raise TransferFailed(f"source {src.name} slot {src_slot} of {src.num_slots}")
    if not 0 <= dst_slot < dst.num_slots:
        raise BadFrame(f"destination {dst.name} slot {dst_slot} of {dst.num_slots}")
    src_at, dst_at = src.base + src_slot * src.row_bytes, dst.base + dst_slot * dst.row_bytes
    return CopyList(
        tuple(src_at + part.src_offset for part in parts),
        tuple(dst_at + part.dst_offset for part in parts),
        tuple(part.nbytes for part in parts),
    )


def plan_aux_copy(src: PagedMemory, dst: PagedMemory, src_slot: int, dst_slot: int) -> CopyList:
    """Return the one copy that brings aux row `src_slot` to `dst_slot`. Raises the errors of `plan_page_copies`."""
    return plan_row_copies(aux_rows_of(src), aux_rows_of(dst), src_slot, dst_slot)


def join(*parts: CopyList) -> CopyList:
    """Return the copies of all parts, in order, as one list."""
    src, dst, length = array("q"), array("q"), array("q")
    for part in parts:
        src.extend(part.src)
        dst.extend(part.dst)
        length.extend(part.length)
    return CopyList(src, dst, length)


def checked_pages(
    pages: Sequence[int], num_pages: int, side: str, error: type[TransferFailed] | type[ProtocolError]
) -> Int64s:
    """Return the pages as int64. Raise `error` if one is out of range or listed twice."""
    try:
        pages_P = np.asarray(pages, dtype=np.int64)
    except (OverflowError, ValueError, TypeError) as cause:
        raise error(f"{side} pages are no page indices: {cause}") from cause
    low, high = int(pages_P.min()), int(pages_P.max())
    if low < 0 or high >= num_pages:
        raise error(f"{side} page {low if low < 0 else high} of {num_pages}")
    if len(pages_P) > 1 and np.bincount(pages_P - low).max() > 1:
        raise error(f"{side} page {low + int(np.bincount(pages_P - low).argmax())} is listed twice")
    return pages_P


def state_slices(layout: KVLayout, src_rank: int, dst_size: int, dst_rank: int) -> tuple[PageSlice, ...]:
    """Return the parts of a state row that rank `src_rank` of a P of this layout writes to rank `dst_rank` of a D of
    `dst_size` ranks: of every block of every tensor the heads that both hold, if this rank is the one that writes
    them."""
    slices: list[PageSlice] = []
    src_row, dst_row = StateRow.of(layout), StateRow.of(msgspec.structs.replace(layout, tp_size=dst_size))
    for src, dst in zip(src_row.parts, dst_row.parts, strict=True):
        line, src_at, dst_at = src.line_bytes, src.offset, dst.offset
        for block in blocks_of(src.tensor):
            heads = head_copy(block.num_heads, layout.tp_size, src_rank, dst_size, dst_rank)
            if heads is not None:
                src_first, dst_first, nbytes = (line * block.lines * number for number in heads)
                _append_slice(slices, PageSlice(src_at + src_first, dst_at + dst_first, nbytes))
            src_at += len(block.held_by(layout.tp_size, src_rank)) * line
            dst_at += len(block.held_by(dst_size, dst_rank)) * line
    return tuple(slices)


def _append_slice(slices: list[PageSlice], new: PageSlice) -> None:
    """Append a slice, or extend the last one if it ends where the new one begins, on both sides."""
    last = slices[-1] if slices else None
    if last and (last.src_offset + last.nbytes, last.dst_offset + last.nbytes) == (new.src_offset, new.dst_offset):
        slices[-1] = PageSlice(last.src_offset, last.dst_offset, last.nbytes + new.nbytes)
    else:
        slices.append(new)


class HeadCopy(NamedTuple):
    """`num_heads` neighbouring KV heads: their place among the heads of the source and of the destination rank."""

    src_first: int
    dst_first: int
    num_heads: int


def head_copy(num_kv_heads: int, src_size: int, src_rank: int, dst_size: int, dst_rank: int) -> HeadCopy | None:
    """Return what rank `src_rank` of a P of `src_size` ranks writes to rank `dst_rank` of a D, or None if nothing."""
    src = kv_heads_of(num_kv_heads, src_size, src_rank)
    dst = kv_heads_of(num_kv_heads, dst_size, dst_rank)
    heads = range(max(src.start, dst.start), min(src.stop, dst.stop))
    if not heads or _writer(num_kv_heads, src_size, dst_size, dst_rank, heads.start) != src_rank:
        return None
    return HeadCopy(heads.start - src.start, heads.start - dst.start, len(heads))


def _writer(num_kv_heads: int, src_size: int, dst_size: int, dst_rank: int, head: int) -> int:
    """Return the P rank, of those that hold the head, that writes it to this D rank."""
    src_first, src_copies = _holders(num_kv_heads, src_size, head)
    dst_first, dst_copies = _holders(num_kv_heads, dst_size, head)
    return src_first + (dst_rank - dst_first) * src_copies // dst_copies


def _holders(num_kv_heads: int, tp_size: int, head: int) -> tuple[int, int]:
    """Return the first rank that holds the head, and how many do."""
    copies = max(1, tp_size // num_kv_heads)
    return head * tp_size // num_kv_heads, copies


class TransferKVChunk(NamedTuple):
    """KV of layers `[first_layer, end_layer)` and positions `[first_page, end_page)` in the page lists of a room, which
    both sides have in the order of the prompt."""

    first_layer: int
    end_layer: int
    first_page: int
    end_page: int
    ready: Ready | None = None
    """Event after which the pages are computed; None: they already are."""

    @property
    def num_units(self) -> int:
        """Pages times layers."""
        return (self.end_layer - self.first_layer) * (self.end_page - self.first_page)


def wait_for(chunks: Sequence[TransferKVChunk]) -> None:
    """Wait until all of them are computed. A transfer thread may block here, a step never does."""
    for chunk in chunks:
        if chunk.ready is not None:
            chunk.ready.synchronize()


class DecodeWriter(Protocol):
    """Writes from all ranks of this P to all ranks of one D. Chunks are positions in `src_pages`, the pages of a room
    here, and in `dst_pages`, its pages there."""

    @property
    def transport(self) -> str:
        """Name of the transport that our main rank writes through, for logs."""
        ...

    @property
    def way(self) -> str:
        """Name of that transport with its protocol, for metrics."""
        ...

    def write_pages(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int], timeout_s: float
    ) -> tuple[int, ...]:
        """Write pages and return the bytes that each P rank wrote, once all are visible. Raises WriteError, or another
        ChituError before anything was written."""
        ...

    def write_aux(self, src_slot: int, dst_slot: int, timeout_s: float, ready: Ready | None = None) -> int:
        """Write the logits row from our main rank to D's, once `ready` has passed, and return its bytes. Raises the
        errors of `write_pages`."""
        ...

    def write_state(self, src_slot: int, dst_slot: int, timeout_s: float) -> tuple[int, ...]:
        """Write the state row of all our ranks to all of D's, and return the bytes that each rank of ours wrote. Raises
        the errors of `write_pages`."""
        ...

    def buffer_lengths(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int]
    ) -> list[int]:
        """Return the bytes of each piece that our main rank writes for these chunks; for trace records."""
        ...

    def fence(self, timeout_s: float) -> bool:
        """Return True once no byte of an earlier write can land any more."""
        ...

    def close(self) -> None:
        """Close the connections to a D that is gone, when nothing writes. Idempotent."""
        ...


@dataclass(slots=True, frozen=True)
class RankConnection:
    """Connection to one D rank."""

    pairs: RegionPairs
    """Our regions and its own, and what it receives of each of our pages."""
    transport: Transport
    handle: PeerHandle
    state_parts: tuple[PageSlice, ...] = ()
    """Parts of our state rows that it receives."""


class ShardWriter:
    """Implements `DecodeWriter` for one rank. `ranks`: of D, in order; rank 0 of P has D's rank 0 first."""

    def __init__(self, layout: KVLayout, ranks: Sequence[RankConnection]) -> None:
        self._first_regions = layout.first_regions
        self._ranks = tuple(ranks)

    @property
    def transport(self) -> str:
        return "+".join(sorted({rank.transport.name for rank in self._ranks}))

    @property
    def way(self) -> str:
        return "+".join(sorted({way_of(rank.transport) for rank in self._ranks}))

    def write_pages(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int], timeout_s: float
    ) -> tuple[int, ...]:
        planned = [(rank, self._plan(rank, chunks, src_pages, dst_pages)) for rank in self._ranks]
        after = [chunk.ready for chunk in chunks if chunk.ready is not None]
        if not all(isinstance(rank.transport, OrderedTransport) for rank in self._ranks):
            wait_for(chunks)
        return (_write(planned, after, timeout_s),)

    def buffer_lengths(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int]
    ) -> list[int]:
        return [nbytes for rank in self._ranks for nbytes in self._plan(rank, chunks, src_pages, dst_pages).length]

    def _plan(
        self,
        rank: RankConnection,
        chunks: Sequence[TransferKVChunk],
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
    ) -> CopyList:
        plans = [
            plan_page_copies(
                rank.pairs,
                src_pages[chunk.first_page : chunk.end_page],
                dst_pages[chunk.first_page : chunk.end_page],
                range(self._first_regions[chunk.first_layer], self._first_regions[chunk.end_layer]),
            )
            for chunk in chunks
        ]
        return plans[0] if len(plans) == 1 else join(*plans)

    def write_aux(self, src_slot: int, dst_slot: int, timeout_s: float, ready: Ready | None = None) -> int:
        rank = self._ranks[0]
        copies = plan_aux_copy(rank.pairs.src, rank.pairs.dst, src_slot, dst_slot)
        if ready is not None and not isinstance(rank.transport, OrderedTransport):
            ready.synchronize()
        return _write([(rank, copies)], () if ready is None else (ready,), timeout_s)

    def write_state(self, src_slot: int, dst_slot: int, timeout_s: float) -> tuple[int, ...]:
        planned = []
        for rank in self._ranks:
            rows = state_rows_of(rank.pairs.src), state_rows_of(rank.pairs.dst)
            planned.append((rank, plan_row_copies(*rows, src_slot, dst_slot, rank.state_parts)))
        return (_write(planned, (), timeout_s),)

    def fence(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        return all(rank.transport.fence(rank.handle, max(0.0, deadline_s - time.monotonic())) for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:
            rank.transport.disconnect(rank.handle)


def _write(planned: Sequence[tuple[RankConnection, CopyList]], after: Sequence[Ready], timeout_s: float) -> int:
    """Write to one rank of D after the other, and return the bytes. Raises WriteError."""
    deadline_s = time.monotonic() + timeout_s
    for rank, copies in planned:
        if not len(copies.src):  # layers without KV, or without heads for this rank
            continue
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise WriteError(f"writing to the ranks before {rank.handle.session_id} took {timeout_s} s", True)
        if isinstance(rank.transport, OrderedTransport):
            rank.transport.write_after(rank.handle, copies, after, left_s)
        else:
            rank.transport.write(rank.handle, copies, left_s)
    return sum(copies.nbytes for _, copies in planned)


def open_shards(
    info: KVArgsRegisterInfo,
    layout: KVLayout,
    tp_rank: int,
    memory: PagedMemory,
    transports: Sequence[Transport],
) -> ShardWriter:
    """Connect rank `tp_rank` of a P of this `layout` to the ranks of a D whose registration was checked.

    Raises TransferFailed if a rank cannot be reached; nothing stays open then.
    """
    connections: list[RankConnection] = []
    try:
        for rank in sorted(info.ranks, key=lambda rank: rank.tp_rank):
            parts = page_slices(layout, memory, tp_rank, info.layout.tp_size, rank.tp_rank)
            state_parts = state_slices(layout, tp_rank, info.layout.tp_size, rank.tp_rank)
            if any(parts) or state_parts:
                pairs = pair_regions(memory, rank, parts)
                way = connect_to(rank, transports, info.incarnation)
                connections.append(RankConnection(pairs, *way, state_parts))
    except ChituError:
        ShardWriter(layout, connections).close()
        raise
    return ShardWriter(layout, connections)


def page_slices(
    layout: KVLayout, memory: PagedMemory, src_rank: int, dst_size: int, dst_rank: int
) -> list[PageSlice | None]:
    """Return what rank `src_rank` of a P of this layout, with this `memory`, writes of a page to rank `dst_rank` of a D
    of `dst_size` ranks, by region."""
    parts: list[PageSlice | None] = []
    for region, page_bytes in zip(layout.regions, memory.page_bytes, strict=True):
        heads = head_copy(region.num_kv_heads, layout.tp_size, src_rank, dst_size, dst_rank)
        head_bytes = page_bytes // kv_heads_per_rank(region.num_kv_heads, layout.tp_size)
        parts.append(None if heads is None else PageSlice(*(head_bytes * number for number in heads)))
    return parts


def connect_to(memory: RankMemory, transports: Sequence[Transport], incarnation: int) -> tuple[Transport, PeerHandle]:
    """Connect through the first of our transports (in order of preference) that the rank offers and that works. Raises
    PeerUnreachable if one may work later, and TransferFailed if none ever will."""
    reasons: list[str] = []
    may_come_back = False
    for transport in transports:
        for session in memory.sessions:
            if session.transport != transport.name:
                continue
            if not transport.can_reach(session):
                reasons.append(f"{transport.name} cannot reach {session.session_id}")
                continue
            try:
                handle = transport.connect(memory, session)
            except ChituError as error:
                reasons.append(f"{transport.name}: {error.message}")
                may_come_back |= isinstance(error, PeerUnreachable)
                continue
            if isinstance(transport, MessagingTransport):
                transport.bind(handle, incarnation)
            return transport, handle
    if may_come_back:
        raise PeerUnreachable("; ".join(reasons))
    offered = ", ".join(session.transport for session in memory.sessions) or "none"
    mine = ", ".join(transport.name for transport in transports) or "none"
    raise TransferFailed(f"no common transport (offered: {offered}; mine: {mine}) {'; '.join(reasons)}".rstrip())
