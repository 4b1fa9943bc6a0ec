"""D's registrations with P: where each P is, and whether it accepted our registration. Pure: the machine's other table.

Owned by `ReceiverMachine`. Invariants: one incarnation is kept per rank, the one that a view had last; the registration
is repeated until P replies, and not repeated to an incarnation that refused it. P answers each registration at once, so
the registration also serves to probe a P that rooms wait for: a P that does not answer is silent until a frame of it
comes. Methods return what is to be sent.
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
"""Unanswered registrations, `retry_interval_s` apart, at which a P counts as silent."""


@dataclass(slots=True)
class PrefillPeer:
    """The incarnation of one P rank."""

    incarnation: int
    host: str
    port: int
    state: RegistrationState = RegistrationState.ASKED
    refusal: ChituError | None = None
    repeat_due_s: float = 0.0
    """Earliest time of the next registration, be it a repeat or a probe."""
    unanswered: int = 0
    """Number of registrations sent since its last frame."""

    def take(self, event: RegistrationEvent) -> bool:
        """Apply an event. Return False if it is absorbed."""
        before, self.state = self.state, REGISTRATION_TRANSITIONS.get((self.state, event), self.state)
        return self.state is not before


class PrefillDirectory:
    """Every known P, one per engine rank. `registration`: what this instance sends to each."""

    def __init__(self, registration: KVArgsRegisterInfo, retry_interval_s: float, view: PeerView) -> None:
        self.registration = registration
        self._retry_interval_s = retry_interval_s
        self._view = view
        self._peers: dict[int, PrefillPeer] = {}
        """Peers by engine_rank."""

    # --------------------------------------------------------------------------------------------------------- look-ups

    def peer(self, rank: int, incarnation: int) -> PrefillPeer | None:
        """Return the peer, or None if this incarnation was not found yet or another one has its rank."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def address_of(self, incarnation: int) -> tuple[str, int] | None:
        rank = self.rank_of(incarnation)
        return (self._peers[rank].host, self._peers[rank].port) if rank is not None else None

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of an incarnation, or None if it has none, or no longer."""
        return next((rank for rank, peer in self._peers.items() if peer.incarnation == incarnation), None)

    def registered(self) -> dict[int, int]:
        """Return engine_rank -> incarnation of every P that accepted our registration."""
        peers = self._peers.items()
        return {rank: peer.incarnation for rank, peer in peers if peer.state is RegistrationState.ACCEPTED}

    def silent(self) -> tuple[int, ...]:
        """Return the incarnations of P in the cluster that do not answer: messages are lost, one way or both."""
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
        """Register with a P once per incarnation, and again if its address changed."""
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
        """Probe a P for which a room has waited `retry_interval_s`, unless a frame of it just came."""
        peer = self.peer(rank, incarnation)
        return self._register(peer, now_s) if peer is not None else []

    def heard(self, incarnation: int, now_s: float) -> None:
        """Record that a frame of this P came."""
        for peer in self._peers.values():
            if peer.incarnation == incarnation:
                peer.unanswered, peer.repeat_due_s = 0, now_s + self._retry_interval_s

    def on_reply(self, peer: PrefillPeer, message: RegisterReply) -> list[Effect]:
        """Take P's answer to the registration, perhaps not its first."""
        rank, text = message.engine_rank, message.message
        if not message.code and peer.take(RegistrationEvent.ACCEPT):
            return [Line(logging.INFO, log.DECODE_REGISTERED, (rank,), "")]
        if message.code and peer.take(RegistrationEvent.REFUSE):
            peer.refusal = from_code(message.code, text)
            return [Line(logging.ERROR, "P%d refused this instance: %s", (rank, text), "")]
        return []

    def _register(self, peer: PrefillPeer, now_s: float) -> list[Effect]:
        """Send the registration, unless it is not due or P refused it: a refusal is final within this incarnation."""
        if peer.repeat_due_s > now_s or peer.state is RegistrationState.REFUSED:
            return []
        peer.unanswered += 1
        peer.repeat_due_s = now_s + self._retry_interval_s
        return [Send(peer.host, peer.port, REGISTRATION_ROOM, self.registration)]
