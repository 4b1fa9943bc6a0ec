"""Registration of a pool's arena with a process's transports, on the main rank (`KVManager`) and on TP followers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import TransportSession

logger = logging.getLogger(__name__)

ONE_MACHINE = ("shm", "cuda_ipc")
"""Transports that map memory of other processes on their own machine."""


def register_memory(memory: PagedMemory, transports: list[Transport]) -> tuple[TransportSession, ...]:
    """Register the memory and return the sessions of the transports that can use it, in order; the other ones are
    closed and taken out of the list. Idempotent. Raises TransferFailed if none can use it."""
    sessions: list[TransportSession] = []
    usable: list[Transport] = []
    reasons: list[str] = []
    for transport in transports:
        try:
            transport.register(memory.arena_base, memory.arena_bytes)
            sessions.append(transport.local_session())
            usable.append(transport)
        except ChituError as error:
            logger.warning("transport %s is left out: %s", transport.name, error.message)
            reasons.append(f"{transport.name}: {error.message}")
            transport.close()
    transports[:] = usable
    if not usable:
        raise TransferFailed(f"no transport can use the KV memory ({'; '.join(reasons) or 'none was given'})")
    return tuple(sessions)


def ways_of(sessions: Sequence[TransportSession]) -> tuple[str, ...]:
    """Return what `Transport.can_reach` compares, a string per session. Two ends need one in common to connect."""
    ways = []
    for session in sessions:
        protocol, host_id = session.attributes.get("protocol"), session.attributes.get("host_id", "")
        if protocol is not None:
            ways.append(f"{session.transport} over {protocol}")
        elif session.transport in ONE_MACHINE:
            ways.append(f"{session.transport}@{host_id}")
        else:
            ways.append(session.transport)
    return tuple(ways)
