"""D (or a unified instance) -> router: one token message per step and API process for all requests. Step thread only.

A router is one process with one token port, or several (`router.workers`) with one each; a request says which of them
it came from and where that listens. The sockets to such ports are opened at the first request from there (`expect`) and
closed when the process is gone (`forget`).

A connection that breaks takes messages with it, so they go by the link by which the requests came (`net/link.py`): they
are sent again until the router has them. Only its words are heard in another thread (`hear`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from chitu.errors import Capacity
from chitu.net.link import LinkSender, Sent
from chitu.protocol import Finish, LinkWord, TokenBatch, encode

logger = logging.getLogger(__name__)

Send = Callable[[bytes], bool]
"""Hands a frame to the token port; False where the queue to the router is full. Never blocks."""
MAX_WORKERS = 256
"""API processes of one router at once; a socket each."""
MAX_WORDS = 1024
"""That wait for the next flush; of more the oldest are lost, which costs a message sent twice."""
FORMER_LINKS = 16
"""Of one process of the router, remembered: the tail of their connection may still bring a request."""


class TokenPort(Protocol):
    """The token port of one API process."""

    def send(self, frame: bytes) -> bool:
        """As `Send`."""

    def close(self) -> None: ...


OpenPort = Callable[[int], TokenPort]
"""Port on the router's host -> its socket. BadFrame where it is none."""


@dataclass(slots=True)
class _Batch:
    """What one process of the router is sent at the end of the step."""

    send: Send
    close: Callable[[], None] | None
    rooms: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: list[tuple[int, bytes]] = field(default_factory=list)
    """With the place in `tokens`."""
    cached: list[tuple[bytes, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[bytes, bytes]] = field(default_factory=list)
    sender: LinkSender[int] | None = None
    """Of how many tokens each message has; None until a counted request came."""
    former: deque[int] = field(default_factory=lambda: deque(maxlen=FORMER_LINKS))
    """Links that were replaced by the present one, or ended with their router."""


class TokenManager:
    """Collects a step's tokens and ends; `flush` sends them as one `TokenBatch` per process of the router."""

    def __init__(
        self,
        incarnation: int,
        send: Send,
        open_port: OpenPort | None = None,
        repeat_s: float = 0.5,
        patience_s: float = math.inf,
    ) -> None:
        """`send`: to the router's own `token_port`; `open_port`: to those of API processes; the seconds: as
        `LinkSender` has them."""
        self._incarnation = incarnation
        self._open_port = open_port
        self._repeat_s = repeat_s
        self._patience_s = patience_s
        self._words: deque[LinkWord] = deque(maxlen=MAX_WORDS)
        self._batches: dict[int, _Batch] = {0: _Batch(send, None)}
        """By incarnation of the API process; 0 is the router that is one."""
        self.tokens_sent = 0
        """Dropped ones included."""
        self.tokens_dropped = 0
        """Their router had not read beyond the bounds."""

    def hear(self, word: LinkWord) -> None:
        """The router says what it has; the next `flush` acts upon it. Any thread."""
        self._words.append(word)

    def expect(self, worker: int, port: int, link: int = 0) -> bool:
        """A request came from this API process by this link. False where that has been replaced: nobody would take its
        tokens. BadFrame for an impossible port, Capacity for too many processes."""
        batch = self._batches.get(worker)
        if batch is None:
            if self._open_port is None:
                return True
            if len(self._batches) > MAX_WORKERS:
                raise Capacity(f"more than {MAX_WORKERS} processes of the router at once")
            opened = self._open_port(port)
            batch = self._batches[worker] = _Batch(opened.send, opened.close)
        if link and (batch.sender is None or batch.sender.link != link):
            if link in batch.former:
                return False
            _end_link(batch)
            batch.sender = LinkSender(link, self._repeat_s, self._patience_s)
        return True

    def forget(self, worker: int) -> None:
        """That API process is gone: what it was not sent yet is dropped with its socket."""
        batch = self._batches.get(worker)
        if batch is not None and batch.close is not None:
            del self._batches[worker]
            batch.close()

    def restart(self) -> None:
        """A new router listens at the router's own `token_port`: it gets nothing of before."""
        old = self._batches[0]
        _end_link(old)
        self._batches[0] = _Batch(old.send, None, former=old.former)

    def close(self) -> None:
        """Close the sockets to API processes; what is queued may still leave."""
        for worker in list(self._batches):
            self.forget(worker)

    def push(self, room: bytes, token: int, worker: int = 0, logprobs: bytes | None = None) -> None:
        """`logprobs`: packed, of a request that asks for them."""
        batch = self._batches.get(worker)
        if batch is not None:
            if logprobs is not None:
                batch.logprobs.append((len(batch.tokens), logprobs))
            batch.rooms.append(room)
            batch.tokens.append(token)

    def note_cached(self, room: bytes, num_tokens: int, worker: int = 0) -> None:
        """With the room's first token: this many of its prompt's tokens were not computed."""
        batch = self._batches.get(worker)
        if batch is not None:
            batch.cached.append((room, num_tokens))

    def push_prompt(self, room: bytes, logprobs: bytes, worker: int = 0) -> None:
        """Logprobs of a room's prompt, ahead of its first token."""
        batch = self._batches.get(worker)
        if batch is not None:
            batch.prompt_logprobs.append((room, logprobs))

    def finish(self, finish: Finish, worker: int = 0) -> None:
        """End of a room; it travels behind the room's last token."""
        batch = self._batches.get(worker)
        if batch is not None:
            batch.finished.append(finish)

    def flush(self, now_s: float = 0.0) -> None:
        """At the end of every step, and of every turn without one; `now_s` on the step thread's clock."""
        while self._words:
            self._on_word(self._words.popleft(), now_s)
        for batch in self._batches.values():
            if batch.rooms or batch.finished:
                self._flush(batch, now_s)

    def _on_word(self, word: LinkWord, now_s: float) -> None:
        for batch in self._batches.values():
            if batch.sender is None or batch.sender.link != word.link:
                continue
            news = batch.sender.on_word(word, True, now_s)
            if news.repeat:
                logger.warning(
                    "tokens to the router were lost or are late: %d messages are sent again", len(news.repeat)
                )
            for frame in news.repeat:
                batch.send(frame)
            if news.given_up:
                self._drop(news.given_up)
                self._flush(batch, now_s)  # even an empty message says that those before it will not come

    def _flush(self, batch: _Batch, now_s: float) -> None:
        sender, count = batch.sender, len(batch.tokens)
        if sender is not None and sender.is_full:
            self._drop(sender.give_up(math.inf))
        numbers = (sender.number, sender.link, sender.num_kept) if sender is not None else (0, 0, 0)
        message = TokenBatch(
            *(self._incarnation, batch.rooms, batch.tokens, batch.finished, *numbers),
            *(batch.logprobs, batch.cached, batch.prompt_logprobs),
        )
        frame = encode(message)
        is_queued = batch.send(frame)
        if sender is not None:
            sender.note(frame, count, now_s)
        elif not is_queued:
            self.tokens_dropped += count
        self.tokens_sent += count
        batch.rooms, batch.tokens, batch.finished, batch.logprobs, batch.cached = [], [], [], [], []
        batch.prompt_logprobs = []

    def _drop(self, messages: list[Sent[int]]) -> None:
        count = sum(sent.about for sent in messages)
        logger.error("the router does not take tokens: dropped %d messages with %d tokens", len(messages), count)
        self.tokens_dropped += count


def _end_link(batch: _Batch) -> None:
    if batch.sender is not None:
        batch.former.append(batch.sender.link)
