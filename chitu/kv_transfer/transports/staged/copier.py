"""Gather and scatter: many pieces of memory of this process copied at once, with the GIL released.

Called by P's transfer threads (pages into a segment) and by D's scattering thread (a segment into pages), several at a
time. `HostCopier` is for pools in host memory. `DeviceCopier` is for pools of a GPU: one launch copies all pieces and
waits on the device for what it reads. Both return when the bytes are in place, so a segment may be given away then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.shm.copy_engine import CopyEngine, CopyFault
from chitu.kv_transfer.transports.transport import CopyList, Int64s, LaunchedCopies
from chitu.types import Ready


class PieceCopier(Protocol):
    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        """Copy once all of `after` have passed; block until the bytes are in place. Addresses are of this process, host
        or device, and were range-checked by the caller. Raises TransferFailed; a part may have been copied then."""
        ...


class Window(Protocol):
    """Host memory that the device can reach (`host_area.HostArena`)."""

    @property
    def base(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def device_base(self) -> int:
        """Return the device address of `base`. Pins the memory at the first call."""
        ...


class HostCopier:
    """Implements `PieceCopier` for host memory: few vectored calls, see `shm/copy_engine.py`."""

    def __init__(self) -> None:
        self._engine = CopyEngine()

    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        for ready in after:
            ready.synchronize()
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        try:
            self._engine.copy(src_N, dst_N, length_N, math.inf)
        except CopyFault as error:
            raise TransferFailed(f"copying {copies.nbytes} bytes in {len(length_N)} pieces: {error}") from error


class DeviceCopier:
    """Implements `PieceCopier` for a GPU. `windows`: host memory that segments lie in, if any; addresses inside are
    translated to device addresses."""

    def __init__(self, blocks: LaunchedCopies, windows: Sequence[Window] = ()) -> None:
        self._blocks = blocks
        self._windows = tuple(windows)

    def copy(self, copies: CopyList, after: Sequence[Ready] = ()) -> None:
        src_N, dst_N, length_N = (np.array(column, dtype=np.int64) for column in copies)
        try:
            self._blocks.copy(self._for_device(src_N), self._for_device(dst_N), length_N, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise TransferFailed(f"copying {copies.nbytes} bytes in {len(length_N)} pieces: {error}") from error

    def _for_device(self, address_N: Int64s) -> Int64s:
        for window in self._windows:
            inside_N = (address_N >= window.base) & (address_N < window.base + window.nbytes)
            if inside_N.any():
                address_N = np.where(inside_N, address_N - window.base + window.device_base(), address_N)
        return address_N
