"""Failures that P reports to the router: at once, and again with the next heartbeats.

Owned by `PDSchedulerService`. P has no token stream, so its failures go to the stats port. Messages there have no
sequence numbers, and a connection that breaks loses those in flight. The router identifies failures by room, so a
repeated report costs nothing; a lost one costs a deadline of 73 s. The step thread calls `add`, the heartbeat thread
`repeats`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chitu.protocol import RequestFailed

REPEATS = 3
"""Repeats of a report: more than the heartbeats during a reconnect; later ones wait in the new connection's queue."""
KEPT = 4096
"""Most failures kept for repeats; beyond it the oldest are not repeated."""


class FailureReports:
    def __init__(self, send: Callable[[RequestFailed], None]) -> None:
        """Report by `send`, which runs on the thread that calls `add`."""
        self._send = send
        self._told: deque[tuple[RequestFailed, int]] = deque(maxlen=KEPT)
        """Failures to report again, and how often."""

    def add(self, failed: RequestFailed) -> None:
        self._send(failed)
        self._told.append((failed, REPEATS))

    def repeats(self) -> list[RequestFailed]:
        """Return the failures to report again with this heartbeat."""
        due = [self._told.popleft() for _ in range(len(self._told))]
        self._told.extend((failed, left - 1) for failed, left in due if left > 1)
        return [failed for failed, _ in due]
