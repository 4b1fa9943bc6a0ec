"""KV checksums between P and D (`verify_kv`): which pages of a room are verified, and whether they arrived.

P chooses the pages of a room when it first writes (`choose_pages`): all, or some that D cannot predict. Each batch that
was written adds its layers to `RoomSums`, from P's own memory: what was meant to arrive. They cross with Success as
`KVSums`. D sums the same pages of its memory and calls `compare` before the scheduler gets SUCCESS. If the request asks
for checksums (`TransferInfo.page_sums`), P sums up all pages, by layer, whatever `verify_kv` is, and D returns both
sides' to the client (`transfer_sums`). The formula is `kv_cache/checksum.py`; in what crosses, every KV head counts
once, however many ranks hold it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.errors import BadFrame, Integrity
from chitu.protocol import KVLayout, KVSums, TransferSums, pack_i32, unpack_i32
from chitu.protocol.trace import TracedSums

Int64s = NDArray[np.int64]
VerifyKV = Literal["off", "sample", "all"]

WINDOW_PAGES = 4
"""Pages that a traced request has checksums of: this many at the start, and at the end, of what P writes."""
SAMPLE_DIVISOR = 16
"""`sample` verifies one in this many pages of a room, chosen at random, and its first and last page."""

MAX_SUMS = 65536
"""Most checksums by layer that P sends for one request; of more pages it sends one each."""

_random = secrets.SystemRandom()


class PageSums(Protocol):
    """Checksums of pages of this instance: of one rank, or (`TPPageSums`) of all ranks, added up."""

    def sums(self, layers: range, pages: Sequence[int]) -> Int64s:
        """Return one checksum per page, over K and V of these consecutive layers. Blocks. Raises TransferFailed if a
        rank does not answer."""
        ...


def head_copies(layout: KVLayout) -> int:
    """Return how many ranks hold the same KV head."""
    return max(1, layout.tp_size // layout.num_kv_heads)


def choose_pages(verify_kv: VerifyKV, first: int, end: int) -> list[int]:
    """Return the positions of `[first, end)` of a room's page list that are verified, ascending."""
    if verify_kv == "off" or first >= end:
        return []
    if verify_kv == "all":
        return list(range(first, end))
    chosen = _random.sample(range(first, end), -(-(end - first) // SAMPLE_DIVISOR))
    return sorted({first, end - 1, *chosen})


def trace_window(first: int, end: int) -> list[int]:
    """Return the positions of `[first, end)` that get checksums if the room is traced and `verify_kv` is off."""
    return sorted({*range(first, min(end, first + WINDOW_PAGES)), *range(max(first, end - WINDOW_PAGES), end)})


def summed(page_sums: PageSums, layers: range, pages: Sequence[int], by_layer: bool) -> Int64s:
    """Return the checksums of these pages, `[rows, pages]`: a row for each layer, or one for all. Blocks. Raises as
    `PageSums`."""
    rows = [range(layer, layer + 1) for layer in layers] if by_layer else [layers]
    return np.stack([page_sums.sums(row, pages) for row in rows])


def traced_sums(positions: Int64s, sums: Int64s, copies: int = 1) -> TracedSums:
    """Return the checksums for a trace record, over all layers: those of its window, even if all pages were summed
    up."""
    chosen = trace_window(0, len(positions))
    values = sums.sum(axis=0)[chosen].astype(">i8").tobytes()
    places = tuple(positions[chosen].tolist())
    return TracedSums(places, tuple(values[i : i + 8].hex() for i in range(0, len(values), 8)), copies)


@dataclass(slots=True)
class RoomSums:
    """Checksums of the chosen pages of a room; on P they grow with what is written."""

    positions: Int64s
    sums: Int64s
    """`[rows, positions]`: a row for each layer if the request asked for checksums, else one for all layers."""
    transport: str
    """Name of the transport that P writes with."""

    @classmethod
    def of(cls, positions: Sequence[int], transport: str, num_rows: int = 1) -> RoomSums:
        sums = np.zeros((num_rows, len(positions)), dtype=np.int64)
        return cls(np.asarray(positions, dtype=np.int64), sums, transport)

    @property
    def is_by_layer(self) -> bool:
        return len(self.sums) > 1

    def within(self, first: int, end: int) -> slice:
        """Return the slice of the chosen positions that lie in `[first, end)`."""
        low, high = np.searchsorted(self.positions, (first, end)).tolist()
        return slice(low, high)

    def message(self) -> KVSums:
        return KVSums(pack_i32(self.positions.tolist()), self.sums.astype("<i8").tobytes(), self.transport)


def read_sums(message: KVSums | None, verify_kv: VerifyKV, first: int, end: int, num_layers: int) -> RoomSums:
    """Decode, on D, what P sent for a room whose pages `[first, end)` it wrote. Raises Integrity if D cannot verify as
    configured: pages that must be verified are missing, or the message is malformed."""
    if message is None:
        raise Integrity(f"P sent no KV checksums, and verify_kv is {verify_kv} here")
    try:
        positions = np.asarray(unpack_i32(message.positions), dtype=np.int64)
    except BadFrame as error:
        raise Integrity(f"positions of KV checksums: {error.message}") from error
    num_rows = len(message.sums) // (8 * len(positions)) if len(positions) else 1
    if len(message.sums) != 8 * len(positions) * num_rows or num_rows not in (1, num_layers):
        raise Integrity(f"{len(message.sums)} bytes of KV checksums for {len(positions)} pages")
    needed = range(first, end) if verify_kv == "all" else {first, end - 1} if first < end else ()
    is_sane = not len(positions) or (positions[0] >= first and positions[-1] < end and (np.diff(positions) > 0).all())
    if not is_sane or not set(needed) <= set(positions.tolist()):
        raise Integrity(f"KV checksums of {len(positions)} pages do not cover pages {first} to {end - 1}")
    sums = np.frombuffer(message.sums, dtype="<i8").astype(np.int64).reshape(num_rows, len(positions))
    return RoomSums(positions, sums, message.transport)


def transfer_sums(expected: RoomSums, found: Int64s, copies: int) -> TransferSums:
    """Return both sides' checksums for the client that asked. `found` as for `compare`."""
    first_page = int(expected.positions[0]) if len(expected.positions) else 0
    sent = expected.sums * np.int64(copies)
    return TransferSums(first_page, len(sent), sent.astype("<i8").tobytes(), found.astype("<i8").tobytes())


def compare(expected: RoomSums, found: Int64s, copies: int) -> None:
    """Raise Integrity with the pages that differ. `found`: sums over all ranks of D, of the shape of `expected.sums`;
    heads count `copies` times."""
    wrong = expected.positions[(found != expected.sums * np.int64(copies)).any(axis=0)]
    if len(wrong):
        names = ", ".join(str(position) for position in wrong[:5].tolist()) + (", ..." if len(wrong) > 5 else "")
        raise Integrity(
            f"checksum mismatch in {len(wrong)} of {len(expected.positions)} verified KV pages"
            f" (pages {names} of the prompt), written over {expected.transport or 'an unnamed transport'}"
        )
