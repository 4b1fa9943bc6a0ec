"""Orders of an instance's main rank to its followers about transfers, and their answers.

MessagePack arrays over `ipc` sockets inside one instance. Both ends are the same build, so they are not part of the
wire protocol and have no version. Each order carries a number that its answer repeats, so an answer that came too late
is recognised and dropped. An order names pages, layers and the incarnation of D: a follower has no rooms and no
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from chitu.kv_transfer.shard_writer import TransferKVChunk
from chitu.protocol import KVArgsRegisterInfo, StateSeal, pack_i32


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the orders."""

    number: int


class OpenPeer(Order, frozen=True, tag="open"):
    """Connect to those ranks of a D, whose registration was checked, that need our heads."""

    info: KVArgsRegisterInfo


class ClosePeer(Order, frozen=True, tag="close"):
    """Close the connections to a D that is gone. Not answered."""

    incarnation: int


class WritePages(Order, frozen=True, tag="write"):
    """Write our heads of these pages to the D of this incarnation."""

    incarnation: int
    timeout_s: float
    chunks: tuple[tuple[int, int, int, int], ...]
    """First and end layer, first and end position in these page lists, which are int32 LE."""
    src_pages: bytes
    dst_pages: bytes

    @classmethod
    def of(
        cls,
        number: int,
        incarnation: int,
        timeout_s: float,
        chunks: Sequence[TransferKVChunk],
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
    ) -> WritePages:
        """Return the order with the part of the page lists that the chunks need."""
        first = min(chunk.first_page for chunk in chunks)
        part = slice(first, max(chunk.end_page for chunk in chunks))
        rows = tuple((c.first_layer, c.end_layer, c.first_page - first, c.end_page - first) for c in chunks)
        return cls(number, incarnation, timeout_s, rows, pack_i32(src_pages[part]), pack_i32(dst_pages[part]))


class WriteState(Order, frozen=True, tag="write_state"):
    """Write our part of a state row to the D of this incarnation."""

    incarnation: int
    timeout_s: float
    src_slot: int
    dst_slot: int


class Fence(Order, frozen=True, tag="fence"):
    """Make sure that no earlier write to that D can land any more."""

    incarnation: int
    timeout_s: float


class SumPages(Order, frozen=True, tag="sum"):
    """Compute checksums of our heads of these pages, over K and V of layers `[first_layer, end_layer)`."""

    first_layer: int
    end_layer: int
    pages: bytes
    of_features: bool = False
    """Whether the pages are rows of the feature region (`kv_cache/feature_pool.py`)."""


class SealState(Order, frozen=True, tag="seal_state"):
    """Return the seal of our part of a state row."""

    slot: int


class CopyShard(Order, frozen=True, tag="copy"):
    """Copy our heads of this page from the pool to its content in the tiers' memory, or back (`is_restore`)."""

    page: int
    offset: int
    """Offset of the content in the tiers' memory, in bytes."""
    is_restore: bool


class EndOrder(Order, frozen=True, tag="end"):
    """End the lane's thread, because the instance stops. Not answered."""


AnyOrder = Union[OpenPeer, ClosePeer, WritePages, WriteState, Fence, SumPages, SealState, CopyShard, EndOrder]


class OrderAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer of one follower to the order with this number. `code` empty: done."""

    number: int
    nbytes: int = 0
    sums: bytes = b""
    """Answer to `SumPages`: int64, native order."""
    seal: StateSeal | None = None
    """Answer to `SealState`."""
    is_fenced: bool = True
    """For a failed write: nothing of it can land any more. For a fence order: its result."""
    code: str = ""
    message: str = ""


encoder = msgspec.msgpack.Encoder()
order_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
answer_decoder: msgspec.msgpack.Decoder[OrderAnswer] = msgspec.msgpack.Decoder(OrderAnswer)
