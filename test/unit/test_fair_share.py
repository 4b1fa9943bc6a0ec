"""Places and turns that clients share: nobody is locked out, nobody waits for all tasks of another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.net.fair_share import NoPlace, Places, Turns


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 70)), max_size=30))
def test_whatever_fifteen_clients_take_the_next_one_finds_a_place(takers: list[tuple[int, int]]) -> None:
    places: Places[int] = Places(256)
    with ExitStack() as held:
        counts: Counter[int] = Counter()
        for client in [client for client, count in takers for _ in range(count)]:
            with contextlib.suppress(NoPlace):
                held.enter_context(places.place(client))
                counts[client] += 1
        assert places.num_free == 256 - counts.total() > 0
        assert max(counts.values(), default=0) <= 64, "a quarter"
        with places.place(99):
            pass
    assert places.num_free == 256


def test_one_client_has_a_quarter_of_the_places_and_gets_them_back() -> None:
    places: Places[str] = Places(8)
    for _ in range(2):
        with places.place("a"), places.place("a"):
            with pytest.raises(NoPlace), places.place("a"):
                pass
            with places.place("b"):
                pass


def test_clients_alternate_and_tasks_of_one_client_keep_their_order() -> None:
    done: list[str] = []

    async def main() -> None:
        turns: Turns[str] = Turns(100)

        async def task(name: str) -> None:
            async with turns.turn(name[0]):
                await asyncio.sleep(0)
                done.append(name)

        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        await asyncio.gather(*map(task, names))

    asyncio.run(main())
    assert done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12), st.integers(0, 3))
def test_a_task_that_is_cancelled_leaves_its_turn_to_the_next(tasks: list[tuple[str, bool]], num_steps: int) -> None:
    """Whenever tasks are cancelled, every other task gets its turn, one at a time."""
    done: list[int] = []

    async def main() -> None:
        turns: Turns[str] = Turns(100)
        num_in_turn = 0

        async def run(index: int, client: str) -> None:
            nonlocal num_in_turn
            async with turns.turn(client):
                num_in_turn += 1
                assert num_in_turn == 1
                try:
                    await asyncio.sleep(0)
                finally:
                    num_in_turn -= 1
                done.append(index)

        running = [asyncio.ensure_future(run(index, client)) for index, (client, _) in enumerate(tasks)]
        for _ in range(num_steps):
            await asyncio.sleep(0)
        for task, (_, is_unwanted) in zip(running, tasks, strict=True):
            if is_unwanted:
                task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        async with turns.turn("d"):  # free again
            pass

    asyncio.run(asyncio.wait_for(main(), 10))
    wanted = {index for index, (_, is_unwanted) in enumerate(tasks) if not is_unwanted}
    assert wanted <= set(done)


def test_a_client_that_has_its_share_of_waiting_tasks_is_refused() -> None:
    async def main() -> None:
        turns: Turns[str] = Turns(8)

        async def task(client: str) -> str:
            async with turns.turn(client):
                await asyncio.sleep(0)
                return client

        found = await asyncio.gather(*map(task, "aaab"), return_exceptions=True)
        assert found[:2] == ["a", "a"] and isinstance(found[2], NoPlace) and found[3] == "b"

    asyncio.run(main())
