"""Strangers use up a router's descriptors: clients and instances get in all the same, or a little later."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from support.router_process import RouterUnderTest, wait_until

from chitu.net.sockets import HANDSHAKE_MS
from chitu.tools.make_model import make_model

ZMQ_PORTS = ("coordination_port", "metadata_sync_port", "stats_port", "token_port")
STRANGERS = 4096
PATIENCE_S = 15.0
"""Timeout of these tests: half of libzmq's own patience with a stranger."""
LEASE = "dp_config.router.pd_disaggregation.deadlines.lease_s=1"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterUnderTest]:
    with RouterUnderTest(tmp_path, make_model(tmp_path / "tiny"), ["model.served_name=m", LEASE]) as router:
        yield router


def is_served(router: RouterUnderTest) -> bool:
    """Return whether a request on a new connection is served."""
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=5.0, trust_env=False)
        return answer.status_code == 200
    return False


def has(router: RouterUnderTest, *names: str) -> bool:
    with contextlib.suppress(OSError):
        return set(names) <= router.members()
    return False


def limit_descriptors(pid: int, limit: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))


def test_strangers_that_say_nothing_take_no_descriptor_for_long(router: RouterUnderTest) -> None:
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    if own[1] < 2 * STRANGERS:
        pytest.skip(f"this process may not open {STRANGERS} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))
    limit_descriptors(router.pid, STRANGERS)  # fewer descriptors than strangers
    router.start_worker("P0,D0")
    strangers = []
    try:
        for number in range(STRANGERS):
            port = router.ports[ZMQ_PORTS[number % len(ZMQ_PORTS)]]
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        wait_until(lambda: is_served(router), PATIENCE_S, "a new client's answer")
        router.start_worker("P1,D1", wait=False)
        wait_until(lambda: has(router, "P0", "D0", "P1", "D1"), PATIENCE_S, "P1 and D1 to join")
        for stranger in strangers[:: len(strangers) // 8]:
            stranger.settimeout(PATIENCE_S + HANDSHAKE_MS / 1000)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # libzmq speaks first
                    pass
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, own)


def test_an_instance_that_the_router_has_no_descriptor_for_joins_when_it_has_one(router: RouterUnderTest) -> None:
    worker = router.start_worker("P0")
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: not router.members(), PATIENCE_S, "the lease to end")
    limit, _ = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
    limit_descriptors(router.pid, 3)  # what is open stays open, and nothing new can be opened
    worker.send_signal(signal.SIGCONT)  # its connections still exist, so it asks at once
    wait_until(lambda: "P0 cannot join now: no socket to" in router.log, PATIENCE_S, "a Join without a descriptor")
    assert "refused P0" not in router.log
    limit_descriptors(router.pid, limit)
    wait_until(lambda: has(router, "P0"), PATIENCE_S, "P0 to join")
    assert worker.poll() is None


def test_a_message_of_many_large_frames_is_not_kept(router: RouterUnderTest) -> None:
    """libzmq holds the frames of a message until its last one arrives: the stats port rejects frames that large."""
    router.start_worker("P0,D0")

    def resident() -> int:
        return int(psutil.Process(router.pid).memory_info().rss)

    def push_all() -> None:
        context = zmq.Context()
        for port in ("stats_port", "coordination_port"):
            pusher = context.socket(zmq.PUSH if port == "stats_port" else zmq.DEALER)
            pusher.setsockopt(zmq.RECONNECT_IVL, -1)
            monitor = pusher.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            pusher.connect(f"tcp://127.0.0.1:{router.ports[port]}")
            frame = bytes(8 << 20)
            for _ in range(20):
                pusher.send(frame, zmq.SNDMORE)
            pusher.send(b"")
            assert monitor.poll(1000 * PATIENCE_S), f"the {port} to cut off the sender"
            monitor.close()
            pusher.close(0)
        context.term()

    push_all()
    before = resident()
    push_all()
    grown = resident() - before
    assert grown < 32 << 20, f"the router grew by {grown >> 20} MiB when it got the same once more"
    assert is_served(router)
