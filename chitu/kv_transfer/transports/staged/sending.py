"""Messages between the two ends of a staged transport; the sockets between P and D carry them unread.

P's end of staging: which segments are free, and which groups D has not answered.

Shared by the staged transports of a process. Transfer threads use it (and wait here), and so does the comm thread
(`on_message`). One condition guards all of it, and nothing is sent or copied under it. A granted segment is in one of
four states: free, held by a group (its writer waits, or has given up waiting), doubtful (a write to it failed and may
still land), or taken by a write that runs. Invariants: no two groups are in one segment; a segment that D may still
read, or that a late write may hit, is not written; numbers of groups grow over all D and are never used twice.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Union

import msgspec

from chitu.errors import BadFrame
from chitu.kv_transfer.transports.staged.area import StagingArea
from chitu.kv_transfer.transports.transport import PeerHandle


class Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="group"):
    """P -> D: pieces lie in a segment, one after the other. Repeated until `Scattered`."""

    number: int
    """Number of the group, counted from 1 within this incarnation of P."""
    segment: int
    targets: bytes
    """Destination address of each piece in D's pool, int64 LE."""
    lengths: bytes
    """Bytes of each piece, int64 LE."""


class Scattered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="scattered"):
    """D -> P: answer to each `Group`. D is done with the segment, and nothing of the group is written any more."""

    number: int
    segment: int
    error: str = ""
    """Error text; if not empty, the pieces are not in their places."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Group | Scattered] = msgspec.msgpack.Decoder(Union[Group, Scattered])


def encode(message: Group | Scattered) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Group | Scattered:
    """Decode a message. Raises BadFrame."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"a message between staged transports: {error}") from error


RETRY_INTERVAL_S = 0.2
"""Interval at which a group is sent again until D answers."""


@dataclass(slots=True, eq=False)
class TargetSegments:
    """Segments of one D that we were granted."""

    base: int
    segment_bytes: int
    group_bytes: int
    """Most bytes of a group: no more than a segment of our own, if we gather into one."""
    free: deque[int]
    """Free segments, least recently used first: late messages of a segment's last group are then as old as can be."""
    doubtful: list[int] = field(default_factory=list)
    given_up: list[SentGroup] = field(default_factory=list)
    """Groups that no writer waits for any more: settled when D has answered them."""

    def address(self, segment: int) -> int:
        return self.base + segment * self.segment_bytes


@dataclass(slots=True, eq=False)
class StagedPeer:
    """A D. `segments` is None if every write is direct."""

    inner: PeerHandle
    segments: TargetSegments | None
    must_stage: bool
    """True if its pages cannot or may not be written directly."""
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
    """Segments and groups of P. `area`: our own segments; None if transports put pieces straight into D's segments."""

    def __init__(self, area: StagingArea | None) -> None:
        self.area = area
        self._own_free = deque(range(area.num_segments if area is not None else 0))
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._sent: dict[int, SentGroup] = {}
        """Groups that D has not answered, by number."""

    # --------------------------------------------------------------------------------------------------------- segments

    def take(self, segments: TargetSegments, sent: Sequence[SentGroup], timeout_s: float) -> int | None:
        """Return a segment of D once one is free, else None. Meanwhile sends unanswered groups of `sent` again."""
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
        """Give back our own segment after its write. If that may still land, it lands where D does not read."""
        with self._changed:
            self._own_free.append(segment)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the groups

    def tell(self, peer: StagedPeer, segment: int, targets: bytes, lengths: bytes) -> SentGroup:
        """Send a group for a segment that is written. The segment is D's until D answers."""
        with self._changed:
            sent = SentGroup(peer, Group(next(self._numbers), segment, targets, lengths))
            self._sent[sent.group.number] = sent
        sent.send()
        return sent

    def dropped(self, segments: TargetSegments, segment: int, is_settled: bool) -> None:
        """Give back a segment whose write failed; D gets no group. Unless it is settled, the write may still land."""
        with self._changed:
            (segments.free if is_settled else segments.doubtful).append(segment)
            self._changed.notify_all()

    def settled(self, segments: TargetSegments, doubtful: Sequence[int]) -> None:
        """Free doubtful segments in which nothing can land any more."""
        with self._changed:
            for segment in doubtful:
                segments.doubtful.remove(segment)
                segments.free.append(segment)
            self._changed.notify_all()

    def give_up(self, segments: TargetSegments, sent: Sequence[SentGroup]) -> bool:
        """Stop waiting for these groups. Return True if one of them was not answered: D may still copy it."""
        with self._changed:
            unanswered = [group for group in sent if group.answer is None]
            segments.given_up += unanswered
            return bool(unanswered)

    def on_message(self, incarnation: int, answer: Scattered) -> None:
        """Take D's answer that it is done with a segment. Late and duplicate answers change nothing."""
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
        """Wait until `is_over`, at most `timeout_s`; return whether it is. Sends unanswered groups of `sent` again."""
        for _ in range(max(1, math.ceil(timeout_s / RETRY_INTERVAL_S))):
            with self._changed:
                if self._changed.wait_for(is_over, min(timeout_s, RETRY_INTERVAL_S)):
                    return True
            for group in sent:
                if group.answer is None:
                    group.send()
        return False
