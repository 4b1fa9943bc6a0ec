"""Shape of a state row: the recurrent state of one request on one rank, as a stamp and the tensors of
`KVLayout.state`. For code that must not import torch.

A state is all that a recurrent layer keeps of a sequence: it has one size whatever the length, and no part of it can be
used alone. The stamp says of which tokens it is the state. The executor writes it behind the chunk that made the state,
in the order of the device, so a row that is read too early, too late or for another request shows that itself.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank
from chitu.errors import ConfigError, Internal
from chitu.protocol import ITEM_BYTES, KVLayout, StateTensor

STAMP_BYTES = 64
"""Size of the stamp before the tensors: one cache line."""
STATE_ALIGNMENT_BYTES = 64
"""Every tensor of a row, and every row, begins at a multiple of this."""
_STAMP = struct.Struct("<8sII")
_MAGIC = b"chituSTA"


class StateStamp(NamedTuple):
    """Which tokens a state has taken in."""

    num_tokens: int
    digest: int
    """CRC-32 of their ids, int32 LE (`digest_of`)."""

    def pack(self) -> bytes:
        return _STAMP.pack(_MAGIC, self.num_tokens, self.digest)


NO_STAMP = StateStamp(0, 0)
"""Stamp of a state that has taken in nothing: zeros."""


def digest_of(token_ids: bytes, before: int = 0) -> int:
    """Return the digest of tokens (int32 LE) that follow those of the digest `before`."""
    return zlib.crc32(token_ids, before)


def stamp_of(token_ids: bytes, num_tokens: int) -> StateStamp:
    """Return the stamp of a state that has taken in the first `num_tokens` of these (int32 LE)."""
    return StateStamp(num_tokens, digest_of(token_ids[: 4 * num_tokens]))


def read_stamp(header: bytes) -> StateStamp:
    """Return the stamp in the first bytes of a row; `NO_STAMP` if there is none."""
    magic, num_tokens, digest = _STAMP.unpack_from(header)
    return StateStamp(num_tokens, digest) if magic == _MAGIC else NO_STAMP


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a row."""

    tensor: StateTensor
    shape: tuple[int, ...]
    """Shape of what this rank holds."""
    offset: int
    """Place in the row, in bytes."""
    nbytes: int

    @property
    def line_bytes(self) -> int:
        """Bytes of one index of dimension 0, which TP cuts."""
        return self.nbytes // self.shape[0]


@dataclass(frozen=True, slots=True)
class StateRow:
    """The row of a rank of a layout."""

    parts: tuple[StatePart, ...]
    row_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> StateRow:
        """Return the row of every rank of this layout; of 0 bytes without state. Raises ConfigError if the ranks
        cannot cut it."""
        parts, offset = [], STAMP_BYTES
        if why := why_not_cut(layout.state, layout.tp_size):
            raise ConfigError(f"tp_size: {why}")
        for tensor in layout.state:
            shape = shape_of(tensor, layout.tp_size)
            nbytes = math.prod(shape) * ITEM_BYTES[tensor.dtype]
            parts.append(StatePart(tensor, shape, offset, nbytes))
            offset += -(-nbytes // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES
        return cls(tuple(parts), offset if parts else 0)


class StateBlock(NamedTuple):
    """A part of dimension 0 of a tensor that is cut for itself."""

    start: int
    num_heads: int
    """Parts that a rank holds whole: heads, or single lines."""
    lines: int
    """Lines of a head."""

    def held_by(self, tp_size: int, tp_rank: int) -> range:
        """Return the indices of dimension 0 that a rank holds."""
        own = kv_heads_of(self.num_heads, tp_size, tp_rank)
        return range(self.start + own.start * self.lines, self.start + own.stop * self.lines)

    def holders(self, tp_size: int) -> int:
        """Return how many ranks hold the same head."""
        return max(1, tp_size // self.num_heads)


def blocks_of(tensor: StateTensor) -> list[StateBlock]:
    """Return the blocks of dimension 0, in the order in which they lie."""
    found, start, sizes = [], 0, tensor.cut or tensor.shape[:1]
    for size, num_heads in zip(sizes, tensor.heads or sizes, strict=True):
        found.append(StateBlock(start, num_heads, size // num_heads))
        start += size
    return found


def lines_of(tensor: StateTensor, tp_size: int, tp_rank: int) -> list[range]:
    """Return the indices of dimension 0 that a rank holds, a range for each block, in the order in which they lie."""
    return [block.held_by(tp_size, tp_rank) for block in blocks_of(tensor)]


def shape_of(tensor: StateTensor, tp_size: int) -> tuple[int, ...]:
    """Return the shape of what every rank holds."""
    lines = sum(block.lines * kv_heads_per_rank(block.num_heads, tp_size) for block in blocks_of(tensor))
    return lines, *tensor.shape[1:]


def state_bytes_of(layout: KVLayout) -> int:
    """Return the bytes of a request's state over all ranks, without padding. Copies count once for each rank."""
    return sum(part.nbytes for part in StateRow.of(layout).parts) * layout.tp_size


def line_copies(layout: KVLayout) -> int:
    """Return how often the sum over all ranks of a D counts each line of a state, as `head_copies` of pages."""
    blocks = (block for tensor in layout.state for block in blocks_of(tensor))
    return math.lcm(*(block.holders(layout.tp_size) for block in blocks))


def why_not_cut(state: tuple[StateTensor, ...], tp_size: int) -> str:
    """Return why `tp_size` ranks cannot share this state, as a clause; empty if they can. The heads of each block are
    shared out evenly, or copied to as many ranks each; lines without heads are never copied."""
    for tensor in state:
        counts = [block.num_heads for block in blocks_of(tensor)]
        if any(count % tp_size and (not tensor.heads or tp_size % count) for count in counts):
            words = " + ".join(map(str, counts)) + (" heads" if tensor.heads else " rows")
            return f"{words} of the state {tensor.name!r} of layer {tensor.layer} cannot be cut for {tp_size} ranks"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of a prompt's state at a page border, from which a later prompt may go on. Compared by identity."""

    row: int
    key: bytes
    """Key of the page that ends at the border (`prefix_index.py`)."""
    stamp: StateStamp
    """Tokens that the state has taken in."""


class StateSlots:
    """Which state rows of an instance are free, in use, or hold snapshots: these are all rows, always. Without state
    there are none. Step thread only.

    A snapshot is *pending* until the step that copies it is read, and is not found before. A request takes the row of
    the least recently used one if no other is free, so a snapshot never costs a request its row: `num_free` counts it.
    A snapshot that the plan being made copies from is *pinned* until the plan is launched: an admission of that plan
    would zero the row before it is copied.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()
        self._snapshots: dict[int, Snapshot] = {}
        """By row, the least recently used first."""
        self._by_key: dict[bytes, Snapshot] = {}
        """Those that are not pending."""
        self._pinned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of rows that `take` can give."""
        return len(self._free) + len(self._snapshots) - len(self._pinned)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def take(self) -> int:
        """Return a free slot. The caller has just checked that there is one; else raise Internal."""
        slot = self._free.pop() if self._free else self._evict(pending=True)
        if slot < 0:
            raise Internal("a state slot was counted as free but none is")
        self._used.add(slot)
        return slot

    def take_after(self, key: bytes, num_wanted: int) -> tuple[int, int]:
        """Return a free slot for a request that goes on from the snapshot with this key, and the row to copy it from.
        That is -1 if the slot is the snapshot's own, since `num_wanted` slots, this one among them, are all that are
        free."""
        snapshot = self._by_key[key]
        if snapshot.row not in self._pinned and self.num_free <= num_wanted:
            self._forget(snapshot)
            self._used.add(snapshot.row)
            return snapshot.row, -1
        self._snapshots[snapshot.row] = self._snapshots.pop(snapshot.row)
        self._pinned.add(snapshot.row)
        return self.take(), snapshot.row

    def unpin(self) -> None:
        """Unpin all snapshots: the plan that copies from them is launched."""
        self._pinned.clear()

    def free(self, slot: int) -> None:
        """Give a slot back. Raises Internal for a slot that is not in use."""
        if slot not in self._used:
            raise Internal(f"state slot {slot} is free already")
        self._used.remove(slot)
        self._free.append(slot)

    # -------------------------------------------------------------------------------------------------------- snapshots

    def find(self, key: bytes, num_tokens: int, token_ids: bytes) -> bool:
        """Return whether a snapshot with this key can be used, by its stamp too, for a prompt that begins with
        `num_tokens` of `token_ids` (int32 LE)."""
        snapshot = self._by_key.get(key)
        return snapshot is not None and snapshot.stamp == stamp_of(token_ids, num_tokens)

    def holds(self, key: bytes) -> bool:
        """Return whether there is a snapshot with this key, which is not pending."""
        return key in self._by_key

    def add(self, key: bytes, stamp: StateStamp) -> Snapshot | None:
        """Return a new pending snapshot, in a free row or in that of the least recently used one. Return None if there
        is no such row, or a snapshot with this key."""
        if key in self._by_key:
            return None
        row = self._free.pop() if self._free else self._evict()
        if row < 0:
            return None
        snapshot = self._snapshots[row] = Snapshot(row, key, stamp)
        return snapshot

    def settle(self, snapshot: Snapshot) -> None:
        """Let a snapshot be found: the step that copied it is read, and was sound. One that has been evicted stays so;
        of two with one key the first is kept."""
        if self._snapshots.get(snapshot.row) is not snapshot:
            return
        if self._by_key.setdefault(snapshot.key, snapshot) is not snapshot:
            self.drop(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Free the row of a snapshot, unless it has been evicted."""
        if self._snapshots.get(snapshot.row) is snapshot:
            self._forget(snapshot)
            self._free.append(snapshot.row)

    def drop_all(self, only_pending: bool = False) -> None:
        """Drop all snapshots, or those that are pending. No plan is being made that copies from one."""
        for snapshot in list(self._snapshots.values()):
            if not only_pending or self._by_key.get(snapshot.key) is not snapshot:
                self.drop(snapshot)

    def check_idle(self) -> None:
        """Raise Internal unless every slot is free or holds a snapshot: called when no request is left."""
        num_free, num_kept = len(self._free), len(self._snapshots)
        is_whole = len({*self._free, *self._snapshots}) == num_free + num_kept == self.num_slots
        if self._used or self._pinned or not is_whole or len(self._by_key) != num_kept:
            raise Internal(
                f"{len(self._used)} state rows in use, {num_free} free and {num_kept} snapshots of {self.num_slots}"
            )

    def _evict(self, pending: bool = False) -> int:
        """Evict the least recently used snapshot that is not pinned. With `pending` evict a pending one if there is no
        other. Return its row; -1 if there is none."""
        for is_pending in (False, True) if pending else (False,):
            for row, snapshot in self._snapshots.items():
                if row not in self._pinned and (self._by_key.get(snapshot.key) is not snapshot) == is_pending:
                    self._forget(snapshot)
                    return row
        return -1

    def _forget(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.row]
        if self._by_key.get(snapshot.key) is snapshot:
            del self._by_key[snapshot.key]
