"""D (or a unified instance) -> router: one token message per step and API process for all requests. Step thread only.

A router is one process with one token port, or several (`router.workers`) with one each; a request says which of them
it came from and where that listens. The sockets to such ports are opened at the first request from there (`expect`) and
closed when the process is gone (`forget`).

A connection that breaks takes messages with it, so they are numbered (also those that could not be sent): a router that
sees a gap knows that tokens are missing. A port that got messages once gets an empty one every `BEAT_S`, so that a lost
last token does not stay unnoticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from chitu.errors import Capacity
from chitu.protocol import Finish, TokenBatch, encode

logger = logging.getLogger(__name__)

Send = Callable[[bytes], bool]
"""Hands a frame to the token port; False where the queue to the router is full. Never blocks."""
BEAT_S = 0.5
MAX_WORKERS = 256
"""API processes of one router at once; a socket each."""


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
    epoch: int = 0
    """How many routers got messages through `send` before."""
    number: int = 0
    """Messages so far, in this epoch."""
    sent_s: float = 0.0


class TokenManager:
    """Collects a step's tokens and ends; `flush` sends them as one `TokenBatch` per process of the router."""

    def __init__(self, incarnation: int, send: Send, open_port: OpenPort | None = None) -> None:
        """`send`: to the router's own `token_port`; `open_port`: to those of API processes."""
        self._incarnation = incarnation
        self._open_port = open_port
        self._batches: dict[int, _Batch] = {0: _Batch(send, None)}
        """By incarnation of the API process; 0 is the router that is one."""
        self.tokens_sent = 0
        """Dropped ones included."""
        self.tokens_dropped = 0

    def expect(self, worker: int, port: int) -> None:
        """A request came from this API process. BadFrame for an impossible port, Capacity for too many processes."""
        if worker in self._batches or self._open_port is None:
            return
        if len(self._batches) > MAX_WORKERS:
            raise Capacity(f"more than {MAX_WORKERS} processes of the router at once")
        opened = self._open_port(port)
        self._batches[worker] = _Batch(opened.send, opened.close)

    def forget(self, worker: int) -> None:
        """That API process is gone: what it was not sent yet is dropped with its socket."""
        batch = self._batches.get(worker)
        if batch is not None and batch.close is not None:
            del self._batches[worker]
            batch.close()

    def restart(self) -> None:
        """A new router listens at the router's own `token_port`: it gets nothing of before, and messages from 1."""
        old = self._batches[0]
        self._batches[0] = _Batch(old.send, None, epoch=old.epoch + 1)

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
        for batch in self._batches.values():
            if batch.rooms or batch.finished or (batch.number and now_s - batch.sent_s >= BEAT_S):
                batch.sent_s = now_s
                self._flush(batch)

    def _flush(self, batch: _Batch) -> None:
        count = len(batch.tokens)
        batch.number += 1
        message = TokenBatch(
            *(self._incarnation, batch.rooms, batch.tokens, batch.finished, batch.number, batch.epoch),
            *(batch.logprobs, batch.cached, batch.prompt_logprobs),
        )
        if not batch.send(encode(message)):
            # The router has not read beyond its limit: it counts as gone, and its clients with it.
            logger.error("token queue to the router is full: dropped %d tokens", count)
            self.tokens_dropped += count
        self.tokens_sent += count
        batch.rooms, batch.tokens, batch.finished, batch.logprobs, batch.cached = [], [], [], [], []
        batch.prompt_logprobs = []
