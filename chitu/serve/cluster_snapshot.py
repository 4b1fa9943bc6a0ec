"""What the router shows of the cluster and of its requests: the body of `GET /cluster` and of its event stream.

Pure: built on the loop thread from what the router knows, read by the web page, `chitu chat` and the quickstart. Times
named `_at_s` are on the router's monotonic clock and only mean something against `time_s` of the same snapshot; the
others are spans.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.messages import LoadReport, StageTimes

InstanceStatus = Literal["up", "draining", "down"]
"""`down`: the topology has it, the cluster view does not (not yet, or its lease ended)."""

RequestState = Literal["prefill", "decode", "finished", "failed", "cancelled"]
"""`prefill`: sent to its pair, no token yet. `decode`: tokens come."""


class InstanceSnapshot(msgspec.Struct, frozen=True):
    name: str
    """`P0`, `D1`, `U0`."""
    role: str
    status: InstanceStatus
    host: str
    pid: int
    """0 while down."""
    incarnation: str
    """Decimal; a string because it does not fit a JavaScript number. Empty while down."""
    load: LoadReport | None
    """Its last heartbeat; None while down."""


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
    """Code of `chitu.errors` where it failed, else empty."""


class ClusterSnapshot(msgspec.Struct, frozen=True):
    model: str
    version: str
    max_model_len: int | None
    """None while nothing can serve."""
    page_size: int
    """Tokens a page."""
    transport: str
    """As configured (`auto`, `shm`, `mooncake`)."""
    time_s: float
    router_incarnation: str
    in_flight: int
    instances: tuple[InstanceSnapshot, ...]
    """All of the topology, P first, in rank order."""
    requests: tuple[RequestSnapshot, ...]
    """Oldest first: those that run, and the last ones that ended."""
