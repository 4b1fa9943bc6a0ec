"""The reader's end of weights from a neighbour: bytes of a folder's files, from an instance that serves these weights.

`NeighbourPieces` is what `models/weights.py` asks before it reads a file. On the thread that loads; one for each rank
and folder. It finds a source (`neighbours.py`), registers an arena of a few pieces with transports of its own, and asks
for one piece after the other, `PLACES` at a time; the source writes them there (`weights_share.py`).

Invariants: a byte is handed on only if the checksum of its piece is right. At any fault the session and its arena are
given up for good, since the source may still write there; what is missing comes from another source, or from the
folder. Nothing waits longer than `SILENCE_S` for a source, and `BUSY_S` in all for one that has time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from chitu.clock import Clock, RealClock
from chitu.errors import ChituError, ProtocolError
from chitu.kv_cache.pool import shared_memory
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.sockets import connect, listens
from chitu.net.threads import ServiceThread
from chitu.protocol import PROTOCOL_VERSION, RankMemory, Wire, encode
from chitu.protocol.neighbour import (
    MAX_PIECE_BYTES,
    ClosePieces,
    OpenPieces,
    Piece,
    PiecesOpened,
    SourceMessage,
    WantPiece,
    source_codec,
)

logger = logging.getLogger(__name__)

PLACES = 8
"""Pieces on their way at a time."""
SILENCE_S = 3.0
"""A source that sends no piece for this long is given up. One that is slower than that is no help."""
BUSY_S = 60.0
"""How long a load waits, in all, for a source that has no time."""
RETRY_S = 0.25
"""Pause before all that were busy are asked again."""
LINGER_MS = 200
OUT_OF_TURN = "it answers out of turn"
WINDOW_BYTES = 16 << 20
"""Bytes after which a way's speed is known; of the last so many."""


pause = time.sleep


class Neighbour(NamedTuple):
    """An instance that serves the wanted weights."""

    name: str
    incarnation: int
    host: str
    port: int


class SourceFault(Exception):
    """A source cannot be used (any more). `is_busy`: it may have time later. `may_write`: it may still write into the
    memory that it was given."""

    def __init__(self, message: str, is_busy: bool = False, may_write: bool = True) -> None:
        super().__init__(message)
        self.is_busy, self.may_write = is_busy, may_write


class PieceMemory:
    """Memory for pieces, registered with transports of its own. Raises ChituError."""

    def __init__(self, transports: list[Transport]) -> None:
        num_bytes = PLACES * MAX_PIECE_BYTES
        self.mapping = shared_memory("chitu-weights", num_bytes, "weights from a neighbour")
        self.bytes = memoryview(self.mapping)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self._transports = transports
        without_sessions = RankMemory(0, (), base, num_bytes, (), (), 0, 0, 0, 0)
        sessions = register_memory(without_sessions, transports)
        self.record = msgspec.structs.replace(without_sessions, sessions=sessions)
        """It has no pages and no rows."""

    def close(self) -> None:
        # Some libraries take a second for it.
        ServiceThread("weights-close", lambda: _close_all(self._transports)).start()


_abandoned: list[PieceMemory] = []
"""Memory that a source may still write to: kept for good."""


def _close_all(transports: Sequence[Transport]) -> None:
    for transport in transports:
        try:
            transport.close()
        except Exception:  # the weights are here, whatever a library has still to say
            logger.exception("cannot close the transport %s that weights came over", transport.name)


class PieceSession:
    """A source that has agreed to send pieces."""

    def __init__(self, source: Neighbour, socket: zmq.Socket[bytes], memory: PieceMemory) -> None:
        self.source = source
        self.way = ""
        self._socket, self._memory, self._number = socket, memory, 0
        self._asked: deque[WantPiece] = deque()
        """Pieces on their way, each right behind the one before in its file."""

    def open(self, joiner: str, model_hash: str) -> None:
        """Ask for it. Raises SourceFault."""
        self._send(OpenPieces(PROTOCOL_VERSION, joiner, model_hash, self._memory.record))
        reply = self._receive()
        if not isinstance(reply, PiecesOpened):
            raise SourceFault(OUT_OF_TURN)
        if reply.code:
            raise SourceFault(reply.message, is_busy=reply.code == "busy", may_write=False)
        self.way = reply.way

    def read_into(
        self, buffer: memoryview, file: str, offset: int, ahead: int, on_bytes: Callable[[int], None]
    ) -> None:
        """Fill the buffer with bytes of a file; tell how many more are there after each piece, which is right and stays
        so whatever follows. `ahead`: bytes behind these that are asked for, too, as they are wanted next. Raises
        SourceFault."""
        done = 0
        while done < len(buffer):
            self._ask(file, offset + done, range(offset, offset + len(buffer)), ahead)
            want = self._asked[0]
            wanted = buffer[done : done + want.num_bytes]
            self._take(wanted, want)
            done += len(wanted)
            on_bytes(len(wanted))

    def _ask(self, file: str, begin: int, run: range, ahead: int) -> None:
        """Have the next pieces asked for: those of a run of bytes of a file from `begin` on, and of those behind it,
        which are cut as if more runs of this length followed. What was asked for and is not among them is received, and
        forgotten."""
        while self._asked and not self._is_next(self._asked[0], file, begin, run.stop):
            self._await(self._asked[0])
        if self._asked:
            newest = self._asked[-1]
            begin = newest.offset + newest.num_bytes
        while len(self._asked) < PLACES and begin < run.stop + ahead:
            stop = min(run.stop + ahead, begin + len(run) - (begin - run.start) % len(run))
            self._number += 1
            place = self._number % PLACES * MAX_PIECE_BYTES
            want = WantPiece(self._number, file, begin, min(MAX_PIECE_BYTES, stop - begin), place)
            self._send(want)
            self._asked.append(want)
            begin += want.num_bytes

    @staticmethod
    def _is_next(want: WantPiece, file: str, begin: int, end: int) -> bool:
        return (want.file, want.offset) == (file, begin) and want.offset + want.num_bytes <= end

    def _take(self, wanted: memoryview, want: WantPiece) -> None:
        """Wait for the next piece, check it, and copy it."""
        checksum = self._await(want)
        wanted[:] = self._memory.bytes[want.place : want.place + len(wanted)]
        if zlib.crc32(wanted) != checksum:  # of the copy: the source may write again, whatever it promised
            raise SourceFault("the checksum of a piece is wrong")

    def _await(self, want: WantPiece) -> int:
        """Wait for the piece that was asked for first, and return its checksum."""
        reply = self._receive()
        self._asked.popleft()
        if not isinstance(reply, Piece) or reply.number != want.number:
            raise SourceFault(OUT_OF_TURN)
        if reply.code:
            raise SourceFault(reply.message)
        return reply.checksum

    def _send(self, message: Wire) -> None:
        self._socket.send(encode(message))

    def _receive(self) -> SourceMessage:
        if not self._socket.poll(int(SILENCE_S * 1000)):
            raise SourceFault(f"it is silent for {SILENCE_S:g} s")
        try:
            return source_codec.decode(self._socket.recv())
        except ProtocolError as error:
            raise SourceFault(f"it sent what is no answer: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(encode(ClosePieces()), zmq.NOBLOCK)
        self._socket.close(LINGER_MS)


class SessionOpener:
    """Opens sessions, one at a time, and owns what they share."""

    def __init__(
        self,
        joiner: str,
        model_hash: str,
        context: zmq.Context[zmq.Socket[bytes]],
        open_transports: Callable[[], list[Transport]],
    ) -> None:
        """Owns the context. `joiner` and `model_hash` as in `OpenPieces`."""
        self._joiner, self._model_hash, self._context = joiner, model_hash, context
        self._open_transports = open_transports
        self._memory: PieceMemory | None = None

    def open(self, source: Neighbour) -> PieceSession:
        """Return a session that the source has agreed to. Raises SourceFault."""
        if not listens(source.host, source.port):
            raise SourceFault("it takes no connection", may_write=False)
        try:
            if self._memory is None:
                self._memory = PieceMemory(self._open_transports())
            socket = connect(self._context, zmq.DEALER, source.host, source.port)
        except ChituError as error:
            raise SourceFault(error.message) from error
        session = PieceSession(source, socket, self._memory)
        try:
            session.open(self._joiner, self._model_hash)
        except (SourceFault, zmq.ZMQError) as error:
            session.close()
            fault = error if isinstance(error, SourceFault) else SourceFault(str(error))
            if fault.may_write:
                self.abandon()
            raise fault from error
        return session

    def abandon(self) -> None:
        """Use the memory no more: a source may still write there."""
        if self._memory is not None:
            _abandoned.append(self._memory)
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._context.destroy(LINGER_MS)


@dataclass(slots=True)
class Speed:
    """How quick a way was of late."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes, self.seconds = self.num_bytes + num_bytes, self.seconds + seconds
        if self.num_bytes > WINDOW_BYTES:
            share = WINDOW_BYTES / self.num_bytes
            self.num_bytes, self.seconds = self.num_bytes * share, self.seconds * share

    @property
    def bytes_per_s(self) -> float:
        """Infinite as long as it is not known: so it is tried."""
        return self.num_bytes / self.seconds if self.num_bytes >= WINDOW_BYTES and self.seconds > 0 else math.inf


class NeighbourPieces:
    """Implements `models.weights.Pieces`."""

    def __init__(
        self,
        find: Callable[[], list[Neighbour]],
        opener: SessionOpener,
        compares: bool,
        clock: Clock = RealClock(),
    ) -> None:
        """`find`: returns the instances that serve these weights now, the best first. `compares`: take each run of
        bytes the way that was quicker of late, the folder included; else never the folder while a source is left."""
        self._find, self._opener, self._compares, self._clock = find, opener, compares, clock
        self._session: PieceSession | None = None
        self._bad: set[int] = set()
        """Incarnations that were given up."""
        self._begun_s = clock.monotonic()
        self._busy_s = BUSY_S
        """What is left of it."""
        self._next_ask_s = -math.inf
        self._is_over = False
        """Whether no source is asked any more."""
        self._faults: list[str] = []
        self._of_neighbours, self._of_folder = Speed(), Speed()
        self.from_neighbours = self.from_folder = 0
        """Bytes."""

    def read_into(self, buffer: memoryview, file: str, offset: int, ahead: int) -> int:
        """Fill the beginning of a buffer with bytes of a file; return how many. The file has the rest. `ahead`: as of
        `Pieces`."""
        done = 0

        def note(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes

        while done < len(buffer) and self._prefers_neighbours() and (session := self._opened()) is not None:
            before, begun_s = done, self._clock.monotonic()
            try:
                session.read_into(buffer[done:], file, offset + done, ahead, note)
            except (SourceFault, zmq.ZMQError) as error:
                self._give_up(session, str(error))
            self._of_neighbours.add(done - before, self._clock.monotonic() - begun_s)
        self.from_neighbours += done
        return done

    def on_file_read(self, num_bytes: int, seconds: float) -> None:
        """Note that bytes came from the folder."""
        self.from_folder += num_bytes
        self._of_folder.add(num_bytes, seconds)

    def close(self) -> None:
        """Say what came from where, and end."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._opener.close()
        counts = self.from_neighbours, self.from_folder, self._clock.monotonic() - self._begun_s
        logger.info("weights: %d bytes from neighbours, %d from the folder, in %.2f s", *counts)

    def _prefers_neighbours(self) -> bool:
        if self._is_over:
            return False
        return not self._compares or self._of_neighbours.bytes_per_s >= self._of_folder.bytes_per_s

    def _opened(self) -> PieceSession | None:
        """Return the session, or open one, waiting for a source that has time unless the folder may be used meanwhile.
        None if there is none now."""
        while self._session is None and not self._is_over:
            now_s = self._clock.monotonic()
            if now_s < self._next_ask_s:
                if self._compares:
                    return None
                pause(self._next_ask_s - now_s)
            self._ask_all()
        return self._session

    def _ask_all(self) -> None:
        """Ask the sources one by one for a session."""
        begun_s, is_busy = self._clock.monotonic(), False
        for source in self._find():
            if source.incarnation in self._bad:
                continue
            try:
                self._session = self._opener.open(source)
                logger.info("reads weights from %s (%s) over %s", source.name, source.host, self._session.way)
                return
            except SourceFault as error:
                is_busy |= error.is_busy
                if not error.is_busy:
                    self._note_fault(source, str(error))
        now_s = self._clock.monotonic()
        self._next_ask_s = now_s + RETRY_S
        self._busy_s -= now_s - begun_s + RETRY_S
        if not is_busy:
            self._end("; ".join(self._faults) or "no instance of the cluster serves them", bool(self._faults))
        elif self._busy_s <= 0:
            self._end(f"all instances that serve them were busy for {BUSY_S:g} s", True)

    def _end(self, why: str, is_fault: bool) -> None:
        self._is_over = True
        level = logging.WARNING if is_fault else logging.INFO
        logger.log(level, "weights come from the folder, not from a neighbour: %s", why)

    def _give_up(self, session: PieceSession, why: str) -> None:
        self._session = None
        session.close()
        self._opener.abandon()
        self._note_fault(session.source, why)

    def _note_fault(self, source: Neighbour, why: str) -> None:
        self._bad.add(source.incarnation)
        self._faults.append(f"{source.name} ({source.host}): {why}")
        logger.info("gives up %s as a source of weights: %s", source.name, why)
