"""Staged transfers: the plan, the memory, the parts of an instance, and when staging pays."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from chitu.config.load import load_topology
from chitu.config.staging import StagingPlan, plan_staging
from chitu.config.topology import find_instance
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError, MissingDependency, TransferFailed
from chitu.fake.checksum import ChecksumPool, checksum_layout
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.transports.local import register_memory, wrap_transports
from chitu.kv_transfer.transports.segments import DeviceCopier, HostArena, HostCopier, StagingArea, share_of
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.staged import (
    NEVER,
    OTHERS,
    STAGED_FROM,
    StagedFrom,
    StagedTransport,
    StagingEnd,
    groups_of,
    packed,
    staged_from,
)
from chitu.kv_transfer.transports.transport import CopyList, Transport
from chitu.types import Role

# ----------------------------------------------------------------------------------------------------------------------
# Staging as an instance gets it: copier, segments, and which processes may write to them.


PD = "dp_config.router.pd_disaggregation"
STAGED = f"{PD}.transfer=staged"
SMALL = [f"{PD}.staging_mb=4", f"{PD}.staging_segment_mb=1"]


@contextmanager
def built(role: Role, *overrides: str, vocab_size: int = 512) -> Iterator[tuple[StagingEnd | None, ChecksumPool]]:
    topology = load_topology("pd_disagg_1p1d_local", [*SMALL, *overrides])
    router, instance = topology.dp_config.router, find_instance(topology, role, 0).config
    plan = plan_staging(router, role, instance)
    layout = checksum_layout(topology.cache.page_size, vocab_size)
    pool = ChecksumPool(layout, 8, 4, plan.pool_bytes if plan is not None else 0)
    (transport,) = wrap_transports([ShmTransport()], router, role, 0, instance, pool)
    try:
        yield transport.end if isinstance(transport, StagedTransport) else None, pool
    finally:
        transport.close()


def test_segments_of_d_lie_at_the_tail_of_its_pool_behind_the_aux_rows() -> None:
    with built(Role.DECODE, STAGED) as (parts, pool):
        assert parts is not None and isinstance(parts.copier, HostCopier)
        area = parts.area
        assert area is not None and area.is_in(pool)
        assert (area.segment_bytes, area.num_segments) == (1 << 20, 4)
        assert area.base >= pool.aux_base + pool.num_aux_slots * pool.aux_row_bytes
        assert area.address(3) + area.segment_bytes == pool.arena_base + pool.arena_bytes
        assert parts.scatterer is not None and parts.scatterer.owners == (0,)


def test_p_has_own_segments_only_where_its_transport_does_not_gather() -> None:
    with built(Role.PREFILL, STAGED) as (parts, _):
        assert parts is not None and parts.area is None and parts.scatterer is None
    with built(Role.PREFILL, STAGED, f"{PD}.transport=mooncake") as (parts, pool):
        assert parts is not None and parts.area is not None and parts.area.is_in(pool)


def test_nothing_is_built_where_every_write_is_direct() -> None:
    for overrides in ([], [f"{PD}.transport=mooncake"], [f"{PD}.transfer=direct"]):
        for role in (Role.PREFILL, Role.DECODE):
            with built(role, *overrides) as (parts, _):
                assert parts is None


def test_a_segment_that_holds_no_logits_row_is_refused_with_the_numbers() -> None:
    sentence = r"staging_segment_mb: 1048576 bytes hold no page .* 1200064 bytes"
    with pytest.raises(ConfigError, match=sentence), built(Role.DECODE, STAGED, vocab_size=300_000):
        pass


def test_a_gpu_needs_its_driver() -> None:
    cards = [f"dp_config.router.{kind}_schedulers.0.devices=[cuda:0]" for kind in ("prefill", "decode")]
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one")
    with pytest.raises(MissingDependency, match="NVIDIA driver"), built(Role.DECODE, *cards, f"{PD}.transport=shm"):
        pass


class NoDriver:
    """A driver that only remembers what is pinned."""

    def __init__(self) -> None:
        self.pinned: list[int] = []

    def is_device_memory(self, address: int, nbytes: int) -> bool:
        return False

    def pin(self, address: int, nbytes: int) -> int:
        if self.pinned:
            raise TransferFailed("pinned already")
        self.pinned.append(address)
        return address

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("is_pinned_late", [False, True])
def test_host_memory_is_pinned_at_the_start_only_where_it_will_be_used(is_pinned_late: bool) -> None:
    driver, pool = NoDriver(), ChecksumPool(checksum_layout(16, 512), 8, 4)
    arena = HostArena(1 << 13, driver)
    area = StagingArea(arena.base, 1 << 12, 2, arena.base, arena.nbytes)
    end = StagingEnd("auto", pool, HostCopier(), area, arena=arena, is_pinned_late=is_pinned_late)
    transports: list[Transport] = [StagedTransport(ShmTransport(), end), StagedTransport(ShmTransport(), end)]
    register_memory(pool, transports)
    assert driver.pinned == ([] if is_pinned_late else [arena.base]) and arena.is_pinned is not is_pinned_late
    assert arena.device_base() == arena.base, "once is enough"
    transports[0].close()
    transports[0].close()
    assert driver.pinned, "another transport still has it"
    transports[1].close()
    assert not driver.pinned


@pytest.mark.parametrize("text", ["x", "1:2", "-1:8:2", "0:0:2", f"{1 << 62}:{1 << 62}:2", "1:2:3:4"])
def test_a_session_whose_segments_make_no_sense_is_refused(text: str) -> None:
    with built(Role.DECODE, STAGED) as (theirs, pool), built(Role.PREFILL, STAGED) as (ours, own):
        assert theirs is not None and ours is not None
        d, p = StagedTransport(ShmTransport(), theirs), StagedTransport(ShmTransport(), ours)
        d.register(pool.arena_base, pool.arena_bytes)
        p.register(own.arena_base, own.arena_bytes)
        session = d.local_session()
        p.disconnect(p.connect(rank_memory(pool, 0, [session]), session))
        wrong = msgspec.structs.replace(session, attributes={**session.attributes, "segments": text})
        with pytest.raises(TransferFailed, match="segments"):
            p.connect(rank_memory(pool, 0, [wrong]), wrong)
        d.close()
        p.close()


# ----------------------------------------------------------------------------------------------------------------------
# Staging memory: segments, and the copies into and out of them.


class Later:
    """A `Ready` whose work is done when it is waited for."""

    def __init__(self, source: np.ndarray, value: int) -> None:
        self._source, self._value = source, value

    def synchronize(self) -> None:
        self._source[:] = self._value

    def wait(self, stream: object = None) -> None:
        raise AssertionError("host memory has no stream")


class ShiftedBlocks:
    """A stand-in for a device that knows host memory by other addresses; it shifts the addresses back."""

    def __init__(self, shift: int, lowest: int) -> None:
        self._shift, self._lowest = shift, lowest

    def copy(self, src_N, dst_N, length_N, after=()) -> None:
        back_src, back_dst = (np.where(a >= self._lowest, a - self._shift, a) for a in (src_N, dst_N))
        HostCopier().copy(CopyList(back_src.tolist(), back_dst.tolist(), length_N.tolist()), after)


class BrokenBlocks:
    def copy(self, src_N, dst_N, length_N, after=()) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Window:
    def __init__(self, memory: np.ndarray, device_base: int) -> None:
        self.base, self.nbytes = int(memory.ctypes.data), memory.nbytes
        self._device_base = device_base
        self.asked = 0

    def device_base(self) -> int:
        self.asked += 1
        return self._device_base


def test_segments_follow_each_other_and_stay_inside_the_arena() -> None:
    area = StagingArea(5096, 64, 3, arena_base=1000, arena_bytes=4096 + 192)
    assert [area.address(number) for number in range(3)] == [5096, 5160, 5224]
    assert area.nbytes == 192
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            area.address(wrong)


@pytest.mark.parametrize(("base", "segments"), [(999, 3), (5097, 3), (5096, 0), (5096, 4)])
def test_an_area_that_leaves_its_arena_is_refused(base: int, segments: int) -> None:
    with pytest.raises(ValueError, match="arena"):
        StagingArea(base, 64, segments, arena_base=1000, arena_bytes=4096 + 192)


def pieces(pool: np.ndarray, segment: np.ndarray, size: int, count: int, seed: int) -> tuple[CopyList, list[int]]:
    pages = random.Random(seed).sample(range(len(pool) // size), count)
    base, into = int(pool.ctypes.data), int(segment.ctypes.data)
    return CopyList([base + page * size for page in pages], [into + i * size for i in range(count)], [size] * count), (
        pages
    )


def test_gather_and_scatter_bring_every_page_to_its_place_and_touch_no_other() -> None:
    size, count = 96, 40
    rng = np.random.default_rng(0)
    own, theirs = rng.integers(0, 256, 100 * size, np.uint8), np.full(100 * size, 7, np.uint8)
    segment = np.zeros(count * size, np.uint8)
    gather, src_pages = pieces(own, segment, size, count, 1)
    scatter_back, dst_pages = pieces(theirs, segment, size, count, 2)
    scatter = CopyList(scatter_back.dst, scatter_back.src, scatter_back.length)
    copier = HostCopier()
    copier.copy(gather)
    copier.copy(scatter)
    expected = np.full((100, size), 7, np.uint8)
    expected[dst_pages] = own.reshape(100, size)[src_pages]
    assert (theirs.reshape(100, size) == expected).all()


def test_a_copy_waits_for_what_it_reads() -> None:
    source, target = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    copy = CopyList([int(source.ctypes.data)], [int(target.ctypes.data)], [64])
    HostCopier().copy(copy, [Later(source, 9)])
    assert (target == 9).all()


def test_host_copies_into_memory_that_is_not_there_are_an_error_and_no_crash() -> None:
    source = np.zeros(4096, np.uint8)
    base = int(source.ctypes.data)
    with pytest.raises(TransferFailed, match="pieces"):
        HostCopier().copy(CopyList([base, base + 8, base + 16], [4096, 8192, 12288], [8, 8, 8]))


def test_a_device_gets_the_addresses_by_which_it_knows_host_memory() -> None:
    shift = 1 << 50
    pool, host = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    window = Window(host, int(host.ctypes.data) + shift)
    copier = DeviceCopier(ShiftedBlocks(shift, shift), [window])
    inside, outside = int(host.ctypes.data), int(pool.ctypes.data)
    other = np.zeros(16, np.uint8)
    copier.copy(CopyList([outside], [int(other.ctypes.data)], [16]))
    assert window.asked == 0, "nothing is pinned for what does not go there"
    copier.copy(CopyList([outside + 128, outside], [inside, inside + 240], [100, 16]))
    assert (host[:100] == pool[128:228]).all() and (host[240:] == pool[:16]).all()
    copier.copy(CopyList([inside + 240], [outside + 64], [16]))
    assert (pool[64:80] == pool[:16]).all()
    assert window.asked == 2


def test_a_device_that_fails_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed, match="illegal memory access"):
        DeviceCopier(BrokenBlocks()).copy(CopyList([1], [2], [3]))


# ----------------------------------------------------------------------------------------------------------------------
# Which instances have staging memory, where and how much, and the error if it is too little.


CARDS = [f"dp_config.router.{kind}_schedulers.0.devices=[cuda:0]" for kind in ("prefill", "decode")]
HOSTS = [
    f"dp_config.router.{key}=10.0.0.1" for key in ("host", "prefill_schedulers.0.host", "decode_schedulers.0.host")
]
MIB = 1 << 20


def plans(*overrides: str) -> tuple[StagingPlan | None, StagingPlan | None]:
    """Return the plans of P0 and D0 of a 1P1D."""
    topology = load_topology("pd_disagg_1p1d_local", list(overrides))
    of_p, of_d = (
        plan_staging(topology.dp_config.router, role, find_instance(topology, role, 0).config)
        for role in (Role.PREFILL, Role.DECODE)
    )
    return of_p, of_d


def places(*overrides: str) -> tuple[str, str]:
    of_p, of_d = plans(*overrides)
    return of_p.place if of_p else "none", of_d.place if of_d else "none"


def test_by_default_an_instance_with_its_pages_in_host_memory_has_none() -> None:
    for transport in ("auto", "shm", "mooncake", "nixl"):
        assert places(f"{PD}.transport={transport}") == ("none", "none")
    assert places(*HOSTS) == ("none", "none")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # One machine: cuda_ipc, or shm through D's host memory, into which P gathers by itself.
        ([], ("none", "host")),
        ([f"{PD}.transport=shm"], ("none", "host")),
        ([f"{PD}.transport=cuda_ipc"], ("none", "none")),
        ([f"{PD}.transport=cuda_ipc", f"{PD}.transfer=staged"], ("none", "pool")),
        ([f"{PD}.transfer=staged"], ("none", "pool")),
        ([f"{PD}.transport=shm", f"{PD}.transfer=staged"], ("none", "host")),
        # Mooncake over TCP sends from host memory anyway; RDMA and UCX read the GPU's.
        (HOSTS, ("host", "host")),
        ([f"{PD}.transport=mooncake"], ("host", "host")),
        ([f"{PD}.transport=mooncake", f"{PD}.mooncake_protocol=rdma"], ("pool", "pool")),
        ([*HOSTS, f"{PD}.mooncake_protocol=rdma"], ("pool", "pool")),
        ([f"{PD}.mooncake_protocol=rdma"], ("none", "host")),
        ([f"{PD}.transport=nixl"], ("pool", "pool")),
        ([f"{PD}.transport=nixl", f"{PD}.transfer=direct"], ("none", "none")),
    ],
)
def test_where_the_segments_of_gpus_are(overrides: list[str], expected: tuple[str, str]) -> None:
    assert places(*CARDS, *overrides) == expected


def test_staged_on_request_is_in_the_arena_of_a_pool_in_host_memory() -> None:
    assert places(f"{PD}.transfer=staged") == ("none", "pool"), "shm gathers by itself"
    of_p, of_d = plans(f"{PD}.transfer=staged", f"{PD}.transport=mooncake", f"{PD}.staging_mb=70")
    assert of_p == of_d == StagingPlan("pool", 16 * MIB, 4)
    assert of_d is not None and (of_d.nbytes, of_d.pool_bytes) == (64 * MIB, 64 * MIB)
    assert StagingPlan("host", MIB, 4).pool_bytes == 0


def test_several_ranks_are_never_staged() -> None:
    two = ["dp_config.router.decode_schedulers.0.tp_size=2", "dp_config.router.decode_schedulers.0.devices=[cpu,cpu]"]
    assert places(*two, f"{PD}.transfer=staged", f"{PD}.transport=mooncake") == ("pool", "none")
    no_p = [text.replace("decode", "prefill") for text in two]
    assert places(*no_p, f"{PD}.transfer=staged", f"{PD}.transport=mooncake") == ("none", "none")


def test_staged_on_request_with_several_ranks_is_a_sentence_and_auto_is_not() -> None:
    two = ["dp_config.router.decode_schedulers.0.tp_size=2", "dp_config.router.decode_schedulers.0.devices=[cpu,cpu]"]
    topology = load_topology("pd_disagg_1p1d_local", [*two, f"{PD}.transfer=staged"])
    (sentence,) = problems(topology, need_model=False)
    assert "transfer is staged, but a decode instance has tp_size 2" in sentence
    assert not list(problems(load_topology("pd_disagg_1p1d_local", [*two, f"{PD}.transfer=auto"]), need_model=False))


def test_too_few_segments_for_all_p_are_a_sentence_with_the_numbers() -> None:
    def found(*overrides: str) -> list[str]:
        topology = load_topology("pd_disagg_1p1d_local", list(overrides))
        return list(problems(topology, need_model=False))

    staged = [f"{PD}.transfer=staged", f"{PD}.staging_segment_mb=16"]
    assert found(*staged, f"{PD}.staging_mb=32") == []
    (sentence,) = found(*staged, f"{PD}.staging_mb=31")
    assert "1 segments of 16 MiB" in sentence and "each of 1 P needs 2" in sentence and "32 MiB" in sentence
    topology = load_topology("pd_disagg_2p2d_multi_node", [*staged, f"{PD}.staging_mb=48"])
    assert any("3 segments" in text and "each of 2 P" in text for text in problems(topology, need_model=False))
    assert found(f"{PD}.staging_mb=1") == [], "nobody needs it"


# ----------------------------------------------------------------------------------------------------------------------
# How a write is cut into groups, and how a group lies in a segment.


def bytes_of(copies: CopyList) -> list[tuple[int, int]]:
    """Return source and destination of each byte, in order."""
    return [(src + i, dst + i) for src, dst, length in zip(*copies, strict=True) for i in range(length)]


def test_pieces_lie_behind_each_other_in_their_order_without_gaps() -> None:
    copies = packed(CopyList([1000, 50, 7], [5, 6, 7], [10, 20, 5]), 9000)
    assert (list(copies.src), list(copies.dst), list(copies.length)) == ([1000, 50, 7], [9000, 9010, 9030], [10, 20, 5])


@pytest.mark.parametrize("nbytes", [1, 3, 8, 16, 17, 100, 10_000])
def test_groups_cover_each_byte_once_in_order_and_fit_a_segment(nbytes: int) -> None:
    rng = random.Random(nbytes)
    lengths = [rng.choice([1, 4, 8, 16, 40]) for _ in range(30)]
    src, dst = ([rng.randrange(1 << 40) for _ in lengths] for _ in range(2))
    copies = CopyList(src, dst, lengths)
    groups = list(groups_of(copies, nbytes))
    assert [pair for group in groups for pair in bytes_of(group)] == bytes_of(copies)
    assert all(0 < group.nbytes <= nbytes for group in groups)
    if nbytes >= max(lengths):
        assert sum(len(group.src) for group in groups) == len(lengths), "no piece is cut that fits"


def test_nothing_is_no_group() -> None:
    assert list(groups_of(CopyList([], [], []), 8)) == []


@pytest.mark.parametrize(
    ("num_segments", "owners", "rank", "share"),
    [
        (4, [0], 0, range(0, 4)),
        (5, [0, 1], 0, range(0, 2)),
        (5, [1, 0], 1, range(2, 4)),
        (8, [0, 2], 2, range(4, 8)),
        (8, [0, 2], 1, range(0)),
        (1, [0, 1], 1, range(1, 1)),
        (8, [], 0, range(0)),
    ],
)
def test_the_segments_of_a_d_are_shared_out_by_engine_rank(
    num_segments: int, owners: list[int], rank: int, share: range
) -> None:
    assert share_of(num_segments, owners, rank) == share


# ----------------------------------------------------------------------------------------------------------------------
# Which writes are staged if both ways are open: a table, tested at its borders and beyond.


def test_a_write_is_staged_from_its_number_of_pieces_on_while_they_are_small() -> None:
    threshold = StagedFrom(pieces=10, piece_bytes=100)
    assert not threshold.is_met(9, 9)
    assert threshold.is_met(10, 10) and threshold.is_met(10, 1000)
    assert not threshold.is_met(10, 1001), "100.1 bytes in the mean"
    assert not NEVER.is_met(1 << 40, 1)


@pytest.mark.parametrize(
    ("transport", "device", "protocol", "expected"),
    [
        ("mooncake", "cpu", "tcp", STAGED_FROM["mooncake", "tcp", "cpu"]),
        ("mooncake", "cuda:1", "tcp", STAGED_FROM["mooncake", "tcp", "cuda"]),
        ("mooncake", "cuda:0", "rdma", OTHERS),
        ("nixl", "cuda:0", "rdma", STAGED_FROM["nixl", "", "cuda"]),
        ("cuda_ipc", "cuda:0", "tcp", NEVER),
        ("shm", "cpu", "tcp", NEVER),
        ("new", "cpu", "tcp", OTHERS),
    ],
)
def test_the_entry_is_that_of_the_transport_its_protocol_and_the_kind_of_memory(
    transport: str, device: str, protocol: str, expected: StagedFrom
) -> None:
    assert staged_from(transport, device, protocol) == expected
