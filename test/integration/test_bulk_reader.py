"""`BulkReader` on real sockets: every message arrives once, in order, however many are ready when the loop looks."""

from __future__ import annotations

import asyncio
import random

import pytest
import uvloop
import zmq

from chitu.net.aio import MAX_MESSAGES_PER_TURN, BulkReader, FrameReader

BURSTS = (1, 1, 2, 1, 3, 1, 5, 2, 40, 1, 2, 3, MAX_MESSAGES_PER_TURN, 1, 3 * MAX_MESSAGES_PER_TURN + 1, 1)
WAIT_S = 20.0


@pytest.mark.parametrize("seed", range(4))
def test_no_message_waits_for_one_behind_it(seed: int) -> None:
    """The descriptor fires once for everything since it was read empty: a reader that stops early is never called
    again."""
    got: list[int] = []
    calls: list[int] = []

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        news = asyncio.Event()

        def on_frames(frames: list[bytes]) -> None:
            got.extend(int(frame) for frame in frames)
            calls.append(len(frames))
            news.set()

        reader = BulkReader(asyncio.get_running_loop(), pull, on_frames)
        rng, sent = random.Random(seed), 0
        for burst in BURSTS:
            for _ in range(burst):
                push.send(b"%d" % sent)
                sent += 1
                if rng.random() < 0.1:
                    await asyncio.sleep(0)
            if rng.random() < 0.3:
                continue  # the next burst adds to it
            async with asyncio.timeout(WAIT_S):
                while len(got) < sent:
                    news.clear()
                    await news.wait()
        async with asyncio.timeout(WAIT_S):
            while len(got) < sent:
                news.clear()
                await news.wait()
        reader.close()
        context.destroy(linger=0)

    uvloop.run(scenario())
    assert got == list(range(sum(BURSTS)))
    assert max(calls) <= MAX_MESSAGES_PER_TURN


def test_a_reader_reads_once_a_turn_however_often_it_is_woken() -> None:
    """Otherwise the readers that it starts anew multiply, and one turn of the loop takes as many times as long."""
    count = 20 * MAX_MESSAGES_PER_TURN
    by_turn: dict[int, int] = {}

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (pull, push):
            socket.set_hwm(0)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        loop, turn = asyncio.get_running_loop(), 0

        def on_message(frames: list[bytes]) -> None:
            by_turn[turn] = by_turn.get(turn, 0) + 1

        for _ in range(count):
            push.send(b"a message")
        reader = FrameReader(loop, pull, on_message)
        async with asyncio.timeout(WAIT_S):
            while sum(by_turn.values()) < count:
                for _ in range(10):
                    reader.poke()
                await asyncio.sleep(0)
                turn += 1
        reader.close()
        context.destroy(linger=0)

    uvloop.run(scenario())
    assert max(by_turn.values()) <= MAX_MESSAGES_PER_TURN
