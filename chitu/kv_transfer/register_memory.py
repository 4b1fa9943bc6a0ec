"""Making a pool's arena known to the transports of its process: on the main rank (`KVManager`) and on TP followers."""

from __future__ import annotations

import logging

from chitu.errors import ChituError, TransferFailed
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.transport import Transport
from chitu.messages import TransportSession

logger = logging.getLogger(__name__)


def register_memory(memory: PagedMemory, transports: list[Transport]) -> tuple[TransportSession, ...]:
    """Sessions of those that can use the memory, in order; the others are closed and taken out of the list. Idempotent.

    TransferFailed where none can.
    """
    sessions: list[TransportSession] = []
    usable: list[Transport] = []
    reasons: list[str] = []
    for transport in transports:
        try:
            transport.register(memory.arena_base, memory.arena_bytes)
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
