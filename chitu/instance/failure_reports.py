"""What this instance could not do, told to the router: at once, and again with the next heartbeats.

Owned by `PDSchedulerService`. P has no token stream, so its failures go to the stats port, where nothing is numbered,
and a connection that breaks takes with it what is on the way. The router knows rooms: to hear of one again costs
nothing, not to hear of it is a deadline of 73 s. The step thread calls `add`, the heartbeat thread `repeats`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chitu.protocol import RequestFailed

REPEATS = 3
"""More than the heartbeats that come while a connection is made anew; later ones wait in its queue."""
KEPT = 4096
"""At once; the oldest are told once only."""


class FailureReports:
    def __init__(self, send: Callable[[RequestFailed], None]) -> None:
        """`send` is called by the thread that calls `add`."""
        self._send = send
        self._told: deque[tuple[RequestFailed, int]] = deque(maxlen=KEPT)
        """Those to be told again, and how often."""

    def add(self, failed: RequestFailed) -> None:
        self._send(failed)
        self._told.append((failed, REPEATS))

    def repeats(self) -> list[RequestFailed]:
        """For each heartbeat."""
        due = [self._told.popleft() for _ in range(len(self._told))]
        self._told.extend((failed, left - 1) for failed, left in due if left > 1)
        return [failed for failed, _ in due]
