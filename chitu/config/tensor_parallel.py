"""Split of a model over the tensor-parallel ranks of an instance. Pure integers; every module that splits uses it.

Called by the topology check, the loader (weights), the KV pool (pages) and the transfer plan (which rank writes what to
which). Query heads are split evenly and stay with their KV head. KV heads are split too; if there are fewer of them
than ranks, several neighbouring ranks hold each one. Rows of the MLP and of the vocabulary are split as evenly as
possible.
"""

from __future__ import annotations

MAIN_RANK = 0
"""Rank that schedules, has the ports, samples and keeps the logits rows."""


def why_not(num_heads: int, num_kv_heads: int, tp_size: int) -> str:
    """Return why these heads cannot be split over `tp_size` ranks, as the end of a sentence, or "" if they can."""
    if num_heads % tp_size:
        return f"{num_heads} attention heads cannot be split evenly over {tp_size} ranks"
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        return f"{num_kv_heads} KV heads can neither be split evenly over {tp_size} ranks nor copied to as many each"
    return ""


def kv_heads_of(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """Return the KV heads that a rank holds: its share, or the one that it has in common with its neighbours."""
    first = rank * num_kv_heads // tp_size
    return range(first, first + kv_heads_per_rank(num_kv_heads, tp_size))


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    return max(1, num_kv_heads // tp_size)


def share_of(total: int, tp_size: int, rank: int) -> range:
    """Return a rank's part of `total` rows. Parts follow each other and differ by at most one row."""
    return range(rank * total // tp_size, (rank + 1) * total // tp_size)
