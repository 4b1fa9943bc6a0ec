"""Which TP rank of P writes which KV heads to which TP rank of D. Pure integers; the sizes of P and D may differ.

Called when a connection to a D rank is opened. Invariant: for every rank of D, each KV head that it holds is written by
exactly one rank of P that holds it. If several P ranks hold a head, they share the D ranks that need it as evenly as
possible; rank 0 always writes to rank 0, which also takes the logits rows.
"""

from __future__ import annotations

from typing import NamedTuple

from chitu.config.tensor_parallel import kv_heads_of


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
