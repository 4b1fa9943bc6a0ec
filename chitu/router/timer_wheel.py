"""Items by deadline, whatever the order in which they are added. One thread.

A wheel of buckets: adding, removing and expiring cost the same however many items there are. A heap would keep items
that ended early until their deadline.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TimerWheel(Generic[T]):
    """Timer wheel. `step_s`: width of a bucket; an expiry is reported at most this late, and never early."""

    def __init__(self, step_s: float, now_s: float) -> None:
        self._step_s = step_s
        self._buckets: dict[int, set[T]] = {}
        self._done = int(now_s // step_s) - 1
        """Newest bucket that `expired` has emptied."""

    def add(self, item: T, deadline_s: float) -> None:
        """Add an item whose deadline is in the future."""
        self._buckets.setdefault(int(deadline_s // self._step_s) + 1, set()).add(item)

    def discard(self, item: T, deadline_s: float) -> None:
        """Remove an item that was added with this deadline. Does nothing if it has already expired."""
        number = int(deadline_s // self._step_s) + 1
        bucket = self._buckets.get(number)
        if bucket is not None:
            bucket.discard(item)
            if not bucket:
                del self._buckets[number]

    def expired(self, now_s: float) -> list[T]:
        """Remove and return every item whose deadline has passed."""
        found: list[T] = []
        newest = int(now_s // self._step_s)
        for number in range(self._done + 1, newest + 1):
            found.extend(self._buckets.pop(number, ()))
        self._done = max(self._done, newest)
        return found
