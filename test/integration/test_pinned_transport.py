"""`shm` between pools of GPUs, by segments in host memory of D: two real processes, twins of driver and copies."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cuda_ipc_twin import FileDriver, HostCopier, cuda_ipc_twin
from pin_twin import DeviceBlocks, SecondMappings, arena_twin, pinned_twin
from transport_process import LAYOUT, NUM_PAGES, new_pool, page_crcs, region

from chitu.errors import MissingDependency, TransferFailed
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.register_memory import register_memory
from chitu.kv_transfer.staging.area import StagingArea
from chitu.kv_transfer.staging.copier import DeviceCopier, reaches_segments
from chitu.kv_transfer.staging.packing import pack_pages, pack_row, turned
from chitu.kv_transfer.tensor_parallel.shard_writer import open_shards
from chitu.kv_transfer.transports.cuda_ipc.driver import Exported
from chitu.kv_transfer.transports.cuda_ipc.transfer_engine import CudaIpcTransport
from chitu.kv_transfer.transports.host_memory import mapping_of
from chitu.kv_transfer.transports.mooncake.transfer_engine import MooncakeTransport
from chitu.kv_transfer.transports.shm.pinned_engine import PinnedPeer, PinnedShmTransport
from chitu.kv_transfer.transports.shm.transfer_engine import ShmTransport
from chitu.kv_transfer.transports.transport import (
    CopyList,
    OrderedTransport,
    Transport,
    WriteError,
    gathers,
    reaches_pages,
)
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo, RankMemory, StagingMemory, TransportSession

pytestmark = pytest.mark.emulated

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
        ("start_time", "1", "another process"),
        ("host_id", "elsewhere", "no staging memory for a process of this host"),
        ("memory", "nothing", "no staging memory"),
        ("fd", "9999", "cannot map"),
        ("pid", "nobody", "malformed session"),
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


class NoHandles(FileDriver):
    """A driver whose memory cannot be shared (expandable segments), or cannot be mapped (a GPU that P does not see)."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self._fails = fails

    def export(self, address: int) -> Exported:
        if self._fails == "export":
            raise TransferFailed("cuda: this memory cannot be shared")
        return super().export(address)

    def open(self, handle: bytes) -> int:
        raise TransferFailed("cuda: the peer's memory cannot be mapped")


@pytest.mark.parametrize("fails", ["export", "open"])
def test_where_cuda_ipc_cannot_be_had_p_takes_the_segments(prefill: Prefill, fails: str) -> None:
    """As `auto` offers them on GPUs, in this order. D cannot share its pool, or P cannot map it."""
    pool = new_pool()
    arena, driver = arena_twin(1 << 20, pool)
    area = StagingArea(arena.base, 1 << 18, 4, arena.base, arena.nbytes)
    of_d: list[Transport] = [CudaIpcTransport(NoHandles(fails), HostCopier()), pinned_twin(pool)[0]]
    sessions = register_memory(pool, of_d, area)
    assert [session.transport for session in sessions] == (["shm"] if fails == "export" else ["cuda_ipc", "shm"])
    memory = msgspec.structs.replace(rank_memory(pool, 0, sessions), staging=area.memory())
    info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, 1, "127.0.0.1", 1, LAYOUT, (memory,), (0, 1))
    own = prefill.pool
    of_p: list[Transport] = [CudaIpcTransport(NoHandles(fails), HostCopier()), pinned_twin(own)[0]]
    register_memory(own, of_p)
    writer = open_shards(info, LAYOUT, 0, own, of_p)
    link = writer.main_link
    assert link.transport.name == "shm" and not reaches_pages(link.handle) and reaches_segments(link.handle, memory)
    pieces = pack_pages(own, [3, 8, 9], range(2), area.address(1))
    link.transport.write(link.handle, pieces, 5.0)
    DeviceCopier(DeviceBlocks(driver), [arena]).copy(turned(pack_pages(pool, [6, 1, 4], range(2), area.address(1))))
    assert torch.equal(pool.v[1][[6, 1, 4]], own.v[1][[3, 8, 9]])
    writer.close()
    for transport in (*of_d, *of_p):
        transport.close()
    arena.close()
    pool.close()


def test_mooncake_without_cuda_offers_segments_on_the_host_and_nothing_else() -> None:
    """Memory that no process can read stands for a GPU's: it is no host memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    unreadable = libc.mmap(None, ctypes.c_size_t(1 << 16), 0, 0x22, -1, ctypes.c_long(0))  # PROT_NONE, anonymous
    assert mapping_of(unreadable, 1 << 16) is None
    try:
        ends = [MooncakeTransport("127.0.0.1") for _ in range(2)]
    except MissingDependency as error:
        pytest.skip(str(error))
    arenas = [arena_twin(1 << 16)[0] for _ in range(2)]
    areas = [StagingArea(arena.base, 1 << 14, 4, arena.base, arena.nbytes) for arena in arenas]
    memory = RankMemory(0, (), unreadable, 1 << 16, (unreadable,), 64, 1, unreadable + 4096, 64, 1)
    sessions = []
    for end, area in zip(ends, areas, strict=True):
        transports: list[Transport] = [end]
        if not sessions:
            with pytest.raises(TransferFailed, match="no CUDA"):
                end.register(unreadable, 1 << 16)
        sessions.append(register_memory(memory, transports, area)[0])
        assert transports == [end] and sessions[-1].attributes["memory"] == "staging"
    theirs = msgspec.structs.replace(memory, sessions=(sessions[1],), staging=areas[1].memory())
    peer = ends[0].connect(theirs, sessions[1])
    assert not reaches_pages(peer) and reaches_segments(peer, theirs)
    ctypes.memset(areas[0].address(1), 7, 5000)
    ends[0].write(peer, CopyList([areas[0].address(1)], [areas[1].address(2)], [5000]), 5.0)
    assert ctypes.string_at(areas[1].address(2), 5001) == b"\x07" * 5000 + b"\0"
    with pytest.raises(WriteError, match="outside"):
        ends[0].write(peer, CopyList([areas[0].address(1)], [unreadable], [64]), 5.0)
    with pytest.raises(TransferFailed, match="no staging"):
        ends[0].connect(msgspec.structs.replace(theirs, staging=None), sessions[1])
    for end, arena in zip(ends, arenas, strict=True):
        end.close()
        arena.close()
