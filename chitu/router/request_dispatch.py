"""What the instances of an attempt are sent: the two halves of a request, or the whole, and its cancellation.

Owned by `Attempts`, on the loop thread. Nothing waits here: a queue that is full is the router's business.

Every message has the next number of its instance (`sent_requests.py`), which says with its heartbeats what it has.
Invariant: a cancellation is sent until it was taken, or the instance is gone; a half that was not taken is told of
once, and never sent again: its request goes on under another room.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import RequestLost, Unreachable
from chitu.net.aio import Outbox
from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    Heartbeat,
    InstanceInfo,
    PrefillRequest,
    RequestMark,
    SchedulerMessage,
    UnifiedRequest,
    encode,
)
from chitu.router.generation import Attempt
from chitu.router.routing import InstanceKey
from chitu.router.sent_requests import Sent, SentRequests
from chitu.types import instance_name

log = logging.getLogger(__name__)


class ReplyAddress(NamedTuple):
    """Where P and D answer to: goes with every request."""

    worker: int = 0
    """Incarnation of the API process (`router.workers`); 0 where the router is one process."""
    token_port: int = 0
    """Its token port; 0: the router's `token_port`."""


THE_ROUTER = ReplyAddress()


class Missed(NamedTuple):
    """A half of a request (or the whole) that did not get to its instance."""

    room: bytes
    error: RequestLost


def most_choices(instance: InstanceInfo, num_tokens: int) -> int:
    """Of a prompt of so many tokens, that one message may ask of this D (or unified instance): it starts all of them
    together, so it must have a slot for each, and beside the prompt's pages one for each in which the prompt ends."""
    page_size = instance.layout.page_size
    num_free = instance.num_pages - -(-num_tokens // page_size)
    most = min(MAX_FORKS, instance.num_slots, num_free if num_tokens % page_size else MAX_FORKS)
    return max(1, most)


class Dispatcher:
    def __init__(
        self, outbox: Outbox[InstanceKey], reply: ReplyAddress, clock: Clock, deadlines: DeadlineConfig
    ) -> None:
        self._outbox = outbox
        self._reply = reply
        self._clock = clock
        self._deadlines = deadlines
        self._sent: dict[InstanceKey, SentRequests] = {}
        """Of the instances that are there."""

    def open(self, key: InstanceKey, host: str, port: int) -> None:
        """An instance joined, and takes requests here. Idempotent."""
        self._outbox.open(key, host, port)
        if key not in self._sent:
            self._sent[key] = SentRequests(self._deadlines.lease_s, self._deadlines.heartbeat_interval_s)

    def close(self, key: InstanceKey) -> None:
        """It is gone, and with it what it was sent."""
        self._outbox.close_peer(key)
        self._sent.pop(key, None)

    def is_open(self, key: InstanceKey) -> bool:
        """The instance is there."""
        return key in self._sent

    def send(self, attempt: Attempt) -> InstanceKey | None:
        """An attempt, or all of its group. D first, so that it can announce while P's half is on the way; neither is
        waited for. None, or the instance whose queue is full."""
        room, forks = attempt.room if attempt.group is None else attempt.group.room, attempt.forks
        request, prefill = attempt.generation.request, attempt.target.prefill
        decode, (worker, token_port) = attempt.target.decode, self._reply
        to_decode = self._sent.get(attempt.decode)
        if to_decode is None:
            return attempt.decode
        if prefill is None or attempt.prefill is None:
            whole = UnifiedRequest(
                room=room,
                request_id=request.request_id,
                token_ids=attempt.token_ids,
                sampling=request.sampling,
                num_emitted=attempt.num_continued,
                router_worker=worker,
                reply_port=token_port,
                link=to_decode.link,
                number=to_decode.next_number,
                cache_salt=request.cache_salt,
                priority=request.priority,
                forks=forks,
            )
            return None if self._post(attempt.decode, to_decode, whole, attempt.created_s) else attempt.decode
        to_prefill = self._sent.get(attempt.prefill)
        if to_prefill is None:
            return attempt.prefill
        decode_half = DecodeRequest(
            room=room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            sampling=request.sampling,
            prefill_rank=prefill.engine_rank,
            prefill_incarnation=prefill.incarnation,
            num_emitted=attempt.num_continued,
            router_worker=worker,
            reply_port=token_port,
            link=to_decode.link,
            number=to_decode.next_number,
            cache_salt=request.cache_salt,
            priority=request.priority,
            forks=forks,
        )
        prefill_half = PrefillRequest(
            room=room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            decode_rank=decode.engine_rank,
            decode_incarnation=decode.incarnation,
            router_worker=worker,
            link=to_prefill.link,
            number=to_prefill.next_number,
            cache_salt=request.cache_salt,
            priority=request.priority,
            prompt_logprobs=None if attempt.num_continued else request.sampling.prompt_logprobs,
        )
        if not self._post(attempt.decode, to_decode, decode_half, attempt.created_s):
            return attempt.decode
        return None if self._post(attempt.prefill, to_prefill, prefill_half, attempt.created_s) else attempt.prefill

    def cancel(self, attempt: Attempt) -> None:
        """Idempotent on the instances; one that is gone or does not read is not told. P hears of the last of a group:
        others still want the prompt."""
        group = attempt.group
        self._cancel(attempt.decode, attempt.room)
        if attempt.prefill is not None and (group is None or group.attempts == [attempt]):
            self._cancel(attempt.prefill, attempt.room if group is None else group.room)

    def on_heartbeat(self, key: InstanceKey, heartbeat: Heartbeat) -> list[Missed]:
        """What of the requests for this instance did not get there. Cancellations that did not are sent again."""
        sent = self._sent.get(key)
        if sent is None:
            return []
        now_s = self._clock.monotonic()
        news = sent.on_heartbeat(heartbeat, now_s)
        name = instance_name(key.role, key.engine_rank)
        if news.lost:
            log.warning("%d messages to %s were lost", len(news.lost), name)
        for message in news.lost:
            if message.is_cancel:
                self._cancel(key, message.room)
        if news.needs_mark and self._outbox.send(key, encode(RequestMark(sent.link, sent.next_number))):
            sent.note_mark()
        halves = [message for message in news.lost if not message.is_cancel]
        return [*(_lost(half, name, now_s) for half in halves), *(_stuck(half, name, now_s) for half in news.stuck)]

    def _cancel(self, key: InstanceKey, room: bytes) -> None:
        sent = self._sent.get(key)
        if sent is not None:
            self._post(key, sent, CancelRequest(room, sent.link, sent.next_number), self._clock.monotonic())

    def _post(self, key: InstanceKey, sent: SentRequests, message: SchedulerMessage, now_s: float) -> bool:
        """A message with the next number of its link. False where the queue is full: nothing was sent then."""
        if not self._outbox.send(key, encode(message)):
            return False
        sent.note(message.room, isinstance(message, CancelRequest), now_s)
        return True


def _lost(half: Sent, name: str, now_s: float) -> Missed:
    return Missed(half.room, RequestLost(f"its way to {name} broke: noticed {now_s - half.sent_s:.2f} s after it left"))


def _stuck(half: Sent, name: str, now_s: float) -> Missed:
    text = f"{name} lives, but did not get what it was sent {now_s - half.sent_s:.2f} s ago"
    return Missed(half.room, Unreachable(text))
