"""The states of a request on the router with their events and transitions.

Pure table, which only `router/generation_machine.py` walks; docs/protocol.md shows it. Invariants (checked over the
table by `test/unit/test_generation_machine.py`): a request ends once; a request whose attempt failed gets another pair
or ends, whatever else comes. Every state in which an attempt runs has the request's deadline; PREFILL also has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class GenerationState(Enum):
    """State of a request, over all of its attempts: tries on one pair (or unified instance) each."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    ASKED = auto()
    """It was not sent to any instance yet."""
    PREFILL = auto()
    """An attempt was dispatched, and has no token yet."""
    DECODE = auto()
    """The attempt emits tokens."""
    DECODE_ALONE = auto()
    """As DECODE, but P's process died after the first token: D knows whether all KV had landed, and reports it if
    not."""
    RETRYING = auto()
    """The attempt failed, and it is not decided yet whether another one follows or the request ends."""
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class GenerationEvent(Enum):
    __hash__ = object.__hash__

    CHOSEN = auto()
    """A pair was found for the first or for another attempt."""
    FIRST_TOKEN = auto()
    """The present attempt received its first token."""
    PREFILL_DIED = auto()
    """P's process ended."""
    FAIL = auto()
    """The present attempt failed."""
    STALL = auto()
    """The attempt has no token and none can come: a half did not reach its instance, or both sides must have given up
    by now."""
    PREFILL_LOST = auto()
    """P left, was silent for too long or died. An attempt without a token moves if there is another pair, else it
    stays."""
    SILENCE = auto()
    """D receives nothing from P, and KV may be missing. The attempt moves if there is another pair, else it stays."""
    NO_PAIR = auto()
    """No other attempt may follow, or no instance can take it."""
    FINISH = auto()
    """Every token was received."""
    GIVE_UP = auto()
    """The request is out of time, is poison, or the process ends."""
    CANCEL = auto()
    """The request has no reader any more."""


_S, _E = GenerationState, GenerationEvent
RUNNING: Final = (_S.PREFILL, _S.DECODE, _S.DECODE_ALONE)
"""States in which an attempt runs."""

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
"""What a request waits for in each state that a clock ends."""
