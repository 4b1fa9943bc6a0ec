"""P's table of registered D: validated addresses and an open connection for writes.

Owned by `PrefillSender`; used on the comm thread only. `answer` and `reconnect` may open connections and are called
without the sender's lock (they only read the view, which on P no other thread changes), `add` and `detach_idle` under
it. A registration is used only after all of it was checked: the layout against ours, the memory ranges for lying inside
their arena, the port for being valid. One entry per incarnation; a message of a replaced incarnation is dropped.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import BadFrame, ChituError, IncompatibleLayout
from chitu.kv_transfer.layout import PagedMemory, check_compatible, check_rank_memory, page_bytes_of
from chitu.kv_transfer.parts import KVManagerConfig, OwnMemory
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.shard_writer import DecodeWriter, ShardWriter, open_shards
from chitu.net.sockets import check_address
from chitu.protocol import (
    PROTOCOL_VERSION,
    KVArgsRegisterInfo,
    KVLayout,
    RankMemory,
    RegisterReply,
    TransferInfo,
    unpack_i32,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DecodePeer:
    """A D that registered. `writer` is None while nothing may be written to it."""

    info: KVArgsRegisterInfo
    memory: RankMemory
    """Memory of its main rank; the other ranks have as many pages."""
    writer: DecodeWriter | None
    unfenced: set[bytes] = field(default_factory=set)
    """Rooms with a write to this D that failed and may still land: no new write starts before a fence succeeded."""
    fence_due_s: float = 0.0
    """Time of the next fence attempt, for any of these rooms."""
    page_rooms: dict[int, bytes] = field(default_factory=dict)
    """The last room that each page was announced for, over or not; at most one entry per page."""
    aux_rooms: dict[int, bytes] = field(default_factory=dict)
    """The last room that each aux slot was announced for."""

    @property
    def is_suspended(self) -> bool:
        return bool(self.unfenced)

    @property
    def name(self) -> str:
        return f"D{self.info.engine_rank} at {self.info.endpoint}:{self.info.dst_port}"


class DecodePeers:
    def __init__(self, config: KVManagerConfig, memory: OwnMemory, fan_out: FanOut | None, view: PeerView) -> None:
        self._config = config
        self._memory = memory
        self._fan_out = fan_out
        self._view = view
        self.table: dict[int, DecodePeer] = {}
        """Registered D, by incarnation."""

    def answer(self, info: KVArgsRegisterInfo) -> tuple[RegisterReply, DecodePeer | None] | None:
        """Return the reply to D, and the peer to `add` if it is new. Return None if D was replaced by now.

        Raises BadFrame if not even a refusal could be sent back.
        """
        check_return_address(info)
        if self._view.is_replaced(info.engine_rank, info.incarnation):
            return None
        peer: DecodePeer | None = None
        refusal: ChituError | None = None
        known = self.table.get(info.incarnation)
        if known is None:
            try:
                memory = check_registration(info, self._config.layout, self._memory.pool)
                peer = DecodePeer(info, memory, self._open(info))
            except ChituError as error:
                refusal = error
        elif known.info != info:
            refusal = BadFrame(f"D{info.engine_rank} registered twice with different memory")
        if refusal is not None:
            logger.error("refused D%d (%s): %s", info.engine_rank, info.endpoint, refusal.message)
        reply = RegisterReply(
            engine_rank=self._config.engine_rank,
            incarnation=self._config.incarnation,
            peer_incarnation=info.incarnation,
            code=refusal.code if refusal is not None else "",
            message=refusal.message if refusal is not None else "",
        )
        return reply, peer

    def add(self, peer: DecodePeer) -> None:
        """Add a registered D. The cluster view need not contain it yet."""
        self.table[peer.info.incarnation] = peer
        self._view.note(peer.info.engine_rank, peer.info.incarnation)

    def reconnect(self, peer: DecodePeer) -> ChituError | None:
        """Open the connection of a D that was lost and came back. Return the error if that failed."""
        if peer.writer is not None or self._view.is_lost(peer.info.engine_rank, peer.info.incarnation):
            return None
        try:
            peer.writer = self._open(peer.info)
        except ChituError as error:
            return error
        return None

    def detach_idle(self, in_use: Iterable[DecodePeer | None]) -> list[DecodeWriter]:
        """Return the writers of lost D that no room uses, for the caller to close. Drop replaced registrations."""
        used = {peer.info.incarnation for peer in in_use if peer is not None}
        idle: list[DecodeWriter] = []
        for incarnation, peer in list(self.table.items()):
            rank = peer.info.engine_rank
            if incarnation in used or not self._view.is_lost(rank, incarnation):
                continue
            if peer.writer is not None:
                idle.append(peer.writer)
                peer.writer = None
            if self._view.is_replaced(rank, incarnation):
                del self.table[incarnation]
        return idle

    def _open(self, info: KVArgsRegisterInfo) -> DecodeWriter:
        """Connect all our ranks to those of a D. Raises TransferFailed."""
        own, fan_out = self._memory, self._fan_out

        def open_own() -> ShardWriter:
            return open_shards(info, self._config.layout, MAIN_RANK, own.pool, own.transports)

        return open_own() if fan_out is None else fan_out.open(info, open_own)


def check_return_address(info: KVArgsRegisterInfo) -> None:
    """Raise BadFrame if not even a refusal could be sent back."""
    check_address(info.endpoint, info.dst_port)
    if info.engine_rank < 0:
        raise BadFrame(f"a registration of D{info.engine_rank}")


def check_registration(info: KVArgsRegisterInfo, layout: KVLayout, memory: PagedMemory) -> RankMemory:
    """Check a registration and return the memory of D's main rank. Raises IncompatibleLayout or BadFrame."""
    if info.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleLayout(f"protocol version {info.protocol_version} there, {PROTOCOL_VERSION} here")
    check_compatible(layout, info.layout)
    tp_size = info.layout.tp_size
    if len(info.ranks) != tp_size or {rank.tp_rank for rank in info.ranks} != set(range(tp_size)):
        raise BadFrame(f"{len(info.ranks)} ranks of memory for tp_size {tp_size}")
    page_bytes = page_bytes_of(info.layout, layout, memory.page_bytes)
    for rank in info.ranks:
        check_rank_memory(rank, memory, tp_size, page_bytes)
    if len({rank.num_pages for rank in info.ranks}) > 1:
        raise BadFrame(f"the ranks have {sorted({rank.num_pages for rank in info.ranks})} pages, not as many each")
    return next(rank for rank in info.ranks if rank.tp_rank == MAIN_RANK)


def check_announcement(info: TransferInfo, memory: RankMemory, config: KVManagerConfig) -> array[int]:
    """Return the destination pages, each a page of D (`memory`), or none if D wants the logits row only. Raises
    BadFrame if the announcement is invalid."""
    pages = unpack_i32(info.dst_kv_indices)
    if info.num_tokens < 1 or len(pages) not in (0, config.num_pages(info.num_tokens)):
        raise BadFrame(f"{len(pages)} pages announced for {info.num_tokens} tokens")
    if pages and (min(pages) < 0 or max(pages) >= memory.num_pages):
        raise BadFrame(f"pages {min(pages)} to {max(pages)} announced of {memory.num_pages}")
    if len(set(pages)) != len(pages):
        raise BadFrame("a page is announced twice")
    if not 0 <= info.dst_aux_index < memory.num_aux_slots:
        raise BadFrame(f"aux slot {info.dst_aux_index} announced of {memory.num_aux_slots}")
    num_full = min(len(pages), info.num_tokens // config.layout.page_size)
    if not 0 <= info.prefix_pages <= num_full:
        raise BadFrame(f"{info.prefix_pages} prefix pages of {num_full} full ones")
    return pages
