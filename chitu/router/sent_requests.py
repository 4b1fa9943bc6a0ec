"""What one instance was sent and has not said it has: requests and cancellations, to be missed when they are lost.

Owned by `Dispatcher`, on the loop thread; one for each instance, from its joining to its loss. Its messages are
numbered; heartbeats say how far the instance has read (`received_requests.py`). A connection keeps their order, so
where a number is missing below one that came, it was lost: no guess by time, and an instance that is slow, busy or
stopped has lost nothing. What is lost with nothing behind it is found by a *mark*: a number sent behind it as soon as a
heartbeat comes without a word of it.

Only where no connection comes about at all, while heartbeats come, time decides: an instance that reads, but gets
nothing that it is sent, is deaf. Seconds count as far as heartbeats attest them one by one.

Invariant: a message is lost or not by the instance's word; after that word it is not pending any more.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from chitu.net.sockets import SEND_HIGH_WATER_MARK
from chitu.protocol import Heartbeat, RequestsReceived


class Sent(NamedTuple):
    """A message that needs an answer: the half of a request, or its cancellation."""

    number: int
    room: bytes
    is_cancel: bool
    sent_s: float


@dataclass(slots=True)
class Undelivered:
    """What a heartbeat tells of."""

    lost: list[Sent]
    """On the way: gone for good."""
    stuck: list[Sent]
    """Requests that wait for a connection for too long: it may still come."""
    needs_mark: bool
    """Something is open, and nothing was sent behind it that would tell."""


class SentRequests:
    def __init__(self, patience_s: float, interval_s: float) -> None:
        """An instance is deaf after `patience_s`; its heartbeats come every `interval_s`."""
        self.link = 1 + secrets.randbelow((1 << 63) - 1)
        self._patience_s = patience_s
        self._max_gap_s = 2 * interval_s
        self.next_number = 1
        self._pending: deque[Sent] = deque(maxlen=SEND_HIGH_WATER_MARK)
        """Oldest first. No more can wait for one that reads."""
        self._reads = 0
        self._beat_s = 0.0
        self._deaf_since_s = 0.0
        """Since when each heartbeat attests that the instance reads, and that it got nothing of what waits."""

    def note_mark(self) -> None:
        """`next_number` is on its way, with nothing in it."""
        self.next_number += 1

    def note(self, room: bytes, is_cancel: bool, now_s: float) -> None:
        """A message with `next_number` is on its way."""
        self._pending.append(Sent(self.next_number, room, is_cancel, now_s))
        self.next_number += 1

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> Undelivered:
        """What the instance's newest word means."""
        said = next((requests for requests in heartbeat.requests if requests.link == self.link), None)
        num_pending = len(self._pending)
        lost = self._settle(said) if said is not None else []
        is_attested = heartbeat.reads > self._reads and now_s - self._beat_s <= self._max_gap_s
        if len(self._pending) < num_pending or not num_pending or not is_attested:
            self._deaf_since_s = now_s
        self._reads, self._beat_s = heartbeat.reads, now_s
        stuck = self._take_stuck(now_s) if now_s - self._deaf_since_s >= self._patience_s else []
        return Undelivered(lost, stuck, bool(self._pending))

    def _settle(self, said: RequestsReceived) -> list[Sent]:
        """Everything up to `said.last` came or is lost."""
        lost = []
        while self._pending and self._pending[0].number <= said.last:
            sent = self._pending.popleft()
            if any(first <= sent.number <= last for first, last in said.missing):
                lost.append(sent)
        return lost

    def _take_stuck(self, now_s: float) -> list[Sent]:
        """Requests that have waited long enough. Cancellations wait on: behind what they cancel."""
        stuck = [s for s in self._pending if not s.is_cancel and now_s - s.sent_s >= self._patience_s]
        if stuck:
            oldest = {sent.number for sent in stuck}
            self._pending = deque((s for s in self._pending if s.number not in oldest), self._pending.maxlen)
        return stuck
