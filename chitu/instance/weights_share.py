"""The source's end of weights from a neighbour: sends pieces of the checkpoint's files to instances that load.

`WeightsShare` has a port and a thread of its own (`weights-share`). For each piece that a reader wants it reads the
bytes from its own folder, sums them, and writes them into the reader's memory by a one-sided transport. It sends none
if its host has these files not in memory, as after a load from a neighbour: its disk is no better than the reader's.

Bounds: `MOST_READERS` instances at a time, others are told to ask elsewhere or later; one piece of `MAX_PIECE_BYTES` in
flight; and while requests run here, the thread rests `REST` times as long as each piece took. So of the time of a core,
and of the link, it takes a share of 1 / (1 + REST), and KV waits for one piece at most.

Invariant: a piece has the bytes of the folder that this instance has loaded. The files are as they were before that
load, by name, size and time, before the first piece and after each, and these weights still serve.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from chitu.clock import Clock, RealClock
from chitu.errors import ChituError, ConfigError, ProtocolError
from chitu.kv_transfer.shard_writer import connect_to
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, way_of
from chitu.models.served_folder import ServedFolder
from chitu.net.sockets import MAX_SMALL_FRAME_BYTES, bind
from chitu.net.threads import Spawn
from chitu.protocol import OLDEST_VERSION, PROTOCOL_VERSION, encode
from chitu.protocol.neighbour import (
    MAX_PIECE_BYTES,
    ClosePieces,
    OpenPieces,
    Piece,
    PiecesOpened,
    Refusal,
    WantPiece,
    reader_codec,
)

logger = logging.getLogger(__name__)

WARM_SHARE = 0.8
"""Least share of its files in its host's memory: a source that reads its disk is no quicker than the reader."""
MOST_READERS = 2
"""Instances that are served at a time."""
REST = 3.0
"""While requests run here: seconds of rest for each second of work."""
LONGEST_REST_S = 1.0
"""Longer rests would be taken for silence; a piece that takes so long has a link that is no help."""
POLL_MS = 200
IDLE_S = 30.0
"""A reader that wants nothing for this long is forgotten."""
WRITE_TIMEOUT_S = 3.0


class PieceRefused(Exception):
    """There is no piece for this reader."""

    def __init__(self, code: Refusal, message: str) -> None:
        super().__init__(message)
        self.code: Refusal = code


def rest_s(worked_s: float, is_idle: bool) -> float:
    """Return how long to rest after a piece."""
    return 0.0 if is_idle else min(REST * worked_s, LONGEST_REST_S)


def _why(error: Exception) -> str:
    if isinstance(error, ChituError):
        return error.message
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


@dataclass(slots=True, eq=False)
class _PieceReader:
    """A rank of an instance that loads."""

    joiner: str
    folder: ServedFolder
    arena_base: int
    arena_bytes: int
    transport: Transport
    peer: PeerHandle
    seen_s: float
    files: dict[str, int] = field(default_factory=dict)
    """Descriptors by name."""
    num_bytes: int = 0


class WeightsShare:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        served: Callable[[], ServedFolder | None],
        open_transports: Callable[[], list[Transport]],
        clock: Clock = RealClock(),
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """Bind a port of `host`. `served`: returns what was loaded and serves now; None if that is in no folder.
        `rest`: lets so many seconds pass."""
        self._socket, self.port = bind(context, zmq.ROUTER, host, 0, MAX_SMALL_FRAME_BYTES)
        self._served, self._open_transports, self._clock = served, open_transports, clock
        self._is_idle: Callable[[], bool] = lambda: True
        self._transports: list[Transport] = []
        self._buffer = memoryview(bytearray(MAX_PIECE_BYTES))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._readers: dict[bytes, _PieceReader] = {}
        self._stop = threading.Event()
        self._rest = rest or self._stop.wait
        self._thread: threading.Thread | None = None

    def start(self, spawn: Spawn, is_idle: Callable[[], bool]) -> None:
        """Serve. `is_idle`: whether no request is here."""
        self.follow(is_idle)
        self._thread = spawn("weights-share", self._loop)
        self._thread.start()

    def follow(self, is_idle: Callable[[], bool]) -> None:
        """Rest for what `is_idle` says is not idle."""
        self._is_idle = is_idle

    def close(self, timeout_s: float = 2.0) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)  # it may be in a file system that hangs

    # ----------------------------------------------------------------------------------------------------- its thread

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.turn()
        for identity in list(self._readers):
            self._forget(identity)
        for transport in self._transports:
            transport.close()
        self._socket.close(0)

    def turn(self, wait_ms: int = POLL_MS) -> bool:
        """Serve one message, and rest for it. Return False if none came in time. On its thread, or without one."""
        is_there = bool(self._socket.poll(wait_ms))
        if is_there:
            identity, frame = self._socket.recv_multipart()[:2]
            begun_s = self._clock.monotonic()
            self._take(identity, frame)
            if seconds := rest_s(self._clock.monotonic() - begun_s, self._is_idle()):
                self._rest(seconds)
        self._forget_idle()
        return is_there

    def _take(self, identity: bytes, frame: bytes) -> None:
        """Serve a message. Whatever it is, the thread goes on."""
        try:
            message = reader_codec.decode(frame)
        except ProtocolError as error:
            logger.warning("a bad frame from a reader of weights: %s", error)
            return
        if isinstance(message, OpenPieces):
            self._reply(identity, self._open(identity, message))
        elif isinstance(message, WantPiece):
            self._reply(identity, self._piece(identity, message))
        else:
            assert isinstance(message, ClosePieces)
            self._forget(identity)

    def _reply(self, identity: bytes, message: PiecesOpened | Piece) -> None:
        self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)  # to one that is gone: lost

    def _open(self, identity: bytes, message: OpenPieces) -> PiecesOpened:
        self._forget(identity)
        try:
            reader = self._readers[identity] = self._opened(message)
        except PieceRefused as error:
            return PiecesOpened(error.code, str(error))
        except Exception as error:  # numbers of a message may be anything, and cost this instance nothing
            return PiecesOpened("refused", _why(error))
        way = way_of(reader.transport)
        logger.info("sends weights to %s over %s", reader.joiner, way)
        return PiecesOpened(way=way)

    def _opened(self, message: OpenPieces) -> _PieceReader:
        if not OLDEST_VERSION <= message.protocol_version <= PROTOCOL_VERSION:
            raise PieceRefused("refused", f"version {message.protocol_version} of the wire")
        joiners = {reader.joiner for reader in self._readers.values()}
        if len(joiners | {message.joiner}) > MOST_READERS:
            raise PieceRefused("busy", f"it sends weights to {' and '.join(sorted(joiners))}")
        folder = self._served()
        if folder is None or folder.model_hash != message.model_hash:
            raise PieceRefused("other_weights", "it serves other weights")
        if not folder.is_plain:
            raise PieceRefused("refused", "its tensors are in a trainer's memory")
        if not self._transports:
            self._transports = self._open_transports()
            for transport in self._transports:
                transport.register(self._address, MAX_PIECE_BYTES)
        files: dict[str, int] = {}
        try:
            for name in folder.files:
                files[name] = os.open(Path(folder.path) / name, os.O_RDONLY | os.O_CLOEXEC)
            if not folder.is_unchanged():
                raise PieceRefused("refused", "the files of its weights were written since it has read them")
            if (share := folder.share_in_memory(files)) < WARM_SHARE:
                raise PieceRefused("cold", f"its host has {share:.0%} of the files of its weights in memory")
            memory = message.memory
            transport, peer = connect_to(memory, self._transports, 0)
        except BaseException:
            for descriptor in files.values():
                os.close(descriptor)
            raise
        arena = memory.arena_base, memory.arena_bytes
        return _PieceReader(message.joiner, folder, *arena, transport, peer, self._clock.monotonic(), files)

    def _piece(self, identity: bytes, want: WantPiece) -> Piece:
        reader = self._readers.get(identity)
        try:
            if reader is None:
                raise PieceRefused("refused", "it knows nothing of this reader")
            reader.seen_s = self._clock.monotonic()
            return Piece(want.number, self._written(reader, want))
        except PieceRefused as error:
            found = Piece(want.number, 0, error.code, str(error))
        except Exception as error:  # as above
            found = Piece(want.number, 0, "refused", _why(error))
        if reader is not None:
            logger.warning("sends no more weights to %s: %s", reader.joiner, found.message)
            self._forget(identity)
        return found

    def _written(self, reader: _PieceReader, want: WantPiece) -> int:
        """Write a piece and return its checksum."""
        folder, most = reader.folder, min(MAX_PIECE_BYTES, reader.arena_bytes)
        if not (0 < want.num_bytes <= most and 0 <= want.place <= reader.arena_bytes - want.num_bytes):
            raise PieceRefused("refused", f"{want.num_bytes} bytes at {want.place} are no place of the arena")
        if want.file not in reader.files or want.offset < 0:
            raise PieceRefused("refused", f"there is no file {want.file[:80]!r}")
        piece, descriptor = self._buffer[: want.num_bytes], reader.files[want.file]
        done = 0
        while done < want.num_bytes:
            count = os.preadv(descriptor, [piece[done:]], want.offset + done)
            if not count:
                raise PieceRefused("refused", f"{want.file} ends before byte {want.offset + want.num_bytes}")
            done += count
        if self._served() is not folder:
            raise PieceRefused("other_weights", "it has changed to other weights")
        if not folder.is_file_unchanged(want.file, descriptor):
            raise PieceRefused("refused", f"{want.file} was written since it was loaded")
        checksum = zlib.crc32(piece)
        place = reader.arena_base + want.place
        reader.transport.write(reader.peer, CopyList([self._address], [place], [want.num_bytes]), WRITE_TIMEOUT_S)
        reader.num_bytes += want.num_bytes
        return checksum

    def _forget_idle(self) -> None:
        now_s = self._clock.monotonic()
        for identity, reader in list(self._readers.items()):
            if now_s - reader.seen_s > IDLE_S:
                self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        reader = self._readers.pop(identity, None)
        if reader is None:
            return
        for descriptor in reader.files.values():
            os.close(descriptor)
        reader.transport.disconnect(reader.peer)
        logger.info("sent %d bytes of weights to %s", reader.num_bytes, reader.joiner)


def bind_share(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    served: Callable[[], ServedFolder | None],
    open_transports: Callable[[], list[Transport]],
) -> WeightsShare:
    """Make a source. Raises ConfigError if there is no port."""
    try:
        return WeightsShare(context, host, served, open_transports)
    except zmq.ZMQError as error:
        raise ConfigError(f"model.weights_from: cannot listen on {error}") from error
