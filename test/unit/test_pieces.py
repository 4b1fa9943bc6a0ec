"""Long answers of the routes that are not hot: the loop is free between two pieces of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fastapi.responses import StreamingResponse

from chitu.http.sse import WRITE_BYTES, in_pieces, joined


def test_the_loop_is_free_between_two_pieces_and_small_ones_are_written_together() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def pieces() -> Iterator[bytes]:
        before = -1
        for number in range(100):
            assert turns > before, "nothing else ran since the last piece"
            before = turns
            yield bytes([number]) * (WRITE_BYTES // 10)

    async def run() -> list[bytes]:
        counting = asyncio.create_task(count_turns())
        parts = [part async for part in joined(pieces())]
        counting.cancel()
        return parts

    parts = asyncio.run(run())
    assert b"".join(parts) == b"".join(bytes([number]) * (WRITE_BYTES // 10) for number in range(100))
    assert len(parts) < 15


def test_a_short_answer_has_a_length_and_a_long_one_is_not_made_before_it_is_written() -> None:
    taken = 0

    def pieces(count: int) -> Iterator[bytes]:
        nonlocal taken
        for number in range(count):
            taken = number
            yield b"x" * 1000

    short = asyncio.run(in_pieces(pieces(10), {"content-type": "text/plain"}))
    assert short.body == b"x" * 10_000
    assert short.headers["content-length"] == "10000"
    long = asyncio.run(in_pieces(pieces(1000), {"content-type": "text/plain"}))
    assert isinstance(long, StreamingResponse) and "content-length" not in long.headers
    assert taken < 100

    async def rest() -> int:
        return sum([len(part) async for part in (await in_pieces(pieces(1000), {})).body_iterator])  # type: ignore[attr-defined]

    assert asyncio.run(rest()) == 1_000_000
