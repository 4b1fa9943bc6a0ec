"""The requests that the router looks back on: what ran where, and where its time went.

Kept by `PDRequestRouter` on the loop thread; read through `GET /cluster` by the web page, `chitu chat` and the
quickstart. Bounded: the oldest record goes when a new one comes. Times named `_at_s` are on the router's monotonic
clock.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from chitu.messages import StageTimes

KEPT_RECORDS = 64

RequestState = Literal["prefill", "decode", "finished", "retried", "failed", "cancelled"]
"""`prefill`: sent to its pair, no token yet. `decode`: tokens come. `finished`: stop, length or a stop string.
`retried`: this attempt failed, and the request went on with another one, which has a record of its own."""


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One attempt of one choice of one request, running or among the last that ended."""

    room: str
    """UUID; the key."""
    request_id: str
    """The X-Request-Id of the response; with several choices `<id>-<choice>`."""
    prefill: str | None
    """Name of P; None on a unified instance."""
    decode: str
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    created_at_s: float
    first_token_at_s: float | None
    ended_at_s: float | None
    kv_bytes: int
    """KV and logits that P moved into D's memory; known when the request has finished."""
    stages: StageTimes | None
    """Known when the request has finished."""
    error: str
    """Code of `chitu.errors` where the attempt failed (`failed` or `retried`), else empty."""
    attempt: int = 1
    """Number of this try of its request, from 1."""
    continued_tokens: int = 0
    """Output of earlier attempts that was prefilled again here, behind the prompt. `output_tokens` counts it too."""


class RequestJournal:
    def __init__(self) -> None:
        self.ended: deque[RequestSnapshot] = deque(maxlen=KEPT_RECORDS)
        """Oldest first."""
        self.version = 0
        """Grows with every start, first token and end."""

    def note_change(self) -> None:
        self.version += 1

    def add(self, ended: RequestSnapshot) -> None:
        self.ended.append(ended)
        self.version += 1
