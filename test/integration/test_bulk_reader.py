"""`BulkReader` and `Outbox` on real sockets: every message arrives once, in order, however many are ready when the loop
looks, and what is sent in one turn arrives together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import uvloop
import zmq

from chitu.net.aio import MAX_MESSAGE_BYTES, MAX_MESSAGES_PER_TURN, BulkReader, FrameReader, Outbox, PeerSocket
from chitu.net.sockets import SEND_HIGH_WATER_MARK
from chitu.protocol import InstanceInfo, KVLayout
from chitu.types import Role

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


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.RCVTIMEO, 5000)
    yield context
    context.destroy(linger=0)


def peers(context: zmq.Context[zmq.Socket[bytes]], *ports: int) -> list[PeerSocket]:
    layout, outbox = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100), Outbox(context)
    infos = [InstanceInfo(Role.DECODE, 0, 77, "127.0.0.1", port, 0, layout, 128, 1) for port in ports]
    return [outbox.open(info) for info in infos]


def test_what_is_sent_to_an_instance_in_one_turn_arrives_as_one_message_after_it(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def scenario() -> list[list[bytes]]:
        pulls = [context.socket(zmq.PULL) for _ in range(2)]
        ours, others = peers(context, *(pull.bind_to_random_port("tcp://127.0.0.1") for pull in pulls))
        messages: list[list[bytes]] = []
        for turn in (b"a", b"b"):
            assert all(ours.send(turn + b"%d" % number) for number in range(3))
            assert others.send(turn)
            assert not pulls[0].poll(20)
            await asyncio.sleep(0)
            messages += [pull.recv_multipart() for pull in pulls]
        large = bytes(MAX_MESSAGE_BYTES)
        assert ours.send(b"c") and ours.send(large) and ours.send(b"behind")
        assert pulls[0].poll(5000), "a large message waits for the end of the turn"
        await asyncio.sleep(0)
        assert ours.send(b"cancellations")
        ours.close(200)
        assert pulls[0].recv_multipart() == [b"c", large]
        messages += [pulls[0].recv_multipart() for _ in range(2)]
        return messages

    both = [[[turn + b"%d" % number for number in range(3)], [turn]] for turn in (b"a", b"b")]
    assert uvloop.run(scenario()) == [*both[0], *both[1], [b"behind"], [b"cancellations"]]


def test_a_full_queue_is_noticed_by_the_first_message_that_would_not_fit(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def scenario() -> None:
        with context.socket(zmq.PULL) as pull:
            port = pull.bind_to_random_port("tcp://127.0.0.1")
        (peer,) = peers(context, port)  # nothing listens there now
        num_sent = 0
        while peer.send(b"a request"):
            assert peer.send(b"more of the same turn")
            await asyncio.sleep(0)
            num_sent += 1
        assert num_sent == SEND_HIGH_WATER_MARK
        peer.close()

    uvloop.run(scenario())
