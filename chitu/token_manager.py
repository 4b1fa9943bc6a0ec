"""D (or a unified instance) -> router: one token message per step for all requests. Step thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable

from chitu.messages import Finish, TokenBatch, encode

logger = logging.getLogger(__name__)

Send = Callable[[bytes], bool]
"""Hands a frame to the token port; False where the queue to the router is full. Never blocks."""


class TokenManager:
    """Collects a step's tokens and ends; `flush` sends them as one `TokenBatch`."""

    def __init__(self, incarnation: int, send: Send) -> None:
        self._incarnation = incarnation
        self._send = send
        self._rooms: list[bytes] = []
        self._tokens: list[int] = []
        self._finished: list[Finish] = []
        self.tokens_sent = 0
        """Dropped ones included."""
        self.tokens_dropped = 0

    def push(self, room: bytes, token: int) -> None:
        self._rooms.append(room)
        self._tokens.append(token)

    def finish(self, finish: Finish) -> None:
        """End of a room; it travels behind the room's last token."""
        self._finished.append(finish)

    def flush(self) -> None:
        if not self._rooms and not self._finished:
            return
        frame = encode(TokenBatch(self._incarnation, self._rooms, self._tokens, self._finished))
        if not self._send(frame):
            # The router has not read for so long that it is gone; its clients are, too.
            logger.error("token queue to the router is full: dropped %d tokens", len(self._tokens))
            self.tokens_dropped += len(self._tokens)
        self.tokens_sent += len(self._tokens)
        self._rooms, self._tokens, self._finished = [], [], []
