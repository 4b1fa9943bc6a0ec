"""An instance -> routers: one token message per step and router for all its requests. P sends only first tokens that D
confirms. Step thread only.

A request names its router by its index (`router.hosts`), and its tokens go to the token port there.

A connection that breaks loses messages, so tokens use the link by which the requests came (`net/link.py`): they are
retransmitted until the router acknowledges them. Only acknowledgements arrive on another thread (`take_ack`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chitu.net.link import LinkSender, Sent
from chitu.protocol import Finish, LinkAck, TokenBatch, encode

logger = logging.getLogger(__name__)

Send = Callable[[bytes], bool]
"""Hands a frame to the token port. Returns False if the queue to the router is full. Never blocks."""
MAX_ACKS = 1024
"""Most acknowledgements that wait for the next flush. Beyond it the oldest are lost, which costs a retransmission."""
FORMER_LINKS = 16
"""Number of former links remembered per router: the tail of their connection may still deliver a request."""


@dataclass(slots=True)
class _Batch:
    """What is sent to one router at the end of the step."""

    send: Send
    rooms: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: list[tuple[int, bytes]] = field(default_factory=list)
    """Packed logprobs, each with the index of its token in `tokens`."""
    cached: list[tuple[bytes, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[bytes, bytes]] = field(default_factory=list)
    weights: str = ""
    groups: list[tuple[bytes, list[int]]] = field(default_factory=list)
    early: list[tuple[bytes, int]] = field(default_factory=list)
    sender: LinkSender[int] | None = None
    """Sender of the link; it keeps the number of tokens of each message. None until a request with a link came."""
    former: deque[int] = field(default_factory=lambda: deque(maxlen=FORMER_LINKS))
    """Links that the present one replaced, or that ended with their router."""


class TokenManager:
    """The tokens and ends of a step; `flush` sends them as one `TokenBatch` per router."""

    def __init__(
        self,
        incarnation: int,
        *sends: Send,
        repeat_s: float = 0.5,
        patience_s: float = math.inf,
    ) -> None:
        """Send by `sends` to the `token_port` of each router. `repeat_s` and `patience_s` are those of `LinkSender`."""
        self._incarnation = incarnation
        self._repeat_s = repeat_s
        self._patience_s = patience_s
        self._acks: deque[LinkAck] = deque(maxlen=MAX_ACKS)
        self._batches: dict[int, _Batch] = {index: _Batch(send) for index, send in enumerate(sends)}
        """Batches by index of the router."""
        self.tokens_sent = 0
        """Tokens sent since the start, including dropped ones."""
        self.tokens_dropped = 0
        """Tokens dropped because the router left too many messages unread."""

    def take_ack(self, ack: LinkAck) -> None:
        """Queue the router's acknowledgement for the next `flush`. Any thread."""
        self._acks.append(ack)

    def expect(self, router: int, link: int = 0) -> bool:
        """Prepare to send tokens to a router by the link of its request. Return False if that link was replaced, or
        there is no such router: nobody would read the tokens."""
        batch = self._batches.get(router)
        if batch is None:
            return False
        if link and (batch.sender is None or batch.sender.link != link):
            if link in batch.former:
                return False
            _end_link(batch)
            batch.sender = LinkSender(link, self._repeat_s, self._patience_s)
        return True

    def restart(self, router: int = 0) -> None:
        """Drop what is collected for a router that a new one has replaced."""
        old = self._batches.get(router)
        if old is not None:
            _end_link(old)
            self._batches[router] = _Batch(old.send, former=old.former)

    def push(self, room: bytes, token: int, router: int = 0, logprobs: bytes | None = None) -> None:
        """Add a token of a room. `logprobs` are packed; None if the request does not ask for them."""
        batch = self._batches.get(router)
        if batch is not None:
            if logprobs is not None:
                batch.logprobs.append((len(batch.tokens), logprobs))
            batch.rooms.append(room)
            batch.tokens.append(token)

    def push_group(self, room: bytes, tokens: list[int], router: int = 0) -> None:
        """Add the newest tokens of a room whose request lets them wait for each other."""
        batch = self._batches.get(router)
        if batch is not None:
            batch.groups.append((room, tokens))

    def push_early(self, room: bytes, token: int, router: int = 0) -> None:
        """Add the first token of a room, as P drew it."""
        batch = self._batches.get(router)
        if batch is not None:
            batch.early.append((room, token))

    def note_cached(self, room: bytes, num_tokens: int, router: int = 0) -> None:
        """Report, with the room's first token, how many of its prompt tokens were cached and not computed."""
        batch = self._batches.get(router)
        if batch is not None:
            batch.cached.append((room, num_tokens))

    def push_prompt(self, room: bytes, logprobs: bytes, router: int = 0) -> None:
        """Add the logprobs of a room's prompt. They travel ahead of its first token."""
        batch = self._batches.get(router)
        if batch is not None:
            batch.prompt_logprobs.append((room, logprobs))

    def note_weights(self, model_hash: str) -> None:
        """Report with the next tokens that these and all later ones are of another model."""
        for batch in self._batches.values():
            batch.weights = model_hash

    def finish(self, finish: Finish, router: int = 0) -> None:
        """Add the end of a room. It travels behind the room's last token."""
        batch = self._batches.get(router)
        if batch is not None:
            batch.finished.append(finish)

    def flush(self, now_s: float = 0.0) -> None:
        """Send the collected messages. Called at the end of every turn; `now_s` is on the step thread's clock."""
        while self._acks:
            self._on_ack(self._acks.popleft(), now_s)
        for batch in self._batches.values():
            if batch.rooms or batch.groups or batch.finished or batch.early:
                self._flush(batch, now_s)

    def _on_ack(self, ack: LinkAck, now_s: float) -> None:
        for batch in self._batches.values():
            if batch.sender is None or batch.sender.link != ack.link:
                continue
            news = batch.sender.on_ack(ack, True, now_s)
            if news.repeat:
                logger.warning(
                    "tokens to the router were lost or are late: %d messages are sent again", len(news.repeat)
                )
            for frame in news.repeat:
                batch.send(frame)
            if news.given_up:
                self._drop(news.given_up)
                self._flush(batch, now_s)  # even an empty message tells that those before it are given up

    def _flush(self, batch: _Batch, now_s: float) -> None:
        sender, count = batch.sender, len(batch.tokens) + len(batch.early)
        count += sum([len(tokens) for _, tokens in batch.groups])
        if sender is not None and sender.is_full:
            self._drop(sender.give_up(math.inf))
        numbers = (sender.number, sender.link, sender.num_kept) if sender is not None else (0, 0, 0)
        message = TokenBatch(
            self._incarnation,
            batch.rooms,
            batch.tokens,
            batch.finished,
            *numbers,
            batch.logprobs,
            batch.cached,
            batch.prompt_logprobs,
            batch.weights,
            batch.groups,
            batch.early,
        )
        frame = encode(message)
        is_queued = batch.send(frame)
        if sender is not None:
            sender.note(frame, count, now_s)
        elif not is_queued:
            self.tokens_dropped += count
        self.tokens_sent += count
        batch.rooms, batch.tokens, batch.finished, batch.logprobs, batch.cached = [], [], [], [], []
        batch.prompt_logprobs, batch.weights, batch.groups, batch.early = [], "", [], []

    def _drop(self, messages: list[Sent[int]]) -> None:
        count = sum(sent.about for sent in messages)
        logger.error("the router accepts no tokens: dropped %d messages with %d tokens", len(messages), count)
        self.tokens_dropped += count


def _end_link(batch: _Batch) -> None:
    if batch.sender is not None:
        batch.former.append(batch.sender.link)
