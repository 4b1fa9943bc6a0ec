"""P's table of registered D (S3: `decode_kv_args_table`): validated addresses and an open way to write there.

Owned by `PrefillSender`; changed on the comm thread only. Nothing of a registration is used before all of it was
checked: the layout against ours, the memory ranges for lying inside their arena, the port for being one. One entry per
incarnation; a newer incarnation of a rank supersedes the older one, a message of the older one is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chitu.errors import BadFrame, ChituError, IncompatibleLayout, TransferFailed
from chitu.kv_transfer.layout import PagedMemory, check_compatible, check_rank_memory
from chitu.kv_transfer.transport import PeerHandle, Transport
from chitu.messages import PROTOCOL_VERSION, KVArgsRegisterInfo, KVLayout, RankMemory

TP_RANK = 0
"""The main rank moves its own shard; `KVManager` refuses layouts of several ranks."""


@dataclass(slots=True)
class DecodePeer:
    """A D that registered. `connection` is None while nothing may be written there."""

    info: KVArgsRegisterInfo
    memory: RankMemory
    connection: Connection | None
    is_suspended: bool = False
    """A write to it failed and may still land: no new write before a settle succeeded."""

    @property
    def name(self) -> str:
        return f"D{self.info.engine_rank} at {self.info.endpoint}:{self.info.dst_port}"


@dataclass(slots=True, frozen=True)
class Connection:
    transport: Transport
    handle: PeerHandle


def check_return_address(info: KVArgsRegisterInfo) -> None:
    """Raises BadFrame where not even a refusal could be sent back."""
    if not 0 < info.dst_port <= 65535 or not 0 < len(info.endpoint) <= 255 or info.engine_rank < 0:
        raise BadFrame(f"D{info.engine_rank} registers with the address {info.endpoint!r}:{info.dst_port}")


def check_registration(info: KVArgsRegisterInfo, layout: KVLayout, memory: PagedMemory) -> RankMemory:
    """The memory of the rank that this process writes to. Raises IncompatibleLayout or BadFrame."""
    if info.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleLayout(f"protocol version {info.protocol_version} there, {PROTOCOL_VERSION} here")
    check_compatible(layout, info.layout)
    if len(info.ranks) != layout.tp_size or {rank.tp_rank for rank in info.ranks} != set(range(layout.tp_size)):
        raise BadFrame(f"{len(info.ranks)} ranks of memory for tp_size {layout.tp_size}")
    for rank in info.ranks:
        check_rank_memory(rank, memory, layout.tp_size)
    return next(rank for rank in info.ranks if rank.tp_rank == TP_RANK)


def open_connection(memory: RankMemory, transports: Sequence[Transport]) -> Connection:
    """Connect by the first own transport (they are in order of preference) that the peer offers and that works."""
    reasons: list[str] = []
    for transport in transports:
        for session in memory.sessions:
            if session.transport != transport.name:
                continue
            if not transport.can_reach(session):
                reasons.append(f"{transport.name} cannot reach {session.session_id}")
                continue
            try:
                return Connection(transport, transport.connect(memory, session))
            except ChituError as error:
                reasons.append(f"{transport.name}: {error.message}")
    offered = ", ".join(session.transport for session in memory.sessions) or "none"
    mine = ", ".join(transport.name for transport in transports) or "none"
    raise TransferFailed(f"no common transport (offered: {offered}; mine: {mine}) {'; '.join(reasons)}".rstrip())
