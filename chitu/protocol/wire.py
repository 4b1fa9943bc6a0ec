"""What every wire message is made of: the base record, packed integers, and the decoder of one socket's union."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from chitu.errors import BadFrame, UnknownKind

PROTOCOL_VERSION = 21
OLDEST_VERSION = 20
"""Oldest version that this release reads, and speaks to those that read no later one: that of the release before."""
T = TypeVar("T")


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every record that crosses a socket. Records that the HTTP API shows too (loads, times) keep their
    zeros."""


def pack_i32(values: Iterable[int]) -> bytes:
    """Return integers as int32 little-endian bytes. Raises OverflowError if one does not fit."""
    packed = values if isinstance(values, array) and values.typecode == "i" else array("i", values)
    if sys.byteorder == "big":
        packed = array("i", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_i32(data: bytes) -> array[int]:
    """Return the integers of `pack_i32`. Raises BadFrame if the length is no multiple of 4."""
    if len(data) % 4:
        raise BadFrame(f"an int32 array of {len(data)} bytes: not a multiple of 4")
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


encode: Callable[[Wire], bytes] = msgspec.msgpack.Encoder().encode
"""Returns a message as one MessagePack frame."""


class Codec(Generic[T]):
    """Decoder of one socket's union. Raises UnknownKind for a kind that is not in it, BadFrame for anything else."""

    def __init__(self, kinds: Any, max_bytes: int = 64 << 20) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> T:
        if len(frame) > self._max_bytes:
            raise BadFrame(f"a frame of {len(frame)} bytes; at most {self._max_bytes} are accepted")
        try:
            return self._decoder.decode(frame)
        except msgspec.ValidationError as error:
            if "Invalid value" in str(error) and ("$.type" in str(error) or "$[0]" in str(error)):
                raise UnknownKind(str(error)) from error
            raise BadFrame(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(str(error)) from error
