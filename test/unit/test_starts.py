"""Requests that arrive together begin over several turns of the loop, so that tokens come between them."""

from __future__ import annotations

import asyncio

from chitu.http.answer.generate import STARTS_PER_TURN, Starts


def test_requests_begin_in_order_a_few_a_turn_and_a_cancelled_one_takes_no_place() -> None:
    count = 5 * STARTS_PER_TURN // 2

    async def scenario() -> list[list[int]]:
        starts, turns = Starts(), [[]]

        async def request(number: int) -> None:
            await starts.turn()
            turns[-1].append(number)

        tasks = [asyncio.ensure_future(request(number)) for number in range(count)]
        while sum(map(len, turns)) < count - 2:
            await asyncio.sleep(0)
            if len(turns) == 1:
                tasks[STARTS_PER_TURN].cancel()
                tasks[-1].cancel()
            turns.append([])
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.wait_for(request(count), 5)
        return [turn for turn in turns if turn]

    turns = asyncio.run(scenario())
    begun = [number for number in range(count - 1) if number != STARTS_PER_TURN]
    assert [number for turn in turns for number in turn] == [*begun, count]
    assert max(map(len, turns)) == STARTS_PER_TURN == len(turns[0])
