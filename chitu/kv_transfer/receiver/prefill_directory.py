"""D's registrations with P: where each P is, and whether it took our registration. Pure: the machine's other table.

Owned by `ReceiverMachine`. Invariants: of a rank one incarnation is kept, the one that a view had last; the
registration is repeated until P replies, and once P refused it, it is not repeated to that incarnation. P answers each
registration at once, so it is also what a P is asked for a sign of life with, while rooms wait for it: one that does
not answer is silent until it is heard again. What is to be sent is returned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from chitu import log
from chitu.errors import ChituError, from_code
from chitu.kv_transfer.events import Send
from chitu.kv_transfer.parts import Line
from chitu.kv_transfer.peer_view import PeerView
from chitu.kv_transfer.receiver.events import Effect
from chitu.protocol import KVArgsRegisterInfo, RegisterReply
from chitu.protocol.states import REGISTRATION_TRANSITIONS, RegistrationEvent, RegistrationState
from chitu.types import REGISTRATION_ROOM

MAX_UNANSWERED = 2
"""Registrations that a P may owe an answer to, `retry_interval_s` apart, before it counts as silent."""


@dataclass(slots=True)
class PrefillPeer:
    """The incarnation of one P rank."""

    incarnation: int
    host: str
    port: int
    state: RegistrationState = RegistrationState.ASKED
    refusal: ChituError | None = None
    repeat_due_s: float = 0.0
    """It need not be asked before, again or for a sign of life."""
    unanswered: int = 0
    """Registrations sent since it was last heard."""

    def take(self, event: RegistrationEvent) -> bool:
        """False where the event is absorbed."""
        before, self.state = self.state, REGISTRATION_TRANSITIONS.get((self.state, event), self.state)
        return self.state is not before


class PrefillDirectory:
    """`registration`: what every P is told of this instance."""

    def __init__(self, registration: KVArgsRegisterInfo, retry_interval_s: float, view: PeerView) -> None:
        self.registration = registration
        self._retry_interval_s = retry_interval_s
        self._view = view
        self._peers: dict[int, PrefillPeer] = {}
        """By engine_rank."""

    # --------------------------------------------------------------------------------------------------------- look-ups

    def peer(self, rank: int, incarnation: int) -> PrefillPeer | None:
        """None where this incarnation was not found yet or another one has its rank."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def address_of(self, incarnation: int) -> tuple[str, int] | None:
        rank = self.rank_of(incarnation)
        return (self._peers[rank].host, self._peers[rank].port) if rank is not None else None

    def rank_of(self, incarnation: int) -> int | None:
        """None where it has none, or no longer."""
        return next((rank for rank, peer in self._peers.items() if peer.incarnation == incarnation), None)

    def registered(self) -> dict[int, int]:
        """engine_rank -> incarnation of the P that took our registration."""
        peers = self._peers.items()
        return {rank: peer.incarnation for rank, peer in peers if peer.state is RegistrationState.ACCEPTED}

    def silent(self) -> tuple[int, ...]:
        """Incarnations of the P of the cluster that do not answer: nothing passes between us, one way or both."""
        return tuple(
            peer.incarnation
            for rank, peer in self._peers.items()
            if peer.unanswered >= MAX_UNANSWERED and not self._view.is_lost(rank, peer.incarnation)
        )

    # ----------------------------------------------------------------------------------------------------- registration

    def take_view(self, now_s: float) -> list[Effect]:
        """Register with each P that is new in the view, and again with each that returns after it was lost."""
        found: list[Effect] = []
        for instance in self._view.present():
            if instance.control_port:
                address = instance.host, instance.control_port
                found += self._found(instance.engine_rank, instance.incarnation, *address, now_s)
        for rank, peer in self._peers.items():
            if self._view.is_lost(rank, peer.incarnation):
                peer.take(RegistrationEvent.LOST)
                peer.repeat_due_s, peer.unanswered = 0.0, 0
        return found

    def _found(self, rank: int, incarnation: int, host: str, port: int, now_s: float) -> list[Effect]:
        """Register with a P once per incarnation."""
        peer = self.peer(rank, incarnation)
        if peer is None:
            peer = self._peers[rank] = PrefillPeer(incarnation, host, port)
        elif (peer.host, peer.port) != (host, port):
            peer.host, peer.port = host, port
            peer.take(RegistrationEvent.LOST)
        return self._register(peer, now_s) if peer.state is RegistrationState.ASKED else []

    def tick(self, now_s: float) -> list[Effect]:
        asked: list[Effect] = []
        for rank, peer in self._peers.items():
            is_owing = peer.unanswered or peer.state is RegistrationState.ASKED
            if is_owing and not self._view.is_lost(rank, peer.incarnation):
                asked += self._register(peer, now_s)
        return asked

    def ask(self, rank: int, incarnation: int, now_s: float) -> list[Effect]:
        """A room has waited for a sign of this P for `retry_interval_s`: it is to give one, unless it just did."""
        peer = self.peer(rank, incarnation)
        return self._register(peer, now_s) if peer is not None else []

    def heard(self, incarnation: int, now_s: float) -> None:
        """A frame of this P came."""
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                peer.unanswered, peer.repeat_due_s = 0, now_s + self._retry_interval_s

    def on_reply(self, peer: PrefillPeer, message: RegisterReply) -> list[Effect]:
        """P took or refused the registration, perhaps not for the first time."""
        rank, text = message.engine_rank, message.message
        if not message.code and peer.take(RegistrationEvent.ACCEPT):
            return [Line(logging.INFO, log.DECODE_REGISTERED, (rank,), "")]
        if message.code and peer.take(RegistrationEvent.REFUSE):
            peer.refusal = from_code(message.code, text)
            return [Line(logging.ERROR, "P%d refused this instance: %s", (rank, text), "")]
        return []

    def _register(self, peer: PrefillPeer, now_s: float) -> list[Effect]:
        """Nothing where it is not due, or P refused us: it will not change its mind within this incarnation."""
        if peer.repeat_due_s > now_s or peer.state is RegistrationState.REFUSED:
            return []
        peer.unanswered += 1
        peer.repeat_due_s = now_s + self._retry_interval_s
        return [Send(peer.host, peer.port, REGISTRATION_ROOM, self.registration)]
