"""The answer of a router's coordination port to an instance that asks for the file of an image."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import zmq

from chitu.cluster.membership import Membership
from chitu.config.schema import PDDisaggregationConfig, RouterConfig
from chitu.net.curve import make_context
from chitu.net.sockets import connect
from chitu.protocol import FetchImage, ImageFile, Leave, coordination_reply_codec, encode
from chitu.types import Incarnation, Role


def test_files_of_running_requests_are_sent_and_the_core_sees_no_question() -> None:
    files = {b"k" * 16: bytes(range(256)) * (20 << 12)}  # 20 MiB: far larger than a frame that the port takes

    async def ask() -> list[ImageFile]:
        context = make_context(None)
        nothing = cast(Any, None)
        config = RouterConfig(
            stats_port=0, pd_disaggregation=PDDisaggregationConfig(coordination_port=0, metadata_sync_port=0)
        )
        membership = Membership(config, context, nothing, nothing, find_file=files.get)
        membership.start()
        socket = connect(context, zmq.DEALER, "127.0.0.1", membership.port_table()["coordination_port"])
        try:
            socket.send(encode(FetchImage(b"k" * 16)))
            socket.send(encode(FetchImage(b"0" * 16)))
            socket.send(encode(Leave(Role.PREFILL, 0, Incarnation(1), "stopped")))
            socket.send(encode(FetchImage(b"k" * 16)))
            answers: list[ImageFile] = []
            socket.send(encode(FetchImage(b"k" * 16, -1, 5)))
            for start in (0, 20 << 20, 1 << 30):
                socket.send(encode(FetchImage(b"k" * 16, start, 1 << 20)))
            while len(answers) < 6:
                await asyncio.sleep(0.005)
                while socket.poll(0):
                    answer = coordination_reply_codec.decode(socket.recv())
                    assert isinstance(answer, ImageFile)
                    answers.append(answer)
            assert membership.metrics().bad_frames["coordination"] == 1, "a negative place"
            return answers
        finally:
            socket.close(0)
            membership.close()
            context.destroy(0)

    key, data = next(iter(files.items()))
    found = asyncio.run(asyncio.wait_for(ask(), 30.0))
    assert found[:3] == [ImageFile(key, data), ImageFile(b"0" * 16, is_here=False), ImageFile(key, data)]
    size = len(data)
    for answer, start in zip(found[3:], (0, 20 << 20, 1 << 30), strict=True):
        assert answer == ImageFile(key, data[start : start + (1 << 20)], start=start, num_bytes=size)
