"""Which TP rank of P writes which KV heads to which TP rank of D. Pure integers; the sizes of P and D may differ.

Called when a connection to a D rank is opened. Invariant: for every rank of D, each KV head that it holds is written by
exactly one rank of P that holds it. If several P ranks hold a head, they share the D ranks that need it as evenly as
possible; rank 0 always writes to rank 0, which also takes the logits rows.

Connections from one P rank into the memory of one D: a link to every D rank that needs KV heads of ours.

Opened when D registers. A transfer thread (on P's main rank) or a lane thread (on a follower) uses it, one at a time.
With one rank on both sides it is one link that moves whole pages. `DecodeWriter` is the interface for the rest of P:
`ShardWriter` implements it on an instance of one rank, `TPDecodeWriter` (`ranks.py`) on one of several.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank
from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.plan import PageSlice, join, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.transport import (
    CopyList,
    MessagingTransport,
    OrderedTransport,
    PeerHandle,
    Transport,
    WriteError,
)
from chitu.protocol import KVArgsRegisterInfo, KVLayout, RankMemory
from chitu.types import Ready


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


class PageMove(NamedTuple):
    """KV of layers `[first_layer, end_layer)` that goes from pages `src_pages[i]` here to `dst_pages[i]` there."""

    first_layer: int
    end_layer: int
    src_pages: Sequence[int]
    dst_pages: Sequence[int]
    ready: Ready | None = None
    """Event after which the pages are computed; None: they already are."""


def wait_for(moves: Sequence[PageMove]) -> None:
    """Wait until all of them are computed. A transfer thread may block here, a step never does."""
    for move in moves:
        if move.ready is not None:
            move.ready.synchronize()


class DecodeWriter(Protocol):
    """Writes from all ranks of this P to all ranks of one D."""

    @property
    def transport(self) -> str:
        """Name of the transport that our main rank writes through, for logs."""
        ...

    def write_pages(self, moves: Sequence[PageMove], timeout_s: float) -> tuple[int, ...]:
        """Write pages and return the bytes that each P rank wrote, once all are visible. Raises WriteError, or another
        ChituError before anything was written."""
        ...

    def write_aux(self, src_slot: int, dst_slot: int, timeout_s: float) -> int:
        """Write the logits row from our main rank to D's and return its bytes. Raises the errors of `write_pages`."""
        ...

    def buffer_lengths(self, moves: Sequence[PageMove]) -> list[int]:
        """Return the bytes of each piece that our main rank writes for these moves; for trace records."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Return True once no byte of an earlier write can land any more."""
        ...

    def close(self) -> None:
        """Close the connections to a D that is gone, when nothing writes. Idempotent."""
        ...


@dataclass(slots=True, frozen=True)
class RankConnection:
    """Connection to one D rank, which receives `part` of each of our pages."""

    memory: RankMemory
    part: PageSlice
    transport: Transport
    handle: PeerHandle


class ShardWriter:
    """Implements `DecodeWriter` for one rank. `links`: in order of D's ranks; rank 0 of P has D's rank 0 first."""

    def __init__(self, memory: PagedMemory, links: Sequence[RankConnection], regions_per_layer: int = 2) -> None:
        self._memory = memory
        self._regions_per_layer = regions_per_layer
        self._links = tuple(links)

    @property
    def transport(self) -> str:
        return "+".join(sorted({link.transport.name for link in self._links}))

    def write_pages(self, moves: Sequence[PageMove], timeout_s: float) -> tuple[int, ...]:
        planned = [(link, self._plan(link, moves)) for link in self._links]
        after = [move.ready for move in moves if move.ready is not None]
        if not all(isinstance(link.transport, OrderedTransport) for link in self._links):
            wait_for(moves)
        deadline_s = time.monotonic() + timeout_s
        for link, copies in planned:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise WriteError(f"writing to the ranks before {link.handle.session_id} took {timeout_s} s", True)
            if isinstance(link.transport, OrderedTransport):
                link.transport.write_after(link.handle, copies, after, left_s)
            else:
                link.transport.write(link.handle, copies, left_s)
        return (sum(copies.nbytes for _, copies in planned),)

    def buffer_lengths(self, moves: Sequence[PageMove]) -> list[int]:
        return [nbytes for link in self._links for nbytes in self._plan(link, moves).length]

    def _plan(self, link: RankConnection, moves: Sequence[PageMove]) -> CopyList:
        plans = [
            plan_page_copies(
                self._memory,
                link.memory,
                m.src_pages,
                m.dst_pages,
                range(m.first_layer, m.end_layer),
                link.part,
                self._regions_per_layer,
            )
            for m in moves
        ]
        return plans[0] if len(plans) == 1 else join(*plans)

    def write_aux(self, src_slot: int, dst_slot: int, timeout_s: float) -> int:
        link = self._links[0]
        copies = plan_aux_copy(self._memory, link.memory, src_slot, dst_slot)
        link.transport.write(link.handle, copies, timeout_s)
        return copies.nbytes

    def settle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        return all(link.transport.settle(link.handle, max(0.0, deadline_s - time.monotonic())) for link in self._links)

    def close(self) -> None:
        for link in self._links:
            link.transport.disconnect(link.handle)


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
    head_bytes = memory.page_bytes // kv_heads_per_rank(layout.num_kv_heads, layout.tp_size)
    links: list[RankConnection] = []
    try:
        for rank in sorted(info.ranks, key=lambda rank: rank.tp_rank):
            heads = head_copy(layout.num_kv_heads, layout.tp_size, tp_rank, info.layout.tp_size, rank.tp_rank)
            if heads is not None:
                part = PageSlice(*(head_bytes * number for number in heads))
                links.append(RankConnection(rank, part, *_connect(rank, transports, info.incarnation)))
    except ChituError:
        ShardWriter(memory, links).close()
        raise
    return ShardWriter(memory, links, layout.regions_per_layer)


def _connect(memory: RankMemory, transports: Sequence[Transport], incarnation: int) -> tuple[Transport, PeerHandle]:
    """Connect through the first of our transports (in order of preference) that the rank offers and that works."""
    reasons: list[str] = []
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
                continue
            if isinstance(transport, MessagingTransport):
                transport.bind(handle, incarnation)
            return transport, handle
    offered = ", ".join(session.transport for session in memory.sessions) or "none"
    mine = ", ".join(transport.name for transport in transports) or "none"
    raise TransferFailed(f"no common transport (offered: {offered}; mine: {mine}) {'; '.join(reasons)}".rstrip())
