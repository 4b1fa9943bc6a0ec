"""Membership and load of instances: stats port (29600), coordination (29800), the view (29801), bootstrap (8080,
JSON)."""

from __future__ import annotations

from typing import Union

from chitu.protocol.requests import LinkWord
from chitu.protocol.wire import Codec, Wire
from chitu.types import Role

# ------------------------------------------------------------------------------------------------- stats port (29600)


class LoadReport(Wire, frozen=True, omit_defaults=False):
    """What routing and metrics see of an instance. Pages: free + used + quarantined + cached == total."""

    waiting: int = 0
    """Requests not yet computing: P's bootstrap and waiting queues; D's prealloc queue."""
    unread: int = 0
    """Of `waiting`: came in after the newest step was planned, which may well have room for them."""
    unannounced: int = 0
    """P: those of `waiting` that no D has announced yet, which is the bootstrap queue."""
    transferring: int = 0
    """P: inflight; D: pages announced, not decoding yet."""
    landed: int = 0
    """D: those of `transferring` whose KV is here, so that only token 1 is waited for."""
    running: int = 0
    """In the batch: prompts (P), outputs (D), both (unified)."""
    retracted: int = 0
    closing: int = 0
    """Over, but a peer may still touch their pages."""
    waiting_tokens: int = 0
    """Prompt tokens still to compute on P."""
    pages_total: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_quarantined: int = 0
    pages_cached: int = 0
    """Kept for later prompts, and used by nobody at the moment."""
    aux_total: int = 0
    aux_free: int = 0
    steps: int = 0
    tokens: int = 0
    """Since start: prompt tokens computed (P), tokens emitted (D)."""
    tokens_dropped: int = 0
    """Of `tokens`, because the router did not take them."""
    bytes_moved: int = 0
    suspended: tuple[int, ...] = ()
    """P: engine ranks of the D that it does not write to until a failed write has settled."""
    cached_tokens: int = 0
    """Since start: prompt tokens that were in cached pages, and not computed (D: not moved)."""
    bytes_saved: int = 0
    """D, since start: KV bytes of prompts that were in cached pages, and not moved."""
    evictions: int = 0
    """Since start: cached pages that were given to others."""
    host_tokens: int = 0
    """Since start: prompt tokens whose pages came from host memory, and from the tiers behind it."""
    disk_tokens: int = 0
    store_tokens: int = 0
    host_evictions: int = 0
    """Since start: pages that host memory gave up for others."""
    bad_pages: int = 0
    """Since start: pages from disk or store that were not what they should be."""
    retractions: int = 0
    unknown_frames: int = 0
    backlog_s: float = 0.0
    """Seconds, since start, in which work waited that the step could not take: P's full steps, D's prealloc queue."""
    backlog_work: int = 0
    """What was worked off in them: requests admitted (D), prompt tokens computed (the others). By `backlog_s`: how fast
    a queue moves here."""


class Heartbeat(Wire, frozen=True, tag="heartbeat"):
    """Stats port, every `heartbeat_interval_s`, and at once where a request was lost on the way. Renews the lease of
    this incarnation."""

    role: Role
    engine_rank: int
    incarnation: int
    load: LoadReport
    words: tuple[LinkWord, ...] = ()
    """Of the links from which something came since the last heartbeat."""
    reads: int = 0
    """How often, since start, the request port was found empty: where this grows, nothing that came lies unread."""
    silent: tuple[int, ...] = ()
    """D: incarnations of the P that do not answer it, though they are in the view: nothing passes between the two."""


class RequestFailed(Wire, frozen=True, tag="request_failed"):
    """P's failures (stats port): P never connects to the token port."""

    role: Role
    engine_rank: int
    incarnation: int
    room: bytes
    code: str
    message: str


class ReplicaHeartbeat(Wire, frozen=True, tag="replica_heartbeat"):
    """One of several API processes (`router.workers`), every 0.5 s, to the one that started it."""

    incarnation: int
    port: int
    """HTTP on the loopback interface, of this process alone: the others ask for its record there."""
    metrics: bytes
    """What it counted so far (`router/metrics.py`, MessagePack): counters must not fall when it dies."""
    accepts: bool
    """Connections at the router's port; not yet while it starts, nor any more when it ends."""


class TraceLines(Wire, frozen=True, tag="trace_lines"):
    """Stats port: records of an instance. It sends them while the request runs, so those of a killed one are there."""

    role: Role
    engine_rank: int
    incarnation: int
    lines: bytes
    """A record in JSON each, with a newline."""
    num_dropped: int = 0
    """Records before these that found no room: nothing waits for a trace."""


StatsMessage = Union[Heartbeat, RequestFailed, ReplicaHeartbeat, TraceLines]

# --------------------------------------------------------------------------- coordination (29800) and the view (29801)


FP8_E4M3 = "fp8_e4m3"
"""The name of the format in `KVLayout.dtype` and in the configuration."""
SCALE_BYTES = 4
"""Of one token's row in FP8_E4M3."""


def fp8_head_bytes(page_size: int, head_dim: int) -> int:
    """Of one KV head of a page in FP8_E4M3."""
    return page_size * (head_dim + SCALE_BYTES)


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(Wire, frozen=True):
    """What must agree between P and D before a byte moves. Regions are `[pages, kv_heads, page_size, head_dim]`.

    A latent cache (DeepSeek) has one region a layer and one "KV head", of latent and rotated key side by side, which
    every TP rank holds.

    Only `tp_size` may differ: ranks write the heads that the other side's ranks hold
    (`kv_transfer/tensor_parallel/head_plan.py`).
    """

    model_hash: str
    """Of the config and the weight index: the same checkpoint gives the same hash."""
    num_layers: int
    num_kv_heads: int
    """Of the whole model; a TP rank holds `num_kv_heads / tp_size` of them (at least 1)."""
    head_dim: int
    page_size: int
    """Tokens a page."""
    dtype: str
    """`float32`, `bfloat16`, `float16`; `fp8_e4m3` with scales behind the numbers of a head of a page."""
    vocab_size: int
    """Length of a logits row."""
    tp_size: int = 1
    regions_per_layer: int = 2
    """K and V; 1 with a latent cache."""

    @property
    def head_bytes(self) -> int:
        """Of one KV head of a page in one region."""
        if self.dtype == FP8_E4M3:
            return fp8_head_bytes(self.page_size, self.head_dim)
        return self.page_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Of one page in one region (of which a layer has `regions_per_layer`) on one TP rank."""
        return max(1, self.num_kv_heads // self.tp_size) * self.head_bytes

    @property
    def bytes_per_page(self) -> int:
        """Of one page in all regions on one TP rank."""
        return self.num_layers * self.regions_per_layer * self.page_bytes

    def mismatches(self, other: KVLayout) -> list[str]:
        """Fields that keep the two from exchanging pages, as `name: mine != theirs`."""
        return [
            f"{name}: {getattr(self, name)} != {getattr(other, name)}"
            for name in self.__struct_fields__
            if name != "tp_size" and getattr(self, name) != getattr(other, name)
        ]


class InstanceInfo(Wire, frozen=True):
    """One member of the cluster view."""

    role: Role
    engine_rank: int
    incarnation: int
    host: str
    """Address at which the router and peers reach it."""
    port: int
    """Its request port (29620+k, 29630+m)."""
    control_port: int
    """P<->D control port of its main rank; 0 on a unified instance."""
    layout: KVLayout
    max_model_len: int
    """Prompt plus output tokens that one request may have here."""
    pid: int = 0
    draining: bool = False
    follower_pids: tuple[int, ...] = ()
    """Of TP ranks 1, 2, ...: they write too, so only when they are gone nothing of the instance can."""
    pid_namespace: str = ""
    """Where `pid` means something (`net/process_deaths.py`): a reader of another one can tell nothing by it."""
    start_ticks: int = 0
    """Start time of `pid`, since pids are used again."""
    first_view: tuple[int, int] = (0, 0)
    """Router incarnation and version of the first view in which it saw itself, if that was before it joined this
    router: it was started after all of its rank that were in views before that one, and may be older than others. (0,
    0): it was in none before, so it was started after all that this router, or an earlier one, had."""
    device: str = ""
    """What its pages lie in: `cpu` or `cuda`. Empty, as are the `ways`, of one that does not say."""
    ways: tuple[str, ...] = ()
    """Of KV: P and D must have one in common (`kv_transfer/register_memory.py`). Behind an `@` is the machine that a
    way does not leave."""
    num_slots: int = 0
    """Requests that run here at once; with `num_pages` this says how many choices of a prompt one message may ask for.
    0, as the next: it does not say, and gets a message for each."""
    num_pages: int = 0
    yields: bool = False
    """It came for a rank that nobody has (`chitu join`), and takes nobody's place."""

    @property
    def returns(self) -> bool:
        """It was in a view before it joined this router."""
        return self.first_view != (0, 0)


class Join(Wire, frozen=True, tag="join"):
    """Instance -> router. Repeated until the instance sees itself in the view; idempotent per incarnation."""

    protocol_version: int
    instance: InstanceInfo


class JoinReply(Wire, frozen=True, tag="join_reply"):
    """Router -> instance. `code` empty: accepted; the lease ends `lease_s` after the last heartbeat."""

    incarnation: int
    lease_s: float = 0.0
    code: str = ""
    message: str = ""


class Leave(Wire, frozen=True, tag="leave"):
    """Instance -> router, or its launcher for it. No new requests; its rooms fail."""

    role: Role
    engine_rank: int
    incarnation: int
    reason: str = ""
    dead_pids: tuple[int, ...] = ()
    """From a launcher: processes of the instance that exist no more."""
    pid_namespace: str = ""
    """Of `dead_pids`, as in InstanceInfo."""


class Drain(Wire, frozen=True, tag="drain"):
    """Router -> instance and back: no new requests, finish what runs."""

    role: Role
    engine_rank: int
    incarnation: int


VIEW_TOPIC = b"view"
"""First frame of a `ClusterView` on the metadata port."""
STATS_TOPIC = b"stats"
"""First frame, there, of a message that the router took at its stats port: what its other API processes know of loads
and failures. Nothing where the router is one process."""


class ApiProcess(Wire, frozen=True):
    """One of the router's API processes."""

    index: int
    """0: the one that keeps the membership."""
    incarnation: int
    port: int
    """As `ReplicaHeartbeat.port`."""


class LostInstance(Wire, frozen=True):
    """A member that left the view."""

    incarnation: int
    reason: str
    has_died: bool
    """Its process is known to have ended: it was not just silent, and said no goodbye."""


class ClusterView(Wire, frozen=True, tag="cluster_view"):
    """The cluster view: its live members. Published on every change and at least every `heartbeat_interval_s` (PUB
    drops are healed so)."""

    router_incarnation: int
    version: int
    instances: tuple[InstanceInfo, ...]
    workers: tuple[ApiProcess, ...] = ()
    """The router's API processes (`router.workers`); empty where it is one. One that was here and is not any more is
    dead: its rooms are nobody's."""
    cache_flush: int = 0
    """Random, drawn when a flush of the prefix caches is asked for: an instance that sees a new one forgets what it has
    cached. 0: none was asked for since the router's start."""
    dead: tuple[int, ...] = ()
    """The last incarnations of which it is certain that no process exists any more: nothing can write for them. Others
    that are not in `instances` may only be frozen."""
    lost: tuple[LostInstance, ...] = ()
    """The last that left, and why."""


CoordinationMessage = Union[Join, Leave, Drain]
CoordinationReply = Union[JoinReply, Drain]

# --------------------------------------------------------------------------------- bootstrap (HTTP bodies, JSON, 8080)


class RouteEntry(Wire, frozen=True):
    """`PUT /route` body and `GET /route` reply: where a prefill instance takes registrations and TransferInfo."""

    role: Role
    engine_rank: int
    rank_ip: str
    rank_port: int
    tp_size: int
    incarnation: int
    layout: KVLayout


stats_codec: Codec[StatsMessage] = Codec(StatsMessage)
coordination_codec: Codec[CoordinationMessage] = Codec(CoordinationMessage)
coordination_reply_codec: Codec[CoordinationReply] = Codec(CoordinationReply)
view_codec: Codec[ClusterView] = Codec(ClusterView)
