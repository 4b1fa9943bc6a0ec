"""The one-sided data plane as the rest of the project sees it: a writer puts bytes into a peer's registered memory.

Backends: `shm`, `cuda_ipc`, `mooncake`, `nixl`, one module each. A backend's library is imported only inside its own
module, lazily; its absence raises `MissingDependency` with one clear sentence.

Threads: transfer threads call `write` and `fence` and block there (releasing the GIL). The comm thread, or lane 0 of a
follower, opens and closes peers. The thread that builds the service calls the rest. Nothing here depends on rooms,
pages or requests.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from chitu.errors import TransferFailed
from chitu.net.threads import Spawn
from chitu.protocol import RankMemory, TransportSession
from chitu.types import Ready

Int64s = NDArray[np.int64]

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 5e-3


class CopyList(NamedTuple):
    """`length[i]` bytes from local address `src[i]` to `dst[i]` in the peer's address space."""

    src: Sequence[int]
    dst: Sequence[int]
    length: Sequence[int]

    @property
    def nbytes(self) -> int:
        return sum(self.length)


class WriteError(TransferFailed):
    """A write did not complete. `fenced`: nothing of it can land any more; if False, call `fence` first."""

    def __init__(self, message: str, fenced: bool) -> None:
        super().__init__(message)
        self.fenced = fenced


def pause_s(waited_s: float) -> float:
    """Return how long to sleep before polling a library again, after a wait of `waited_s`. A wait ends a twentieth late
    at most, and a wait of seconds keeps no core busy."""
    return min(max(SHORTEST_PAUSE_S, waited_s / 20), LONGEST_PAUSE_S)


def pinning_hint() -> str:
    """Return what limits the host memory that this process may pin, for an error of a library that pins it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    return f"; RDMA pins this memory, and `ulimit -l` is {has} here: raise it to unlimited (docs/transfer.md)"


class PeerHandle(Protocol):
    """A peer's memory, opened by `Transport.connect`. If less or more than the pool's arena can be written, the handle
    also has `reaches_pages` or `reaches_host_segments`."""

    @property
    def session_id(self) -> str: ...


def reaches_pages(peer: PeerHandle) -> bool:
    """Return whether its pages and logits rows can be written. If not, only memory beside the pool can."""
    return bool(getattr(peer, "reaches_pages", True))


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def local_session(self) -> TransportSession:
        """Return how a peer's `connect` reaches the memory registered here. Valid once `register` was called."""
        ...

    def register(self, base: int, nbytes: int) -> None:
        """Make this allocation readable for our own writes and writable for peers. Idempotent for the same range."""
        ...

    def can_reach(self, session: TransportSession) -> bool:
        """Return whether `connect` could work at all (same host for shm); cheap, no side effects."""
        ...

    def connect(self, memory: RankMemory, session: TransportSession) -> PeerHandle:
        """Open a peer's memory. Raises TransferFailed if that is impossible."""
        ...

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        """Put all copies into the peer's memory; return when they are visible there.

        Raises WriteError. The caller has range-checked the addresses against both allocations.
        """
        ...

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        """Return True once no byte of any earlier write to this peer can land any more. Call it after a failure
        that is not fenced.

        What one call has found counts for the next, so calls with a `timeout_s` of 0 get there as well. Another write
        to this peer may run meanwhile; the next call fences that one, too."""
        ...

    def disconnect(self, peer: PeerHandle) -> None:
        """Forget a peer (dead or replaced). Idempotent."""
        ...

    def close(self) -> None:
        """Release everything. No write may be in flight (transfer threads were joined)."""
        ...


@runtime_checkable
class OrderedTransport(Protocol):
    """A transport whose copies wait on the device for their sources, so the host need not wait. Every other transport
    is called only after its sources are computed."""

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """Write like `Transport.write`, from sources that are computed once all of `after` have passed."""
        ...


@runtime_checkable
class FastTransport(Protocol):
    """A transport whose writes are so fast that fewer are better: another room's logits row waits for one anyway."""

    batch_bytes: int
    """Most KV bytes of one write."""


def batch_bytes_of(transports: Sequence[Transport], usual: int) -> int:
    """Return the most KV bytes of one write, whichever transport it takes."""
    sizes = [each.batch_bytes if isinstance(each, FastTransport) else usual for each in transports]
    return min(sizes, default=usual)


SendToPeer = Callable[[int, bytes], None]
"""Function that sends a message to the transport of the same name of an incarnation. The message may be lost,
duplicated or late. Any thread, no lock held."""


class SendFrame(Protocol):
    """Queue of outgoing P<->D frames, which the comm thread empties. Never blocks."""

    def __call__(self, host: str, port: int, room: bytes, payload: bytes) -> None: ...


@runtime_checkable
class MessagingTransport(Protocol):
    """A transport whose two ends exchange messages, on the sockets between P and D. Other code does not read them."""

    def attach(self, send: SendToPeer) -> None:
        """Set the function that sends messages, before anything is connected."""
        ...

    def bind(self, peer: PeerHandle, incarnation: int) -> None:
        """Set the incarnation that owns this memory, after `connect` and before the first write."""
        ...

    def on_message(self, rank: int, incarnation: int, payload: bytes) -> None:
        """Process a message of a registered peer. Comm thread. Raises ProtocolError."""
        ...

    def revoke(self, incarnation: int) -> bool:
        """Revoke the access of a peer that is dead: do nothing more for it. Return True once nothing of it is being
        written into our pages."""
        ...

    def start(self, spawn: Spawn) -> None:
        """Start the transport's threads, if it has any; `close` ends them."""
        ...


class LaunchedCopies(Protocol):
    """`ops.kernels.blocks.BlockCopier`, or its stand-in in tests: one launch copies all pieces."""

    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, after: Sequence[Ready] = ()) -> None: ...


def way_of(transport: Transport) -> str:
    """Return the transport's name, with its protocol if it has a choice (`mooncake_rdma`)."""
    return str(getattr(transport, "way", transport.name))


def pins(transport: Transport) -> bool:
    """Return whether memory that it registered must stay where it is in the machine: an adapter writes there by itself,
    past the page table, so what is given back to the system would be written by it still."""
    return bool(getattr(transport, "pins", False))


def gathers(transport: Transport) -> bool:
    """Return whether it writes many scattered pieces at the price of one."""
    return bool(getattr(transport, "gathers", False))
