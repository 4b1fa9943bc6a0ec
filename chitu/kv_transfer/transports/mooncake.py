"""Transport `mooncake`: the Mooncake Transfer Engine over TCP or RDMA, between hosts or processes of one host.

One engine per process (its destructor takes a second). Measured with mooncake-transfer-engine-non-cuda 0.3.13.post1
over TCP, and over RDMA with soft-RoCE between two virtual machines. These properties shape the code below:

* The engine LISTENS on 0.0.0.0 (handshake) and [::] (data) whatever host it is given, and asks for no credential: any
  process that reaches these ports can read and write registered memory. Use it in a trusted network only.
* Its calls return integers and `initialize` returns 0 for anything, so protocol, device and host are checked here.
* If more than about 2048 entries are in flight to a peer, the call fails but the accepted part still goes out. So at
  most `MAX_ENTRIES` are in flight, under a lock per peer, and the queue limits are raised before the engine is made.
* The synchronous calls spin on a core, so nothing here calls them, and the status of a batch is one of them while the
  batch runs. Over TCP a list goes out as one asynchronous batch plus its last entry as a single write, which can be
  polled with sleeps: there is one lane, so when that entry has ended, so has the batch. Over RDMA entries end in any
  order, and a batch counts as failed while others of its entries still run, so each entry is a single write.
* A write that did not end in time goes on: queued entries are written later, from the source bytes of that moment. An
  entry is COMPLETED when the peer has acknowledged it, which it does after the last byte was put into its memory. So
  handles of late writes are kept, and `fence` waits until they have ended: if all were COMPLETED, nothing of them can
  land any more. For this the engine's own timeouts are set to a day: each would drop a connection that is merely slow,
  with bytes in flight that nothing reports. TCP retransmits what a silent network has swallowed.
* An entry is FAILED if its connection broke, and its end is not known: bytes may lie unread in the peer's kernel, and a
  new connection overtakes them (with a stopped peer they landed 0.1 to 0.2 ms after a read on a new connection that
  succeeded, in 2 of 5 runs). The engine sends one entry at a time, so that is one entry at most. Evidence that it is
  over, in this order: all handles have ended; our kernel has no closed connection to that host with unacknowledged
  bytes; and a *drain*, a read of twice as many bytes as that entry has, has succeeded after that. The peer's one I/O
  thread takes turns between its connections and moves one piece (MC_TCP_SLICE_SIZE) a turn, whether it reads a piece of
  our entry or sends a piece of the drain. So it reaches the end of the entry before the end of the drain. This last
  step rests on how the engine's I/O loop works, not on a promise of its API. A dead peer (connection refused) is
  fenced at once.
* Over RDMA an entry has ended once the adapter has finished with each attempt of it: acknowledged, or its queue pair in
  the error state, which sends nothing more. Up to 9 attempts follow each other on new queue pairs, while the peer keeps
  the old ones open ("Retiring endpoint instead of resetting it"). So neither COMPLETED nor FAILED proves that no packet
  of an earlier attempt is on its way. Evidence that it is over: all handles have ended; `PACKET_LIFE_S` has passed
  since; and a drain, begun after that, has succeeded. A write that stalled for long enough for a second attempt and
  ended well returns `PACKET_LIFE_S` later. See docs/adr/0046.
* `connect` fetches the peer's segment description; if the peer freezes just then, the engine waits 60 s (no setting).
* One entry takes a round trip: over a real network many small pieces are slow, which is another reason for `staged.py`.
* A build with CUDA registers and sends GPU memory like host memory, piece by piece (6 us each), hence `staged.py`.
  Without CUDA only staging memory on the host can be used, and the sessions report that. Neither way was ever run here.
* A thread inside a transfer at interpreter exit aborts the process: join the transfer threads, then call `close`.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chitu.config.topology import with_port
from chitu.errors import ConfigError, MissingDependency, PeerUnreachable, TransferFailed
from chitu.kv_transfer.transports.kernel_tcp import has_unacknowledged
from chitu.kv_transfer.transports.mapped import (
    MEMORY,
    STAGING,
    Arena,
    arena_of,
    mapping_of,
    require_inside,
    writable_arenas,
)
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, WriteError, pause_s, pinning_hint
from chitu.net.rdma_devices import look_at_rdma, why_no_rdma
from chitu.protocol import RankMemory, TransportSession

NAME = "mooncake"
MAX_ENTRIES = 512
"""Most entries in flight to one peer, over all threads."""
PENDING, DONE = 0, 1
"""Values of an entry's status; any other number is a failure."""
FENCE_BYTES = 64
FENCE_TIMEOUT_S = 3.0
"""Timeout of the test reads in `connect`: enough for two round trips, or for a lost packet."""
FENCE_TRIES = 3
"""Number of test reads in `connect`. The engine may have a connection that broke while it was idle: the first read
detects that, the next fails without being sent, and the third waits for a new connection."""
REFUSED_TIMEOUT_S = 0.5
FIRST_ATTEMPT_S = 0.4
"""Over RDMA, an entry that ended within this time had one attempt: the adapter gives up after 7 timeouts of 67 ms."""
PACKET_LIFE_S = 2.0
"""Longest time that a packet is on its way: twice the PacketLifeTime of InfiniBand's subnet managers (1.07 s)."""
DRAIN_INTERVAL_S = 2.0
"""Time between two drains, and between two looks whether the peer's process is gone."""
NEVER_S = "86400"
FORCED_ENVIRONMENT = {
    "MC_TCP_LANES_PER_PEER": "1",
    "MC_NUM_TCP_IO_THREADS": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": NEVER_S,
    "MC_TCP_STATUS_TIMEOUT_SEC": NEVER_S,
    "MC_TRANSFER_TIMEOUT": NEVER_S,  # a batch that is polled later than this has "failed"
}
"""Environment of the engine that `fence` and the polling of writes rely on."""
DEFAULT_ENVIRONMENT = {
    "MC_RDMA_RAIL_PAUSE_SECONDS": "5",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
"""Environment of the engine that an operator may override. The engine reads it when it is made."""


@dataclass(slots=True)
class Submitted:
    """The entries of one write that have not ended: handles of single ones, the first one last, and of a batch that has
    ended when they have (0: none). The engine forgets a handle once it has said that it ended."""

    handles: list[int]
    batch: int
    largest_bytes: int
    """Size of its largest entry."""
    has_failed: bool = False


@dataclass(slots=True, frozen=True)
class FenceRead:
    """A read in flight. `target` is kept until the read has ended, because the engine writes there."""

    handle: int
    target: np.ndarray[Any, np.dtype[np.uint8]]
    doubts: int
    """The peer's `doubts` when this read began."""


@dataclass(slots=True)
class MooncakePeer:
    session_id: str
    host: str
    port: int
    arenas: tuple[Arena, ...]
    """Memory of the peer that can be written; the fence reads the first arena."""
    reaches_pages: bool = True
    """See `transports/transport.py`, also for `reaches_host_segments`."""
    reaches_host_segments: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while entries are in flight, and during `fence`."""
    late: list[Submitted] = field(default_factory=list)
    """Writes that did not end in time."""
    doubts: int = 0
    """Number of writes so far whose end is not known."""
    doubtful_bytes: int = 0
    """Size of the largest entry of those writes that no drain has followed; 0: every write has ended well."""
    doubted_s: float = 0.0
    """Time at which the last of them had ended."""
    drain: FenceRead | None = None
    next_look_s: float = 0.0
    """Earliest time of the next drain, or of the next look whether the peer's process is gone."""
    is_closed: bool = False

    def doubt(self, largest_bytes: int) -> None:
        self.doubts += 1
        self.doubtful_bytes = max(self.doubtful_bytes, largest_bytes)
        self.doubted_s = time.monotonic()

    def is_look_due(self) -> bool:
        """Return whether it is time for a drain, or for a look at its process; then the next one has to wait."""
        now_s = time.monotonic()
        is_due = now_s >= self.next_look_s
        if is_due:
            self.next_look_s = now_s + DRAIN_INTERVAL_S
        return is_due


class MooncakeTransport:
    """Implements `kv_transfer.transports.transport.Transport`.

    `host`: this process's address as peers reach it. Raises MissingDependency if the library cannot be imported and
    ConfigError if it could not work (RDMA without a device, a host name that does not resolve).
    """

    name = NAME

    def __init__(self, host: str, protocol: str = "tcp", ib_device: Sequence[str] = ()) -> None:
        self._protocol = protocol
        self.way = f"{NAME}_{protocol}"
        self.pins = self._is_rdma = protocol == "rdma"
        self._ranges: list[tuple[int, int]] = []
        if protocol == "rdma":
            _check_rdma(ib_device)
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise ConfigError(f"host {host!r} of this instance does not resolve: {error}") from error
        for name, value in DEFAULT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(FORCED_ENVIRONMENT)
        os.environ.pop("MC_SLICE_TIMEOUT", None)  # it would call an entry ended that is not
        if ":" in host:
            os.environ["MC_USE_IPV6"] = "1"
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"
        module = _import_engine()
        self._has_cuda = bool(getattr(module, "SUPPORT_CUDA", True))
        self._is_host_only = False
        """True if the pool is in GPU memory that this build cannot send."""
        self._engine: Any = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(ib_device))
        if code != 0:
            raise ConfigError(f"mooncake: cannot start over {protocol} on {host} (code {code})")
        self._session_id = with_port(host, self._engine.get_rpc_port())
        self._scratch = np.zeros(FENCE_BYTES, np.uint8)
        self.register(int(self._scratch.ctypes.data), FENCE_BYTES)

    def register(self, base: int, nbytes: int) -> None:
        if (base, nbytes) in self._ranges:
            return
        is_host = mapping_of(base, nbytes) is not None
        if not is_host and not self._has_cuda:
            self._is_host_only = True
            raise TransferFailed(
                "mooncake: this build has no CUDA and cannot send GPU memory: install the extra mooncake-cuda12 or"
                " mooncake-cuda13, or stage in host memory (transfer auto or staged, mooncake_protocol tcp)"
            )
        code = self._engine.batch_register_memory([base], [nbytes])
        if code != 0:
            hint = ""
            if self._protocol == "rdma":
                hint = pinning_hint() if is_host else "; GPU memory over RDMA needs nvidia_peermem or dma-buf"
            raise TransferFailed(f"mooncake: cannot register {nbytes} bytes at {base:#x} (code {code}{hint})")
        self._ranges.append((base, nbytes))

    def local_session(self) -> TransportSession:
        attributes = {"protocol": self._protocol}
        if self._is_host_only:
            attributes[MEMORY] = STAGING
        return TransportSession(transport=NAME, session_id=self._session_id, attributes=attributes)

    def can_reach(self, session: TransportSession) -> bool:
        return session.transport == NAME and session.attributes.get("protocol") == self._protocol

    def connect(self, memory: RankMemory, session: TransportSession) -> MooncakePeer:
        host, _, port = session.session_id.rpartition(":")
        if not self.can_reach(session) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise TransferFailed(f"mooncake: {session.session_id} ({session.attributes}) is not a usable session")
        code = self._engine.send_probe(session.session_id)
        if code != 0:
            raise PeerUnreachable(f"mooncake: {session.session_id} does not answer (code {code})")
        arenas = writable_arenas(memory, session)
        if not arenas:
            raise TransferFailed(f"mooncake: {session.session_id} has GPU memory that it cannot offer, and no staging")
        reaches_pages = not self._is_host_only and MEMORY not in session.attributes
        peer = MooncakePeer(session.session_id, host.strip("[]"), int(port), arenas, reaches_pages)
        # The first transfer fetches the peer's segment description, which blocks a minute if the peer is frozen. Do it
        # now, when the peer has just sent us a message, so that no write blocks on it.
        deadline_s = time.monotonic() + FENCE_TIMEOUT_S
        if not any(self._fence_read(peer, deadline_s) for _ in range(FENCE_TRIES)):
            raise PeerUnreachable(f"mooncake: no read of the arena of {session.session_id} succeeds")
        return peer

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        assert isinstance(peer, MooncakePeer)
        deadline_s = time.monotonic() + timeout_s
        src_N, dst_N, length_N = (np.asarray(column, dtype=np.int64) for column in copies)
        arena = arena_of(peer.arenas, int(dst_N[0]) if len(dst_N) else 0)
        require_inside(NAME, (src_N, dst_N, length_N), arena, self._ranges)
        src, dst, length = list(copies.src), list(copies.dst), list(copies.length)
        for start in range(0, len(src), MAX_ENTRIES):
            part = slice(start, start + MAX_ENTRIES)
            # If this raises, the parts before this one have ended well: nothing is in flight.
            if not peer.lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                raise WriteError(f"mooncake: {peer.session_id} was busy for {timeout_s} s", fenced=True)
            try:
                if peer.is_closed:
                    raise WriteError(f"mooncake: {peer.session_id} was disconnected", fenced=True)
                self._write_part(peer, src[part], dst[part], length[part], deadline_s)
            finally:
                peer.lock.release()

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        assert isinstance(peer, MooncakePeer)
        started_s = time.monotonic()
        if not peer.lock.acquire(timeout=timeout_s):
            return False
        try:
            while not self._is_fenced(peer):
                waited_s = time.monotonic() - started_s
                if waited_s >= timeout_s:
                    return False
                time.sleep(pause_s(waited_s))
            return True
        finally:
            peer.lock.release()

    def disconnect(self, peer: PeerHandle) -> None:
        """Mark the peer as closed. The engine keeps no handle of ours; its connection ends when the peer does."""
        assert isinstance(peer, MooncakePeer)
        peer.is_closed = True

    def close(self) -> None:
        """Destroy the engine (about a second). Every transfer thread must have been joined."""
        if self._engine is not None:
            for base, _ in self._ranges:
                self._engine.unregister_memory(base)
            self._ranges.clear()
            self._engine = None

    def _write_part(
        self, peer: MooncakePeer, src: list[int], dst: list[int], length: list[int], deadline_s: float
    ) -> None:
        """Write at most MAX_ENTRIES, and poll for their end."""
        write = self._submit(peer, src, dst, length)
        started_s = moved_s = time.monotonic()
        num_left, longest_s = len(write.handles), 0.0
        while not self._has_ended(write):
            now_s = time.monotonic()
            if now_s > deadline_s:
                peer.late.append(write)
                raise WriteError(f"mooncake: the write to {peer.session_id} did not end in time", fenced=False)
            if len(write.handles) < num_left:
                num_left, moved_s = len(write.handles), now_s
            longest_s = max(longest_s, now_s - moved_s)
            time.sleep(pause_s(now_s - started_s))
        if write.has_failed:
            peer.doubt(write.largest_bytes)
            raise WriteError(f"mooncake: the write to {peer.session_id} failed", fenced=False)
        if self._is_rdma and longest_s > FIRST_ATTEMPT_S:
            time.sleep(PACKET_LIFE_S)  # what stalled may be an attempt that failed, on another queue pair

    def _submit(self, peer: MooncakePeer, src: list[int], dst: list[int], length: list[int]) -> Submitted:
        """Submit a write. Raises WriteError if only a part could be submitted, which is late then."""
        write = Submitted([], 0, max(length))
        first = 0 if self._is_rdma else len(src) - 1
        if first:
            write.batch = self._engine.batch_transfer_async_write(peer.session_id, src[:-1], dst[:-1], length[:-1])
        if write.batch or not first:
            for entry in zip(src[first:], dst[first:], length[first:], strict=True):
                if (handle := self._engine.transfer_submit_write(peer.session_id, *entry)) == 0:
                    break
                write.handles.append(handle)
        write.handles.reverse()
        if len(write.handles) < len(src) - first:
            write.has_failed, write.batch = True, 0  # whether a batch without its last entry has ended is not known
            peer.late.append(write)
            raise WriteError(f"mooncake: cannot submit {len(src)} writes to {peer.session_id}", fenced=False)
        return write

    def _has_ended(self, write: Submitted) -> bool:
        """Return whether nothing of it is in flight any more, and note whether any of it failed."""
        while write.handles:
            status = int(self._engine.transfer_check_status(write.handles[-1]))
            if status == PENDING:
                return False
            write.handles.pop()
            write.has_failed |= status != DONE
        if write.batch:
            write.has_failed |= self._engine.get_batch_transfer_status([write.batch]) != 0
            write.batch = 0
        return True

    def _wait(self, handle: int, deadline_s: float) -> int:
        """Return the status of a single read that has ended (the engine then forgets its handle), or PENDING."""
        started_s = time.monotonic()
        while (status := int(self._engine.transfer_check_status(handle))) == PENDING:
            now_s = time.monotonic()
            if now_s > deadline_s:
                break
            time.sleep(pause_s(now_s - started_s))
        return status

    def _fence_read(self, peer: MooncakePeer, deadline_s: float) -> bool:
        """Read a few bytes of the peer. Return whether that succeeded in time."""
        base, _ = peer.arenas[0]
        handle = self._read(peer, int(self._scratch.ctypes.data), base, FENCE_BYTES)
        return handle != 0 and self._wait(handle, deadline_s) == DONE

    def _read(self, peer: MooncakePeer, target: int, source: int, nbytes: int) -> int:
        """Submit a read of the peer and return its handle, or 0 if that is impossible."""
        return int(self._engine.batch_transfer_async_read(peer.session_id, [target], [source], [nbytes]))

    def _is_fenced(self, peer: MooncakePeer) -> bool:
        """Return whether every write to this peer is fenced; begin a drain if it is due. Its lock is held."""
        while peer.late:
            if not self._has_ended(peer.late[0]):
                # Soft-RoCE retries for ever what a dead process will never acknowledge.
                return self._is_rdma and peer.is_look_due() and _is_refused(peer)
            write = peer.late.pop(0)
            if write.has_failed or self._is_rdma:
                peer.doubt(write.largest_bytes)
        if peer.drain is not None:
            status = int(self._engine.transfer_check_status(peer.drain.handle))
            if status == PENDING:
                return False
            if peer.drain.doubts == peer.doubts if status == DONE else _is_refused(peer):
                peer.doubtful_bytes = 0
            peer.drain = None
        elif peer.doubtful_bytes and self._may_drain(peer):
            self._begin_drain(peer)
        return not peer.doubtful_bytes

    def _may_drain(self, peer: MooncakePeer) -> bool:
        """Return whether nothing of the doubtful writes is on its way, so that a drain proves the rest."""
        if not self._is_rdma:
            return not has_unacknowledged(peer.host)
        return time.monotonic() - peer.doubted_s >= PACKET_LIFE_S and peer.is_look_due()

    def _begin_drain(self, peer: MooncakePeer) -> None:
        base, arena_bytes = max(peer.arenas, key=lambda arena: arena[1])
        target = self._scratch  # over RDMA the engine reads into registered memory only
        if not self._is_rdma:
            target = np.zeros(min(max(FENCE_BYTES, 2 * peer.doubtful_bytes), arena_bytes), np.uint8)
        handle = self._read(peer, int(target.ctypes.data), base, len(target))
        if handle != 0:
            peer.drain = FenceRead(handle, target, peer.doubts)
        elif _is_refused(peer):
            peer.doubtful_bytes = 0


def _is_refused(peer: MooncakePeer) -> bool:
    """Return whether the peer's host refuses connections to its handshake port: its process is gone."""
    try:
        socket.create_connection((peer.host, peer.port), timeout=REFUSED_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _import_engine() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise MissingDependency(
            f"the Mooncake Transfer Engine cannot be imported ({error}): install the extra mooncake (with CUDA:"
            " mooncake-cuda12 or mooncake-cuda13; pip install -e '.[mooncake]' in chitu's folder) and the Debian"
            " packages libibverbs1 libnuma1 libcurl4 (with CUDA also ibverbs-providers); its wheels are for Python 3.11"
            " to 3.13, with CUDA 13 to 3.14"
        ) from error


def _check_rdma(ib_device: Sequence[str]) -> None:
    """Raise ConfigError if RDMA is impossible, because the engine would silently use TCP."""
    if reason := why_no_rdma(look_at_rdma(), ib_device):
        raise ConfigError(f"pd_disaggregation.mooncake_protocol is rdma, but {reason}: use auto or tcp")
