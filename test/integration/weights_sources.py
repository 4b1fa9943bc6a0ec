"""Processes that serve the weights of a folder, with planted faults, and readers of them in the process of the test."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from chitu.config.schema import PDDisaggregationConfig
from chitu.instance.weights_pieces import Neighbour, NeighbourPieces, SessionOpener
from chitu.instance.weights_share import WeightsShare
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport
from chitu.models.config import model_hash, weights_stamp
from chitu.models.served_folder import ServedFolder
from chitu.types import new_incarnation

HOST = "127.0.0.1"
FORK = multiprocessing.get_context("fork")


def transports(kind: str, host: str = HOST) -> list[Transport]:
    return open_transports(PDDisaggregationConfig(transport=kind), host)  # type: ignore[arg-type]


class Planted:
    """A transport that does something in the place of a write, or before it."""

    def __init__(self, inner: Transport, at_write: Callable[[int, CopyList], None]) -> None:
        self._inner, self._at_write, self._writes = inner, at_write, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, peer: PeerHandle, copies: CopyList, timeout_s: float) -> None:
        self._writes += 1
        self._at_write(self._writes, copies)
        self._inner.write(peer, copies, timeout_s)


def flip(copies: CopyList) -> None:
    """Flip a bit in the middle of what is about to be sent."""
    place = copies.src[0] + copies.length[0] // 2
    ctypes.memmove(place, bytes([ctypes.string_at(place, 1)[0] ^ 1]), 1)


def _fault(kind: str, share: list[WeightsShare], state: dict[str, Any]) -> Callable[[int, CopyList], None]:
    """Return what happens at each write. The third one has the fault."""

    def at_write(number: int, copies: CopyList) -> None:
        state["writes"] = number
        if number != 3:
            return
        if kind == "flip":
            flip(copies)
        elif kind == "kill":
            os._exit(9)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "change":
            state["served"] = None

    return at_write


def _serve(folder: Path, way: str, fault: str, host: str, pipe: Connection) -> None:
    shares: list[WeightsShare] = []
    state: dict[str, Any] = {"served": ServedFolder(str(folder), model_hash(folder), weights_stamp(folder))}
    at_write = _fault(fault, shares, state)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    share = WeightsShare(
        context,
        host,
        lambda: state["served"],
        lambda: [Planted(each, at_write) for each in transports(way, host)],  # type: ignore[misc]
    )
    shares.append(share)
    share.start(lambda name, run: threading.Thread(target=run, name=name, daemon=True), lambda: True)
    pipe.send(share.port)
    while pipe.recv() != "end":
        pipe.send(state.get("writes", 0))
    os._exit(0)


class Source:
    """A process that serves a folder, in the network namespace of the thread that makes it."""

    def __init__(self, folder: Path, way: str = "shm", fault: str = "", name: str = "P0", host: str = HOST) -> None:
        self._pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(folder, way, fault, host, other), daemon=True)
        self.process.start()
        assert self._pipe.poll(30)
        self.neighbour = Neighbour(name, new_incarnation(), host, self._pipe.recv())

    @property
    def writes(self) -> int:
        """How many pieces it has sent."""
        self._pipe.send("writes")
        return int(self._pipe.recv())

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


@contextmanager
def serving(*sources: Source) -> Iterator[Sequence[Source]]:
    try:
        yield sources
    finally:
        for source in sources:
            source.end()


def pieces_from(
    sources: Sequence[Source],
    folder: Path,
    way: str = "shm",
    joiner: str = "D0",
    host: str = HOST,
) -> NeighbourPieces:
    """Return what reads a folder's bytes from these sources, of which the last is asked first."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opener = SessionOpener(joiner, model_hash(folder), context, lambda: transports(way, host))
    return NeighbourPieces(lambda: [each.neighbour for each in reversed(sources)], opener, compares=False)


def seconds(run: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    run()
    return time.monotonic() - begun_s
