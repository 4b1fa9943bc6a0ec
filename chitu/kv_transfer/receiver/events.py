"""Events and effects of D's machine, and its record of a room.

`DecodeReceiver` makes the events and carries out the effects, in their order. Records only: no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from chitu.errors import ChituError
from chitu.kv_transfer.events import Aborted, DropEvents, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.parts import Line
from chitu.kv_transfer.transfer_table import NEVER_S
from chitu.protocol import PeerMessage, TransferInfo, TransferStatus, TransferSums, TransportMessage


@dataclass(slots=True)
class ReceiveRoom:
    """D's record of a room. Nothing here decides: the room's state does (`protocol/states.py`)."""

    request_id: str
    info: TransferInfo
    aux_slot: int
    expected_bytes: int
    saved_bytes: int
    """Bytes of the pages that P does not write because D has them."""
    prefill_rank: int
    prefill_incarnation: int
    host: str = ""
    """P's address, kept by the room: the abort handshake outlives P's entry in the directory."""
    port: int = 0
    cached_tokens: int = 0
    """Prompt tokens that P did not have to compute; known with the logits row."""
    status: TransferStatus | None = None
    """P's Success status."""
    repeat_due_s: float = NEVER_S
    error: ChituError | None = None
    is_traced: bool = False
    """True if checksums of its pages are computed for a trace record, whatever `verify_kv` is."""
    sums: TransferSums | None = None
    """Checksums of its pages on both sides, if the request asked for them."""


# --------------------------------------------------------------------------------------------------------------- events


class Announced(NamedTuple):
    """D's scheduler announced a room."""

    room: bytes
    record: ReceiveRoom


class Received(NamedTuple):
    """A P sent a frame."""

    room: bytes
    message: PeerMessage


class RowChecked(NamedTuple):
    """Answer to `CheckRow`."""

    room: bytes
    error: ChituError | None
    cached_tokens: int = 0


class PagesChecked(NamedTuple):
    """Answer to `CheckPages`. `sums`: checksums of both sides, if the request asked for them."""

    room: bytes
    error: ChituError | None
    sums: TransferSums | None = None


class WriterDead(NamedTuple):
    """Nothing of this P writes any more, and none of our own transports writes for it."""

    incarnation: int


Event = Union[Announced, Aborted, Received, RowChecked, PagesChecked, ViewChanged, WriterDead, Tick]

# -------------------------------------------------------------------------------------------------------------- effects


class CheckRow(NamedTuple):
    """Verify the logits row."""

    room: bytes
    aux_slot: int


class CheckPages(NamedTuple):
    """Verify the pages against P's checksums."""

    room: bytes
    info: TransferInfo
    status: TransferStatus


class Deliver(NamedTuple):
    """Deliver a message to our own transport."""

    prefill_rank: int
    message: TransportMessage


Effect = Union[Send, TransferEvent, Line, DropEvents, CheckRow, CheckPages, Deliver]
