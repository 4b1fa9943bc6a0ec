"""What a failed attempt means: the instances to blame, those to leave out of the next one, and whether there is one.
Pure.

Called by `PDRequestRouter`. A failure is known by its error and its reporter; an error of a link has two ends, and
one of them alone cannot say which is broken, so both are suspects: successes with others clear the innocent one.

Three bounds: `max_attempts` of what fails for a reason; `MAX_DEATHS`, since what kills those who compute it would kill
the next one too; `MAX_CUTS` in a row without a token, since a cut is nobody's fault and the next try may be through.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chitu.config.schema import RetryConfig
from chitu.errors import (
    BootstrapTimeout,
    Capacity,
    ChituError,
    DecodeLost,
    Integrity,
    Internal,
    NoInstance,
    PrefillLost,
    QueueTimeout,
    RequestLost,
    ServiceError,
    SilentLink,
    TokensLost,
    TransferFailed,
    TransferTimeout,
)
from chitu.router.routing import InstanceKey

OF_THE_LINK = (TransferFailed, TransferTimeout, Integrity)
BUSY = (Capacity, QueueTimeout, NoInstance)
"""An instance has too much to do, or does not read what it is sent: it need not be asked again at once."""
FAULTS = (*OF_THE_LINK, PrefillLost, DecodeLost, BootstrapTimeout, NoInstance, RequestLost, Internal)
"""What counts for an instance's circuit breaker. To have too much to do is no fault, nor is a cut that took tokens
of everything that runs there at once: what comes next may well come through."""
CUTS = (TokensLost, SilentLink)
"""What a broken or silent connection did, and no instance."""

MAX_DEATHS = 2
"""Accidents of this kind under one request: then it is taken for their cause."""
MAX_CUTS = 20
"""Attempts of a request in a row that were cut before they brought a token. Where all connections break at once, that
costs two of them: the second is with a D whose loss is yet to be noticed."""


@dataclass(slots=True, frozen=True)
class Failure:
    """An attempt's end."""

    error: ChituError
    suspects: frozenset[InstanceKey]
    """The instances left out of further attempts of the same request, as far as others can serve it."""
    dead: InstanceKey | None = None
    """Whose process died under it, where one is known to have: not where it was silent, or left."""

    @property
    def needs_others(self) -> bool:
        return isinstance(self.error, BUSY)

    @property
    def is_fault(self) -> bool:
        return isinstance(self.error, FAULTS)

    @property
    def is_cut(self) -> bool:
        return isinstance(self.error, CUTS)


@dataclass(slots=True)
class Record:
    """What became of the attempts of a request that failed."""

    avoid: frozenset[InstanceKey] = frozenset()
    """The instances that failed it so far."""
    failed: int = 0
    """Attempts, cut ones aside."""
    cuts: int = 0
    """In a row, without a token."""
    deaths: int = 0
    beside: frozenset[InstanceKey] = frozenset()
    """The instances that had the request when one of them died."""

    def note_death(self, dead: InstanceKey, pair: Iterable[InstanceKey | None]) -> None:
        """One of its attempt's pair died. Where both die together (somebody killed them, or a host was lost), that is
        one accident, though the second one may be noticed after the next attempt went there."""
        if dead not in self.beside:
            self.deaths += 1
        self.beside |= {key for key in pair if key is not None}

    def note(self, failure: Failure, has_progressed: bool) -> None:
        """The attempt is over and another one follows."""
        self.avoid |= failure.suspects
        self.cuts = 0 if has_progressed else self.cuts
        if not failure.is_cut:
            self.failed += 1
        elif not has_progressed:
            self.cuts += 1


def failure_of(
    error: ChituError,
    reporter: InstanceKey,
    prefill: InstanceKey | None,
    decode: InstanceKey,
    dead: InstanceKey | None = None,
) -> Failure:
    """`reporter` is one of the two, or the one that the router itself has found out about; `prefill` is None where one
    unified instance did both halves."""
    if prefill is None:
        suspects = {decode}
    elif isinstance(error, OF_THE_LINK):
        suspects = {prefill, decode}
    elif isinstance(error, PrefillLost):
        suspects = {prefill}
    elif isinstance(error, DecodeLost):
        suspects = {decode}
    elif isinstance(error, BootstrapTimeout):
        suspects = {decode if reporter == prefill else prefill}  # it waited for the other one
    else:
        suspects = {reporter}
    return Failure(error, frozenset(suspects), dead)


def may_retry(
    failure: Failure, config: RetryConfig, record: Record, num_emitted: int, has_progressed: bool, left_s: float
) -> bool:
    """Whether a request goes on after this failure and those of its `record`, with `num_emitted` tokens out (some of
    them by this attempt, where it `has_progressed`) and `left_s` seconds until it is out of time. What the client did
    wrong fails everywhere, what it cancelled nobody reads."""
    if not isinstance(failure.error, ServiceError) or not failure.error.retryable:
        return False
    if num_emitted and not config.continue_streams:
        return False
    if left_s <= 0 or config.max_attempts == 1:
        return False
    if failure.is_cut:
        return has_progressed or record.cuts + 1 < MAX_CUTS
    return record.failed + 1 < config.max_attempts
