"""Events of a request on the router, and effects: what its machine wants done.

`Attempts` makes the events and carries out the effects in order. Only records, no code.
"""

from __future__ import annotations

from typing import Union

from msgspec import Struct

from chitu.errors import ChituError
from chitu.protocol import Finish, StageTimes
from chitu.protocol.snapshot import RequestSnapshot
from chitu.router.generation import Attempt, PromptGroup
from chitu.router.retry import Failure
from chitu.router.routing import InstanceKey, Target

# --------------------------------------------------------------------------------------------------------------- events


class PairChosen(Struct):
    """A pair for the first attempt, or the answer to `Choose`, with the `failure` and `token_ids` of that."""

    target: Target
    room: bytes
    token_ids: bytes
    failure: Failure | None = None
    is_cut_off: bool = False
    """D receives nothing from P."""
    group: PromptGroup | None = None


class NoPair(Struct):
    """The answer to `Choose` if no pair can serve."""

    failure: Failure


class TokensBegan(Struct):
    """The present attempt received its first token."""


class Finished(Struct):
    """D reported the end of the room."""

    finish: Finish
    is_prefill_here: bool = False
    """P is a member of the cluster."""


class AttemptFailed(Struct):
    """An attempt failed. `reporter` is its P or D, or the instance that the router itself found at fault."""

    error: ChituError
    reporter: InstanceKey
    is_peer_here: bool = False
    """The other instance of the pair is a member."""


class NotDelivered(Struct):
    """A half of the request does not reach its instance. Ignored after the first token, which took both halves."""

    error: ChituError
    reporter: InstanceKey


class InstanceLost(Struct):
    """An instance left, was silent for too long, or died."""

    key: InstanceKey
    reason: str
    has_died: bool


class Silent(Struct):
    """D receives nothing from P."""


class FirstTokenLate(Struct):
    """No first token came, and both sides must have given the attempt up by now."""


class OutOfTime(Struct):
    """The request's own deadline passed."""


class GivenUp(Struct):
    """The request is ended because the router's process ends."""

    error: ChituError


class ReaderGone(Struct):
    """The client left, or `is_complete`: it has its whole answer (a stop string was found)."""

    is_complete: bool


Event = Union[
    PairChosen,
    NoPair,
    TokensBegan,
    Finished,
    AttemptFailed,
    NotDelivered,
    InstanceLost,
    Silent,
    FirstTokenLate,
    OutOfTime,
    GivenUp,
    ReaderGone,
]

# -------------------------------------------------------------------------------------------------------------- effects


class Begin(Struct):
    """Send an attempt, unless its group is sent as one."""

    attempt: Attempt


class Choose(Struct):
    """Find a pair for these tokens: PairChosen or NoPair is the answer."""

    token_ids: bytes
    avoid: frozenset[InstanceKey]
    failure: Failure


class NoteStarted(Struct):
    """An attempt received its first token; `is_first`: it is also the first of the request."""

    attempt: Attempt
    is_first: bool


class Blame(Struct):
    """Count a failure in the circuit breakers of its suspects."""

    failure: Failure


class Cancel(Struct):
    """Cancel an attempt on both instances."""

    attempt: Attempt


class NoteServed(Struct):
    """A request was answered to its end. `stages`: as D reported them."""

    attempt: Attempt
    reason: str
    stages: StageTimes | None = None


class Ended(Struct):
    """An attempt is over, and so is its request unless the record is `retried`. `is_news`: the reader does not know
    yet."""

    attempt: Attempt
    record: RequestSnapshot
    is_news: bool = True


Effect = Union[Begin, Choose, NoteStarted, Blame, Cancel, NoteServed, Ended]
