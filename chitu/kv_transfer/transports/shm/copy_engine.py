"""Copies between addresses of this process with the GIL released and few calls. Used by `shm` and by `staged`.

A call that releases the GIL may wait a whole switch interval (5 ms) to get it back while another thread runs Python:
200 single `memmove` of 16 KiB took 1.0 s beside a busy thread, and 6 ms as one vectored call. So runs below
`LARGE_RUN_BYTES` go out in batches of 1024 through `process_vm_writev` on the own process: a vectored copy that needs
no privilege and answers EFAULT where a `memmove` would crash. It reaches 0.65 to 1.0 of memcpy at 16 KiB; from 1 MiB a
run is worth its own `memmove` (1.0 of memcpy; the vectored call 0.8).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

LARGE_RUN_BYTES = 1 << 20
FEW_RUNS = 2
"""Up to this many runs are copied one by one, whatever their size."""
IOV_MAX = 1024
"""Most entries that the kernel takes per call; 1024 runs below 1 MiB also stay below its limit of 2 GiB per call."""


class CopyFault(OSError):
    """An address of the list is not mapped, or the copy stopped half way."""


class CopyTimeout(Exception):
    """The deadline passed between two calls; nothing more is copied."""


def _vectored_call() -> Callable[..., int] | None:
    """Return `process_vm_writev`, or None if the C library or a seccomp filter does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.process_vm_writev
    except AttributeError:
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    source, target = np.array([1], np.uint8), np.zeros(1, np.uint8)
    iov = np.array([[source.ctypes.data, 1], [target.ctypes.data, 1]], dtype=np.uint64)
    copied = call(os.getpid(), iov.ctypes.data, 1, iov.ctypes.data + 16, 1, 0)
    return call if copied == 1 and target[0] == 1 else None


class CopyEngine:
    """Stateless after construction; any number of threads may copy at once."""

    def __init__(self) -> None:
        self._vectored = _vectored_call()

    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, deadline_s: float) -> None:
        """Copy `length_N[i]` bytes from `src_N[i]` to `dst_N[i]`, all mapped. `deadline_s`: of `time.monotonic`.

        Raises CopyFault or CopyTimeout; a part of the list may have been copied then.
        """
        if self._vectored is None or len(length_N) <= FEW_RUNS:
            _copy_each(src_N, dst_N, length_N, deadline_s)
            return
        large_N = length_N >= LARGE_RUN_BYTES
        if large_N.any():
            _copy_each(src_N[large_N], dst_N[large_N], length_N[large_N], deadline_s)
        small_N = ~large_N & (length_N > 0)
        length_M = length_N[small_N]
        local = np.stack((src_N[small_N], length_M), axis=1)
        remote = np.stack((dst_N[small_N], length_M), axis=1)
        for start in range(0, len(length_M), IOV_MAX):
            _check_deadline(deadline_s)
            count = min(IOV_MAX, len(length_M) - start)
            copied = self._vectored(
                os.getpid(), local.ctypes.data + 16 * start, count, remote.ctypes.data + 16 * start, count, 0
            )
            wanted = int(length_M[start : start + count].sum())
            if copied != wanted:
                code = ctypes.get_errno() if copied < 0 else errno.EFAULT
                raise CopyFault(code, f"copied {copied} of {wanted} bytes in {count} runs: {os.strerror(code)}")


def _copy_each(src_N: Int64s, dst_N: Int64s, length_N: Int64s, deadline_s: float) -> None:
    for src, dst, length in zip(src_N.tolist(), dst_N.tolist(), length_N.tolist(), strict=True):
        _check_deadline(deadline_s)
        ctypes.memmove(dst, src, length)


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise CopyTimeout
