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
            shape = (tensor.shape[0] // layout.tp_size, *tensor.shape[1:])
            nbytes = math.prod(shape) * ITEM_BYTES[tensor.dtype]
            parts.append(StatePart(tensor, shape, offset, nbytes))
            offset += -(-nbytes // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES
        return cls(tuple(parts), offset if parts else 0)


def blocks_of(tensor: StateTensor) -> tuple[int, ...]:
    """Return the sizes of the blocks of dimension 0."""
    return tensor.cut or tensor.shape[:1]


def lines_of(tensor: StateTensor, tp_size: int, tp_rank: int) -> list[range]:
    """Return the indices of dimension 0 that a rank holds, a range for each block, in the order in which they lie."""
    found, start = [], 0
    for size in blocks_of(tensor):
        share = size // tp_size
        found.append(range(start + tp_rank * share, start + (tp_rank + 1) * share))
        start += size
    return found


def why_not_cut(state: tuple[StateTensor, ...], tp_size: int) -> str:
    """Return why `tp_size` ranks cannot share this state, as a clause; empty if they can. Each block of dimension 0 is
    cut evenly."""
    for tensor in state:
        if any(size % tp_size for size in blocks_of(tensor)):
            blocks = " + ".join(map(str, blocks_of(tensor)))
            return (
                f"{blocks} rows of the state {tensor.name!r} of layer {tensor.layer} cannot be cut for {tp_size} ranks"
            )
    return ""


class StateSlots:
    """Which state rows of an instance are free: `num_free` and those in use are `num_slots`, always. Without state
    there are none. Step thread only."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a free slot. The caller has just checked that there is one; else raise Internal."""
        if not self._free:
            raise Internal("a state slot was counted as free but none is")
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises Internal for a slot that is not in use."""
        if slot not in self._used:
            raise Internal(f"state slot {slot} is free already")
        self._used.remove(slot)
        self._free.append(slot)

    def check_idle(self) -> None:
        """Raise Internal unless every slot is free: called when no request is left."""
        if self._used or len(self._free) != self.num_slots:
            raise Internal(f"{len(self._used)} state rows in use and {len(self._free)} free of {self.num_slots}")
