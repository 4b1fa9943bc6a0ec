"""Transport `fake`: connects several "processes" of one test inside one process, with faults on demand.

A `FakeFabric` is the network: it has the registered memory of each peer, the queue of faults and the writes that have
not landed yet. Bytes really move (raw addresses, as with every transport), so the same `RankMemory` and copy lists are
used. Deterministic: no thread, no sleep, no random numbers; faults apply to writes in the order of injection.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.mapped import first_outside
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, WriteError
from chitu.protocol import RankMemory, TransportSession

NAME = "fake"


class FaultKind(Enum):
    DROP = auto()
    """Write nothing; raise WriteError, fenced."""
    LATE = auto()
    """Raise WriteError, not fenced: the bytes (as they are by then) land at `release_late_writes`."""
    DELAY = auto()
    """Block the caller of `write` until `step`; after its timeout the write fails and becomes a late one."""
    CORRUPT = auto()
    """Write everything and succeed, but with a flipped bit in one byte."""


class Fault(NamedTuple):
    kind: FaultKind
    to: str = ""
    """Session id of the peer whose next write it affects; empty: the next write to any peer."""
    byte: int = 0
    """For CORRUPT, index of the byte in the copy list, counted through its copies."""


@dataclass(slots=True, frozen=True)
class FakePeer:
    session_id: str


@dataclass(slots=True)
class _Endpoint:
    ranges: list[tuple[int, int]] = field(default_factory=list)
    is_alive: bool = True


class _LateWrite(NamedTuple):
    source: str
    target: str
    copies: CopyList


class FakeFabric:
    """The network between the transports that are made with it."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._faults: deque[Fault] = deque()
        self._late: list[_LateWrite] = []
        self._steps = 0
        self._changed = threading.Condition()
        self.num_writes = 0
        """Number of calls of `write`, including failed ones."""
        self.on_write: Callable[[str, CopyList], None] | None = None
        """Called with (peer's session id, copies) inside `write`, before a byte moves, to simulate concurrent
        events."""
        self.on_land: Callable[[str, CopyList], None] | None = None
        """Called with (peer's session id, copies) when the bytes move, in `write` or late."""

    def inject(self, *faults: Fault) -> None:
        """Queue faults; each affects one write."""
        self._faults.extend(faults)

    def kill(self, session_id: str) -> None:
        """Mark a process as dead: it is unreachable, and no late write from it or to it lands any more."""
        with self._changed:
            self._endpoints[session_id].is_alive = False
            self._late = [late for late in self._late if session_id not in (late.source, late.target)]
            self._changed.notify_all()

    def release_late_writes(self) -> int:
        """Let every late write land now, and return their number."""
        with self._changed:
            late, self._late = self._late, []
        for write in late:
            self._land(write.target, write.copies)
        return len(late)

    def step(self) -> None:
        """Continue the writes that a DELAY holds."""
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    @property
    def num_late_writes(self) -> int:
        return len(self._late)

    def _join(self, session_id: str) -> None:
        if session_id in self._endpoints:
            raise ValueError(f"fake: session {session_id} exists already")
        self._endpoints[session_id] = _Endpoint()

    def _is_alive(self, session_id: str) -> bool:
        return session_id in self._endpoints and self._endpoints[session_id].is_alive

    def _take_fault(self, target: str) -> Fault | None:
        for fault in self._faults:
            if fault.to in ("", target):
                self._faults.remove(fault)
                return fault
        return None

    def _write(self, source: str, target: str, copies: CopyList, timeout_s: float) -> None:
        self.num_writes += 1
        if self.on_write is not None:
            self.on_write(target, copies)
        if not self._is_alive(target):
            raise WriteError(f"fake: {target} is dead", fenced=True)
        self._check(source, copies.src, copies)
        self._check(target, copies.dst, copies)
        fault = self._take_fault(target)
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.DROP:
            raise WriteError(f"fake: the write to {target} was dropped", fenced=True)
        if kind is FaultKind.DELAY:
            self._wait_for_step(source, target, copies, timeout_s)
        if kind is FaultKind.LATE:
            self._late.append(_LateWrite(source, target, copies))
            raise WriteError(f"fake: the write to {target} is late", fenced=False)
        self._land(target, copies)
        if fault is not None and kind is FaultKind.CORRUPT:
            _flip_bit(copies, fault.byte)

    def _land(self, target: str, copies: CopyList) -> None:
        if self.on_land is not None:
            self.on_land(target, copies)
        _copy(copies)

    def _wait_for_step(self, source: str, target: str, copies: CopyList, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            before = self._steps
            while self._steps == before and self._is_alive(target):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    self._late.append(_LateWrite(source, target, copies))
                    raise WriteError(f"fake: the write to {target} took over {timeout_s} s", fenced=False)
            if not self._is_alive(target):
                raise WriteError(f"fake: {target} died during the write", fenced=True)

    def _check(self, session_id: str, addresses: object, copies: CopyList) -> None:
        address_N = np.asarray(addresses, dtype=np.int64)
        length_N = np.asarray(copies.length, dtype=np.int64)
        ranges = self._endpoints[session_id].ranges
        if not any(first_outside(address_N, length_N, base, nbytes) < 0 for base, nbytes in ranges):
            raise WriteError(f"fake: a copy lies outside the registered memory of {session_id}", fenced=True)


class FakeTransport:
    """A `kv_transfer.transport.Transport` on a FakeFabric. `process` names this end and is the session id."""

    name = NAME

    def __init__(self, fabric: FakeFabric, process: str) -> None:
        self._fabric = fabric
        self._process = process
        self.gathers = False
        """Whether a list of pieces costs as much as one, see `transport.gathers`; set by tests."""
        fabric._join(process)

    def register(self, base: int, nbytes: int) -> None:
        ranges = self._fabric._endpoints[self._process].ranges
        if (base, nbytes) not in ranges:
            ranges.append((base, nbytes))

    def local_session(self) -> TransportSession:
        return TransportSession(transport=NAME, session_id=self._process)

    def can_reach(self, session: TransportSession) -> bool:
        return session.transport == NAME and session.session_id in self._fabric._endpoints

    def connect(self, memory: RankMemory, session: TransportSession) -> FakePeer:
        if not self.can_reach(session) or not self._fabric._is_alive(session.session_id):
            raise TransferFailed(f"fake: {session.session_id} cannot be reached")
        return FakePeer(session.session_id)

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self._fabric._write(self._process, peer.session_id, copies, timeout_s)

    def fence(self, peer: PeerHandle, timeout_s: float) -> bool:
        """Return whether no late write of this end to the peer is left."""
        return not any((late.source, late.target) == (self._process, peer.session_id) for late in self._fabric._late)

    def disconnect(self, peer: PeerHandle) -> None:
        """Do nothing: the fabric tracks which peers are alive."""

    def close(self) -> None:
        self._fabric.kill(self._process)


def _copy(copies: CopyList) -> None:
    for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True):
        ctypes.memmove(dst, src, length)


def _flip_bit(copies: CopyList, byte: int) -> None:
    for dst, length in zip(copies.dst, copies.length, strict=True):
        if byte < length:
            target = (ctypes.c_uint8 * 1).from_address(dst + byte)
            target[0] ^= 1
            return
        byte -= length
    raise ValueError(f"fake: byte {byte} lies beyond the {copies.nbytes} bytes of the write")
