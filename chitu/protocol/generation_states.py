"""The states of a request on the router with their events and transitions.

Pure table, which `router/generation_machine.py` alone walks; docs/protocol.md shows it. Invariants (checked over the
table by `test/unit/test_generation_machine.py`): a request ends once; a request whose attempt failed gets another pair
or ends, whatever else comes. Every state in which an attempt runs has the request's deadline, PREFILL its own, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class GenerationState(Enum):
    """Of a request, over all of its attempts: tries on one pair (or unified instance) each."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    ASKED = auto()
    """It was sent to nobody yet."""
    PREFILL = auto()
    """An attempt was dispatched, and no token of it came."""
    DECODE = auto()
    """Tokens come."""
    DECODE_ALONE = auto()
    """As DECODE, and P's process died behind the first token: D knows whether all KV had landed, and says so if not."""
    RETRYING = auto()
    """The attempt failed, and what follows is not decided: another one, or the end."""
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class GenerationEvent(Enum):
    __hash__ = object.__hash__

    CHOSEN = auto()
    """A pair was found that another attempt goes to (or the first)."""
    FIRST_TOKEN = auto()
    """Of the present attempt."""
    PREFILL_DIED = auto()
    """Its process ended."""
    FAIL = auto()
    """The present attempt is over."""
    STALL = auto()
    """It has no token, and none can come: a half did not get to its instance, or both must have given up by now."""
    PREFILL_LOST = auto()
    """P left, was silent for too long or died. Without a token it moves if another pair is there, else it stays."""
    SILENCE = auto()
    """D hears nothing of P, and KV may be missing. The same."""
    NO_PAIR = auto()
    """No other attempt may follow, or nobody is there to take it."""
    FINISH = auto()
    """Every token is here."""
    GIVE_UP = auto()
    """Out of time, poison, or the process ends."""
    CANCEL = auto()
    """Nobody waits for it any more."""


_S, _E = GenerationState, GenerationEvent
RUNNING: Final = (_S.PREFILL, _S.DECODE, _S.DECODE_ALONE)
"""An attempt runs."""

GENERATION_TRANSITIONS: Final[Mapping[tuple[GenerationState, GenerationEvent], GenerationState]] = {
    (_S.ASKED, _E.CHOSEN): _S.PREFILL,
    (_S.PREFILL, _E.FIRST_TOKEN): _S.DECODE,
    (_S.DECODE, _E.PREFILL_DIED): _S.DECODE_ALONE,
    (_S.PREFILL, _E.STALL): _S.RETRYING,
    (_S.PREFILL, _E.PREFILL_LOST): _S.PREFILL,
    **{(state, _E.SILENCE): state for state in RUNNING},
    **{(state, _E.FAIL): _S.RETRYING for state in RUNNING},
    **{(state, _E.CHOSEN): _S.PREFILL for state in (*RUNNING, _S.RETRYING)},
    (_S.RETRYING, _E.NO_PAIR): _S.FAILED,
    **{(state, _E.FINISH): _S.FINISHED for state in (*RUNNING, _S.RETRYING)},
    **{(state, _E.GIVE_UP): _S.FAILED for state in (*RUNNING, _S.RETRYING)},
    **{(state, _E.CANCEL): _S.CANCELLED for state in (*RUNNING, _S.RETRYING)},
}
"""(state, event) -> next state; a pair that is not here is absorbed."""

GENERATION_AWAITS: Final[Mapping[GenerationState, str]] = {
    GenerationState.PREFILL: "the first token of {peer}",
    GenerationState.DECODE: "the last token of {peer}",
    GenerationState.DECODE_ALONE: "the last token of {peer}",
    GenerationState.RETRYING: "another pair than {peer}",
}
"""What is missing in a state that a clock ends."""
