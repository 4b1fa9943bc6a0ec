"""Size from which a write is staged that could also be direct: a fixed table, by transport and kind of memory. Pure.

A staged write costs two copies and a message there and back, a direct one something for each of its pieces. So staging
wins from some number of pieces on, unless the pieces are so large that copying them costs more than sending each alone.
Measure again with `chitu bench transfer --transfer direct,staged` (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import NamedTuple

from chitu.config.devices import is_gpu

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
