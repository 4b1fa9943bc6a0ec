"""Memory as a peer sees it: the record of a rank's memory, whether two ranks may exchange pages and rows, aux rows,
checksums.

Addresses (pure): the service builds a `RankMemory` of its pool with `rank_memory`; the comm thread of P checks every
registration with `check_compatible` and `check_rank_memory` before an address of it is used. Invariant: a `RankMemory`
that passed the check describes regions, aux rows and state rows that lie inside its arena and do not overlap, so an
index that is in range can never name a byte outside of them.

Aux slots: one row per request between P and D, a 64 byte header and then the logits of the prompt's last token.
`MetadataBuffers` owns the header, and which slots are free. P seals a row once its logits are in place, the row crosses
as one copy, D verifies it before it samples from it. The header names the room and carries a checksum, so a row that is
stale, torn or of another room never verifies. `allocate` and `free` belong to the step thread; any thread that has the
slot may call `seal` and `verify`. The rows lie in the pool's arena (`KVPool.aux_rows`), on its device, and so does all
work on them: a row on a GPU does not cross to the host for its checksum (`aux_row.py`).

Header, little endian: magic (8 bytes), version u32, 4 zero bytes, logits length in bytes u64, room (16 bytes), checksum
i64 of the number that follows and of the logits, 12 zero bytes, number of prompt tokens that P had cached u32.

Checksums of KV (`verify_kv`; the formula is `kv_cache/checksum.py`): P chooses the pages of a room when it first writes
(`choose_pages`): all, or some that D cannot predict. Each job that was written adds its layers to `RoomSums`, from P's
own memory. They cross with Success as `KVSums`; every KV head counts once, however many ranks hold it. D sums the same
pages of its memory and calls `compare` before the scheduler gets SUCCESS. If the request asks for checksums
(`TransferInfo.page_sums`), P sums up all pages, by layer, whatever `verify_kv` is, and D returns both sides' to the
client (`transfer_sums`).

A state row is always verified (`check_state`), since tokens hardly ever show that a state is missing or old: Success
carries P's seal of it, and D requires that it is of this prompt, all of it, and that its own ranks hold the same bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.config.tensor_parallel import kv_heads_per_rank
from chitu.errors import BadFrame, IncompatibleLayout, Integrity
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, HostRows, RowMemory
from chitu.kv_cache.state_row import StateStamp, why_not_cut
from chitu.protocol import (
    KVLayout,
    KVSums,
    RankMemory,
    StateSeal,
    TransferSums,
    TransportSession,
    pack_i32,
    unpack_i32,
)
from chitu.protocol.trace import TracedSums
from chitu.types import Ready, room_text

ADDRESS_LIMIT = 1 << 63
"""Upper bound of addresses, which are handled as int64; no user space address reaches it."""
HEADER = struct.Struct("<8sI4xQ16sq12xI")
MAGIC = b"chituAUX"
VERSION = 3
WINDOW_PAGES = 4
"""Pages that a traced request has checksums of: this many at the start, and at the end, of what P writes."""
SAMPLE_DIVISOR = 16
"""`sample` verifies one in this many pages of a room, chosen at random, and its first and last page."""
MAX_SUMS = 65536
"""Most checksums by layer that P sends for one request; of more pages it sends one each."""


class PagedMemory(Protocol):
    """Addresses of a pool: what `KVPool` (own memory) and `RankMemory` (a peer's) have in common."""

    @property
    def arena_base(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def region_bases(self) -> tuple[int, ...]: ...
    @property
    def page_bytes(self) -> tuple[int, ...]: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def aux_base(self) -> int: ...
    @property
    def aux_row_bytes(self) -> int: ...
    @property
    def num_aux_slots(self) -> int: ...
    @property
    def state_base(self) -> int: ...
    @property
    def state_row_bytes(self) -> int: ...
    @property
    def num_state_slots(self) -> int: ...


class SlotRows(NamedTuple):
    """Rows of one kind in a rank's memory, a slot each."""

    name: str
    base: int
    row_bytes: int
    num_slots: int


def aux_rows_of(memory: PagedMemory) -> SlotRows:
    return SlotRows("aux", memory.aux_base, memory.aux_row_bytes, memory.num_aux_slots)


def state_rows_of(memory: PagedMemory) -> SlotRows:
    return SlotRows("state", memory.state_base, memory.state_row_bytes, memory.num_state_slots)


def rank_memory(pool: PagedMemory, tp_rank: int, sessions: Sequence[TransportSession]) -> RankMemory:
    """Return the record that a peer gets; `sessions` are in order of preference."""
    return RankMemory(
        tp_rank=tp_rank,
        sessions=tuple(sessions),
        arena_base=pool.arena_base,
        arena_bytes=pool.arena_bytes,
        region_bases=tuple(pool.region_bases),
        page_bytes=tuple(pool.page_bytes),
        num_pages=pool.num_pages,
        aux_base=pool.aux_base,
        aux_row_bytes=pool.aux_row_bytes,
        num_aux_slots=pool.num_aux_slots,
        state_base=pool.state_base if pool.num_state_slots else 0,
        state_row_bytes=pool.state_row_bytes,
        num_state_slots=pool.num_state_slots,
    )


def check_compatible(mine: KVLayout, theirs: KVLayout) -> None:
    """Raise IncompatibleLayout, with the fields that differ and both layouts, if they differ in more than TP size."""
    different = mine.mismatches(theirs)
    for heads in () if different else [group.num_kv_heads for group in mine.groups]:
        if theirs.tp_size < 1 or (heads % theirs.tp_size and theirs.tp_size % heads):
            different = [f"tp_size: {heads} KV heads cannot be cut for {theirs.tp_size} ranks"]
    if not different and (why := why_not_cut(theirs.state, theirs.tp_size)):
        different = [f"tp_size: {why}"]
    if different:
        raise IncompatibleLayout(f"KV layouts differ in {'; '.join(different)} (mine {mine}, theirs {theirs})")


def page_bytes_of(theirs: KVLayout, mine: KVLayout, my_page_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of a page, by region, on a compatible peer's rank, which may hold fewer or more KV heads."""
    return tuple(
        nbytes
        // kv_heads_per_rank(region.num_kv_heads, mine.tp_size)
        * kv_heads_per_rank(region.num_kv_heads, theirs.tp_size)
        for region, nbytes in zip(mine.regions, my_page_bytes, strict=True)
    )


def check_rank_memory(
    theirs: RankMemory,
    mine: PagedMemory,
    tp_size: int = 1,
    page_bytes: tuple[int, ...] | None = None,
    state_row_bytes: int | None = None,
) -> None:
    """Validate the addresses of a rank of a compatible peer of `tp_size` ranks. Raises BadFrame with the values.

    `page_bytes`: required size of the peer's pages, by region, and `state_row_bytes` of its state rows; None: the size
    of ours.
    """
    counts = ("num_pages", "num_aux_slots", "num_state_slots")
    for name in ("arena_base", "arena_bytes", "aux_base", "state_base", "tp_rank", *counts):
        value = getattr(theirs, name)
        if not 0 <= value < ADDRESS_LIMIT:
            raise BadFrame(f"{name} is {value}; at least 0 and below 2**63 is expected")
    if theirs.tp_rank >= tp_size:
        raise BadFrame(f"tp_rank is {theirs.tp_rank} with tp_size {tp_size}")
    if theirs.arena_base + theirs.arena_bytes > ADDRESS_LIMIT:
        raise BadFrame(f"an arena of {theirs.arena_bytes} bytes at {theirs.arena_base:#x} ends beyond 2**63")
    if theirs.aux_row_bytes != mine.aux_row_bytes:
        raise BadFrame(f"aux_row_bytes is {theirs.aux_row_bytes} there and {mine.aux_row_bytes} here")
    row_bytes = mine.state_row_bytes if state_row_bytes is None else state_row_bytes
    if theirs.state_row_bytes != row_bytes:
        raise BadFrame(f"state_row_bytes is {theirs.state_row_bytes} there and {row_bytes} here")
    if len(theirs.region_bases) != len(mine.region_bases):
        raise BadFrame(f"{len(theirs.region_bases)} regions there and {len(mine.region_bases)} here")
    wanted = tuple(mine.page_bytes) if page_bytes is None else page_bytes
    if theirs.page_bytes != wanted:
        sizes = f"{_sizes_text(theirs.page_bytes)} there and {_sizes_text(wanted)} here"
        raise BadFrame(f"page_bytes is {sizes}, of {len(theirs.page_bytes)} and {len(wanted)} regions")
    _check_spans(theirs)


def _sizes_text(page_bytes: Sequence[int]) -> str:
    return str(page_bytes[0]) if len(set(page_bytes)) == 1 else str(tuple(page_bytes))


def _check_spans(memory: RankMemory) -> None:
    """Raise BadFrame unless every region and all rows lie inside the arena and no two of them overlap."""
    regions = zip(memory.region_bases, memory.page_bytes, strict=True)
    spans = [(base, memory.num_pages * nbytes, f"region {r}") for r, (base, nbytes) in enumerate(regions)]
    spans.append((memory.aux_base, memory.num_aux_slots * memory.aux_row_bytes, "the aux rows"))
    if memory.num_state_slots:
        spans.append((memory.state_base, memory.num_state_slots * memory.state_row_bytes, "the state rows"))
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


class MetadataBuffers:
    """Free list and headers over `rows`: uint8 `[num_slots, row_bytes]`, writable, row-contiguous, or a `RowMemory`.

    `logits_bytes`: 4 * vocab_size, the part of a row behind the header that the checksum covers.
    """

    def __init__(self, rows: NDArray[np.uint8] | RowMemory, logits_bytes: int) -> None:
        self._rows: RowMemory = HostRows(rows) if isinstance(rows, np.ndarray) else rows
        if not 0 < logits_bytes <= self._rows.row_bytes - AUX_HEADER_BYTES:
            raise ValueError(f"{logits_bytes} bytes of logits do not fit in rows of {self._rows.row_bytes} bytes")
        self._logits_bytes = logits_bytes
        self._free = list(range(self._rows.num_rows - 1, -1, -1))
        self._used = [False] * self._rows.num_rows

    @property
    def num_slots(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_on_device(self) -> bool:
        """Whether sealing and verifying a row waits for a device."""
        return self._rows.is_on_device

    def allocate(self) -> int | None:
        """Return a slot whose row cannot verify before it is sealed or written anew, or None if all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used[slot] = True
        self.clear(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises ValueError for a slot that is not allocated: freeing twice is a bug."""
        self._check(slot)
        if not self._used[slot]:
            raise ValueError(f"aux slot {slot} is free already")
        self._used[slot] = False
        self._free.append(slot)

    def get(self, slot: int) -> NDArray[np.float32]:
        """Return the slot's logits, float32 `[vocab_size]`: a view of the row, or of a copy if it is on a device."""
        self._check(slot)
        return self._rows.read(slot, AUX_HEADER_BYTES, AUX_HEADER_BYTES + self._logits_bytes).view(np.float32)

    def clear(self, slot: int) -> None:
        """Wipe the header: the row cannot verify until it is sealed or written anew."""
        self._check(slot)
        self._rows.write(slot, bytes(AUX_HEADER_BYTES))

    def seal(self, slot: int, room: bytes, cached_tokens: int = 0) -> Ready | None:
        """Write the header, on P, once the logits are in place. The row must not change from then until it is sent.
        Return what sending waits for, unless the row is complete."""
        if len(room) != 16:
            raise ValueError(f"a room of {len(room)} bytes")
        self._check(slot)
        header = HEADER.pack(MAGIC, VERSION, self._logits_bytes, room, 0, cached_tokens)
        return self._rows.seal(slot, header, AUX_HEADER_BYTES + self._logits_bytes)

    def verify(self, slot: int, room: bytes) -> int:
        """Verify a row on D, after P reported it written, and return how many tokens P had cached. Raises Integrity
        naming what differs."""
        self._check(slot)
        return self.judge(slot, room, self._rows.checked(slot, AUX_HEADER_BYTES + self._logits_bytes))

    def judge(self, slot: int, room: bytes, found: bytes) -> int:
        """Do the same with what was found in the row (`CHECKED_BYTES`): reads no row."""
        magic, version, logits_bytes, row_room, checksum, cached_tokens = HEADER.unpack_from(found)
        actual = int.from_bytes(found[AUX_HEADER_BYTES:], "little", signed=True)
        where = f"aux slot {slot} of room {room_text(room)}"
        if magic != MAGIC:
            raise Integrity(f"{where}: no row was written (magic {magic!r}, expected {MAGIC!r})")
        if version != VERSION:
            raise Integrity(f"{where}: version {version}, expected {VERSION}")
        if row_room != room:
            raise Integrity(f"{where}: the row belongs to room {room_text(row_room)}")
        if logits_bytes != self._logits_bytes:
            raise Integrity(f"{where}: {logits_bytes} bytes of logits, expected {self._logits_bytes}")
        if actual != checksum:
            raise Integrity(f"{where}: the checksum of the logits is {actual}, the header has {checksum}")
        return int(cached_tokens)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self._used):
            raise ValueError(f"aux slot {slot} of {len(self._used)}")


Int64s = NDArray[np.int64]
VerifyKV = Literal["off", "sample", "all"]


_random = secrets.SystemRandom()


class PageSums(Protocol):
    """Checksums of pages of this instance: of one rank, or (`TPPageSums`) of all ranks, added up."""

    def sums(self, layers: range, pages: Sequence[int]) -> Int64s:
        """Return one checksum per page, over K and V of these consecutive layers. Blocks. Raises TransferFailed if a
        rank does not answer."""
        ...


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


def check_state(sent: StateSeal | None, expected: StateStamp, found: StateSeal, line_copies: int = 1) -> None:
    """Verify a state row on D. `sent`: P's seal; `expected`: of the prompt; `found`: of D's own rows, which P has
    written, where every line counts `line_copies` times. Raises Integrity naming what differs."""
    if sent is None:
        raise Integrity("P sent no seal of the state")
    if sent.num_tokens != expected.num_tokens:
        raise Integrity(f"the state has taken in {sent.num_tokens} tokens, the prompt has {expected.num_tokens}")
    if sent.digest != expected.digest:
        raise Integrity(f"the state is of other tokens (digest {sent.digest:#010x}, not {expected.digest:#010x})")
    if (sent.sum * line_copies - found.sum) % (1 << 64):
        raise Integrity(f"checksum of the state is {found.sum:#x}, P has {sent.sum:#x}, counted {line_copies} times")
