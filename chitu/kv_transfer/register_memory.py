"""Making a pool's arena, and staging memory apart from it, known to the transports of a process: on the main rank
(`KVManager`) and on TP followers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import TransportSession

logger = logging.getLogger(__name__)

ONE_MACHINE = ("shm", "cuda_ipc")
"""Transports that map memory of processes of their own machine."""


def register_memory(
    memory: PagedMemory, transports: list[Transport], area: StagingArea | None = None
) -> tuple[TransportSession, ...]:
    """Sessions of those that can use the memory, in order; the others are closed and taken out of the list. Idempotent.

    `area`: where it lies apart from the pool's arena it is registered too, and a transport that can use nothing else
    stays (its session says so). TransferFailed where none can use anything.
    """
    apart = area if area is not None and not area.is_in(memory) else None
    sessions: list[TransportSession] = []
    usable: list[Transport] = []
    reasons: list[str] = []
    for transport in transports:
        error = _why_not(transport, memory.arena_base, memory.arena_bytes)
        has_area = apart is not None and not _why_not(transport, apart.arena_base, apart.arena_bytes)
        if not error or has_area:
            try:
                sessions.append(transport.local_session())
                usable.append(transport)
                if error:
                    logger.warning("transport %s stages everything: %s", transport.name, error)
                continue
            except ChituError as no_session:
                error = no_session.message
        logger.warning("transport %s is left out: %s", transport.name, error)
        reasons.append(f"{transport.name}: {error}")
        transport.close()
    transports[:] = usable
    if not usable:
        raise TransferFailed(f"no transport can use the KV memory ({'; '.join(reasons) or 'none was given'})")
    return tuple(sessions)


def ways_of(sessions: Sequence[TransportSession]) -> tuple[str, ...]:
    """What `Transport.can_reach` compares, a word for each session: two ends that have none in common are apart."""
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


def _why_not(transport: Transport, base: int, nbytes: int) -> str:
    """Why it cannot register these bytes; empty where it did."""
    try:
        transport.register(base, nbytes)
    except ChituError as error:
        return error.message
    return ""
