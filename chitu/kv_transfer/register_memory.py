"""Making a pool's arena known to the transports of its process: on the main rank (`KVManager`) and on TP followers."""

from __future__ import annotations

import logging

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.transport import Transport
from chitu.messages import TransportSession

logger = logging.getLogger(__name__)


def register_memory(
    memory: PagedMemory, transports: list[Transport], area: StagingArea | None = None
) -> tuple[TransportSession, ...]:
    """Sessions of those that can use the memory, in order; the others are closed and taken out of the list. Idempotent.

    `area`: segments; where they are not in the pool's arena, it is enough for a transport to take theirs.
    TransferFailed where none can.
    """
    sessions: list[TransportSession] = []
    usable: list[Transport] = []
    reasons: list[str] = []
    for transport in transports:
        try:
            _register(transport, memory, area)
            sessions.append(transport.local_session())
        except ChituError as error:
            logger.warning("transport %s is left out: %s", transport.name, error.message)
            reasons.append(f"{transport.name}: {error.message}")
            transport.close()
            continue
        usable.append(transport)
    transports[:] = usable
    if not usable:
        raise TransferFailed(f"no transport can use the KV memory ({'; '.join(reasons) or 'none was given'})")
    return tuple(sessions)


def _register(transport: Transport, memory: PagedMemory, area: StagingArea | None) -> None:
    """Raises ChituError where it can use neither."""
    if area is None or area.is_in(memory):
        transport.register(memory.arena_base, memory.arena_bytes)
        return
    transport.register(area.arena_base, area.arena_bytes)
    try:
        transport.register(memory.arena_base, memory.arena_bytes)
    except ChituError as error:
        logger.info("transport %s takes staged transfers alone: %s", transport.name, error.message)
