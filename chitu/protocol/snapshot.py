"""What the router shows of the cluster and of its requests: the body of `GET /cluster` and of its event stream.

Made by `http/cluster_snapshot.py`; read by the web page, `chitu chat`, the launchers and the quickstart. Times named
`_at_s` are on the router's monotonic clock and mean something only relative to `time_s` of the same snapshot; the
others are spans.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.protocol.cluster import KVLayout, LoadReport
from chitu.protocol.requests import StageTimes

RequestState = Literal["prefill", "decode", "finished", "retried", "failed", "cancelled"]
"""`prefill`: sent to its pair, no token yet. `decode`: tokens come. `finished`: stop, length or a stop string.
`retried`: this attempt failed, and the request continued with another one, which has a record of its own."""


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
    """Code of `chitu.errors` if the attempt failed (`failed` or `retried`), else empty."""
    attempt: int = 1
    """Number of this try of its request, from 1."""
    continued_tokens: int = 0
    """Output of earlier attempts that was prefilled again here, after the prompt. `output_tokens` counts it too."""
    cached_tokens: int = 0
    """Prefilled tokens that were in cached pages and needed no computing; known with the first token."""
    prompt_room: str | msgspec.UnsetType = msgspec.UNSET
    """Room of the prompt, if it was sent once for several choices: the only one that P sees."""
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    """Tenant of the API key that asked (a hash), if the router has API keys."""


InstanceStatus = Literal["up", "draining", "down"]
"""`down`: the topology has it, the cluster view does not (not yet, or its lease ended)."""


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
    """Load in its last heartbeat; None while down."""
    layout: KVLayout | None = None
    """Shape of its pages and logits rows, from which the bytes that a request moves can be computed beforehand
    (`test/verify_xpyd_topology.py`). `tp_size` is left out if it is 1. None while down."""


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """One API process (`router.workers`)."""

    index: int
    pid: int
    in_flight: int


class ClusterSnapshot(msgspec.Struct, frozen=True):
    model: str
    version: str
    max_model_len: int | None
    """None while no instance can serve."""
    page_size: int
    """Tokens per page."""
    transport: str
    """Transport of KV between P and D: as configured (`shm`, `mooncake`), or what `auto` resolves to for the instances
    in the cluster; `auto` while there are none."""
    time_s: float
    router_incarnation: str
    in_flight: int
    instances: tuple[InstanceSnapshot, ...]
    """All instances of the topology, P first, in rank order."""
    requests: tuple[RequestSnapshot, ...]
    """Requests that the reader may see (of an API key: those of its tenant), oldest first: the last ones that ended,
    and those that run. All other numbers are of the whole cluster."""
    workers: tuple[WorkerSnapshot, ...] = ()
    """API processes that serve; one is the router itself."""
