"""Events and effects of P's machine, and its record of a room.

`PrefillSender` makes the events and carries out the effects, in their order. Records only: no code except sums.
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
    """Start of its first chunk: KV before it was in the pages already."""
    next_page: int = 0
    """First page that finished steps have not handed out (of all layers)."""
    backlog: list[TransferKVChunk] = field(default_factory=list)
    """Chunks that were computed before the room was let go."""
    aux_slot: int = -1
    prompt_logprobs: bytes | None = None
    """Logprobs of the whole prompt, for D; None if they were not requested."""
    started_s: float = 0.0
    """Time at which its first chunk began to compute."""
    computed_s: float = 0.0
    """Time at which its logits row was complete."""


class Destination(NamedTuple):
    """D's announcement of a room, checked: where its bytes go."""

    info: TransferInfo
    peer: DecodePeer
    pages: Sequence[int]
    """Pages of D, in the order of the prompt; empty if D wants the logits row only."""
    first_page: int
    """First position in the page list that P writes."""


@dataclass(slots=True)
class SendRoom:
    """P's record of a room. The room's state decides what happens; of these fields only `units_left` does too."""

    request_id: str = ""
    decode_rank: int = -1
    decode_incarnation: int = 0
    """Incarnation of its D; 0 until the router's request or D's announcement comes."""
    computed: ComputedPrompt = field(default_factory=lambda: ComputedPrompt(0))
    destination: Destination | None = None
    units_left: int = 0
    """Pages times layers that have not landed yet, plus one for the logits row; known from the announcement on."""
    bytes_per_rank: tuple[int, ...] = ()
    """Bytes moved by each of our TP ranks."""
    kv_sums: RoomSums | None = None
    """Checksums of what was written, added to by the thread that works on the room; None if they are not needed."""
    error: ChituError | None = None
    repeat_due_s: float = NEVER_S
    requested_s: float = 0.0
    """Time of the router's request. `PrefillTimes` is made of it, the times in `computed`, and `landed_s`."""
    landed_s: float = 0.0

    @property
    def times(self) -> PrefillTimes:
        """Durations on P of a room that has landed."""
        started_s, computed_s = self.computed.started_s, self.computed.computed_s
        return PrefillTimes(started_s - self.requested_s, computed_s - started_s, self.landed_s - computed_s)


# --------------------------------------------------------------------------------------------------------------- events


class Requested(NamedTuple):
    """P's scheduler got the router's request for a room."""

    room: bytes
    request_id: str
    num_tokens: int
    decode_rank: int
    decode_incarnation: int


class FrameReceived(NamedTuple):
    """A registered D sent a frame about a room."""

    room: bytes
    message: TransferInfo | StatusAck | AbortTransfer
    peer: DecodePeer
    unreachable: ChituError | None = None
    """Reason why no connection to this D could be opened."""


class JobTaken(NamedTuple):
    """A transfer thread took a job and asks whether it may still be done."""

    job: TransferJob


class Written(NamedTuple):
    """Answer to `Write`. `bytes_per_rank`: bytes written by each TP rank, unless there is an `error`."""

    job: TransferJob
    bytes_per_rank: Sequence[int] = ()
    error: ChituError | None = None


class SettleResult(NamedTuple):
    """Answer to `SettleWrites`: nothing of the failed writes to this D can land any more, or the attempt failed."""

    settle: SettleWrites
    is_settled: bool
    error: ChituError | None = None


class DecodeDead(NamedTuple):
    """Nothing can land in the memory of this D any more: its process has ended."""

    peer: DecodePeer


Event = Union[Requested, Aborted, FrameReceived, JobTaken, Written, SettleResult, ViewChanged, DecodeDead, Tick]

# -------------------------------------------------------------------------------------------------------------- effects


class TrackChunks(NamedTuple):
    """Track the computed chunks of this room from now on."""

    room: bytes
    computed: ComputedPrompt


class StartSending(NamedTuple):
    """Queue what is computed of this room for writing, from this position on."""

    room: bytes
    first_page: int


class Stop(NamedTuple):
    """Write nothing more of this room, and forget what waits."""

    room: bytes


class QueueSettle(NamedTuple):
    """Queue a settle attempt."""

    room: bytes


class Write(NamedTuple):
    """Do the job, in the thread that sent `JobTaken`."""

    job: TransferJob
    record: SendRoom
    destination: Destination


class SettleWrites(NamedTuple):
    """Try to settle the failed writes to this D, in the thread that sent `JobTaken`."""

    room: bytes
    peer: DecodePeer
    rooms: tuple[bytes, ...]
    """Rooms that this attempt covers. A room whose write fails later is not among them."""


Effect = Union[Send, TransferEvent, DropEvents, Line, TrackChunks, StartSending, Stop, QueueSettle, Write, SettleWrites]
