"""Staged transfers on a card: gather and scatter through pinned host memory and through the pool's own tail. 1P1D gives
the tokens of an undivided instance either way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from completions import complete_all, instance_loads, is_whole
from pin_twin import SecondMappings
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.shard_writer import pair_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.cuda_ipc import PinDriver
from chitu.kv_transfer.transports.segments import DeviceCopier, HostArena, StagingArea, area_of
from chitu.kv_transfer.transports.staged import groups_of, packed
from chitu.kv_transfer.transports.transport import CopyList
from chitu.launch.local import LocalCluster
from chitu.ops.cuda_driver import CudaDriver
from chitu.ops.kernels.blocks import BlockCopier
from chitu.protocol import KVLayout
from chitu.tools.make_model import make_model

LAYOUT = KVLayout.uniform(
    "test", num_layers=3, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32", vocab_size=1000
)
SEGMENT_BYTES = 1 << 20


def new_pool(card, seed: int) -> KVPool:
    pool = KVPool(LAYOUT, card.size(400, 40), 2, str(card.device), transfer_bytes=2 * SEGMENT_BYTES)
    generator = torch.Generator().manual_seed(seed)
    for region in pool.regions:
        region.copy_(torch.randn(region.shape, generator=generator))
    pool.aux.copy_(torch.randint(0, 255, pool.aux.shape, generator=generator).to(torch.uint8))
    return pool


def through_a_segment(copier: DeviceCopier, copies: CopyList, segment: int) -> None:
    for group in groups_of(copies, SEGMENT_BYTES):
        gathered = packed(group, segment)
        copier.copy(gathered)
        copier.copy(CopyList(gathered.dst, group.dst, group.length))


@pytest.mark.parametrize("place", ["host", "pool"])
def test_pages_and_a_row_come_through_a_segment_as_they_were(card, place):
    """Does what P and D do, within one process, with the host memory's address on the device."""
    prefill, decode = new_pool(card, 1), new_pool(card, 2)
    driver: PinDriver = SecondMappings() if card.is_twin else CudaDriver(card.device.index or 0)
    arena = HostArena(2 * SEGMENT_BYTES, driver)
    area = area_of(decode, decode.transfer_base, SEGMENT_BYTES, 2)
    if place == "host":
        area = StagingArea(arena.base, SEGMENT_BYTES, 2, arena.base, arena.nbytes)
    copier = DeviceCopier(BlockCopier(card.device), [arena])
    source = random.Random(3)
    count = card.size(100, 6)
    own, theirs = (source.sample(range(prefill.num_pages), count) for _ in range(2))
    expected = [region.clone() for region in decode.regions]
    for layers in (range(2), range(2, 3)):
        for region in range(2 * layers.start, 2 * layers.stop):
            expected[region][theirs] = prefill.regions[region][own]
        through_a_segment(
            copier,
            plan_page_copies(pair_regions(prefill, decode), own, theirs, LAYOUT.regions_of(layers)),
            area.address(layers.start % 2),
        )
    through_a_segment(copier, plan_aux_copy(prefill, decode, 1, 0), area.address(1))
    for found, wanted in zip(decode.regions, expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(decode.aux[0], prefill.aux[1])
    assert arena.is_pinned == (place == "host")
    arena.close()


def test_the_driver_tells_device_memory_from_the_host_s(card):
    if card.is_twin:
        pytest.skip("a driver is asked")
    driver, pool, host = CudaDriver(card.device.index or 0), new_pool(card, 1), torch.zeros(4096)
    assert driver.is_device_memory(pool.arena_base, pool.arena_bytes)
    assert not driver.is_device_memory(host.data_ptr(), 4096)
    arena = HostArena(1 << 20, driver)
    arena.device_base()
    assert not driver.is_device_memory(arena.base, 4096), "pinned memory is the host's"
    arena.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "m", "qwen3", head_dim=64, dtype="float32")


@contextmanager
def cluster_of(card, model: Path, topology: str, *overrides: str) -> Iterator[LocalCluster]:
    sections = ("unified",) if "unified" in topology else ("prefill", "decode")
    devices = [f"dp_config.router.{section}_schedulers.0.devices=[{card.device}]" for section in sections]
    own = [f"model.path={model}", "model.served_name=m", "model.dtype=float32", "cache.num_pages=600"]
    sizes = ["scheduler.max_running_requests=8", "scheduler.chunk_size=100"]
    with LocalCluster(load_topology(topology, [*own, *sizes, *devices, *overrides])) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.mark.on_card
@pytest.mark.timeout(420)  # three clusters, the first of which may compile its kernels
def test_tokens_do_not_depend_on_the_way_that_kv_takes(card, model):
    """Compares `shm` (on a card it uses pinned host memory, whatever `transfer` says) with staging through the best
    transport here; verify_kv checks every page after its scatter."""
    source = random.Random(1)
    sizes = [source.randint(1, card.size(1500, 150)) for _ in range(card.size(16, 4))]
    prompts = [[source.randrange(10, 500) for _ in range(size)] for size in sizes]
    options = [{"max_tokens": 8, "temperature": 0, "ignore_eos": True}] * len(prompts)
    with cluster_of(card, model, "unified_local") as unified:
        expected = [answer.token_ids for answer in complete_all(unified.url, prompts, options)]
    pd = "dp_config.router.pd_disaggregation"
    for transport in dict.fromkeys(["shm", card.transport]):
        ways = [f"{pd}.transport={transport}", f"{pd}.transfer=staged", f"{pd}.verify_kv=all"]
        sizes_of = [f"{pd}.staging_mb=8", f"{pd}.staging_segment_mb=1"]
        with cluster_of(card, model, "pd_disagg_1p1d_local", *ways, *sizes_of) as cluster:
            found = [answer.token_ids for answer in complete_all(cluster.url, prompts, options)]
            assert found == expected, transport

            def is_at_rest(cluster: LocalCluster = cluster) -> bool:
                loads = instance_loads(cluster.url)
                return len(loads) == 2 and all(is_whole(load) for load in loads.values())

            wait_until(is_at_rest, 10, lambda cluster=cluster: instance_loads(cluster.url))
