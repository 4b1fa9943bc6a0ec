"""What the instances of an attempt are sent: the two halves of a request, or the whole, and its cancellation.

Owned by `Attempts`, on the loop thread. Nothing waits here: a queue that is full is the router's business.

Every message goes by the link with its instance (`net/link.py`), which says with its heartbeats what it has; the answer
says what came of its tokens. Invariant: what an instance is sent it gets, and once, in this order, or it is gone, or
nothing comes through to it: then a half is told of once, and its request goes on under another room.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from chitu.clock import Clock
from chitu.config.schema import DeadlineConfig
from chitu.errors import RequestLost
from chitu.net.aio import Outbox
from chitu.net.link import LinkReceiver, LinkSender, Sent
from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    Heartbeat,
    InstanceInfo,
    LinkWord,
    PrefillRequest,
    SchedulerMessage,
    TokenBatch,
    UnifiedRequest,
    encode,
)
from chitu.router.generation import Attempt
from chitu.router.routing import InstanceKey
from chitu.tracing.router_trace import RouterTrace
from chitu.types import Role, instance_name

log = logging.getLogger(__name__)


class ReplyAddress(NamedTuple):
    """Where P and D answer to: goes with every request."""

    worker: int = 0
    """Incarnation of the API process (`router.workers`); 0 where the router is one process."""
    token_port: int = 0
    """Its token port; 0: the router's `token_port`."""


THE_ROUTER = ReplyAddress()


class Dispatched(NamedTuple):
    """What a message on its way to an instance is: the half of a request (or the whole), or its cancellation."""

    room: bytes
    is_cancel: bool


@dataclass(slots=True)
class InstanceLink:
    """With an instance, from its joining to its loss."""

    key: InstanceKey
    sender: LinkSender[Dispatched]
    receiver: LinkReceiver = field(default_factory=LinkReceiver)
    """Of its tokens."""
    reads: int = 0
    """As its last heartbeat had it."""

    @property
    def name(self) -> str:
        return instance_name(self.key.role, self.key.engine_rank)


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
        self,
        outbox: Outbox[InstanceKey],
        reply: ReplyAddress,
        clock: Clock,
        deadlines: DeadlineConfig,
        trace: RouterTrace | None = None,
    ) -> None:
        self._trace = trace
        self._outbox = outbox
        self._reply = reply
        self._clock = clock
        self._deadlines = deadlines
        self._links: dict[InstanceKey, InstanceLink] = {}
        """With the instances that are there."""
        self._by_id: dict[int, InstanceLink] = {}
        """The same by the number that messages have of it."""

    def open(self, key: InstanceKey, host: str, port: int) -> None:
        """An instance joined, and takes requests here. Idempotent."""
        self._outbox.open(key, host, port)
        if key not in self._links:
            number = 1 + secrets.randbelow((1 << 63) - 1)
            sender = LinkSender[Dispatched](number, self._deadlines.heartbeat_interval_s, self._deadlines.lease_s)
            self._links[key] = self._by_id[number] = InstanceLink(key, sender)

    def close(self, key: InstanceKey) -> None:
        """It is gone, and with it what it was sent."""
        self._outbox.close_peer(key)
        link = self._links.pop(key, None)
        if link is not None:
            del self._by_id[link.sender.link]

    def is_open(self, key: InstanceKey) -> bool:
        """The instance is there."""
        return key in self._links

    def send(self, attempt: Attempt) -> InstanceKey | None:
        """An attempt, or all of its group. D first, so that it can announce while P's half is on the way; neither is
        waited for. None, or the instance whose queue is full."""
        room, forks = attempt.room if attempt.group is None else attempt.group.room, attempt.forks
        request, prefill = attempt.generation.request, attempt.target.prefill
        decode, (worker, token_port) = attempt.target.decode, self._reply
        to_decode = self._links.get(attempt.decode)
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
                link=to_decode.sender.link,
                number=to_decode.sender.number,
                num_kept=to_decode.sender.num_kept,
                cache_salt=request.cache_salt,
                priority=request.priority,
                forks=forks,
                trace=request.trace,
            )
            return None if self._post(to_decode, whole, attempt.created_s) else attempt.decode
        to_prefill = self._links.get(attempt.prefill)
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
            link=to_decode.sender.link,
            number=to_decode.sender.number,
            num_kept=to_decode.sender.num_kept,
            cache_salt=request.cache_salt,
            priority=request.priority,
            forks=forks,
            trace=request.trace,
        )
        prefill_half = PrefillRequest(
            room=room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            decode_rank=decode.engine_rank,
            decode_incarnation=decode.incarnation,
            router_worker=worker,
            link=to_prefill.sender.link,
            number=to_prefill.sender.number,
            num_kept=to_prefill.sender.num_kept,
            cache_salt=request.cache_salt,
            priority=request.priority,
            prompt_logprobs=None if attempt.num_continued else request.sampling.prompt_logprobs,
            trace=request.trace,
        )
        if not self._post(to_decode, decode_half, attempt.created_s):
            return attempt.decode
        return None if self._post(to_prefill, prefill_half, attempt.created_s) else attempt.prefill

    def cancel(self, attempt: Attempt) -> None:
        """Idempotent on the instances; one that is gone or does not read is not told. P hears of the last of a group:
        others still want the prompt."""
        group = attempt.group
        self._cancel(attempt.decode, attempt.room)
        if attempt.prefill is not None and (group is None or group.attempts == [attempt]):
            self._cancel(attempt.prefill, attempt.room if group is None else group.room)

    def take_tokens(self, batch: TokenBatch) -> tuple[bool, InstanceLink | None]:
        """Whether a message is the next one of its link; the link too, where its instance gave up messages before it.
        One that came before, or behind a gap, or is an answer to another router, is not."""
        link = self._by_id.get(batch.link)
        if link is None:
            return False, None
        receiver = link.receiver
        is_next = receiver.take(batch.number, batch.num_kept)
        if receiver.is_gap_new:
            receiver.is_gap_new = False
            log.warning("a token message of %s was lost: it is sent again", link.name)
            self._say(link)
        return is_next, link if receiver.given_up else None

    def on_heartbeat(self, key: InstanceKey, heartbeat: Heartbeat) -> list[Missed]:
        """What of the requests for this instance will not get there. What was lost on the way is sent again."""
        link = self._links.get(key)
        if link is None:
            return []
        if key.role is not Role.PREFILL:
            self._say(link)
        now_s, sender = self._clock.monotonic(), link.sender
        word = next((word for word in heartbeat.words if word.link == sender.link), None)
        news = sender.on_word(word, heartbeat.reads > link.reads, now_s)
        link.reads = heartbeat.reads
        if news.repeat:
            log.warning("messages to %s were lost or are late: %d are sent again", link.name, len(news.repeat))
        for frame in news.repeat:
            self._outbox.send(key, frame)
        for sent in news.given_up:
            if sent.about.is_cancel:
                self._cancel(key, sent.about.room)
        return [_missed(sent, link.name, now_s) for sent in news.given_up if not sent.about.is_cancel]

    def _say(self, link: InstanceLink) -> None:
        """What came of the instance's tokens. Where this gets lost, the next heartbeat is answered again."""
        receiver = link.receiver
        self._outbox.send(link.key, encode(LinkWord(link.sender.link, receiver.last, receiver.has_gap)))

    def _cancel(self, key: InstanceKey, room: bytes) -> None:
        link = self._links.get(key)
        if link is not None:
            sender = link.sender
            message = encode(CancelRequest(room, sender.link, sender.number, sender.num_kept))
            self._outbox.send(key, message)  # where its queue is full, it is sent again
            sender.note(message, Dispatched(room, True), self._clock.monotonic())

    def _post(self, link: InstanceLink, message: SchedulerMessage, now_s: float) -> bool:
        """The half of a request, with the next number of its link. False where too much waits there: nothing was sent
        then."""
        frame = encode(message)
        if link.sender.is_full or not self._outbox.send(link.key, frame):
            return False
        link.sender.note(frame, Dispatched(message.room, False), now_s)
        if self._trace is not None and not isinstance(message, CancelRequest) and message.trace == "frames":
            self._trace.note_frame(message.request_id, message.room, "sent", "request", frame)
            if not isinstance(message, PrefillRequest):
                pairs = [(fork.room, fork.request_id) for fork in message.forks] or [(message.room, message.request_id)]
                self._trace.framed.update(pairs)
        return True


def _missed(half: Sent[Dispatched], name: str, now_s: float) -> Missed:
    text = f"{name} lives, but did not get what it was sent {now_s - half.sent_s:.2f} s ago"
    return Missed(half.about.room, RequestLost(text))
