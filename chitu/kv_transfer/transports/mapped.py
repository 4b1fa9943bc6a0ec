"""What transports share that map a peer's memory and copy the bytes themselves: `shm` and `cuda_ipc`.

Lists of copies as columns of numbers, and their last check before a transport writes (pure). What the kernel reports of
a range of our own memory (/proc/self/maps): host memory or not, and of which file; device memory has no readable
mapping, so it is told apart without asking its driver. The process behind a peer's memory, found by pid and start time
and held by a pidfd, since a pid alone is reused. A write is over when `write` returns, so nothing can land later and
`fence` is always True.

`MappedPeers` has the peers and the writes that run into them. Owned by a transport, any thread; no lock is held while a
write runs or a mapping is removed. Invariant: a mapping lives until its peer was removed and the last write to it has
returned; then the peer is closed, once.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.transport import CopyList, Int64s, LaunchedCopies, PeerHandle, WriteError
from chitu.net.process_deaths import pid_namespace, start_ticks
from chitu.protocol import RankMemory, TransportSession
from chitu.types import Ready

SHORT_LIST = 8
"""Longest list for which a loop is faster than numpy (1 against 8 us)."""
MEMORY = "memory"
"""Attribute of a session that does not reach the pool: it reaches the second allocation only (`STAGING`), or `NOTHING`
(on P, where no peer writes)."""
STAGING = "staging"
NOTHING = "nothing"
APART = "apart"
"""Attribute of a session: base and bytes of the second allocation, if there is one."""


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
    """Check copies a last time before a transport writes. Raises WriteError, fenced, if one of the copies (sources,
    destinations, lengths) leaves the peer's arena or our registered ranges, given as base and bytes."""
    src_N, dst_N, length_N = columns
    base, nbytes = arena
    outside = first_outside(dst_N, length_N, base, nbytes)
    if outside >= 0:
        raise WriteError(
            f"{transport}: copy {outside} ({length_N[outside]} bytes at {dst_N[outside]:#x}) is outside the peer's"
            f" arena ({nbytes} bytes at {base:#x})",
            fenced=True,
        )
    if not any(first_outside(src_N, length_N, start, size) < 0 for start, size in registered):
        raise WriteError(f"{transport}: a source lies outside the registered memory", fenced=True)


def as_array(values: Int64s) -> array[int]:
    """Return int64 values as a compact sequence of Python ints that numpy reads back without a copy."""
    packed: array[int] = array("q")
    packed.frombytes(values.tobytes())
    return packed


Arena = tuple[int, int]
"""Base and bytes of a range."""


def writable_arenas(memory: RankMemory, session: TransportSession) -> tuple[Arena, ...]:
    """Return one or two ranges, or none if the session reaches a second allocation only and the peer has none. Raises
    TransferFailed."""
    pool, apart = (memory.arena_base, memory.arena_bytes), _apart(session)
    if session.attributes.get(MEMORY, "") != "":
        return (apart,) if apart is not None and session.attributes[MEMORY] == STAGING else ()
    return (pool,) if apart is None else (pool, apart)


def _apart(session: TransportSession) -> Arena | None:
    text = session.attributes.get(APART)
    if text is None:
        return None
    try:
        base, nbytes = (int(number) for number in text.split(":"))
    except ValueError as error:
        raise TransferFailed(f"session {session.session_id} has the arena {text[:80]!r}") from error
    if min(base, nbytes) < 0 or base + nbytes >= 1 << 63:
        raise TransferFailed(f"session {session.session_id} has an arena of {nbytes} bytes at {base:#x}")
    return base, nbytes


def arena_of(arenas: tuple[Arena, ...], address: int) -> Arena:
    """Return the arena that holds an address; if none does, the first, for its numbers. A write lies in one arena."""
    for base, nbytes in arenas:
        if base <= address < base + nbytes:
            return base, nbytes
    return arenas[0]


class HostMapping(NamedTuple):
    is_shared: bool
    offset: int
    """Offset of the range's first byte in its file."""
    device: str
    """Device of the file, as `major:minor` in hex."""
    inode: int


def mapping_of(base: int, nbytes: int) -> HostMapping | None:
    """Return the mapping that `[base, base + nbytes)` begins in, or None if not all of it is readable host memory."""
    end = base
    first: HostMapping | None = None
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, offset, device, inode = line.split(None, 5)[:5]
            low, high = (int(text, 16) for text in span.split("-"))
            if not low <= end < high or mode[0] != "r":
                continue
            if first is None:
                first = HostMapping(mode[3] == "s", int(offset, 16) + base - low, device, int(inode))
            end = high
            if end >= base + nbytes:
                return first
    return None


def host_id() -> str:
    """Return an id that is equal for processes that may open each other's memory (same boot, pid namespace and user),
    or an empty string."""
    namespace = pid_namespace()
    return f"{namespace}:{os.geteuid()}" if namespace else ""


def own_start_time() -> str:
    return str(start_ticks(os.getpid()))


@dataclass(frozen=True, slots=True)
class PeerProcess:
    pid: int
    pidfd: int

    @classmethod
    @contextlib.contextmanager
    def entered(cls, pid: int, start_time: str) -> Iterator[tuple[PeerProcess, int]]:
        """Yield the process and a descriptor of its /proc folder, which is closed at the end; an exception closes the
        process too. Raises TransferFailed if another process has the pid by now, OSError if none has it.

        Pidfd and folder stay bound to the process that had the pid before its start time was read. A process has its
        pid from its start on, so it is this one.
        """
        with contextlib.ExitStack() as on_failure:
            pidfd = os.pidfd_open(pid)
            on_failure.callback(os.close, pidfd)
            folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if str(start_ticks(pid)) != start_time:
                    raise TransferFailed(f"pid {pid} belongs to another process now")
                yield cls(pid, pidfd), folder
            finally:
                os.close(folder)
            on_failure.pop_all()

    def is_alive(self) -> bool:
        """Return whether the process runs: a pidfd becomes readable when its process ends, even before it is reaped."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self.pidfd)


@dataclass(slots=True, eq=False)
class MappedPeer:
    """A mapped arena of another process. It is equal to itself only."""

    session_id: str
    arena_base: int
    """Address of the arena in the peer's address space."""
    arena_bytes: int
    process: PeerProcess
    local_base: int
    """Address of the arena for our own copies."""
    unmap: Callable[[], None]
    reaches_pages: bool = True
    """See `transports/transport.py`, also for `reaches_host_segments`."""
    reaches_host_segments: bool = False

    def close(self) -> None:
        self.process.close()
        self.unmap()


class MappedPeers:
    """Mapped peers of one transport. `transport`: its name, for errors."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._writes: dict[MappedPeer, int] = {}
        """Number of running writes of each peer whose mapping exists."""
        self._removed: set[MappedPeer] = set()
        """Removed peers, which are closed after their last write."""

    def add(self, peer: MappedPeer) -> None:
        with self._lock:
            self._writes[peer] = 0

    @contextmanager
    def writing(self, peer: MappedPeer) -> Iterator[None]:
        """Surround a write. Raises WriteError if the peer was removed before it, or if its process has ended
        afterwards: then no process reads what was written."""
        with self._lock:
            if peer not in self._writes or peer in self._removed:
                raise WriteError(f"{self._transport}: {peer.session_id} was disconnected", fenced=True)
            self._writes[peer] += 1
        try:
            yield
            is_alive = peer.process.is_alive()
        finally:
            self._written(peer)
        if not is_alive:
            raise WriteError(f"{self._transport}: the process of {peer.session_id} has ended", fenced=True)

    def remove(self, peer: MappedPeer) -> None:
        """Close a peer, once its last write has returned. Idempotent."""
        with self._lock:
            if peer not in self._writes:
                return
            self._removed.add(peer)
            is_over = self._forget_if_over(peer)
        if is_over:
            peer.close()

    def remove_all(self) -> None:
        for peer in list(self._writes):
            self.remove(peer)

    def _written(self, peer: MappedPeer) -> None:
        with self._lock:
            self._writes[peer] -= 1
            is_over = self._forget_if_over(peer)
        if is_over:
            peer.close()

    def _forget_if_over(self, peer: MappedPeer) -> bool:
        if peer not in self._removed or self._writes[peer]:
            return False
        self._removed.remove(peer)
        del self._writes[peer]
        return True


class MappedTransport:
    """A `Transport` without its registered memory and its sessions."""

    gathers = True
    """True, because a piece costs next to nothing (see `transports/transport.py`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host_id = host_id()
        self._peers = MappedPeers(name)

    def is_here(self, session: TransportSession) -> bool:
        """Return whether it is a session of a process of this host and user, by the same transport."""
        is_here = self._host_id != "" and session.attributes.get("host_id") == self._host_id
        return session.transport == self.name and is_here

    def session_of(self, memory: object, attributes: Mapping[str, str]) -> TransportSession:
        """Return a session of this process. `memory` names what it reaches."""
        pid = os.getpid()
        own = {"host_id": self._host_id, "pid": str(pid), "start_time": own_start_time()}
        return TransportSession(self.name, f"{self._host_id}/{pid}/{memory}", {**own, **attributes})

    def placed(
        self, peer: MappedPeer, copies: CopyList, registered: Iterable[tuple[int, int]]
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Return copies as columns, their destinations in our address space. Raises WriteError, fenced, if one leaves
        the peer's arena or our registered ranges."""
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        require_inside(self.name, (src_N, dst_N, length_N), (peer.arena_base, peer.arena_bytes), registered)
        return src_N, dst_N + (peer.local_base - peer.arena_base), length_N

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        return True

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, MappedPeer)
        self._peers.remove(peer)

    def close(self) -> None:
        self._peers.remove_all()


class LaunchingTransport(MappedTransport):
    """One whose copies are launches on the device, which wait there for their sources: an `OrderedTransport`."""

    def __init__(self, name: str, copier: LaunchedCopies) -> None:
        super().__init__(name)
        self._copier = copier
        self._sources: list[tuple[int, int]] = []
        """Base and bytes of registered device memory."""

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self.write_after(peer, copies, (), timeout_s)

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """Implement `OrderedTransport`. `timeout_s` bounds nothing: a launch ends by itself and cannot be cancelled."""
        assert isinstance(peer, MappedPeer)
        columns = self.placed(peer, copies, self._sources)
        try:
            with self._peers.writing(peer):
                self._copier.copy(*columns, after)
        except RuntimeError as error:  # what torch and Triton raise for a device that fails
            raise WriteError(f"{self.name}: writing to {peer.session_id}: {error}", fenced=True) from error

    def close(self) -> None:
        super().close()
        self._sources.clear()
