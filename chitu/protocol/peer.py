"""P <-> D control messages: multipart `[room: 16 bytes][payload: one of these]`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Union

from chitu.protocol.account import NO_TIMES, PrefillTimes
from chitu.protocol.cluster import KVLayout
from chitu.protocol.wire import Codec, Wire, encode


class KVPoll(IntEnum):
    """State of a room's transfer. Ranks are merged with MIN, so Failed is lowest; terminal states absorb all events."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


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
    """K of layer 0, V of layer 0, K of layer 1, ...: the order of `KVLayout.regions`."""
    page_bytes: tuple[int, ...]
    """Bytes of one page on this rank, by region."""
    num_pages: int
    aux_base: int
    aux_row_bytes: int
    num_aux_slots: int
    state_base: int = 0
    """State rows, if the layout has state; each rank has its own."""
    state_row_bytes: int = 0
    num_state_slots: int = 0


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
    """Incarnation of P."""
    peer_incarnation: int
    """Incarnation of D as registered: an answer to an older D is dropped."""
    code: str = ""
    message: str = ""


class TransferInfo(Wire, frozen=True, tag="transfer_info"):
    """D -> P, per request: where the pages and the logits row go."""

    incarnation: int
    """Incarnation of D; names the registration that the indices belong to."""
    dst_kv_indices: bytes
    """Page indices, int32 LE, in token order. Empty: only the logits row is wanted."""
    dst_aux_index: int
    num_tokens: int
    """Prompt tokens; P refuses a room whose prompt has another length."""
    prefix_pages: int = 0
    """Leading pages that D holds already; P skips them."""
    dst_state_index: int = -1
    """State row; -1 if the layout has no state, or only the logits row is wanted."""
    page_sums: bool = False
    """Whether Success is to bring checksums of all pages that P writes, by layer, because the request asks for
    them."""


class KVSums(Wire, frozen=True):
    """Checksums of the KV pages of a room as P has them (formula: `kv_cache/checksum.py`)."""

    positions: bytes
    """Positions in `dst_kv_indices` of the pages that were summed, ascending, int32 LE."""
    sums: bytes
    """One sum per position, int64 LE; every KV head counts once. If D asked for them, `[layers, positions]`, unless
    these are too many."""
    transport: str
    """Transport that P wrote with, for D's log."""


class StateSeal(Wire, frozen=True):
    """What P has written to a room's state row, over all of its ranks."""

    num_tokens: int
    """Tokens that the state has taken in."""
    digest: int
    """CRC-32 of their ids, int32 LE."""
    sum: int
    """Checksum of the rows of all ranks, int64 (formula: `kv_cache/state_sums.py`)."""


class TransferStatus(Wire, frozen=True, tag="transfer_status"):
    """P -> D, repeated until acknowledged."""

    incarnation: int
    """Incarnation of P."""
    poll: int
    """`KVPoll`: Success or Failed."""
    settled: bool = True
    """False: a failed write may still land; keep the pages quarantined until an AbortAck excludes it."""
    code: str = ""
    message: str = ""
    bytes_per_rank: tuple[int, ...] = ()
    times: PrefillTimes = NO_TIMES
    """Sent with Success."""
    kv_sums: KVSums | None = None
    """Sent with Success, if P's `verify_kv` is not `off` or D asked for them."""
    state: StateSeal | None = None
    """Sent with Success, if D announced a state row. D always verifies it."""
    prompt_logprobs: bytes | None = None
    """Sent with Success, if the router asked P for them."""
    uncached: bool = False
    """Sent with Success: P has not cached the prompt, and D must not either. P's cache was flushed since the request
    came there, for other weights or by an operator, or the request keeps out of it."""


class StatusAck(Wire, frozen=True, tag="status_ack"):
    """D -> P: stop repeating that status."""

    incarnation: int
    poll: int


class AuxReady(Wire, frozen=True, tag="aux_ready"):
    """P -> D: the aux row is complete, before Success. Success makes up for a lost one."""

    incarnation: int


class TransferProgress(Wire, frozen=True, tag="transfer_progress"):
    """P -> D: P has computed or written since its last message about the room, for it or for what comes before it. A
    short prompt needs none; for a long one they come several times within `transfer_s`, so some may be lost."""

    incarnation: int
    number: int
    """Grows from message to message of a room, so that an old one shows nothing."""


class EncodeOrder(Wire, frozen=True, tag="encode_order"):
    """P -> E: compute the features of an image, and write them to the rows that the room's TransferInfo announces.
    Repeated until the room is over; the two come in any order."""

    incarnation: int
    """Incarnation of P."""
    engine_rank: int
    key: bytes
    """As in `ImagePart`. E writes it into the aux row, so that P knows whose features came."""
    num_rows: int
    """Feature rows, which are the pages of this transfer and its tokens."""
    router: int
    """Index of a router that has the file."""


class TransportMessage(Wire, frozen=True, tag="transport_message"):
    """Either way, room 0: from one end of a transport to the other one, which alone reads it. The transport itself must
    cope with its loss."""

    incarnation: int
    """Incarnation of the sender."""
    transport: str
    payload: bytes


class AbortTransfer(Wire, frozen=True, tag="abort_transfer"):
    """Either way: the room is dead; stop writing and acknowledge once stopped. Repeated until acknowledged."""

    incarnation: int
    code: str = "cancelled"
    message: str = ""


class AbortAck(Wire, frozen=True, tag="abort_ack"):
    """The sender's last write of this room is over (or there never was one)."""

    incarnation: int


PeerMessage = Union[
    KVArgsRegisterInfo,
    RegisterReply,
    TransferInfo,
    TransferStatus,
    StatusAck,
    AuxReady,
    TransferProgress,
    EncodeOrder,
    TransportMessage,
    AbortTransfer,
    AbortAck,
]


peer_codec: Codec[PeerMessage] = Codec(PeerMessage)


def peer_frames(room: bytes, message: Wire) -> Sequence[bytes]:
    """Return a P<->D control message as its two frames."""
    return (room, encode(message))
