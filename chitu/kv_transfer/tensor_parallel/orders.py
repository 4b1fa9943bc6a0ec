"""What a main rank tells its followers to transfer, to sum up and to copy, and their answers.

Inside one instance, over `ipc` sockets. Both ends are the same build, so this is no part of the wire protocol and has
no version. MessagePack arrays; page lists as int32. Each order carries a number that its answer repeats: an answer that
came too late is known by it and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from chitu.kv_transfer.tensor_parallel.shard_writer import PageMove
from chitu.protocol import KVArgsRegisterInfo, pack_i32, unpack_i32


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what crosses the sockets of an instance."""

    number: int


class OpenPeer(Order, frozen=True, tag="open"):
    """A D registered and was checked: connect to those of its ranks that need our heads."""

    info: KVArgsRegisterInfo


class ClosePeer(Order, frozen=True, tag="close"):
    """That D is gone. Not answered."""

    incarnation: int


class PackedMove(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `PageMove` with its page lists as int32 LE."""

    first_layer: int
    end_layer: int
    src_pages: bytes
    dst_pages: bytes


class WritePages(Order, frozen=True, tag="write"):
    """Bring our heads of these pages to the D of this incarnation."""

    incarnation: int
    timeout_s: float
    moves: tuple[PackedMove, ...]


class Settle(Order, frozen=True, tag="settle"):
    """Make sure that no earlier write to that D can land any more."""

    incarnation: int
    timeout_s: float


class SumPages(Order, frozen=True, tag="sum"):
    """Checksums of our heads of these pages, over K and V of layers `[first_layer, end_layer)`."""

    first_layer: int
    end_layer: int
    pages: bytes


class CopyShard(Order, frozen=True, tag="copy"):
    """Copy our heads of this page of the pool to its content in the tiers' memory, or from there."""

    page: int
    offset: int
    """Of the content, in bytes."""
    is_restore: bool


class EndOrder(Order, frozen=True, tag="end"):
    """The instance stops: the lane's thread ends. Not answered."""


AnyOrder = Union[OpenPeer, ClosePeer, WritePages, Settle, SumPages, CopyShard, EndOrder]


class OrderAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of one follower to the order with this number. `code` empty: done."""

    number: int
    nbytes: int = 0
    sums: bytes = b""
    """To `SumPages`: int64, native order."""
    is_settled: bool = True
    """Of a failed write: nothing of it can land any more. Of a settle order: its result."""
    code: str = ""
    message: str = ""


def pack_moves(moves: Sequence[PageMove]) -> tuple[PackedMove, ...]:
    return tuple(PackedMove(m.first_layer, m.end_layer, pack_i32(m.src_pages), pack_i32(m.dst_pages)) for m in moves)


def unpack_moves(moves: Sequence[PackedMove]) -> list[PageMove]:
    return [PageMove(m.first_layer, m.end_layer, unpack_i32(m.src_pages), unpack_i32(m.dst_pages)) for m in moves]


encoder = msgspec.msgpack.Encoder()
order_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
answer_decoder: msgspec.msgpack.Decoder[OrderAnswer] = msgspec.msgpack.Decoder(OrderAnswer)
