"""Bells of members on one host or on several: each reaches all others, again and again until it is heard."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from chitu.engine.lockstep import DatagramBells

PATIENCE_S = 30.0


class Member:
    def __init__(self, address: str) -> None:
        self.bells = DatagramBells(address)
        self.heard: queue.Queue[int] = queue.Queue()

    def listen(self, others: list[Member]) -> None:
        self.bells.listen([other.bells.address for other in others], self.heard.put)


@pytest.fixture(params=["", "127.0.0.1", "::1"], ids=["one host", "hosts", "hosts with IPv6"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def members(address: str) -> Iterator[list[Member]]:
    made = [Member(address) for _ in range(3)]
    for member in made:
        member.listen([other for other in made if other is not member])
    yield made
    for member in made:
        member.bells.close()


def test_a_bell_rings_at_all_others_until_it_is_silenced(members: list[Member]) -> None:
    members[0].bells.ring(7)
    for other in members[1:]:
        assert [other.heard.get(timeout=PATIENCE_S) for _ in range(3)] == [7, 7, 7], "it rings again"
    members[0].bells.silence()
    members[1].bells.ring(8)
    while members[2].heard.get(timeout=PATIENCE_S) != 8:
        pass
    assert members[0].heard.get(timeout=PATIENCE_S) == 8, "nobody hears the own bell"


def test_a_bell_of_nobody_in_the_group_and_one_of_a_member_that_is_gone_change_nothing(
    members: list[Member], address: str
) -> None:
    at = members[0].bells._socket
    stranger = socket.socket(at.family, socket.SOCK_DGRAM)
    stranger.bind((address, 0) if address else "")
    for data in (b"", b"x", (9).to_bytes(8, "little"), bytes(100)):
        stranger.sendto(data, at.getsockname())
    gone = Member(address)
    members[1].bells._others = [members[0].bells.address, gone.bells.address]
    gone.bells._socket.close()
    members[1].bells.ring(3)
    assert members[0].heard.get(timeout=PATIENCE_S) == 3
    stranger.close()
