"""Every wire message and its codec: MessagePack through msgspec; typed, frozen, unknown fields refused.

One union per socket direction. A frame is decoded against the union of the socket that it came in on, so a message can
never arrive where it has no business. Arrays of integers travel as raw little-endian bytes (`pack_i32`), because a list
of Python ints costs an object per element.

Version 1. `docs/protocol.md` is the prose; `test/unit/test_messages.py` holds golden frames that the reference
`msgpack` package decodes too, so any language can speak this.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, Union

import msgspec

from chitu.errors import BadFrame, UnknownKind
from chitu.types import Role

PROTOCOL_VERSION = 1


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every record that crosses a socket. What the HTTP API shows too (loads, times) keeps its zeros."""


def pack_i32(values: Iterable[int]) -> bytes:
    """Integers as int32 little-endian bytes. OverflowError where one does not fit."""
    packed = values if isinstance(values, array) and values.typecode == "i" else array("i", values)
    if sys.byteorder == "big":
        packed = array("i", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_i32(data: bytes) -> array[int]:
    """The inverse of `pack_i32`; BadFrame where the length is no multiple of 4."""
    if len(data) % 4:
        raise BadFrame(f"an int32 array of {len(data)} bytes: not a multiple of 4")
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# --------------------------------------------------------------------------------------------- what a request asks for


class SamplingParams(Wire, frozen=True):
    """How tokens are chosen, as D (or a unified instance) needs it. The router has resolved every default.

    Stop *strings* are not here: the router scans the text, since it alone detokenises.
    """

    max_tokens: int
    """Tokens to emit at most; at least 1; already capped by the context length."""
    min_tokens: int = 0
    """Until so many tokens were emitted, eos and stop ids are masked out."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Resolved by the router (random where the client gave none): token n depends on (seed, n) and logits alone."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both count emitted tokens only (OpenAI)."""
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and emitted tokens (transformers)."""
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


# ------------------------------------------------------------------------------------------------- router -> scheduler


class PrefillRequest(Wire, frozen=True, tag="prefill_request"):
    """P's half: run the prompt, send KV and the first logits row to whoever announces the room."""

    room: bytes
    request_id: str
    token_ids: bytes
    """Prompt, int32 LE."""
    decode_rank: int
    decode_incarnation: int


class DecodeRequest(Wire, frozen=True, tag="decode_request"):
    """D's half: reserve, announce to the named P, sample and stream."""

    room: bytes
    request_id: str
    token_ids: bytes
    """Prompt, int32 LE: D needs its length for pages and its tokens for penalties."""
    sampling: SamplingParams
    prefill_rank: int
    prefill_incarnation: int


class UnifiedRequest(Wire, frozen=True, tag="unified_request"):
    """Both halves on one instance."""

    room: bytes
    request_id: str
    token_ids: bytes
    sampling: SamplingParams


class CancelRequest(Wire, frozen=True, tag="cancel_request"):
    """The client is gone, or a stop string was found. Idempotent; an unknown room is ignored."""

    room: bytes


SchedulerMessage = Union[PrefillRequest, DecodeRequest, UnifiedRequest, CancelRequest]

# ------------------------------------------------------------------------------------------------- scheduler -> router


class PrefillTimes(Wire, frozen=True, omit_defaults=False):
    """Where P (or the prefill half of a unified instance) spent its time on a room. Seconds on that host's clock."""

    queue_s: float = 0.0
    """From the request's arrival to its first chunk."""
    compute_s: float = 0.0
    """From the first chunk to the logits of the last token; layers leave meanwhile."""
    transfer_s: float = 0.0
    """From those logits to the last byte in D's memory: what of the transfer the compute did not hide."""


NO_TIMES = PrefillTimes()


class StageTimes(Wire, frozen=True, omit_defaults=False):
    """Where a finished request spent its time. Each field is a span on one host's clock, so clocks need not agree."""

    prefill: PrefillTimes = NO_TIMES
    admission_s: float = 0.0
    """D: from the request's arrival to the announcement of its pages."""
    first_token_s: float = 0.0
    """D: from the arrival to token 1."""
    kv_landed_s: float = 0.0
    """D: from the arrival to the whole KV; 0 on a unified instance, where nothing travels."""
    total_s: float = 0.0
    """D: from the arrival to the last token."""


class Finish(Wire, frozen=True, array_like=True):
    """End of a room, in the token stream so that it can never overtake a token."""

    room: bytes
    reason: str
    """`stop` (eos or stop id), `length`, `cancelled` or `error`."""
    code: str = ""
    """With `error`: a code of `chitu.errors`."""
    message: str = ""
    kv_bytes: int = 0
    """KV and logits bytes that P moved for this room; 0 on a unified instance."""
    stages: StageTimes = StageTimes()


class TokenBatch(Wire, frozen=True, tag="token_batch", array_like=True):
    """One message per step for all requests (token port). Columns: `tokens[i]` belongs to `rooms[i]`."""

    incarnation: int
    rooms: list[bytes]
    tokens: list[int]
    finished: list[Finish]


class LoadReport(Wire, frozen=True, omit_defaults=False):
    """What routing and metrics see of an instance. Pages: free + used + quarantined + cached == total."""

    waiting: int = 0
    """Requests not yet computing: P's bootstrap and waiting queues; D's prealloc queue."""
    transferring: int = 0
    """P: inflight; D: pages announced, KV not landed."""
    running: int = 0
    retracted: int = 0
    waiting_tokens: int = 0
    """Prompt tokens still to compute on P."""
    pages_total: int = 0
    pages_free: int = 0
    pages_quarantined: int = 0
    aux_total: int = 0
    aux_free: int = 0
    steps: int = 0
    tokens: int = 0
    """Since start: prompt tokens computed (P), tokens emitted (D)."""
    bytes_moved: int = 0
    retractions: int = 0
    unknown_frames: int = 0


class Heartbeat(Wire, frozen=True, tag="heartbeat"):
    """Stats port, every `heartbeat_interval_s`. Renews the lease of this incarnation."""

    role: Role
    engine_rank: int
    incarnation: int
    load: LoadReport


class RequestFailed(Wire, frozen=True, tag="request_failed"):
    """P's failures (stats port): P never connects to the token port."""

    role: Role
    engine_rank: int
    incarnation: int
    room: bytes
    code: str
    message: str


StatsMessage = Union[Heartbeat, RequestFailed]

# --------------------------------------------------------------------------- coordination (29800) and the view (29801)


class KVLayout(Wire, frozen=True):
    """What must agree between P and D before a byte moves. Regions are `[pages, kv_heads, page_size, head_dim]`.

    Only `tp_size` may differ: ranks write the heads that the other side's ranks hold (`kv_transfer/head_plan.py`).
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
    """`float32`, `bfloat16`, `float16`."""
    vocab_size: int
    """Length of a logits row."""
    tp_size: int = 1

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
    """Instance -> router, or router -> itself when a lease ends. No new requests; its rooms fail."""

    role: Role
    engine_rank: int
    incarnation: int
    reason: str = ""


class Drain(Wire, frozen=True, tag="drain"):
    """Router -> instance and back: no new requests, finish what runs."""

    role: Role
    engine_rank: int
    incarnation: int


class ClusterView(Wire, frozen=True, tag="cluster_view"):
    """Who is alive. Published on every change and at least every `heartbeat_interval_s` (PUB drops are healed so)."""

    router_incarnation: int
    version: int
    instances: tuple[InstanceInfo, ...]


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


# ------------------------------------------------- P<->D control: multipart [room: 16 bytes][payload: one of these]


class TransportSession(Wire, frozen=True):
    """One way to reach a rank's memory. A rank offers several; the writer picks the best that it can use."""

    transport: str
    """`shm`, `mooncake`, `nixl`, `cuda_ipc`, `fake`."""
    session_id: str
    """Mooncake: `host:rpc_port`. shm: `host_id/pid/fd`. Unique per process incarnation."""
    attributes: dict[str, str] = {}


class RankMemory(Wire, frozen=True):
    """Addresses of one TP rank's registered memory, in the address space of that rank."""

    tp_rank: int
    sessions: tuple[TransportSession, ...]
    arena_base: int
    """All regions and aux rows lie in one allocation of `arena_bytes` from here."""
    arena_bytes: int
    region_bases: tuple[int, ...]
    """K of layer 0, V of layer 0, K of layer 1, ..."""
    page_bytes: int
    """Bytes of one page of one region on this rank."""
    num_pages: int
    aux_base: int
    aux_row_bytes: int
    num_aux_slots: int


class KVArgsRegisterInfo(Wire, frozen=True, tag="kv_args_register_info"):
    """D -> P, room 0, once per (P incarnation, D incarnation); idempotent."""

    protocol_version: int
    engine_rank: int
    incarnation: int
    endpoint: str
    """D's address as P reaches it."""
    dst_port: int
    """D's control port: status messages go there."""
    layout: KVLayout
    ranks: tuple[RankMemory, ...]


class RegisterReply(Wire, frozen=True, tag="register_reply"):
    """P -> D, room 0. `code` empty: accepted; else `incompatible_layout` with both layouts in the message."""

    engine_rank: int
    incarnation: int
    """P's."""
    peer_incarnation: int
    """D's, as registered: an answer to an older D is dropped."""
    code: str = ""
    message: str = ""


class TransferInfo(Wire, frozen=True, tag="transfer_info"):
    """D -> P, per request: where the pages and the logits row go."""

    incarnation: int
    """D's; names the registration that the indices belong to."""
    dst_kv_indices: bytes
    """Page indices, int32 LE, in token order."""
    dst_aux_index: int
    num_tokens: int
    """Prompt tokens; P refuses a room whose prompt has another length."""
    prefix_pages: int = 0
    """Leading pages that D holds already; P skips them."""
    state_indices: bytes = b""


class TransferStatus(Wire, frozen=True, tag="transfer_status"):
    """P -> D, repeated until acknowledged."""

    incarnation: int
    """P's."""
    poll: int
    """`KVPoll`: Success or Failed."""
    settled: bool = True
    """False: a failed write may still land; keep the pages quarantined until an AbortAck says it cannot."""
    code: str = ""
    message: str = ""
    bytes_per_rank: tuple[int, ...] = ()
    cached_tokens: int = 0
    times: PrefillTimes = NO_TIMES
    """With Success."""


class StatusAck(Wire, frozen=True, tag="status_ack"):
    """D -> P: stop repeating that status."""

    incarnation: int
    poll: int


class AuxReady(Wire, frozen=True, tag="aux_ready"):
    """P -> D: the aux row is complete, before Success. Lost ones are healed by Success."""

    incarnation: int


class AbortTransfer(Wire, frozen=True, tag="abort_transfer"):
    """Either side: the room is dead; stop writing and say when you have stopped. Repeated until acknowledged."""

    incarnation: int
    code: str = "cancelled"
    message: str = ""


class AbortAck(Wire, frozen=True, tag="abort_ack"):
    """The sender's last write of this room is over (or there never was one)."""

    incarnation: int


PeerMessage = Union[
    KVArgsRegisterInfo, RegisterReply, TransferInfo, TransferStatus, StatusAck, AuxReady, AbortTransfer, AbortAck
]

# ---------------------------------------------------------------------------------------------------------------- codec

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Wire) -> bytes:
    """Any message as one MessagePack frame."""
    return _encoder.encode(message)


class Codec(Generic[T]):
    """Decoder of one socket's union. Raises UnknownKind for a kind that is not in it, BadFrame for anything else."""

    def __init__(self, kinds: Any, max_bytes: int = 64 << 20) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> T:
        if len(frame) > self._max_bytes:
            raise BadFrame(f"a frame of {len(frame)} bytes; at most {self._max_bytes} are taken")
        try:
            return self._decoder.decode(frame)
        except msgspec.ValidationError as error:
            if "Invalid value" in str(error) and ("$.type" in str(error) or "$[0]" in str(error)):
                raise UnknownKind(str(error)) from error
            raise BadFrame(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(str(error)) from error


scheduler_codec: Codec[SchedulerMessage] = Codec(SchedulerMessage)
token_codec: Codec[TokenBatch] = Codec(TokenBatch)
stats_codec: Codec[StatsMessage] = Codec(StatsMessage)
coordination_codec: Codec[CoordinationMessage] = Codec(CoordinationMessage)
coordination_reply_codec: Codec[CoordinationReply] = Codec(CoordinationReply)
view_codec: Codec[ClusterView] = Codec(ClusterView)
peer_codec: Codec[PeerMessage] = Codec(PeerMessage)


def peer_frames(room: bytes, message: Wire) -> Sequence[bytes]:
    """A P<->D control message as its two frames."""
    return (room, encode(message))
