"""The ranges of a peer's memory that a transport may write: its pool, a second allocation, or both."""

from __future__ import annotations

from chitu.errors import TransferFailed
from chitu.protocol import RankMemory, TransportSession

MEMORY = "memory"
"""Attribute of a session that does not reach the pool: it reaches the second allocation only (`STAGING`), or `NOTHING`
(on P, where no peer writes)."""
STAGING = "staging"
NOTHING = "nothing"
APART = "apart"
"""Attribute of a session: base and bytes of the second allocation, if there is one."""

Arena = tuple[int, int]
"""Base and bytes of a range."""


def writable_arenas(memory: RankMemory, session: TransportSession) -> tuple[Arena, ...]:
    """Return one or two ranges, or none if the session reaches a second allocation only and the peer has none. Raises
    TransferFailed."""
    pool, apart = (memory.arena_base, memory.arena_bytes), _apart(session)
    if session.attributes.get(MEMORY, "") != "":
        return (apart,) if apart is not None and session.attributes[MEMORY] == STAGING else ()
    return (pool,) if apart is None else (pool, apart)


def _apart(session: TransportSession) -> Arena | None:
    text = session.attributes.get(APART)
    if text is None:
        return None
    try:
        base, nbytes = (int(number) for number in text.split(":"))
    except ValueError as error:
        raise TransferFailed(f"session {session.session_id} has the arena {text[:80]!r}") from error
    if min(base, nbytes) < 0 or base + nbytes >= 1 << 63:
        raise TransferFailed(f"session {session.session_id} has an arena of {nbytes} bytes at {base:#x}")
    return base, nbytes


def arena_of(arenas: tuple[Arena, ...], address: int) -> Arena:
    """Return the arena that holds an address; if none does, the first, for its numbers. A write lies in one arena."""
    for base, nbytes in arenas:
        if base <= address < base + nbytes:
            return base, nbytes
    return arenas[0]
