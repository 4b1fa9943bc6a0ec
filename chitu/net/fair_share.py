"""Bounds of what clients share, so that no client takes all. Pure but for the futures: a clock in, waits out; loop
thread.

*Token buckets*, one per client, in bounded memory: a bucket holds `burst` requests and fills with `per_s` a second.
Invariant: at most `max_buckets` are kept; the least recently used one is evicted, which can only help its client.

`Places` are for what many may have at once (event streams, tasks that wait), `Turns` for what few tasks can use at a
time. Invariants: a client never has more than a third of what it leaves free; it waits for at most one task of each
other client between two of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from chitu.clock import Clock

MAX_BUCKETS = 10_000

Client = TypeVar("Client", bound=Hashable)
SHARE = 3
"""Free places for each one that a client has."""
T = TypeVar("T")


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
    """Turns at what `count` tasks may use at a time. The client with the fewest comes next, of equal ones each in turn;
    tasks of one client are in order of arrival. At most `num_places` tasks have a turn or wait for one, shared as
    `Places` are (None: any number)."""

    def __init__(self, num_places: int | None, count: int = 1) -> None:
        self._places: Places[Client] | None = None if num_places is None else Places(num_places)
        self._num_free = count
        self._held: Counter[Client] = Counter()
        self._waiting: dict[Client, deque[asyncio.Future[None]]] = {}
        """Tasks that wait, by client; the client whose turn is next comes first."""
        self._works: dict[Client, list[asyncio.Future[Any]]] = {}
        """What `do` does now; the newest is last."""
        self._owed: Counter[Client] = Counter()
        """Turns that were taken back for a client that waits, and have not come to it yet."""

    @asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context. Raise NoPlace if too many tasks of the client wait."""
        with nullcontext() if self._places is None else self._places.place(client):
            await self._wait(client)
            try:
                yield
            finally:
                self._pass_on(client)

    async def do(self, client: Client, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, done in a turn of the client. While another client with fewer turns waits, the
        newest work of the one with the most is cancelled, and done again in a later turn."""
        while True:
            async with self.turn(client):
                task = asyncio.ensure_future(work())
                works = self._works.setdefault(client, [])
                works.append(task)
                try:
                    return await task
                except asyncio.CancelledError:
                    caller = asyncio.current_task()
                    if task in works or (caller is not None and caller.cancelling()):
                        raise
                finally:
                    if task in works:
                        works.remove(task)
                    if not works:
                        self._works.pop(client, None)

    async def _wait(self, client: Client) -> None:
        if self._num_free:
            self._num_free -= 1
            self._held[client] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(client, deque())
        queue.append(turn)
        self._take_back_for(client)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given the turn just now
                self._pass_on(client)
            elif turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[client]
                    del self._owed[client]
            raise

    def _take_back_for(self, client: Client) -> None:
        """Cancel the newest work of the client that has the most, unless this one would then have more."""
        giver = max(self._works, key=lambda each: len(self._works[each]), default=client)
        if len(self._works.get(giver, ())) > self._held[client] + self._owed[client] + 1:
            self._owed[client] += 1
            self._works[giver].pop().cancel()

    def _pass_on(self, client: Client) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._waiting:
            client = min(self._waiting, key=lambda each: self._held[each])
            queue = self._waiting.pop(client)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind all others
            if turn.done():  # its task was cancelled, and is about to learn it
                continue
            self._held[client] += 1
            if self._owed[client] > 1 and queue:
                self._owed[client] -= 1
            else:
                del self._owed[client]
            turn.set_result(None)
            return
        self._num_free += 1
