"""The ranges of a peer's memory that a transport may write: its pool, its staging memory, or both."""

from __future__ import annotations

from chitu.protocol import RankMemory, TransportSession

MEMORY = "memory"
"""Attribute of a session that reaches not the pool, but `STAGING` alone, or `NOTHING` (P's: nobody writes there)."""
STAGING = "staging"
NOTHING = "nothing"

Arena = tuple[int, int]
"""Base and bytes."""


def writable_arenas(memory: RankMemory, session: TransportSession) -> tuple[Arena, ...]:
    """One or two. None where the session reaches staging memory alone and the peer has none."""
    staging = memory.staging
    pool = (memory.arena_base, memory.arena_bytes)
    apart = (staging.arena_base, staging.arena_bytes) if staging is not None else None
    if session.attributes.get(MEMORY, "") != "":
        return (apart,) if apart is not None and session.attributes[MEMORY] == STAGING else ()
    return (pool,) if apart is None or apart == pool else (pool, apart)


def arena_of(arenas: tuple[Arena, ...], address: int) -> Arena:
    """The one that holds an address; the first where none does, for an error with its numbers. A write lies in one."""
    for base, nbytes in arenas:
        if base <= address < base + nbytes:
            return base, nbytes
    return arenas[0]
