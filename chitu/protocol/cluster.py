"""Membership and load of instances: stats port (29600), coordination (29800), the view (29801)."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import zip_longest
from typing import NamedTuple, Union

import msgspec

from chitu.protocol.images import NO_IMAGE_LOAD, FetchImage, ImageFile, ImageLoad
from chitu.protocol.profile import ProfileOrder
from chitu.protocol.requests import LinkAck
from chitu.protocol.weights import Weights, WeightsOrder, WeightsReport
from chitu.protocol.wire import PROTOCOL_VERSION, Codec, Wire
from chitu.types import FAKE_MODEL, Role, instance_name

# ------------------------------------------------------------------------------------------------- stats port (29600)
LEAST_PROMPT_TOKENS = 16
"""Prompt tokens that a step may have in any case: streams that are slow already starve no prompt."""
SLO_SHARE = 0.9
"""Share of `router.slo.tpot_s` that a step with prompt tokens takes: the rest is for what its line does not know."""
FP8_E4M3 = "fp8_e4m3"
"""Name of the format in `KVLayout.dtype` and in the configuration."""
SCALE_BYTES = 4
"""Bytes of the scale of one token's row in FP8_E4M3."""
HEAD_ALIGNMENT_BYTES = 16
"""Every head of a page of 8-bit floats begins at a multiple of this: kernels read so much at once."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def view_topic(version: int) -> bytes:
    """Return the first frame of a `ViewChange` on the metadata port, which is in this version of the wire."""
    return b"view" if version == 20 else b"v%d." % version


def whole_topic(version: int) -> bytes:
    """Return the first frame of a `ClusterView` on that port, but for 8 bytes behind it that its one reader drew. To
    subscribe to it is to ask for a view: the router sends one for each subscription, and so after every new
    connection."""
    return b"whole" if version == 20 else b"w%d." % version


VIEW_TOPIC = view_topic(PROTOCOL_VERSION)


class PathLoad(Wire, frozen=True):
    """Writes of a P to one D over one transport since start."""

    decode: int
    """Engine rank of the D."""
    transport: str
    writes: int = 0
    """Writes that ended well; a write has some layers of some pages, a logits row or a state row."""
    bytes: int = 0
    """Bytes of these."""
    busy_s: float = 0.0
    """Time that all writes took. On a GPU it includes the wait for a layer to be computed."""
    failures: int = 0
    """Writes that failed, by an error of the transport or because they did not end in time."""


class StepRates(Wire, frozen=True):
    """What steps of an instance take, as it measures them (`instance/pace.py`): a line, whose coefficients are 0 until
    they are known. A step takes `decode_step_s` if requests decode, plus `row_s` for each, plus `context_token_s` for
    each token of their KV. Prompt tokens add `prompt_step_s` once, `prompt_token_s` each, and `prompt_pair_s` for each
    token that each of them attends to. In a group that shares experts a step takes as long for all members: `row_s` is
    of each row of any of them, and prompt tokens are those of the member that has the most."""

    decode_step_s: float = 0.0
    row_s: float = 0.0
    context_token_s: float = 0.0
    prompt_step_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    chunk_tokens: float = 0.0
    """Prompt tokens of a step that has some, on average."""
    decode_steps: int = 0
    """Steps without prompt tokens that were measured; 0: the first three coefficients are not known."""
    prompt_steps: int = 0
    """The same of steps with prompt tokens and the other three."""
    draft_rows: float = 0.0
    """Rows of drafts for each request that decodes, on average."""
    tokens_a_row: float = 1.0
    """Tokens that a step gives to a request that decodes, on average."""

    def step_s(self, rows: float, context_tokens: float) -> float:
        """Return the seconds of a step of so many rows that decode, which read so many tokens of KV together."""
        return self.decode_step_s + self.row_s * rows + self.context_token_s * context_tokens if rows else 0.0

    def requests_s(self, requests: float, context_tokens: float) -> float:
        """Return the seconds of a step in which so many requests decode, with so many tokens of KV together and as many
        rows of drafts as usual."""
        rows = 1 + self.draft_rows
        return self.step_s(requests * rows, context_tokens * rows)

    def prompt_s(self, tokens: float, start: float = 0.0, chunk_tokens: float = math.inf) -> float:
        """Return the seconds that so many prompt tokens behind `start` others add to steps of `chunk_tokens`."""
        pairs = tokens * (start + tokens / 2)
        num_steps = max(1.0, tokens / chunk_tokens) if tokens else 0.0
        return self.prompt_step_s * num_steps + self.prompt_token_s * tokens + self.prompt_pair_s * pairs

    def prompt_tokens_within(self, tpot_s: float, rows: float, context_tokens: float, start: float = 0.0) -> float:
        """Return how many prompt tokens a step may have beside its decoding requests, the first of them behind `start`
        others, if a step is to take `tpot_s` at most."""
        left_s = SLO_SHARE * tpot_s - self.step_s(rows, context_tokens) - self.prompt_step_s
        token_s = self.prompt_token_s + self.prompt_pair_s * start
        return max(LEAST_PROMPT_TOKENS, left_s / token_s) if token_s > 0 else math.inf


class LoadReport(Wire, frozen=True, omit_defaults=False):
    """Load of an instance as routing and metrics see it. Pages: free + used + quarantined + cached == total."""

    waiting: int = 0
    """Requests that do not compute yet: P's bootstrap and waiting queues; D's prealloc queue."""
    unread: int = 0
    """Those of `waiting` that came in after the newest step was planned; there may well be room for them."""
    held_by_prefill: int = 0
    """D, unified: those of `waiting` for which there is no room because of prompts that are computed or moved, not
    because of requests that decode. P's queue shows that wait, and what D does meanwhile is no rate of its own."""
    unannounced: int = 0
    """P: those of `waiting` that no D has announced yet (the bootstrap queue)."""
    transferring: int = 0
    """Requests in flight (P), or whose pages are announced and that do not decode yet (D)."""
    landed: int = 0
    """D: those of `transferring` whose KV has landed and that wait only for token 1."""
    running: int = 0
    """Requests in the batch: prompts (P), outputs and the prompts that are computed here (D, unified)."""
    computing: int = 0
    """Those of `running` whose prompts are computed."""
    retracted: int = 0
    closing: int = 0
    """Requests that are over, but whose pages a peer may still touch."""
    waiting_tokens: int = 0
    """Prompt tokens still to compute here, without those that are known to be cached, in the pool or in host memory."""
    joinable_tokens: int = 0
    """Those of `waiting_tokens` that a new prompt does not wait behind: of prompts in steps that have room for more."""
    pages_total: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_quarantined: int = 0
    pages_cached: int = 0
    """Pages kept for later prompts, which no request uses at the moment."""
    aux_total: int = 0
    aux_free: int = 0
    states_total: int = 0
    """Rows of recurrent state; 0 if the model has none."""
    states_free: int = 0
    steps: int = 0
    tokens: int = 0
    """Tokens since start: prompt tokens computed (P), tokens emitted (D)."""
    prompt_tokens: int = 0
    """Prompt tokens computed since start; on P the same as `tokens`."""
    tokens_dropped: int = 0
    """Those of `tokens` that the router did not take."""
    bytes_moved: int = 0
    suspended: tuple[int, ...] = ()
    """P: engine ranks of the D that it does not write to until a failed write is fenced."""
    paths: tuple[PathLoad, ...] = ()
    """P: what it wrote to each D."""
    cached_tokens: int = 0
    """Prompt tokens since start that were in cached pages, and so were not computed (D: not moved)."""
    bytes_saved: int = 0
    """D: KV bytes of prompts since start that were in cached pages, and so were not moved."""
    evictions: int = 0
    """Cached pages since start that were evicted for other requests."""
    host_tokens: int = 0
    """Prompt tokens since start whose pages came from host memory; the next two: from the tiers behind it."""
    disk_tokens: int = 0
    store_tokens: int = 0
    host_evictions: int = 0
    """Pages since start that host memory evicted for others."""
    bad_pages: int = 0
    """Pages since start that came from disk or store with wrong content."""
    unsound: int = 0
    """Requests since start that ended because their logits were not finite (NaN or infinite)."""
    retractions: int = 0
    unknown_frames: int = 0
    backlog_s: float = 0.0
    """Seconds since start in which work waited that the step could not take: full steps (P, unified), prealloc queue
    (D). Time in which P has no room because of D does not count."""
    backlog_work: int = 0
    """Work done in these seconds: requests admitted (D), prompt tokens computed, or loaded from disk or store (the
    others). Divided by `backlog_s`, it is the rate of the queue here."""
    decode_backlog_s: float = 0.0
    """Unified: seconds since start in which requests waited for decoding ones to end."""
    decode_backlog_work: int = 0
    """Unified: requests admitted in these seconds."""
    cached_share: float = 0.0
    """Share of the tokens of the newest prompts computed here that were cached."""
    rates: StepRates = StepRates()
    drafts: dict[str, tuple[int, int]] = {}
    """By source: tokens since start that were drafted, and those of them that were right."""
    images: int = 0
    """Images encoded since start. Of an E, `waiting` counts images that it was asked for and has not encoded,
    `waiting_tokens` their rows, `transferring` those on the way to P, and its `tokens` are rows."""
    image_rows: int = 0
    """Rows for features of images; 0 if the model has no vision here."""
    image_rows_used: int = 0
    """Those of them that prompts wait for, or compute with."""
    image_load: ImageLoad = NO_IMAGE_LOAD
    """What it has to encode, and how fast it is. Of an E `backlog_s` is the time in which an image was wanted."""


class Heartbeat(Wire, frozen=True, tag="heartbeat"):
    """Stats port, every `heartbeat_interval_s`, and at once if a request was lost on the way. Renews the lease of this
    incarnation."""

    role: Role
    engine_rank: int
    incarnation: int
    load: LoadReport
    acks: tuple[LinkAck, ...] = ()
    """Acknowledgements of the links that received something since the last heartbeat."""
    reads: int = 0
    """How often since start the request port was found empty: if this grows, no received message is left unread."""
    silent: tuple[int, ...] = ()
    """D: incarnations of the P that do not answer it, though they are in the view: no message passes between the
    two."""
    weights: WeightsReport = WeightsReport()
    routers: tuple[int, ...] = (0,)
    """Indices of the routers whose newest views list it and that it hears: what one router does for all of them, the
    first of these does."""


class RequestFailed(Wire, frozen=True, tag="request_failed"):
    """A failure of a room (stats port): P never connects to the token port."""

    role: Role
    engine_rank: int
    incarnation: int
    room: bytes
    code: str
    message: str


class TraceLines(Wire, frozen=True, tag="trace_lines"):
    """Stats port: trace records of an instance, sent while the request runs, so that those of a killed one survive."""

    role: Role
    engine_rank: int
    incarnation: int
    lines: bytes
    """JSON records, each followed by a newline."""
    num_dropped: int = 0
    """Records before these that were dropped for lack of room: tracing never blocks."""


StatsMessage = Union[Heartbeat, RequestFailed, TraceLines]

# --------------------------------------------------------------------------- coordination (29800) and the view (29801)


def fp8_head_bytes(page_size: int, head_dim: int) -> int:
    """Return the bytes of one KV head of a page in FP8_E4M3."""
    return page_size * (head_dim + SCALE_BYTES)


class StateTensor(Wire, frozen=True):
    """One tensor of the recurrent state that a layer keeps of a request, whatever its length."""

    layer: int
    name: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: tuple[int, ...]
    """Shape in the whole model; tensor parallelism cuts dimension 0."""
    cut: tuple[int, ...] = ()
    """Sizes of the blocks of dimension 0, each of which is cut for itself, as those of a convolution over keys, keys
    and values side by side; empty: one block."""
    heads: tuple[int, ...] = ()
    """Heads (or groups of heads) of each block, which a rank holds whole. They are shared out like KV heads: of fewer
    heads than ranks, neighbouring ranks hold copies. Empty: a block is cut between any two lines and never copied."""

    @property
    def nbytes(self) -> int:
        """Bytes in the whole model."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class CacheGroup(Wire, frozen=True):
    """Layers whose pages have the same shape and stay for the same tokens."""

    layers: tuple[int, ...]
    """Ascending. A layer is in one group, or in none if it has no KV."""
    num_kv_heads: int
    """KV heads of the whole model; a TP rank holds `num_kv_heads / tp_size` of them (at least 1)."""
    head_dims: tuple[int, ...]
    """Numbers of a head's token in each region of a layer: K and V, which may differ; a latent row alone; a latent row
    and an index key."""
    window: int | None = None
    """Newest tokens that a later token can see; None: all."""

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.layers))
        if len(self.layers) > 1 and self.layers == tuple(range(self.layers[0], self.layers[-1] + 1)):
            layers = f"{self.layers[0]} to {self.layers[-1]}"
        heads = f"{self.num_kv_heads} x {' and '.join(map(str, self.head_dims))}"
        return f"layers {layers}: {heads}" + (f", window {self.window}" if self.window is not None else "")


class Region(NamedTuple):
    """A region of a rank's memory: what one layer keeps of every token."""

    layer: int
    group: int
    """Index in `KVLayout.groups`."""
    num_kv_heads: int
    """Of the whole model."""
    head_dim: int


class RegionShape(NamedTuple):
    """Regions of one group whose pages have the same shape, by index."""

    num_kv_heads: int
    head_dim: int
    regions: tuple[int, ...]


class KVLayout(Wire, frozen=True):
    """What must agree between P and D before a byte moves. Regions are `[pages, kv_heads, page_size, head_dim]`, one
    for each of a layer's `head_dims`, in the order of the layers.

    A latent cache (DeepSeek) has one region per layer and one "KV head", with latent and rotated key side by side,
    which every TP rank holds.

    Only `tp_size` may differ: ranks write the heads that the other side's ranks hold
    (`kv_transfer/shard_writer.py`).
    """

    model_hash: str
    """Hash of the config and the weight index: the same checkpoint gives the same hash."""
    page_size: int
    """Tokens per page."""
    dtype: str
    """`float32`, `bfloat16`, `float16`, or `fp8_e4m3` with the scales after the numbers of each head of a page."""
    vocab_size: int
    """Length of a logits row."""
    groups: tuple[CacheGroup, ...]
    tp_size: int = 1
    state: tuple[StateTensor, ...] = ()
    """What recurrent layers keep of a request beside the pages: one row for each, on every rank
    (`kv_cache/state_row.py`)."""
    adapters: tuple[tuple[str, str], ...] = ()
    """LoRA adapters, by name: the name that requests choose one by, and the hash of its folder. K and V of a request
    depend on them."""
    draft_hidden: int = 0
    """Numbers of a hidden state, which an aux row then has behind the logits, if the model drafts by a layer of its
    own: the last layer. 0: it has none."""

    @property
    def is_fake(self) -> bool:
        """Whether its instances compute no model (`chitu serve --fake`)."""
        return self.model_hash == FAKE_MODEL

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state in the whole model; `state_bytes_of` (`kv_cache/state_row.py`) counts copies."""
        return sum(tensor.nbytes for tensor in self.state)

    @classmethod
    def uniform(
        cls,
        model_hash: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: str,
        vocab_size: int,
        tp_size: int = 1,
        regions_per_layer: int = 2,
    ) -> KVLayout:
        """Return the layout of layers that are all alike and see all tokens."""
        group = CacheGroup(tuple(range(num_layers)), num_kv_heads, (head_dim,) * regions_per_layer)
        return cls(model_hash, page_size, dtype, vocab_size, (group,), tp_size)

    @property
    def num_layers(self) -> int:
        """Layers up to the last one with KV."""
        return 1 + max(group.layers[-1] for group in self.groups)

    @property
    def num_summed_layers(self) -> int:
        """Layers whose pages depend on the tokens alone. What a drafting layer holds depends on the way of computing,
        too: behind a cached prefix it has a hole."""
        return self.num_layers - bool(self.draft_hidden)

    @property
    def aux_numbers(self) -> int:
        """Numbers of an aux row, float32: the logits, and behind them the hidden state."""
        return self.vocab_size + self.draft_hidden

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of a rank in the order of their addresses: by layer."""
        found = [
            (layer, place, Region(layer, number, group.num_kv_heads, head_dim))
            for number, group in enumerate(self.groups)
            for layer in group.layers
            for place, head_dim in enumerate(group.head_dims)
        ]
        return tuple(region for _, _, region in sorted(found))

    @property
    def first_regions(self) -> tuple[int, ...]:
        """For each layer the index of its first region, and behind them the number of regions: those of `layers` are
        `range(first_regions[layers.start], first_regions[layers.stop])`."""
        layers = [region.layer for region in self.regions]
        return tuple(bisect_left(layers, layer) for layer in range(self.num_layers + 1))

    def regions_of(self, layers: range) -> range:
        """Return the indices of the regions of these (consecutive) layers."""
        return range(self.first_regions[layers.start], self.first_regions[layers.stop])

    @property
    def shapes(self) -> tuple[RegionShape, ...]:
        """The regions by group and shape; one shape if all layers are alike."""
        indices: dict[tuple[int, int, int], list[int]] = {}
        for index, region in enumerate(self.regions):
            indices.setdefault(region[1:], []).append(index)
        return tuple(RegionShape(heads, dim, tuple(found)) for (_, heads, dim), found in sorted(indices.items()))

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of one KV head of a page in a region of this `head_dim`."""
        if self.dtype == FP8_E4M3:
            return fp8_head_bytes(self.page_size, head_dim)
        return self.page_size * head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page on one TP rank, by region."""
        return tuple(max(1, one.num_kv_heads // self.tp_size) * self.head_bytes(one.head_dim) for one in self.regions)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all regions on one TP rank."""
        return sum(self.page_bytes)

    @property
    def bytes_by_layer(self) -> tuple[int, ...]:
        """Bytes of one page on one TP rank, by layer."""
        sums = [0] * self.num_layers
        for region, nbytes in zip(self.regions, self.page_bytes, strict=True):
            sums[region.layer] += nbytes
        return tuple(sums)

    def adapter_hash(self, name: str) -> str:
        """Return the hash of an adapter; empty if there is none of this name."""
        return dict(self.adapters).get(name, "")

    def mismatches(self, other: KVLayout) -> list[str]:
        """Return the fields that keep the two from exchanging pages, as `name: mine != theirs`. Of a long state the
        first tensors that differ."""
        different = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        found = [f"{n}: {self._text(n)} != {other._text(n)}" for n in different if n not in ("tp_size", "state")]
        if "state" in different:
            pairs = zip_longest(self.state, other.state)
            mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            found.append(f"state: {mine or 'none'} != {theirs or 'none'}")
        return found

    def _text(self, name: str) -> str:
        """Return a field as text: of a state, which may have a hundred tensors, how many and their bytes."""
        if name == "state":
            return f"{len(self.state)} tensors of {self.state_bytes} bytes"
        return "; ".join(map(str, self.groups)) if name == "groups" else str(getattr(self, name))

    def __str__(self) -> str:
        return ", ".join(f"{name}={self._text(name)}" for name in self.__struct_fields__)


class GroupPlace(Wire, frozen=True):
    """Place of an instance in a group of instances that live and die together."""

    id: int
    """Incarnation with which the process of data rank 0 was started."""
    rank: int
    """Data rank."""
    size: int
    shares_experts: bool = False
    """Whether its members step together, so that what one computes delays the requests of all."""


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
    """Control port (P<->D; of an E: P->E) of its main rank; 0 on a unified instance."""
    layout: KVLayout
    max_model_len: int
    """Prompt plus output tokens that one request may have here."""
    pid: int = 0
    draining: bool = False
    follower_pids: tuple[int, ...] = ()
    """Pids of TP ranks 1, 2, ...: they write too, so the instance has stopped writing only once they are gone."""
    pid_namespace: str = ""
    """Where `pid` is valid (`net/process_deaths.py`): a reader in another namespace learns nothing from it."""
    start_ticks: int = 0
    """Start time of `pid`, since pids are reused."""
    first_view: tuple[int, int] = (0, 0)
    """Router incarnation and version of the first view in which it saw itself, if that was before it joined this
    router. It was then started after all of its rank that were in earlier views, and may be older than others. (0, 0):
    it was in no view before, so it was started after all that this router, or an earlier one, had."""
    device: str = ""
    """Where its pages lie: `cpu` or `cuda`. Empty, as `ways`, if the instance does not report it."""
    ways: tuple[str, ...] = ()
    """Transports of KV: P and D must have one in common (`kv_transfer/transports/local.py`). After an `@` follows the
    machine that a way does not leave."""
    num_slots: int = 0
    """Requests that run here at once; with `num_pages` it bounds how many choices of a prompt one message may ask for.
    0 in either: not reported, and each choice gets its own message."""
    num_pages: int = 0
    computes: bool = False
    """Whether it computes prompts. A D that does not (`router.slo.tpot_s` is unset) takes no whole requests."""
    sees_images: bool = False
    """Whether it has a vision tower, so that prompts may have images."""
    rack: str = ""
    """Its `rack` in the topology: links within one are taken to be faster until they are measured."""
    yields: bool = False
    """It joins only for a free rank (`chitu join`), and replaces no other process."""
    weights: Weights = Weights()
    """Those that it computes with; `layout` describes those that it was started with."""
    becomes: str = ""
    """While it drains to change its role: the role and rank under which it will join, `prefill:2`. A router sets it
    together with `draining`, and the instance repeats it in later joins."""
    roles: tuple[Role, ...] = ()
    """Roles that it can change to."""
    former: tuple[int, ...] = ()
    """Incarnations that this process had in other roles, latest last. They have ended: no request is left there, and
    nothing writes for them. It may be older than others that had its rank."""
    home: str = ""
    """Role and rank, as in `becomes`, that it was started with, if it has changed its role since. No other instance
    gets that place by a change of role: a process that is started again takes it."""
    group: GroupPlace | None = None
    """Its group, which it keeps when it changes its role; None: it is alone."""
    image_port: int = 0
    """P: control port towards E, which write features of images to it; 0: it takes none from E."""
    protocol: int = 20
    """Newest version of the wire that it reads."""
    release: str = ""
    """Release that it runs; empty before version 21."""
    revision: str = ""
    """Label of its image, weights or configuration, within which requests are paired; empty: it fits each."""
    weights_port: int = 0
    """Port on which it sends pieces of its weights (`protocol/neighbour.py`); 0: it sends none."""

    @property
    def name(self) -> str:
        return instance_name(self.role, self.engine_rank)

    @property
    def model_hash(self) -> str:
        """Hash of the model with the weights that it computes with."""
        return self.weights.model_hash or self.layout.model_hash

    @property
    def served_layout(self) -> KVLayout:
        """Layout with the hashes of the weights and adapters that it computes with."""
        if not self.weights.number:
            return self.layout
        return msgspec.structs.replace(self.layout, model_hash=self.model_hash, adapters=self.adapters)

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """LoRA adapters that serve, as in the layout."""
        served = self.weights.adapters
        return self.layout.adapters if served is None else tuple([(one.name, one.hash) for one in served])

    def adapter_hash(self, name: str) -> str:
        """Return the hash of an adapter that serves; empty if there is none of this name."""
        return dict(self.adapters).get(name, "")

    @property
    def returns(self) -> bool:
        """Whether it was in a view before it joined this router."""
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
    free_rank: int = -1
    """With `rank_taken`, for an instance that has changed its role: a rank of that role that is free."""


class Leave(Wire, frozen=True, tag="leave"):
    """Instance -> router, or its launcher on its behalf. It gets no new requests; its rooms fail."""

    role: Role
    engine_rank: int
    incarnation: int
    reason: str = ""
    dead_pids: tuple[int, ...] = ()
    """From a launcher: processes of the instance that no longer exist."""
    pid_namespace: str = ""
    """Namespace of `dead_pids`, as in InstanceInfo."""


class Drain(Wire, frozen=True, tag="drain"):
    """Router -> instance and back: no new requests, finish the running ones."""

    role: Role
    engine_rank: int
    incarnation: int


class LostInstance(Wire, frozen=True):
    """A member that left the view."""

    incarnation: int
    reason: str
    has_died: bool
    """Whether its process is known to have ended, or that of a member of its group, with which it ends; False if it was
    only silent or left by itself."""


class ClusterView(Wire, frozen=True, tag="cluster_view"):
    """The cluster view: its live members. Sent whole to a reader that asks for it; from then on the reader follows it
    by the changes (`net/view_feed.py`)."""

    router_incarnation: int
    version: int
    instances: tuple[InstanceInfo, ...]
    """By role and rank."""
    cache_flush: int = 0
    """Random number of the last requested flush of the prefix caches: an instance that sees a new one drops what it has
    cached. 0: none was requested since the router's start."""
    dead: tuple[int, ...] = ()
    """Latest incarnations that certainly have no process any more: nothing can write for them. Others that are missing
    in `instances` may only be frozen."""
    lost: tuple[LostInstance, ...] = ()
    """Latest members that left, and why."""
    weights: WeightsOrder = WeightsOrder()


class ViewChange(Wire, frozen=True, tag="view_change"):
    """What makes a view of `after` the view of `version`. Published soon after every change, and at least every
    `heartbeat_interval_s`, then perhaps with two equal numbers: a reader that has another one has missed a change."""

    router_incarnation: int
    version: int
    after: int
    joined: tuple[InstanceInfo, ...] = ()
    """New members, and members whose record is another one now."""
    left: tuple[tuple[Role, int], ...] = ()
    """Role and rank of each that is no member any more."""
    cache_flush: int = 0
    """As in the view."""
    dead: tuple[int, ...] = ()
    """Those that the view of `after` does not list; so are `lost`."""
    lost: tuple[LostInstance, ...] = ()
    weights: WeightsOrder = WeightsOrder()
    """As in the view."""


ViewMessage = Union[ClusterView, ViewChange]
MemberMessage = Union[Join, Leave, Drain]
CoordinationMessage = Union[Join, Leave, Drain, FetchImage]
CoordinationReply = Union[JoinReply, Drain, ImageFile, ProfileOrder]


stats_codec: Codec[StatsMessage] = Codec(StatsMessage)
coordination_codec: Codec[CoordinationMessage] = Codec(CoordinationMessage)
coordination_reply_codec: Codec[CoordinationReply] = Codec(CoordinationReply)
view_codec: Codec[ViewMessage] = Codec(ViewMessage)
