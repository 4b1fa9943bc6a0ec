"""Token buckets, one per client, in bounded memory. Pure: a clock in, waits out. Used by the router on its loop thread.

A bucket holds `burst` requests and fills with `per_s` a second. Invariant: at most `max_buckets` are kept; the least
recently used one is evicted, which can only help its client.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from chitu.clock import Clock

MAX_BUCKETS = 10_000

Client = TypeVar("Client", bound=Hashable)


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimiter(Generic[Client]):
    """Limits the requests of each client."""

    def __init__(self, clock: Clock, per_s: float, burst: int, max_buckets: int = MAX_BUCKETS) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = float(burst)
        self._max_buckets = max_buckets
        self._buckets: OrderedDict[Client, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: Client) -> float:
        """Return 0 if the request may proceed; it then counts. Else return the seconds until one may; this one does not
        count."""
        now_s = self._clock.monotonic()
        bucket = self._buckets.get(client)
        if bucket is None:
            if len(self._buckets) >= self._max_buckets:
                self._buckets.popitem(last=False)
            bucket = self._buckets[client] = _Bucket(self._burst, now_s)
        else:
            self._buckets.move_to_end(client)
        bucket.tokens = min(self._burst, bucket.tokens + (now_s - bucket.at_s) * self._per_s)
        bucket.at_s = now_s
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / self._per_s
