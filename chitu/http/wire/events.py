"""Numbers of server-sent events, with which a client resumes a stream after any of them. Pure."""

from __future__ import annotations

from chitu.errors import InvalidRequest
from chitu.net.http import Scope, header, query_value

BLANK = b"\n\n"


class EventNumbers:
    """Writes `id:` (1, 2, ...) ahead of each event, and drops the first `behind` events."""

    def __init__(self, behind: int = 0) -> None:
        self._behind = behind
        self._count = 0

    def apply(self, events: bytes) -> bytes:
        """Return the events with their numbers. `events` are whole; their JSON has no blank line."""
        numbered: list[bytes] = []
        for event in events.split(BLANK):
            if event:
                self._count += 1
                if self._count > self._behind:
                    numbered.append(b"id: %d\n%b\n\n" % (self._count, event))
        return b"".join(numbered)


def events_read(scope: Scope) -> int:
    """Return how many events the client has: the query `starting_after`, else the header Last-Event-ID. Raise
    InvalidRequest if it is not a number."""
    name, given = "starting_after", query_value(scope, "starting_after")
    if given is None:
        last = header(scope, b"last-event-id")
        if not last:
            return 0
        name, given = "Last-Event-ID", last.decode("latin-1")
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise InvalidRequest(f"{name}: {given[:40]!r} is not an event number", name)
    return int(given)
