"""Staging as an instance gets it: copier, segments, and who may write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chitu.config.load import load_topology
from chitu.config.staging import plan_staging
from chitu.config.topology import find_instance
from chitu.errors import ConfigError, MissingDependency, TransferFailed
from chitu.kv_transfer.staging.area import Staging, StagingArea
from chitu.kv_transfer.staging.build import StagingParts, build_staging
from chitu.kv_transfer.staging.copier import HostCopier
from chitu.kv_transfer.staging.host_area import HostArena
from chitu.protocol import TransportSession
from chitu.testing.checksum_engine import ChecksumPool, checksum_layout
from chitu.types import Role

PD = "dp_config.router.pd_disaggregation"
STAGED = f"{PD}.transfer=staged"
SMALL = [f"{PD}.staging_mb=4", f"{PD}.staging_segment_mb=1"]


@contextmanager
def built(role: Role, *overrides: str, vocab_size: int = 512) -> Iterator[tuple[StagingParts | None, ChecksumPool]]:
    topology = load_topology("pd_disagg_1p1d_local", [*SMALL, *overrides])
    router, instance = topology.dp_config.router, find_instance(topology, role, 0).config
    plan = plan_staging(router, role, instance)
    layout = checksum_layout(topology.cache.page_size, vocab_size)
    pool = ChecksumPool(layout, 8, 4, plan.pool_bytes if plan is not None else 0)
    try:
        yield build_staging(router, role, instance, pool), pool
    finally:
        pool.close()


def test_segments_of_d_lie_at_the_tail_of_its_pool_behind_the_aux_rows() -> None:
    with built(Role.DECODE, STAGED) as (parts, pool):
        assert parts is not None and isinstance(parts.staging.copier, HostCopier)
        area = parts.staging.area
        assert area is not None and area.is_in(pool)
        assert (area.segment_bytes, area.num_segments) == (1 << 20, 4)
        assert area.base >= pool.aux_base + pool.num_aux_slots * pool.aux_row_bytes
        assert area.address(3) + area.segment_bytes == pool.arena_base + pool.arena_bytes
        assert parts.prefills == (0,)


def test_p_has_own_segments_only_where_its_transport_does_not_gather() -> None:
    with built(Role.PREFILL, STAGED) as (parts, _):
        assert parts is not None and parts.staging.area is None and parts.prefills == ()
    with built(Role.PREFILL, STAGED, f"{PD}.transport=mooncake") as (parts, pool):
        assert parts is not None and parts.staging.area is not None and parts.staging.area.is_in(pool)


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
    """What is pinned is remembered, nothing else."""

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


def parts_of(way: str, num_granted: int, num_prefills: int, driver: NoDriver | None = None) -> StagingParts:
    arena = HostArena(1 << 13, driver or NoDriver())
    area = StagingArea(arena.base, 1 << 12, 2, arena.base, arena.nbytes)
    return StagingParts(Staging(way, HostCopier(), area), arena, tuple(range(num_granted)), num_prefills)  # type: ignore[arg-type]


PAGES = TransportSession("mooncake", "x")
SEGMENTS = TransportSession("shm", "x", {"memory": "staging"})


@pytest.mark.parametrize(
    ("way", "granted", "prefills", "sessions", "expected"),
    [
        ("staged", 2, 2, [PAGES], True),
        ("staged", 1, 2, [PAGES], False),  # the other P has several ranks, and writes to pages
        ("auto", 2, 2, [PAGES], False),
        ("auto", 2, 2, [SEGMENTS], True),
        ("auto", 2, 2, [SEGMENTS, PAGES], False),
    ],
)
def test_segments_are_required_where_nobody_writes_to_pages(
    way: str, granted: int, prefills: int, sessions: list[TransportSession], expected: bool
) -> None:
    parts = parts_of(way, granted, prefills)
    assert parts.is_required(sessions) is expected
    parts.close()


def test_host_memory_is_pinned_at_the_start_only_where_it_will_be_used() -> None:
    driver = NoDriver()
    parts = parts_of("auto", 1, 1, driver)
    assert parts.arena is not None
    parts.pin([TransportSession("cuda_ipc", "x"), SEGMENTS])
    assert not driver.pinned and not parts.arena.is_pinned
    parts.pin([SEGMENTS, PAGES])
    assert driver.pinned == [parts.arena.base] and parts.arena.is_pinned
    assert parts.arena.device_base() == parts.arena.base, "once is enough"
    parts.close()
    parts.close()
    assert not driver.pinned
