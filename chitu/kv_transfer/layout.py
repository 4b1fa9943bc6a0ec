"""How one rank's memory is described to a peer, and whether two ranks may exchange pages at all.

Pure: integers in, records or errors out. The service builds a `RankMemory` of its pool with `rank_memory`; the comm
thread of P checks every registration with `check_compatible` and `check_rank_memory` before an address of it is used.
Invariant: a `RankMemory` that passed the check describes regions and aux rows that lie inside its arena and do not
overlap, so an index that is in range can never name a byte outside of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from chitu.config.tensor_parallel import kv_heads_per_rank
from chitu.errors import BadFrame, IncompatibleLayout
from chitu.protocol import KVLayout, RankMemory, TransportSession

ADDRESS_LIMIT = 1 << 63
"""Upper bound of addresses, which are handled as int64; no user space address reaches it."""


class PagedMemory(Protocol):
    """Addresses of a pool: what `KVPool` (own memory) and `RankMemory` (a peer's) have in common."""

    @property
    def arena_base(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def region_bases(self) -> tuple[int, ...]: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def aux_base(self) -> int: ...
    @property
    def aux_row_bytes(self) -> int: ...
    @property
    def num_aux_slots(self) -> int: ...


def rank_memory(pool: PagedMemory, tp_rank: int, sessions: Sequence[TransportSession]) -> RankMemory:
    """Return the record that a peer gets; `sessions` are in order of preference."""
    return RankMemory(
        tp_rank=tp_rank,
        sessions=tuple(sessions),
        arena_base=pool.arena_base,
        arena_bytes=pool.arena_bytes,
        region_bases=tuple(pool.region_bases),
        page_bytes=pool.page_bytes,
        num_pages=pool.num_pages,
        aux_base=pool.aux_base,
        aux_row_bytes=pool.aux_row_bytes,
        num_aux_slots=pool.num_aux_slots,
    )


def check_compatible(mine: KVLayout, theirs: KVLayout) -> None:
    """Raise IncompatibleLayout, with the fields that differ and both layouts, if they differ in more than TP size."""
    different = mine.mismatches(theirs)
    heads = mine.num_kv_heads
    if not different and (theirs.tp_size < 1 or (heads % theirs.tp_size and theirs.tp_size % heads)):
        different = [f"tp_size: {heads} KV heads cannot be cut for {theirs.tp_size} ranks"]
    if different:
        raise IncompatibleLayout(f"KV layouts differ in {'; '.join(different)} (mine {mine}, theirs {theirs})")


def page_bytes_of(theirs: KVLayout, mine: KVLayout, my_page_bytes: int) -> int:
    """Return the bytes of one page of one region on a compatible peer's rank, which may hold fewer or more KV heads."""
    head_bytes = my_page_bytes // kv_heads_per_rank(mine.num_kv_heads, mine.tp_size)
    return head_bytes * kv_heads_per_rank(theirs.num_kv_heads, theirs.tp_size)


def check_rank_memory(theirs: RankMemory, mine: PagedMemory, tp_size: int = 1, page_bytes: int | None = None) -> None:
    """Validate the addresses of a rank of a compatible peer of `tp_size` ranks. Raises BadFrame with the values.

    `page_bytes`: required size of the peer's pages; None: the size of ours.
    """
    for name in ("arena_base", "arena_bytes", "aux_base", "num_pages", "num_aux_slots", "tp_rank"):
        value = getattr(theirs, name)
        if not 0 <= value < ADDRESS_LIMIT:
            raise BadFrame(f"{name} is {value}; at least 0 and below 2**63 is expected")
    if theirs.tp_rank >= tp_size:
        raise BadFrame(f"tp_rank is {theirs.tp_rank} with tp_size {tp_size}")
    if theirs.arena_base + theirs.arena_bytes > ADDRESS_LIMIT:
        raise BadFrame(f"an arena of {theirs.arena_bytes} bytes at {theirs.arena_base:#x} ends beyond 2**63")
    wanted = mine.page_bytes if page_bytes is None else page_bytes
    if theirs.page_bytes != wanted:
        raise BadFrame(f"page_bytes is {theirs.page_bytes} there and {wanted} here")
    if theirs.aux_row_bytes != mine.aux_row_bytes:
        raise BadFrame(f"aux_row_bytes is {theirs.aux_row_bytes} there and {mine.aux_row_bytes} here")
    if len(theirs.region_bases) != len(mine.region_bases):
        raise BadFrame(f"{len(theirs.region_bases)} regions there and {len(mine.region_bases)} here")
    _check_spans(theirs)


def _check_spans(memory: RankMemory) -> None:
    """Raise BadFrame unless every region and the aux rows lie inside the arena and no two of them overlap."""
    region_bytes = memory.num_pages * memory.page_bytes
    spans = [(base, region_bytes, f"region {r}") for r, base in enumerate(memory.region_bases)]
    spans.append((memory.aux_base, memory.num_aux_slots * memory.aux_row_bytes, "the aux rows"))
    arena_end = memory.arena_base + memory.arena_bytes
    for base, nbytes, name in spans:
        if base < memory.arena_base or base + nbytes > arena_end:
            raise BadFrame(
                f"{name} ({nbytes} bytes at {base:#x}) lies outside the arena"
                f" ({memory.arena_bytes} bytes at {memory.arena_base:#x})"
            )
    spans.sort()
    for (base, nbytes, name), (next_base, _, next_name) in pairwise(spans):
        if base + nbytes > next_base:
            raise BadFrame(f"{name} ({nbytes} bytes at {base:#x}) overlaps {next_name} at {next_base:#x}")
