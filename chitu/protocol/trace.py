"""Trace records: what router, P and D saw of a request that is traced, and how records come to the router.

`chitu/tracing/` writes and reads them as JSON lines; `tracing/timeline.py` joins them. Times named `at_s` are on the
monotonic clock of the process that wrote the record: only spans between records of one process mean something. Records
contain token ids of prompts and outputs, and frames whole messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Union

from chitu.protocol.account import NO_TIMES, DraftCounts, PrefillTimes, RequestSnapshot
from chitu.protocol.cluster import CacheGroup
from chitu.protocol.wire import Wire

MAX_LISTED_PAGES = 256
"""Page numbers recorded of a list; further ones are only counted."""
HEAD_TOKENS = 16
MAX_FRAME_BYTES = 64 << 10
"""Largest frame that is recorded with its bytes: a part of a larger one could not be read."""


class TraceRecord(Wire, frozen=True, kw_only=True, omit_defaults=False, tag_field="kind"):
    """Fields that every trace record has."""

    request_id: str
    """Id of the request; with several choices `<id>-<choice>`."""
    room: str
    """UUID of the attempt; empty in the router's record of the whole request."""
    instance: str
    """`router`, `P0`, `D1`, `U0`."""
    at_s: float


class TracedPages(Wire, frozen=True, omit_defaults=False):
    """Page numbers in token order."""

    count: int
    numbers: tuple[int, ...]
    """The first `MAX_LISTED_PAGES` numbers."""
    lowest: int
    highest: int
    dtype: str = "int32"
    """Type of the numbers as they are sent."""

    @classmethod
    def of(cls, pages: Sequence[int]) -> TracedPages:
        numbers = tuple(pages)
        return cls(len(numbers), numbers[:MAX_LISTED_PAGES], min(numbers, default=-1), max(numbers, default=-1))


class TracedLayout(Wire, frozen=True, omit_defaults=False):
    """Shape of a page on that instance."""

    num_layers: int
    page_size: int
    dtype: str
    tp_size: int
    groups: tuple[CacheGroup, ...]


class TracedSums(Wire, frozen=True, omit_defaults=False):
    """Hashes of a window of a prompt's pages, K and V of all layers (formula: `kv_cache/checksum.py`)."""

    positions: tuple[int, ...]
    """Positions in the list of pages."""
    sums: tuple[str, ...]
    """One sum per position, 16 hex digits each."""
    head_copies: int = 1
    """Number of ranks that hold the same KV head. These sums include every copy; P's sums count each head once."""


class TraceArrival(TraceRecord, frozen=True, kw_only=True, tag="arrival"):
    """The request, or its half, arrived."""

    prompt_tokens: int
    """Tokens that are prefilled here: the client's prompt and, after it, output of earlier attempts."""
    continued_tokens: int
    prompt_head: tuple[int, ...]
    """The first `HEAD_TOKENS` ids."""


class TraceSend(TraceRecord, frozen=True, kw_only=True, tag="send"):
    """P, before it writes the first byte."""

    prompt_tokens: int
    cached_tokens: int
    token_range: tuple[int, int]
    """Range of the prompt whose pages are written: D already had what is before it."""
    slot: int
    """Executor slot."""
    pages: TracedPages
    peer_pages: TracedPages
    """Pages of D to which they are written; none if D wants only the logits row."""
    layout: TracedLayout
    bytes_by_layer: tuple[int, ...]
    """KV bytes to all ranks of D, by layer."""
    total_bytes: int
    """Bytes including the logits row."""


class TraceWrite(TraceRecord, frozen=True, kw_only=True, tag="write"):
    """P: one submit to the transport, recorded when it is complete."""

    what: Literal["kv", "logits", "state"]
    transport: str
    device: str
    """Where P's buffers are: `cpu`, `cuda`."""
    dtype: str
    layers: tuple[int, int]
    """The first layer and the one after the last; both 0 for logits."""
    num_buffers: int
    """Buffers of the main rank."""
    buffer_bytes: tuple[int, int]
    """Bytes of the smallest and the largest buffer."""
    total_bytes: int
    """Bytes of all ranks; 0 if the write failed."""
    latency_s: float
    """From the submit to the completion."""
    error: str


class TraceSent(TraceRecord, frozen=True, kw_only=True, tag="sent"):
    """P: the last byte is in D's memory."""

    total_bytes: int
    times: PrefillTimes
    hashes: TracedSums | None
    """Hashes of P's own pages; null if they could not be made."""


class TraceRestored(TraceRecord, frozen=True, kw_only=True, tag="restored"):
    """D: KV of the prompt is in its pages. On a unified instance: it was computed there."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose pages were here already."""
    slot: int
    aux_slot: int
    pages: TracedPages
    layout: TracedLayout
    bytes_by_layer: tuple[int, ...]
    """KV bytes that arrived, by layer."""
    total_bytes: int
    """Bytes including the logits row."""
    admission_s: float
    """From the arrival to the announcement of the pages."""
    landed_s: float
    """From the arrival to the KV; on a unified instance, to the first token."""
    times: PrefillTimes = NO_TIMES
    """Times of a unified instance."""
    hashes: TracedSums | None = None


class TraceStep(TraceRecord, frozen=True, kw_only=True, tag="step"):
    """D or a unified instance: one token."""

    index: int
    """Number of the token in this attempt, from 0."""
    last_token: int
    """Token after which it was drawn."""
    next_token: int
    new_pages: tuple[int, ...]
    """Pages added since the record before."""
    ended: str
    """`stop` or `length` with the last token, else empty."""


class TraceEnd(TraceRecord, frozen=True, kw_only=True, tag="end"):
    """The instance is done with the request."""

    reason: str
    """`stop`, `length`, `sent` (P), `cancelled`, `error`."""
    code: str
    message: str
    output_tokens: int
    """Output tokens of this attempt."""
    drafts: DraftCounts = ()


class TraceFrame(TraceRecord, frozen=True, kw_only=True, tag="frame"):
    """A message on a ZMQ socket."""

    direction: Literal["sent", "received"]
    port: str
    """`request`, `control`, `token`."""
    num_bytes: int
    data: bytes
    """The message; empty if it is larger than `MAX_FRAME_BYTES`."""


class TraceRequest(TraceRecord, frozen=True, kw_only=True, tag="request"):
    """The router, when the answer is over. `return_proof` and the spans of OpenTelemetry are made from it, too."""

    path: str
    tenant: str
    """Tenant of the API key that asked (a hash)."""
    arrived_s: float
    received_s: float
    error: str
    """Error code, if the request has no answer because of it."""
    choices: tuple[tuple[RequestSnapshot, ...], ...]
    """Attempts of each choice."""


class TraceLoss(TraceRecord, frozen=True, kw_only=True, tag="loss"):
    """Records of this process, of any request, that were dropped before this one for lack of room."""

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
