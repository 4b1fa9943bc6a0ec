"""The states of a room on P: the table by which it moves, the deadline of each state, and what is known of it there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from chitu.kv_transfer.both_sides import (
    Deadline,
    edges,
)


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
    UNFENCED = auto()
    """Failed, and a write of it that failed may still land. The transport is asked repeatedly to fence it."""
    FENCING = auto()
    """As UNFENCED, and a transfer thread fences it now, or will. Rooms of one D are fenced one at a time."""
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
    WRITE_UNFENCED = auto()
    """A write failed and may still land."""
    REFUSED = auto()
    """The two halves contradict each other (prompt length, page list)."""
    DEADLINE = auto()
    FENCE_BEGAN = auto()
    FENCE_FAILED = auto()
    """The attempt is over; the write may still land."""
    FENCED = auto()
    """The write that failed cannot land any more."""
    ACKNOWLEDGED = auto()
    """D knows how the room ended."""


S = SenderState
E = SenderEvent
SENDER_FAILURES: Final = frozenset(
    {
        E.ABORT,
        E.PEER_ABORT,
        E.PEER_LOST,
        E.WRITE_FAILED,
        E.REFUSED,
        E.DEADLINE,
    }
)
SENDER_NO_STATUS_OWED: Final = frozenset({E.PEER_ABORT, E.PEER_LOST})
"""After these P owes D no status."""
SENDER_TRANSITIONS: Final[Mapping[tuple[SenderState | None, SenderEvent], SenderState]] = {
    (None, E.ADD_REQUEST): S.REQUESTED,
    (None, E.ANNOUNCE): S.ANNOUNCED,
    (S.REQUESTED, E.ANNOUNCE): S.WAITING,
    (S.ANNOUNCED, E.ADD_REQUEST): S.WAITING,
    **edges((S.WAITING, S.TRANSFERRING), (E.WRITE_BEGAN,), S.WRITING),
    (S.WRITING, E.WRITE_ENDED): S.TRANSFERRING,
    (S.WRITING, E.LANDED): S.SUCCEEDED,
    **edges((S.REQUESTED, S.ANNOUNCED, S.WAITING), SENDER_FAILURES, S.FORGOTTEN),
    **edges((S.TRANSFERRING,), SENDER_FAILURES - SENDER_NO_STATUS_OWED, S.RELEASED),
    **edges(
        (S.TRANSFERRING, S.SUCCEEDED, S.RELEASED),
        SENDER_NO_STATUS_OWED,
        S.FORGOTTEN,
    ),
    **edges((S.WRITING,), SENDER_FAILURES - {E.WRITE_FAILED}, S.STOPPING),
    (S.WRITING, E.WRITE_FAILED): S.RELEASED,
    **edges(
        (S.STOPPING,),
        (E.WRITE_ENDED, E.LANDED, E.WRITE_FAILED),
        S.RELEASED,
    ),
    **edges((S.WRITING, S.STOPPING), (E.WRITE_UNFENCED,), S.UNFENCED),
    (S.UNFENCED, E.FENCE_BEGAN): S.FENCING,
    (S.FENCING, E.FENCE_FAILED): S.UNFENCED,
    **edges((S.UNFENCED, S.FENCING), (E.FENCED,), S.RELEASED),
    **edges(
        (S.SUCCEEDED, S.RELEASED),
        (E.ACKNOWLEDGED, E.DEADLINE),
        S.FORGOTTEN,
    ),
}
"""(state, event) -> next state; a pair that is not here is absorbed. `None`: the room is unknown."""
SENDER_DEADLINES: Final[Mapping[SenderState, Deadline]] = {
    S.REQUESTED: Deadline.BOOTSTRAP,
    S.ANNOUNCED: Deadline.TRANSFER,
    S.WAITING: Deadline.TRANSFER,
    S.TRANSFERRING: Deadline.TRANSFER,
    S.WRITING: Deadline.TRANSFER,
    S.SUCCEEDED: Deadline.REPEAT,
    S.STOPPING: Deadline.HANDSHAKE,
    S.UNFENCED: Deadline.HANDSHAKE,
    S.FENCING: Deadline.HANDSHAKE,
    S.RELEASED: Deadline.REPEAT,
    S.FORGOTTEN: Deadline.TERMINAL,
}
SENDER_AWAITS: Final[Mapping[SenderState, str]] = {
    S.REQUESTED: "{peer}'s announcement",
    S.ANNOUNCED: "the router's half of the request that {peer} announced",
    S.WAITING: "its computation and the first byte to {peer}",
    S.TRANSFERRING: "the last byte to reach {peer}",
    S.WRITING: "a write to {peer}",
    S.SUCCEEDED: "{peer}'s acknowledgement",
    S.RELEASED: "{peer}'s acknowledgement",
}
"""Event that a room waits for in each state that a clock ends."""
OPEN_STATES = frozenset(
    {
        S.REQUESTED,
        S.ANNOUNCED,
        S.WAITING,
        S.TRANSFERRING,
        S.WRITING,
    }
)
"""States in which a room has neither failed nor succeeded."""
WRITABLE_STATES = frozenset(
    {
        S.WAITING,
        S.TRANSFERRING,
        S.WRITING,
        S.STOPPING,
        S.UNFENCED,
        S.FENCING,
    }
)
"""States in which a write to D's pages may run, may start or may still land."""
