"""The states of a request on its instance, as the step thread sees it, with their events and transitions.

Pure table, which only `instance/scheduling/sequences.py` walks; docs/protocol.md shows it. Invariants (checked over the
table by `test/unit/test_sequences.py`): a request ends once, from every state; it is LEAVING once, and then no peer
touches what it held.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class SequenceState(Enum):
    """State of a request on an instance. P: WAITING to INFLIGHT. D: WAITING, TRANSFER and later. Unified: WAITING,
    COMPUTING, RUNNING and later; with forks INFLIGHT, too."""

    __hash__ = object.__hash__  # each is the key of its queue; Enum's own is a Python function

    WAITING = auto()
    """It holds nothing."""
    COMPUTING = auto()
    """Its prompt is computed here, or its pages come from the cache tiers, so that less has to be computed."""
    INFLIGHT = auto()
    """P: the last chunk is launched, and its KV is being sent. Unified: the last chunk of a prompt with forks is
    launched."""
    TRANSFER = auto()
    """D: its pages were announced to P."""
    LOGITS = auto()
    """D: as TRANSFER, and the logits row has arrived. The first token can be sampled."""
    STARTED = auto()
    """D: as LOGITS, and the first token is launched. KV is still in flight."""
    LANDED = auto()
    """All of its prompt's KV and the logits row have arrived, and no token was launched."""
    RUNNING = auto()
    """It decodes."""
    RETRACTED = auto()
    """Its KV is in host memory."""
    FORK_WAITING = auto()
    """A choice whose prompt holds nothing yet."""
    FORK_HELD = auto()
    """A choice whose prompt holds pages: it holds these pages and a slot, too."""
    CLOSING = auto()
    """Over for the client, but a peer may still touch its pages, or a fork needs them."""
    LEAVING = auto()
    """All that it holds is free, or will be once a step in flight has been read."""


class SequenceEvent(Enum):
    __hash__ = object.__hash__

    ADMIT = auto()
    """It got pages and a slot, to be computed."""
    COMPUTED = auto()
    """The last chunk is launched, and no token is sampled with it."""
    GIVE_WAY = auto()
    """P: what it holds is given to a request that D has announced."""
    ANNOUNCE = auto()
    """It got pages, an aux slot and a slot, for P to write to."""
    ROW_HERE = auto()
    KV_HERE = auto()
    """All KV has arrived; for a fork, that of its prompt."""
    START = auto()
    """Its first token is launched."""
    HOLD = auto()
    """The prompt of a fork got pages."""
    RETRACT = auto()
    RESUME = auto()
    END = auto()
    """Its last token, a failure, a cancellation or a deadline came; on P, its KV was sent."""
    FREE = auto()
    """No peer and no fork needs what it holds."""


_S, _E = SequenceState, SequenceEvent

OPEN_STATES: Final = frozenset(_S) - {_S.CLOSING, _S.LEAVING}
"""States in which the request is not over for the client."""
AT_PEER_STATES: Final = frozenset({_S.TRANSFER, _S.LOGITS, _S.STARTED})
"""States of D in which P may write to its pages."""

SEQUENCE_TRANSITIONS: Final[Mapping[tuple[SequenceState, SequenceEvent], SequenceState]] = {
    (_S.WAITING, _E.ADMIT): _S.COMPUTING,
    (_S.COMPUTING, _E.COMPUTED): _S.INFLIGHT,
    (_S.COMPUTING, _E.GIVE_WAY): _S.WAITING,
    (_S.INFLIGHT, _E.GIVE_WAY): _S.WAITING,
    (_S.COMPUTING, _E.START): _S.RUNNING,
    (_S.WAITING, _E.ANNOUNCE): _S.TRANSFER,
    (_S.TRANSFER, _E.ROW_HERE): _S.LOGITS,
    (_S.LOGITS, _E.START): _S.STARTED,
    (_S.LOGITS, _E.KV_HERE): _S.LANDED,
    (_S.STARTED, _E.KV_HERE): _S.RUNNING,
    (_S.LANDED, _E.START): _S.RUNNING,
    (_S.RUNNING, _E.RETRACT): _S.RETRACTED,
    (_S.RETRACTED, _E.RESUME): _S.RUNNING,
    (_S.FORK_WAITING, _E.HOLD): _S.FORK_HELD,
    (_S.FORK_HELD, _E.KV_HERE): _S.LANDED,
    **{(state, _E.END): _S.CLOSING for state in _S if state in OPEN_STATES},
    (_S.CLOSING, _E.FREE): _S.LEAVING,
}
"""(state, event) -> next state; a pair that is not here is absorbed."""

SEQUENCE_AWAITS: Final[Mapping[SequenceState, str]] = {
    _S.WAITING: "pages or a slot",
    _S.COMPUTING: "the end of its prompt",
    _S.INFLIGHT: "its KV to reach the other side",
    _S.TRANSFER: "its logits",
    _S.LOGITS: "its first token",
    _S.STARTED: "its KV",
    _S.LANDED: "its first token",
    _S.RUNNING: "its last token",
    _S.RETRACTED: "pages to come back to",
    _S.FORK_WAITING: "pages for its prompt",
    _S.FORK_HELD: "its prompt",
}
"""What a request waits for in each state that is not over."""
