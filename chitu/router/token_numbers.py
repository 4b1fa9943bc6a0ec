"""Which token messages of an instance never came: a connection that breaks takes with it what is on the way.

Owned by `PDRequestRouter`, on the loop thread, asked once for each message, before its tokens are taken. An instance
numbers what it sends to a port (`TokenManager`), from 1 for each router that it serves.

Invariant: a message is only let pass as complete where all of that instance before it came. What cannot be known counts
as lost: messages for an earlier router that reach this one look like a gap, and cost whoever runs there a retry.
"""

from __future__ import annotations

from dataclasses import dataclass

from chitu.protocol import TokenBatch
from chitu.router.routing.policy import InstanceKey

NOBODY_YET = -1


@dataclass(slots=True)
class _Count:
    key: InstanceKey
    epoch: int = NOBODY_YET
    last: int = 0
    """Number of the last message."""


class TokenNumbers:
    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        """By incarnation: the newest one of each instance that ever joined. One that left and comes back goes on."""

    def on_joined(self, key: InstanceKey) -> None:
        """From now on its messages are looked at; those of older processes of the instance no more."""
        for old in [count.key for count in self._counts.values()]:
            if (old.role, old.engine_rank) == (key.role, key.engine_rank) and old != key:
                del self._counts[old.incarnation]
        self._counts.setdefault(key.incarnation, _Count(key))

    def missing(self, batch: TokenBatch) -> tuple[InstanceKey, int] | None:
        """Whose messages did not come before this one, and how many; None where all did. A message is asked about once.

        Nobody's: it never joined, or does not count."""
        count, number = self._counts.get(batch.incarnation), batch.number
        if count is None or not number:
            return None
        if batch.epoch != count.epoch:
            count.epoch, count.last = batch.epoch, 0
        last, count.last = count.last, number
        if number == last + 1:
            return None
        # Twice the same, or one from before: no connection does that, so what it is nobody knows.
        return count.key, max(1, number - last - 1)
