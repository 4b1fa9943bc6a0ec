"""What a process of the router counts, as records that are sent and added up.

`PDRequestRouter` writes a `RouterMetrics` on its loop thread, `PDCoordination` a `CoordinationMetrics`;
`http/fleet/metrics_text.py` writes both as Prometheus text. Counting adds to an attribute or a list; nothing here is
allocated per token.

Invariant: every value is zero or more, and the sum over routers means the same as the value of one. Keys of the dicts
come from closed lists (error codes, finish reasons) or are names of instances, never request ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import partial
from typing import Any, TypeVar

import msgspec

TIME_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the buckets of every histogram; finest at usual times between tokens."""

T = TypeVar("T", bound=msgspec.Struct)
Counts = dict[str, int]


class TimeHistogram(msgspec.Struct):
    """Seconds, counted in the buckets of `TIME_BOUNDS_S`."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    """One count per bound, not cumulative; the last one counts longer spans."""
    sum_s: float = 0.0

    def observe(self, span_s: float, times: int = 1) -> None:
        """Add `times` spans of this length. A negative span (clocks of two threads) counts as zero."""
        if span_s < 0:
            span_s = 0.0
        self.counts[bisect_left(TIME_BOUNDS_S, span_s)] += times
        self.sum_s += span_s * times

    @property
    def count(self) -> int:
        return sum(self.counts)


Histograms = dict[str, TimeHistogram]


def _counts() -> Any:
    return msgspec.field(default_factory=partial(defaultdict, int))


def _histogram() -> Any:
    return msgspec.field(default_factory=TimeHistogram)


class RouterMetrics(msgspec.Struct):
    """Metrics of the router since its start. A request is one choice of one prompt; an attempt is one try of it on
    a pair."""

    requests: int = 0
    """Accepted requests."""
    prompt_tokens: int = 0
    """Prompt tokens of accepted requests."""
    finished: Counts = _counts()
    """Finished requests by finish reason, `stop` or `length`; a stop string is `stop`."""
    failed: Counts = _counts()
    """Accepted requests that ended with an error, by its code."""
    cancelled: int = 0
    """Requests whose client left."""
    rejected: Counts = _counts()
    """Requests that were not accepted, by the code of the error."""
    attempts: int = 0
    """Attempts sent to a pair."""
    retries: Counts = _counts()
    """Attempts that failed and were followed by another, by the code of the failure."""
    continuations: int = 0
    """Retries that had to prefill emitted tokens again."""
    recomputed_tokens: int = 0
    """Prompt and emitted tokens that continuations prefilled again."""
    breaker_openings: Counts = _counts()
    """Openings of circuit breakers by name of the instance."""
    tokens: int = 0
    """Tokens received from decode instances, stale ones included."""
    stale_tokens: int = 0
    """Tokens of rooms that are over (cancelled, timed out) or never were of this process."""
    bad_token_messages: int = 0
    early_tokens: Counts = _counts()
    """First tokens that P drew, too: `shown` ahead of D's, `confirmed` by D's, `late` (D's was shown), `different`
    from D's, or `stale` (its room is over)."""

    ttft: TimeHistogram = _histogram()
    """Time from acceptance to the first token, measured on the router, as the next three."""
    inter_token: TimeHistogram = _histogram()
    """Time between two tokens of a request as its reader sees them; see `PDRequestRouter.flush`."""
    second_token: TimeHistogram = _histogram()
    """Time from the first token to the second one of requests that are read token by token: what an early first token
    does not shorten."""
    e2e: TimeHistogram = _histogram()
    """Time from acceptance to the end of finished requests."""
    stages: dict[str, Histograms] = msgspec.field(
        default_factory=partial(defaultdict, partial(defaultdict, TimeHistogram))
    )
    """Times of finished requests in the stages (`protocol/account.py`) `admission`, by D, and `queue`, `compute` and
    `transfer`, by P or unified instance."""
    loop_lag: TimeHistogram = _histogram()
    """Delay of the event loop's timers."""

    in_flight: Counts = _counts()
    """Requests in flight now, by state: `prefill` until the first token, then `decode`."""
    breakers: dict[str, Counts] = {}
    """Present breaker states by name of the instance, each with count 1."""
    image_files: int = 0
    """Files of images of requests in flight now."""
    image_bytes: int = 0
    """Their size."""


class BalanceMetrics(msgspec.Struct):
    """What the balancer says (`router.balance`), by role."""

    wanted: dict[str, int] = {}
    """Instances that the load asks for."""
    pressure: dict[str, float] = {}
    """Work over what the present instances should have to do."""
    role_changes: Counts = _counts()
    """Instances that it had take the role."""
    advice: str = ""
    """The change that is due, and an instance that is slow; empty if there is neither."""


class CoordinationMetrics(msgspec.Struct):
    """What the process that keeps the membership counts beyond the cluster view. Keys are names of instances."""

    expired_leases: Counts = _counts()
    """Leases that ended because no heartbeat came."""
    deaths: Counts = _counts()
    """Processes that ended without a Leave."""
    unknown_heartbeats: int = 0
    """Heartbeats of incarnations that are not members."""
    bad_frames: Counts = _counts()
    """Messages that could not be read, by port."""
    ages_s: dict[str, float] = {}
    """Seconds since the member joined."""
    heartbeat_ages_s: dict[str, float] = {}
    """Seconds since the member's last heartbeat."""
    balance: BalanceMetrics | None = None
    """None with `balance: off`."""
