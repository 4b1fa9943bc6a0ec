"""`shm` between pools of GPUs, by segments in host memory of D: two real processes, twins of driver and copies."""

from __future__ import annotations

import ctypes
import gc
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
from chitu.kv_transfer.shard_writer import TransferKVChunk, open_shards, pair_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.cuda_ipc import CudaIpcTransport
from chitu.kv_transfer.transports.local import register_memory
from chitu.kv_transfer.transports.mapped import APART, mapping_of
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.segments import SEGMENTS, DeviceCopier, Scatterer, StagedPeer, StagingArea
from chitu.kv_transfer.transports.shm import PinnedShmTransport, ShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd
from chitu.kv_transfer.transports.transport import (
    CopyList,
    OrderedTransport,
    Transport,
    WriteError,
    gathers,
    reaches_pages,
)
from chitu.ops.cuda_driver import Exported
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo, RankMemory, TransportSession
from chitu.tools.bench.transfer import INCARNATION, PipeMessages

pytestmark = [pytest.mark.emulated, pytest.mark.transfer]

PROGRAM = Path(__file__).with_name("pinned_process.py")


class Decode:
    """A child process with segments."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self.process.stdout.readline()), type=RankMemory)
        self.pipe: PipeMessages | None = None
        """Pipe to the transport that talks to this process."""

    def ask(self, *words: object) -> str:
        assert self.pipe is not None
        self.pipe.say(" ".join(map(str, words)))
        return self.pipe.line()

    @property
    def arena(self) -> tuple[int, int]:
        """Return base and size of the memory that holds its segments."""
        base, nbytes = map(int, self.memory.sessions[0].attributes[APART].split(":"))
        return base, nbytes

    def end(self) -> int:
        assert self.pipe is not None
        self.pipe.close()
        return self.process.wait(20)


class Prefill:
    """This process as a P."""

    def __init__(self) -> None:
        self.pool: KVPool = new_pool()
        self.inner, self.driver = pinned_twin(self.pool)
        end = StagingEnd("auto", self.pool, DeviceCopier(DeviceBlocks(self.driver)), None)
        self.transport = StagedTransport(self.inner, end)
        self.transport.register(self.pool.arena_base, self.pool.arena_bytes)
        torch.manual_seed(2)
        for index in range(2 * LAYOUT.num_layers):
            region(self.pool, index).normal_()

    def connect(self, decode: Decode) -> StagedPeer:
        if decode.pipe is None:
            assert decode.process.stdin is not None and decode.process.stdout is not None
            decode.pipe = PipeMessages(self.transport, decode.process.stdin, decode.process.stdout)
        self.transport.attach(decode.pipe.send)
        peer = self.transport.connect(decode.memory, decode.memory.sessions[0])
        self.transport.bind(peer, INCARNATION)
        return peer

    def pages(self, decode: Decode, own: list[int], theirs: list[int], layers: range) -> CopyList:
        return plan_page_copies(pair_regions(self.pool, decode.memory), own, theirs, LAYOUT.regions_of(layers))


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    torch.set_num_threads(1)
    made = Prefill()
    yield made
    made.transport.close()


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    assert made.end() == 0


def test_pages_are_gathered_straight_into_segments_and_scattered_from_there(prefill: Prefill, decode: Decode) -> None:
    rng = random.Random(4)
    count = 60
    src_pages, dst_pages = ([*range(20), *rng.sample(range(100, NUM_PAGES), count - 20)] for _ in range(2))
    layers = range(1, 3)
    peer = prefill.connect(decode)
    before = [[int(word) for word in decode.ask("crc", index).split()] for index in range(6)]
    assert decode.ask("pinned").strip() == "0", "nothing is pinned before the first copy"
    assert prefill.driver.num_pinned == 1
    prefill.transport.write(peer, prefill.pages(decode, src_pages, dst_pages, layers), 5.0)
    assert decode.ask("pinned").strip() == "1"
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
    prefill.transport.write(peer, plan_aux_copy(prefill.pool, decode.memory, 1, 3), 5.0)
    assert decode.ask("row", 3).strip() == str(int(prefill.pool.aux[1].long().sum()))
    prefill.transport.disconnect(peer)


def test_it_gathers_by_itself_waits_on_the_device_and_reaches_no_page(prefill: Prefill, decode: Decode) -> None:
    peer = prefill.connect(decode)
    assert gathers(prefill.inner) and not reaches_pages(peer.inner) and peer.must_stage
    assert isinstance(prefill.inner, OrderedTransport) and isinstance(prefill.transport, OrderedTransport)

    class Later:
        def synchronize(self) -> None:
            region(prefill.pool, 0)[5].fill_(2.5)

        def wait(self, stream: object = None) -> None:
            raise AssertionError("the twin has no stream")

    prefill.transport.write_after(peer, prefill.pages(decode, [5], [9], range(1)), [Later()], 5.0)
    assert int(decode.ask("crc", 0).split()[9]) == page_crcs(prefill.pool, 0)[5]
    prefill.transport.disconnect(peer)


def test_what_lies_outside_the_segments_is_refused(prefill: Prefill, decode: Decode) -> None:
    peer, pool, (base, nbytes) = prefill.connect(decode).inner, prefill.pool, decode.arena
    for copies in (
        CopyList([pool.arena_base], [base + nbytes - 4], [8]),
        CopyList([pool.arena_base], [base - 1], [8]),
        CopyList([pool.arena_base], [decode.memory.region_bases[0]], [8]),
        CopyList([pool.arena_base + pool.arena_bytes], [base], [8]),
    ):
        with pytest.raises(WriteError, match="outside") as caught:
            prefill.inner.write(peer, copies, 5.0)
        assert caught.value.fenced
    prefill.inner.disconnect(peer)
    with pytest.raises(WriteError, match="disconnected"):
        prefill.inner.write(peer, CopyList([pool.arena_base], [base], [8]), 5.0)


def test_kill_9_of_d_is_an_error_and_a_fresh_d_is_served(prefill: Prefill) -> None:
    first = Decode()
    peer = prefill.connect(first)
    first.process.kill()
    first.process.wait()
    copies = prefill.pages(first, [1, 7], [3, 4], range(1))
    with pytest.raises(WriteError, match="has ended") as caught:
        prefill.transport.write(peer, copies, 5.0)
    assert caught.value.fenced and prefill.transport.fence(peer, 1.0)
    with pytest.raises(TransferFailed):
        prefill.connect(first)
    prefill.transport.disconnect(peer)
    second = Decode()
    peer = prefill.connect(second)
    prefill.transport.write(peer, prefill.pages(second, [1, 7], [3, 4], range(1)), 5.0)
    assert [int(second.ask("crc", 0).split()[page]) for page in (3, 4)] == [
        page_crcs(prefill.pool, 0)[page] for page in (1, 7)
    ]
    prefill.transport.disconnect(peer)
    assert second.end() == 0 and prefill.driver.num_pinned == 0


def held() -> tuple[int, int]:
    """Return the open descriptors and the mapped segments, without those of earlier tests that are garbage by now."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("chitu-staging")


def test_connecting_again_and_again_leaves_nothing_mapped(prefill: Prefill, decode: Decode) -> None:
    def once() -> tuple[int, int]:
        prefill.transport.disconnect(prefill.connect(decode))
        return held()

    counts = [once() for _ in range(10)]
    assert counts[-1] == counts[0]


def test_memory_that_cannot_be_pinned_is_refused_and_nothing_stays_mapped(prefill: Prefill, decode: Decode) -> None:
    class Refusing(SecondMappings):
        def pin(self, address: int, nbytes: int) -> int:
            raise TransferFailed("cuda: 4096 bytes of host memory cannot be pinned (ulimit -l?): out of memory")

    transport = PinnedShmTransport(Refusing(prefill.pool), HostCopier())
    before = held()
    with pytest.raises(TransferFailed, match="ulimit"):
        transport.connect(decode.memory, decode.memory.sessions[0])
    assert held() == before


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
    rest = {name: value for name, value in session.attributes.items() if name not in (SEGMENTS, APART)}
    without = msgspec.structs.replace(session, attributes=rest)
    with pytest.raises(TransferFailed, match="announced no staging"):
        prefill.transport.connect(decode.memory, without)
    # Another P has all segments.
    other = msgspec.structs.replace(session, attributes={**session.attributes, "segment_owners": "1"})
    with pytest.raises(TransferFailed, match="granted no segment"):
        prefill.transport.connect(decode.memory, other)
    assert prefill.driver.num_pinned == 0


def test_p_has_no_memory_to_offer_and_pools_on_the_host_do_not_take_segments_for_pages(prefill: Prefill) -> None:
    """Only D's session can be reached, and only by a transport of the same kind."""
    own = prefill.transport.local_session()
    assert SEGMENTS not in own.attributes
    assert own.transport == "shm" and not prefill.transport.can_reach(own)
    plain = ShmTransport()
    assert not plain.can_reach(own)
    pool = new_pool()
    plain.register(pool.arena_base, pool.arena_bytes)
    assert plain.can_reach(plain.local_session()) and not prefill.transport.can_reach(plain.local_session())
    plain.close()


def test_a_transport_that_can_use_the_segments_alone_stays(prefill: Prefill) -> None:
    """It is left out if there are no segments."""
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

    end = StagingEnd("auto", pool, DeviceCopier(HostCopier()), area)
    transports: list[Transport] = [StagedTransport(transport, end) for transport in made()]
    sessions = register_memory(pool, transports)
    assert [session.attributes["memory"] for session in sessions] == ["staging", "staging"]
    assert rank_memory(pool, 0, sessions).sessions == sessions
    for transport in transports:
        transport.close()
    transports = made()
    (session,) = register_memory(pool, transports)
    assert session.attributes["memory"] == "nothing" and len(transports) == 1
    transports[0].close()
    arena.close()


def test_segments_apart_from_the_pool_are_for_those_who_reach_them(prefill: Prefill) -> None:
    """cuda_ipc maps the pool alone: it must not be asked to stage into D's host memory."""
    pool = prefill.pool
    for has_arena in (True, False):
        arena, _ = arena_twin(1 << 16)
        apart = StagingArea(arena.base, 1 << 14, 4, arena.base, arena.nbytes)
        area = apart if has_arena else StagingArea(pool.aux_base, 64, 2, pool.arena_base, pool.arena_bytes)
        copier = DeviceCopier(HostCopier())
        scatterer = Scatterer(pool, area, copier, [0])
        theirs = StagingEnd("auto", pool, copier, area, scatterer=scatterer, is_pinned_late=True)
        of_d = StagedTransport(cuda_ipc_twin(), theirs)
        of_p = StagedTransport(cuda_ipc_twin(), StagingEnd("auto", pool, copier, None))
        for end in (of_d, of_p):
            end.register(pool.arena_base, pool.arena_bytes)
        session = of_d.local_session()
        assert SEGMENTS in session.attributes
        peer = of_p.connect(rank_memory(pool, 0, [session]), session)
        assert (peer.segments is None) is has_arena and not peer.must_stage
        of_p.close()
        of_d.close()
        arena.close()


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
    """Transports are in the order in which `auto` offers them on GPUs. D cannot share its pool, or P cannot map it."""
    pool = new_pool()
    arena, driver = arena_twin(1 << 20, pool)
    area = StagingArea(arena.base, 1 << 18, 4, arena.base, arena.nbytes)
    copier = DeviceCopier(DeviceBlocks(driver), [arena])
    scatterer = Scatterer(pool, area, copier, [0])
    theirs = StagingEnd("auto", pool, copier, area, 0, scatterer, arena, is_pinned_late=True)
    opened = CudaIpcTransport(NoHandles(fails), HostCopier()), pinned_twin(pool)[0]
    of_d: list[Transport] = [StagedTransport(transport, theirs) for transport in opened]
    sessions = register_memory(pool, of_d)
    assert [session.transport for session in sessions] == (["shm"] if fails == "export" else ["cuda_ipc", "shm"])
    memory = rank_memory(pool, 0, sessions)
    info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, 1, "127.0.0.1", 1, LAYOUT, (memory,))
    own = prefill.pool
    ours = StagingEnd("auto", own, DeviceCopier(DeviceBlocks(prefill.driver)), None)
    opened = CudaIpcTransport(NoHandles(fails), HostCopier()), pinned_twin(own)[0]
    of_p: list[Transport] = [StagedTransport(transport, ours) for transport in opened]
    register_memory(own, of_p)

    def to_d(incarnation: int, payload: bytes) -> None:
        of_d[-1].on_message(0, 7, payload)  # type: ignore[attr-defined]
        assert scatterer.jobs.run_one()

    of_p[-1].attach(to_d)  # type: ignore[attr-defined]
    of_d[-1].attach(lambda incarnation, payload: of_p[-1].on_message(0, 1, payload))  # type: ignore[attr-defined]
    writer = open_shards(info, LAYOUT, 0, own, of_p)
    assert writer.transport == "shm"
    writer.write_pages([TransferKVChunk(0, 2, 0, 3)], [3, 8, 9], [6, 1, 4], 5.0)
    assert torch.equal(pool.v[1][[6, 1, 4]], own.v[1][[3, 8, 9]])
    writer.close()
    for transport in (*of_d, *of_p):
        transport.close()
    arena.close()


def test_mooncake_without_cuda_offers_segments_on_the_host_and_nothing_else() -> None:
    """Memory that no process can read stands for a GPU's: it is not host memory."""
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
    memory = RankMemory(0, (), unreadable, 1 << 16, (unreadable,), (64,), 1, unreadable + 4096, 64, 1)
    copier = DeviceCopier(HostCopier())
    staged, sessions = list[StagedTransport](), []
    for end, area in zip(ends, areas, strict=True):
        if not sessions:
            with pytest.raises(TransferFailed, match="no CUDA"):
                end.register(unreadable, 1 << 16)
        scatterer = Scatterer(memory, area, copier, [0]) if staged else None
        staged.append(StagedTransport(end, StagingEnd("auto", memory, copier, area, scatterer=scatterer)))
        transports: list[Transport] = [staged[-1]]
        sessions.append(register_memory(memory, transports)[0])
        assert transports == [staged[-1]] and sessions[-1].attributes["memory"] == "staging"
    theirs = msgspec.structs.replace(memory, sessions=(sessions[1],))
    peer = staged[0].connect(theirs, sessions[1])
    assert not reaches_pages(peer.inner) and peer.must_stage and peer.segments is not None
    ctypes.memset(areas[0].address(1), 7, 5000)
    ends[0].write(peer.inner, CopyList([areas[0].address(1)], [areas[1].address(2)], [5000]), 5.0)
    assert ctypes.string_at(areas[1].address(2), 5001) == b"\x07" * 5000 + b"\0"
    with pytest.raises(WriteError, match="outside"):
        ends[0].write(peer.inner, CopyList([areas[0].address(1)], [unreadable], [64]), 5.0)
    without = msgspec.structs.replace(sessions[1], attributes={"protocol": "tcp", "memory": "staging"})
    with pytest.raises(TransferFailed, match="no staging"):
        staged[0].connect(theirs, without)
    for transport in staged:
        transport.close()
    for arena in arenas:
        arena.close()
