"""Shared parts of the tests of transports between two processes: the ways from this process to a receiver, on one host
and between hosts of `test/network.py`, and both ends. Fixtures are in `conftest.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from network import DEVICE, Network
from nursery import NAMESPACE, nursery
from transport_process import LAYOUT, NUM_PAGES, new_pool, new_transport, region

from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.shard_writer import pair_regions, plan_page_copies
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport
from chitu.protocol import RankMemory

LAYERS = range(LAYOUT.num_layers)
NUM_REGIONS = 2 * LAYOUT.num_layers
HEALED_S = 20.0
"""Time to recover on a busy machine once the network no longer delays anything."""


@dataclass(slots=True, frozen=True)
class Way:
    """Way from this process to a receiver. `round_trip_s`: that of the network between them; 0: on one host."""

    kind: str
    round_trip_s: float = 0.0
    is_ipv6: bool = False
    network: Network | None = None

    @contextlib.contextmanager
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
        """Set up the way. If it has a network, this thread and those it starts are on host `p0` meanwhile."""
        if not self.round_trip_s:
            yield self
            return
        with Network(["p0", "d0"], delay_s=self.round_trip_s / 2) as network, network.inside("p0"):
            way = Way(self.kind, self.round_trip_s, self.is_ipv6, network)
            monkeypatch.setenv("UCX_NET_DEVICES", way.device)
            yield way

    def address(self, host: str) -> str:
        if self.network is None:
            return "127.0.0.1"
        return self.network.address_6(host) if self.is_ipv6 else self.network.address(host)

    @property
    def device(self) -> str:
        """Network device for UCX."""
        return "lo" if self.network is None else DEVICE

    def few(self, number: int) -> int:
        """Return the number of pieces, fewer if each may take a round trip."""
        return number if not self.round_trip_s else max(3, min(number, round(0.3 / self.round_trip_s)))

    @property
    def many_pages(self) -> range:
        """All pages on one host. Between hosts some megabytes: more than sockets hold for a peer that does not read,
        and no more work for the forwarder than necessary."""
        return range(NUM_PAGES if self.network is None else 200)


ON_ONE_HOST = [
    *(pytest.param(Way(kind), id=kind) for kind in ("shm", "mooncake", "nixl")),
    pytest.param(Way("cuda_ipc"), id="cuda_ipc", marks=pytest.mark.emulated),
    pytest.param(Way("cuda_ipc_gpu"), id="cuda_ipc_gpu", marks=pytest.mark.gpu),
]
LIBRARIES = [pytest.param(Way(kind), id=kind) for kind in ("mooncake", "nixl")]
BETWEEN_HOSTS = [
    pytest.param(Way("mooncake", 0.04), id="mooncake-40ms"),
    pytest.param(Way("nixl", 0.04, is_ipv6=True), id="nixl-40ms-ipv6"),
    *(pytest.param(Way(kind, 0.002), id=f"{kind}-2ms", marks=pytest.mark.by_hand) for kind in ("mooncake", "nixl")),
    # Mooncake reads its family once a process, so these run by themselves: -k mooncake-ipv6 --by-hand
    pytest.param(Way("mooncake", 0.002, is_ipv6=True), id="mooncake-ipv6", marks=pytest.mark.by_hand),
]


class Process:
    """A process of the nursery, on a host of the way, with pipes to it."""

    def __init__(self, way: Way, host: str, *words: object) -> None:
        (stdin, tell), (answer, stdout) = os.pipe(), os.pipe()
        given = {0: stdin, 1: stdout}
        if way.network is not None:
            given[NAMESPACE] = os.open(way.network.namespace(host), os.O_RDONLY)
        env = {**os.environ, "UCX_NET_DEVICES": way.device}
        self._child = nursery().fork("transport_process", [str(word) for word in words], given, env)
        for descriptor in given.values():
            os.close(descriptor)
        self.stdin, self.stdout = os.fdopen(tell, "w"), os.fdopen(answer)
        self.pid = self._child.pid
        self.send_signal = self._child.send_signal

    def answer(self) -> str:
        line = self.stdout.readline()
        assert line, f"the process ended with {self.wait()}"
        return line.strip()

    def tell(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def wait(self) -> int:
        """Return the exit code; negative: the signal that ended it."""
        code = self._child.wait()
        self.stdin.close()
        self.stdout.close()
        return code


class Receiver:
    """A child process with a registered pool, on host `d0` if there is a network."""

    def __init__(self, way: Way) -> None:
        self.process = Process(way, "d0", "receive", way.kind, way.address("d0"))
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self.process.answer()), type=RankMemory)

    def ask(self, *words: object) -> str:
        self.process.tell(" ".join(map(str, words)))
        return self.process.answer()

    def crcs(self, index: int) -> list[int]:
        return [int(word) for word in self.ask("crc", index).split()]

    def all_crcs(self) -> list[list[int]]:
        return [self.crcs(index) for index in range(NUM_REGIONS)]

    def end(self) -> int:
        """End the process and return its exit code; that of a killed process is its own."""
        if not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.wait()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Writer:
    """This process: a pool of random bytes and a transport."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.kind = way.kind
        self.pool: KVPool = new_pool(way.kind)
        self.transport: Transport = new_transport(way.kind, way.address("p0"))
        self.transport.register(self.pool.arena_base, self.pool.arena_bytes)
        self.fill()

    def fill(self) -> None:
        """Fill all pages with other bytes."""
        for index in range(NUM_REGIONS):
            region(self.pool, index).normal_()

    def receiver(self) -> Receiver:
        return Receiver(self.way)

    def connect(self, receiver: Receiver) -> PeerHandle:
        return self.transport.connect(receiver.memory, receiver.memory.sessions[0])

    def copies(self, receiver: Receiver, src_pages: Sequence[int], dst_pages: Sequence[int]) -> CopyList:
        """Plan copies of all layers."""
        return plan_page_copies(pair_regions(self.pool, receiver.memory), src_pages, dst_pages, range(NUM_REGIONS))


class Trouble:
    """Marks the time from which something holds up the peer or the network."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._started_s = time.monotonic()
        self._started_cpu_s = time.process_time()

    @property
    def cpu_share(self) -> float:
        """Return the share of a core that all threads of this process, the libraries' too, have used since."""
        return (time.process_time() - self._started_cpu_s) / (time.monotonic() - self._started_s)

    def fence_after(self, peer: PeerHandle) -> None:
        """Fence after the trouble is over, as the product does: in short attempts, each of which continues the last.
        TCP retries only after as long as the trouble lasted, and may have taken that for the round trip, so that it
        waits as long again."""
        now_s = time.monotonic()
        end_s = now_s + 2 * (now_s - self._started_s) + HEALED_S
        while not self._writer.transport.fence(peer, 0.02):
            assert time.monotonic() < end_s, "the writes are not fenced"
            time.sleep(0.02)
