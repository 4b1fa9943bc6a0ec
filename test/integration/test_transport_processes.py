"""Transports between two real processes: shm, Mooncake and NIXL over TCP, cuda_ipc on its twin of a GPU and on
a GPU, where there is one. Those that go over a network also go through a delay, between hosts of `test/network.py`.

What takes minutes over a network, or was seen to fail on a busy machine, runs by hand alone:
`CHITU_NETWORK_TESTS=all .venv/bin/python -m pytest test/integration/test_transport_processes.py`.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from network import DEVICE, Network
from transport_process import LAYOUT, NUM_PAGES, break_connections, new_pool, new_transport, page_crcs, region

from chitu.errors import MissingDependency, TransferFailed
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.metadata_buffers import MetadataBuffers
from chitu.kv_transfer.plan import plan_aux_copy, plan_page_copies
from chitu.kv_transfer.shm.transfer_engine import ShmTransport
from chitu.kv_transfer.transport import CopyList, OrderedTransport, PeerHandle, Transport, WriteError
from chitu.messages import RankMemory, TransportSession
from chitu.types import Ready, new_room

RUNS_ALL = os.environ.get("CHITU_NETWORK_TESTS") == "all"
BY_HAND = "by hand alone: CHITU_NETWORK_TESTS=all"
PROGRAM = Path(__file__).with_name("transport_process.py")
LAYERS = range(LAYOUT.num_layers)
NUM_REGIONS = 2 * LAYOUT.num_layers


@dataclass(slots=True, frozen=True)
class Way:
    """From this process to a receiver. `round_trip_s`: over a network that takes so long; 0: on one host."""

    kind: str
    round_trip_s: float = 0.0
    network: Network | None = None

    @contextmanager
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
        """This thread, and those it starts, are on host `p0` meanwhile, where there is a network."""
        if not self.round_trip_s:
            yield self
            return
        monkeypatch.setenv("UCX_NET_DEVICES", DEVICE)
        with Network(["p0", "d0"], delay_s=self.round_trip_s / 2) as network, network.inside("p0"):
            yield Way(self.kind, self.round_trip_s, network)

    def address(self, host: str) -> str:
        return "127.0.0.1" if self.network is None else self.network.address(host)

    def few(self, number: int) -> int:
        """As many pieces as take seconds where each may take a round trip."""
        return number if not self.round_trip_s else max(3, min(number, round(0.3 / self.round_trip_s)))


class Receiver:
    """A child process with a registered pool, on host `d0` where there is a network."""

    def __init__(self, way: Way) -> None:
        command = [sys.executable, str(PROGRAM), "receive", way.kind, way.address("d0")]
        self.process = subprocess.Popen(
            command if way.network is None else way.network.argv("d0", command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = self._answer()
        self.memory = msgspec.msgpack.decode(bytes.fromhex(line), type=RankMemory)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the receiver ended with {self.process.wait()}"
        return line.strip()

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def crcs(self, index: int) -> list[int]:
        return [int(word) for word in self.ask("crc", index).split()]

    def end(self) -> int:
        """Exit code after a normal end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Writer:
    """This process: a pool of random bytes and a transport."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.kind = way.kind
        self.pool: KVPool = new_pool(way.kind)
        self.transport: Transport = new_transport(way.kind, way.address("p0"))
        self.transport.register(self.pool.arena_base, self.pool.arena_bytes)
        torch.manual_seed(1)
        for index in range(NUM_REGIONS):
            region(self.pool, index).normal_()

    def connect(self, receiver: Receiver) -> PeerHandle:
        return self.transport.connect(receiver.memory, receiver.memory.sessions[0])


WAYS = [
    *(pytest.param(Way(kind), id=kind) for kind in ("shm", "mooncake", "nixl", "cuda_ipc")),
    *(pytest.param(Way(kind, 0.002), id=f"{kind}-2ms") for kind in ("mooncake", "nixl")),
    *(
        pytest.param(Way(kind, 0.04), id=f"{kind}-40ms", marks=pytest.mark.skipif(not RUNS_ALL, reason=BY_HAND))
        for kind in ("mooncake", "nixl")
    ),
    pytest.param(Way("cuda_ipc_gpu"), id="cuda_ipc_gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=WAYS)
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    torch.set_num_threads(1)
    if request.param.kind == "cuda_ipc_gpu" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    with pytest.MonkeyPatch.context() as monkeypatch, request.param.opened(monkeypatch) as way:
        try:
            made = Writer(way)
        except MissingDependency as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        yield made
        made.transport.close()
        made.pool.close()


@pytest.fixture(scope="module")
def receiver(writer: Writer) -> Iterator[Receiver]:
    """A peer that the tests share."""
    made = Receiver(writer.way)
    yield made
    assert made.end() == 0


def settle_in_looks(writer: Writer, peer: PeerHandle, limit_s: float = 30.0) -> None:
    """As the product does it: short attempts, each of which goes on where the one before ended."""
    end_s = time.monotonic() + limit_s
    while not writer.transport.settle(peer, 0.02):
        assert time.monotonic() < end_s, "the writes do not settle"
        time.sleep(0.05)


class Later:
    """`Ready` whose work is done when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def synchronize(self) -> None:
        self._work()

    def wait(self, stream: object = None) -> None:
        raise AssertionError("the twin has no stream")


@pytest.fixture
def on_one_host(writer: Writer) -> None:
    """What says the same over a network is asked there by hand alone: it takes long."""
    if writer.way.network is not None and not RUNS_ALL:
        pytest.skip(BY_HAND)


@pytest.fixture
def troubled(writer: Writer, trouble: str) -> Iterator[Network]:
    """The network, which is sound again when the test has ended, also when it failed."""
    if writer.way.network is None:
        pytest.skip("on one host")
    if trouble == "broken" and writer.kind != "mooncake":
        pytest.skip("NIXL writes of broken connections are settled by the peer's death alone")
    if (writer.kind, trouble) != ("mooncake", "silent") and not RUNS_ALL:
        pytest.skip(BY_HAND)
    yield writer.way.network
    writer.way.network.heal()


@pytest.fixture
def own_receiver(writer: Writer) -> Iterator[Receiver]:
    """A peer that a test may stop or kill."""
    made = Receiver(writer.way)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
    made.end()


def test_scattered_and_contiguous_pages_arrive_where_they_belong_and_nowhere_else(
    writer: Writer, receiver: Receiver
) -> None:
    rng = random.Random(7)
    num_scattered = writer.way.few(60)
    src_pages = [*range(100, 140), *rng.sample(range(200, NUM_PAGES), num_scattered)]
    dst_pages = [*range(3, 43), *rng.sample(range(50, NUM_PAGES), num_scattered)]
    before = [receiver.crcs(index) for index in range(NUM_REGIONS)]
    peer = writer.connect(receiver)
    writer.transport.write(peer, plan_page_copies(writer.pool, receiver.memory, src_pages, dst_pages, LAYERS), 10.0)
    for index in range(NUM_REGIONS):
        sent, expected = page_crcs(writer.pool, index), before[index]
        for src_page, dst_page in zip(src_pages, dst_pages, strict=True):
            expected[dst_page] = sent[src_page]
        assert receiver.crcs(index) == expected
    writer.transport.disconnect(peer)


def test_a_sealed_aux_row_verifies_for_its_room_only(writer: Writer, receiver: Receiver) -> None:
    buffers = MetadataBuffers(writer.pool.aux_rows, 4 * LAYOUT.vocab_size)
    slot, room = buffers.allocate(), new_room()
    assert slot is not None
    writer.pool.aux_logits[slot] = torch.randn(LAYOUT.vocab_size)
    assert receiver.ask("verify", 2, room.hex()) == "Integrity"
    buffers.seal(slot, room)
    peer = writer.connect(receiver)
    writer.transport.write(peer, plan_aux_copy(writer.pool, receiver.memory, slot, 2), 10.0)
    assert receiver.ask("verify", 2, room.hex()) == "ok"
    assert receiver.ask("verify", 2, new_room().hex()) == "Integrity"
    writer.transport.disconnect(peer)


def test_five_thousand_small_blocks_arrive_or_as_many_as_fit_into_seconds(writer: Writer, receiver: Receiver) -> None:
    rng = random.Random(3)
    num_pages = writer.way.few(900)
    src_pages, dst_pages = rng.sample(range(NUM_PAGES), num_pages), rng.sample(range(NUM_PAGES), num_pages)
    copies = plan_page_copies(writer.pool, receiver.memory, src_pages, dst_pages, LAYERS)
    assert len(copies.src) >= 5000 or num_pages < 900
    peer = writer.connect(receiver)
    writer.transport.write(peer, copies, 30.0)
    for index in range(NUM_REGIONS):
        sent, received = page_crcs(writer.pool, index), receiver.crcs(index)
        assert [received[page] for page in dst_pages] == [sent[page] for page in src_pages]
    writer.transport.disconnect(peer)


def test_bytes_that_are_still_to_be_computed_are_copied_when_they_are(writer: Writer, receiver: Receiver) -> None:
    """The layer is written by work that was launched before the event and has not run yet."""
    if not isinstance(writer.transport, OrderedTransport):
        pytest.skip(f"{writer.kind} is called when its sources are computed")
    peer, layer = writer.connect(receiver), region(writer.pool, 2)
    layer.zero_()
    if writer.kind == "cuda_ipc":
        ready: Ready = Later(lambda: layer[11].fill_(3.5))
    else:
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        layer[11].fill_(3.5)
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the copy below has something to wait for"
        ready = event
    copies = plan_page_copies(writer.pool, receiver.memory, [11], [7], range(1, 2))
    writer.transport.write_after(peer, copies, [ready], 10.0)
    assert receiver.crcs(2)[7] == zlib.crc32(torch.full_like(layer[11].cpu(), 3.5).numpy().data)
    writer.transport.disconnect(peer)


def test_a_copy_out_of_range_is_refused_and_the_peer_stays_usable(writer: Writer, receiver: Receiver) -> None:
    peer, memory, pool = writer.connect(receiver), receiver.memory, writer.pool
    before = receiver.crcs(0)
    arena_end = memory.arena_base + memory.arena_bytes
    for copies in (
        CopyList([pool.arena_base], [arena_end - 4], [8]),
        CopyList([pool.arena_base], [memory.arena_base - 1], [8]),
        CopyList([pool.arena_base + pool.arena_bytes], [memory.arena_base], [8]),
    ):
        with pytest.raises(WriteError, match="outside") as caught:
            writer.transport.write(peer, copies, 5.0)
        assert caught.value.settled
    assert receiver.crcs(0) == before
    writer.transport.write(peer, plan_page_copies(pool, memory, [1], [5], LAYERS), 5.0)
    assert receiver.crcs(0)[5] == page_crcs(pool, 0)[1]
    writer.transport.disconnect(peer)


@pytest.mark.usefixtures("on_one_host")
def test_kill_9_of_the_peer_ends_the_write_and_a_fresh_peer_is_served(writer: Writer, own_receiver: Receiver) -> None:
    peer = writer.connect(own_receiver)
    copies = plan_page_copies(writer.pool, own_receiver.memory, range(NUM_PAGES), range(NUM_PAGES), LAYERS)
    is_writing = threading.Event()
    errors: list[WriteError] = []

    def run() -> None:
        try:
            while True:
                writer.transport.write(peer, copies, 10.0)
                is_writing.set()
        except WriteError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_writing.wait(20)
    own_receiver.kill()
    started_s = time.monotonic()
    thread.join(15)
    assert not thread.is_alive() and len(errors) == 1
    assert time.monotonic() - started_s < 6
    assert writer.transport.settle(peer, 5.0)
    with pytest.raises(TransferFailed):
        writer.connect(own_receiver)
    writer.transport.disconnect(peer)

    fresh = Receiver(writer.way)
    new_peer = writer.connect(fresh)
    writer.transport.write(new_peer, plan_page_copies(writer.pool, fresh.memory, [9], [4], LAYERS), 10.0)
    assert fresh.crcs(3)[4] == page_crcs(writer.pool, 3)[9]
    writer.transport.disconnect(new_peer)
    assert fresh.end() == 0


@pytest.mark.usefixtures("on_one_host")
@pytest.mark.parametrize("breaks", [False, True], ids=["connected", "broken"])
def test_a_frozen_peer_is_settled_only_after_it_ran_on_and_then_nothing_lands(
    writer: Writer, own_receiver: Receiver, breaks: bool
) -> None:
    """`breaks`: our end of the connection ends meanwhile; the peer's kernel has bytes that its process has not read."""
    if writer.kind not in ("mooncake", "nixl"):
        pytest.skip(f"{writer.kind} writes do not need the peer to run")
    if breaks and writer.kind != "mooncake":
        pytest.skip("NIXL writes of broken connections are settled by the peer's death alone")
    peer, pool, pages = writer.connect(own_receiver), writer.pool, range(NUM_PAGES)
    copies = plan_page_copies(pool, own_receiver.memory, pages, pages, LAYERS)
    assert copies.nbytes > 16 << 20
    own_receiver.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WriteError) as caught:
        writer.transport.write(peer, copies, 1.0)
    assert not caught.value.settled
    if breaks:
        break_connections()
    assert not writer.transport.settle(peer, 0.1)
    own_receiver.process.send_signal(signal.SIGCONT)
    settle_in_looks(writer, peer)
    for index in range(NUM_REGIONS):  # at once: what was sent from here on would be this
        region(pool, index).fill_(7.0)
    late = page_crcs(pool, 0)[0]
    seen = [own_receiver.crcs(index) for index in range(NUM_REGIONS)]
    assert not any(late in crcs for crcs in seen)
    for _ in range(2):
        assert [own_receiver.crcs(index) for index in range(NUM_REGIONS)] == seen
    for index in range(NUM_REGIONS):
        region(pool, index).normal_()
    writer.transport.write(peer, plan_page_copies(pool, own_receiver.memory, [0], [0], LAYERS), 10.0)
    assert own_receiver.crcs(0)[0] == page_crcs(pool, 0)[0]
    writer.transport.disconnect(peer)


@pytest.mark.parametrize("trouble", ["slow", "silent", "broken"])
def test_a_write_that_the_network_stopped_settles_when_it_is_back_and_the_pair_goes_on(
    writer: Writer, troubled: Network, own_receiver: Receiver, trouble: str
) -> None:
    """Who waits for it is not busy: in seconds of trouble this thread takes a fraction of a second of CPU."""
    pool, pages = writer.pool, range(NUM_PAGES)
    peer = writer.connect(own_receiver)
    troubled.set("p0", "d0", rate_bytes_s=125_000, dropped=trouble == "silent")
    copies = plan_page_copies(pool, own_receiver.memory, pages, pages, LAYERS)
    cpu_s = time.thread_time()
    if trouble == "broken":
        threading.Timer(0.5, break_connections).start()
    with pytest.raises(WriteError) as caught:
        writer.transport.write(peer, copies, 1.0)
    assert not caught.value.settled
    for _ in range(20):
        assert not writer.transport.settle(peer, 0.02) or trouble == "broken"
        time.sleep(0.1)
    assert time.thread_time() - cpu_s < 1.0
    troubled.heal()
    settle_in_looks(writer, peer)
    seen = [own_receiver.crcs(index) for index in range(NUM_REGIONS)]
    for index in range(NUM_REGIONS):
        region(pool, index).normal_()
    assert [own_receiver.crcs(index) for index in range(NUM_REGIONS)] == seen
    writer.transport.write(peer, plan_page_copies(pool, own_receiver.memory, [3], [8], LAYERS), 10.0)
    assert own_receiver.crcs(2)[8] == page_crcs(pool, 2)[3]
    writer.transport.disconnect(peer)


@pytest.mark.usefixtures("on_one_host")
def test_a_process_with_a_transfer_thread_exits_with_code_0(writer: Writer, own_receiver: Receiver) -> None:
    memory = msgspec.msgpack.encode(own_receiver.memory).hex()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "send", writer.kind, writer.way.address("p0")],
        input=memory + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "sent"), done.stderr
    assert own_receiver.end() == 0


def test_reconnecting_leaves_no_descriptor_mapping_or_shared_file(writer: Writer, receiver: Receiver) -> None:
    copies = plan_page_copies(writer.pool, receiver.memory, [1, 5], [2, 9], LAYERS)

    def once() -> tuple[int, int]:
        peer = writer.connect(receiver)
        writer.transport.write(peer, copies, 10.0)
        writer.transport.disconnect(peer)
        writer.transport.disconnect(peer)
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:chitu-kv")

    shared_before = sorted(os.listdir("/dev/shm"))
    counts = [once() for _ in range(20)]
    assert counts[-1] == counts[1]
    assert sorted(os.listdir("/dev/shm")) == shared_before


def test_a_write_after_disconnect_is_refused(writer: Writer, receiver: Receiver) -> None:
    peer = writer.connect(receiver)
    writer.transport.disconnect(peer)
    with pytest.raises(WriteError, match="disconnected"):
        writer.transport.write(peer, plan_page_copies(writer.pool, receiver.memory, [1], [2], LAYERS), 5.0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("inode", "1", "inode"),
        ("start_time", "1", "another one"),
        ("host_id", "elsewhere", "not a process of this host"),
        ("fd", "9999", "cannot map"),
        ("fd", "-1", "negative"),
        ("pid", "nobody", "not well formed"),
        ("offset", str(1 << 40), "too few"),
    ],
)
def test_shm_refuses_a_session_that_names_another_file(name: str, value: str, words: str) -> None:
    pool, transport = new_pool(), ShmTransport()
    transport.register(pool.arena_base, pool.arena_bytes)
    memory, session = rank_memory(pool, 0, [transport.local_session()]), transport.local_session()
    transport.disconnect(transport.connect(memory, session))
    wrong = TransportSession(session.transport, session.session_id, {**session.attributes, name: value})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferFailed, match=words):
        transport.connect(memory, wrong)
    assert len(os.listdir("/proc/self/fd")) == before
    transport.close()
    pool.close()


def test_shm_refuses_a_session_that_names_an_ordinary_file_of_the_process(tmp_path: Path) -> None:
    pool, transport = new_pool(), ShmTransport()
    transport.register(pool.arena_base, pool.arena_bytes)
    memory, session = rank_memory(pool, 0, [transport.local_session()]), transport.local_session()
    with (tmp_path / "precious").open("w+b") as file:
        file.truncate(pool.arena_bytes)
        info = os.fstat(file.fileno())
        named = {**session.attributes, "fd": str(file.fileno()), "inode": str(info.st_ino), "offset": "0"}
        with pytest.raises(TransferFailed, match="no anonymous shared file"):
            transport.connect(memory, TransportSession(session.transport, session.session_id, named))
    transport.close()
    pool.close()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("start_time", "1", "another one"),
        ("host_id", "elsewhere", "not a process of this host"),
        ("pid", "nobody", "not well formed"),
        ("handle", "xyz", "not well formed"),
        ("handle", "00" * 64, "cannot be mapped"),
        ("offset", str(1 << 40), "do not fit"),
        ("offset", "-1", "do not fit"),
    ],
)
def test_cuda_ipc_refuses_a_session_that_names_other_memory(name: str, value: str, words: str) -> None:
    pool, transport = new_pool(), new_transport("cuda_ipc")
    transport.register(pool.arena_base, pool.arena_bytes)
    memory, session = rank_memory(pool, 0, [transport.local_session()]), transport.local_session()
    transport.disconnect(transport.connect(memory, session))
    wrong = TransportSession(session.transport, session.session_id, {**session.attributes, name: value})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferFailed, match=words):
        transport.connect(memory, wrong)
    assert len(os.listdir("/proc/self/fd")) == before
    transport.close()
    pool.close()


def test_memory_that_is_no_shared_file_can_be_a_source_but_has_no_session() -> None:
    buffer = bytearray(1 << 20)
    base = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
    transport = ShmTransport()
    transport.register(base, len(buffer))
    with pytest.raises(TransferFailed, match="shared file"):
        transport.local_session()
    with pytest.raises(TransferFailed, match="not host memory"):
        transport.register(1 << 46, 4096)
