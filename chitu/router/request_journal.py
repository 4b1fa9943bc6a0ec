"""Recent requests of the router: what ran where, and where its time went.

Kept by `PDRequestRouter` on the loop thread; read through `GET /cluster` by the web page, `chitu chat` and the
quickstart. Bounded: a new record evicts the oldest. Times named `_at_s` are on the router's monotonic clock.
"""

from __future__ import annotations

from collections import deque

from chitu.protocol.account import RequestSnapshot

KEPT_RECORDS = 64


class RequestJournal:
    def __init__(self) -> None:
        self.ended: deque[RequestSnapshot] = deque(maxlen=KEPT_RECORDS)
        """Attempts that ended, oldest first."""
        self.version = 0
        """Increases with every start, first token and end."""

    def note_change(self) -> None:
        self.version += 1

    def add(self, ended: RequestSnapshot) -> None:
        self.ended.append(ended)
        self.version += 1
