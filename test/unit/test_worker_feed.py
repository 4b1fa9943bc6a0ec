"""Between the processes of one router: the feed, who gets a connection, what counts per process."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.config.schema import RouterConfig, Topology
from chitu.http.cluster_source import WorkerReport
from chitu.protocol import ClusterView, Heartbeat, InstanceInfo, KVLayout, LoadReport, RequestFailed, Wire, encode
from chitu.protocol.snapshot import RequestSnapshot
from chitu.router.metrics import CoordinationMetrics, RouterMetrics
from chitu.serve.api_endpoint import share_of
from chitu.serve.connection_handover import ConnectionGate, give
from chitu.serve.coordinator import EndedWorkers
from chitu.serve.worker_feed import (
    ConnectionsClosed,
    DrainAnswer,
    DrainAsked,
    EndAsked,
    EndWorkers,
    Feed,
    InstanceJoined,
    InstanceLost,
    RecordAsked,
    RecordReply,
    ReportAsked,
    ToCoordinator,
    ToWorker,
    Welcome,
    WorkerReady,
    WorkerStartFailed,
    packed,
    to_coordinator_codec,
    to_worker_codec,
)
from chitu.types import Role

LAYOUT = KVLayout("hash", 2, 2, 16, 16, "float32", 100)
D0 = InstanceInfo(Role.DECODE, 0, 7, "127.0.0.1", 5000, 5001, LAYOUT, 128)


def request(room: str) -> RequestSnapshot:
    return RequestSnapshot(
        room=room,
        request_id="r",
        prefill="P0",
        decode="D0",
        state="finished",
        prompt_tokens=3,
        output_tokens=4,
        created_at_s=1.0,
        first_token_at_s=1.5,
        ended_at_s=2.0,
        kv_bytes=10,
        stages=None,
        error="",
    )


def report(number: int = 0, requests: int = 3, in_flight: int = 1) -> WorkerReport:
    metrics = RouterMetrics(requests=requests, finished={"stop": 2}, in_flight={"decode": in_flight})
    return WorkerReport(1, 4711, in_flight, 9, (request("b"),), (request("a"),), metrics, number)


TO_WORKER: list[ToWorker] = [
    Welcome(Topology(), 2, 77, 1_700_000_000),
    InstanceJoined(D0),
    InstanceLost(D0, "it left", False),
    ClusterView(1, 2, (D0,), (77,)),
    Heartbeat(Role.DECODE, 0, 7, LoadReport(running=3)),
    RequestFailed(Role.PREFILL, 0, 7, bytes(16), "capacity", "full"),
    ReportAsked(3),
    RecordReply(3, (report(),), CoordinationMetrics(unknown_heartbeats=1)),
    DrainAnswer(4, "D0", 7),
    EndWorkers(),
]
TO_COORDINATOR: list[ToCoordinator] = [
    WorkerReady(5000),
    WorkerStartFailed("no such model"),
    report(5),
    ConnectionsClosed(2),
    RecordAsked(3),
    DrainAsked(4, "D0", True),
    EndAsked(),
]


@given(st.permutations(TO_WORKER), st.lists(st.integers(1, 4000), max_size=30))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(messages: list[Wire], cuts: list[int]) -> None:
    got: list[ToWorker] = []
    feed = Feed(to_worker_codec, got.append, lambda: None)
    stream = b"".join(packed(message) for message in messages)
    for length in cuts:
        feed.data_received(stream[:length])
        stream = stream[length:]
    feed.data_received(stream)
    assert got == messages


def test_every_message_to_the_coordinator_is_read_back_as_it_was() -> None:
    for message in TO_COORDINATOR:
        assert to_coordinator_codec.decode(encode(message)) == message


def test_an_unreadable_message_and_a_failing_handler_cost_one_message_each(caplog: pytest.LogCaptureFixture) -> None:
    got: list[ToCoordinator] = []

    def take(message: ToCoordinator) -> None:
        if isinstance(message, EndAsked):
            raise ValueError("a bug")
        got.append(message)

    feed = Feed(to_coordinator_codec, take, lambda: None)
    foreign = packed(ReportAsked(1))  # of the other direction
    feed.data_received(foreign + packed(EndAsked()) + packed(WorkerReady(1)))
    assert got == [WorkerReady(1)]
    assert "unreadable" in caplog.text and "a bug" in caplog.text


def test_the_end_of_one_side_is_heard_once_by_the_other() -> None:
    async def run() -> list[str]:
        heard: list[str] = []
        ended = asyncio.Event()
        here, there = socket.socketpair()

        def on_closed() -> None:
            heard.append("closed")
            ended.set()

        left = await Feed.open(
            here, to_coordinator_codec, lambda message: heard.append(type(message).__name__), on_closed
        )
        right = await Feed.open(there, to_worker_codec, lambda message: None, lambda: heard.append("own end"))
        right.send(WorkerReady(3))
        right.close()
        await asyncio.wait_for(ended.wait(), 10)
        left.send(EndWorkers())  # into nothing
        return heard

    assert asyncio.run(run()) == ["WorkerReady", "closed"]


# ------------------------------------------------------------------------------------------------------- connections


class Process:
    """An API process as the gate sees it."""

    def __init__(self) -> None:
        self.num_open = 0
        self.takes = True
        self.names: list[bytes] = []
        self.received, self._channel = socket.socketpair()
        self._channel.setblocking(False)

    def give(self, connection: socket.socket) -> bool:
        if not self.takes:
            return False
        self.num_open += 1
        return give(self._channel, connection)

    def take(self) -> socket.socket:
        _, descriptors, _, _ = socket.recv_fds(self.received, 1, 1)
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        self.received.close()
        self._channel.close()


class Clients:
    """Whoever connects to the gate, over a socket file instead of a port."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(100)
        self.listener.setblocking(False)
        self._open: list[socket.socket] = []

    def connect(self, count: int = 1) -> list[socket.socket]:
        new = []
        for _ in range(count):
            client = socket.socket(socket.AF_UNIX)
            client.connect(self.path)
            new.append(client)
        self._open += new
        return new

    def close(self) -> None:
        for client in self._open:
            client.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    with tempfile.TemporaryDirectory() as folder:
        clients = Clients(str(Path(folder) / "gate"))
        yield clients
        clients.close()


async def settle(condition: object) -> None:
    """Let the loop run until a callable is true."""
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_connections_are_spread_over_all_and_then_go_to_who_has_fewest(clients: Clients) -> None:
    async def run() -> None:
        processes = [Process() for _ in range(3)]
        gate = ConnectionGate(asyncio.get_running_loop(), clients.listener)
        gate.set_takers(processes)
        clients.connect(6)
        await settle(lambda: sum(p.num_open for p in processes) == 6)
        assert [p.num_open for p in processes] == [2, 2, 2]
        processes[1].num_open = 0
        clients.connect(2)
        await settle(lambda: processes[1].num_open == 2)
        for process in processes:  # one after the other, each closed before the next comes
            process.num_open = 0
        got = []
        for _ in range(6):
            clients.connect()
            await settle(lambda: any(p.num_open for p in processes))
            got.append(next(i for i, p in enumerate(processes) if p.num_open))
            processes[got[-1]].num_open = 0
        assert sorted(got[:3]) == sorted(got[3:]) == [0, 1, 2]
        gate.close()
        for process in processes:
            process.close()

    asyncio.run(run())


def test_no_connection_is_lost_while_nobody_can_take_one(clients: Clients) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        gate = ConnectionGate(loop, clients.listener)
        gate.set_takers([])
        waiting = clients.connect(3)
        for number, client in enumerate(waiting):
            client.send(b"%d" % number)
        refusing, process = Process(), Process()
        refusing.takes = False
        gate.set_takers([refusing])
        await settle(lambda: gate.has_unplaced)
        gate.retry()
        assert gate.has_unplaced, "nobody took it"
        gate.set_takers([refusing, process])
        await settle(lambda: process.num_open == 3)
        said = set()
        for _ in range(3):
            with process.take() as connection:
                said.add(connection.recv(10))
        assert said == {b"0", b"1", b"2"}
        gate.close()
        refusing.close()
        process.close()

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------- counting


@given(st.integers(1, 8), st.integers(1, 5000))
def test_the_shares_add_up_to_what_the_router_may_take(workers: int, max_in_flight: int) -> None:
    config = RouterConfig(workers=workers, max_in_flight=max_in_flight, token_port=29700)
    shares = [share_of(config, index) for index in range(workers)]
    assert sum(share.max_in_flight for share in shares) == max(max_in_flight, workers)
    assert 0 <= config.max_total_body_bytes - sum(share.max_total_body_bytes for share in shares) < workers
    assert 0 <= config.max_tokens_in_flight - sum(share.max_tokens_in_flight for share in shares) < workers
    assert max(s.max_in_flight for s in shares) - min(s.max_in_flight for s in shares) <= 1
    assert [share.token_port for share in shares] == list(range(29700, 29700 + workers))
    anywhere = msgspec.structs.replace(config, token_port=0)
    assert {share_of(anywhere, index).token_port for index in range(workers)} == {0}


def test_counters_do_not_fall_when_a_process_dies_and_gauges_go() -> None:
    ended = EndedWorkers()
    ended.add(report(requests=3))
    ended.add(report(requests=5))
    total = ended.report()
    assert (total.metrics.requests, total.metrics.finished, total.metrics.in_flight) == (8, {"stop": 4}, {})
    assert (total.in_flight, total.running, [r.room for r in total.ended]) == (0, (), ["a", "a"])
    assert total.version > 9
