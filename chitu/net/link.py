"""One direction of a link: numbered messages that are kept until acknowledged, and sent again if one is lost.

Sans IO. A link carries the messages between one process of the router and one instance, from the joining of the
instance to its loss: requests one way, tokens the other. The router draws its id. A connection that breaks loses what
is in flight, and its tail may arrive after the head of the next one. So the receiver takes messages only in order, and
drops what comes after a gap; the sender sends all of that again as soon as it learns of the gap.

The receiver's acknowledgement (`LinkAck`) comes with an instance's heartbeats and with the router's answers to them; a
new gap brings it forward. If the last messages were lost, no gap shows it: without an acknowledgement for `repeat_s`
the sender sends the newest one again. So a slow message costs one frame, not all of them, and a receiver that does not
read is sent nothing.

Invariants: a message is taken once, and after all before it that were not given up. A message that was given up is
never taken after a later one. A sender keeps at most `MAX_KEPT` messages, and `MAX_KEPT_BYTES` and a frame.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from chitu.net.sockets import SEND_HIGH_WATER_MARK
from chitu.protocol import LinkAck, LinkStamp

MAX_KEPT = SEND_HIGH_WATER_MARK
MAX_KEPT_BYTES = 64 << 20
"""Bytes of frames that one link's sender keeps: far more than a live receiver leaves unacknowledged, which is the
traffic of one heartbeat."""
MAX_LINKS = 512
"""Most links that a receiver keeps; the one that was silent for longest is forgotten. An instance has a link with each
router, and a stale one of each that ended. A forgotten link resumes at the number that its sender
has reached."""

T = TypeVar("T")


class Sent(msgspec.Struct, Generic[T], frozen=True):
    frame: bytes
    sent_s: float
    about: T
    """The owner's label for the message."""


@dataclass(slots=True)
class AckOutcome(Generic[T]):
    """What an acknowledgement means for the sender."""

    repeat: list[bytes] = field(default_factory=list)
    """Frames to be sent again, in this order."""
    given_up: list[Sent[T]] = field(default_factory=list)
    """Messages that will not be sent again: for too long nothing got through to a receiver that reads. The next message
    tells the receiver, so the owner sends one at once."""


class LinkSender(Generic[T]):
    """Sending end of a link; used by one thread."""

    def __init__(self, link: int, repeat_s: float, patience_s: float) -> None:
        """Expect acknowledgements every `repeat_s` or sooner. After `patience_s` without progress messages are given
        up. Only time that successive acknowledgements attest counts, so a receiver that is slow, busy or stopped loses
        nothing."""
        self.link = link
        self._repeat_s = repeat_s
        self._patience_s = patience_s
        self._kept: deque[Sent[T]] = deque()
        """Messages that are not acknowledged, oldest first."""
        self._kept_bytes = 0
        self.number = 1
        """Number of the next message."""
        self._repeated_s = 0.0
        self._gap: int | None = None
        """Number after which the receiver has a gap, according to its acknowledgements."""
        self._filled_gap = -1
        """Number after which everything was sent again, last."""
        self._word_s = 0.0
        self._stalled_s = 0.0
        """Start of the current stall: acknowledgements since then show a receiver that reads, but no progress."""

    @property
    def num_kept(self) -> int:
        """How many messages before the next one can be sent again; the next one carries it."""
        return len(self._kept)

    @property
    def stamp(self) -> LinkStamp:
        """What the next message carries."""
        return LinkStamp(self.link, self.number, len(self._kept))

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= MAX_KEPT or self._kept_bytes >= MAX_KEPT_BYTES

    def note(self, frame: bytes, about: T, now_s: float) -> None:
        """Record that the message `number` is in flight."""
        self._kept.append(Sent(frame, now_s, about))
        self._kept_bytes += len(frame)
        self.number += 1

    def on_ack(self, ack: LinkAck | None, is_reading: bool, now_s: float) -> AckOutcome[T]:
        """Handle the receiver's newest acknowledgement; None if it has none for this link. `is_reading`: since the one
        before, the receiver found its port empty, so it took what had arrived."""
        kept, news = self._kept, AckOutcome[T]()
        acknowledged = 0 if ack is None else max(0, ack.last - (self.number - 1 - len(kept)))
        for _ in range(min(acknowledged, len(kept))):
            self._forget_oldest()
        is_attested = is_reading and now_s - self._word_s <= 2 * self._repeat_s
        self._word_s = now_s
        if acknowledged or not kept or not is_attested:
            self._stalled_s = now_s
        elif now_s - self._stalled_s >= self._patience_s:
            news.given_up = self.give_up(now_s - self._patience_s)
        if not kept:
            return news
        is_due = is_reading and now_s - max(kept[0].sent_s, self._repeated_s) >= self._repeat_s
        if ack is not None:
            self._gap = ack.last if ack.has_gap else None
        if self._gap is not None and (is_due or self._gap != self._filled_gap):
            self._filled_gap = self._gap
            news.repeat = [sent.frame for sent in kept]
        elif is_due:
            news.repeat = [kept[-1].frame]
        if news.repeat:
            self._repeated_s = now_s
        return news

    def give_up(self, sent_s: float) -> list[Sent[T]]:
        """Forget the messages sent up to then, and return them."""
        given_up = []
        while self._kept and self._kept[0].sent_s <= sent_s:
            given_up.append(self._forget_oldest())
        return given_up

    def _forget_oldest(self) -> Sent[T]:
        oldest = self._kept.popleft()
        self._kept_bytes -= len(oldest.frame)
        return oldest


@dataclass(slots=True)
class LinkReceiver:
    last: int = 0
    """Number of the last message taken."""
    has_gap: bool = False
    """Whether something came after a message that did not."""
    is_gap_new: bool = False
    """Whether the sender should learn of the gap at once; the owner resets it."""
    given_up: int = 0
    """How many messages the sender gave up that were not taken; the owner resets it."""

    def take(self, number: int, num_kept: int) -> bool:
        """Return whether a message is the next one. Otherwise it is dropped: it was taken before, or will come
        again."""
        if number != self.last + 1:
            num_gone = number - max(0, num_kept) - 1 - self.last
            if num_gone > 0:
                self.given_up += num_gone
                self.last += num_gone
            if number != self.last + 1:
                if number > self.last and (num_gone > 0 or not self.has_gap):
                    self.has_gap = self.is_gap_new = True
                return False
        self.last = number
        self.has_gap = False
        return True


class LinkReceivers:
    """Receivers of an instance, by link. The comm thread calls `take`, the heartbeat thread `acks`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, LinkReceiver] = {}
        """Receivers by link, in order of their last message."""
        self._news: set[int] = set()
        self._alarm = False

    def take(self, stamp: LinkStamp) -> bool:
        """Take a message as `LinkReceiver` does. A message with number 0 is not numbered, and is taken."""
        link, number = stamp.link, stamp.number
        if number <= 0:
            return True
        with self._lock:
            receiver = self._links.pop(link, None)
            if receiver is None:
                receiver = LinkReceiver()
                if len(self._links) >= MAX_LINKS:
                    oldest = next(iter(self._links))
                    del self._links[oldest]
                    self._news.discard(oldest)
            self._links[link] = receiver
            self._news.add(link)
            is_next = receiver.take(number, stamp.num_kept)
            self._alarm |= receiver.is_gap_new
            receiver.is_gap_new = False
            return is_next

    def take_alarm(self) -> bool:
        """Return whether a gap opened since the last call: its sender should know at once. Call it after taking all
        that is ready."""
        with self._lock:
            alarm, self._alarm = self._alarm, False
            return alarm

    def acks(self) -> tuple[LinkAck, ...]:
        """Return the acknowledgements of links that received something since the last call. They may be lost: a sender
        that waits for one sends its newest message again, which renews it."""
        with self._lock:
            news, self._news = self._news, set()
            links = [(link, receiver) for link, receiver in self._links.items() if link in news]
            return tuple(LinkAck(link, receiver.last, receiver.has_gap) for link, receiver in links)
