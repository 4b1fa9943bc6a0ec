"""What a failed attempt means: who is to blame, who should not get the next one, and whether there is a next one. Pure.

Called by `PDRequestRouter`. A failure is told by its error and by who reported it; an error of a link has two ends, and
one of them alone cannot say which is broken, so both are suspects: successes with others clear the innocent one.
"""

from __future__ import annotations

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
    ServiceError,
    TransferFailed,
    TransferTimeout,
    Unreachable,
)
from chitu.routing import InstanceKey

OF_THE_LINK = (TransferFailed, TransferTimeout, Integrity)
BUSY = (Capacity, QueueTimeout, NoInstance)
"""An instance has too much to do, or does not read what it is sent: it need not be asked again at once."""
FAULTS = (*OF_THE_LINK, PrefillLost, DecodeLost, BootstrapTimeout, NoInstance, Unreachable, Internal)
"""What counts for an instance's circuit breaker. To have too much to do is no fault, nor is a cut that took requests or
tokens of everything that runs there at once (`RequestLost`, `TokensLost`): what comes next may well come through."""


@dataclass(slots=True, frozen=True)
class Failure:
    """An attempt's end."""

    error: ChituError
    suspects: frozenset[InstanceKey]
    """Who is left out of further attempts of the same request, as far as others can serve it."""

    @property
    def needs_others(self) -> bool:
        return isinstance(self.error, BUSY)

    @property
    def is_fault(self) -> bool:
        return isinstance(self.error, FAULTS)


def failure_of(error: ChituError, reporter: InstanceKey, prefill: InstanceKey | None, decode: InstanceKey) -> Failure:
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
    return Failure(error, frozenset(suspects))


def may_retry(failure: Failure, config: RetryConfig, num_attempts: int, num_emitted: int, left_s: float) -> bool:
    """Whether a request goes on after `num_attempts` attempts, with `num_emitted` tokens out and `left_s` seconds
    until it is out of time. What the client did wrong fails everywhere, what it cancelled nobody reads."""
    if not isinstance(failure.error, ServiceError) or not failure.error.retryable:
        return False
    if num_emitted and not config.continue_streams:
        return False
    return num_attempts < config.max_attempts and left_s > 0
