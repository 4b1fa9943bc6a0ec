"""Messages between the transports of this instance and those of its peers, on the sockets between P and D.

Owned by a role (`PrefillSender`, `DecodeReceiver`), which resolves addresses and incarnations and does not read the
messages. The comm thread calls `deliver`, any thread `send`. No lock is held across any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from chitu.errors import BadFrame
from chitu.kv_transfer.transfer_table import PeerLink
from chitu.kv_transfer.transports.transport import MessagingTransport, Transport
from chitu.net.job_thread import Spawn
from chitu.protocol import TransportMessage, encode
from chitu.types import REGISTRATION_ROOM


class TransportMessages:
    """Transports by name. `address_of`: host and control port of an incarnation of the other role; None if unknown."""

    def __init__(
        self,
        incarnation: int,
        transports: Sequence[Transport],
        link: PeerLink,
        address_of: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self._incarnation = incarnation
        self._link = link
        self._address_of = address_of
        self._transports: dict[str, MessagingTransport] = {}
        for transport in transports:
            if isinstance(transport, MessagingTransport):
                self._transports[transport.name] = transport
                transport.attach(partial(self._send, transport.name))

    def deliver(self, rank: int, message: TransportMessage) -> None:
        """Deliver a message of a registered peer. Raises ProtocolError."""
        transport = self._transports.get(message.transport)
        if transport is None:
            raise BadFrame(f"a message to transport {message.transport[:40]!r}, which takes none here")
        transport.on_message(rank, message.incarnation, message.payload)

    def fence(self, incarnation: int) -> bool:
        """Fence a peer that is dead. Return True once none of our own transports writes for it."""
        return all([transport.fence(incarnation) for transport in self._transports.values()])

    def start(self, spawn: Spawn) -> None:
        for transport in self._transports.values():
            transport.start(spawn)

    def _send(self, name: str, incarnation: int, payload: bytes) -> None:
        address = self._address_of(incarnation)
        if address is not None:
            message = TransportMessage(self._incarnation, name, payload)
            self._link(*address, REGISTRATION_ROOM, encode(message))
