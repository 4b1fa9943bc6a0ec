"""What the router sends to the instances of an attempt: the halves of a request, or the whole, and its cancellation.

Owned by `Attempts`, on the loop thread. Nothing here blocks: what to do about a full queue is decided by the caller.

Every message goes over the link with its instance (`net/link.py`). The instance acknowledges it with its heartbeats,
and the router's answer acknowledges the instance's tokens. Invariant: an instance receives its messages once and in
order, unless it is gone or nothing gets through to it. Then a lost half is reported once, and its request continues
under another room.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from chitu.clock import Clock
from chitu.errors import RequestLost
from chitu.net.link import Sent
from chitu.protocol import (
    MAX_FORKS,
    CancelRequest,
    DecodeRequest,
    Heartbeat,
    InstanceInfo,
    LinkAck,
    PrefillRequest,
    PromptOutput,
    RequestHead,
    RequestMessage,
    SampledRequest,
    UnifiedRequest,
    encode,
)
from chitu.router.candidates import InstanceKey
from chitu.router.generation import Attempt, GenerateRequest
from chitu.router.members import ClusterMember, Dispatched, Members
from chitu.tracing.trace_files import RouterTrace

logger = logging.getLogger(__name__)


NO_OUTPUT = PromptOutput()
TOKEN_GROUP = 16
"""Most tokens of a whole answer that come together. A D that dies takes at most one fewer with it, which the next one
computes again."""


class Missed(NamedTuple):
    """A half of a request (or the whole) that did not reach its instance."""

    room: bytes
    error: RequestLost


def max_choices(instance: InstanceInfo, num_tokens: int) -> int:
    """Return how many choices of a prompt of so many tokens one message may ask of this D (or unified instance). It
    starts all of them together. So it needs a slot for each, and if the prompt ends within a page, one page for each
    beside the prompt's."""
    page_size = instance.layout.page_size
    num_free = instance.num_pages - -(-num_tokens // page_size)
    most = min(MAX_FORKS, instance.num_slots, num_free if num_tokens % page_size else MAX_FORKS)
    return max(1, most)


def is_drawn_early(attempt: Attempt) -> bool:
    """Return whether P draws the attempt's first token, too. It has no grammars, D's tokens bring logprobs and what the
    prompt's states give, forks have a seed each, and of an answer that is not streamed nobody reads one token."""
    request, way = attempt.generation.request, attempt.way
    sampling = request.sampling
    return (
        request.wake_per_token
        and attempt.group is None
        and way.prefill is not None
        and way.prefill.device == way.decode.device
        and sampling.grammar is None
        and sampling.logprobs is None
        and sampling.prompt_output == NO_OUTPUT
    )


class Dispatcher:
    def __init__(
        self,
        members: Members,
        router: int,
        clock: Clock,
        trace: RouterTrace,
        early_token: bool,
    ) -> None:
        """`router`: index of this router in `router.hosts`, by which instances know where to reply. `early_token`:
        whether P draws first tokens, too."""
        self.trace = trace
        self._early_token = early_token
        self._members = members
        self._router = router
        self._clock = clock

    def send(self, attempt: Attempt) -> InstanceKey | None:
        """Send an attempt, or its whole group. D's half goes first, so that D can announce while P's half is in flight.
        Nothing is waited for. Return None, or the instance that is gone or whose queue is full."""
        group = attempt.group
        room, forks = (attempt.room, ()) if group is None else (group.room, group.forks)
        request, way = attempt.generation.request, attempt.way
        prefill, decode = way.prefill, way.decode
        to_decode = self._members.get(attempt.decode)
        if to_decode is None:
            return attempt.decode
        options = request.options
        if options.adapter:
            options = msgspec.structs.replace(options, adapter_hash=attempt.generation.adapter_hash)
        head = RequestHead(
            room=room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            num_emitted=attempt.num_continued,
            router=self._router,
            weights=decode.weights.number,
            options=options,
            images=request.images,
            encoders=way.encoders,
        )
        sampled = head, request.sampling, forks, _token_group(request), to_decode.sender.stamp, request.prediction
        if prefill is None or attempt.prefill is None:
            return None if self._post(to_decode, UnifiedRequest(*sampled), attempt.created_s) else attempt.decode
        to_prefill = self._members.get(attempt.prefill)
        if to_prefill is None:
            return attempt.prefill
        decode_half = DecodeRequest(*sampled, prefill_rank=prefill.engine_rank, prefill_incarnation=prefill.incarnation)
        prefill_half = PrefillRequest(
            head, decode.engine_rank, decode.incarnation, request.sampling.prompt_output, to_prefill.sender.stamp
        )
        if self._early_token and is_drawn_early(attempt):
            prefill_half = msgspec.structs.replace(prefill_half, early=request.sampling)
        if not self._post(to_decode, decode_half, attempt.created_s):
            return attempt.decode
        return None if self._post(to_prefill, prefill_half, attempt.created_s) else attempt.prefill

    def cancel(self, attempt: Attempt) -> None:
        """Cancel an attempt on its instances, where this is idempotent. An instance that is gone is skipped. P gets
        only the cancellation of a group's last attempt: the others still need the prompt."""
        group = attempt.group
        self._cancel(attempt.decode, attempt.room)
        if attempt.prefill is not None and (group is None or group.attempts == [attempt]):
            self._cancel(attempt.prefill, attempt.room if group is None else group.room)

    def report_gap(self, member: ClusterMember) -> None:
        """Notify an instance at once that a token message was lost."""
        member.receiver.is_gap_new = False
        logger.warning("a token message of %s was lost: it is sent again", member.name)
        self._acknowledge(member)

    def on_heartbeat(self, member: ClusterMember, heartbeat: Heartbeat) -> list[Missed]:
        """Retransmit lost messages, and return the requests that will not reach this instance."""
        key, now_s, sender = member.key, self._clock.monotonic(), member.sender
        self._acknowledge(member)
        ack = next((ack for ack in heartbeat.acks if ack.link == sender.link), None)
        news = sender.on_ack(ack, heartbeat.reads > member.reads, now_s)
        member.reads = heartbeat.reads
        if news.repeat:
            logger.warning("messages to %s were lost or are late: %d are sent again", member.name, len(news.repeat))
        for frame in news.repeat:
            member.peer.send(frame)
        for sent in news.given_up:
            if sent.about.is_cancel:
                self._cancel(key, sent.about.room)
        return [_missed(sent, member.name, now_s) for sent in news.given_up if not sent.about.is_cancel]

    def _acknowledge(self, member: ClusterMember) -> None:
        """Acknowledge the instance's tokens. If this is lost, the answer to the next heartbeat repeats it."""
        receiver = member.receiver
        member.peer.send(encode(LinkAck(member.sender.link, receiver.last, receiver.has_gap)))

    def _cancel(self, key: InstanceKey, room: bytes) -> None:
        member = self._members.get(key)
        if member is not None:
            sender = member.sender
            message = encode(CancelRequest(room, sender.stamp))
            member.peer.send(message)  # if its queue is full, it is sent again
            sender.note(message, Dispatched(room, True), self._clock.monotonic())

    def _post(self, member: ClusterMember, message: RequestMessage, now_s: float) -> bool:
        """Send the half of a request with the next number of its link. Return False, with nothing sent, if too much
        waits there."""
        frame, head = member.encode(message), message.head
        if member.sender.is_full or not member.peer.send(frame):
            return False
        member.sender.note(frame, Dispatched(head.room, False), now_s)
        if head.options.trace == "frames":
            self.trace.note_frame(head.request_id, head.room, "sent", "request", frame)
            if isinstance(message, SampledRequest):
                pairs = [(fork.room, fork.request_id) for fork in message.forks] or [(head.room, head.request_id)]
                self.trace.framed.update(pairs)
        return True


def _token_group(request: GenerateRequest) -> int:
    is_read_singly = request.wake_per_token or request.sampling.logprobs is not None or request.options.trace
    return 1 if is_read_singly else TOKEN_GROUP


def _missed(half: Sent[Dispatched], name: str, now_s: float) -> Missed:
    text = f"{name} is alive, but did not receive a message sent {now_s - half.sent_s:.2f} s ago"
    return Missed(half.about.room, RequestLost(text))
