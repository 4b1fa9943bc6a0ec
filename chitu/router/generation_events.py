"""What happens to a request on the router (events) and what its machine wants done (effects).

`Attempts` makes the events and carries out the effects, in their order. Records alone: no code.
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
    """For the first attempt, or as an answer to `Choose`, whose `failure` and `token_ids` it brings back."""

    target: Target
    room: bytes
    token_ids: bytes
    failure: Failure | None = None
    is_cut_off: bool = False
    """The two do not hear each other."""
    group: PromptGroup | None = None


class NoPair(Struct):
    """The other answer."""

    failure: Failure


class TokensBegan(Struct):
    """Of the present attempt."""


class Finished(Struct):
    """D said so."""

    finish: Finish
    is_prefill_here: bool = False
    """P is a member."""


class AttemptFailed(Struct):
    """`reporter`: P or D, or whom the router found out about itself."""

    error: ChituError
    reporter: InstanceKey
    is_peer_here: bool = False
    """The other half of the pair is a member."""


class NotDelivered(Struct):
    """A half of the request does not get to its instance. After the first token nobody needs it: that took both."""

    error: ChituError
    reporter: InstanceKey


class InstanceLost(Struct):
    """It left, was silent for too long, or died."""

    key: InstanceKey
    reason: str
    has_died: bool


class Silent(Struct):
    """D hears nothing of P."""


class FirstTokenLate(Struct):
    """Both sides must have given the attempt up by now."""


class OutOfTime(Struct):
    """The request's own deadline passed."""


class GivenUp(Struct):
    """The process ends."""

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
    """Dispatch it, unless its group is."""

    attempt: Attempt


class Choose(Struct):
    """Find a pair for these tokens: PairChosen or NoPair is the answer."""

    token_ids: bytes
    avoid: frozenset[InstanceKey]
    failure: Failure


class NoteStarted(Struct):
    """Its first token came; `is_first`: that of its request, too."""

    attempt: Attempt
    is_first: bool


class Blame(Struct):
    """Circuit breakers count it."""

    failure: Failure


class Cancel(Struct):
    """Tell both instances."""

    attempt: Attempt


class NoteServed(Struct):
    """A request was answered to its end. `stages`: as D told."""

    attempt: Attempt
    reason: str
    stages: StageTimes | None = None


class Ended(Struct):
    """The attempt is over, and its request, unless it is `retried`. `is_news`: its reader does not know."""

    attempt: Attempt
    record: RequestSnapshot
    is_news: bool = True


Effect = Union[Begin, Choose, NoteStarted, Blame, Cancel, NoteServed, Ended]
