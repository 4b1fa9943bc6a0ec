"""The metadata port of a real router: one whole view for each reader that asks, and changes, each of many joins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from nursery import forked_router
from support.router_process import RouterUnderTest

from chitu.net.sockets import connect
from chitu.net.view_feed import ViewReceiver, ask_for_whole
from chitu.protocol import ClusterView, ViewChange, ViewMessage, view_codec
from chitu.tools.make_model import make_model

PATIENCE_MS = 20_000
COUNT = 200


class Reader:
    def __init__(self, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.feed = ViewReceiver(time.monotonic())
        self.socket = connect(self.context, zmq.SUB, "127.0.0.1", port)
        for topic in self.feed.topics:
            self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.topics: list[bytes] = []
        self.messages: list[ViewMessage] = []

    def read_until(self, is_enough: Callable[[], object]) -> None:
        while not is_enough():
            assert self.socket.poll(PATIENCE_MS), "the router says nothing"
            topic, frame = self.socket.recv_multipart()
            message = view_codec.decode(frame)
            self.topics.append(topic)
            self.messages.append(message)
            self.feed.take(message)

    def wholes(self) -> list[ViewMessage]:
        return [message for message in self.messages if isinstance(message, ClusterView)]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterUnderTest]:
    with forked_router(tmp_path, make_model(tmp_path / "tiny")) as router:
        yield router


def test_many_joins_are_few_changes_and_whole_views_go_to_their_reader_alone(router: RouterUnderTest) -> None:
    readers = [Reader(router.ports["metadata_sync_port"]) for _ in range(2)]
    first, second = readers
    for reader in readers:
        reader.read_until(lambda reader=reader: reader.feed.is_current)
    names = [f"{'PD'[number % 2]}{number // 2}" for number in range(COUNT)]
    router.start_worker(",".join(names))
    for reader in readers:
        reader.read_until(lambda reader=reader: len(reader.feed.view.instances) == COUNT)
        assert {member.name for member in reader.feed.view.instances} == set(names) == router.members()
        assert len(reader.wholes()) == 1
        changes = [message for message in reader.messages if isinstance(message, ViewChange) and message.joined]
        assert len(changes) < COUNT / 2
        assert set(reader.topics) == set(reader.feed.topics)
    ask_for_whole(first.socket, first.feed.topic)
    first.read_until(lambda: len(first.wholes()) == 2)
    assert first.wholes()[1] == second.feed.view
    third = Reader(router.ports["metadata_sync_port"])
    third.read_until(lambda: third.feed.is_current)
    assert third.feed.view == first.feed.view
    for reader in (*readers, third):
        reader.context.destroy(linger=0)
