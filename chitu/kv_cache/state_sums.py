"""The checksum of a state row: one formula for host memory and for a device, and for any number of ranks.

A row's checksum is the sum, modulo 2**64, over the tensors and the indices (*lines*) of their dimension 0 of

    salt[line] * sum over j of unit[j] * weight[j]

where `unit` are the signed integers of 4 bytes (2 or 1 if a line is no multiple) of a line, and the weights are fixed
odd random numbers. Lines are counted as in the whole model, so the ranks of P and those of D, which may hold other
lines, have the same total; where ranks of D hold copies, D's total counts every line `line_copies` times. It detects
every change within a unit, and misses one in 2**32 of others: lines, blocks or tensors that changed places, zeros, the
state of another request. What it was computed of is in the row's stamp.

Called by transfer threads and by D's verifying thread, never by a step thread.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from chitu.kv_cache.checksum import CHUNK_BYTES, odd_numbers
from chitu.kv_cache.state_row import STAMP_BYTES, StatePart, StateRow, blocks_of, line_copies, read_stamp
from chitu.protocol import KVLayout, StateSeal

if TYPE_CHECKING:
    from chitu.kv_cache.pool import KVPool

Int64s = NDArray[np.int64]

UNITS: dict[int, np.dtype[np.signedinteger]] = {size: np.dtype(f"i{size}") for size in (4, 2, 1)}


class StateSeals(Protocol):
    """Seals of the state rows of this instance: of one rank, or (`TPStateSeals`) of all ranks together."""

    def seal(self, slot: int) -> StateSeal:
        """Return the stamp and the checksum of a row. Blocks. Raises TransferFailed if a rank does not answer, or if
        the ranks' rows have taken in different tokens."""
        ...


def unit_bytes_of(part: StatePart) -> int:
    return next(size for size in UNITS if part.line_bytes % size == 0)


def state_weights(layout: KVLayout, tp_rank: int, counts_copies: bool = True) -> list[tuple[Int64s, Int64s]]:
    """Return `(weight, salt)` of each tensor of a rank's row: of the units of a line, and of its own lines.
    `counts_copies`: on a D, where the sum over all ranks counts every line `line_copies` times; False on a P: only the
    first rank that holds a line counts it."""
    found, size = [], layout.tp_size
    for index, part in enumerate(StateRow.of(layout).parts):
        salts, own = odd_numbers(5 + index, part.tensor.shape[0]), []
        for block in blocks_of(part.tensor):
            lines, holders = block.held_by(size, tp_rank), block.holders(size)
            times = line_copies(layout) // holders if counts_copies else int(tp_rank % holders == 0)
            own.append(salts[lines.start : lines.stop] * np.int64(times))
        found.append((odd_numbers(4, part.line_bytes // unit_bytes_of(part)), np.concatenate(own)))
    return found


class HostStateSeals:
    """Seals of one rank's rows in this process's own memory, which must outlive this object. Any thread."""

    def __init__(
        self, layout: KVLayout, tp_rank: int, state_base: int, num_slots: int, counts_copies: bool = True
    ) -> None:
        """`counts_copies`: as for `state_weights`."""
        row = StateRow.of(layout)
        memory = (ctypes.c_uint8 * (num_slots * row.row_bytes)).from_address(state_base)
        self._rows = np.ctypeslib.as_array(memory).reshape(num_slots, row.row_bytes)
        self._parts = row.parts
        self._weights = state_weights(layout, tp_rank, counts_copies)

    def seal(self, slot: int) -> StateSeal:
        row, total = self._rows[slot], 0
        for part, (weight_U, salt_L) in zip(self._parts, self._weights, strict=True):
            units = row[part.offset : part.offset + part.nbytes].view(UNITS[unit_bytes_of(part)])
            units_LU = units.reshape(part.shape[0], len(weight_U))
            step = max(1, CHUNK_BYTES // (8 * len(weight_U)))
            for start in range(0, part.shape[0], step):
                chunk = slice(start, start + step)
                lines_C = np.einsum("lu,u->l", units_LU[chunk].astype(np.int64), weight_U)
                total += int(lines_C @ salt_L[chunk])
        return sealed(row[:STAMP_BYTES].tobytes(), total)


def sealed(header: bytes, total: int) -> StateSeal:
    """Return the seal of a row with these first bytes. `total`: its checksum, not reduced."""
    stamp = read_stamp(header)
    return StateSeal(stamp.num_tokens, stamp.digest, reduced(total))


def reduced(total: int) -> int:
    """Return the number modulo 2**64 as an int64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def state_seals_of(pool: KVPool, tp_rank: int, counts_copies: bool = True) -> StateSeals | None:
    """Return the seals of a rank's pool, computed where its memory is; None without state. `counts_copies`: as for
    `state_weights`."""
    if not pool.num_state_slots:
        return None
    if pool.device.type == "cpu":
        return HostStateSeals(pool.layout, tp_rank, pool.state_base, pool.num_state_slots, counts_copies)
    from chitu.kv_cache.device_checksum import DeviceStateSeals

    return DeviceStateSeals(pool, tp_rank, counts_copies)
