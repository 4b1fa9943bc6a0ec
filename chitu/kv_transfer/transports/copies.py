"""Lists of copies as columns of numbers: last check before a transport writes, and back to plain sequences. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from chitu.kv_transfer.transports.transport import Int64s, WriteError

SHORT_LIST = 8
"""Longest list for which a loop is faster than numpy (1 against 8 us)."""


def first_outside(address_N: Int64s, length_N: Int64s, base: int, nbytes: int) -> int:
    """Return the index of the first span that is not inside `[base, base + nbytes)`, or -1."""
    if len(address_N) <= SHORT_LIST:
        for i, (address, length) in enumerate(zip(address_N.tolist(), length_N.tolist(), strict=True)):
            if not (address >= base and 0 <= length <= base + nbytes - address):
                return i
        return -1
    start_N = address_N - base
    bad_N = (start_N < 0) | (length_N < 0) | (length_N > nbytes) | (start_N > nbytes - length_N)
    return int(np.argmax(bad_N)) if bad_N.any() else -1


def require_inside(
    transport: str,
    columns: tuple[Int64s, Int64s, Int64s],
    arena: tuple[int, int],
    registered: Iterable[tuple[int, int]],
) -> None:
    """Check copies a last time before a transport writes. Raises WriteError, settled, if one of the copies (sources,
    destinations, lengths) leaves the peer's arena or our registered ranges, given as base and bytes."""
    src_N, dst_N, length_N = columns
    base, nbytes = arena
    outside = first_outside(dst_N, length_N, base, nbytes)
    if outside >= 0:
        raise WriteError(
            f"{transport}: copy {outside} ({length_N[outside]} bytes at {dst_N[outside]:#x}) is outside the peer's"
            f" arena ({nbytes} bytes at {base:#x})",
            settled=True,
        )
    if not any(first_outside(src_N, length_N, start, size) < 0 for start, size in registered):
        raise WriteError(f"{transport}: a source lies outside the registered memory", settled=True)


def as_array(values: Int64s) -> array[int]:
    """Return int64 values as a compact sequence of Python ints that numpy reads back without a copy."""
    packed: array[int] = array("q")
    packed.frombytes(values.tobytes())
    return packed
