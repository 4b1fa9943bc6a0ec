"""What happens to D's machine (events) and what it wants done (effects).

`DecodeReceiver` makes the events and carries out the effects, in their order. Records alone: no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from chitu.errors import ChituError
from chitu.kv_transfer.events import Aborted, DropEvents, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.parts import Line
from chitu.kv_transfer.transfer_table import NEVER_S
from chitu.protocol import PeerMessage, TransferInfo, TransferStatus, TransportMessage


@dataclass(slots=True)
class ReceiveRoom:
    """What D knows of a room. Nothing here decides: the room's state does (`protocol/states.py`)."""

    request_id: str
    info: TransferInfo
    aux_slot: int
    expected_bytes: int
    saved_bytes: int
    """Of pages that P does not write, as D has them."""
    prefill_rank: int
    prefill_incarnation: int
    host: str = ""
    """P's address, kept by the room: the abort handshake outlives P's entry in the directory."""
    port: int = 0
    cached_tokens: int = 0
    """Of the prompt, that P did not have to compute: known with the logits row."""
    status: TransferStatus | None = None
    """P's Success."""
    repeat_due_s: float = NEVER_S
    error: ChituError | None = None
    is_traced: bool = False
    """Its pages are looked at for a trace record, whatever `verify_kv` says."""


# --------------------------------------------------------------------------------------------------------------- events


class Announced(NamedTuple):
    """By D's scheduler."""

    room: bytes
    record: ReceiveRoom


class Received(NamedTuple):
    """A frame of a P."""

    room: bytes
    message: PeerMessage


class RowChecked(NamedTuple):
    """Answers `CheckRow`."""

    room: bytes
    error: ChituError | None
    cached_tokens: int = 0


class PagesChecked(NamedTuple):
    """Answers `CheckPages`."""

    room: bytes
    error: ChituError | None


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
    """Verify the pages by P's checksums."""

    room: bytes
    info: TransferInfo
    status: TransferStatus


class Deliver(NamedTuple):
    """To our own transport."""

    prefill_rank: int
    message: TransportMessage


Effect = Union[Send, TransferEvent, Line, DropEvents, CheckRow, CheckPages, Deliver]
