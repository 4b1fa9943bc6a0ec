"""What happens to P's machine (events), what it wants done (effects), and what both know of a room.

`PrefillSender` makes the events and carries out the effects, in their order. Records alone: no code but sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from chitu.errors import ChituError
from chitu.kv_transfer.checksums import RoomSums
from chitu.kv_transfer.events import Aborted, DropEvents, Send, Tick, TransferEvent, ViewChanged
from chitu.kv_transfer.parts import Line
from chitu.kv_transfer.sender.registration import DecodePeer
from chitu.kv_transfer.sender.transfer_queue import TransferJob, TransferKVChunk
from chitu.kv_transfer.transfer_table import NEVER_S
from chitu.protocol import AbortTransfer, PrefillTimes, StatusAck, TransferInfo


@dataclass(slots=True)
class ComputedPrompt:
    """What P has computed of a room. `ChunkFeed` writes it; the machine only passes it on."""

    num_tokens: int
    pages: Sequence[int] = ()
    cached_tokens: int = 0
    """Where its first chunk began: what is before was in the pages already."""
    next_page: int = 0
    """Pages before this one (of all layers) were handed out by finished steps."""
    backlog: list[TransferKVChunk] = field(default_factory=list)
    """Computed, not announced."""
    aux_slot: int = -1
    prompt_logprobs: bytes | None = None
    """Of all of the prompt, for D; None where nobody asks."""
    started_s: float = 0.0
    """When its first chunk began to compute."""
    computed_s: float = 0.0
    """When its logits row was complete."""


class Destination(NamedTuple):
    """D's half of a room, checked: where its bytes go."""

    info: TransferInfo
    peer: DecodePeer
    pages: Sequence[int]
    """Of D, in the order of the prompt; none where D wants the logits row alone."""
    first_page: int
    """Position from which P writes."""


@dataclass(slots=True)
class SendRoom:
    """What P knows of a room. Nothing here decides but what is left to write: the room's state does."""

    request_id: str = ""
    decode_rank: int = -1
    decode_incarnation: int = 0
    """Of its D; 0 while neither half is here."""
    computed: ComputedPrompt = field(default_factory=lambda: ComputedPrompt(0))
    destination: Destination | None = None
    units_left: int = 0
    """Pages times layers that have not landed yet, and one for the logits row; known from the announcement on."""
    bytes_per_rank: tuple[int, ...] = ()
    """Moved by each of our TP ranks."""
    kv_sums: RoomSums | None = None
    """Checksums of what was written, added to by the thread that visits the room; None where nobody wants them."""
    error: ChituError | None = None
    repeat_due_s: float = NEVER_S
    requested_s: float = 0.0
    """When the router's half came; with those of `computed` and the next, what `PrefillTimes` is made of."""
    landed_s: float = 0.0

    @property
    def times(self) -> PrefillTimes:
        """Of a room that has landed."""
        started_s, computed_s = self.computed.started_s, self.computed.computed_s
        return PrefillTimes(started_s - self.requested_s, computed_s - started_s, self.landed_s - computed_s)


# --------------------------------------------------------------------------------------------------------------- events


class Requested(NamedTuple):
    """By P's scheduler: the router's half."""

    room: bytes
    request_id: str
    num_tokens: int
    decode_rank: int
    decode_incarnation: int


class Heard(NamedTuple):
    """A frame of a registered D about a room."""

    room: bytes
    message: TransferInfo | StatusAck | AbortTransfer
    peer: DecodePeer
    unreachable: ChituError | None = None
    """Why no connection to this D could be opened."""


class Visited(NamedTuple):
    """A transfer thread has a job in its hands: may it still be done?"""

    job: TransferJob


class Written(NamedTuple):
    """Answers `Write`. `bytes_per_rank`: written by each TP rank, unless there is an `error`."""

    job: TransferJob
    bytes_per_rank: Sequence[int] = ()
    error: ChituError | None = None


class SettleTried(NamedTuple):
    """Answers `SettleWrites`: nothing of the failed writes to this D can land any more, or the attempt failed."""

    settle: SettleWrites
    is_settled: bool
    error: ChituError | None = None


class DecodeDead(NamedTuple):
    """Nothing can land in the memory of this D any more: its process has ended."""

    peer: DecodePeer


Event = Union[Requested, Aborted, Heard, Visited, Written, SettleTried, ViewChanged, DecodeDead, Tick]

# -------------------------------------------------------------------------------------------------------------- effects


class Compute(NamedTuple):
    """Chunks of this room count from now on."""

    room: bytes
    computed: ComputedPrompt


class LetGo(NamedTuple):
    """What is computed of this room may be written, from this position on."""

    room: bytes
    first_page: int


class Stop(NamedTuple):
    """Nothing more of this room is to be written: forget what waits."""

    room: bytes


class AskToSettle(NamedTuple):
    """Queue an attempt."""

    room: bytes


class Write(NamedTuple):
    """In the thread that asked by `Visited`."""

    job: TransferJob
    record: SendRoom
    destination: Destination


class SettleWrites(NamedTuple):
    """In the thread that asked by `Visited`."""

    room: bytes
    peer: DecodePeer
    rooms: tuple[bytes, ...]
    """All that it is for. One whose write fails later is none of them."""


Effect = Union[Send, TransferEvent, DropEvents, Line, Compute, LetGo, Stop, AskToSettle, Write, SettleWrites]
