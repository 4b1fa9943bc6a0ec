"""Orders of a main rank to its followers (to transfer, to compute checksums, to copy), and their answers.

Inside one instance, over `ipc` sockets. Both ends are the same build, so this is not part of the wire protocol and has
no version. MessagePack arrays; page lists as int32. Each order carries a number that its answer repeats, so an answer
that came too late is recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from chitu.kv_transfer.tensor_parallel.shard_writer import PageMove
from chitu.protocol import KVArgsRegisterInfo, pack_i32, unpack_i32


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the orders."""

    number: int


class OpenPeer(Order, frozen=True, tag="open"):
    """Connect to those ranks of a D, whose registration was checked, that need our heads."""

    info: KVArgsRegisterInfo


class ClosePeer(Order, frozen=True, tag="close"):
    """Close the connections to a D that is gone. Not answered."""

    incarnation: int


class PackedMove(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `PageMove` with its page lists as int32 LE."""

    first_layer: int
    end_layer: int
    src_pages: bytes
    dst_pages: bytes


class WritePages(Order, frozen=True, tag="write"):
    """Write our heads of these pages to the D of this incarnation."""

    incarnation: int
    timeout_s: float
    moves: tuple[PackedMove, ...]


class Settle(Order, frozen=True, tag="settle"):
    """Make sure that no earlier write to that D can land any more."""

    incarnation: int
    timeout_s: float


class SumPages(Order, frozen=True, tag="sum"):
    """Compute checksums of our heads of these pages, over K and V of layers `[first_layer, end_layer)`."""

    first_layer: int
    end_layer: int
    pages: bytes


class CopyShard(Order, frozen=True, tag="copy"):
    """Copy our heads of this page from the pool to its content in the tiers' memory, or back (`is_restore`)."""

    page: int
    offset: int
    """Offset of the content in the tiers' memory, in bytes."""
    is_restore: bool


class EndOrder(Order, frozen=True, tag="end"):
    """End the lane's thread, because the instance stops. Not answered."""


AnyOrder = Union[OpenPeer, ClosePeer, WritePages, Settle, SumPages, CopyShard, EndOrder]


class OrderAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer of one follower to the order with this number. `code` empty: done."""

    number: int
    nbytes: int = 0
    sums: bytes = b""
    """Answer to `SumPages`: int64, native order."""
    is_settled: bool = True
    """For a failed write: nothing of it can land any more. For a settle order: its result."""
    code: str = ""
    message: str = ""


def pack_moves(moves: Sequence[PageMove]) -> tuple[PackedMove, ...]:
    return tuple(PackedMove(m.first_layer, m.end_layer, pack_i32(m.src_pages), pack_i32(m.dst_pages)) for m in moves)


def unpack_moves(moves: Sequence[PackedMove]) -> list[PageMove]:
    return [PageMove(m.first_layer, m.end_layer, unpack_i32(m.src_pages), unpack_i32(m.dst_pages)) for m in moves]


encoder = msgspec.msgpack.Encoder()
order_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
answer_decoder: msgspec.msgpack.Decoder[OrderAnswer] = msgspec.msgpack.Decoder(OrderAnswer)
