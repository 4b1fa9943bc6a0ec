"""Bounds of what clients share, so that no client takes all. Pure but for the futures: a clock in, waits out; loop
thread.

*Token buckets*, one per client, in bounded memory: a bucket holds `burst` requests and fills with `per_s` a second.
Invariant: at most `max_buckets` are kept; the least recently used one is evicted, which can only help its client.

`Places` are for what many may have at once (event streams, tasks that wait), `Turns` for what is done one at a time.
Invariants: a client never has more than a third of what it leaves free; it waits for at most one task of each other
client between two of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
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


SHARE = 3
"""Free places for each one that a client has."""


class NoPlace(Exception):
    """The client has its share of the places."""


class Places(Generic[Client]):
    """`count` places. A client gets another one while it has less than a third of those that are free: a quarter of all
    if it is alone. What is left shrinks by a quarter with each client that takes all it can get, so of 256 places
    fifteen such clients leave some to the next."""

    def __init__(self, count: int) -> None:
        self.num_free = count
        self._held: Counter[Client] = Counter()

    @contextmanager
    def place(self, client: Client) -> Iterator[None]:
        """Hold a place as long as the context lasts. Raise NoPlace if the client has its share."""
        if not self.num_free or SHARE * self._held.get(client, 0) >= self.num_free:
            raise NoPlace
        self._held[client] += 1
        self.num_free -= 1
        try:
            yield
        finally:
            self._held[client] -= 1
            self.num_free += 1
            if not self._held[client]:
                del self._held[client]


class Turns(Generic[Client]):
    """Turns at what one task may use at a time. The clients alternate; tasks of one client are in order of arrival. At
    most `num_places` tasks have a turn or wait for one, shared as `Places` are."""

    def __init__(self, num_places: int) -> None:
        self._places: Places[Client] = Places(num_places)
        self._waiting: dict[Client, deque[asyncio.Future[None]]] = {}
        """Tasks that wait, by client; the client whose turn is next comes first."""
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context. Raise NoPlace if too many tasks of the client wait."""
        with self._places.place(client):
            await self._wait(client)
            try:
                yield
            finally:
                self._pass_on()

    async def _wait(self, client: Client) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(client, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given the turn just now
                self._pass_on()
            elif turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[client]
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # behind all others
            if not turn.done():  # else its task was cancelled, and is about to learn it
                turn.set_result(None)
                return
        self._is_taken = False
