"""Which requests of the router never came to this instance: a connection that breaks takes with it what is on the way.

Owned by `CommLoop`. The comm thread shows each numbered message to `take`; the heartbeat thread calls `report`, which
goes with its next heartbeat. Every process of the router counts for itself (a *link*), and anew whenever the instance
joins it; `sent_requests.py` is the other side.

Invariant: what was reported missing is never taken, however late it comes. After a connection broke, the tail of the
old one can come behind the head of the new one, and by then its request may have gone on elsewhere.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from chitu.protocol import RequestsReceived

MAX_LINKS = 512
"""Known at once; the one that was silent for longest is forgotten. A router has a link per API process, and leaves one
behind when it ends. One that is forgotten and comes back has lost everything, as it seems, which costs retries."""
MAX_GAPS = 32
"""Reported of a link; a gap needs a connection to break, so they are years or bad frames apart."""


@dataclass(slots=True)
class _Link:
    last: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of each, oldest first."""
    num_reported: int = 0
    """Of `gaps`: those the router may know of."""
    has_news: bool = False


class ReceivedRequests:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        """In order of their last message."""
        self._is_gap_new = False

    # ----------------------------------------------------------------------------------------------------- comm thread

    def take(self, link: int, number: int) -> bool:
        """Note a message that came. False where it must not be acted upon: it was reported missing, or came before."""
        if number <= 0:
            return True  # not counted
        with self._lock:
            state = self._links.pop(link, None)
            if state is None:
                state = _Link()
                if len(self._links) >= MAX_LINKS:
                    del self._links[next(iter(self._links))]
            self._links[link] = state
            state.has_news = True
            if number <= state.last:
                return _fill(state, number)
            if number > state.last + 1:
                state.gaps.append((state.last + 1, number - 1))
                self._is_gap_new = True
                _forget_oldest(state)
            state.last = number
            return True

    def take_alarm(self) -> bool:
        """Whether a gap opened since the last call: the router should know at once. Asked once all that lies ready was
        taken."""
        with self._lock:
            is_new, self._is_gap_new = self._is_gap_new, False
            return is_new

    # ------------------------------------------------------------------------------------------------ heartbeat thread

    def report(self) -> tuple[RequestsReceived, ...]:
        """Links from which something came since the last call. Where the router still waits for a word, it sends a
        mark, which is news again: so a report may be lost."""
        reports = []
        with self._lock:
            for link, state in self._links.items():
                if state.has_news:
                    state.has_news = False
                    state.num_reported = len(state.gaps)
                    reports.append(RequestsReceived(link, state.last, tuple(state.gaps)))
        return tuple(reports)


def _fill(state: _Link, number: int) -> bool:
    """A number below the last one. True where its gap was not reported yet, and is smaller now."""
    for at in range(state.num_reported, len(state.gaps)):
        first, last = state.gaps[at]
        if first <= number <= last:
            rest = [(first, number - 1), (number + 1, last)]
            state.gaps[at : at + 1] = [gap for gap in rest if gap[0] <= gap[1]]
            _forget_oldest(state)
            return True
    return False


def _forget_oldest(state: _Link) -> None:
    excess = max(0, len(state.gaps) - MAX_GAPS)
    del state.gaps[:excess]
    state.num_reported = max(0, state.num_reported - excess)
