"""Weights from a neighbour: what an instance that loads asks of one that serves the same weights, on the port
`InstanceInfo.weights_port`. Since version 21 of the wire.

The bytes go by a one-sided transport, into memory that the reader has registered; these frames say which, and when they
are there. They are pieces of the files of the checkpoint folder. Folders of one `model_hash` have files of the same
names, sizes and headers, so a file's name and an offset mean the same on both hosts.
"""

from __future__ import annotations

from typing import Literal, Union

from chitu.protocol.peer import RankMemory
from chitu.protocol.wire import Codec, Wire

MAX_PIECE_BYTES = 2 << 20
"""Most bytes of a piece: KV waits for no more than one."""

Refusal = Literal["", "busy", "cold", "other_weights", "refused"]
"""Why there is no piece. `busy`: ask again, or another instance. `cold`: it would have to read its own disk.
`other_weights`: it does not serve these, or not any more. Empty: there is one."""


class OpenPieces(Wire, frozen=True, tag="open_pieces"):
    """Reader -> source, once; answered by `PiecesOpened`."""

    protocol_version: int
    joiner: str
    """Instance that loads, with its host; its ranks count as one reader."""
    model_hash: str
    memory: RankMemory
    """Where the pieces are to be written: its arena, without pages."""


class WantPiece(Wire, frozen=True, tag="want_piece"):
    """Reader -> source: write these bytes of a file. Answered by `Piece`, in order."""

    number: int
    """Counted from 1 within the session."""
    file: str
    offset: int
    num_bytes: int
    place: int
    """Where to write, as an offset in the arena."""


class ClosePieces(Wire, frozen=True, tag="close_pieces"):
    """Reader -> source: all is read, or the source is given up."""


class PiecesOpened(Wire, frozen=True, tag="pieces_opened"):
    """Source -> reader."""

    code: Refusal = ""
    message: str = ""
    way: str = ""
    """The transport that the source has chosen."""


class Piece(Wire, frozen=True, tag="piece"):
    """Source -> reader: the bytes are where they were wanted; with a code: they are not, and will not be."""

    number: int
    checksum: int = 0
    """CRC-32 of the bytes as the source has read them."""
    code: Refusal = ""
    message: str = ""


ReaderMessage = Union[OpenPieces, WantPiece, ClosePieces]
SourceMessage = Union[PiecesOpened, Piece]
reader_codec: Codec[ReaderMessage] = Codec(ReaderMessage)
source_codec: Codec[SourceMessage] = Codec(SourceMessage)
