"""P's end: which segments are free, and which groups D has not answered.

Shared by the staged transports of a process, used by transfer threads (which wait here) and by the comm thread
(`on_message`); one condition guards all of it, and nothing is sent or copied under it. A granted segment is in one of
four hands: free, of a group (its writer waits, or has given up waiting), doubtful (a write to it failed and may still
land), or taken by a write that runs. Invariants: no two groups are in one segment; a segment that D may still read, or
that a late write may hit, is not written; numbers of groups grow over all D and are never used twice.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chitu.kv_transfer.transports.staged.area import StagingArea
from chitu.kv_transfer.transports.staged.messages import Group, Scattered, encode
from chitu.kv_transfer.transports.transport import PeerHandle

RETRY_INTERVAL_S = 0.2
"""A group is said again so often until D answers."""


@dataclass(slots=True, eq=False)
class TargetSegments:
    """Those of one D that we were granted."""

    base: int
    segment_bytes: int
    group_bytes: int
    """What a group may have at most: no more than a segment of our own, where we gather into one."""
    free: deque[int]
    """The one that was used longest ago first: what still comes late of its last group is as old as can be."""
    doubtful: list[int] = field(default_factory=list)
    given_up: list[SentGroup] = field(default_factory=list)
    """Groups that nobody waits for any more: settled when D has answered them."""

    def address(self, segment: int) -> int:
        return self.base + segment * self.segment_bytes


@dataclass(slots=True, eq=False)
class StagedPeer:
    """A D. `segments` is None where every write is direct."""

    inner: PeerHandle
    segments: TargetSegments | None
    must_stage: bool
    """Its pages cannot or may not be written directly."""
    incarnation: int = 0
    send: Callable[[int, bytes], None] = lambda incarnation, payload: None

    @property
    def session_id(self) -> str:
        return self.inner.session_id


@dataclass(slots=True, eq=False)
class SentGroup:
    peer: StagedPeer
    group: Group
    answer: Scattered | None = None

    def send(self) -> None:
        self.peer.send(self.peer.incarnation, encode(self.group))


class Gatherer:
    """`area`: our own segments; None where the transports put pieces into D's by themselves."""

    def __init__(self, area: StagingArea | None) -> None:
        self.area = area
        self._own_free = deque(range(area.num_segments if area is not None else 0))
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._sent: dict[int, SentGroup] = {}
        """By number: what D has not answered."""

    # ----------------------------------------------------------------------------------------------------- taking turns

    def take(self, segments: TargetSegments, sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        """A segment of D, once one is free. `sent`: said again meanwhile."""
        return self._take(segments.free, sent, timeout_s)

    def take_own(self, sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        return self._take(self._own_free, sent, timeout_s)

    def _take(self, free: deque[int], sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        while self.wait(lambda: bool(free), sent, timeout_s):
            with self._changed:
                if free:  # else another thread was first
                    return free.popleft()
        return None

    def give_own(self, segment: int) -> None:
        """Written: a write that is still to land goes where nobody reads."""
        with self._changed:
            self._own_free.append(segment)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the groups

    def tell(self, peer: StagedPeer, segment: int, targets: bytes, lengths: bytes) -> SentGroup:
        """The segment is written: it is D's until the answer."""
        with self._changed:
            sent = SentGroup(peer, Group(next(self._numbers), segment, targets, lengths))
            self._sent[sent.group.number] = sent
        sent.send()
        return sent

    def dropped(self, segments: TargetSegments, segment: int, is_settled: bool) -> None:
        """The write to it failed, and D is not told of a group. Not settled: it may still land."""
        with self._changed:
            (segments.free if is_settled else segments.doubtful).append(segment)
            self._changed.notify_all()

    def settled(self, segments: TargetSegments, doubtful: Sequence[int]) -> None:
        """Nothing can land in these any more."""
        with self._changed:
            for segment in doubtful:
                segments.doubtful.remove(segment)
                segments.free.append(segment)
            self._changed.notify_all()

    def give_up(self, segments: TargetSegments, sent: Sequence[SentGroup]) -> bool:
        """The writer waits no longer. True where one of these was not answered: D may still copy it."""
        with self._changed:
            unanswered = [group for group in sent if group.answer is None]
            segments.given_up += unanswered
            return bool(unanswered)

    def on_message(self, incarnation: int, answer: Scattered) -> None:
        """D is done with a segment. Late and doubled answers change nothing."""
        with self._changed:
            sent = self._sent.get(answer.number)
            if sent is None or sent.peer.incarnation != incarnation or sent.group.segment != answer.segment:
                return
            del self._sent[answer.number]
            sent.answer = answer
            segments = sent.peer.segments
            assert segments is not None
            if sent in segments.given_up:
                segments.given_up.remove(sent)
            segments.free.append(answer.segment)
            self._changed.notify_all()

    def forget(self, peer: StagedPeer) -> None:
        with self._changed:
            self._sent = {number: sent for number, sent in self._sent.items() if sent.peer is not peer}

    def wait(self, is_over: Callable[[], bool], sent: Sequence[SentGroup], timeout_s: float) -> bool:
        """Until `is_over`, or for so long; meanwhile what D has not answered of `sent` is said again."""
        for _ in range(max(1, math.ceil(timeout_s / RETRY_INTERVAL_S))):
            with self._changed:
                if self._changed.wait_for(is_over, min(timeout_s, RETRY_INTERVAL_S)):
                    return True
            for group in sent:
                if group.answer is None:
                    group.send()
        return False
