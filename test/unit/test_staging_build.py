"""Staging as an instance gets it: copier, segments, and which processes may write to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from chitu.config.load import load_topology
from chitu.config.staging import plan_staging
from chitu.config.topology import find_instance
from chitu.errors import ConfigError, MissingDependency, TransferFailed
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.transports.local import register_memory, wrap_transports
from chitu.kv_transfer.transports.segments import HostArena, HostCopier, StagingArea
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd
from chitu.kv_transfer.transports.transport import Transport
from chitu.testing.checksum_engine import ChecksumPool, checksum_layout
from chitu.types import Role

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
