"""The hosts and wires of test/network.py behave as the tests that use them assume."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from network import DEVICE, Network

SILENT_S = 1.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(["a", "b", "c"]) as network:
        yield network


@pytest.fixture
def pair(network: Network) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection between hosts a and b."""
    with network.inside("b"):
        listener = socket.create_server((network.address("b"), 0))
    with network.inside("a"):
        client = socket.create_connection(listener.getsockname(), timeout=10)
    server, _ = listener.accept()
    server.settimeout(30)
    yield client, server
    network.heal()
    for end in (listener, client, server):
        end.close()


def is_readable(end: socket.socket, wait_s: float) -> bool:
    return bool(select.select([end], [], [], wait_s)[0])


def test_silence_neither_delivers_nor_resets_and_everything_comes_after_it(
    network: Network, pair: tuple[socket.socket, socket.socket]
) -> None:
    client, server = pair
    network.drop("a", "b")
    client.sendall(b"late")
    assert not is_readable(server, SILENT_S) and not is_readable(client, 0)
    network.heal()
    assert server.recv(4) == b"late"


def test_silence_one_way_lets_the_other_way_pass(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    network.drop("a", "b", one_way=True)
    server.sendall(b"down")
    assert client.recv(4) == b"down"
    client.sendall(b"up")
    assert not is_readable(server, SILENT_S)


def test_a_delay_is_there_in_every_round_trip(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    network.set("a", "b", delay_s=0.02)

    def echo() -> None:
        for _ in range(3):
            server.sendall(server.recv(1))

    thread = threading.Thread(target=echo)
    thread.start()
    start_s = time.monotonic()
    for _ in range(3):
        client.sendall(b"x")
        assert client.recv(1) == b"x"
    elapsed_s = time.monotonic() - start_s
    thread.join()
    network.set("a", "b", delay_s=0.0)
    assert elapsed_s >= 3 * 0.04


def test_a_lossy_and_slow_wire_still_carries_tcp(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    data = bytes(range(256)) * 400
    network.set("a", "b", loss=0.02, rate_bytes_s=500_000)
    start_s = time.monotonic()
    thread = threading.Thread(target=client.sendall, args=(data,))
    thread.start()
    received = b""
    while len(received) < len(data):
        received += server.recv(1 << 16)
    thread.join()
    assert received == data and time.monotonic() - start_s >= len(data) / 500_000


def test_hosts_have_their_own_ports_and_processes_run_there(network: Network) -> None:
    for name in ("a", "b", "c"):
        with network.inside(name):
            socket.create_server(("0.0.0.0", 4000)).close()
    process = network.popen("c", ["ip", "-4", "-o", "addr", "show", DEVICE], stdout=-1, text=True)
    assert network.address("c") in process.communicate(timeout=20)[0]
