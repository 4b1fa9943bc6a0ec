"""The one-sided data plane as the rest of the project sees it: a writer puts bytes into a peer's registered memory.

Backends: `shm`, `cuda_ipc`, `mooncake`, `nixl`, one package each. A backend's library is imported only inside
its own `transfer_engine.py`, lazily; its absence is `MissingDependency` with one clear sentence.

Threads: `write` and `settle` are called by transfer threads and block there (releasing the GIL); everything else by the
thread that builds the service. Nothing here knows rooms, pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from chitu.errors import TransferFailed
from chitu.net.job_thread import Spawn
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
    """A write did not complete. `settled`: nothing of it can land any more; else `settle` first."""

    def __init__(self, message: str, settled: bool) -> None:
        super().__init__(message)
        self.settled = settled


def pause_s(waited_s: float) -> float:
    """How long to sleep before the next look at what a library does, after so long a wait: it ends a twentieth late at
    most, and a wait of seconds keeps no core busy."""
    return min(max(SHORTEST_PAUSE_S, waited_s / 20), LONGEST_PAUSE_S)


class PeerHandle(Protocol):
    """A peer's memory, opened by `Transport.connect`. Where less than the pool's arena can be written, or more, the
    handle has `reaches_pages` or `reaches_host_segments`, too."""

    @property
    def session_id(self) -> str: ...


def reaches_pages(peer: PeerHandle) -> bool:
    """False: of its memory only what lies beside the pool can be written, neither pages nor logits rows."""
    return bool(getattr(peer, "reaches_pages", True))


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def local_session(self) -> TransportSession:
        """How a peer's `connect` reaches the memory registered here. Valid once `register` was called."""
        ...

    def register(self, base: int, nbytes: int) -> None:
        """Make this allocation readable for own writes and writable for peers. Idempotent for the same range."""
        ...

    def can_reach(self, session: TransportSession) -> bool:
        """Whether `connect` could work at all (same host for shm); cheap, no side effects."""
        ...

    def connect(self, memory: RankMemory, session: TransportSession) -> PeerHandle:
        """Open a peer's memory. Raises TransferFailed where that is impossible."""
        ...

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        """Put all copies into the peer's memory; returns when they are visible there.

        Raises WriteError. Addresses were range-checked by the caller against both allocations.
        """
        ...

    def settle(self, peer: PeerHandle, timeout_s: float) -> bool:
        """After an unsettled failure: True once no byte of any earlier write to this peer can land any more.

        What one call has found counts for the next, so calls with a `timeout_s` of 0 get there as well. Another write
        to this peer may run meanwhile; what it leaves is the next call's."""
        ...

    def disconnect(self, peer: PeerHandle) -> None:
        """Forget a peer (dead or replaced). Idempotent."""
        ...

    def close(self) -> None:
        """Release everything; no write is in flight (transfer threads were joined)."""
        ...


@runtime_checkable
class OrderedTransport(Protocol):
    """A transport whose copies wait on the device for what they read, so the host need not. Others are called when
    their sources are computed."""

    def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
        """`Transport.write`, of bytes that are there once all of `after` have passed."""
        ...


SendToPeer = Callable[[int, bytes], None]
"""A message to the transport of the same name of this incarnation; it may be lost, doubled or come late. Any thread, no
lock held."""


@runtime_checkable
class MessagingTransport(Protocol):
    """A transport whose two ends talk. Their messages travel on the sockets between P and D, whose other users do not
    read them."""

    def attach(self, send: SendToPeer) -> None:
        """Before anything is connected."""
        ...

    def bind(self, peer: PeerHandle, incarnation: int) -> None:
        """Whose memory this is. After `connect`, before the first write."""
        ...

    def on_message(self, rank: int, incarnation: int, payload: bytes) -> None:
        """Comm thread: of a registered peer. Raises ProtocolError."""
        ...

    def fence(self, incarnation: int) -> bool:
        """That peer is dead: nothing more is done for it. True once nothing of it is being written into our pages."""
        ...

    def start(self, spawn: Spawn) -> None:
        """Start what it has of threads; `close` ends them."""
        ...


class LaunchedCopies(Protocol):
    """`ops.kernels.blocks.BlockCopier`, or its twin in tests: one launch copies all pieces."""

    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, after: Sequence[Ready] = ()) -> None: ...


def gathers(transport: Transport) -> bool:
    """Whether it writes many scattered pieces at the price of one."""
    return bool(getattr(transport, "gathers", False))
