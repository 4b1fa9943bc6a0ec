"""`shm` between pools of GPUs, by segments in host memory of D: two real processes, twins of driver and copies."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cuda_ipc_twin import HostCopier, cuda_ipc_twin
from pin_twin import SecondMappings, arena_twin, pinned_twin
from transport_process import LAYOUT, NUM_PAGES, new_pool, page_crcs, region

from chitu.errors import TransferFailed
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.register_memory import register_memory
from chitu.kv_transfer.shm.pinned_engine import PinnedPeer, PinnedShmTransport
from chitu.kv_transfer.shm.transfer_engine import ShmTransport
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.copier import gathers, reaches_pages, reaches_segments
from chitu.kv_transfer.staging.packing import pack_pages, pack_row
from chitu.kv_transfer.transport import CopyList, OrderedTransport, Transport, WriteError
from chitu.messages import RankMemory, StagingMemory, TransportSession

PROGRAM = Path(__file__).with_name("pinned_process.py")


class Decode:
    """A child with segments."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self._answer()), type=RankMemory)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"D ended with {self.process.wait()}"
        return line.strip()

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    @property
    def staging(self) -> StagingMemory:
        assert self.memory.staging is not None
        return self.memory.staging

    def segment(self, index: int) -> int:
        return self.staging.base + index * self.staging.segment_bytes

    def end(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


class Prefill:
    """This process."""

    def __init__(self) -> None:
        self.pool: KVPool = new_pool()
        self.transport, self.driver = pinned_twin(self.pool)
        self.transport.register(self.pool.arena_base, self.pool.arena_bytes)
        torch.manual_seed(2)
        for index in range(2 * LAYOUT.num_layers):
            region(self.pool, index).normal_()

    def connect(self, decode: Decode) -> PinnedPeer:
        return self.transport.connect(decode.memory, decode.memory.sessions[0])


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    torch.set_num_threads(1)
    made = Prefill()
    yield made
    made.transport.close()
    made.pool.close()


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    assert made.end() == 0


def test_pages_are_gathered_straight_into_a_segment_and_scattered_from_there(prefill: Prefill, decode: Decode) -> None:
    rng = random.Random(4)
    count = 60
    src_pages, dst_pages = ([*range(20), *rng.sample(range(100, NUM_PAGES), count - 20)] for _ in range(2))
    layers = range(1, 3)
    before = [[int(word) for word in decode.ask("crc", index).split()] for index in range(6)]
    assert decode.ask("pinned") == "0", "nothing is pinned before the first copy"
    peer = prefill.connect(decode)
    assert prefill.driver.num_pinned == 1
    pieces = pack_pages(prefill.pool, src_pages, layers, decode.segment(2))
    assert len(pieces.src) > count and pieces.nbytes <= decode.staging.segment_bytes
    prefill.transport.write(peer, pieces, 5.0)
    assert decode.ask("scatter", 2, 1, 3, *dst_pages) == "ok"
    assert decode.ask("pinned") == "1"
    for index in range(6):
        sent, expected = page_crcs(prefill.pool, index), before[index]
        for src_page, dst_page in zip(src_pages, dst_pages, strict=True):
            if index // 2 in layers:
                expected[dst_page] = sent[src_page]
        assert [int(word) for word in decode.ask("crc", index).split()] == expected
    prefill.transport.disconnect(peer)
    prefill.transport.disconnect(peer)
    assert prefill.driver.num_pinned == 0


def test_a_logits_row_goes_the_same_way(prefill: Prefill, decode: Decode) -> None:
    prefill.pool.aux[1] = torch.randint(0, 255, (prefill.pool.aux_row_bytes,), dtype=torch.uint8)
    peer = prefill.connect(decode)
    prefill.transport.write(peer, pack_row(prefill.pool, 1, decode.segment(0)), 5.0)
    assert decode.ask("row", 0, 3) == str(int(prefill.pool.aux[1].long().sum()))
    prefill.transport.disconnect(peer)


def test_it_gathers_by_itself_waits_on_the_device_and_reaches_no_page(prefill: Prefill, decode: Decode) -> None:
    peer = prefill.connect(decode)
    assert gathers(prefill.transport) and not reaches_pages(peer)
    assert isinstance(prefill.transport, OrderedTransport)

    class Later:
        def synchronize(self) -> None:
            region(prefill.pool, 0)[5].fill_(2.5)

        def wait(self, stream: object = None) -> None:
            raise AssertionError("the twin has no stream")

    pieces = pack_pages(prefill.pool, [5], range(1), decode.segment(1))
    prefill.transport.write_after(peer, pieces, [Later()], 5.0)
    decode.ask("scatter", 1, 0, 1, 9)
    assert int(decode.ask("crc", 0).split()[9]) == page_crcs(prefill.pool, 0)[5]
    prefill.transport.disconnect(peer)


def test_what_lies_outside_the_segments_is_refused(prefill: Prefill, decode: Decode) -> None:
    peer, pool, staging = prefill.connect(decode), prefill.pool, decode.staging
    end = staging.arena_base + staging.arena_bytes
    for copies in (
        CopyList([pool.arena_base], [end - 4], [8]),
        CopyList([pool.arena_base], [staging.arena_base - 1], [8]),
        CopyList([pool.arena_base], [decode.memory.region_bases[0]], [8]),
        CopyList([pool.arena_base + pool.arena_bytes], [staging.base], [8]),
    ):
        with pytest.raises(WriteError, match="outside") as caught:
            prefill.transport.write(peer, copies, 5.0)
        assert caught.value.settled
    prefill.transport.disconnect(peer)
    with pytest.raises(WriteError, match="disconnected"):
        prefill.transport.write(peer, CopyList([pool.arena_base], [staging.base], [8]), 5.0)


def test_kill_9_of_d_is_an_error_and_a_fresh_d_is_served(prefill: Prefill) -> None:
    first = Decode()
    peer = prefill.connect(first)
    first.process.kill()
    first.process.wait()
    pieces = pack_pages(prefill.pool, [1, 7], range(1), first.segment(0))
    with pytest.raises(WriteError, match="has ended") as caught:
        prefill.transport.write(peer, pieces, 5.0)
    assert caught.value.settled and prefill.transport.settle(peer, 1.0)
    with pytest.raises(TransferFailed):
        prefill.connect(first)
    prefill.transport.disconnect(peer)
    second = Decode()
    peer = prefill.connect(second)
    prefill.transport.write(peer, pack_pages(prefill.pool, [1, 7], range(1), second.segment(0)), 5.0)
    second.ask("scatter", 0, 0, 1, 3, 4)
    assert [int(second.ask("crc", 0).split()[page]) for page in (3, 4)] == [
        page_crcs(prefill.pool, 0)[page] for page in (1, 7)
    ]
    prefill.transport.disconnect(peer)
    assert second.end() == 0 and prefill.driver.num_pinned == 0


def test_connecting_again_and_again_leaves_nothing_mapped(prefill: Prefill, decode: Decode) -> None:
    def once() -> tuple[int, int]:
        prefill.transport.disconnect(prefill.connect(decode))
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("chitu-staging")

    counts = [once() for _ in range(10)]
    assert counts[-1] == counts[0]


def test_memory_that_cannot_be_pinned_is_refused_and_nothing_stays_mapped(prefill: Prefill, decode: Decode) -> None:
    class Refusing(SecondMappings):
        def pin(self, address: int, nbytes: int) -> int:
            raise TransferFailed("cuda: 4096 bytes of host memory cannot be pinned (ulimit -l?): out of memory")

    transport = PinnedShmTransport(Refusing(prefill.pool), HostCopier())
    before = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("chitu-staging")
    with pytest.raises(TransferFailed, match="ulimit"):
        transport.connect(decode.memory, decode.memory.sessions[0])
    assert (len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("chitu-staging")) == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("inode", "1", "inode"),
        ("start_time", "1", "another one"),
        ("host_id", "elsewhere", "no staging memory for a process of this host"),
        ("memory", "nothing", "no staging memory"),
        ("fd", "9999", "cannot map"),
        ("pid", "nobody", "not well formed"),
        ("offset", str(1 << 40), "too few"),
    ],
)
def test_a_session_that_names_other_memory_is_refused(
    prefill: Prefill, decode: Decode, name: str, value: str, words: str
) -> None:
    session = decode.memory.sessions[0]
    wrong = TransportSession(session.transport, session.session_id, {**session.attributes, name: value})
    with pytest.raises(TransferFailed, match=words):
        prefill.transport.connect(decode.memory, wrong)
    without = msgspec.structs.replace(decode.memory, staging=None)
    with pytest.raises(TransferFailed, match="announced no staging"):
        prefill.transport.connect(without, session)
    assert prefill.driver.num_pinned == 0


def test_p_has_no_memory_to_offer_and_pools_on_the_host_do_not_take_segments_for_pages(prefill: Prefill) -> None:
    """Only D's session leads anywhere, and only to a transport of the same kind."""
    own = prefill.transport.local_session()
    assert own.transport == "shm" and not prefill.transport.can_reach(own)
    plain = ShmTransport()
    assert not plain.can_reach(own)
    pool = new_pool()
    plain.register(pool.arena_base, pool.arena_bytes)
    assert plain.can_reach(plain.local_session()) and not prefill.transport.can_reach(plain.local_session())
    plain.close()
    pool.close()


def test_a_transport_that_can_use_the_segments_alone_stays(prefill: Prefill) -> None:
    """And is left out where there are none."""
    arena, _ = arena_twin(1 << 16)
    area = StagingArea(arena.base, 1 << 14, 4, arena.base, arena.nbytes)
    pool = prefill.pool

    class OnlyHost(PinnedShmTransport):
        def register(self, base: int, nbytes: int) -> None:
            if base == pool.arena_base:
                raise TransferFailed("this build has no CUDA")
            super().register(base, nbytes)

    def made() -> list[Transport]:
        return [OnlyHost(SecondMappings(), HostCopier()), pinned_twin(pool)[0]]

    transports = made()
    sessions = register_memory(pool, transports, area)
    assert [session.attributes["memory"] for session in sessions] == ["staging", "staging"]
    assert rank_memory(pool, 0, sessions).sessions == sessions
    for transport in transports:
        transport.close()
    transports = made()
    (session,) = register_memory(pool, transports)
    assert session.attributes["memory"] == "nothing" and len(transports) == 1
    transports[0].close()
    arena.close()


def test_segments_apart_from_the_pool_are_for_those_who_reach_them(prefill: Prefill, decode: Decode) -> None:
    """cuda_ipc maps the pool alone: it must not be told to stage into D's host memory."""
    peer = prefill.connect(decode)
    assert reaches_segments(peer, decode.memory)
    ipc = cuda_ipc_twin()
    ipc.register(prefill.pool.arena_base, prefill.pool.arena_bytes)
    own = rank_memory(prefill.pool, 0, [ipc.local_session()])
    handle = ipc.connect(own, ipc.local_session())
    apart = msgspec.structs.replace(own, staging=decode.staging)
    at_the_tail = StagingMemory(own.arena_base, own.arena_bytes, own.aux_base, 64, 2)
    assert not reaches_segments(handle, own) and not reaches_segments(handle, apart)
    assert reaches_segments(handle, msgspec.structs.replace(own, staging=at_the_tail))
    ipc.close()
    prefill.transport.disconnect(peer)
