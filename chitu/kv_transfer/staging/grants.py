"""D: which of its segments each P may write. Pure.

The shares are fixed, by engine rank: a P that comes back as a new incarnation gets the segments of its predecessor,
which by then is dead (only one incarnation of a rank is alive, and what was left of the dead one's writes ended with
its session, long before the new one has loaded its model). So nobody waits for a grant, and a P that is silent costs
the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class SegmentGrants:
    """`prefill_ranks`: engine ranks of the P that share them."""

    def __init__(self, num_segments: int, prefill_ranks: Sequence[int]) -> None:
        share = num_segments // max(1, len(prefill_ranks))
        ranks = sorted(set(prefill_ranks))
        self._segments = {rank: tuple(range(i * share, (i + 1) * share)) for i, rank in enumerate(ranks)}

    def of(self, prefill_rank: int) -> tuple[int, ...]:
        """Empty: this P gets none, and writes directly."""
        return self._segments.get(prefill_rank, ())
