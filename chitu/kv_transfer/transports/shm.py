"""Shared memory of one host: P copies into D's mapped arena, or into its segments in pinned host memory.

Copies between addresses of this process with the GIL released and few calls. Used by `shm` and by `staged`.

A call that releases the GIL may wait a whole switch interval (5 ms) to get it back while another thread runs Python:
200 single `memmove` of 16 KiB took 1.0 s beside a busy thread, and 6 ms as one vectored call. So runs below
`LARGE_RUN_BYTES` go out in batches of 1024 through `process_vm_writev` on the own process: a vectored copy that needs
no privilege and answers EFAULT where a `memmove` would crash. It reaches 0.65 to 1.0 of memcpy at 16 KiB; from 1 MiB a
run is worth its own `memmove` (1.0 of memcpy; the vectored call 0.8).

Transport `shm`: the peer is a process of the same host and user; its arena is an anonymous shared file (memfd).

A session names that file: host id, pid, start time of the process, fd and inode. `connect` opens it through
`/proc/<pid>/fd/<fd>` (which needs the same user, no ptrace rights), checks that it is that very file, and maps it; a
write is then a copy in our own address space. It is over when `write` returns, so nothing can land later and `fence`
is always True; bytes written after the peer died go to a file that no process reads. Nothing is ever left in /dev/shm.

Transport `shm` for pools in GPU memory: through host memory, for GPUs of one host that cannot map each other's
memory.

D has its segments in an anonymous shared file (`segments.py`) and scatters from there. P maps that file and
pins its mapping too, and its GPU gathers straight into D's segment: one launch and one transfer over PCIe, no segment
of its own and no copy by the host. Only segments can be written, pages and logits rows cannot (`reaches_pages`). A
write is over when `write` returns, so `fence` is always True. A mapping stays pinned as long as it exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.transports.cuda_ipc import PinDriver
from chitu.kv_transfer.transports.mapped import (
    MEMORY,
    NOTHING,
    STAGING,
    LaunchingTransport,
    MappedPeer,
    MappedTransport,
    PeerProcess,
    mapping_of,
    writable_arenas,
)
from chitu.kv_transfer.transports.transport import CopyList, LaunchedCopies, PeerHandle, WriteError
from chitu.protocol import RankMemory, TransportSession

Int64s = NDArray[np.int64]

LARGE_RUN_BYTES = 1 << 20
FEW_RUNS = 2
"""Up to this many runs are copied one by one, whatever their size."""
IOV_MAX = 1024
"""Most entries that the kernel takes per call; 1024 runs below 1 MiB also stay below its limit of 2 GiB per call."""
NAME = "shm"
MEMFD_LINK = "/memfd:"
"""Prefix with which /proc shows an anonymous shared file."""


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


class SharedFile(NamedTuple):
    """A registered allocation; `fd` < 0: it is not a shared file and can only be a source."""

    base: int
    nbytes: int
    fd: int
    offset: int

    def attributes(self) -> dict[str, str]:
        """Return the session attributes that describe it."""
        return {"fd": str(self.fd), "inode": str(os.fstat(self.fd).st_ino), "offset": str(self.offset)}


class ShmTransport(MappedTransport):
    """Implements `kv_transfer.transports.transport.Transport`."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._engine = CopyEngine()
        self._ranges: list[SharedFile] = []

    def register(self, base: int, nbytes: int) -> None:
        if any((known.base, known.nbytes) == (base, nbytes) for known in self._ranges):
            return
        self._ranges.append(find_range(base, nbytes))

    def local_session(self) -> TransportSession:
        for known in self._ranges:
            if known.fd >= 0:
                return self.session_of(known.fd, known.attributes())
        raise TransferFailed("shm: no registered memory is a shared file, so no process can map it")

    def can_reach(self, session: TransportSession) -> bool:
        return self.is_here(session) and MEMORY not in session.attributes

    def connect(self, memory: RankMemory, session: TransportSession) -> MappedPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"shm: {session.session_id} is not a process of this host and user")
        peer = open_peer(session, memory.arena_base, memory.arena_bytes)
        self._peers.add(peer)
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        assert isinstance(peer, MappedPeer)
        deadline_s = time.monotonic() + timeout_s
        columns = self.placed(peer, copies, [(known.base, known.nbytes) for known in self._ranges])
        try:
            with self._peers.writing(peer):
                self._engine.copy(*columns, deadline_s)
        except CopyFault as error:
            raise WriteError(f"shm: writing to {peer.session_id}: {error}", fenced=True) from error
        except CopyTimeout as error:
            raise WriteError(f"shm: writing to {peer.session_id} took over {timeout_s} s", fenced=True) from error

    def close(self) -> None:
        super().close()
        for known in self._ranges:
            if known.fd >= 0:
                os.close(known.fd)
        self._ranges.clear()


def open_peer(session: TransportSession, arena_base: int, arena_bytes: int) -> MappedPeer:
    """Map the file that a session of this host describes. Raises TransferFailed if the file is not as described."""
    try:
        numbers = [int(session.attributes[name]) for name in ("pid", "fd", "inode", "offset")]
    except (KeyError, ValueError) as error:
        raise TransferFailed(f"shm: malformed session {session.session_id}: {error}") from error
    if min(numbers) < 0:
        raise TransferFailed(f"shm: session {session.session_id} has a negative number")
    try:
        return _map_file(session, arena_base, arena_bytes, *numbers)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferFailed(f"shm: cannot map the memory of {session.session_id}: {error}") from error


def _map_file(
    session: TransportSession, arena_base: int, arena_bytes: int, pid: int, fd: int, inode: int, offset: int
) -> MappedPeer:
    with PeerProcess.entered(pid, session.attributes.get("start_time", "")) as (process, folder):
        file = os.open(f"fd/{fd}", os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(file)
            if not os.readlink(f"fd/{fd}", dir_fd=folder).startswith(MEMFD_LINK):
                # Without this check a registration could make us write into any file that the named process has open.
                raise TransferFailed(f"shm: fd {fd} of process {pid} is no anonymous shared file")
            if found.st_ino != inode:
                raise TransferFailed(f"shm: fd {fd} of process {pid} is inode {found.st_ino}, announced was {inode}")
            if offset + arena_bytes > found.st_size:
                raise TransferFailed(
                    f"shm: the file of {session.session_id} has {found.st_size} bytes, too few for an arena of"
                    f" {arena_bytes} bytes at offset {offset}"
                )
            mapping = mmap.mmap(file, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
    local_base = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset
    return MappedPeer(session.session_id, arena_base, arena_bytes, process, local_base, mapping.close)


def find_range(base: int, nbytes: int) -> SharedFile:
    """Return the allocation `[base, base + nbytes)`, with our own fd of its file if it lies in a shared file."""
    if nbytes <= 0:
        raise TransferFailed(f"shm: cannot register {nbytes} bytes")
    found = mapping_of(base, nbytes)
    if found is None:
        raise TransferFailed(f"shm: {nbytes} bytes at {base:#x} are not host memory of this process")
    if not found.is_shared:
        return SharedFile(base, nbytes, -1, 0)
    return SharedFile(base, nbytes, _own_fd(found.device, found.inode), found.offset)


def _own_fd(device: str, inode: int) -> int:
    """Return a duplicate of this file's fd, so that a session stays valid if the allocator closes its own, or -1."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            found = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if (status.st_ino, found) == (inode, device):
                return os.dup(int(name))
    return -1


class PinnedShmTransport(LaunchingTransport):
    """Implements `Transport` and `OrderedTransport` of `kv_transfer.transports.transport`."""

    def __init__(self, driver: PinDriver, copier: LaunchedCopies) -> None:
        super().__init__(NAME, copier)
        self._driver = driver
        self._files: list[SharedFile] = []

    def register(self, base: int, nbytes: int) -> None:
        """Register device memory as a source, or a shared file as memory that peers may write."""
        if any((known.base, known.nbytes) == (base, nbytes) for known in self._files):
            return
        if (base, nbytes) in self._sources:
            return
        if nbytes > 0 and self._driver.is_device_memory(base, nbytes):
            self._sources.append((base, nbytes))
            return
        found = find_range(base, nbytes)
        if found.fd < 0:
            raise TransferFailed(f"shm: {nbytes} bytes at {base:#x} are neither device memory nor a shared file")
        self._files.append(found)

    def local_session(self) -> TransportSession:
        if not self._files:
            return self.session_of("", {MEMORY: NOTHING})
        return self.session_of(self._files[0].fd, {**self._files[0].attributes(), MEMORY: STAGING})

    def can_reach(self, session: TransportSession) -> bool:
        return self.is_here(session) and session.attributes.get(MEMORY) == STAGING

    def connect(self, memory: RankMemory, session: TransportSession) -> MappedPeer:
        if not self.can_reach(session):
            raise TransferFailed(f"shm: {session.session_id} has no staging memory for a process of this host and user")
        arenas = writable_arenas(memory, session)
        if not arenas:
            raise TransferFailed(f"shm: {session.session_id} announced no staging memory")
        mapped = open_peer(session, *arenas[0])
        try:
            device_base = self._driver.pin(mapped.local_base, mapped.arena_bytes)
        except ChituError:
            mapped.close()
            raise
        unmap = partial(self._unpin, mapped)
        peer = replace(mapped, local_base=device_base, unmap=unmap, reaches_pages=False, reaches_host_segments=True)
        self._peers.add(peer)
        return peer

    def close(self) -> None:
        super().close()
        for known in self._files:
            os.close(known.fd)
        self._files.clear()

    def _unpin(self, mapped: MappedPeer) -> None:
        with contextlib.suppress(TransferFailed):  # a device that failed unpins nothing; the mapping goes in any case
            self._driver.unpin(mapped.local_base)
        mapped.unmap()
