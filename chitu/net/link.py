"""One direction of a link: numbered messages that are kept until the other end has them, and sent again if one is lost.

Sans IO. A link is what one process of the router and one instance tell each other from the joining of the instance to
its loss: requests one way, tokens the other. The router draws its id. A connection that breaks takes with it what is on
the way, and its tail may come behind the head of the next one. So the receiver takes messages in order alone, and drops
what comes behind a gap; the sender sends all of that again as soon as it hears of the gap.

The receiver's word (`LinkWord`) comes with an instance's heartbeats and with the router's answers to them; a new gap
brings it forward. Where the last messages were lost no gap shows it: what has no word for `repeat_s` is asked about by
sending the newest once more. So a message that is slow costs one frame, not all of them, and a receiver that does not
read is sent nothing.

Invariants: a message is taken once, and behind all before it that were not given up. What was given up is never taken
behind a later one. A sender keeps at most `MAX_KEPT` messages and `MAX_KEPT_BYTES` and a frame.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from chitu.net.sockets import SEND_HIGH_WATER_MARK
from chitu.protocol import LinkWord

MAX_KEPT = SEND_HIGH_WATER_MARK
MAX_KEPT_BYTES = 64 << 20
"""Of frames that one link's sender keeps: far beyond what a live receiver lets wait, which is what comes in a
heartbeat."""
MAX_LINKS = 512
"""That a receiver knows at once; the one that was silent for longest is forgotten. An instance has a link with each API
process of its router, and leaves one behind when it ends. One that is forgotten is taken up again where its sender
stands."""

T = TypeVar("T")


class Sent(NamedTuple, Generic[T]):
    frame: bytes
    sent_s: float
    about: T
    """What its sender calls it."""


@dataclass(slots=True)
class News(Generic[T]):
    """What a word of the receiver means."""

    repeat: list[bytes] = field(default_factory=list)
    """To be sent again, in this order."""
    given_up: list[Sent[T]] = field(default_factory=list)
    """They will not be sent again: for too long nothing got through to a receiver that reads. The next message tells
    it, so the owner sends one at once."""


class LinkSender(Generic[T]):
    """One thread."""

    def __init__(self, link: int, repeat_s: float, patience_s: float) -> None:
        """Words come every `repeat_s` or sooner. After `patience_s` without progress messages are given up; seconds
        count as far as words attest them one by one, so a receiver that is slow, busy or stopped has lost nothing."""
        self.link = link
        self._repeat_s = repeat_s
        self._patience_s = patience_s
        self._kept: deque[Sent[T]] = deque()
        """Oldest first."""
        self._kept_bytes = 0
        self.number = 1
        """Of the next message."""
        self._repeated_s = 0.0
        self._gap: int | None = None
        """Behind which number the receiver has a gap, as far as its words go."""
        self._filled_gap = -1
        """Behind which number everything was sent again, last."""
        self._word_s = 0.0
        self._stalled_s = 0.0
        """Since when each word attests that the receiver reads, and that it got nothing of what waits."""

    @property
    def num_kept(self) -> int:
        """Goes with the next message: how many before it can be sent again."""
        return len(self._kept)

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= MAX_KEPT or self._kept_bytes >= MAX_KEPT_BYTES

    def note(self, frame: bytes, about: T, now_s: float) -> None:
        """The message `number` is on its way."""
        self._kept.append(Sent(frame, now_s, about))
        self._kept_bytes += len(frame)
        self.number += 1

    def on_word(self, word: LinkWord | None, is_reading: bool, now_s: float) -> News[T]:
        """The receiver's newest word; None where it has nothing new to say of this link. `is_reading`: since the word
        before it has found its port empty, so what came was taken."""
        kept, news = self._kept, News[T]()
        acknowledged = 0 if word is None else max(0, word.last - (self.number - 1 - len(kept)))
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
        if word is not None:
            self._gap = word.last if word.has_gap else None
        if self._gap is not None and (is_due or self._gap != self._filled_gap):
            self._filled_gap = self._gap
            news.repeat = [sent.frame for sent in kept]
        elif is_due:
            news.repeat = [kept[-1].frame]
        if news.repeat:
            self._repeated_s = now_s
        return news

    def give_up(self, sent_s: float) -> list[Sent[T]]:
        """Forget what was sent up to then."""
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
    """Something came from behind a message that did not."""
    is_gap_new: bool = False
    """The sender should hear of it at once; the owner sets it back."""
    given_up: int = 0
    """How many messages the sender gave up that were not taken; the owner sets it back."""

    def take(self, number: int, num_kept: int) -> bool:
        """Whether a message that came is the next one. Else it is dropped: it came before, or will come again."""
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
    """Of an instance, by link. The comm thread takes, the heartbeat thread asks for the words."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, LinkReceiver] = {}
        """In order of their last message."""
        self._news: set[int] = set()
        self._alarm = False

    def take(self, link: int, number: int, num_kept: int) -> bool:
        """As `LinkReceiver`. A number of 0 is not counted."""
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
            is_next = receiver.take(number, num_kept)
            self._alarm |= receiver.is_gap_new
            receiver.is_gap_new = False
            return is_next

    def take_alarm(self) -> bool:
        """Whether a gap opened since the last call: its sender should know at once. Asked once all that lies ready was
        taken."""
        with self._lock:
            alarm, self._alarm = self._alarm, False
            return alarm

    def words(self) -> tuple[LinkWord, ...]:
        """Of the links from which something came since the last call. They may be lost: a sender that waits for one
        sends its newest message again, which is news."""
        with self._lock:
            news, self._news = self._news, set()
            links = [(link, receiver) for link, receiver in self._links.items() if link in news]
            return tuple(LinkWord(link, receiver.last, receiver.has_gap) for link, receiver in links)
