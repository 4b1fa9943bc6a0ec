"""Transport `shm`: the peer is a process of the same host and user; its arena is an anonymous shared file (memfd).

A session names that file: host id, pid, start time of the process, fd and inode. `connect` opens it through
`/proc/<pid>/fd/<fd>` (which needs the same user, no ptrace rights), checks that it is that very file, and maps it; a
write is then a copy in our own address space. It is over when `write` returns, so nothing can land later and `settle`
is always True; bytes written after the peer died go to a file that no process reads. Nothing is ever left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from typing import NamedTuple

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.arenas import MEMORY
from chitu.kv_transfer.transports.host_memory import mapping_of
from chitu.kv_transfer.transports.mapped_peers import MappedPeer, MappedTransport
from chitu.kv_transfer.transports.peer_process import PeerProcess
from chitu.kv_transfer.transports.shm.copy_engine import CopyEngine, CopyFault, CopyTimeout
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, WriteError
from chitu.protocol import RankMemory, TransportSession

NAME = "shm"
MEMFD_LINK = "/memfd:"
"""Prefix with which /proc shows an anonymous shared file."""


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
            raise WriteError(f"shm: writing to {peer.session_id}: {error}", settled=True) from error
        except CopyTimeout as error:
            raise WriteError(f"shm: writing to {peer.session_id} took over {timeout_s} s", settled=True) from error

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
