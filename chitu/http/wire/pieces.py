"""Answers of cold routes whose size grows with the cluster, written in pieces, between which the loop is free. Loop
thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping

from starlette.responses import Response, StreamingResponse

WRITE_BYTES = 64 << 10
"""Pieces are joined until they have as many bytes. A shorter answer is written at once, with its length."""


async def joined(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of the pieces, each of which is taken in a turn of the loop of its own."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= WRITE_BYTES:
            yield bytes(held)
            held.clear()
        await asyncio.sleep(0)
    yield bytes(held)


async def in_pieces(pieces: Iterator[bytes], headers: Mapping[str, str]) -> Response:
    """Return the answer. Its pieces behind the first `WRITE_BYTES` are taken while it is written."""
    parts = joined(pieces)
    first = await anext(parts)
    if len(first) < WRITE_BYTES:
        return Response(first, headers=headers)

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    return StreamingResponse(all_parts(), headers=headers)
