"""The states of a room on P and on D with their events, transitions and deadlines.

Those of a request on the router are in `request.py`, on its instance in `sequences.py`.

Pure tables. `kv_transfer/transfer_table.py` walks them, and is the only writer of their states and deadlines;
docs/protocol.md shows what ends each of them. Invariants (checked over the tables by `test/unit/test_states.py`): a
room that succeeded never fails, and the other way round; from every state a terminal one can be reached; every state of
a room that is not terminal either has a deadline by the clock or waits for an event that the protocol repeats until it
comes; a state with a deadline has a text for what it waits for, which its error quotes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum, auto
from typing import Final, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class KVPoll(IntEnum):
    """State of a room's transfer. Ranks are merged with MIN, so Failed is lowest; terminal states absorb all events."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class Deadline(Enum):
    """What ends a stay in a state if nothing else does. It runs from the first of the neighbouring states that have the
    same one: a later state of the same room does not extend it."""

    BOOTSTRAP = auto()
    """P: `queue_s + bootstrap_s` (D may wait that long for pages before it announces). D: `bootstrap_s`."""
    TRANSFER = auto()
    """`transfer_s` from TransferInfo, on either side."""
    REPEAT = auto()
    """`transfer_s` of repeating a status without an acknowledgement; then the room is forgotten."""
    HANDSHAKE = auto()
    """No clock: time alone must never free memory that a peer may touch. Left when the writer has stopped."""
    TERMINAL = auto()
    """Nothing more to wait for; the entry is dropped and only its tombstone is kept."""


NO_CLOCK: Final = frozenset({Deadline.HANDSHAKE, Deadline.TERMINAL})
"""Deadlines that no clock ends."""


def waited_text(who: str, waited_s: float, state: Enum, what: str) -> str:
    """Return the text of a deadline's error: `P0 waited 10.0 s in REQUESTED for D1's announcement`."""
    return f"{who} waited {waited_s:.1f} s in {state.name} for {what}"


# ------------------------------------------------------------------------------------------------------- P: the sender


class SenderState(Enum):
    __hash__ = object.__hash__  # of one batch the table is looked up twice; Enum's own is slow

    REQUESTED = auto()
    """The router's half is here, D's TransferInfo is not. The prompt may be computed meanwhile."""
    ANNOUNCED = auto()
    """TransferInfo is here, the router's half is not."""
    WAITING = auto()
    """Both halves are here, and no byte was written yet."""
    TRANSFERRING = auto()
    """Some bytes were written; no thread writes now."""
    WRITING = auto()
    """A transfer thread is inside a write."""
    SUCCEEDED = auto()
    """Every byte landed. The Success status is repeated until D acknowledges it."""
    STOPPING = auto()
    """Failed while a transfer thread is inside a write: pages stay allocated on both sides until it returns."""
    UNSETTLED = auto()
    """Failed, and a write of it that failed may still land. The transport is asked repeatedly to settle it."""
    SETTLING = auto()
    """As UNSETTLED, and a transfer thread settles it now, or will. Rooms of one D are settled one at a time."""
    RELEASED = auto()
    """Failed and over: no write of this room runs or can start. The Failed status is repeated."""
    FORGOTTEN = auto()
    """D knows the outcome, has given up itself, or is gone. Also a room that failed before its first byte: D has
    received nothing, so it repeats TransferInfo, and the tombstone answers."""


class SenderEvent(Enum):
    __hash__ = object.__hash__  # of one batch the table is looked up twice; Enum's own is slow

    ADD_REQUEST = auto()
    ANNOUNCE = auto()
    WRITE_BEGAN = auto()
    WRITE_ENDED = auto()
    """A write landed, and it was not the last one."""
    LANDED = auto()
    """The last byte is in D's memory."""
    ABORT = auto()
    """P's own scheduler gave the room up."""
    PEER_ABORT = auto()
    """D gave the room up (AbortTransfer)."""
    PEER_LOST = auto()
    """D's incarnation left the cluster view or was replaced."""
    WRITE_FAILED = auto()
    """A write failed and can no longer land, or D takes no writes."""
    WRITE_UNSETTLED = auto()
    """A write failed and may still land."""
    REFUSED = auto()
    """The two halves contradict each other (prompt length, page list)."""
    DEADLINE = auto()
    SETTLE_BEGAN = auto()
    SETTLE_FAILED = auto()
    """An attempt to settle is over; the write may still land."""
    SETTLED = auto()
    """The write that failed cannot land any more."""
    ACKNOWLEDGED = auto()
    """D knows how the room ended."""


def _edges(sources: Iterable[S], events: Iterable[E], target: S) -> dict[tuple[S | None, E], S]:
    causes = tuple(events)
    return {(source, event): target for source in sources for event in causes}


SENDER_FAILURES: Final = frozenset(
    {
        SenderEvent.ABORT,
        SenderEvent.PEER_ABORT,
        SenderEvent.PEER_LOST,
        SenderEvent.WRITE_FAILED,
        SenderEvent.REFUSED,
        SenderEvent.DEADLINE,
    }
)

SENDER_NO_STATUS_OWED: Final = frozenset({SenderEvent.PEER_ABORT, SenderEvent.PEER_LOST})
"""After these P owes D no status."""

SENDER_TRANSITIONS: Final[Mapping[tuple[SenderState | None, SenderEvent], SenderState]] = {
    (None, SenderEvent.ADD_REQUEST): SenderState.REQUESTED,
    (None, SenderEvent.ANNOUNCE): SenderState.ANNOUNCED,
    (SenderState.REQUESTED, SenderEvent.ANNOUNCE): SenderState.WAITING,
    (SenderState.ANNOUNCED, SenderEvent.ADD_REQUEST): SenderState.WAITING,
    **_edges((SenderState.WAITING, SenderState.TRANSFERRING), (SenderEvent.WRITE_BEGAN,), SenderState.WRITING),
    (SenderState.WRITING, SenderEvent.WRITE_ENDED): SenderState.TRANSFERRING,
    (SenderState.WRITING, SenderEvent.LANDED): SenderState.SUCCEEDED,
    **_edges(
        (SenderState.REQUESTED, SenderState.ANNOUNCED, SenderState.WAITING), SENDER_FAILURES, SenderState.FORGOTTEN
    ),
    **_edges((SenderState.TRANSFERRING,), SENDER_FAILURES - SENDER_NO_STATUS_OWED, SenderState.RELEASED),
    **_edges(
        (SenderState.TRANSFERRING, SenderState.SUCCEEDED, SenderState.RELEASED),
        SENDER_NO_STATUS_OWED,
        SenderState.FORGOTTEN,
    ),
    **_edges((SenderState.WRITING,), SENDER_FAILURES - {SenderEvent.WRITE_FAILED}, SenderState.STOPPING),
    (SenderState.WRITING, SenderEvent.WRITE_FAILED): SenderState.RELEASED,
    **_edges(
        (SenderState.STOPPING,),
        (SenderEvent.WRITE_ENDED, SenderEvent.LANDED, SenderEvent.WRITE_FAILED),
        SenderState.RELEASED,
    ),
    **_edges((SenderState.WRITING, SenderState.STOPPING), (SenderEvent.WRITE_UNSETTLED,), SenderState.UNSETTLED),
    (SenderState.UNSETTLED, SenderEvent.SETTLE_BEGAN): SenderState.SETTLING,
    (SenderState.SETTLING, SenderEvent.SETTLE_FAILED): SenderState.UNSETTLED,
    **_edges((SenderState.UNSETTLED, SenderState.SETTLING), (SenderEvent.SETTLED,), SenderState.RELEASED),
    **_edges(
        (SenderState.SUCCEEDED, SenderState.RELEASED),
        (SenderEvent.ACKNOWLEDGED, SenderEvent.DEADLINE),
        SenderState.FORGOTTEN,
    ),
}
"""(state, event) -> next state; a pair that is not here is absorbed. `None`: the room is unknown."""

SENDER_DEADLINES: Final[Mapping[SenderState, Deadline]] = {
    SenderState.REQUESTED: Deadline.BOOTSTRAP,
    SenderState.ANNOUNCED: Deadline.TRANSFER,
    SenderState.WAITING: Deadline.TRANSFER,
    SenderState.TRANSFERRING: Deadline.TRANSFER,
    SenderState.WRITING: Deadline.TRANSFER,
    SenderState.SUCCEEDED: Deadline.REPEAT,
    SenderState.STOPPING: Deadline.HANDSHAKE,
    SenderState.UNSETTLED: Deadline.HANDSHAKE,
    SenderState.SETTLING: Deadline.HANDSHAKE,
    SenderState.RELEASED: Deadline.REPEAT,
    SenderState.FORGOTTEN: Deadline.TERMINAL,
}

SENDER_AWAITS: Final[Mapping[SenderState, str]] = {
    SenderState.REQUESTED: "{peer}'s announcement",
    SenderState.ANNOUNCED: "the router's half of what {peer} announced",
    SenderState.WAITING: "its own computing and the first byte to reach {peer}",
    SenderState.TRANSFERRING: "the last byte to reach {peer}",
    SenderState.WRITING: "a write to {peer}",
    SenderState.SUCCEEDED: "{peer}'s acknowledgement",
    SenderState.RELEASED: "{peer}'s acknowledgement",
}
"""What a room waits for in each state that a clock ends."""


# ----------------------------------------------------------------------------------------------------- D: the receiver


class ReceiverState(Enum):
    BOOTSTRAPPING = auto()
    """Announced by the scheduler; P does not have D's registration yet, so it was not sent the pages."""
    WAITING = auto()
    """TransferInfo was sent (and is repeated until P's first sign)."""
    CHECKING = auto()
    """P reported that the aux row is here; D verifies it."""
    LOGITS = auto()
    """The aux row is here and verified; KV is in flight."""
    WRITTEN = auto()
    """P reported Success: it writes nothing here any more, whatever becomes of the room. D verifies the aux row
    first."""
    VERIFYING = auto()
    """As WRITTEN, and the aux row is verified; D verifies the KV (`verify_kv`)."""
    SUCCEEDED = auto()
    """All bytes are here; the pages belong to the request again."""
    QUARANTINED = auto()
    """Failed; P may still write. AbortTransfer is repeated until P acknowledges that it stopped, or is known dead."""
    RELEASED = auto()
    """Failed, and P cannot write the pages any more."""


class ReceiverEvent(Enum):
    ANNOUNCE = auto()
    SENT = auto()
    """P acknowledged D's registration, and TransferInfo is sent."""
    ROW_SENT = auto()
    """P sent AuxReady."""
    LOGITS = auto()
    """The aux row is correct."""
    SUCCESS = auto()
    """P wrote its last byte, as many as were announced."""
    VERIFIED = auto()
    """The KV is correct."""
    ABORT = auto()
    """D's own scheduler gave the room up."""
    PEER_FAILED = auto()
    """P gave the room up and may still write, or it refused the registration."""
    STOPPED = auto()
    """P has stopped for good and D does not have all: AbortAck, a settled Failed, Success with other bytes."""
    PEER_LOST = auto()
    """P's incarnation left the cluster view or was replaced."""
    CORRUPT = auto()
    """The aux row or verified KV is not what P computed."""
    DEADLINE = auto()
    WRITER_DEAD = auto()
    """The writer's process is dead and none of D's own transports writes for it."""


RECEIVER_OWN_FAILURES: Final = frozenset({ReceiverEvent.ABORT, ReceiverEvent.CORRUPT, ReceiverEvent.DEADLINE})
"""Failures that can end a room after P's Success: P cannot take back what it has written."""
RECEIVER_FAILURES: Final = RECEIVER_OWN_FAILURES | {ReceiverEvent.PEER_FAILED, ReceiverEvent.PEER_LOST}
_WRITTEN_TO: Final = (ReceiverState.WAITING, ReceiverState.CHECKING, ReceiverState.LOGITS)

RECEIVER_TRANSITIONS: Final[Mapping[tuple[ReceiverState | None, ReceiverEvent], ReceiverState]] = {
    (None, ReceiverEvent.ANNOUNCE): ReceiverState.BOOTSTRAPPING,
    (ReceiverState.BOOTSTRAPPING, ReceiverEvent.SENT): ReceiverState.WAITING,
    (ReceiverState.WAITING, ReceiverEvent.ROW_SENT): ReceiverState.CHECKING,
    (ReceiverState.CHECKING, ReceiverEvent.LOGITS): ReceiverState.LOGITS,
    **_edges((ReceiverState.WAITING, ReceiverState.CHECKING), (ReceiverEvent.SUCCESS,), ReceiverState.WRITTEN),
    (ReceiverState.WRITTEN, ReceiverEvent.LOGITS): ReceiverState.VERIFYING,
    (ReceiverState.LOGITS, ReceiverEvent.SUCCESS): ReceiverState.VERIFYING,
    (ReceiverState.VERIFYING, ReceiverEvent.VERIFIED): ReceiverState.SUCCEEDED,
    **_edges((ReceiverState.BOOTSTRAPPING,), RECEIVER_FAILURES, ReceiverState.RELEASED),
    **_edges(_WRITTEN_TO, RECEIVER_FAILURES, ReceiverState.QUARANTINED),
    **_edges(_WRITTEN_TO, (ReceiverEvent.STOPPED,), ReceiverState.RELEASED),
    **_edges((ReceiverState.WRITTEN, ReceiverState.VERIFYING), RECEIVER_OWN_FAILURES, ReceiverState.RELEASED),
    **_edges(
        (ReceiverState.QUARANTINED,),
        (ReceiverEvent.STOPPED, ReceiverEvent.SUCCESS, ReceiverEvent.WRITER_DEAD),
        ReceiverState.RELEASED,
    ),
}
"""As SENDER_TRANSITIONS."""

RECEIVER_DEADLINES: Final[Mapping[ReceiverState, Deadline]] = {
    ReceiverState.BOOTSTRAPPING: Deadline.BOOTSTRAP,
    ReceiverState.WAITING: Deadline.TRANSFER,
    ReceiverState.CHECKING: Deadline.TRANSFER,
    ReceiverState.LOGITS: Deadline.TRANSFER,
    ReceiverState.WRITTEN: Deadline.TRANSFER,
    ReceiverState.VERIFYING: Deadline.TRANSFER,
    ReceiverState.SUCCEEDED: Deadline.TERMINAL,
    ReceiverState.QUARANTINED: Deadline.HANDSHAKE,
    ReceiverState.RELEASED: Deadline.TERMINAL,
}

RECEIVER_AWAITS: Final[Mapping[ReceiverState, str]] = {
    ReceiverState.BOOTSTRAPPING: "{peer} to take its registration",
    ReceiverState.WAITING: "{peer}'s logits",
    ReceiverState.CHECKING: "its own look at {peer}'s logits",
    ReceiverState.LOGITS: "{peer}'s last KV",
    ReceiverState.WRITTEN: "its own look at {peer}'s logits",
    ReceiverState.VERIFYING: "its own look at {peer}'s KV",
}


class RegistrationState(Enum):
    """State of D's registration with an incarnation of P."""

    ASKED = auto()
    """The registration was sent, and is repeated until P replies."""
    ACCEPTED = auto()
    REFUSED = auto()
    """P refused for good: it will not change its answer within this incarnation."""


class RegistrationEvent(Enum):
    ACCEPT = auto()
    REFUSE = auto()
    LOST = auto()
    """P left the view, or has another address now: it may have forgotten D."""


REGISTRATION_TRANSITIONS: Final[Mapping[tuple[RegistrationState, RegistrationEvent], RegistrationState]] = {
    (RegistrationState.ASKED, RegistrationEvent.ACCEPT): RegistrationState.ACCEPTED,
    (RegistrationState.ASKED, RegistrationEvent.REFUSE): RegistrationState.REFUSED,
    (RegistrationState.ACCEPTED, RegistrationEvent.LOST): RegistrationState.ASKED,
}
