"""What a failed attempt means: which instances to blame, which the next attempt avoids, and whether there is one. Pure.

Called by `request.py`. A failure is known by its error and its reporter. An error of a link has two ends,
and neither end alone can tell which is broken, so both are suspects; later successes clear the innocent one.

Three bounds: `max_attempts` of failures that have a cause; `MAX_DEATHS`, since a request that kills its instances would
kill the next one too; `MAX_CUTS` in a row without a token, since a cut is no instance's fault and the next attempt may
get through. A request that came while its instance changed its weights is bounded by its own deadline alone: it never
began there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

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
    RoleChanged,
    ServiceError,
    SilentLink,
    TokensLost,
    TransferFailed,
    TransferStalled,
    TransferTimeout,
    WeightsChanged,
)
from chitu.router.candidates import NO_GROUPS, Groups, InstanceKey, with_groups

OF_THE_LINK = (TransferFailed, TransferTimeout, TransferStalled, Integrity)
BUSY = (Capacity, QueueTimeout, NoInstance)
"""Errors of an instance that has too much to do or does not read its messages: the retry goes to another one."""
FAULTS = (
    *(TransferFailed, TransferTimeout, Integrity),
    *(PrefillLost, DecodeLost, BootstrapTimeout, NoInstance, RequestLost, Internal),
)
"""Errors that count for an instance's circuit breaker. Having too much to do is no fault, nor is being slow. Nor is a
cut that took tokens of every request that runs there: the next one may well get through."""
DEADLINES = (BootstrapTimeout, QueueTimeout, TransferTimeout, TransferStalled)
"""Errors that take long: a client that asks again waits as long, unless something has changed."""
CUTS = (TokensLost, SilentLink, RoleChanged)
"""Errors of a broken or silent connection, or of an instance that changes its role: of no fault of an instance."""

MAX_DEATHS = 2
"""Accidents in which an instance died under one request; with this many, the request is taken for their cause."""
MAX_CUTS = 20
"""Attempts of a request in a row that were cut before they brought a token. If all connections break at once, that
costs two of them: the second goes to a D whose loss is not noticed yet."""


@dataclass(slots=True, frozen=True)
class Failure:
    """The failure of an attempt."""

    error: ChituError
    suspects: frozenset[InstanceKey]
    """Instances that further attempts of the same request avoid, as long as others can serve it."""
    dead: InstanceKey | None = None
    """Instance whose process is known to have died during the attempt; None if it was only silent, or left."""

    @property
    def needs_others(self) -> bool:
        return isinstance(self.error, BUSY)

    @property
    def is_fault(self) -> bool:
        return isinstance(self.error, FAULTS)

    @property
    def is_cut(self) -> bool:
        return isinstance(self.error, CUTS)

    @property
    def is_early(self) -> bool:
        """Whether the request came while its instance changed its weights. The next attempt waits until it has."""
        return isinstance(self.error, WeightsChanged)


class FailureHistory(msgspec.Struct):
    """Account of a request's failed attempts."""

    avoid: frozenset[InstanceKey] = frozenset()
    """Instances that failed the request so far."""
    failed: int = 0
    """Failed attempts, except cut ones."""
    cuts: int = 0
    """Cut attempts in a row, without a token."""
    deaths: int = 0
    beside: frozenset[InstanceKey] = frozenset()
    """Instances that had the request when one of them died, and the other members of their groups."""

    def add_death(self, dead: InstanceKey, pair: Iterable[InstanceKey | None]) -> None:
        """Record that an instance of the attempt's pair died. If both die together (they were killed, or a host was
        lost), that is one accident, though the second death may be noticed only after the next attempt went there. So
        is the death of a group: the pair comes with the other members of its groups."""
        if dead not in self.beside:
            self.deaths += 1
        self.beside |= {key for key in pair if key is not None}

    def add(self, failure: Failure, has_progressed: bool) -> None:
        """Record a failed attempt that another one follows."""
        if failure.is_early:
            return
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
    groups: Groups = NO_GROUPS,
) -> Failure:
    """Return what an error means. `reporter` is one of the pair, or the instance that the router itself found at fault;
    `prefill` is None if one unified instance did both halves. `groups`: those of the pair. A retry leaves the group of
    a suspect, unless that has only too much to do."""
    suspects: set[InstanceKey]
    if isinstance(error, WeightsChanged):
        suspects = set()  # it serves again once it has changed
    elif prefill is None:
        suspects = {decode}
    elif isinstance(error, OF_THE_LINK):
        suspects = {prefill, decode}
    elif isinstance(error, PrefillLost):
        suspects = {prefill}
    elif isinstance(error, DecodeLost):
        suspects = {decode}
    elif isinstance(error, BootstrapTimeout):
        suspects = {decode if reporter == prefill else prefill}  # the reporter waited for the other one
    else:
        suspects = {reporter}
    return Failure(error, with_groups(suspects, NO_GROUPS if isinstance(error, BUSY) else groups), dead)


def may_retry(
    failure: Failure, config: RetryConfig, record: FailureHistory, num_emitted: int, has_progressed: bool, left_s: float
) -> bool:
    """Return whether a request may continue after this failure and those of its `record`. `num_emitted` tokens are out
    (some by this attempt, if it `has_progressed`) and `left_s` seconds remain. A client's error fails everywhere, and a
    cancelled request has no reader."""
    if not isinstance(failure.error, ServiceError) or not failure.error.retryable:
        return False
    if num_emitted and not config.continue_streams:
        return False
    if failure.is_early:
        return left_s > 0
    if left_s <= 0 or config.max_attempts == 1:
        return False
    if failure.is_cut:
        return has_progressed or record.cuts + 1 < MAX_CUTS
    return record.failed + 1 < config.max_attempts
