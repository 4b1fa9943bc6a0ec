"""Trace records: what router, P and D saw of a request that is traced, and how records come to the router.

`chitu/tracing/` writes and reads them as JSON lines; `client/timeline.py` joins them. Times named `at_s` are on the
monotonic clock of the process that wrote the record: only spans between records of one process mean something. They
have token ids of prompts and outputs, and frames whole messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Union

from chitu.protocol.requests import NO_TIMES, PrefillTimes
from chitu.protocol.snapshot import RequestSnapshot
from chitu.protocol.wire import Wire

MAX_LISTED_PAGES = 256
"""Of a list of pages; more are counted."""
HEAD_TOKENS = 16
MAX_FRAME_BYTES = 64 << 10
"""Of a frame; a larger one is recorded without its bytes, since a part of it cannot be read."""


class TraceRecord(Wire, frozen=True, kw_only=True, omit_defaults=False, tag_field="kind"):
    """What all of them have."""

    request_id: str
    """With several choices of a request `<id>-<choice>`."""
    room: str
    """UUID of the attempt; empty in the router's record of the whole request."""
    instance: str
    """`router`, `P0`, `D1`, `U0`."""
    at_s: float


class TracedPages(Wire, frozen=True, omit_defaults=False):
    """Page numbers in token order."""

    count: int
    numbers: tuple[int, ...]
    """The first `MAX_LISTED_PAGES`."""
    lowest: int
    highest: int
    dtype: str = "int32"
    """Of the numbers, as they travel."""

    @classmethod
    def of(cls, pages: Sequence[int]) -> TracedPages:
        numbers = tuple(pages)
        return cls(len(numbers), numbers[:MAX_LISTED_PAGES], min(numbers, default=-1), max(numbers, default=-1))


class TracedLayout(Wire, frozen=True, omit_defaults=False):
    """What a page of that instance is."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    tp_size: int
    regions_per_layer: int


class TracedSums(Wire, frozen=True, omit_defaults=False):
    """Hashes of a window of a prompt's pages, K and V of all layers (formula: `kv_cache/checksum.py`)."""

    positions: tuple[int, ...]
    """In the list of pages."""
    sums: tuple[str, ...]
    """16 hex digits each."""
    head_copies: int = 1
    """How many ranks hold the same KV head, each of which is summed up: the others' sums count once."""


class TraceArrival(TraceRecord, frozen=True, kw_only=True, tag="arrival"):
    """The request, or its half, came."""

    prompt_tokens: int
    """That are prefilled here: behind the client's prompt may be output of earlier attempts."""
    continued_tokens: int
    prompt_head: tuple[int, ...]
    """The first `HEAD_TOKENS` ids."""


class TraceSend(TraceRecord, frozen=True, kw_only=True, tag="send"):
    """P, before it writes the first byte."""

    prompt_tokens: int
    cached_tokens: int
    token_range: tuple[int, int]
    """Of the prompt, whose pages are written: D had what is before."""
    slot: int
    """Executor slot."""
    pages: TracedPages
    peer_pages: TracedPages
    """D's, to which they are written; none where D wants the logits row alone."""
    layout: TracedLayout
    bytes_by_layer: tuple[int, ...]
    """Of KV, to all ranks of D."""
    total_bytes: int
    """With the logits row."""


class TraceWrite(TraceRecord, frozen=True, kw_only=True, tag="write"):
    """P: one submit to the transport, when it is complete."""

    what: Literal["kv", "logits"]
    transport: str
    device: str
    """`cpu`, `cuda`: where P's buffers are."""
    dtype: str
    layers: tuple[int, int]
    """First and behind the last; both 0 for logits."""
    num_buffers: int
    """Of the main rank."""
    buffer_bytes: tuple[int, int]
    """The smallest and the largest."""
    total_bytes: int
    """Of all ranks; 0 where it failed."""
    latency_s: float
    """From the submit to the completion."""
    error: str


class TraceSent(TraceRecord, frozen=True, kw_only=True, tag="sent"):
    """P: the last byte is in D's memory."""

    total_bytes: int
    times: PrefillTimes
    hashes: TracedSums | None
    """Of P's own pages; null where they could not be made."""


class TraceRestored(TraceRecord, frozen=True, kw_only=True, tag="restored"):
    """D: KV of the prompt is in its pages. On a unified instance: it was computed there."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, whose pages were here already."""
    slot: int
    aux_slot: int
    pages: TracedPages
    layout: TracedLayout
    bytes_by_layer: tuple[int, ...]
    """That came."""
    total_bytes: int
    """With the logits row."""
    admission_s: float
    """From the arrival to the announcement of the pages."""
    landed_s: float
    """From the arrival; of a unified instance, to the first token."""
    times: PrefillTimes = NO_TIMES
    """Of a unified instance."""
    hashes: TracedSums | None = None


class TraceStep(TraceRecord, frozen=True, kw_only=True, tag="step"):
    """D or a unified instance: a token."""

    index: int
    """From 0, of this attempt."""
    last_token: int
    """Behind which it was drawn."""
    next_token: int
    new_pages: tuple[int, ...]
    """Since the record before."""
    ended: str
    """`stop` or `length` with the last one."""


class TraceEnd(TraceRecord, frozen=True, kw_only=True, tag="end"):
    """The instance is done with it."""

    reason: str
    """`stop`, `length`, `sent` (P), `cancelled`, `error`."""
    code: str
    message: str
    output_tokens: int
    """Of this attempt."""


class TraceFrame(TraceRecord, frozen=True, kw_only=True, tag="frame"):
    """A message on a ZMQ socket."""

    direction: Literal["sent", "received"]
    port: str
    """`request`, `control`, `token`."""
    num_bytes: int
    data: bytes
    """Empty where it is larger than `MAX_FRAME_BYTES`."""


class TraceRequest(TraceRecord, frozen=True, kw_only=True, tag="request"):
    """The router, when the answer is over: what `return_proof` and the spans of OpenTelemetry are made of, too."""

    path: str
    tenant: str
    """Of the API key that asked (a hash)."""
    arrived_s: float
    received_s: float
    error: str
    """Code, where the request has no answer because of it."""
    choices: tuple[tuple[RequestSnapshot, ...], ...]
    """Of each its attempts."""


class TraceLoss(TraceRecord, frozen=True, kw_only=True, tag="loss"):
    """Records of this process that are missing from here on back: there was no room for them. Of any request."""

    num_records: int


AnyTraceRecord = Union[
    TraceArrival,
    TraceSend,
    TraceWrite,
    TraceSent,
    TraceRestored,
    TraceStep,
    TraceEnd,
    TraceFrame,
    TraceRequest,
    TraceLoss,
]
