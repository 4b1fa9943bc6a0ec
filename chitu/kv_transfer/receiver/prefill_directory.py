"""D's directory of P: where each is, and whether it took our registration.

Owned by `DecodeReceiver`; every method runs under its lock: `found` from the comm thread (cluster view) and from the
helper thread that reads the bootstrap server, the rest from the comm thread, `peer` also from the step thread.
Invariants: of a rank one incarnation is kept, the one in the view, or else the one that was found last; the
registration is repeated until P replies, and once P refused it, it is not repeated to that incarnation. P answers each
registration at once, so it is also what a P is asked for a sign of life with, while rooms wait for it: who does not
answer is silent until it is heard again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from chitu import log
from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import ChituError, from_code
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.transfer_table import NEVER_S
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo, RegisterReply
from chitu.types import REGISTRATION_ROOM

MAX_UNANSWERED = 2
"""Registrations that a P may owe an answer to, `retry_interval_s` apart, before it counts as silent."""


@dataclass(slots=True)
class PrefillPeer:
    """The incarnation of one P rank."""

    incarnation: int
    host: str
    port: int
    is_registered: bool = False
    refusal: ChituError | None = None
    """P refused our registration; it will not change its mind within this incarnation."""
    repeat_due_s: float = 0.0
    """It need not be asked before, again or for a sign of life."""
    unanswered: int = 0
    """Registrations sent since it was last heard."""


class PrefillDirectory:
    def __init__(self, config: KVManagerConfig, parts: RoleParts, view: PeerView, out: TransferOutbox) -> None:
        self._incarnation = config.incarnation
        self._retry_interval_s = config.deadlines.retry_interval_s
        self._clock = parts.clock
        self._view = view
        self._out = out
        self._peers: dict[int, PrefillPeer] = {}
        self.registration = KVArgsRegisterInfo(
            protocol_version=PROTOCOL_VERSION,
            engine_rank=config.engine_rank,
            incarnation=config.incarnation,
            endpoint=config.host,
            dst_port=config.control_port,
            layout=config.layout,
            ranks=(rank_memory(parts.memory, MAIN_RANK, parts.sessions), *parts.follower_memories),
        )
        """What every P is told of this instance."""

    # --------------------------------------------------------------------------------------------------------- look-ups

    def peer(self, rank: int, incarnation: int) -> PrefillPeer | None:
        """None where this incarnation was not found yet or another one has its rank."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def address_of(self, incarnation: int) -> tuple[str, int] | None:
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                return peer.host, peer.port
        return None

    def rank_of(self, incarnation: int) -> int | None:
        """None where it has none, or no longer."""
        return next((rank for rank, peer in self._peers.items() if peer.incarnation == incarnation), None)

    def registered(self) -> dict[int, int]:
        """engine_rank -> incarnation of the P that took our registration."""
        return {rank: peer.incarnation for rank, peer in self._peers.items() if peer.is_registered}

    def silent(self) -> tuple[int, ...]:
        """Incarnations of the P of the cluster that do not answer: nothing passes between us, one way or both."""
        peers = self._peers.items()
        return tuple(
            peer.incarnation
            for rank, peer in peers
            if peer.unanswered >= MAX_UNANSWERED and not self._view.is_lost(rank, peer.incarnation)
        )

    # ----------------------------------------------------------------------------------------------------- registration

    def found(self, rank: int, incarnation: int, host: str, port: int) -> None:
        """Register with a P once per incarnation; repeated by `tick` until it replies. Where the view has another
        incarnation of the rank, the view is right: the directory's may be an older one."""
        self._view.note(rank, incarnation)
        peer = self._peers.get(rank)
        if not self._view.is_present(rank, incarnation) and self._view.has_present(rank):
            return
        if peer is None or peer.incarnation != incarnation:
            peer = self._peers[rank] = PrefillPeer(incarnation, host, port)
        elif (peer.host, peer.port) != (host, port):
            peer.host, peer.port, peer.is_registered = host, port, False
        if not peer.is_registered and peer.refusal is None and peer.repeat_due_s <= self._clock.monotonic():
            self._register(rank, peer)

    def take_view(self) -> None:
        """The view was updated: register with each P that is new in it, and again with each that returns after it was
        lost."""
        for instance in self._view.present():
            if instance.control_port:
                self.found(instance.engine_rank, instance.incarnation, instance.host, instance.control_port)
        for rank, peer in self._peers.items():
            if self._view.is_lost(rank, peer.incarnation):
                peer.is_registered, peer.repeat_due_s, peer.unanswered = False, 0.0, 0

    def tick(self, now_s: float) -> None:
        for rank, peer in self._peers.items():
            is_asked = peer.unanswered or not peer.is_registered
            if is_asked and peer.repeat_due_s <= now_s and not self._view.is_lost(rank, peer.incarnation):
                self._register(rank, peer)

    def heard(self, incarnation: int) -> None:
        """A frame of this P came."""
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                peer.unanswered = 0
                peer.repeat_due_s = self._clock.monotonic() + self._retry_interval_s

    def ask(self, rank: int, incarnation: int) -> None:
        """A room has waited for a sign of this P for `retry_interval_s`: it is to give one, unless it just did."""
        peer = self.peer(rank, incarnation)
        if peer is not None and peer.repeat_due_s <= self._clock.monotonic():
            self._register(rank, peer)

    def on_reply(self, message: RegisterReply) -> bool:
        """P took or refused the registration. False: the reply is of or to another incarnation."""
        peer = self.peer(message.engine_rank, message.incarnation)
        if peer is None or message.peer_incarnation != self._incarnation:
            return False
        if peer.is_registered or peer.refusal is not None:
            return True
        if message.code:
            peer.refusal = from_code(message.code, message.message)
            text = "P%d refused this instance: %s"
            self._out.log(logging.ERROR, text, message.engine_rank, message.message)
        else:
            peer.is_registered = True
            self._out.log(logging.INFO, log.DECODE_REGISTERED, message.engine_rank)
        return True

    def _register(self, rank: int, peer: PrefillPeer) -> None:
        if peer.refusal is not None:
            peer.repeat_due_s = NEVER_S
            return
        peer.unanswered += 1
        peer.repeat_due_s = self._clock.monotonic() + self._retry_interval_s
        self._out.frame(peer.host, peer.port, REGISTRATION_ROOM, self.registration)
