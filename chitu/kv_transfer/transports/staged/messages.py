"""Messages between the two ends of a staged transport; the sockets between P and D carry them unread."""

from __future__ import annotations

from typing import Union

import msgspec

from chitu.errors import BadFrame


class Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="group"):
    """P -> D: pieces lie in a segment, one after the other. Repeated until `Scattered`."""

    number: int
    """Number of the group, counted from 1 within this incarnation of P."""
    segment: int
    targets: bytes
    """Destination address of each piece in D's pool, int64 LE."""
    lengths: bytes
    """Bytes of each piece, int64 LE."""


class Scattered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="scattered"):
    """D -> P: answer to each `Group`. D is done with the segment, and nothing of the group is written any more."""

    number: int
    segment: int
    error: str = ""
    """Error text; if not empty, the pieces are not in their places."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Group | Scattered] = msgspec.msgpack.Decoder(Union[Group, Scattered])


def encode(message: Group | Scattered) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Group | Scattered:
    """Decode a message. Raises BadFrame."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"a message between staged transports: {error}") from error
